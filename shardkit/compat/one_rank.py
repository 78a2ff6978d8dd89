"""Detects calls that only the main process executes: inside `if accelerator.is_main_process:`, or after `if not
accelerator.is_main_process: return`.

Scripts for Accelerate call save_state there, which works if every rank has the whole state. In shardkit saves are
collective. Rank 0 cannot observe that the other ranks will not call it, so the script's source is inspected.
"""

import ast
import linecache
from functools import cache
from types import FrameType

from shardkit.compat import branches, rank_conditions
from shardkit.compat.branches import Span
from shardkit.compat.rank_conditions import Conditions, Source
from shardkit.runtime import process_control


def place_of_one_rank(frame: FrameType | None, call: str) -> str | None:
    """file:line of the condition that lets only one rank reach this frame's call, or one of its callers; None if all
    ranks reach it."""
    while frame is not None:
        if frame.f_code is _of_one_rank:
            return "on_main_process"
        source = _source(frame.f_code.co_filename)
        if source is not None:
            test = Conditions(source, frame).alone(_path(source.tree, frame), call)
            if test is not None:
                return f"{frame.f_code.co_filename}:{test.lineno}"
        call, frame = frame.f_code.co_name, frame.f_back
    return None


_of_one_rank = next(one for one in process_control.only.__code__.co_consts if getattr(one, "co_name", "") == "called")


@cache
def _source(file: str) -> Source | None:
    """The file; None without a word about ranks, or if it cannot be parsed."""
    text = "".join(linecache.getlines(file))
    if not any(word in text for word in rank_conditions.WORDS):
        return None
    try:
        return rank_conditions.source_of(ast.parse(text))
    except SyntaxError:
        return None


def _path(tree: ast.Module, frame: FrameType) -> list[ast.AST]:
    """The nodes around what the frame executes. Before Python 3.11 only its line is known."""
    if hasattr(frame.f_code, "co_positions"):
        first, last, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if None not in (first, last, begin, end):
            place: Span = (first, begin, last, end)  # type: ignore[assignment]
            return branches.path_to(tree, place)
    return branches.path_to(tree, (frame.f_lineno, 0, frame.f_lineno, 0), knows_columns=False)

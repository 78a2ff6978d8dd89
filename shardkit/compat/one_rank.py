"""Detects calls that only the main process executes: inside `if accelerator.is_main_process:`.

Scripts for Accelerate call save_state there, which works if every rank has the whole state. In shardkit saves are
collective. Rank 0 cannot observe that the other ranks will not call it, so the script's source is inspected.
"""

import ast
import linecache
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from shardkit.runtime import process_control

_FLAGS = {"is_main_process", "is_local_main_process"}
_NUMBERS = {"process_index", "local_process_index", "rank", "local_rank", "global_rank"}
# Parts of a condition that can be evaluated without side effects: no calls, no subscripts.
_QUIET = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.Set, ast.Tuple, ast.List, ast.UnaryOp, ast.BoolOp),
    *(ast.expr_context, ast.cmpop, ast.unaryop, ast.boolop),
)


def place_of_one_rank(frame: FrameType | None) -> str | None:
    """file:line of the condition that lets only the main process reach this frame or one of its callers; None if all
    ranks reach it."""
    while frame is not None:
        if frame.f_code is _of_one_rank:
            return "on_main_process"
        for condition, begin, end in _conditions(frame.f_code.co_filename):
            if begin <= frame.f_lineno <= end and _is_false_elsewhere(condition, frame):
                return f"{frame.f_code.co_filename}:{condition.lineno}"
        frame = frame.f_back
    return None


_of_one_rank = next(one for one in process_control.only.__code__.co_consts if getattr(one, "co_name", "") == "called")


@cache
def _conditions(file: str) -> list[tuple[ast.expr, int, int]]:
    """(condition, first line, last line of its body) of every `if` in a file that mentions ranks."""
    text = "".join(linecache.getlines(file))
    if not any(word in text for word in _FLAGS | _NUMBERS):
        return []
    return list(_read(text))


def _read(text: str) -> Iterator[tuple[ast.expr, int, int]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            yield node.test, *_lines(node.body)
            if node.orelse and isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
                yield node.test.operand, *_lines(node.orelse)


def _lines(body: list[ast.stmt]) -> tuple[int, int]:
    return body[0].lineno, body[-1].end_lineno or body[-1].lineno


def _is_false_elsewhere(condition: ast.expr, frame: FrameType) -> bool:
    """Whether the condition, which is true here, is certainly false on other ranks."""
    match condition:
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in _FLAGS:
            return True
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            return getattr(left, "attr", getattr(left, "id", "")) in _NUMBERS
        case ast.BoolOp(op=ast.And(), values=parts):
            return any(_is_false_elsewhere(part, frame) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return all(_is_false_elsewhere(part, frame) or _is_false(part, frame) for part in parts)
    return False


def _is_false(condition: ast.expr, frame: FrameType) -> bool:
    """Whether a condition without calls is false here, and so on all ranks, since it does not depend on the rank."""
    if not all(isinstance(node, _QUIET) for node in ast.walk(condition)):
        return False
    known: dict[str, Any] = {**frame.f_globals, **frame.f_locals}
    try:
        return not eval(compile(ast.Expression(condition), "<condition>", "eval"), known)
    except Exception:  # it cannot be evaluated, so its value is unknown
        return False

"""Detects calls that only the main process executes: inside `if accelerator.is_main_process:`, or after `if not
accelerator.is_main_process: return`.

Scripts for Accelerate call save_state there, which works if every rank has the whole state. In shardkit saves are
collective. Rank 0 cannot observe that the other ranks will not call it, so the script's source is inspected.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import FrameType

from shardkit.compat import rank_conditions
from shardkit.compat.rank_conditions import Conditions, Source
from shardkit.runtime import process_control

Span = tuple[int, int, int, int]
"""Lines and columns: first line, its column, last line, its column."""


def place_of_one_rank(frame: FrameType | None, call: str) -> str | None:
    """file:line of the condition that lets only one rank reach this frame's call, or one of its callers; None if all
    ranks reach it."""
    while frame is not None:
        if frame.f_code is _of_one_rank:
            return "on_main_process"
        source = _source(frame.f_code.co_filename)
        if source is not None:
            conditions = Conditions(source, frame)
            for test, value, others in _on_the_way(_path(source.tree, frame)):
                if not _call(others, call) and conditions.is_of_one_rank(test, value):
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
    """The nodes around what the frame executes, from the file to the innermost one. Before Python 3.11 to the
    statement: only the line is known."""
    place: Span = (frame.f_lineno, 0, frame.f_lineno, 0)
    knows_columns = hasattr(frame.f_code, "co_positions")
    if knows_columns:
        found = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if None not in found:
            first, last, begin, end = found
            place = (first, begin, last, end)  # type: ignore[assignment]
        else:
            knows_columns = False
    path: list[ast.AST] = [tree]
    while (
        inner := next((one for one in _children(path[-1]) if _is_around(one, place, knows_columns)), None)
    ) is not None:
        path.append(inner)
    return path


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside that have a place in the file."""
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:
            yield from _children(child)


def _is_around(node: ast.AST, place: Span, knows_columns: bool) -> bool:
    first, begin, last, end = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
    if not knows_columns:
        return isinstance(node, (ast.stmt, ast.ExceptHandler)) and first <= place[0] <= last
    return (first, begin) <= place[:2] and place[2:] <= (last, end)


Condition = tuple[ast.expr, bool, Sequence[ast.AST]]
"""(an expression, its value here, what ranks with the other value execute instead)."""


def _on_the_way(path: list[ast.AST]) -> Iterator[Condition]:
    """The conditions that have let this rank come here."""
    after: list[ast.stmt] = []
    for outer, inner in pairwise(path):
        block = next((b for b in _blocks(outer) if any(one is inner for one in b)), [])
        position = next((number for number, one in enumerate(block) if one is inner), 0)
        for earlier in block[:position]:
            if isinstance(earlier, ast.If) and _leaves(earlier.body):
                yield earlier.test, False, earlier.body
            elif isinstance(earlier, ast.If) and _leaves(earlier.orelse):
                yield earlier.test, True, earlier.orelse
        match outer:
            case ast.If(test=test, body=body, orelse=orelse) if block:
                yield test, block is body, [*(orelse if block is body else body), *(after if _leaves(block) else [])]
            case ast.While(test=test, body=body) if block is body:
                yield test, True, []
            case ast.IfExp(test=test, body=body, orelse=orelse) if inner is not test:
                yield test, inner is body, [orelse if inner is body else body]
            case ast.BoolOp(op=op, values=values):
                for value in values[: next(number for number, one in enumerate(values) if one is inner)]:
                    yield value, isinstance(op, ast.And), []
            case ast.ListComp(generators=loops) | ast.SetComp(generators=loops) | ast.GeneratorExp(generators=loops):
                yield from ((test, True, []) for loop in loops for test in loop.ifs if test is not inner)
        after = block[position + 1 :]


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a node."""
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list):
            yield found


def _leaves(block: list[ast.stmt]) -> bool:
    """Whether what follows the block is not executed after it."""
    match block[-1:]:
        case [ast.Return() | ast.Raise() | ast.Continue() | ast.Break()]:
            return True
        case [ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)))]:
            return name in ("exit", "quit", "_exit")
        case [ast.If(body=body, orelse=orelse)]:
            return _leaves(body) and _leaves(orelse)
    return False


def _call(nodes: Iterable[ast.AST], name: str) -> bool:
    """Whether these call a function of this name."""
    calls = [part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(getattr(one.func, "attr", getattr(one.func, "id", "")) == name for one in calls)

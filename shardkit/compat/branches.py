"""The conditions of a script's source that let a rank come to a place in it."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile

Span = tuple[int, int, int, int]
"""Lines and columns: first line, its column, last line, its column."""
Condition = tuple[ast.expr, bool, Sequence[ast.AST]]
"""(an expression, its value here, what ranks with the other value execute instead)."""


def place_of(node: ast.expr) -> Span:
    """Where an expression is in its file."""
    return node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def path_to(tree: ast.Module, place: Span, knows_columns: bool = True) -> list[ast.AST]:
    """The nodes around a place, from the file to the innermost one. Without columns to the statement."""
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


def conditions_met(path: list[ast.AST]) -> Iterator[Condition]:
    """The conditions that have let this rank come to the end of the path, from the outermost on."""
    after: list[ast.stmt] = []
    for outer, inner in pairwise(path):
        block = next((b for b in _blocks(outer) if any(one is inner for one in b)), [])
        position = next((number for number, one in enumerate(block) if one is inner), 0)
        yield from _not_left_at(block[:position])
        yield from _entered(outer, inner, block, after)
        after = block[position + 1 :]


def _not_left_at(statements: Iterable[ast.stmt]) -> Iterator[Condition]:
    """The conditions of the statements by which others have left the block, as `if not is_main: return`."""
    for one in statements:
        if isinstance(one, ast.If) and _leaves(one.body):
            yield one.test, False, one.body
        elif isinstance(one, ast.If) and _leaves(one.orelse):
            yield one.test, True, one.orelse


def _entered(outer: ast.AST, inner: ast.AST, block: list[ast.stmt], after: list[ast.stmt]) -> Iterator[Condition]:
    """The conditions of a node by which `inner`, in its `block` if it is a statement, is executed. `after`: the
    statements behind the node, which ranks that leave the block do not execute."""
    match outer:
        case ast.If(test=test, body=body, orelse=orelse) if block:
            yield test, block is body, [*(orelse if block is body else body), *(after if _leaves(block) else [])]
        case ast.While(test=test, body=body) if block is body:
            yield test, True, []
        case ast.IfExp(test=test, body=body, orelse=orelse) if inner is not test:
            yield test, inner is body, [orelse if inner is body else body]
        case ast.BoolOp(op=op, values=values):
            for value in takewhile(lambda one: one is not inner, values):
                yield value, isinstance(op, ast.And), []
        case ast.ListComp(generators=loops) | ast.SetComp(generators=loops) | ast.GeneratorExp(generators=loops):
            yield from ((test, True, []) for loop in loops for test in loop.ifs if test is not inner)


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


def calls(nodes: Iterable[ast.AST], name: str) -> bool:
    """Whether these call a function of this name."""
    parts = (part for node in nodes for part in ast.walk(node))
    return any(isinstance(part, ast.Call) and called(part) == name for part in parts)


def called(node: ast.Call) -> str:
    """The last part of the name of the function that is called; empty where it has none."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))

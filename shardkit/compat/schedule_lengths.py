"""Lines of a script that count the steps of a schedule as Accelerate's scheduler takes them: once on each rank."""

import ast
from collections.abc import Iterable, Iterator

from shardkit.compat.bindings import Bindings, dotted, name_of

_DIVISIONS = (ast.Div, ast.FloorDiv)
_OF_TORCH = ("LR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau")
"""How the names of torch's schedules end that have no `sched` in them, imported without their module."""


def stretched(tree: ast.Module) -> list[int]:
    """Lines in which the length of a schedule is multiplied by the number of ranks."""
    nodes = list(ast.walk(tree))
    given = list(_of_schedules(nodes))
    assigned = (node.value for node in nodes if isinstance(node, ast.Assign) and _is_for_schedule(node))
    factors = [one for value in [*given, *assigned] for one in _factors(value)]
    # A function of the step divides it by the length.
    factors += [one for function in _functions_in(given, nodes) for one in ast.walk(function)]
    return sorted({one.lineno for one in factors if isinstance(one, ast.BinOp) and _multiplies_by_ranks(one)})


def _functions_in(values: Iterable[ast.expr], nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The lambdas in these expressions, and the functions of the file that they name."""
    parts = [part for value in values for part in ast.walk(value)]
    named = {part.id for part in parts if isinstance(part, ast.Name)}
    yield from (part for part in parts if isinstance(part, ast.Lambda))
    yield from (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in named)


def _factors(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression without those of its divisors."""
    yield node
    divisor = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, _DIVISIONS) else None
    for child in ast.iter_child_nodes(node):
        if child is not divisor:
            yield from _factors(child)


def _is_for_schedule(node: ast.Assign) -> bool:
    """Whether its name is that of a schedule's number of steps, such as `lr_warmup_steps`."""
    named = [name_of(target) for target in node.targets]
    words = ("warmup", "scheduler", "lr_")
    return any("steps" in name and any(word in name for word in words) for name in named)


def _multiplies_by_ranks(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Mult) and (_is_ranks(node.left) or _is_ranks(node.right))


def _divides_by_ranks(node: ast.BinOp) -> bool:
    return isinstance(node.op, _DIVISIONS) and any(map(_is_ranks, ast.walk(node.right)))


def _is_ranks(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and dotted(node)[-1:] in (["num_processes"], ["world_size"])


def lengths_over_all_ranks(tree: ast.Module, bound: Bindings) -> list[tuple[int, str]]:
    """(line, `len(loader)`) for the loaders that are prepared later, by a script that prepares a schedule as well and
    nowhere divides by the number of ranks. With split_batches both lengths are the same."""
    nodes = list(ast.walk(tree))
    divides = any(isinstance(node, ast.BinOp) and _divides_by_ranks(node) for node in nodes)
    if divides or any(isinstance(node, ast.keyword) and node.arg == "split_batches" for node in nodes):
        return []
    scopes = [node for node in nodes if isinstance(node, (ast.Module, ast.FunctionDef))]
    return sorted({found for scope in scopes for found in _lengths_before_prepare(list(_own_nodes(scope)), bound)})


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of the functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _own_nodes(node)


def _lengths_before_prepare(nodes: list[ast.AST], bound: Bindings) -> Iterator[tuple[int, str]]:
    prepared: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and is_prepare(node.func, bound):
            prepared.update({name_of(given): node.lineno for given in node.args})
    if not schedules(nodes) & {*prepared}:
        return
    values = [*_of_schedules(nodes), *(node.value for node in nodes if isinstance(node, ast.Assign))]
    for node in (each for value in values for each in ast.walk(value)):
        if isinstance(node, ast.Call) and dotted(node.func) == ["len"] and node.args:
            name = name_of(node.args[0])
            if node.lineno < prepared.get(name, 0):
                yield node.lineno, f"len({name})"


def is_prepare(node: ast.expr, bound: Bindings) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "prepare" and bound.is_accelerator(node.value)


def _is_schedule(node: ast.expr) -> bool:
    name = name_of(node)
    return "sched" in name.lower() or name.endswith(_OF_TORCH)


def schedules(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of schedules: by the name itself, or by the call that makes it."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)):
            found |= {name for name in names_of([node]) if "sched" in name.lower()}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_schedule(node.value.func):
            found |= names_of(node.targets)
    return found


def names_of(nodes: Iterable[ast.expr]) -> set[str]:
    return {name_of(node) for node in nodes} - {""}


def _of_schedules(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is given to the functions and classes that make a schedule."""
    for node in nodes:
        if isinstance(node, ast.Call) and _is_schedule(node.func):
            yield from node.args
            yield from (keyword.value for keyword in node.keywords)

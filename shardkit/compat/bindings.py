"""What the names in a script's source are bound to: modules and names of Accelerate, and Accelerators.

Scopes are ignored: a name is the same thing in the whole file.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardkit.compat import names


@dataclass
class Bindings:
    """The names of one file."""

    modules: dict[str, str] = field(default_factory=dict)
    """{name in the file: module below accelerate}."""
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{name in the file: (module below accelerate, name in it)}."""
    uses: list[tuple[str, str, int]] = field(default_factory=list)
    """(module below accelerate, name, line) of every name that is imported, or used as an attribute of a module; of
    `import *` those that the file uses."""
    accelerators: set[str] = field(default_factory=set)
    """Variables, as `run.accelerator`, and functions that return one, as `make()`."""

    def is_accelerator(self, node: ast.AST | None) -> bool:
        """Whether the value of an expression is an Accelerator. What is called `accelerator` is taken for one."""
        match node:
            case ast.Call(func=function):
                return self.is_class(function) or f"{name_of(function)}()" in self.accelerators
            case ast.IfExp(body=first, orelse=second):
                return self.is_accelerator(first) or self.is_accelerator(second)
            case ast.BoolOp(values=values):
                return any(map(self.is_accelerator, values))
            case ast.NamedExpr(value=value):
                return self.is_accelerator(value)
            case ast.Name() | ast.Attribute():
                found = dotted(node)
                return found[-1:] == ["accelerator"] or ".".join(found) in self.accelerators
        return False

    def is_class(self, node: ast.AST) -> bool:
        """Whether an expression is the class Accelerator, of Accelerate or of another package."""
        first, *rest = dotted(node) or [""]
        return (rest or [first])[-1] == "Accelerator" or (
            not rest and self.imported.get(first, "  ")[1] == "Accelerator"
        )


def bindings(tree: ast.Module) -> Bindings:
    """Those of a file."""
    found = Bindings()
    everything = list(ast.walk(tree))
    for node in everything:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            _import_from(found, node, everything)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                _import(found, alias, node.lineno)
    for node in everything:
        if isinstance(node, ast.Attribute) and (parts := dotted(node)) and parts[0] in found.modules:
            found.uses += _chain(found.modules[parts[0]], parts[1:], node.lineno)
    _find_accelerators(found, everything)
    return found


def dotted(node: ast.AST) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; empty for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def name_of(node: ast.AST) -> str:
    """`a.b.c`; empty for other expressions."""
    return ".".join(dotted(node))


def below_accelerate(module: str) -> str | None:
    """`utils` for `accelerate.utils`, "" for `accelerate`; None for other packages."""
    first, _, rest = module.partition(".")
    return rest if first == "accelerate" else None


def _import(found: Bindings, alias: ast.alias, line: int) -> None:
    below = below_accelerate(alias.name)
    if below is not None:
        found.modules[alias.asname or "accelerate"] = below if alias.asname else ""
        found.uses += _chain("", below.split(".") if below else [], line)


def _import_from(found: Bindings, node: ast.ImportFrom, everything: list[ast.AST]) -> None:
    below = below_accelerate(node.module or "")
    if below is None:
        return
    for alias in node.names:
        inner = f"{below}.{alias.name}" if below else alias.name
        if alias.name == "*":
            new = {name: line for name, line in _taken_from(below, everything) if name not in found.imported}
            found.imported |= {name: (below, name) for name in new}
            found.uses += [(below, name, line) for name, line in new.items()]
        elif inner in names.modules() and alias.name not in names.places(below):
            found.modules[alias.asname or alias.name] = inner
        else:
            found.imported[alias.asname or alias.name] = (below, alias.name)
            found.uses.append((below, alias.name, node.lineno))


def _taken_from(below: str, everything: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """(name, line of its first use) of what `from module import *` has given the file: names of the module that the
    file uses and does not bind."""
    known = {*names.places(below), *names.refusals(below)}
    known -= {node.id for node in everything if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    known -= {node.name for node in everything if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    known -= {node.arg for node in everything if isinstance(node, ast.arg)}
    known -= {
        alias.asname or alias.name for node in everything if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for node in everything:
        if isinstance(node, ast.Name) and node.id in known:
            known.remove(node.id)
            yield node.id, node.lineno


def _chain(below: str, parts: list[str], line: int) -> Iterator[tuple[str, str, int]]:
    """The first name in an attribute chain such as `accelerate.utils.gather` that is not a module; none if all are."""
    for part in parts:
        inner = f"{below}.{part}" if below else part
        if inner not in names.modules() or part in names.places(below):
            yield below, part, line
            return
        below = inner


def _find_accelerators(found: Bindings, everything: list[ast.AST]) -> None:
    """Until no more are found: one may be assigned to another variable, or returned by a function."""
    given = [pair for node in everything for pair in assigned(node)]
    before = -1
    while before != len(found.accelerators):
        before = len(found.accelerators)
        found.accelerators |= {name for name, value in given if name and found.is_accelerator(value)}
    for node in everything:
        if isinstance(node, (ast.arg, ast.AnnAssign)) and _is_of_class(found, node.annotation):
            found.accelerators.add(node.arg if isinstance(node, ast.arg) else name_of(node.target))


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(variable or function, value) of an assignment or a definition."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from ((name_of(to), one) for to, one in zip(target.elts, value.elts, strict=False))
                yield name_of(target), value
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield name_of(target), value
        case ast.FunctionDef(name=name):
            returns = (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None)
            yield from ((f"{name}()", value) for value in returns)


def _is_of_class(found: Bindings, annotation: ast.expr | None) -> bool:
    """Whether an annotation, which may be text, names the class Accelerator."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return "Accelerator" in annotation.value.replace("[", " ").replace("]", " ").split()
    return annotation is not None and any(map(found.is_class, ast.walk(annotation)))

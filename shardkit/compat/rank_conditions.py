"""Which conditions in a script's source only one rank meets: `accelerator.is_main_process`, `rank == 0`, and names and
functions of the script that stand for them."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardkit import env
from shardkit.compat import branches
from shardkit.compat.bindings import assigned, name_of

_FLAGS = {"is_main_process", "is_local_main_process", "is_last_process"}
_FLAGS |= {"is_world_process_zero", "is_local_process_zero"}
_NUMBERS = {"process_index", "local_process_index", "rank", "local_rank", "global_rank", "get_rank", "get_local_rank"}
_VARIABLES = {"RANK", "LOCAL_RANK"}
WORDS = _FLAGS | _NUMBERS | _VARIABLES
"""One of these is in the source of every such condition."""

_OTHER_ENGINES = {"DEEPSPEED", "MEGATRON_LM"}
"""What `accelerator.distributed_type` never is here."""

# Parts of a condition that can be evaluated without side effects: no calls, no subscripts.
_QUIET = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.Set, ast.Tuple, ast.List, ast.UnaryOp, ast.BoolOp),
    *(ast.expr_context, ast.cmpop, ast.unaryop, ast.boolop),
)
_UNKNOWN = object()
"""What stands for the value of an expression that cannot be evaluated; None is a value."""
_MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
_BOUNDS: dict[tuple[type[ast.cmpop], Any], bool] = {
    (ast.Lt, 1): True,
    (ast.LtE, 0): True,
    (ast.Gt, 0): False,
    (ast.GtE, 1): False,
}
"""Whether a rank number that is compared like this with a constant is of one rank where it is true, or where false."""


@dataclass(frozen=True)
class Source:
    """A parsed file. `values`: what is assigned to each name, and returned by each function (`is_main()`); `others`:
    names that get their values elsewhere, as in a loop."""

    tree: ast.Module
    values: Mapping[str, list[ast.expr]]
    others: frozenset[str]


def source_of(tree: ast.Module) -> Source:
    """The file, with the values of its names."""
    values: dict[str, list[ast.expr]] = defaultdict(list)
    others: set[str] = set()
    for node in ast.walk(tree):
        for name, value in assigned(node):
            values[name].append(value)
        if isinstance(node, (ast.For, ast.comprehension, ast.AugAssign)):
            others |= {name_of(one) for one in ast.walk(node.target)}
    return Source(tree, values, frozenset(others))


@dataclass(frozen=True)
class Conditions:
    """The conditions of a file, with the values that names have in a frame of it, if it runs."""

    source: Source
    frame: FrameType | None = None

    def alone(self, path: list[ast.AST], call: str) -> ast.expr | None:
        """The condition by which only one rank comes to the end of this path, for a call of this name that the others
        do not make elsewhere; None if all ranks come."""
        for test, value, others in branches.conditions_met(path):
            if not branches.calls(others, call) and self.is_of_one_rank(test, value):
                return test
        return None

    def is_of_one_rank(self, condition: ast.expr, value: bool, depth: int = 0) -> bool:
        """Whether the condition, which has this value here, certainly has the other one on other ranks."""
        match condition:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.is_of_one_rank(inner, not value, depth)
            case ast.BoolOp(op=op, values=parts):
                of_one = [self.is_of_one_rank(part, value, depth) for part in parts]
                if isinstance(op, ast.And) is value:
                    return any(of_one)
                # The other parts do not matter where they are the same here, and so on all ranks.
                return any(of_one) and all(
                    is_of_one or self._is_known(part, not value) for is_of_one, part in zip(of_one, parts, strict=True)
                )
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(left, op, right, value, depth)
        if self._is_number(condition, depth):
            return not value
        if _last(condition) in _FLAGS:
            return value
        meaning = self._meaning(condition, depth)
        return meaning is not None and self.is_of_one_rank(meaning, value, depth + 1)

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, value: bool, depth: int) -> bool:
        if isinstance(right, ast.Constant) and isinstance(right.value, bool) and isinstance(op, (ast.Eq, ast.Is)):
            return self.is_of_one_rank(left, value is right.value, depth)
        kind = type(op)
        if not self._is_number(left, depth):
            left, right, kind = right, left, _MIRRORED.get(kind, kind)
        if not self._is_number(left, depth) or any(self._is_number(part, depth) for part in ast.walk(right)):
            return False
        if kind in (ast.Eq, ast.Is, ast.NotEq, ast.IsNot):
            return value is (kind in (ast.Eq, ast.Is))
        if kind in (ast.In, ast.NotIn):
            is_one = isinstance(right, (ast.Tuple, ast.List, ast.Set)) and len(right.elts) == 1
            return is_one and value is (kind is ast.In)
        return isinstance(right, ast.Constant) and _BOUNDS.get((kind, right.value)) is value

    def _is_number(self, node: ast.AST, depth: int) -> bool:
        """Whether it is the number of this rank, also as text of its variable."""
        match node:
            case ast.Call(func=ast.Name(id="int" | "str"), args=[inner]):
                return self._is_number(inner, depth)
            case (
                ast.Subscript(slice=ast.Constant(value=str(name))) | ast.Call(args=[ast.Constant(value=str(name)), *_])
            ):
                return name in _VARIABLES
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Call)) or name_of(node) in self.source.others:
            return False
        meaning = self._meaning(node, depth)
        if meaning is not None and self._is_number(meaning, depth + 1):
            return True
        here = env.ranks()
        known = self._value(node)
        return _last(node) in _NUMBERS and (here is None or known in (_UNKNOWN, None, here.rank, here.local_rank))

    def _meaning(self, node: ast.AST, depth: int) -> ast.expr | None:
        """What the script has assigned to this name, or returns from this function: if that is one expression."""
        name = f"{_last(node)}()" if isinstance(node, ast.Call) else name_of(node)
        values = self.source.values.get(name, [])
        is_one = len(values) == 1 and name not in self.source.others and depth < 5
        return values[0] if is_one else None

    def _is_known(self, condition: ast.expr, value: bool) -> bool:
        """Whether the condition has no calls, and has this value here: so on all ranks, if it does not depend on the
        rank."""
        found = self._value(condition)
        return found is not _UNKNOWN and bool(found) is value

    def _value(self, node: ast.AST) -> Any:
        """The value of an expression without calls; _UNKNOWN if it cannot be evaluated."""
        if self.frame is None:
            return _without_a_run(node)
        if not isinstance(node, ast.expr):
            return _UNKNOWN
        if not all(isinstance(part, _QUIET) for part in ast.walk(node)):
            return _UNKNOWN
        known: dict[str, Any] = {**self.frame.f_globals, **self.frame.f_locals}
        try:
            return eval(compile(ast.Expression(node), "<condition>", "eval"), known)
        except Exception:
            return _UNKNOWN


def _without_a_run(node: ast.AST) -> Any:
    """The value of a comparison with another engine: in `is_main_process or distributed_type == DEEPSPEED` it does not
    matter. _UNKNOWN for other expressions."""
    match node:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            return isinstance(op, ast.NotEq) if {_last(left), _last(right)} & _OTHER_ENGINES else _UNKNOWN
    return _UNKNOWN


def _last(node: ast.AST) -> str:
    """The last part of a dotted name; of the function, if it is called without arguments."""
    if isinstance(node, ast.Call):
        return "" if node.args or node.keywords else _last(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))

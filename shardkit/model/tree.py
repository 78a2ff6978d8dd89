"""A model as data: modules and their own parameters, without torch. A tree can come from a torch module
(`model/live.py`), from a child process that built one on the meta device (`model/sources.py`), or from a formula
(`model/gpt.py`); all are divided into units by the same code (`model/cut.py`)."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from shardkit.digits import number_in

T = TypeVar("T")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module. `tied_to` is the fqn of the first name of the same tensor, if this is a later name.
    `packed`: the number of weights whose bits its elements hold; 0 where each element is a weight. `scale_bytes`: of
    the tensors beside it that make weights of these, whole on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    tied_to: str | None = None
    packed: int = 0
    scale_bytes: int = 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def weights(self) -> int:
        return self.packed or self.numel


@dataclass(frozen=True)
class ModuleNode:
    """One module. `fqn` is "" for the root; `is_container`: ModuleList, ModuleDict, without a forward.

    `alias_of` is the first fqn of the same module, if this is a later name; `has_statistics`: a norm with
    running statistics; `is_lookup`: its parameters are tables from which rows are read, without arithmetic;
    `is_kept_whole`: it is called on one rank alone, which sharded parameters do not allow, or keeps its weight outside
    of its parameters, too.
    """

    fqn: str
    class_name: str
    parameters: tuple[Parameter, ...] = ()
    children: tuple["ModuleNode", ...] = ()
    is_container: bool = False
    buffers: tuple[Parameter, ...] = field(default=())
    alias_of: str | None = None
    has_statistics: bool = False
    is_lookup: bool = False
    is_kept_whole: bool = False

    def walk(self) -> Iterator["ModuleNode"]:
        """This module and all modules below it, parents first, in registration order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def owned(self) -> Iterator[tuple[str, Parameter]]:
        """(fqn, parameter) of all parameters here and below; tied ones only at their first name."""
        for node in self.walk():
            for parameter in node.parameters:
                if parameter.tied_to is None:
                    yield node.name_of(parameter), parameter

    def name_of(self, parameter: Parameter) -> str:
        """The full name of one of this module's own parameters."""
        return f"{self.fqn}.{parameter.name}" if self.fqn else parameter.name

    @cached_property
    def numel(self) -> int:
        """Number of parameters here and below, tied ones counted once."""
        return sum(parameter.numel for _, parameter in self.owned())

    @cached_property
    def weights(self) -> int:
        """As `numel`, with what packed parameters hold."""
        return sum(parameter.weights for _, parameter in self.owned())

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute`, which follows from this tree and the key alone; kept as long as the tree is."""
        if key not in self.computed:
            self.computed[key] = compute()
        result: T = self.computed[key]
        return result

    @cached_property
    def computed(self) -> dict[Hashable, Any]:
        """What `once` has computed, by its key."""
        return {}

    @property
    def numel_with_tied(self) -> int:
        """As `numel`, including parameters that are tied to ones outside."""
        own = {p.tied_to or node.name_of(p): p.numel for node in self.walk() for p in node.parameters}
        return sum(own.values())


def by_numbers(fqn: str) -> list[tuple[int, int, str]]:
    """A sort key of names, in which numbers are compared as numbers: `blocks.2` before `blocks.10`."""
    numbers = [(part, number_in(part)) for part in fqn.split(".")]
    return [(1, 0, part) if number is None else (0, number, "") for part, number in numbers]

"""A model as data: modules, and the parameters that each owns. No torch: a tree can come from a live module
(`model/live.py`), from a child process that built one on the meta device (`model/sources.py`), or from a formula
(`model/gpt.py`), and all of them are cut into units by the same code (`model/cut.py`)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module. `tied_to` is the fqn of the first name of the same tensor, if this is a later one."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    tied_to: str | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModuleNode:
    """One module. `fqn` is "" for the root; `is_container` for ModuleList, ModuleDict: they have no forward.

    `alias_of` is the first fqn of the same module, if this is a later one; `has_statistics` marks norms that keep
    running statistics.
    """

    fqn: str
    class_name: str
    parameters: tuple[Parameter, ...] = ()
    children: tuple["ModuleNode", ...] = ()
    is_container: bool = False
    buffers: tuple[Parameter, ...] = field(default=())
    alias_of: str | None = None
    has_statistics: bool = False

    def walk(self) -> Iterator["ModuleNode"]:
        """This module and all below it, parents first, in registration order."""
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

    @property
    def numel(self) -> int:
        """Parameters here and below, tied ones once."""
        return sum(parameter.numel for _, parameter in self.owned())

    @property
    def numel_with_tied(self) -> int:
        """As `numel`, with parameters that are tied to ones outside."""
        own = {p.tied_to or node.name_of(p): p.numel for node in self.walk() for p in node.parameters}
        return sum(own.values())

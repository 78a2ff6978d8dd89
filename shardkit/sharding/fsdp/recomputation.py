"""The parameters of a recomputed block, in a backward that has not reached its unit yet.

In backward the gradient of a unit's output gathers its parameters, before its blocks are recomputed. The backward of a
gradient (a gradient penalty) has ways to a block's operators that do not come through its output. The unit's parameters
are still there then: they are kept since that gradient was computed.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn


class KeepingGroup(Protocol):
    """A unit's parameter group, as `unit_state.UnitGroup`."""

    def is_kept_for_second_backward(self) -> bool: ...

    def show_kept(self) -> None: ...

    def hide_kept(self) -> None: ...


class Gathered:
    """A context in which a block finds the gathered parameters of its units where they are kept. May be entered
    again."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._shown: list[KeepingGroup] = []

    def __enter__(self) -> None:
        entry = vars(self._block).get("forward")
        group: KeepingGroup | None
        while (group := getattr(entry, "group", None)) is not None:  # several, where its parameters are of several
            if group.is_kept_for_second_backward():
                group.show_kept()
                self._shown.append(group)
            entry = getattr(entry, "around", None)

    def __exit__(self, *error: object) -> None:
        while self._shown:
            self._shown.pop().hide_kept()

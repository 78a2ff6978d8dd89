"""The memory of one rank in a step, as plain values: by category, at each moment, and at its peak."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Memory:
    """Bytes by category, at one moment or in one place.

    gathered: unsharded parameters, and those gathered ahead; reduction: unsharded gradients and the buffers in which
    they are reduced.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    gathered: int = 0
    reduction: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


CATEGORIES = tuple(field.name for field in fields(Memory))


@dataclass(frozen=True)
class Moment:
    """One moment of a step: phase (forward, loss, backward, optimizer), the computing unit, and memory by category."""

    phase: str
    unit: str
    memory: Memory

    @property
    def text(self) -> str:
        return f"{self.phase} of {self.unit}" if self.unit else self.phase


@dataclass(frozen=True)
class RankMemory:
    """Memory of the rank with the highest peak: the peak on the device, the course of one step, and host memory.

    `activations_known` is False if not all activations are counted; `gaps` says which are missing. The peak is then a
    lower bound: it can show that a rank does not fit, not that it does. `reserved_bytes`: what CUDA's allocator would
    reserve for a simulated step; `expandable_bytes`: the same with expandable segments.
    """

    peak: Memory
    moment: str
    timeline: tuple[Moment, ...]
    host: Memory
    activations_known: bool
    gaps: tuple[str, ...] = ()
    reserved_bytes: int | None = None
    expandable_bytes: int | None = None

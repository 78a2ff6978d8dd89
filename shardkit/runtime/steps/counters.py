"""What a run counts: its progress, and the backwards since a moment of the loop."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """The run's progress. Equal on all ranks."""

    step: int = 0
    """Optimizer steps done, without those that fp16 skipped."""

    micro_step: int = 0
    """Micro-batches since the last optimizer step."""

    samples_seen: int = 0
    """Samples trained on, over all ranks."""

    loaders: int = field(default=0, repr=False)
    """Loaders prepared so far that have no generator of their own: each gets another order of the data."""

    _samples_since_step: int = field(default=0, repr=False)

    def add_samples(self, samples: int) -> None:
        """Counts the samples of a micro-batch, over all ranks."""
        self.samples_seen += samples
        self._samples_since_step += samples

    def end_step(self) -> None:
        """Micro-batches and samples from now on belong to the next optimizer step."""
        self.micro_step = self._samples_since_step = 0

    def forget_window(self) -> None:
        """Micro-batches since the last step are given up: their samples are not trained on."""
        self.samples_seen -= self._samples_since_step
        self.end_step()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint holds; like the loaders' positions, samples count up to the last optimizer step."""
        samples_seen = self.samples_seen - self._samples_since_step
        return {"step": self.step, "samples_seen": samples_seen, "loaders": self.loaders}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Restores the counters from `state_dict`; the next micro-batch begins a new window.

        A script that prepares a loader in each round goes on with the order of the next round. Loaders that it has
        prepared before the load are among those of the checkpoint, which may be too old to tell their number."""
        self.step, self.samples_seen = saved["step"], saved["samples_seen"]
        self.loaders = max(self.loaders, saved.get("loaders", 0))
        self.end_step()


@dataclass(frozen=True)
class Backwards:
    """Numbers of backwards in this process."""

    own: int = 0
    """Calls of `accelerator.backward`."""

    by_script: int = 0
    """Backwards through prepared models that the script called itself: `loss.backward()`."""

    through_models: int = 0
    """Ended backwards through prepared models, regardless of the caller."""

    @property
    def all(self) -> int:
        """Each backward once."""
        return self.own + self.by_script

    def since(self, earlier: "Backwards") -> "Backwards":
        """Those after an earlier count."""
        return Backwards(
            self.own - earlier.own,
            self.by_script - earlier.by_script,
            self.through_models - earlier.through_models,
        )

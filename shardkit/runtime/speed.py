"""Speed of a run for its trackers (`shardkit.log_speed`): between two calls of `accelerator.log`, on rank 0."""

import time

from shardkit.config.meaning import dtypes
from shardkit.data.loader import active_loader
from shardkit.data.loop import alive
from shardkit.distributed import accelerators, xla
from shardkit.distributed.modules import every_parameter
from shardkit.plan import devices
from shardkit.runtime import measure
from shardkit.runtime.run import Run
from shardkit.sizes import GIB
from shardkit.tracking.tracker import MEASURED

# Forward and backward take 6 operations per parameter and token: 2 and 4. PaLM (arXiv:2204.02311), appendix B,
# without its term for attention.
FLOPS_PER_PARAMETER_AND_TOKEN = 6


class Speed:
    """The clock of one run. It starts at the first optimizer step, so that start-up and compilation do not count."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tokens = 0
        self._at: tuple[float, int, int, int] | None = None
        self._loads = run.loads
        run.events.on_batch = self._note_batch
        run.events.on_step = self._note_step

    def values(self) -> dict[str, float]:
        """Means since the last call: seconds per step, samples and tokens per second over all ranks, MFU where the
        device's peak is known; and this rank's peak memory so far. Empty before the second step."""
        if self._at is None or self._loads != self._run.loads:
            return {}
        now = self._now()
        seconds, steps, samples, tokens = (new - old for new, old in zip(now, self._at, strict=True))
        if not steps:
            return {}
        self._at = now
        found = {
            f"{MEASURED}step_time_s": seconds / steps,
            f"{MEASURED}samples_per_s": samples / seconds,
        }
        if self._run.device.type != "xla":  # torch_xla tells no memory where one process drives all devices
            found[f"{MEASURED}peak_memory_gib"] = measure.peak_bytes(self._run) / GIB
        if tokens:
            found[f"{MEASURED}tokens_per_s"] = tokens / seconds
            found[f"{MEASURED}tokens"] = float(self._tokens)
            if (peak := self._peak_flops()) is not None:
                parameters = sum(p.numel() for model in self._run.models for p in every_parameter(model))
                found[f"{MEASURED}mfu"] = FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens / seconds / peak
        return found

    def _note_step(self) -> None:
        if self._at is None or self._loads != self._run.loads:  # a load may set the counters back
            self._at, self._loads = self._now(), self._run.loads

    def _note_batch(self) -> None:
        """Counts the tokens of the current batch: elements of its largest two-dimensional integer tensor, times the
        ranks."""
        loader = active_loader(self._run.loaders)
        loop = None if loader is None else loader.newest_loop
        tensors = [] if loop is None else alive(loop.tensors)
        sizes = [tensor.numel() for tensor in tensors if tensor.dim() == 2 and not tensor.is_floating_point()]
        self._tokens += max(sizes, default=0) * self._run.readers

    def _now(self) -> tuple[float, int, int, int]:
        counters = self._run.counters
        return time.perf_counter(), counters.step, counters.samples_seen, self._tokens

    def _peak_flops(self) -> float | None:
        """Peak operations per second of all devices in the compute dtype; None where the device is unknown."""
        device = self._run.device
        if device.type == "cpu":
            return None
        found = devices.of_hardware(accelerators.name_of(device), None)
        peak = found.flops.get(dtypes(self._run.config).param or "fp32")
        count = xla.devices().count if device.type == "xla" else self._run.process.world_size
        return None if peak is None else peak * count

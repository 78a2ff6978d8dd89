"""Numbers for a job from the plan: host memory of a machine, duration of the steps, and notes on what does not fit."""

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.config.command import config_flag
from shardkit.config.schema import Config, ShardingStrategy
from shardkit.plan import request
from shardkit.plan.answer import configured_strategy, row
from shardkit.plan.devices import HOST_RESERVE_BYTES, Device
from shardkit.sizes import in_words

# The assumed write speed of a machine: a network file system on 10 Gb/s.
SAVE_BYTES_PER_S = 10**9
MARGIN = 1.2
_ROUND_S = 600


@dataclass(frozen=True)
class Sizes:
    """Numbers for one machine. `steps_s` is None if the time of a step, or the number of steps, is unknown."""

    memory_bytes: int
    steps_s: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """What is planned for: the GPU or CPU of a rank, its micro-batch, the steps of the run; None: not known."""

    device: Device | None
    batch_size: int | None
    seq_len: int | None
    steps: int | None


def sized(config: Config, model: str, load: Load, file: Path | None = None) -> Sizes:
    """The sizes for a configuration, from the closed-form plan with AdamW. `file`: the configuration file, where it
    names the model. Raises the errors of `request.build`."""
    assert load.device is not None, "a name that is none of a device is a problem"
    planned = request.build(
        config,
        model,
        load.device,
        per_machine=config.processes_per_machine,
        file=file,
    )
    planned = replace(planned, batch_size=load.batch_size, seq_len=load.seq_len)
    found = row(planned, configured_strategy(planned.config))
    ranks, peak, host = config.processes_per_machine, found.memory.peak, found.memory.host
    writers = 1 if found.strategy is ShardingStrategy.NO_SHARD else ranks  # replicated state is written once
    state = peak.parameters + peak.optimizer_state + host.parameters + host.optimizer_state
    copied = 0 if config.shardkit.checkpoint.blocking else state
    save_s = writers * state / SAVE_BYTES_PER_S
    notes = []
    if load.device.fits(peak.total) is False:  # its host memory is asked for below
        notes.append(
            f"note: by the plan a rank needs {in_words(peak.total)}, more than {load.device.name} has; "
            f"run shardkit plan{config_flag(file) if file else f' --model {shlex.quote(model)}'} for advice."
        )
    stop_s = config.shardkit.launch.stop_timeout_s
    if save_s * MARGIN > stop_s:
        notes.append(
            f"note: by the plan a machine saves {in_words(writers * state)}, about {save_s:.0f} s at 1 GB/s, "
            f"but shardkit.launch.stop_timeout_s is {stop_s:g}; add --set shardkit.launch.stop_timeout_s="
            f"{math.ceil(save_s * MARGIN / 30) * 30}."
        )
    steps_s = _seconds(load.steps * found.time.slowest_s) if load.steps is not None and found.time is not None else None
    return Sizes(ranks * (HOST_RESERVE_BYTES + host.total + copied), steps_s, tuple(notes))


def _seconds(planned_s: float) -> int:
    """The limit of a job's time for so many seconds of steps."""
    return -(-int(planned_s * MARGIN) // _ROUND_S) * _ROUND_S + _ROUND_S

"""Compares measured memory (`shardkit launch --measure` writes one file per rank) with the plan."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardkit.config.command import config_flag
from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.model import comment
from shardkit.plan import request
from shardkit.plan.answer import Answer, Row
from shardkit.plan.answering import answer
from shardkit.sizes import MIB
from shardkit.wording import counted

_ADVICE = "give the log folder of a run that was started with shardkit launch --measure and finished."


@dataclass(frozen=True)
class Measured:
    """Bytes of the rank with the highest peak, the number of ranks, and the device."""

    rank: int
    ranks: int
    device: str
    peak_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def read(folder: Path) -> Measured:
    """The measurement in the run's folder. Raises UsageError if there is none that can be read."""
    try:
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.memory.json"))]
        if not found:
            raise UsageError(f"--measured {folder}: no measurement found (no rank*.memory.json); {_ADVICE}")
        most = max(found, key=lambda each: each["peak_bytes"])
        if wrong := [name for name in most if name.endswith("_bytes") and type(most[name]) is not int]:
            raise ValueError(f"{wrong[0]} is no number of bytes")
        return Measured(
            **{name: most[name] for name in Measured.__dataclass_fields__ if name != "ranks"}, ranks=len(found)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--measured {folder}: no measurement found (unreadable: {error!r}); {_ADVICE}") from None


# The parameters of a rank that shards unevenly differ by its share of the padding.
_SAME = 0.1


def is_of_the_same(row: Row, measured: Measured) -> bool:
    """Whether the plan and the run have parameters of about the same size on a rank."""
    planned = row.memory.host.parameters + row.memory.peak.parameters
    return abs(planned - measured.parameter_bytes) <= _SAME * max(planned, measured.parameter_bytes)


def table(row: Row, measured: Measured) -> str:
    """Planned and measured memory, in MiB. They differ by what the script itself holds."""
    planned = row.memory.peak
    everything = row.memory.timeline[-1].memory
    host = row.memory.host
    before_its_step = min((each.memory for each in row.memory.timeline), key=lambda each: each.optimizer_state)
    lines = [
        ("parameters", host.parameters + planned.parameters, measured.parameter_bytes),
        ("gradients, all of them", host.gradients + everything.gradients, measured.gradient_bytes),
        ("optimizer state", host.optimizer_state + before_its_step.optimizer_state, measured.optimizer_bytes),
        ("peak", planned.total, measured.peak_bytes),
    ]
    how = "simulated" if row.simulated else "closed form"
    head = f"Planned ({how}) and measured (rank {measured.rank} of {measured.ranks}, {measured.device}), MiB"
    columns = f"  {'':<24}{'planned':>12}{'measured':>12}{'planned / measured':>22}"
    return "\n".join([head, columns, *(_line(*line) for line in lines)])


def _line(name: str, planned: int, measured: int) -> str:
    ratio = f"{planned / measured:.3f}" if measured else "-"
    return f"  {name:<24}{planned / MIB:>12,.1f}{measured / MIB:>12,.1f}{ratio:>22}"


def comparison(planned: Answer, measured: Measured) -> str:
    """The table for the planned configuration, and what differs between plan and run."""
    text = table(planned.chosen_row, measured)
    if not is_of_the_same(planned.chosen_row, measured):
        text += "\n  The parameters differ: the run had another model, other settings or another number of ranks."
    if measured.device == "cpu":
        text += (
            "\n  On a CPU the measured peak is what the process grew by: it includes the model before it was\n"
            "  sharded, and what torch loads."
        )
    if measured.ranks != planned.request.world_size:
        text += f"\n  The plan is for {counted(planned.request.world_size, 'rank')}: add --world {measured.ranks}."
    return text


def beside_the_plan(config: Config, path: Path | None, folder: Path) -> str:
    """Measurements that a run left in `folder`, compared with the plan for the model named in the file `path`.

    The file has neither batch nor optimizer: the plan is for AdamW without activations, and a line says how to
    include them.
    """
    named = comment.in_file(path)
    if not any(folder.glob("rank*.memory.json")):
        return f"--measure: the script left nothing in {folder}; end it with accelerator.end_training()."
    model = "" if path is None else config_flag(path)
    model += " --model MODULE:FUNCTION" if named is None else ""
    ranks = f" --world {config.num_processes}" if config.num_processes > 1 else ""
    more = "add --batch-size N for activations, --simulate --batch MODULE:FUNCTION for a simulated step"
    hint = f"compare with a plan ({more}): shardkit plan{model}{ranks} --measured {shlex.quote(str(folder))}"
    measured = read(folder)
    if named is None:
        return f"measured: peak {measured.peak_bytes / MIB:,.1f} MiB on rank {measured.rank}\n{hint}"
    asked = request.build(config, named, request.device_of(config, None, None), file=path)
    return f"{comparison(answer(asked), measured)}\n{hint}"

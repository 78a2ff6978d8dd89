"""Which machines of an elastic run train together, and what keeps the global batch. Pure functions and plain values.

A generation is the world between two changes of machines: its members, numbered without gaps, from machine 0 on.
"""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from shardkit.config import files
from shardkit.config.meaning import kept_accumulation
from shardkit.config.schema import Config
from shardkit.errors import ConfigError
from shardkit.launch import names
from shardkit.launch.environment import accelerate_variables
from shardkit.launch.spec import LaunchSpec
from shardkit.wording import alternatives, counted


@dataclass(frozen=True)
class Member:
    """A machine that was admitted: `arrival` tells its launcher from those that had the number before it."""

    arrival: int
    number: int
    host: str
    address: str | None = None
    """By which others reach it, where that is known."""

    def __str__(self) -> str:
        return f"machine {self.number} ({self.host})"


@dataclass(frozen=True)
class Generation:
    """One world of an elastic run. `resume` is its `shardkit.checkpoint.resume`, `why` what it was started for."""

    number: int
    members: tuple[Member, ...]
    spares: tuple[Member, ...]
    resume: str
    why: str

    def index_of(self, arrival: int) -> int | None:
        """The machine's place in this world; None where it is not part of it."""
        return next((place for place, member in enumerate(self.members) if member.arrival == arrival), None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def generation_from(fields: dict[str, Any]) -> Generation:
    """What `as_json` gave."""
    members, spares = (tuple(Member(**one) for one in fields[name]) for name in ("members", "spares"))
    return Generation(fields["number"], members, spares, fields["resume"], fields["why"])


def usable_sizes(config: Config) -> dict[int, str | None]:
    """Every number of machines from the least to the most, with why it is not used; None: it is."""
    least = config.shardkit.launch.min_machines or config.num_machines
    return {machines: problem_of_size(config, machines) for machines in range(least, config.num_machines + 1)}


def problem_of_size(config: Config, machines: int) -> str | None:
    """Why a world of so many machines is not used: the global batch cannot be kept, or a setting does not fit."""
    steps, most = config.shardkit.gradient_accumulation_steps, config.num_machines
    if config.shardkit.data.split_batches and most % machines:
        return f"the batch of {most} machines cannot be split among {machines}"
    if kept_accumulation(steps, config.shardkit.data.split_batches, most, machines) is None:
        return f"{steps} x {most} micro-batches a step cannot be divided among {machines} machines"
    try:
        config_for(config, machines, 0)
    except ConfigError as error:
        return str(error).partition("\n")[0].removeprefix("configuration:").strip()
    return None


def best_size(sizes: dict[int, str | None], here: int) -> int:
    """The largest world for so many machines; 0 where there is none."""
    return max((size for size, problem in sizes.items() if problem is None and size <= here), default=0)


def config_for(config: Config, machines: int, place: int, resume: str | None = None) -> Config:
    """The configuration of a world of so many machines, for the one at `place`. Raises ConfigError where a setting does
    not fit that world."""
    settings = {
        "num_machines": machines,
        "num_processes": machines * config.processes_per_machine,
        "machine_rank": place,
        "shardkit.launch.min_machines": None,
    }
    return files.overlaid(config, settings if resume is None else {**settings, "shardkit.checkpoint.resume": resume})


def spec_for(spec: LaunchSpec, generation: Generation, place: int) -> LaunchSpec:
    """The launch of this machine in a generation. The ranks learn the full world, and scripts on Accelerate the
    accumulation that keeps the global batch, where it is configured."""
    machines = len(generation.members)
    config = config_for(spec.config, machines, place, generation.resume)
    world = machines * spec.ranks_here
    steps = spec.config.shardkit.gradient_accumulation_steps
    for_accelerate = config
    if steps > 1:
        kept = kept_accumulation(steps, config.shardkit.data.split_batches, spec.num_machines, machines)
        for_accelerate = files.overlaid(config, {"shardkit.gradient_accumulation_steps": kept})
    is_always_full = spec.launch.min_machines == spec.num_machines
    variables = {
        **spec.environment,
        names.NUM_PROCESSES: str(world),
        **({} if is_always_full else {names.FULL_WORLD_SIZE: str(spec.world_size)}),
        **accelerate_variables(for_accelerate, spec.device),
    }
    chosen = dict(spec.chosen)
    if machines < spec.num_machines:
        where = f"shardkit launch ({machines} of {spec.num_machines} machines)"
        chosen |= {"num_machines": where, "num_processes": where}
    return replace(
        spec,
        world_size=world,
        num_machines=machines,
        machine_rank=place,
        environment=variables,
        config=config,
        chosen=chosen,
    )


def announcement(spec: LaunchSpec, generation: Generation, sizes: dict[int, str | None]) -> str:
    """The lines before the ranks of a generation are started."""
    machines = len(generation.members)
    ranks = counted(machines * spec.ranks_here, "rank")
    who = ", ".join(map(str, generation.members))
    lines = [f"launch: {generation.why}"] if generation.why else []
    lines.append(f"launch: world {generation.number}: {machines} of {spec.num_machines} machines, {ranks}: {who}")
    if machines < spec.num_machines:
        lines.append(
            f"launch: the global batch stays that of {spec.num_machines} machines: "
            f"{Fraction(spec.num_machines, machines)} times the samples of each rank"
        )
    if generation.spares:
        spares = ", ".join(map(str, generation.spares))
        lines.append(f"launch: {spares}: a spare; worlds that keep the global batch have {_sizes(sizes)} machines")
    return "\n".join(lines)


def _sizes(sizes: dict[int, str | None]) -> str:
    return alternatives([str(size) for size, problem in sizes.items() if problem is None])


def summary(config: Config) -> str:
    """What `--dry-run` says of an elastic run: the numbers of machines that train, and why others do not."""
    sizes = usable_sizes(config)
    unused = "; ".join(f"not {size}: {problem}" for size, problem in sizes.items() if problem)
    return f"elastic: worlds of {_sizes(sizes)} machines{f' ({unused})' if unused else ''}"

"""A shuffled epoch: time and memory to its first batch, to one in its middle, cost of a batch; ours and the peers'.

    python -m benchmarks.data [--samples 1000000 100000000] [--rounds 5] [--output data.json]

Each contestant is rank 3 of 8 in a fresh process, which imports, prepares a loader (not timed), takes the first batch,
and then --batches more, of 32 numbers that cost nothing to read: what is left is the loader's own work. Then, in
another process, the loop goes on in the middle of an epoch, as after a resume. Memory is what the process's peak rose
by from before the first batch. torch's DistributedSampler cannot start in the middle.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from benchmarks import interleaved

BATCH_SIZE, RANK, RANKS = 32, 3, 8
# What is measured, in which unit, and who can do it.
MEASURED = {
    "first batch": ("first_s", "ms", ("shardkit", "torch", "accelerate")),
    "memory": ("memory_mib", "MiB", ("shardkit", "torch", "accelerate")),
    "a batch": ("batch_s", "ms", ("shardkit", "torch", "accelerate")),
    "batch in the middle": ("middle_s", "ms", ("shardkit", "accelerate")),
}


class Numbers:
    """A map-style dataset that costs nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def with_shardkit(samples: int, is_resumed: bool) -> Iterable[Any]:
    import torch
    from torch.utils.data import DataLoader

    from shardkit.data.preparing import prepare_loader
    from shardkit.data.skipping import skip_first_batches

    users = DataLoader(Numbers(samples), batch_size=BATCH_SIZE, shuffle=True, collate_fn=len)
    loader = prepare_loader(users, RANK, RANKS, torch.device("cpu"), 1)
    return skip_first_batches(loader, _middle(samples)) if is_resumed else loader


def with_torch(samples: int, is_resumed: bool) -> Iterable[Any]:
    from torch.utils.data import DataLoader, DistributedSampler

    dataset = Numbers(samples)
    sampler = DistributedSampler(dataset, RANKS, RANK, shuffle=True)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=len)


def with_accelerate(samples: int, is_resumed: bool) -> Iterable[Any]:
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader

    users = DataLoader(Numbers(samples), batch_size=BATCH_SIZE, shuffle=True, collate_fn=len)
    loader = prepare_data_loader(
        users, num_processes=RANKS, process_index=RANK, rng_types=[], use_seedable_sampler=True, data_seed=1
    )
    return skip_first_batches(loader, _middle(samples)) if is_resumed else loader


CONTESTANTS: dict[str, Callable[[int, bool], Iterable[Any]]] = {
    "shardkit": with_shardkit,
    "torch": with_torch,
    "accelerate": with_accelerate,
}


def _middle(samples: int) -> int:
    return samples // (BATCH_SIZE * RANKS) // 2


def main() -> None:
    """Measure, print tables, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8])
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=interleaved.writable)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "WHERE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, where = options.one
        print(json.dumps(measure_here(name, options.samples[0], options.batches, where == "middle")))
        return
    result = interleaved.surroundings()
    left_out = {name: problem for name in CONTESTANTS if (problem := _problem(name))}
    if "shardkit" in left_out:
        raise SystemExit(f"data: shardkit: {left_out['shardkit']}")
    names = [name for name in CONTESTANTS if name not in left_out]
    for samples in options.samples:
        found = compare(samples, options.batches, options.rounds, names)
        print(f"{samples:,} samples\n{_table(found)}")
        result[str(samples)] = found
    for name, problem in left_out.items():
        print(f"left out: {name}: {problem}")
    if options.output:
        interleaved.write(options.output, {**result, "left_out": left_out})


def compare(samples: int, batches: int, rounds: int, names: list[str]) -> dict[str, Any]:
    """For each thing that is measured: every round's values, spreads and ratios."""
    taken: dict[str, dict[str, list[float]]] = {what: {} for what in MEASURED}
    for _, name in interleaved.turns(names, rounds):
        values = _in_a_process(name, samples, batches, "start")
        if name in MEASURED["batch in the middle"][2]:
            values["middle_s"] = _in_a_process(name, samples, 1, "middle")["first_s"]
        for what, (key, _, _) in MEASURED.items():
            if key in values:
                taken[what].setdefault(name, []).append(values[key])
    return {what: _summary(what, measured) for what, measured in taken.items()}


def _summary(what: str, measured: dict[str, list[float]]) -> dict[str, Any]:
    unit = MEASURED[what][1]
    ratios = interleaved.ratios(measured, "shardkit")
    return {**interleaved.summary(measured, ratios), "unit": "MiB" if unit == "MiB" else "s"}


def _table(found: dict[str, Any]) -> str:
    lines = []
    for what, one in found.items():
        unit = MEASURED[what][1]
        factor = 1.0 if unit == "MiB" else 1000.0
        for name, spread in one["spread"].items():
            low, high = spread["lower"] * factor, spread["upper"] * factor
            lines.append(f"  {what:<20} {name:<11}{spread['median'] * factor:12.3f} {unit}   ({low:.3f} to {high:.3f})")
        for ratio in one["ratios"]:
            numbers = f"{ratio['median']:.4f}   ({ratio['low']:.4f} to {ratio['high']:.4f})"
            lines.append(f"  {what:<20} shardkit / {ratio['theirs']}: {numbers}")
    return "\n".join(lines)


def _problem(name: str) -> str | None:
    """Why a contestant cannot take part here; it has run once then, so that file caches are warm."""
    try:
        _in_a_process(name, 10**4, 1, "start")
    except subprocess.CalledProcessError as error:
        return f"exit code {error.returncode}: {error.stderr.strip()[-300:]}"
    return None


def _in_a_process(name: str, samples: int, batches: int, where: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.data", "--samples", str(samples), "--batches", str(batches)]
    done = subprocess.run([*command, "--one", name, where], capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


def measure_here(name: str, samples: int, batches: int, is_resumed: bool) -> dict[str, float]:
    """In this process: seconds to the first batch and for each of the next, MiB that the peak rose by."""
    batches_of = iter(CONTESTANTS[name](samples, is_resumed))
    before_kib, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    next(batches_of)
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    taken = sum(1 for _ in islice(batches_of, batches))
    batch_s = (time.perf_counter() - started) / taken
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    return {"first_s": first_s, "batch_s": batch_s, "memory_mib": mib}


if __name__ == "__main__":
    main()

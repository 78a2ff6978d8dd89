"""A training step: shardkit, torch by hand, Lightning Fabric and accelerate, in turn, in the same processes.

    python -m benchmarks.step [--layers 8] [--hidden 256] [--rounds 15] [--family fsdp] [--output step.json]

The ranks are those of `shardkit launch`, so progress files and the look for a stop signal at every step are on. CPU
ranks with gloo; GPUs with NCCL where there are enough of them. Loops are in `contestants.py`. "CPU" is the processor
time of all ranks together: it shows work where seconds show how busy the machine was, too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import interleaved
from benchmarks.contestants import FAMILIES, HAND_DEFAULT, HAND_FUSED, SHARDKIT, Task

ROOT = Path(__file__).parent.parent

# What the project promises under FSDP, by the median of ratios within a round.
TARGETS = {HAND_FUSED: 1.02, HAND_DEFAULT: 0.92}


def main() -> None:
    """Measure, print tables, write JSON where it is asked for."""
    options = _options()
    device = "cpu" if options.cpu or torch.cuda.device_count() < options.ranks else "cuda"
    task = Task(options.layers, options.hidden, options.heads, options.vocab, options.seq, options.batch, device)
    result = {**interleaved.surroundings(), "ranks": options.ranks, "steps": options.steps, "task": asdict(task)}
    for family in options.family or FAMILIES:
        measured = measure(family, task, options.ranks, options.rounds, options.steps)
        result[family] = summary(measured)
        _show(family, f"{options.ranks} ranks on {device}", measured)
    if options.output:
        interleaved.write(options.output, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 256), ("heads", 4), ("vocab", 8192), ("seq", 64), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="training steps in a turn")
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="repeatable; by default all")
    parser.add_argument("--cpu", action="store_true", help="CPU ranks even where GPUs are")
    parser.add_argument("--output", type=interleaved.writable)
    return parser.parse_args()


def measure(family: str, task: Task, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """What the ranks of one launch found: wall_s and cpu_s by contestant and round, and left_out with reasons."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shardkit.yaml").write_text(_configuration(family, task, ranks))
        asked = {"family": family, "task": asdict(task), "rounds": rounds, "steps": steps}
        (folder / "task.json").write_text(json.dumps(asked))
        command = [
            *(sys.executable, "-m", "shardkit", "launch", "--config", str(folder / "shardkit.yaml")),
            *("--logs", str(folder / "logs"), "-m", "benchmarks.step_rank"),
            *(str(folder / "task.json"), str(folder / "result.json")),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"step: the ranks failed (got exit code {done.returncode})\n{done.stdout}{done.stderr}")
        return json.loads((folder / "result.json").read_text())


def _configuration(family: str, task: Task, ranks: int) -> str:
    lines = ["mixed_precision: 'no'", f"num_processes: {ranks}", f"use_cpu: {str(task.device == 'cpu').lower()}"]
    if family == "ddp":
        return "\n".join([f"distributed_type: {'MULTI_CPU' if task.device == 'cpu' else 'MULTI_GPU'}", *lines, ""])
    return "\n".join(
        [
            *("distributed_type: FSDP", *lines, "fsdp_config:", "  fsdp_sharding_strategy: FULL_SHARD"),
            *("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "  fsdp_transformer_layer_cls_to_wrap: Block", ""),
        ]
    )


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds of one family."""
    return {
        "wall": interleaved.summary(measured["wall_s"], interleaved.ratios(measured["wall_s"], SHARDKIT)),
        "cpu": interleaved.summary(measured["cpu_s"], interleaved.ratios(measured["cpu_s"], SHARDKIT)),
        "left_out": measured["left_out"],
        "targets": {f"{SHARDKIT} / {name}": target for name, target in TARGETS.items()},
    }


def _show(family: str, where: str, measured: dict[str, Any]) -> None:
    for title, rounds in (("seconds", measured["wall_s"]), ("CPU", measured["cpu_s"])):
        print(f"{family.upper()}, {where}, a step, {title}")
        print(interleaved.table(rounds, interleaved.ratios(rounds, SHARDKIT)))
    for name, reason in measured["left_out"].items():
        print(f"  {name}: left out; {reason}")
    if family == "fsdp":
        print("  targets: " + ", ".join(f"{SHARDKIT} / {name} at most {target}" for name, target in TARGETS.items()))


if __name__ == "__main__":
    main()

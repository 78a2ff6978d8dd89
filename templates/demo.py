"""The whole way in two minutes, on this machine's CPU: configure, train on 2 ranks, stop, resume on 3 with another
strategy, export, and read the export with plain torch. Every step is checked; the first check that fails ends it.

python templates/demo.py [FOLDER] [--quick]
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# fp32 sums in another order on 3 ranks than on 2, and 20 more steps to drift.
TOLERANCE = 0.01

Losses = dict[int, float]


@dataclass(frozen=True)
class Steps:
    """The first run goes to `first` and saves at `saved`, the second goes on from there to `last`."""

    first: int
    saved: int
    last: int
    log_every: int
    global_batch: int


FULL = Steps(first=120, saved=100, last=240, log_every=5, global_batch=24)
QUICK = Steps(first=28, saved=16, last=48, log_every=4, global_batch=12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="demo", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps")
    arguments = parser.parse_args()
    folder, steps = arguments.folder, QUICK if arguments.quick else FULL
    clear(folder)
    started = time.monotonic()

    title("1. Configure: two ranks on the CPU, the model split over them (strategy 1)")
    config = configure(folder)
    title("2. Train a small GPT on the sources of Python's standard library")
    before = train(folder, config, steps, steps.first)
    check_training(before, steps)
    title("3. The run is over. What is left of it?")
    inspect(folder, steps)
    title(f"4. Go on from step {steps.saved} on three ranks, with another strategy (2)")
    other = ["-n", "3", "--set", "fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP", "--resume", "auto"]
    after = train(folder, config, steps, steps.last, *other)
    check_resumed(before, after, steps)
    title("5. Plain torch, without shardkit, reads the export and writes")
    write_sample(folder)

    print(f"\nAll checks passed in {time.monotonic() - started:.0f} s. What was made is in {folder}/.")


def clear(folder: Path) -> None:
    """Deletes what an earlier demo left there, and nothing else: a folder with other files ends it."""
    others = sorted({path.name for path in folder.iterdir()} - {"shardkit.yaml", "run"}) if folder.is_dir() else []
    if others or (folder.exists() and not folder.is_dir()):
        sys.exit(
            f"demo: {folder}: is not the folder of an earlier demo (got {', '.join(others[:3]) or 'a file'}); "
            "give another name, as in: python demo.py demo"
        )
    shutil.rmtree(folder, ignore_errors=True)


def configure(folder: Path) -> Path:
    """The configuration file."""
    config = folder / "shardkit.yaml"
    folder.mkdir(parents=True)
    settings = ["distributed_type=FSDP", "use_cpu=true", "num_processes=2", "mixed_precision=no"]
    settings += ["fsdp_config.fsdp_sharding_strategy=FULL_SHARD"]
    shardkit("config", "--defaults", *(word for setting in settings for word in ("--set", setting)), "-o", str(config))
    check(config.is_file(), f"{config} is written")
    shardkit("config", "validate", str(config))
    check(True, f"{config} is valid")
    return config


def train(folder: Path, config: Path, steps: Steps, until: int, *options: str) -> Losses:
    """One launch of the starter script; the losses that it printed, by step."""
    script = [str(HERE / "train.py"), "--folder", str(folder / "run"), "--steps", str(until)]
    script += ["--save-every", str(steps.saved), "--log-every", str(steps.log_every)]
    script += ["--global-batch", str(steps.global_batch)]
    output = shardkit("launch", "--config", str(config), *options, *script)
    found = re.findall(r"step +(\d+) +loss +([\d.]+)", output)
    return {int(step): float(loss) for step, loss in found}


def check_training(losses: Losses, steps: Steps) -> None:
    first, last = losses.get(1), losses.get(steps.first)
    if first is None or last is None:
        sys.exit("✗ the run printed no losses")
    check(last < 0.6 * first, f"the loss fell from {first:.2f} to {last:.2f} in {steps.first} steps")


def inspect(folder: Path, steps: Steps) -> None:
    """The newest checkpoint that the run left, verified byte by byte."""
    found = sorted((folder / "run").rglob("step-*"))
    check(bool(found), f"{len(found)} checkpoint{'s' if len(found) != 1 else ''} in {folder / 'run'}")
    newest = found[-1]
    check(int(newest.name.removeprefix("step-")) == steps.first // steps.saved * steps.saved, f"the newest is {newest}")
    shardkit("checkpoint", "verify", str(newest))
    check(True, "every byte is as it was saved")


def check_resumed(before: Losses, after: Losses, steps: Steps) -> None:
    """The resumed run repeats the first run's last steps, and goes on falling."""
    both = sorted(step for step in before.keys() & after.keys() if step > steps.saved)
    check(len(both) >= 3 and min(after) > steps.saved, f"it went on after step {steps.saved}, and repeated none before")
    print("  step   2 ranks, FULL_SHARD   3 ranks, SHARD_GRAD_OP, resumed")
    for step in both:
        print(f"  {step:4d}   {before[step]:19.4f}   {after[step]:29.4f}")
    apart = max(abs(before[step] - after[step]) for step in both)
    check(apart <= TOLERANCE, f"it is the same curve: the two differ by {apart:.4f} at most")
    check(mean_of_last(after) < mean_of_last(before), f"and it falls on, to {mean_of_last(after):.2f}")


def mean_of_last(losses: Losses, count: int = 8) -> float:
    """Batches differ: the mean over the last few is steadier than the last."""
    last = [losses[step] for step in sorted(losses)[-count:]]
    return sum(last) / len(last)


def write_sample(folder: Path) -> None:
    export = folder / "run" / "export"
    parts = list(export.glob("*.safetensors"))
    check(bool(parts), f"{export} holds {sum(part.stat().st_size for part in parts):,} bytes of safetensors")
    for index in export.glob("*.index.json"):
        json.loads(index.read_text())
    sample = run([sys.executable, str(HERE / "sample.py"), str(export), "def "])
    check(len(sample) > 100, "plain torch loaded it, every weight by its name, and wrote the lines above")


def shardkit(*arguments: str) -> str:
    return run([sys.executable, "-m", "shardkit", *arguments], shown=["shardkit", *arguments])


def run(command: list[str], shown: list[str] | None = None) -> str:
    """What a command printed, which is shown as it comes; a command that fails ends the demo with its exit code."""
    print(f"\n$ {shlex.join(shown or ['python', *command[1:]])}", flush=True)
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
    if child.returncode:
        print(f"✗ the command ended with exit code {child.returncode}")
        sys.exit(child.returncode)
    return "".join(lines)


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def check(holds: bool, text: str) -> None:
    print(f"{'✓' if holds else '✗'} {text}", flush=True)
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The whole way in two minutes, on this machine's CPU: configure, train on 2 ranks, stop, resume on 3 with another
strategy, export, and read the export with plain torch. Every step is checked; the first check that fails ends it.

python templates/demo.py [FOLDER]
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST_STEPS, SAVED_STEP, LAST_STEPS, LOG_EVERY = 120, 100, 240, 5
# fp32 sums in another order on 3 ranks than on 2, and 20 more steps to drift.
TOLERANCE = 0.01

Losses = dict[int, float]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()

    title("1. Configure: two ranks on the CPU, the model split over them (strategy 1)")
    config = configure(folder)
    title("2. Train a small GPT on the sources of Python's standard library")
    before = train(folder, config, FIRST_STEPS)
    check_training(before)
    title("3. The run is over. What is left of it?")
    inspect(folder)
    title(f"4. Go on from step {SAVED_STEP} on three ranks, with another strategy (2)")
    other = ["-n", "3", "--set", "fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP", "--resume", "auto"]
    after = train(folder, config, LAST_STEPS, *other)
    check_resumed(before, after)
    title("5. Plain torch, without shardkit, reads the export and writes")
    write_sample(folder)

    print(f"\nAll checks passed in {time.monotonic() - started:.0f} s. What was made is in {folder}/.")


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


def train(folder: Path, config: Path, steps: int, *options: str) -> Losses:
    """One launch of the starter script; the losses that it printed, by step."""
    script = [str(HERE / "train.py"), "--folder", str(folder / "run"), "--steps", str(steps)]
    script += ["--save-every", str(SAVED_STEP), "--log-every", str(LOG_EVERY)]
    output = shardkit("launch", "--config", str(config), *options, *script)
    found = re.findall(r"step +(\d+) +loss +([\d.]+)", output)
    return {int(step): float(loss) for step, loss in found}


def check_training(losses: Losses) -> None:
    first, last = losses.get(1), losses.get(FIRST_STEPS)
    if first is None or last is None:
        sys.exit("✗ the run printed no losses")
    check(last < 0.6 * first, f"the loss fell from {first:.2f} to {last:.2f} in {FIRST_STEPS} steps")


def inspect(folder: Path) -> None:
    """The checkpoint that the run left, verified byte by byte."""
    steps = sorted((folder / "run").rglob("step-*"))
    check(bool(steps), f"a checkpoint of step {SAVED_STEP} is there")
    shardkit("checkpoint", "verify", str(steps[-1]))
    check(steps[-1].name.endswith(str(SAVED_STEP)), f"{steps[-1]}: every byte is as it was saved")


def check_resumed(before: Losses, after: Losses) -> None:
    """The resumed run repeats the first run's last steps, and goes on falling."""
    both = sorted(step for step in before.keys() & after.keys() if step > SAVED_STEP)
    check(len(both) >= 3 and min(after) > SAVED_STEP, f"it went on after step {SAVED_STEP}, and repeated none before")
    print("  step   2 ranks, FULL_SHARD   3 ranks, SHARD_GRAD_OP, resumed")
    for step in both:
        print(f"  {step:4d}   {before[step]:19.4f}   {after[step]:29.4f}")
    apart = max(abs(before[step] - after[step]) for step in both)
    check(apart <= TOLERANCE, f"it is the same curve: the two differ by {apart:.4f} at most")
    check(after[LAST_STEPS] < before[FIRST_STEPS], f"and it falls on, to {after[LAST_STEPS]:.2f}")


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

"""Elastic runs for tests: machines as launchers on this machine's loopback, that come and go."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.launches import Running, free_port, is_alive, script
from tests.scripts import elastic

PATIENCE_S = 270
"""For each wait, on a machine that is busy with other things."""
GLOBAL_BATCH = 16
"""Two machines with a rank each, batches of 4, windows of 2."""


class ElasticRun:
    """A run with up to two machines, by the names that the test gives them. Closed at the end of the `with` block."""

    def __init__(self, path: Path, steps: int, pause_s: float = 0.2, machines: str = "1:2", most: int = 2) -> None:
        self.path, self.port, self.machines = path, free_port(), {}
        self.folder = path / "run"
        self._range, self._most, self._steps, self._pause_s = machines, most, steps, pause_s

    def __enter__(self) -> "ElasticRun":
        return self

    def __exit__(self, *error: object) -> None:
        for machine in self.machines.values():
            machine.close()

    def start(self, name: str, *flags: str, join_timeout_s: float = PATIENCE_S, lost_timeout_s: float = 60) -> Running:
        """A machine comes; without `--machine-rank` among the flags it gets a free number."""
        (self.path / name).mkdir()
        limits = {"join_timeout_s": join_timeout_s, "lost_timeout_s": lost_timeout_s, "meet_timeout_s": PATIENCE_S}
        words = ["-n", str(self._most), "--nnodes", self._range, "--main", f"127.0.0.1:{self.port}"]
        for key, value in limits.items():
            words += ["--set", f"shardkit.launch.{key}={value}"]
        run = [script("elastic"), str(self.folder), str(self._steps), str(self._pause_s)]
        self.machines[name] = Running(self.path / name, *words, *flags, *run)
        return self.machines[name]

    def start_both(self, **limits: float) -> Running:
        """Machines 0 and 1 come, as "first" and "second"; returns the second."""
        self.start("first", "--machine-rank", "0", **limits)
        return self.start("second", "--machine-rank", "1", **limits)

    def wait_for(self, name: str, pattern: str) -> None:
        """Until a line of the machine's output matches."""
        self._wait(lambda: re.search(pattern, self.machines[name].text()) is not None, pattern)

    def wait_for_steps(self, steps: int, world: int | None = None) -> None:
        """Until so many steps have been trained, in a world of this size where one is given."""
        self._wait(lambda: any(step >= steps and world in (None, size) for step, _, _, size in self.lines()), "steps")

    def end(self, name: str) -> int:
        """The exit code of a machine, once it has ended by itself."""
        self._wait(lambda: self.machines[name].process.poll() is not None, f"the end of {name}")
        return self.machines[name].process.wait()

    def kill(self, name: str) -> None:
        """The machine dies: its launcher, and with it its ranks."""
        self.machines[name].process.kill()
        self.machines[name].process.wait()
        self.wait_until_gone(name)

    def suspend(self, name: str) -> None:
        """The machine stands still, with its ranks, as one that the network has lost."""
        launcher = self.machines[name].process.pid
        for pid in (launcher, *map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())):
            os.kill(pid, signal.SIGSTOP)

    def hold(self) -> None:
        """Keep the ranks after their present step, until `go_on`."""
        (self.folder / "hold").touch()

    def go_on(self) -> None:
        (self.folder / "hold").unlink()

    def wait_for_save(self) -> None:
        """Until a checkpoint is being written, or the next one is there."""
        root = self.folder / "checkpoints"
        before = sorted(path.name for path in root.iterdir())
        self._wait(lambda: sorted(path.name for path in root.iterdir()) != before, "a save")

    def wait_until_gone(self, name: str) -> None:
        """Until none of the machine's ranks is left."""
        self._wait(lambda: not any(map(is_alive, self.pids(name))), f"the ranks of {name} to be gone")

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_over():
            assert time.monotonic() < until, f"waited in vain for {what}:\n{self.text()}"
            time.sleep(0.05)

    def lines(self) -> list[tuple[int, float, list[int], int]]:
        """(step, loss, samples, world) of every step that was trained, also of those that were trained again."""
        path = self.folder / "steps.jsonl"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def text(self) -> str:
        return "\n".join(f"=== {name}\n{machine.text()}" for name, machine in self.machines.items())

    def pids(self, name: str) -> list[int]:
        """The ranks that the machine has started."""
        return [int(pid) for pid in re.findall(r"pid (\d+) at step", self.machines[name].text())]


def check_losses(lines: list[tuple[int, float, list[int], int]], steps: int) -> None:
    """Every step was trained, on the samples of an uninterrupted run, with the losses of one process without shardkit
    on the same global batch; steps that were trained again too."""
    samples = {step: numbers for step, _, numbers, _ in lines}
    assert sorted(samples) == list(range(1, steps + 1))
    assert all(samples[step] == numbers for step, _, numbers, _ in lines)
    per_epoch = elastic.SAMPLES // GLOBAL_BATCH
    for first in range(1, steps - per_epoch + 2, per_epoch):
        epoch = [number for step in range(first, first + per_epoch) for number in samples[step]]
        assert sorted(epoch) == list(range(elastic.SAMPLES))
    expected = plain_losses([samples[step] for step in range(1, steps + 1)])
    for step, loss, _, world in lines:
        assert abs(loss - expected[step - 1]) < 1e-5, (step, world, loss, expected[step - 1])


def plain_losses(batches: list[list[int]]) -> list[float]:
    """The loss before each step of plain torch in this process."""
    data = elastic.data()
    state = torch.get_rng_state()
    model, optimizer = elastic.model_and_optimizer()
    torch.set_rng_state(state)
    losses = []
    for batch in batches:
        inputs, targets = (torch.stack([data[number][place] for number in batch]) for place in (1, 2))
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses

"""What a script does on all ranks alike: batch sizes, logs, bars, traces, forked ranks, a second Accelerator."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardkit
from shardkit import Accelerator, debug_launcher, find_executable_batch_size, get_logger, notebook_launcher, tqdm
from shardkit.distributed import process
from shardkit.errors import ConfigError, MachineError, UsageError
from shardkit.runtime import batch_size, notebook
from tests import forked, loops
from tests.loops.net import Net, loss_of
from tests.printed import ROOT
from tests.ranks import Pool, RankError, log_lines
from tests.training import Model, Points

DDP = {"distributed_type": "MULTI_CPU", "use_cpu": True}
ALONE = {"distributed_type": "NO", "use_cpu": True}


def sizes() -> dict[str, Any]:
    """One rank runs out of memory; another fails."""
    rank = dist.get_rank()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, more: str) -> tuple[int, str]:
        tried.append(batch_size)
        if rank == 1 and batch_size > 80:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return batch_size, more

    result = train(more="more")

    def never(batch_size: int) -> None:
        raise MemoryError

    def fails(batch_size: int) -> None:
        if rank == 0:
            raise KeyError("a mistake")

    with pytest.raises(MachineError) as out:
        find_executable_batch_size(never, 3, lambda size: size - 1)()
    with pytest.raises(KeyError if rank == 0 else UsageError) as failed:
        find_executable_batch_size(fails)()
    with pytest.raises(UsageError, match=r"takes no batch size \(got no parameters\)"):
        find_executable_batch_size(lambda: None)
    return {"tried": tried, "result": result, "out": str(out.value), "failed": str(failed.value)}


@pytest.mark.slow
def test_all_ranks_go_on_with_the_same_batch_size(ranks):
    first, second = ranks.run(2, sizes)
    assert first["tried"] == second["tried"] == [100, 90, 81, 72]
    assert first["result"] == second["result"] == (72, "more")
    assert "runs out of memory with every batch size (got 3 to start with)" in first["out"]
    assert "a mistake" in first["failed"] and "rank 0 failed with a batch of 128" in second["failed"]


def out_of_memory_alone() -> str:
    """Rank 1 runs out of memory between two exchanges; rank 0 waits in the next one."""
    batch_size.ALONE_S = 1.0

    @find_executable_batch_size(starting_batch_size=8)
    def train(size: int) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("out of memory")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(MachineError) as raised:
        train()
    return str(raised.value)


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_alone_says_so():
    waiting, alone = forked.run(2, out_of_memory_alone)
    assert alone.value == (
        "find_executable_batch_size: out of memory with a batch of 8 on this rank alone, in the middle of a step (got: "
        "rank 0 has not come after 1 s); start with a smaller batch, or give all ranks batches of one size, so that "
        "they run out of memory together."
    )
    assert waiting.error is not None, "it ends with the other"


@pytest.mark.slow
@pytest.mark.parametrize("takes_the_size", [True, False])
def test_the_next_size_is_asked_for_once(takes_the_size):
    """Accelerate calls the function without an argument."""
    sizes = iter([64, 32, 16])
    tried = []

    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 32:
            raise MemoryError

    reduce = (lambda size: next(sizes)) if takes_the_size else (lambda: next(sizes))
    with log_lines(level=logging.INFO) as lines:
        find_executable_batch_size(train, 128, reduce)()
    assert tried == [128, 64, 32]
    assert [line.partition("; ")[2] for line in lines] == ["going on with 64.", "going on with 32."]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), record.funcName))


def logs() -> tuple[list[tuple[str, str]], list[bool]]:
    logger, kept = get_logger("tests.ranks", log_level="info"), Kept()
    logging.getLogger("tests.ranks").addHandler(kept)
    try:
        logger.info("one %d", 1)
        logger.info("all", main_process_only=False)
        logger.warning("in order", main_process_only=False, in_order=True)
        logger.debug("quiet", main_process_only=False)
        for _ in range(3):
            logger.warning_once("once")
            logger.warning_once("once in %d", 3)
    finally:
        logging.getLogger("tests.ranks").removeHandler(kept)
        logging.getLogger().setLevel(logging.WARNING)
    bars = [tqdm(range(2)).disable, tqdm(range(2), main_process_only=False).disable]
    return kept.lines, bars


def test_logs_and_bars_know_the_ranks(ranks):
    (first, bars), (second, other_bars) = ranks.run(2, logs)
    assert first == [("one 1", "logs"), ("all", "logs"), ("in order", "logs"), ("once", "logs"), ("once in 3", "logs")]
    assert second == [("all", "logs"), ("in order", "logs")]
    assert bars == [False, False] and other_bars == [True, False]
    with pytest.raises(UsageError, match=r"unknown level \(got 'loud'\)"):
        get_logger("tests.ranks", "loud")


class Says:
    def __init__(self, settings: dict[str, Any], call: Any = None) -> None:
        self.settings, self.on_trace_ready = settings, call

    def shardkit_settings(self) -> dict[str, Any]:
        return self.settings


def traces(folder: Path) -> list[str]:
    settings = {"profile": {"active": 1, "wait": 1, "repeat": 2, "record_shapes": True}}
    accelerator = Accelerator(config=DDP | {"shardkit": settings}, project_dir=folder)
    with accelerator.profile() as profiler:
        for _ in range(4):
            torch.ones(3, 3) @ torch.ones(3, 3)
            profiler.step()
    with accelerator.profile(Says({"shardkit.profile.with_flops": True})):
        torch.ones(3, 3) @ torch.ones(3, 3)
    seen: list[str] = []
    with accelerator.profile(Says({}, lambda profiler: seen.append(str(profiler.key_averages())))):
        torch.ones(3, 3) @ torch.ones(3, 3)
    with pytest.raises(UsageError, match=r"profile: is not a settings object \(got 3\)"), accelerator.profile(3):
        pass
    with Accelerator(config=DDP).profile() as profiler:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert "aten::mm" in str(profiler.key_averages())
    return seen


def test_a_schedule_that_never_records_is_said(tmp_path, alone, caplog):
    """The folder without a trace was named as that of the traces."""
    settings = {
        "distributed_type": "NO",
        "use_cpu": True,
        "shardkit": {"profile": {"wait": 2, "warmup": 3, "active": 1}},
    }
    accelerator = Accelerator(config=settings, project_dir=tmp_path)
    with accelerator.profile() as profiler:
        profiler.step()
    assert "no trace was written, since the schedule begins to record after 5 calls of profiler.step() (got 1)" in (
        caplog.text
    )
    accelerator.end_training()


def test_each_rank_leaves_its_trace(ranks, tmp_path):
    for seen in ranks.run(2, traces, tmp_path):
        assert "aten::" in seen[0]
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == [f"profile_{rank}{cycle}.json" for rank in (0, 1) for cycle in (".1", ".2", "")]
    for path in (tmp_path / "profile").iterdir():
        assert any(event.get("name") == "aten::mm" for event in json.loads(path.read_text())["traceEvents"])


def a_cell(folder: Path, fails_on: int | None = None) -> None:
    """What a notebook's function does."""
    accelerator = Accelerator(mixed_precision=None)
    if accelerator.process_index == fails_on:
        raise ValueError("a mistake in the cell")
    model = Model()
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(Points(8), batch_size=2))
    for batch in loader:
        accelerator.backward(model(batch["x"]).sum())
    total = accelerator.gather(torch.ones(1)).sum().item()
    facts = [total, accelerator.mixed_precision, str(accelerator.device)]
    (folder / str(accelerator.process_index)).write_text(json.dumps(facts))


def a_cell_with_a_collective_in_flight() -> None:
    """As on NCCL: the end of the group waits for the collective, and the collective for the other rank."""
    Accelerator()
    dist.destroy_process_group = lambda: time.sleep(300)
    raise ValueError("a mistake beside a collective")


def cells(folder: Path) -> None:
    """A notebook: a separate process in which one cell after another starts ranks."""
    debug_launcher(a_cell, (folder,), num_processes=2)
    assert [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)] == [[2.0, "no", "cpu"]] * 2
    with pytest.raises(Exception, match="a mistake in the cell"):
        notebook_launcher(a_cell, (folder, 1), num_processes=2)
    with pytest.raises(Exception, match="a mistake beside a collective"):
        debug_launcher(a_cell_with_a_collective_in_flight, num_processes=2)
    notebook_launcher(a_cell, (folder,), num_processes=1, mixed_precision="bf16")  # a cell run again
    assert json.loads((folder / "0").read_text())[:2] == [1.0, "bf16"]


def cell_that_hangs(times: int) -> None:
    """A notebook in which a forked rank never comes to its function, the first times."""
    taken = multiprocessing.Value("i", 0)

    def hang() -> None:
        with taken.get_lock():
            taken.value += 1
        if taken.value <= 2 * times:
            time.sleep(300)

    notebook.READY_S, notebook._take_locks = 1.0, hang
    debug_launcher(print, num_processes=2)


def in_a_notebook(code: str, folder: Path) -> subprocess.CompletedProcess:
    """The code, with the names of this file, in a process of its own."""
    whole = f"from tests.test_on_all_ranks import *\n{code}"
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", whole], cwd=folder, env=where, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_ranks_that_hang_when_forked_are_forked_anew_a_few_times(tmp_path):
    done = in_a_notebook("cell_that_hangs(1)\ncell_that_hangs(9)", tmp_path)
    assert "debug_launcher: ranks 0, 1 did not begin in 1 s" in done.stderr
    assert done.stdout == "\n\n", "the first cell's function ran once a rank"
    assert "debug_launcher: ranks 0, 1 did not begin (forked 3 times): a thread of this process holds" in done.stderr


def beside_a_gpu(asks_before: bool) -> None:
    """A notebook on a machine with two GPUs. As with CUDA, a process cannot use them that is forked after this one has
    asked the driver."""
    asked = []

    def is_available() -> bool:
        asked.append(os.getpid())
        return True

    gpu = SimpleNamespace(is_initialized=lambda: False, device_count=lambda: 2, is_available=is_available)
    gpu._is_in_bad_fork = lambda: any(pid != os.getpid() for pid in asked)
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.is_available = is_available
    torch.get_device_module = lambda device: gpu
    notebook.hardware.detect = lambda: SimpleNamespace(devices=("one", "two"))
    if asks_before:
        torch.accelerator.is_available()
    notebook_launcher(lambda: os.write(1, f"bad fork: {gpu._is_in_bad_fork()}\n".encode()))


@pytest.mark.slow
def test_ranks_are_forked_before_anything_asks_the_gpus_driver(tmp_path):
    done = in_a_notebook("beside_a_gpu(False)\nbeside_a_gpu(True)", tmp_path)
    assert done.stdout == "bad fork: False\n" * 2
    assert "forked ranks cannot use it then (got torch.cuda initialized, or a call such as torch" in done.stderr


@pytest.mark.slow
def test_forked_ranks(tmp_path):
    done = in_a_notebook(f"cells(Path({str(tmp_path)!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "starting 2 ranks." in done.stderr and "starting 1 rank." in done.stderr


def a_long_cell(ends: bool) -> None:
    """Ends when it is interrupted, after it has tidied up, or never."""
    while True:
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            os.write(1, b"interrupted\n")
            time.sleep(0.2)
            if ends:
                os.write(1, b"tidy\n")
                return


def interrupted_cell(ends: bool, times: int, as_a_group: bool) -> None:
    """A notebook whose stop button is pressed so often. The interrupt reaches its process alone, or its ranks, too."""

    def stop() -> None:
        for _ in range(times):
            time.sleep(1.5)
            os.killpg(0, signal.SIGINT) if as_a_group else os.kill(os.getpid(), signal.SIGINT)

    os.setpgid(0, 0)
    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        debug_launcher(a_long_cell, (ends,), num_processes=2)
    print(len(multiprocessing.active_children()), "left", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("as_a_group", [False, True])
def test_an_interrupted_cell_ends_its_ranks(tmp_path, as_a_group):
    done = in_a_notebook(f"interrupted_cell(True, 1, {as_a_group})", tmp_path)
    assert done.stdout == "interrupted\n" * 2 + "tidy\n" * 2 + "0 left\n"
    assert "debug_launcher: interrupted; the ranks end within 30 s, once more ends them now." in done.stderr
    done = in_a_notebook(f"interrupted_cell(False, 2, {as_a_group})", tmp_path)
    assert done.stdout == "interrupted\n" * 2 + "0 left\n"


def test_what_cannot_be_forked_is_refused(alone, monkeypatch):
    with pytest.raises(UsageError, match=r"on this machine \(got num_nodes=2\); use `shardkit launch`"):
        notebook_launcher(a_cell, num_nodes=2, master_addr="127.0.0.1")
    with pytest.raises(UsageError, match=r"num_processes=\.\.\.\): must be 1 or more \(got -1\)"):
        debug_launcher(a_cell, num_processes=-1)
    Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})  # an earlier cell
    with pytest.raises(UsageError, match=r"has a process group, .*; call its end_training\(\), or restart"):
        debug_launcher(a_cell)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="this process is a rank itself"):
        debug_launcher(a_cell)


def test_a_second_accelerator_asks_for_what_the_process_has(tmp_path, alone):
    whole = {"distributed_type": "FSDP", "use_cpu": True}
    project = shardkit.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    for _ in range(2):  # a cell run again
        accelerator = Accelerator(config=whole, project_config=project)
        model = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(Points(2).x).sum())
        optimizer.step()
        accelerator.save_state()
    Accelerator(config=whole, mixed_precision="bf16")  # each has its own
    other = whole | {"shardkit": {"launch": {"process_group_timeout_s": 77}}}
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=other)
    assert "process_group_timeout_s: 77.0 here, but 1800.0 for the existing process group" in str(caught.value)
    dist.destroy_process_group()
    Accelerator(config=other)


def trained_in_two_worlds(folder: Path) -> list[list[float]]:
    """Norms and losses in a hybrid strategy, and again in a later process group whose groups have other names."""
    found: list[list[float]] = []
    for number in range(2):
        accelerator = Accelerator(config=loops.config_of(4, loops.LOOPS["usual"]))
        torch.manual_seed(0)
        model = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        found.append([])
        for _ in range(2):
            loss = loss_of(model, torch.arange(6)[None] % 11)
            accelerator.backward(loss)
            found[-1] += [accelerator.clip_grad_norm_(model.parameters(), 1.0).item(), loss.item()]
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            rank, world = dist.get_rank(), dist.get_world_size()
            process.leave()
            store = dist.FileStore(str(folder / "store"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            dist.new_group()
    return found


@pytest.mark.slow
def test_a_later_process_group_is_not_taken_for_an_earlier_one(ranks, tmp_path):
    """DTensor caches by mesh, and the meshes of two worlds are equal."""
    for first, second in ranks.run(4, trained_in_two_worlds, tmp_path):
        assert second == pytest.approx(first, abs=1e-6)


@pytest.mark.slow
def test_a_test_that_is_stopped_leaves_no_answers_to_the_next_one(monkeypatch):
    monkeypatch.setattr("tests.ranks.TIMEOUT_S", 0.5)
    pool = Pool()
    try:
        with pytest.raises(RankError, match=r"ranks \[0\] gave no answer"):
            pool.run(1, time.sleep, 600)
        monkeypatch.undo()
        monkeypatch.setattr("tests.ranks.wait", stopped)
        with pytest.raises(KeyboardInterrupt):
            pool.run(1, int, "1")
        monkeypatch.undo()
        assert pool.run(1, int, "2") == [2]
    finally:
        pool.close()


def stopped(*args: object, **settings: object) -> None:
    raise KeyboardInterrupt

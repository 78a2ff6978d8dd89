"""Who a process is, which device it has, and the world that was asked for."""

import gc
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from shardkit import Accelerator, env
from shardkit.config.schema import Config, DistributedType
from shardkit.distributed import process, rank_store
from shardkit.errors import ConfigError, MachineError, UsageError
from shardkit.launch import stores
from shardkit.launch.forking import fork
from shardkit.runtime import summary
from shardkit.tracking import trackers
from tests import forked
from tests.launches import free_port

ALONE = {"distributed_type": "FSDP", "use_cpu": True}


def started() -> tuple:
    config = process.check_world(Config(use_cpu=True), {})
    found = process.start(config)
    own_timeout = found.control.timeout_s
    places = (found.rank, found.local_rank, found.world_size, found.local_world_size)
    return places, str(found.device), found.backend, found.owns_group, own_timeout, config.num_processes


def test_a_rank_knows_its_place_and_uses_the_group_that_is_up(ranks):
    assert ranks.run(2, started) == [((rank, rank, 2, 2), "cpu", "gloo", False, 1800.0, 2) for rank in range(2)]


def machines_of_three_ranks(places: list[tuple[int, int]]) -> str:
    local_rank, size = places[dist.get_rank()]
    found = dict(os.environ)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(size))
    try:
        return summary.of_world(process.start(Config(use_cpu=True)), Config(use_cpu=True))
    finally:
        os.environ.update(found)


@pytest.mark.parametrize(
    ("places", "world"),
    [
        ([(0, 2), (1, 2), (0, 1)], "3 ranks on 2 machines, cpu, gloo"),
        ([(0, 1), (0, 2), (1, 2)], "3 ranks on 2 machines, cpu, gloo"),
        ([(0, 3), (1, 3), (2, 3)], "3 ranks, cpu, gloo"),
    ],
)
def test_machines_are_counted_where_they_have_different_numbers_of_ranks(ranks, places, world):
    assert ranks.run(3, machines_of_three_ranks, places) == [world] * 3


def one_kind_too_many() -> str:
    with pytest.raises(ConfigError) as caught:
        process.check_world(Config(distributed_type=DistributedType.NO), {"distributed_type": "shardkit.yaml:1:1"})
    return str(caught.value)


def test_several_ranks_contradict_one_process(ranks):
    assert (
        ranks.run(2, one_kind_too_many)
        == [
            "distributed_type: NO means one process (got 2 launched); use FSDP, MULTI_GPU or MULTI_CPU, "
            "or launch one process."
        ]
        * 2
    )


def test_nobody_chose_one_process_so_a_launched_world_shards(ranks):
    assert ranks.run(2, mode_of_default) == ["fsdp", "fsdp"]


def mode_of_default() -> str:
    return process.check_world(Config(distributed_type=DistributedType.NO), {}).mode


def device_missing_on_one_rank() -> str:
    rank = dist.get_rank()
    found = process._device
    process._device = lambda config, local_rank: ("this machine: no GPU" if rank else None, torch.device("cpu"))
    try:
        with pytest.raises(MachineError) as caught:
            process.start(Config(use_cpu=True, num_processes=2))
    finally:
        process._device = found
    return str(caught.value)


def test_a_device_that_one_rank_lacks_stops_all(ranks):
    assert ranks.run(2, device_missing_on_one_rank) == ["rank 1: this machine: no GPU"] * 2


def test_alone_without_sharding_there_is_no_group():
    found = process.start(Config(distributed_type=DistributedType.NO, use_cpu=True))
    assert (found.rank, found.world_size, found.backend, found.control.group) == (0, 1, "none", None)
    assert found.is_main and not dist.is_initialized()


def test_alone_with_sharding_there_is_a_group_of_one_until_the_end():
    found = process.start(Config(use_cpu=True))
    try:
        assert found.owns_group and dist.get_world_size() == 1
        assert process.launched() == env.Ranks(0, 0, 1, 1)
    finally:
        process.leave()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_an_accelerator_leaves_the_group_to_another_that_goes_on(alone):
    first, second = Accelerator(config=ALONE), Accelerator(config=ALONE)
    second.end_training()
    assert dist.is_initialized()
    first.end_training()
    assert not dist.is_initialized()


def test_the_last_accelerator_ends_the_group_of_one_that_was_dropped_or_refused(alone, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(trackers, "missing", lambda _: "Accelerator(log_with=...): wandb is not installed.")
        with pytest.raises(UsageError, match="not installed"):
            Accelerator(config=ALONE)
    assert dist.is_initialized()
    for _ in range(2):  # a cell of a notebook, run again
        accelerator = Accelerator(config=ALONE)
    accelerator.end_training()
    assert not dist.is_initialized()


def test_a_worker_that_imports_the_script_joins_no_group(monkeypatch):
    """It would wait there for ever: it has the variables of its rank. Python sets the mark while it imports."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match=r"is a worker process, .* below if __name__ == \"__main__\":, or give the"):
        process.start(Config(use_cpu=True))


@pytest.mark.parametrize("launcher_hosts", [False, True])
def test_a_group_after_another_finds_no_keys_of_that_one(alone, monkeypatch, launcher_hosts):
    """Also where the first one's store still exists: rank 0 may host it, and others may still use it."""
    port, launcher = free_port(), None
    if launcher_hosts:
        launcher = stores.hosted("127.0.0.1", port)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    kept = [launcher]
    for _ in range(2):
        process.start(Config(use_cpu=True, num_processes=1))
        store = dist.distributed_c10d._get_default_store()
        assert not store.check(["address of rank 0"])
        store.set("address of rank 0", "here")
        kept.append(store)
        process.leave()


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_a_traceback_names_the_rank_once_however_many_runs_a_process_had(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(3):
        assert process.start(Config(use_cpu=True, num_processes=1)).owns_group
        process.leave()
    sys.excepthook(ValueError, ValueError("told"), None)
    assert capsys.readouterr().err == "[rank0]: ValueError: told\n"


def test_a_tpu_without_torch_xla_is_refused_in_words():
    with pytest.raises(MachineError, match=r"needs the package torch_xla, which is not installed; pip install"):
        process.check_world(Config(distributed_type=DistributedType.XLA), {})


def limited_to(files: int, world_size: int) -> str:
    import resource

    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, found[1]), files))
    try:
        process.allow_connections(world_size)
    except MachineError as error:
        return str(error)
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@pytest.mark.slow
def test_too_few_open_files_are_told_before_gloo_ends_the_process():
    assert forked.run(1, limited_to, 900, 100)[0].value == "900"
    text = forked.run(1, limited_to, 900, 300)[0].value
    assert text.startswith("this machine: each of 300 ranks needs about 1156 open files (got a limit of 900)")
    assert "ulimit -n 1156" in text


def raised_limit() -> int:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    process.allow_connections(400)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_of_open_files_is_raised():
    assert forked.run(1, raised_limit)[0].value >= 256 + 3 * 400


def forks_with_a_group_in_its_garbage() -> int:
    """The exit code of a forked process that collects the garbage of a run that is over."""
    dist.destroy_process_group()
    env.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    gc.disable()
    assert process.start(Config(use_cpu=True, num_processes=1)).owns_group
    garbage = [dist.group.WORLD]
    garbage.append(garbage)
    del garbage
    process.leave()
    process._started.clear()
    pid = fork()
    if pid == 0:
        signal.alarm(20)  # joining a thread that is not there may also wait for ever
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def collects_after_a_fork() -> list[bool]:
    """Whether parent and child still collect garbage."""
    process.start(Config(use_cpu=True, num_processes=1))
    pid = fork()
    if pid == 0:
        os._exit(gc.isenabled())
    return [gc.isenabled(), bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))]


def test_a_forked_process_does_not_destroy_a_process_group_that_it_inherits():
    """As DataLoader's workers of a second run in a process: the group's threads are not there."""
    outcome = forked.run(1, forks_with_a_group_in_its_garbage)[0]
    assert (outcome.error, outcome.value) == (None, 0)
    assert forked.run(1, collects_after_a_fork)[0].value == [True, True]


# ranks that torchrun starts again, with the store of the earlier ones


def test_all_ranks_of_a_start_find_its_name_beside_keys_of_earlier_ones():
    store, earlier = dist.HashStore(), set()
    for size, ended in ((2, [1]), (3, [0, 2]), (3, [])):  # ranks that end before they have met the others
        for rank in ended:
            with pytest.raises(MachineError, match="did not come within 0 s"):
                rank_store.name_of_start(store, rank, size, 0.0)
        find = partial(rank_store.name_of_start, store, size=size, timeout_s=20.0)
        with ThreadPoolExecutor(size) as threads:
            names = set(threads.map(find, reversed(range(size))))
        assert len(names) == 1 and not names & earlier
        earlier |= names


def test_who_is_still_in_a_start_learns_that_a_rank_of_it_was_started_again(monkeypatch):
    store, again = dist.HashStore(), []
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            name, _ = threads.map(partial(rank_store.name_of_start, store, size=2, timeout_s=20.0), (0, 1))
        monkeypatch.setattr(rank_store, "_start", [(store, name)])
        again.append(rank_store.started_again())
        with pytest.raises(MachineError, match="did not come within 0 s"):  # where rank 0 does not know it yet
            rank_store.name_of_start(store, 1, 2, 0.0)
        again.append(rank_store.started_again())
    assert again == [None, 1, None, 1]

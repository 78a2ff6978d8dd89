"""enable_cpu_affinity: a rank runs on the cores next to its GPU."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from shardkit.config.schema import Config
from shardkit.distributed import accelerators, affinity, process

GPU = torch.device("cuda", 1)
ADDRESS = "0000:3b:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose GPU is next to core 0 and to some that it does not have; all cores are given back."""

    def at(node: int, cores: str) -> None:
        (tmp_path / "bus/pci/devices" / ADDRESS).mkdir(parents=True, exist_ok=True)
        (tmp_path / "bus/pci/devices" / ADDRESS / "numa_node").write_text(f"{node}\n")
        (tmp_path / "devices/system/node/node1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "devices/system/node/node1/cpulist").write_text(f"{cores}\n")

    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    module = SimpleNamespace(get_device_properties=lambda device: told)
    monkeypatch.setattr(accelerators, "_module", lambda device: module)
    monkeypatch.setattr(affinity.log, "propagate", True)
    monkeypatch.setattr(affinity.log.parent, "propagate", True)
    found = os.sched_getaffinity(0)
    yield at
    os.sched_setaffinity(0, found)


def test_the_cores_of_a_node_are_read(machine, tmp_path):
    machine(1, "0-2,8,10-11")
    assert affinity.cores_next_to(GPU, tmp_path) == {0, 1, 2, 8, 10, 11}


def test_all_threads_of_a_rank_are_pinned_to_those_that_it_may_use(machine, tmp_path, monkeypatch, caplog):
    first = min(os.sched_getaffinity(0))
    machine(1, f"{first},100000")
    pinned: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: pinned.update({task: cores}))
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    affinity.pin(GPU, tmp_path)
    ended.set()
    other.join()
    assert pinned[threading.get_native_id()] == pinned[other.native_id] == {first} and caplog.text == ""


@pytest.mark.parametrize(
    ("node", "cores", "words"),
    [
        (-1, "0", "cores next to cuda:1 are not found (got none); leave it out."),
        (1, "100000", "got only some that this process may not use"),
        (2, "0", "No such file"),
    ],
)
def test_what_cannot_be_pinned_is_said(machine, tmp_path, caplog, node, cores, words):
    machine(node, cores)
    found = os.sched_getaffinity(0)
    affinity.pin(GPU, tmp_path)
    assert "enable_cpu_affinity: no effect" in caplog.text and words in caplog.text
    assert os.sched_getaffinity(0) == found


def test_a_rank_on_a_gpu_is_pinned_where_the_setting_says_so(monkeypatch):
    pinned: list[torch.device] = []
    monkeypatch.setattr(affinity, "pin", pinned.append)
    for config, device in (
        (Config(enable_cpu_affinity=True), GPU),
        (Config(), GPU),
        (Config(enable_cpu_affinity=True), torch.device("cpu")),
    ):
        monkeypatch.setattr(process, "_device", lambda config, ranks, device=device: (None, device))
        monkeypatch.setattr(process, "_identity", lambda ranks, device: None)
        process.start(config.model_copy(update={"distributed_type": "NO"}))
    assert pinned == [GPU]

"""Any accelerator that torch knows is used through its generic interface; CUDA is named where only CUDA has a thing."""

import importlib.util
import json
import re
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator, env
from shardkit.compat.machine import get_current_device_type
from shardkit.compat.operations import synchronize_rng_state
from shardkit.config import hardware
from shardkit.config.schema import Config
from shardkit.data.device import to_device
from shardkit.data.preparing import prepare_loader
from shardkit.distributed import accelerators, collectives, control, process, random_state
from shardkit.env import Ranks
from shardkit.errors import MachineError
from shardkit.sharding import float8
from tests import models
from tests.printed import ROOT

# By file, how often it names torch.cuda, and why nothing else will do.
NAMED = {
    "shardkit/cli/env.py": (1, "the version of CUDA that torch was built for"),
    "shardkit/runtime/measure.py": (2, "the record of allocations that torch keeps for CUDA alone"),
    "shardkit/sharding/precision.py": (2, "bf16 without emulation, and the version of NCCL"),
}


def test_torch_cuda_is_named_where_the_list_says_and_nowhere_else():
    """`compat` has Accelerate's questions about CUDA, which are asked by name."""
    found = {
        str(path.relative_to(ROOT)): len(calls)
        for path in sorted(Path(ROOT, "shardkit").rglob("*.py"))
        if "compat" not in path.parts and (calls := re.findall(r"torch\.cuda\.\w+\.?\w*\(", path.read_text()))
    }
    assert found == {name: count for name, (count, _) in NAMED.items()} | {"shardkit/cli/env.py": 1}


class FakeModule:
    """What an extension registers for its device: `empty_cache` is not part of it."""

    def __init__(self) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()

    def get_device_name(self, device: torch.device) -> str:
        return f"Fake {device.index}"


@pytest.fixture
def fake(monkeypatch) -> SimpleNamespace:
    """A machine with four devices of a kind that is not CUDA, on which every call to torch.cuda raises."""
    taken, module = [], FakeModule()
    machine = SimpleNamespace(kind="xpu", count=4, taken=taken, module=module)
    generic = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device(machine.kind),
        "device_count": lambda: machine.count,
        "set_device_index": taken.append,
        "max_memory_allocated": lambda device: 1000 + device.index,
        "empty_cache": lambda: taken.append("emptied"),
    }
    for name, function in generic.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def refuse(*_: object) -> None:
        raise AssertionError("torch.cuda was called by name")

    for name in ("is_available", "device_count", "set_device", "get_rng_state", "set_rng_state", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    return machine


@pytest.mark.requirement("U3")
def test_each_rank_takes_the_device_of_its_number(fake):
    assert process._device(Config(), Ranks(2, 2, 8, 8)) == (None, torch.device("xpu", 2))
    assert fake.taken == [2]
    problem, device = process._device(Config(), Ranks(4, 4, 8, 8))
    assert problem and "no xpu device for local rank 4 (got 4 available)" in problem
    assert device == torch.device("cpu")
    assert process._device(Config(use_cpu=True), Ranks(0, 0, 8, 8)) == (None, torch.device("cpu"))


@pytest.mark.requirement("U3")
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(monkeypatch, caplog):
    """A build of torch for the CPU, or a driver that is too old: a launch is refused, and a script alone is warned."""
    monkeypatch.setattr(accelerators, "kind", lambda: None)
    two = (hardware.Device("NVIDIA H100", 1, "cuda"),) * 2
    monkeypatch.setattr(hardware, "detect", lambda: hardware.Hardware(two, 8, 1))
    monkeypatch.setattr(process.log, "propagate", True)
    monkeypatch.setattr(process.log.parent, "propagate", True)
    assert process._device(Config(), Ranks(0, 0, 1, 1)) == (None, torch.device("cpu"))
    said = f"this machine: torch cannot use its GPUs (got 2 x NVIDIA H100, torch {torch.__version__}); install a build"
    assert said in caplog.text
    monkeypatch.setenv("SHARDKIT_NUM_PROCESSES", "2")
    problem, _ = process._device(Config(), Ranks(0, 0, 2, 2))
    assert problem is not None and problem.startswith(said)
    assert process._device(Config(use_cpu=True), Ranks(0, 0, 2, 2)) == (None, torch.device("cpu"))


def test_gpus_that_are_hidden_by_a_wrong_name_are_no_reason_to_train_on_the_cpu(monkeypatch):
    """`gpu_ids: 6,7` on a machine with four: torch sees none. An empty list means the CPU."""
    four = [hardware.Device("NVIDIA H100", 1, "cuda")] * 4
    monkeypatch.setattr(accelerators, "kind", lambda: None)
    monkeypatch.setattr(hardware, "_nvidia", lambda: (four, ""))
    monkeypatch.setenv("SHARDKIT_NUM_PROCESSES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    problem, _ = process._device(Config(), Ranks(0, 0, 2, 2))
    assert problem and "CUDA_VISIBLE_DEVICES names none of its GPUs (got 6,7; it has 4 GPUs, numbered" in problem
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert process._device(Config(), Ranks(0, 0, 2, 2)) == (None, torch.device("cpu"))


def test_a_loader_of_a_run_on_the_cpu_pins_nothing(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    users = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    for device, pins in ((torch.device("cpu"), False), (torch.device("cuda", 0), True), (None, True)):
        assert prepare_loader(users, 0, 1, device)._source.loader.pin_memory is pins


class Encoding(UserDict):
    """As Transformers' BatchEncoding."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Encoding":
        self.asked = non_blocking
        return self


def test_a_batch_in_pinned_memory_is_copied_asynchronously_whatever_its_class(monkeypatch):
    batch, device = Encoding(tokens=torch.ones(2), text="a"), torch.device("cuda", 0)
    assert not to_device(batch, device).asked
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert to_device(batch, device).asked


def with_one_device_each(devices: list[str], variable: str | None = None) -> str:
    """The device of each rank, or the error, where each sees one of these, as its only one; it tells no number where it
    is chosen by a variable."""
    found = {name: getattr(accelerators, name) for name in ("kind", "count", "take", "identity")}
    accelerators.kind, accelerators.count = lambda: "cuda", lambda: 1
    accelerators.take = lambda index: torch.device("cuda", index)
    own = devices[torch.distributed.get_rank()]
    accelerators.identity = lambda device: "" if variable else own
    try:
        env.update({variable: own} if variable else {})
        return str(process.start(Config(num_processes=2)).device)
    except MachineError as error:
        return str(error)
    finally:
        vars(accelerators).update(found)
        env.remove([variable] if variable else [])


def test_a_scheduler_may_show_each_rank_a_device_of_its_own(ranks):
    """Each is number 0 there, as with `srun --gpus-per-task=1`; ranks that see the same one have too few."""
    assert ranks.run(2, with_one_device_each, ["GPU-1", "GPU-2"]) == ["cuda:0"] * 2
    refusals = ranks.run(2, with_one_device_each, ["GPU-1", "GPU-1"])
    assert all("rank 1: this machine: no GPU for local rank 1 (got 1 available)" in text for text in refusals)


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_a_wrapper_may_show_each_rank_a_device_that_tells_no_number(ranks, variable):
    assert ranks.run(2, with_one_device_each, ["0", "1"], variable) == ["cuda:0"] * 2
    assert all("no GPU for local rank 1" in text for text in ranks.run(2, with_one_device_each, ["0", "0"], variable))


def test_the_backend_is_the_devices_own_beside_gloo_for_the_cpu(fake):
    assert accelerators.backend_for(torch.device("cpu")) == "gloo"
    assert accelerators.backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert accelerators.backend_for(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"
    assert accelerators.backend_for(torch.device("mps", 0)) == "gloo"


@pytest.mark.parametrize(("takes_host_memory", "named"), [(True, None), (False, [2])])
def test_a_barrier_names_its_device_to_a_group_without_the_cpu(fake, monkeypatch, takes_host_memory, named):
    seen: list[object] = []
    monkeypatch.setattr(fake.module, "current_device", lambda: 2, raising=False)
    monkeypatch.setattr(collectives, "world_size", lambda: 4)
    monkeypatch.setattr(control, "takes_host_memory", lambda: takes_host_memory)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: seen.append(device_ids))
    collectives.wait_for_everyone()
    assert seen == [named]


def test_mps_is_for_one_process(fake):
    fake.kind = "mps"
    assert process._device(Config(), Ranks(0, 0, 8, 8)) == (None, torch.device("mps", 0))
    problem, _ = process._device(Config(), Ranks(1, 1, 8, 8))
    assert problem and "no mps device for local rank 1 (got 1 available)" in problem
    assert not accelerators.can_pin()


def test_one_process_on_mps_trains_the_whole_model_whatever_the_strategy(fake):
    """torch has no FSDP there, and the memory of MPS has no peak before torch 2.14."""
    fake.kind, fake.module.driver_allocated_memory = "mps", lambda: 5000
    assert process.check_world(Config(distributed_type="FSDP"), {}).mode == "single"
    assert process.check_world(Config(distributed_type="FSDP", use_cpu=True), {}).mode == "fsdp"
    assert accelerators.peak_bytes(torch.device("mps", 0)) == 5000
    fake.kind = "xpu"
    assert process.check_world(Config(distributed_type="FSDP"), {}).mode == "fsdp"


@pytest.mark.parametrize(
    ("architecture", "can"),
    [
        ("gfx90a:sramecc+:xnack-", set()),
        ("gfx942:sramecc+:xnack-", {"fp8"}),
        ("gfx950", {"fp8", "mxfp8"}),
        ("gfx1100", set()),
    ],
)
def test_amd_gpus_compute_in_8_bits_by_their_architecture(fake, monkeypatch, architecture, can):
    """The compute capability that torch tells of them is its number: 9.0, 9.4, 9.5, 11.0."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(float8, "missing", lambda kind: None)
    fake.module.get_device_properties = lambda device: SimpleNamespace(gcnArchName=architecture)
    problems = {kind: float8.problem(kind, torch.device("cuda", 0)) for kind in ("fp8", "mxfp8")}
    assert {kind for kind, text in problems.items() if text is None} == can
    assert all(f"{architecture.partition(':')[0]}); write bf16." in text for text in problems.values() if text)


def test_its_generator_is_saved_and_restored(fake):
    stood = fake.module.get_rng_state()
    saved = random_state.capture(0)
    assert saved["xpu"] and saved["cuda"] == []
    fake.module.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    random_state.restore(saved)
    assert torch.equal(fake.module.get_rng_state(), stood)


def test_parts_are_drawn_by_an_offset_where_its_generator_has_one(fake):
    here = torch.device("xpu:0")
    assert accelerators.draws_by_offset(here)
    fake.module.set_rng_state(torch.zeros(5056, dtype=torch.uint8))  # a Mersenne Twister's
    assert not accelerators.draws_by_offset(here) and not accelerators.draws_by_offset(torch.device("cpu"))
    assert accelerators.draws_by_offset(torch.device("cuda"))  # of a plan


def test_a_run_on_the_cpu_leaves_the_accelerator_beside_it_alone(monkeypatch, tmp_path, alone):
    """Its generator is asked only where the process has used it; nothing is pinned, which would initialize it."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    model = models.Scaled()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    unused = SimpleNamespace(is_initialized=lambda: False, get_rng_state=lambda: pytest.fail("asks for random numbers"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: unused)
    monkeypatch.setattr(accelerators, "can_pin", lambda: pytest.fail("pins memory"))
    accelerator.save_state(tmp_path / "state")
    before = model.scale.item()
    with torch.no_grad():
        model.scale.zero_()
    accelerator.load_state(tmp_path / "state")
    assert model.scale.item() == before


def test_a_state_of_another_kind_of_device_leaves_its_generator_alone(fake):
    saved = random_state.capture(0)
    fake.kind = "hpu"
    fake.module.set_rng_state(torch.ones(16, dtype=torch.uint8))
    random_state.restore(saved)
    assert torch.equal(fake.module.get_rng_state(), torch.ones(16, dtype=torch.uint8))


def test_memory_names_and_pinning(fake):
    assert accelerators.peak_bytes(torch.device("xpu", 3)) == 1003
    assert accelerators.name_of(torch.device("xpu", 3)) == "Fake 3"
    assert accelerators.name_of(torch.device("cpu")) == "cpu"
    assert accelerators.can_pin()
    accelerators.empty_cache()
    assert fake.taken == ["emptied"]


def test_scripts_of_accelerate_are_told_of_any_accelerator(fake):
    """And not that there is only the CPU. Accelerate's questions about CUDA are asked by name."""
    assert get_current_device_type() == ("xpu", "MULTI_GPU")
    described = importlib.util.find_spec("shardkit.compat.trials")
    trials = importlib.util.module_from_spec(described)
    described.loader.exec_module(trials)
    assert trials.torch_device == "xpu"


def test_the_generator_of_any_accelerator_is_made_equal(fake, monkeypatch):
    """By rank 0's state; the CPU's generator stays."""
    zeros, state = torch.zeros(16, dtype=torch.uint8), torch.get_rng_state()
    monkeypatch.setattr(collectives, "broadcast", lambda found: found * 0)
    synchronize_rng_state("xpu")
    assert torch.equal(fake.module.get_rng_state(), zeros)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_device_without_collectives_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.distributed.Backend, "default_device_backend_map", {"xpu": "xccl"})
    assert accelerators.backend_for(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"
    with pytest.raises(MachineError, match="no collectives for hpu devices"):
        accelerators.backend_for(torch.device("hpu", 1))


def test_the_devices_that_torch_sees_are_printed(fake, capsys):
    from shardkit.distributed import device_list

    fake.module.get_device_properties = lambda device: SimpleNamespace(total_memory=1024 + device.index)
    fake.count = 2
    device_list.main()
    assert json.loads(capsys.readouterr().out) == [["Fake 0", 1024, "xpu"], ["Fake 1", 1025, "xpu"]]


def test_without_an_accelerator_nothing_is_asked_of_one(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert (accelerators.kind(), accelerators.count(), accelerators.can_pin()) == (None, 0, False)
    assert accelerators.random_state() is None
    accelerators.empty_cache()

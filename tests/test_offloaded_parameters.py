"""Parameters that FSDP keeps in host memory, sharded over a mesh of GPUs: their parts and state stay there.

Without a GPU: torch's fake process group makes a mesh of GPUs, and parts in host memory need none. Forward and backward
are left out; `tests/test_gpu.py` has them.
"""

import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.distributed import accelerators, tensors
from shardkit.distributed.tensors import local_part, sharded_like, whole
from shardkit.optim import clip, rebind, whole_step
from shardkit.optim.stepping import stepper_of
from shardkit.sharding import offloaded_gradients, parallelize
from shardkit.sharding.fsdp import internals, shard_model
from shardkit.sharding.tensors import behaviours, pickled_parts
from shardkit.sharding.tensors.sharded_parameter import ShardedParameter
from tests import loops
from tests.loops.run import numbers

Offload = Callable[[nn.Module], nn.Module]


@pytest.fixture
def offload(alone) -> Offload:
    """Makes a model's parameters those of an offloaded one, on one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = DeviceMesh("cuda", [0], mesh_dim_names=("shard",))

    def offload(model: nn.Module) -> nn.Module:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(on_host(parameter.detach(), mesh))
        return model

    return offload


def on_host(part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """As FSDP2 makes its offloaded parameters."""
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(part.shape, part.stride(), part.dtype))
    return DTensor(part, spec, requires_grad=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def give_gradients(model: nn.Module, step: int) -> None:
    drawn = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=drawn)
        parameter.grad = sharded_like(gradient, parameter) if isinstance(parameter, DTensor) else gradient


def parts(model: nn.Module) -> list[torch.Tensor]:
    return [local_part(parameter).clone() for parameter in model.parameters()]


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]


def stepped(model: nn.Module, steps: range, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in steps:
        give_gradients(model, step)
        stepper_of(optimizer).step()
        assert all(moment.device.type == "cpu" for moment in moments(optimizer))  # seen between steps
    return optimizer


def test_state_stays_in_host_memory_and_is_the_one_that_steps_use(offload):
    plain, offloaded = model(), offload(model())
    stepped(plain, range(3))
    optimizer = stepped(offloaded, range(2))
    for moment in moments(optimizer):
        moment._local_tensor.mul_(1.0)  # the state's own memory, not a copy
    stepped(offloaded, range(2, 3), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(parts(plain), parts(offloaded), strict=True))


def test_a_state_from_before_is_taken_along(offload):
    plain, offloaded = model(), model()
    expected, optimizer = stepped(plain, range(2)), stepped(offloaded, range(2))
    names = rebind.ParameterNames.of(offloaded)
    offload(offloaded)
    rebind.rebind(optimizer, names, offloaded)
    stepped(plain, range(2, 4), expected)
    stepped(offloaded, range(2, 4), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(parts(plain), parts(offloaded), strict=True))


@pytest.mark.slow
def test_a_run_is_saved_and_resumed(offload, tmp_path):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})

    def prepared() -> tuple[Any, Any]:
        made = offload(model())
        return accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=0.1))

    first, optimizer = prepared()
    for step in range(4):
        if step == 2:
            accelerator.save_state(tmp_path / "state")
            accelerator.save_state(tmp_path / "beside", blocking=False)
        give_gradients(first, step)
        optimizer.step()
    expected = parts(first)
    for name in ("state", "beside"):
        accelerator.free_memory()
        again, optimizer = prepared()
        accelerator.load_state(tmp_path / name)
        assert all(moment.device.type == "cpu" for moment in moments(optimizer))
        for step in range(2, 4):
            give_gradients(again, step)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(expected, parts(again), strict=True))


def test_a_parameter_is_pickled_from_where_it_lies(offload):
    pickled_parts.install()
    weight: Any = offload(model())[0].weight
    weight.__class__ = ShardedParameter
    found = pickle.loads(pickle.dumps(weight))
    assert found._local_tensor.device.type == "cpu" and torch.equal(found._local_tensor, local_part(weight))


def test_a_whole_parameter_and_its_gradient_are_where_ranks_communicate(offload, monkeypatch):
    """For Adafactor and Muon. The meta device stands for the GPU: values are not needed."""
    monkeypatch.setattr(torch, "meta", SimpleNamespace(device_count=lambda: 1), raising=False)  # torch 2.15 counts them
    mesh = DeviceMesh("meta", [0], mesh_dim_names=("shard",))
    weight = nn.Parameter(on_host(torch.ones(4, 3), mesh))
    weight.grad = on_host(torch.ones(4, 3), mesh)
    found = whole_step._whole(weight)
    assert found.device.type == "meta" and found.grad is not None and found.grad.device.type == "meta"


def test_a_loaded_state_of_whole_tensors_goes_where_the_step_is():
    """Adafactor's, loaded into host memory: the step gathers the parameter on the GPU. Its count stays."""
    row = {"step": torch.tensor(2.0), "row_var": torch.ones(3)}
    found = whole_step._whole_row(row, torch.device("meta"))
    assert (found["step"].device.type, found["row_var"].device.type) == ("cpu", "meta")


class Watched(torch.cpu.Stream):
    """The stream of the copies to the device."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_weights_may_be_written_after_an_evaluation_that_still_reads_them(alone):
    """Such as the trained ones, after the averages: the copies to the device run beside the script."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "FSDP"})
    net = accelerator.prepare(model())
    copies = Watched()
    for group in internals.groups_of_model(net):
        group.comm_ctx.all_gather_copy_in_stream = copies
        for parameter in group.fsdp_params:
            parameter.offload_to_cpu = True  # without effect on a run on the CPU, but for this
    net(torch.ones(2, 4))  # its backward waits
    assert copies.waits == 0
    for forwards in (1, 2):
        with torch.no_grad():
            net(torch.ones(2, 4))
        assert copies.waits == forwards


class Copies(TorchDispatchMode):
    """Counts the copies to another device."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = (kwargs or {}).get("device")
        self.found += func is torch.ops.aten._to_copy.default and wanted not in (None, args[0].device)
        return func(*args, **(kwargs or {}))


def test_the_norm_of_offloaded_gradients_is_one_copy_to_the_device():
    """The host waits for each, so that one a parameter would be hundreds a step."""
    with Copies() as copies:
        found = clip._power_sum([torch.ones(3), torch.ones(2, 2)], 2.0, torch.device("meta"), torch.float32)
    assert (copies.found, found.device.type) == (1, "meta")


class Copy:
    """A gradient of FSDP's that arrives in host memory when it is waited for."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def synchronize(self) -> None:
        self.parameter.grad.fill_(5.0)


class Record:
    """What FSDP knows of an offloaded parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.sharded_param, self.grad_offload_event, self.pin_memory = parameter, None, True


def test_a_gradient_of_the_cpu_waits_for_the_copy_of_fsdps():
    parameter = nn.Parameter(torch.ones(3))
    record = Record(parameter)
    turns = offloaded_gradients.Turns([record])
    hooks = [*parameter._post_accumulate_grad_hooks.values()]
    beside = threading.Thread(target=lambda: parameter.sum().backward())
    with turns.of_fsdp([record]):
        beside.start()
        beside.join(0.2)
        assert beside.is_alive() and parameter.grad is None
        parameter.grad = torch.zeros(3)
        record.grad_offload_event = Copy(parameter)
        for hook in hooks:  # as FSDP may call them, which does not end its turn
            hook(parameter)
        beside.join(0.1)
        assert beside.is_alive()
    beside.join(10)
    assert parameter.grad.tolist() == [6.0] * 3
    with turns.of_fsdp([record]):
        parameter.grad = None


@pytest.mark.parametrize("is_same_thread", [False, True])
def test_a_turn_that_was_never_ended_is_taken_over(monkeypatch, is_same_thread):
    """Autograd has failed between the two hooks."""
    monkeypatch.setattr(offloaded_gradients, "PATIENCE_S", 0.05)
    record = Record(nn.Parameter(torch.ones(3)))
    turns = offloaded_gradients.Turns([record])
    if is_same_thread:
        turns.begin_to_add(record)
    else:
        beside = threading.Thread(target=turns.begin_to_add, args=(record,))
        beside.start()
        beside.join()
        with turns.of_fsdp([record]):
            assert turns._lock.locked()
    record.sharded_param.sum().backward()
    with turns.of_fsdp([record]):
        assert record.sharded_param.grad.tolist() == [1.0] * 3
    assert not turns._lock.locked()


def test_fsdp_waits_for_its_copies_only_where_a_script_reads_them_in_backward():
    """torch does where there are hooks, ours as well, from 2.13 on, and before never. Its copies to pinned memory are
    those that it does not wait for."""
    plain, read = (Record(nn.Parameter(torch.ones(3))) for _ in range(2))
    turns = offloaded_gradients.Turns([plain, read])
    read.sharded_param.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum().item()))
    seen: list[float] = []
    with turns.of_fsdp([plain, read]):
        assert not plain.sharded_param._post_accumulate_grad_hooks and plain.pin_memory
        assert read.sharded_param._post_accumulate_grad_hooks and not read.pin_memory
    assert read.pin_memory
    for record in (plain, read):  # the hooks of both are as before
        record.sharded_param.sum().backward()
    assert seen == [3.0] and not turns._lock.locked()


def test_a_long_turn_of_fsdps_is_waited_for(monkeypatch):
    monkeypatch.setattr(offloaded_gradients, "PATIENCE_S", 0.05)
    record = Record(nn.Parameter(torch.ones(3)))
    turns = offloaded_gradients.Turns([record])
    beside = threading.Thread(target=lambda: record.sharded_param.sum().backward())
    with turns.of_fsdp([record]):
        beside.start()
        beside.join(0.3)
        assert beside.is_alive() and record.sharded_param.grad is None
    beside.join(10)
    assert record.sharded_param.grad.tolist() == [1.0] * 3


def test_a_frozen_parameter_stays_frozen_and_may_be_trained_later():
    record = Record(nn.Parameter(torch.ones(3), requires_grad=False))
    turns = offloaded_gradients.Turns([record])
    assert not record.sharded_param.requires_grad
    record.sharded_param.requires_grad_(True).sum().backward()
    with turns.of_fsdp([record]):
        assert record.sharded_param.grad.tolist() == [1.0] * 3


def offloaded_on_the_cpu(name: str) -> tuple[bool, Any]:
    """A loop on a model that FSDP offloads from the CPU to the CPU, and whether its gradients take turns."""
    home, policy = parallelize._device_of_shards, shard_model.CPUOffloadPolicy
    parallelize._device_of_shards = lambda *_: torch.device("cpu", 0)  # not the one without a number
    shard_model.CPUOffloadPolicy = lambda pin_memory: policy(pin_memory=False)
    try:
        one = loops.LOOPS[name]
        run = loops.RanksRun(accelerator=Accelerator(config=loops.config_of(1, one)), accumulation=one.accumulation)
        torch.manual_seed(0)
        one.function(run)
    finally:
        parallelize._device_of_shards, shard_model.CPUOffloadPolicy = home, policy
    groups = internals.groups_of_model(run.unwrap(run.models[0]))
    return all(isinstance(group._turns, offloaded_gradients.Turns) for group in groups), numbers(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_penalty_in_the_loss", "a_penalty_in_the_loss_of_windows"])
def test_a_penalty_on_offloaded_weights_is_that_of_one_process(ranks, name):
    _, expected = loops.plain(name)
    for takes_turns, found in ranks.run(2, offloaded_on_the_cpu, name):
        assert takes_turns
        for fqn, weight in expected.items():
            assert abs(found[fqn] - weight).max() < 3e-5, fqn


def gathered_in_host_memory() -> bool:
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "FSDP", "num_processes": 2})
    net = accelerator.prepare(model())
    found = [parameter.detach().full_tensor() for parameter in net.parameters()]
    decides, tensors.gathers_in_host_memory = tensors.gathers_in_host_memory, lambda mesh: True
    try:
        return all(torch.equal(whole(p), one) for p, one in zip(net.parameters(), found, strict=True))
    finally:
        tensors.gathers_in_host_memory = decides


def test_whole_tensors_are_gathered_in_host_memory_where_gpus_meet_through_gloo(ranks, offload):
    assert ranks.run(2, gathered_in_host_memory) == [True, True]
    mesh = DeviceMesh("cuda", [0], mesh_dim_names=("shard",))
    assert not tensors.gathers_in_host_memory(mesh)  # through another backend
    assert not tensors.gathers_in_host_memory(SimpleNamespace(device_type="cpu"))


def test_the_scaler_of_a_script_waits_for_its_scale_in_host_memory(offload, monkeypatch):
    """torch copies it there, and does not wait: it arrives at the end of the stream's work."""
    behaviours.install()
    net = offload(model())
    give_gradients(net, 1)
    gradients = [parameter.grad for parameter in net.parameters()]
    expected = [local_part(gradient) / 2 for gradient in gradients]
    inverse, has_overflowed = torch.tensor(torch.nan), torch.tensor(1.0)
    monkeypatch.setattr(accelerators, "finish_stream", lambda: (inverse.fill_(0.5), has_overflowed.zero_()))
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, has_overflowed, inverse)
    assert all(map(torch.equal, map(local_part, gradients), expected)) and not has_overflowed


class OnDevice(torch.Tensor):
    """A number on a device: a copy that is waited for has its value."""

    def to(self, device: str, non_blocking: bool = False) -> torch.Tensor:
        return torch.zeros(()) if not non_blocking else self


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_fused_kernels_find_a_scale_of_the_script_in_host_memory(offload, kind):
    net = offload(model())
    optimizer = kind(net.parameters(), lr=0.1, fused=True)
    before = parts(net)
    give_gradients(net, 1)
    has_overflowed = optimizer.found_inf = torch.ones(()).as_subclass(OnDevice)
    stepper_of(optimizer).step()
    assert optimizer.found_inf is has_overflowed
    assert not any(map(torch.equal, parts(net), before))


@pytest.mark.parametrize("takes_host_memory", [False, True])
def test_offloaded_parameters_in_a_group_without_the_host_are_warned_of(caplog, monkeypatch, takes_host_memory):
    """NCCL reduces nothing there: "No backend type associated with device type cpu"."""
    monkeypatch.setattr(parallelize.control, "takes_host_memory", lambda: takes_host_memory)
    config = Config(num_processes=2, fsdp_config={"fsdp_offload_params": True})
    rank: Any = SimpleNamespace(device=torch.device("cuda", 0), world_size=2, backend="nccl")
    assert parallelize._device_of_shards(config, rank) == torch.device("cpu")
    assert ("has no backend there (got nccl)" in caplog.text) is not takes_host_memory

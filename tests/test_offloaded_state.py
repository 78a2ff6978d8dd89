"""Optimizer state in host memory between steps (`shardkit.offload_optimizer`).

On the CPU the state is where it would be anyway, so the setting is forced there: then every step makes the same copies,
from host memory to host memory.
"""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit import Accelerator
from shardkit.checkpoint.states import fill
from shardkit.cli import main
from shardkit.config.schema import Config, ShardkitConfig
from shardkit.distributed import accelerators, host_memory
from shardkit.distributed.tensors import local_part
from shardkit.errors import UsageError
from shardkit.model import gpt
from shardkit.optim import division, host_state, rebind
from shardkit.optim.kernels import ELEMENTWISE
from shardkit.plan.closed_form import estimate
from shardkit.runtime import prepare
from tests.loops.run import whole

SHAPE = gpt.parse("layers=3,hidden=64,heads=4,vocab=500,seq=64")
MODES: dict[str, dict[str, Any]] = {
    "DDP": {"distributed_type": "MULTI_CPU"},
    "FULL_SHARD": {"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
}
OTHERS: dict[str, Any] = {
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
KINDS: dict[str, Any] = {
    **{kind.__name__: lambda parameters, kind=kind: kind(parameters, lr=0.01) for kind in ELEMENTWISE},
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "amsgrad in loops": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=False),
    **OTHERS,
}


class Run:
    """A run on this rank. `offloads`: with its state in host memory, of one parameter at a time on the device."""

    def __init__(self, mode: str, kind: str, offloads: bool, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(prepare, "keep_state_there", lambda one, keeps: host_memory.keep_state_there(one, offloads))
        patch.setattr(division, "STATE_BYTES", 1)
        self.accelerator = Accelerator(config={"use_cpu": True, **MODES[mode]})
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
        self.model, self.optimizer = self.accelerator.prepare(model, KINDS[kind](model.parameters()))
        self.hooks: list[str] = []
        self.optimizer.optimizer.register_step_pre_hook(lambda *_: self.hooks.append("before"))
        self.optimizer.optimizer.register_step_post_hook(lambda *_: self.hooks.append("after"))

    def train(self, steps: range) -> None:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        for step in steps:
            batch = torch.randn(6, 6, generator=torch.Generator().manual_seed(step))
            self.accelerator.backward(self.model(batch[rank::world]).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        rows = self.optimizer.state.values()
        return [value for row in rows for value in row.values() if isinstance(value, torch.Tensor) and value.dim()]

    def result(self) -> list[Any]:
        with torch.no_grad():
            return [whole(tensor).tolist() for tensor in [*self.model.parameters(), *self.state()]]


def trained_with_each(mode: str) -> dict[str, tuple[bool, bool, bool]]:
    return {kind: trained(mode, kind) for kind in KINDS}


def trained(mode: str, kind: str) -> tuple[bool, bool, bool]:
    """Whether offloading changes no result, whether tensors stay where they are, and whether hooks run once a step."""
    with pytest.MonkeyPatch.context() as patch:
        plain, run = Run(mode, kind, False, patch), Run(mode, kind, True, patch)
        plain.train(range(4))
        run.train(range(2))
        places = [local_part(tensor).data_ptr() for tensor in run.state()]
        run.train(range(2, 4))
        stays = [local_part(tensor).data_ptr() for tensor in run.state()] == places
        return run.result() == plain.result(), stays, run.hooks == ["before", "after"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_of_state_on_the_device(ranks, mode: str) -> None:
    expected = dict.fromkeys(KINDS, (True, True, True))
    for found in ranks.run(2, trained_with_each, mode):
        same_places = found["Adafactor"][1]  # its step may make new tensors
        assert found == {**expected, "Adafactor": (True, same_places, True)}


def held_at_once(mode: str) -> tuple[list[int], int]:
    """How many tensors of the state are on the device in each kernel call of a step; and the whole number."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run(mode, "AdamW", True, patch)
        run.train(range(1))
        seen, fetched = [], list[torch.Tensor]()

        def count(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
            fetched.append(host_memory.copied_to_device(copy, device))
            return fetched[-1]

        def put_back(row: dict[str, Any], homes: dict[str, torch.Tensor]) -> None:
            if fetched:
                seen.append(len(fetched))
                fetched.clear()
            own(row, homes)

        own = host_state._put_back
        patch.setattr(host_state, "copied_to_device", count)
        patch.setattr(host_state, "_put_back", put_back)
        run.train(range(1, 2))
        return seen, len(run.state())


@pytest.mark.parametrize("mode", MODES)
def test_a_chunk_is_on_the_device_at_a_time(ranks, mode: str) -> None:
    for seen, total in ranks.run(2, held_at_once, mode):
        assert sum(seen) == total == 12  # two moments of each of six parameters
        assert max(seen) <= 4  # where a rank has no part of a parameter, the next one counts to the same chunk


def resumed(mode: str, folder: Path) -> bool:
    """Whether a run that is saved and loaded, over its own state and in a new run, with and without offload, goes on
    as one that never stopped; and whether the state is loaded into the tensors that there are."""
    with pytest.MonkeyPatch.context() as patch:
        first = Run(mode, "AdamW", True, patch)
        first.train(range(2))
        first.accelerator.save_state(folder)
        first.train(range(2, 4))
        expected = first.result()
        places = [local_part(tensor).data_ptr() for tensor in first.state()]
        first.accelerator.load_state(folder)
        fills = [local_part(tensor).data_ptr() for tensor in first.state()] == places
        others = [Run(mode, "AdamW", offloads, patch) for offloads in (True, False)]
        for other in others:
            other.accelerator.load_state(folder)
        for run in (first, *others):
            run.train(range(2, 4))
        return fills and all(run.result() == expected for run in (first, *others))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_goes_between_runs_with_and_without(ranks, tmp_path: Path, mode: str) -> None:
    assert ranks.run(2, resumed, mode, tmp_path / "saved") == [True, True]


def changed_on_the_way(mode: str) -> bool:
    """Whether groups that are added, state that the script changes and loads, and a step without gradients are as
    without offload."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for offloads in (False, True):
            run = Run(mode, "AdamW", offloads, patch)
            run.optimizer.step()
            run.train(range(1))
            for tensor in run.state():
                local_part(tensor).mul_(0.5)
            run.train(range(1, 2))
            run.optimizer.load_state_dict(run.optimizer.state_dict())
            added = nn.Linear(1, 1)
            nn.init.ones_(added.weight)
            run.model, run.added = run.model, run.accelerator.prepare(added)
            run.optimizer.add_param_group({"params": [*run.added.parameters()], "lr": 0.5})
            run.train(range(2, 4))
            run.accelerator.backward(run.added(torch.ones(2, 1)).sum())
            run.optimizer.step()
            results.append((run.result(), whole(run.added.weight).tolist(), run.hooks))
    return results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_changes_between_steps_are_as_without(ranks, mode: str) -> None:
    assert ranks.run(2, changed_on_the_way, mode) == [True, True]


def an_error_in_the_step(mode: str) -> tuple[bool, bool]:
    """Whether the state is complete in host memory after a hook of the script has failed, and the next step right."""
    with pytest.MonkeyPatch.context() as patch:
        plain, run = Run(mode, "AdamW", False, patch), Run(mode, "AdamW", True, patch)
        for one in (plain, run):
            one.train(range(2))
            handle = one.optimizer.optimizer.register_step_pre_hook(fail)
            with pytest.raises(RuntimeError, match="by the script"):
                one.train(range(2, 3))
            handle.remove()
            one.optimizer.zero_grad()
            one.train(range(3, 5))
        return run.result() == plain.result(), len(run.state()) == len(plain.state())


def fail(*_: Any) -> None:
    raise RuntimeError("by the script")


@pytest.mark.parametrize("mode", MODES)
def test_an_error_in_a_step_loses_no_state(ranks, mode: str) -> None:
    assert ranks.run(2, an_error_in_the_step, mode) == [(True, True)] * 2


def with_hooks_and_a_closure(mode: str, kind: str) -> bool:
    """Whether hooks before the step may give gradients, a closure is called after them, and hooks of all optimizers
    are called once a step, all as without offload."""
    with pytest.MonkeyPatch.context() as patch:
        (plain, _), (offloaded, called) = (hooked(Run(mode, kind, offloads, patch)) for offloads in (False, True))
    assert called == ["all, before", "fill in", "all, after", "all, before", "fill in", "closure", "all, after"]
    return plain == offloaded


def hooked(run: Run) -> tuple[list[Any], list[str]]:
    called: list[str] = []

    def fill_in(*_: Any) -> None:
        called.append("fill in")
        for parameter in run.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)

    def closure() -> None:
        called.append("closure")
        run.optimizer.zero_grad()
        run.accelerator.backward(run.model(torch.ones(2, 6)).square().mean())

    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: called.append("all, after")),
        run.optimizer.optimizer.register_step_pre_hook(fill_in),
    ]
    run.optimizer.step()
    run.optimizer.step(closure)
    for handle in handles:
        handle.remove()
    return run.result(), called


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_and_closures_are_called_as_without(ranks, mode: str, kind: str) -> None:
    assert ranks.run(2, with_hooks_and_a_closure, mode, kind) == [True, True]


def copies_finished(mode: str) -> list[str]:
    """When this rank waits for copies to host memory: in a step, and in one that fails."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run(mode, "AdamW", True, patch)
        patch.setattr(accelerators, "finish", lambda: run.hooks.append("finished"))
        run.train(range(1))
        patch.setattr(host_state, "copied_to_device", fail)
        with pytest.raises(RuntimeError, match="by the script"):
            run.train(range(1, 2))
        return run.hooks


@pytest.mark.parametrize("mode", MODES)
def test_what_hooks_read_after_a_step_has_arrived(ranks, mode: str) -> None:
    assert ranks.run(2, copies_finished, mode) == [["before", "finished", "after", "before", "finished"]] * 2


def kept_after_a_step(mode: str) -> int:
    """How many tensors of an earlier state are alive after a step that has put others in their place."""
    with pytest.MonkeyPatch.context() as patch:
        run = Run(mode, "AdamW", True, patch)
        run.train(range(1))
        patch.setattr(host_state, "_can_hold", lambda home, part: False)
        earlier = [weakref.ref(tensor) for tensor in run.state()]
        run.train(range(1, 2))
        gc.collect()
        return sum(storage() is not None for storage in earlier)


@pytest.mark.parametrize("mode", MODES)
def test_state_that_a_step_has_replaced_is_freed(ranks, mode: str) -> None:
    assert ranks.run(2, kept_after_a_step, mode) == [0, 0]


def test_loaded_state_goes_to_host_memory_except_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, as an accelerator."""
    monkeypatch.setattr(host_state, "copied_to_host", lambda tensor: torch.zeros_like(tensor, device="cpu"))
    parameters = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in ((2, 3), ())]
    optimizer = torch.optim.Adam(parameters)
    host_memory.keep_state_there(optimizer, True)
    rows = {n: {"step": torch.ones(()), "exp_avg": torch.zeros(p.shape)} for n, p in enumerate(parameters)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": rows})
    host_state.move_to_host(optimizer)
    for _ in range(2):
        devices = [optimizer.state[parameter]["exp_avg"].device.type for parameter in parameters]
        assert devices == ["cpu", "meta"]
        for parameter in parameters:
            rebind._move(optimizer, optimizer.state[parameter], parameter)


def placed(mode: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        parameter = next(Run(mode, "AdamW", True, patch).model.parameters())
    return local_part(fill._empty_like(parameter, torch.float32, torch.device("meta"))).device.type


def test_a_sharded_tensor_is_loaded_to_the_device_that_is_asked_for(ranks) -> None:
    assert ranks.run(2, placed, "FULL_SHARD") == ["meta", "meta"]


def with_a_compiled_step(mode: str) -> bool:
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for offloads in (False, True):
            run = Run(mode, "AdamW", offloads, patch)
            run.train(range(2))
            run.optimizer.optimizer.step = torch.compile(run.optimizer.optimizer.step, backend="eager")
            run.train(range(2, 4))
            results.append(run.result())
    return results[0] == results[1]


@pytest.mark.slow
def test_a_step_that_the_script_has_compiled_is_as_without(ranks) -> None:
    assert ranks.run(2, with_a_compiled_step, "FULL_SHARD") == [True, True]


class Own(torch.optim.Adam):
    """It may keep state elsewhere."""


def test_an_optimizer_that_may_keep_state_elsewhere_is_refused(alone) -> None:
    KINDS["Own"] = lambda parameters: Own(parameters, lr=0.01)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match=r"offload_optimizer is for .*got Own"):
        Run("DDP", "Own", True, patch)


def planned(optimizer: str, distributed_type: str, **section: Any) -> Any:
    config = Config(num_processes=4, distributed_type=distributed_type, shardkit=ShardkitConfig(**section))
    return estimate(gpt.tree(SHAPE), config, world_size=4, optimizer=optimizer).memory


@pytest.mark.parametrize("distributed_type", ["FSDP", "MULTI_GPU"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "rmsprop"])
def test_the_plan_has_state_on_the_device_in_the_step_only(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, distributed_type: str
) -> None:
    kept, one_chunk = planned(optimizer, distributed_type), planned(optimizer, distributed_type, offload_optimizer=True)
    monkeypatch.setattr(division, "STATE_BYTES", 1)
    offloaded = planned(optimizer, distributed_type, offload_optimizer=True)
    assert offloaded.host.total == kept.timeline[0].memory.optimizer_state > 0
    *before, step = offloaded.timeline
    assert {moment.memory.optimizer_state for moment in before} == {0}
    largest = max(parameter.numel for _, parameter in gpt.tree(SHAPE).owned()) * 4
    in_step = {"adamw": 2 * largest, "rmsprop": 2 * largest}.get(optimizer)  # its state, and what the step makes
    if in_step is not None:
        assert step.memory.optimizer_state == in_step // (4 if distributed_type == "FSDP" else 1)
    assert step.memory.optimizer_state <= one_chunk.timeline[-1].memory.optimizer_state
    assert one_chunk.timeline[-1] == kept.timeline[-1] or optimizer == "muon"  # whose two optimizers step one by one
    others = [replace(moment.memory, optimizer_state=0) for moment in kept.timeline]
    assert [replace(moment.memory, optimizer_state=0) for moment in offloaded.timeline] == others


def test_the_plan_refuses_what_the_run_refuses() -> None:
    with pytest.raises(UsageError, match=r"offload_optimizer: the state of this optimizer .*got lion.*adamw"):
        planned("lion", "FSDP", offload_optimizer=True)


@pytest.mark.slow
def test_the_plan_suggests_it_before_all_shards(capsys: pytest.CaptureFixture) -> None:
    main.run(["plan", "--model", "llama-3-8b", "--world", "4", "--device", "a100-40gb", "--batch-size", "1"])
    assert "shardkit.offload_optimizer: true (slower steps, host memory)" in capsys.readouterr().out

"""Memory by simulation: against the closed form, against steps that were not shortened, and what it says when it fails.

Most run in this process, through the worker's own functions; two go through the child process and the command line."""

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardkit.config.schema import Config, FsdpConfig, ShardkitConfig
from shardkit.errors import ModelError, UsageError
from shardkit.model.sources import describe
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.optim import division
from shardkit.plan import batches, fake_world, measured, repeats, simulated_optimizers, worker
from shardkit.plan.answer import PlanRequest, row
from shardkit.plan.averages import Ema
from shardkit.plan.devices import DEVICES
from shardkit.plan.memory_tracker import MemoryTracker
from shardkit.plan.optimizers import check
from shardkit.plan.rank_memory import Memory, Moment, RankMemory
from shardkit.plan.simulation import _simulation, simulate
from shardkit.plan.training_step import tracked_forward
from shardkit.sharding.fsdp.shard_model import can_reduce_unused

SMALL = "gpt:layers=12,hidden=64,heads=4,vocab=500,seq=64"
TINY = "gpt:layers=3,hidden=64,heads=4,vocab=500,seq=64"


def request(
    spec: str = SMALL, strategy: int = 1, precision: str = "bf16", world_size: int = 16, **fsdp: Any
) -> PlanRequest:
    several = {"num_machines": world_size // 8, "main_process_ip": "machine-0"} if world_size > 8 else {}
    section = FsdpConfig(sharding_strategy=strategy, **fsdp)
    config = Config(num_processes=world_size, mixed_precision=precision, fsdp=section, **several)
    return PlanRequest(describe(spec), config, world_size, min(8, world_size), DEVICES["cpu"], batch_size=4)


def request_in(folder: Path, spec: str, own_batch: str | None = None) -> PlanRequest:
    """For a model, and a batch, of the files in the folder."""
    found, config = describe(spec, folder=folder), Config(num_processes=2)
    return PlanRequest(found, config, 2, 2, DEVICES["cpu"], own_batch=own_batch, folder=folder)


def in_step(found: RankMemory) -> Memory:
    """What the optimizer's step holds."""
    (memory,) = (moment.memory for moment in found.timeline if moment.phase == "optimizer")
    return memory


def with_steps(asked: PlanRequest, steps: int) -> PlanRequest:
    section = ShardkitConfig(gradient_accumulation_steps=steps)
    return asked.with_config(asked.config.model_copy(update={"shardkit": section}))


def simulated(asked: PlanRequest, is_exact: bool = False) -> tuple[RankMemory, dict[str, int]]:
    """As the child process does it."""
    job = worker.Job(
        "gpt",
        asked.description.spec,
        [],
        asked.world_size,
        asked.ranks_per_machine,
        asked.own_optimizer or asked.optimizer,
        None,
        asked.batch_size or 1,
        asked.seq_len,
        is_exact,
        ema=asked.ema.value,
    )
    found = _simulation(asked, asked.config, worker._to_json(*worker.simulated(job, asked.config)))
    return found.memory, found.payload_bytes


@pytest.mark.slow
@pytest.mark.requirement("A1")
@pytest.mark.parametrize("strategy", [1, 2, 3, 4, 5])
def test_the_closed_form_agrees_within_five_percent(strategy):
    asked = request(TINY, strategy)
    memory, _ = simulated(asked)
    closed = row(asked).estimate.memory
    assert memory.peak.total == pytest.approx(closed.peak.total, rel=0.05)
    for name in ("parameters", "gradients"):
        assert getattr(memory.timeline[-1].memory, name) == getattr(closed.timeline[-1].memory, name)
    # torch's optimizer counts its steps, in 4 bytes a parameter
    assert memory.peak.optimizer_state == pytest.approx(closed.peak.optimizer_state, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [
        *(("sgd", 0), ("momentum", 4), ("adagrad", 12), ("rmsprop", 8), ("lion", 8), ("sgd-schedulefree", 4)),
        *(("nadam", 12), ("radam", 12), ("adamax", 12), ("adadelta", 16), ("AdamW_ScheduleFree", 12)),
        *(("rprop", 12), ("asgd", 8)),
    ],
)
def test_the_closed_form_knows_what_a_step_makes(optimizer, per_parameter, strategy):
    """Kernels for lists of tensors hold what they make for all parameters at once."""
    asked = replace(request(TINY, strategy), optimizer=check(optimizer))
    memory, _ = simulated(asked)
    for found in (memory, row(asked).estimate.memory):
        step = in_step(found)
        exact = 0.07 if optimizer == "rprop" else 0.01  # of its largest tensor also what `torch.where` makes
        assert step.optimizer_state == pytest.approx(step.parameters * per_parameter // 4, rel=exact, abs=1000)
        assert step.activations == pytest.approx(4 * (asked.batch_size or 0) * 64 * 500, rel=0.01)  # logits, held


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2**28, 2**18])
@pytest.mark.parametrize(("strategy", "world_size"), [(1, 4), (3, 4), (4, 8)])
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_the_closed_form_knows_what_whole_tensors_take(monkeypatch, optimizer, strategy, world_size, limit):
    """State of whole parameters on every rank, gathered parameters and gradients, and what is sent for these."""
    monkeypatch.setattr(division, "WHOLE_BYTES", limit)
    monkeypatch.setattr(division, "ROUND_BYTES", limit // 8)
    asked = replace(request(TINY, strategy, world_size=world_size), optimizer=optimizer)
    (memory, payload), closed = simulated(asked), row(asked).estimate
    states = [found.timeline[-2].memory.optimizer_state for found in (memory, closed.memory)]
    assert states[0] == pytest.approx(states[1], abs=200)  # 4 bytes a parameter for the number of steps
    assert in_step(memory).total == pytest.approx(in_step(closed.memory).total, rel=0.01)
    for kind in ("all_gather", "all_to_all"):
        expected = sum(each.payload_bytes for each in closed.traffic.collectives if each.kind == kind)
        assert payload.get(kind, 0) == expected
    assert any(each.axis == "optimizer" for each in closed.traffic.collectives) is (strategy != 3)


def test_a_model_without_matrices_has_none_for_muon():
    """All its parameters are AdamW's, in the simulation as in the closed form."""
    parameters = {"norm.weight": nn.Parameter(torch.ones(4)), "norm.bias": nn.Parameter(torch.ones(4))}
    made = simulated_optimizers.optimizer_factory("muon", dict.fromkeys(parameters, "adamw"))(parameters)
    assert [type(optimizer) for optimizer in made] == [torch.optim.AdamW]


@pytest.mark.slow
def test_several_optimizers_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "two_optimizers.py").write_text(
        "import torch\n"
        "def both(parameters):\n"
        "    half = len(parameters) // 2\n"
        "    return torch.optim.SGD(parameters[:half], momentum=0.9), torch.optim.AdamW(parameters[half:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    asked = request(TINY, world_size=2)
    found, with_sgd, with_adamw = (
        simulated(replace(asked, **one))[0].peak.optimizer_state
        for one in ({"own_optimizer": "two_optimizers:both"}, {"optimizer": "momentum"}, {"optimizer": "adamw"})
    )
    assert with_sgd < found < with_adamw


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        request(TINY, 1, activation_checkpointing=True),
        request(TINY, 2, "no"),
        request(TINY, 4, "fp16"),
        with_steps(request(TINY, 5), 3),
        request(TINY + ",tied=true", 1, auto_wrap_policy="NO_WRAP"),
    ],
)
def test_the_collectives_carry_what_the_closed_form_says(asked):
    """The traffic of a simulated step is that of the closed form, byte for byte."""
    expected: dict[str, int] = {}
    for collective in row(asked).estimate.traffic.collectives:
        expected[collective.kind] = expected.get(collective.kind, 0) + collective.payload_bytes
    assert simulated(asked)[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fsdp"),
    [
        (1, {"activation_checkpointing": True}),
        pytest.param(3, {}, marks=pytest.mark.loops),
        pytest.param(2, {}, marks=pytest.mark.loops),
        (1, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10_000}),
    ],
)
def test_a_shortened_step_is_the_whole_step(strategy, fsdp):
    """Twelve layers from four and five: the same moments, the same peak, the same traffic."""
    asked = request(SMALL, strategy, **fsdp)
    short, payload = simulated(asked)
    whole, whole_payload = simulated(asked, is_exact=True)
    assert [m.text for m in short.timeline] == [m.text for m in whole.timeline]
    assert (short.peak, short.moment) == (whole.peak, whole.moment)
    for mine, exact in zip(short.timeline, whole.timeline, strict=True):
        assert mine.memory.total == pytest.approx(exact.memory.total, rel=0.03)
    assert payload == whole_payload


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "Adagrad"])
def test_a_step_on_whole_tensors_is_not_extrapolated(monkeypatch, name):
    """Adafactor gathers parameters up to a limit, however many blocks there are."""
    monkeypatch.setattr(division, "WHOLE_BYTES", 2**18)
    asked = replace(request(SMALL), own_optimizer=f"torch.optim:{name}")
    short, payload = simulated(asked)
    whole, whole_payload = simulated(asked, is_exact=True)
    assert (short.peak, short.moment, payload) == (whole.peak, whole.moment, whole_payload)
    assert short.timeline[-1] == whole.timeline[-1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 2])
@pytest.mark.parametrize(("batch_size", "seq"), [(4, 64), (1, 16)])
def test_forward_holds_what_the_closed_form_says(strategy, batch_size, seq):
    """Gathered parameters of each block: while it computes, and, with few activations, while the outputs of two
    all-gathers are alive."""
    asked = replace(request(TINY.replace("seq=64", f"seq={seq}"), strategy), batch_size=batch_size)

    def gathered(memory: RankMemory) -> dict[str, int]:
        return {m.unit: m.memory.gathered for m in memory.timeline if m.phase == "forward" and m.unit != "the root"}

    found, expected = gathered(simulated(asked)[0]), gathered(row(asked).estimate.memory)
    less = {expected[unit] - found[unit] for unit in expected}
    if frees_the_first_output() and seq == 16:
        assert len(less) == 1 and min(less) > 0
    else:
        assert less == {0}


def frees_the_first_output() -> bool:
    """Whether this torch, as 2.15, frees the output of an all-gather before it makes the next; the plan does not count
    on it."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


@pytest.mark.slow
@pytest.mark.requirement("B1")
def test_the_order_of_strategies():
    """FSDP with auto-wrap < FSDP < DDP."""
    asked = [request(TINY, 1, "no"), request(TINY, 1, "no", auto_wrap_policy="NO_WRAP"), request(TINY, 3, "no")]
    peaks = [simulated(each)[0].peak.total for each in asked]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


def real_step(config: Config) -> tuple[int, str, int]:
    """One rank's step with real tensors and real collectives, tracked alike: its peak and when, and what it exchanges
    in attention."""
    import torch
    import torch.distributed as dist

    from shardkit.distributed.process import Process
    from shardkit.model import gpt, gpt_module
    from shardkit.plan import batches
    from shardkit.plan.training_step import tracked_step
    from shardkit.sharding.context_parallel.groups import build_group
    from shardkit.sharding.context_parallel.region import Region
    from shardkit.sharding.mesh import build_mesh

    process = Process(dist.get_rank(), dist.get_rank(), 2, 2, torch.device("cpu"), "gloo")
    shape = gpt.parse(TINY.removeprefix("gpt:"))
    region = Region(build_group(config, process), process.control)
    loss_of = partial(batches.next_token_loss, vocabulary=shape.vocab)
    loss = batches.of_slices(region, torch.zeros(4, shape.seq, dtype=torch.long), loss_of)
    factory = simulated_optimizers.optimizer_factory("adamw")
    model = gpt_module.GPT(shape)
    tracker, _ = tracked_step(model, config, build_mesh(config, process), process, factory, loss, False)
    region.note_forward()  # outside of it: the next test's backward is of no group
    top = max(tracker.moments, key=lambda moment: moment.memory.total)
    return top.memory.total, top.text, tracker.payload_bytes.get("all_to_all", 0)


def with_shared_sequences(asked: PlanRequest, ranks: int) -> PlanRequest:
    return asked.with_config(asked.config.changed(shardkit={"mesh": {"context_size": ranks}}))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("recomputes", [False, True])
def test_ranks_that_share_sequences_hold_and_exchange_what_was_simulated(ranks, strategy, recomputes):
    asked = request(TINY, strategy, "no", world_size=2, activation_checkpointing=recomputes)
    shared = with_shared_sequences(asked, 2)
    total, text, exchanged = ranks.run(2, real_step, shared.config)[0]
    (memory, payload), closed = simulated(shared, is_exact=True), row(shared).estimate
    if strategy == 1:
        assert (total, text) == (memory.peak.total, memory.moment)
    assert total == pytest.approx(memory.peak.total, rel=0.1)
    (planned,) = (one for one in closed.traffic.collectives if one.axis == "context")
    assert exchanged == payload["all_to_all"] == planned.payload_bytes
    assert closed.memory.peak.total == pytest.approx(memory.peak.total, rel=0.05)


@pytest.mark.slow
@pytest.mark.requirement("B1")
def test_two_real_ranks_hold_what_was_simulated(ranks):
    """Storages alive on two live ranks: FSDP's peak to the byte, and the order FSDP with auto-wrap < FSDP < DDP."""
    asked = [
        request(TINY, 1, "no", world_size=2),
        request(TINY, 1, "no", world_size=2, auto_wrap_policy="NO_WRAP"),
        request(TINY, 3, "no", world_size=2),
    ]
    found = [ranks.run(2, real_step, each.config)[0] for each in asked]
    planned = [simulated(each, is_exact=True)[0] for each in asked]
    assert found[:2] == [(memory.peak.total, memory.moment, 0) for memory in planned[:2]]
    assert found[2][0] == pytest.approx(planned[2].peak.total, rel=0.1)
    assert found[0][0] < found[1][0] < found[2][0]


@pytest.mark.slow
def test_optimizers_differ_by_their_state():
    asked = request(TINY)
    states = {
        name: simulated(replace(asked, optimizer=name))[0].peak.optimizer_state
        for name in ("sgd", "momentum", "adamw", "adafactor")
    }
    parameters = simulated(asked)[0].peak.parameters
    assert states["sgd"] == 0
    assert states["momentum"] == parameters
    assert states["adamw"] == pytest.approx(2 * parameters, rel=0.01)
    assert 0 < states["adafactor"] < parameters  # of whole tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ASGD", "Adadelta", "Adamax", "NAdam", "RAdam"])
def test_any_optimizer_of_torch_steps_on_fake_tensors(name):
    """They ask their state for numbers; NAdam divides by one minus the product of its decays."""
    asked = replace(request(TINY, world_size=2), own_optimizer=f"torch.optim:{name}")
    peak = simulated(asked)[0].peak
    moments = 1 if name == "ASGD" else 2
    assert peak.optimizer_state == pytest.approx(moments * peak.parameters, rel=0.02)


@pytest.mark.slow
def test_averages_and_quantized_moments_are_simulated_as_counted():
    asked = request("gpt:layers=2,hidden=256,heads=4,vocab=500,seq=16", world_size=2)
    asked = replace(asked, optimizer="adamw4bit", ema=Ema.TRAINED)
    found, counted = simulated(asked)[0].peak, row(asked).memory.peak
    assert (found.parameters, found.optimizer_state) == (counted.parameters, counted.optimizer_state)
    assert found.optimizer_state < 0.2 * found.parameters


@pytest.mark.slow
@pytest.mark.requirement("A2")
def test_offloaded_shards_are_on_the_host():
    memory, _ = simulated(request(TINY, 1, offload_params=True))
    plain, _ = simulated(request(TINY, 1))
    assert (memory.peak.parameters, memory.peak.gradients, memory.peak.optimizer_state) == (0, 0, 0)
    assert memory.host == Memory(
        plain.timeline[-1].memory.parameters,
        plain.timeline[-1].memory.gradients,
        plain.timeline[-1].memory.optimizer_state,
    )


@pytest.mark.slow
def test_what_is_not_sharded_is_not_offloaded():
    """The positions, ignored: 64 rows of 64, their gradients and optimizer state."""
    asked = request(TINY, 1, offload_params=True, ignored_modules="positions")
    memory, _ = simulated(asked)
    plain, _ = simulated(request(TINY, 1, ignored_modules="positions"))
    whole = 4 * 64 * 64
    assert (memory.peak.parameters, memory.peak.optimizer_state) == (whole, 2 * whole)
    assert memory.peak.gradients in (0, whole)
    assert memory.host.parameters == plain.peak.parameters - whole
    counted = row(asked).memory.host
    assert (memory.host.parameters, memory.host.gradients) == (counted.parameters, counted.gradients)


@pytest.mark.slow
def test_activations_are_not_offloaded_from_a_cpu():
    """Its memory is that of the host, where they are either way."""
    asked = request(TINY, 1, "no", world_size=2, activation_checkpointing=True)
    section = ShardkitConfig(offload_activations=True)
    offloads = asked.config.model_copy(update={"shardkit": section})
    on_cpu = asked.with_config(offloads.model_copy(update={"use_cpu": True}))
    for found in (row, lambda each: replace(row(each), simulated=simulated(each)[0])):
        plain, gpu, cpu = (found(each).memory for each in (asked, asked.with_config(offloads), on_cpu))
        assert gpu.host.activations > cpu.host.activations == 0
        assert cpu.peak.total >= plain.peak.total > gpu.peak.total


@pytest.mark.slow
@pytest.mark.skipif(not can_reduce_unused(), reason="FSDP reduces unused parameters from torch 2.13 on")
def test_ranks_that_may_use_different_parameters_hold_as_much():
    asked = request(TINY)
    section = ShardkitConfig(ddp_find_unused_parameters=True)
    unused, _ = simulated(asked.with_config(asked.config.model_copy(update={"shardkit": section})))
    assert unused.peak.total == pytest.approx(simulated(asked)[0].peak.total, rel=1e-3)


@pytest.mark.slow
def test_parameters_and_optimizer_state_outlive_the_step(monkeypatch):
    """The allocator is shown two steps: what the first one leaves behind, the second one finds."""
    trackers = []
    monkeypatch.setattr(worker, "_reserved", trackers.append)
    simulated(request(TINY, 1), is_exact=True)
    (tracker,) = trackers
    before = {event.number for event, _ in tracker.recording.before}
    assert len(before) > 20
    assert not before & {event.number for event in tracker.recording.events}


@pytest.mark.requirement("U6")
@pytest.mark.slow
def test_what_the_allocator_reserves_lies_above_what_is_alive():
    """A step of all layers says it; FSDP's streams have pools of their own, so they are no less than one pool."""
    asked = request("gpt:layers=6,hidden=1024,heads=8,vocab=2000,seq=128", 1)
    memory, _ = simulated(asked, is_exact=True)
    assert memory.peak.total <= memory.expandable_bytes
    assert memory.peak.total <= memory.reserved_bytes <= 1.6 * memory.peak.total
    assert simulated(asked)[0].reserved_bytes is None


@pytest.mark.slow
def test_modes_of_activation_checkpointing_lie_between_none_and_whole_blocks():
    def peak(**settings: Any) -> int:
        asked = request(TINY, 1, activation_checkpointing=settings.pop("on", True))
        section = ShardkitConfig(**settings)
        asked = asked.with_config(asked.config.model_copy(update={"shardkit": section}))
        return max(m.memory.activations for m in simulated(asked)[0].timeline if m.phase == "forward")

    every, second, none = peak(), peak(recompute_every=2), peak(on=False)
    assert every < second < none
    assert every < peak(recompute="operators") < none


@pytest.mark.slow
def test_accumulation_keeps_gradients_from_the_start():
    memory, _ = simulated(with_steps(request(TINY), 4))
    assert memory.timeline[0].memory.gradients == memory.timeline[-1].memory.gradients > 0


def test_runs_of_equal_blocks():
    def block(name: str, rows: int = 4, tied_to: str | None = None) -> ModuleNode:
        inner = ModuleNode(f"{name}.w", "Linear", (Parameter("weight", (rows, 4), tied_to=tied_to),))
        return ModuleNode(name, "Block", children=(inner,))

    def stack(blocks: list[ModuleNode]) -> ModuleNode:
        return ModuleNode("", "M", children=(ModuleNode("h", "ModuleList", children=tuple(blocks), is_container=True),))

    assert repeats.runs_of(stack([block(f"h.{i}") for i in range(9)])) == [repeats.RepeatedBlocks("h", 0, 9, 9)]
    assert repeats.runs_of(stack([block(f"h.{i}") for i in range(5)])) == []
    uneven = [block(f"h.{i}", rows=8 if i < 6 else 4) for i in range(13)]
    assert repeats.runs_of(stack(uneven)) == [
        repeats.RepeatedBlocks("h", 0, 6, 6),
        repeats.RepeatedBlocks("h", 6, 7, 7),
    ]
    shared = [block(f"h.{i}", tied_to="h.0.w.weight" if i else None) for i in range(9)]
    assert repeats.runs_of(stack(shared)) == []


def test_names_in_a_shortened_model_lead_back():
    runs = [repeats.RepeatedBlocks("h", 0, 6, 4), repeats.RepeatedBlocks("h", 6, 7, 4)]
    names = [repeats.original_name(f"h.{i}.w", runs)[0] for i in range(9)]
    assert names == ["h.0.w", "h.1.w", "h.4.w", "h.5.w", "h.6.w", "h.7.w", "h.11.w", "h.12.w", "h.13.w"]
    assert repeats.original_name("head", runs) == ("head", None, 0)


def test_a_phase_that_grows_faster_takes_the_peak_over():
    """With 4 and 5 blocks the step peaks at the end of forward, with 12 at the end of backward."""

    def step(blocks: int) -> list[Moment]:
        forward = [Moment("forward", f"h.{i}", Memory(parameters=100, activations=i)) for i in range(blocks)]
        backward = [
            Moment("backward", f"h.{i}", Memory(parameters=70, gradients=8 * (blocks - i)))
            for i in reversed(range(blocks))
        ]
        return forward + backward

    runs = [repeats.RepeatedBlocks("h", 0, 12, 12)]
    found = repeats.whole_step(runs, step(4), [step(5)])
    assert found == step(12)
    assert repeats.whole_step(runs, step(4), [step(5)[1:]]) is None


BAD = """
import torch
from torch import nn

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 0:
                x = 2 * x
        return x

def build():
    return Choosy()

def batch():
    return torch.randn(2, 4)
"""


COUNTS = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self, kind):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)]
        self.kind = kind
        named = {str(index): block for index, block in enumerate(blocks)}
        self.layers = nn.ModuleDict(named) if kind == "dict" else nn.ModuleList(blocks)
        self.mix = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if self.kind == "dict":
            for layer in self.layers.values():
                x = layer(x)
            return x
        outputs = [x := layer(x) for layer in self.layers]
        if self.kind == "zip":
            return sum(weight * out for weight, out in zip(self.mix, outputs, strict=True))
        return torch.einsum("n,nbd->bd", self.mix, torch.stack(outputs))

def of_zip():
    return Counting("zip")

def of_shape():
    return Counting("shape")

def of_dict():
    return Counting("dict")

def batch():
    return torch.zeros(2, 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "shape", "dict"])
def test_a_model_that_counts_its_blocks_is_simulated_whole(tmp_path, kind):
    (tmp_path / "counting_model.py").write_text(COUNTS)
    asked = request_in(tmp_path, f"counting_model:of_{kind}", "counting_model:batch")
    exact, found = (simulate(asked, is_exact=is_exact)[0] for is_exact in (True, False))
    assert found.memory == exact.memory
    assert "Every layer was simulated: the model does not run with fewer." in found.notes


NUMBERED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.inside(x)

class Numbered(nn.Module):
    def __init__(self, recomputed=(), tapped=()):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(16))
        self.recomputed, self.tapped = recomputed, tapped

    def forward(self, x):
        outputs = [x]
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number in self.recomputed else layer(x)
            if number in self.tapped:
                outputs.append(x.exp())
        return torch.stack([*outputs, x])

def of_second():
    return Numbered(recomputed=range(0, 16, 2))

def of_half():
    return Numbered(recomputed=range(8))

def of_taps():
    return Numbered(tapped=range(7, 16, 8))

def of_all():
    return Numbered(recomputed=range(16))

def batch():
    return torch.zeros(512, 64)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_even"), [("second", False), ("half", False), ("taps", False), ("all", True)])
def test_layers_that_differ_by_their_number_are_not_extrapolated(tmp_path, kind, is_even):
    (tmp_path / "numbered_model.py").write_text(NUMBERED)
    asked = request_in(tmp_path, f"numbered_model:of_{kind}", "numbered_model:batch")
    exact, found = (simulate(asked, is_exact=is_exact)[0] for is_exact in (True, False))
    assert found.memory.peak == exact.memory.peak
    why = "Every layer was simulated: equal layers do not all add the same memory."
    assert (why in found.notes) is not is_even


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_copied_layers_hold_what_others_hold():
    """nn.Transformer copies its layers: their weights are not activations."""

    def held(copies: Callable[[nn.Module], nn.Module]) -> Memory:
        with fake_world.fake_tensors():
            model = copies(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
            return tracked_forward(model, {}, batches.given_loss(torch.zeros(2, 64))).moments[-1].memory

    assert held(deepcopy) == held(lambda model: model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_kept",
    [
        lambda: torch.rand([]) >= 0.1,
        lambda: not torch.rand(1) < 0.1,
        lambda: torch.rand(1).item() > 0.1,
        lambda: torch.rand(1) <= 0.9,
        lambda: torch.rand(()).item() < 0.9,
    ],
)
def test_layers_that_are_dropped_at_random_are_kept(is_kept):
    class Dropping(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer(x) if is_kept() else x
            return x

    with fake_world.fake_tensors():
        model = Dropping(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        tracker = tracked_forward(model, dict(model.named_children()), batches.given_loss(torch.zeros(2, 8)))
    assert {"0", "1", "2"} <= {moment.unit for moment in tracker.moments}


@pytest.mark.slow
def test_a_model_that_reads_values_is_named_by_line(tmp_path):
    (tmp_path / "choosy_model.py").write_text(BAD)
    with pytest.raises(ModelError) as error:
        simulate(request_in(tmp_path, "choosy_model:build", "choosy_model:batch"))
    assert str(error.value).startswith("choosy_model.py:13: the model choosy_model:build cannot train on fake tensors")
    assert "leave --simulate out: the closed form runs no model code" in str(error.value)


@pytest.mark.slow
def test_an_error_of_a_library_is_named_by_its_line_there(tmp_path):
    """That line is not the user's to change."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**named, **sizes, **heads}))
    inputs = '{"input_ids": torch.ones(1, 8, dtype=torch.long), "inputs_embeds": torch.ones(1, 8, 16)}'
    (tmp_path / "both_inputs.py").write_text(f"import torch\ndef batch():\n    return {inputs}\n")
    line = r"--simulate config\.json: .* \(transformers/models/llama/modeling_llama\.py:\d+: ValueError: "
    with pytest.raises(ModelError, match=f"{line}.*; take another version of transformers, or another batch"):
        simulate(request_in(tmp_path, "config.json", "both_inputs:batch"))


def test_a_batch_that_forward_does_not_accept_is_refused_with_the_rule():
    import torch

    class OfDict(torch.nn.Module):
        def forward(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
            return fields["x"].clone().requires_grad_()

    fields = {"x": torch.ones(2)}
    assert batches.given_loss((fields,))(OfDict())[1] == 1
    with pytest.raises(UsageError, match=r"--batch: .* does not accept it .*: return \(batch,\) for a model that"):
        batches.given_loss(fields)(OfDict())


def test_the_only_number_of_an_output_is_the_loss():
    head, scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
    logits = head(torch.ones(2, 4))
    loss = logits.square().mean()
    assert batches.loss_in((logits, loss)) is loss
    assert batches.loss_in({"logits": logits, "total": loss, "step": 1}) is loss
    for others in ((loss, loss + 1), (scale.exp(),), (scale,)):  # CLIP's temperature is no loss
        torch.testing.assert_close(batches.loss_in((logits, *others)), logits.mean() + sum(others))


@pytest.mark.parametrize(("layers", "is_bidirectional"), [(1, False), (2, False), (2, True)])
def test_what_an_lstm_saves_is_counted(layers, is_bidirectional):
    """torch's fake operator saves nothing. Real ones keep at least as much."""

    def held(is_trained: bool) -> int:
        lstm = nn.LSTM(32, 64, layers, bidirectional=is_bidirectional)
        batch = torch.zeros(16, 4, 32)
        tracker = MemoryTracker()
        with tracker, torch.set_grad_enabled(is_trained):
            tracker.count([*lstm.parameters(), batch], "parameters")
            tracker.enter("forward")
            output = lstm(batch)
            tracker.enter("end")
            tracker.enter("over")
        del output
        return tracker.moments[-1].memory.activations

    with fake_world.fake_tensors():
        counted = held(True) - held(False)
    saved = 7 * 16 * 4 * 64 * 4 * layers * (2 if is_bidirectional else 1)
    assert counted >= saved
    assert counted <= held(True) - held(False)


def test_weights_alone_cannot_be_simulated(tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    save_file({f"h.{i}.w.weight": zeros(4, 4) for i in range(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="weights alone cannot run"):
        simulate(request_in(tmp_path, "model.safetensors"))


OPTIMIZERS = """
import torch

def of_the_model(model):
    return torch.optim.SGD(model.parameters())

def of_matrices(parameters):
    return torch.optim.Muon(parameters)

def forgets(parameters):
    torch.optim.SGD(parameters)
"""


def test_an_optimizer_that_cannot_be_made_is_named_by_its_flag(tmp_path, monkeypatch):
    """It is not the model that has to change."""
    (tmp_path / "own_optimizers.py").write_text(OPTIMIZERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    returned = r"their torch\.optim\.Optimizer, or several\.$"
    advice = rf"; it is called with the list of trained parameters, and returns {returned}"
    for name, problem in {
        "of_the_model": r"cannot be made \(AttributeError: 'list' object has no attribute 'parameters'\)",
        "of_matrices": r"cannot be made \(ValueError: Muon only supports 2D parameters .*\)",
        "forgets": r"is not an optimizer \(got NoneType\)",
    }.items():
        make = simulated_optimizers.optimizer_factory(f"own_optimizers:{name}")
        with pytest.raises(UsageError, match=rf"^--optimizer own_optimizers:{name}: {problem}{advice}"):
            make({"weight": nn.Parameter(torch.zeros(3))})


def plan(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardkit", "plan", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.requirement("B5")
def test_the_notes_model_is_simulated_from_the_command_line(tmp_path):
    """GPT 175B, fp16 and SGD, on 128 ranks: in a child process, without a GPU, and in little memory."""
    flags = ["--model", "gpt-175b", "--world", "128", "--batch-size", "1", "--optimizer", "sgd", "--simulate", "--json"]
    settings = ["--set", "mixed_precision=fp16", "--set", "fsdp_config.fsdp_activation_checkpointing=true"]
    done = plan(*flags, *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    chosen = next(each for each in answer["strategies"] if each["strategy"] == "FULL_SHARD")
    assert chosen["method"] == "simulation"
    assert chosen["peak_bytes"] / 2**30 == pytest.approx(31.2, rel=0.03)
    assert [each["method"] for each in answer["strategies"]].count("simulation") == 1


@pytest.mark.slow
def test_checks_of_collectives_that_the_environment_asks_for_do_not_reach_a_simulation(tmp_path, monkeypatch):
    flags = ["--model", "gpt:layers=2,hidden=64,heads=4,vocab=100,seq=32", "--world", "4", "--batch-size", "1"]
    expected = plan(*flags, "--simulate", folder=tmp_path)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    done = plan(*flags, "--simulate", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, expected.stdout)


def test_flags_of_simulations_need_one(tmp_path):
    done = plan("--model", TINY, "--exact", "--batch", "a:b", "--optimizer", "a:c", folder=tmp_path)
    assert done.returncode == 2
    for flag in ("--exact", "--batch", "--optimizer a:c"):
        assert f"{flag}: only used in simulations (got no --simulate); add --simulate." in done.stderr


def test_a_batch_that_is_not_there_is_named_by_its_flag():
    for spec in ("tests.models:missing", "no_such_module:batch"):
        with pytest.raises(UsageError, match=f"--batch {spec}: cannot be imported from this folder .*; give module:f"):
            batches.named("--batch", spec)


BATCHES = """
import torch
from torch.utils.data import DataLoader

def shuffled():
    return next(iter(DataLoader(torch.zeros(8, 4), batch_size=2, shuffle=True)))

def without_data():
    return open("no-such-data.bin")

def nothing():
    return None
"""


def test_a_batch_is_made_with_values_and_its_errors_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_batches.py").write_text(BATCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    with fake_world.fake_tensors():
        batch = batches.given_batch("own_batches:shuffled")
        assert isinstance(batch, FakeTensor)
        assert batch.shape == (2, 4)
        with pytest.raises(
            UsageError, match=r"^--batch own_batches:without_data: fails \(FileNotFoundError: .*:9\); it"
        ):
            batches.given_batch("own_batches:without_data")
        with pytest.raises(
            UsageError, match=r"^--batch own_batches:nothing: returned nothing \(got None\); return one"
        ):
            batches.given_batch("own_batches:nothing")


@pytest.mark.slow
def test_batch_and_optimizer_are_found_in_the_folder_of_the_command(tmp_path):
    """The model is in that of the file."""
    (tmp_path / "the_model.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(4, 4)\n")
    (tmp_path / "shardkit.yaml").write_text("# model: the_model:build\nnum_processes: 1\nuse_cpu: true\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "own_batches.py").write_text(BATCHES)
    flags = ("--simulate", "--batch", "own_batches:shuffled", "--optimizer", "torch.optim:AdamW")
    done = plan("--config", "../shardkit.yaml", *flags, folder=tmp_path / "below")
    assert done.returncode == 0, done.stderr
    assert "micro-batch of own_batches:shuffled" in done.stdout


def measurement(folder: Path, rank: int, peak: int) -> None:
    """As a rank leaves it under launch --measure."""
    numbers = {"parameter_bytes": 2**20, "gradient_bytes": 2**20, "optimizer_bytes": 2**21}
    text = json.dumps({"rank": rank, "device": "cpu", "peak_bytes": peak, **numbers})
    (folder / f"rank{rank}.memory.json").write_text(text)


@pytest.mark.requirement("B1")
def test_planned_beside_measured(tmp_path):
    asked = request(TINY, world_size=2)
    for rank in range(2):
        measurement(tmp_path, rank, (rank + 1) * 2**20)
    found = measured.read(tmp_path)
    assert (found.rank, found.ranks, found.peak_bytes) == (1, 2, 2**21)
    lines = measured.table(row(asked), found).splitlines()
    assert lines[0] == "Planned (closed form) and measured (rank 1 of 2, cpu), MiB"
    peak = row(asked).memory.peak.total
    assert lines[-1].split() == ["peak", f"{peak / 2**20:.1f}", "2.0", f"{peak / 2**21:.3f}"]
    with_adagrad = row(replace(asked, optimizer="adagrad", batch_size=None))  # its step makes twice its state
    state = with_adagrad.memory.timeline[0].memory.optimizer_state
    assert with_adagrad.memory.peak.optimizer_state == 3 * state
    planned = measured.table(with_adagrad, found).splitlines()[-2]
    assert planned.split()[:3] == ["optimizer", "state", f"{state / 2**20:.1f}"]


def test_a_folder_without_measurements_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no measurement found .* shardkit launch --measure"):
        measured.read(tmp_path)

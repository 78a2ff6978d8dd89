"""Members that scripts for Accelerate use: each works as documented, or raises an error with an alternative."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import Accelerator
from shardkit.errors import UsageError
from tests.training import Model, Points, loss_of, parts, weights_of

FSDP = {"distributed_type": "FSDP", "use_cpu": True}
DDP = {"distributed_type": "MULTI_CPU", "use_cpu": True}
ALONE = {"distributed_type": "NO", "use_cpu": True}

MEMBERS = [
    "deepspeed_plugin",
    "use_distributed",
    "multi_device",
    "distributed_type",
    "num_processes",
    "process_index",
    "local_process_index",
    "device",
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
    "use_stateful_dataloader",
    "project_dir",
    "logging_dir",
    "save_iteration",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "mixed_precision",
    "is_fsdp2",
    "is_composable_parallelism_enabled",
    "parallelism_config",
    "torch_device_mesh",
    "should_save_model",
    "tensor_parallel_rank",
    "pipeline_parallel_rank",
    "context_parallel_rank",
    "data_parallel_rank",
    "data_parallel_shard_rank",
    "split_between_processes",
    "on_main_process",
    "on_local_main_process",
    "on_last_process",
    "on_process",
    "on_local_process",
    "main_process_first",
    "local_main_process_first",
    "no_sync",
    "trigger_sync_in_backward",
    "sync_gradients",
    "gradient_accumulation_steps",
    "accumulate",
    "join_uneven_inputs",
    "print",
    "prepare",
    "prepare_model",
    "deepspeed_ulysses_dl_adapter",
    "prepare_data_loader",
    "prepare_optimizer",
    "prepare_scheduler",
    "backward",
    "set_trigger",
    "check_trigger",
    "unscale_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "gather",
    "gather_for_metrics",
    "reduce",
    "pad_across_processes",
    "unwrap_model",
    "wait_for_everyone",
    "init_trackers",
    "get_tracker",
    "log",
    "end_training",
    "save",
    "save_model",
    "register_save_state_pre_hook",
    "save_state",
    "register_load_state_pre_hook",
    "load_state",
    "free_memory",
    "clear",
    "get_state_dict",
    "register_for_checkpointing",
    "maybe_context_parallel",
    "autocast",
    "profile",
    "optimizer_step_was_skipped",
    "skip_first_batches",
    "verify_device_map",
    "lomo_backward",
    "fp8_backend",
]
"""All 86 public members of Accelerate's Accelerator."""

REFUSED = {"save_iteration", "deepspeed_ulysses_dl_adapter", "lomo_backward"}


def test_every_member_is_there_or_refused_in_words():
    assert len(MEMBERS) == 86
    accelerator = Accelerator(config=ALONE)
    for name in MEMBERS:
        if name in REFUSED:
            with pytest.raises(AttributeError, match=rf"Accelerator\.{name} is not part of shardkit; .+\."):
                getattr(accelerator, name)
        else:
            getattr(accelerator, name)
            assert getattr(Accelerator, name).__doc__, name


def evaluated(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A teacher next to a trained model, and a model that is evaluated before it is trained."""
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(8, 2)
    torch.manual_seed(7 + dist.get_rank())
    teacher = Model().requires_grad_(False).half()
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    assert accelerator.prepare_model(teacher, evaluation_mode=True) is teacher
    before = accelerator.prepare_model(model, evaluation_mode=True)
    assert before is model and not isinstance(model, nn.parallel.DistributedDataParallel)
    x = Points(4).x
    with torch.no_grad():
        first = [model(x), teacher(x.half())]
    optimizer = accelerator.prepare(optimizer) if config is FSDP else optimizer
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with torch.no_grad():
            aim = teacher(batch["x"].half()).float()
        accelerator.backward(nn.functional.mse_loss(model(batch["x"]), aim) + loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    path = accelerator.save_state(folder)
    with torch.no_grad():
        last = teacher(x.half())
    assert torch.equal(first[1], last)
    return {
        "dtype": next(teacher.parameters()).dtype,
        "sharded": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in teacher.parameters()),
        "teacher": weights_of(teacher),
        "weights": weights_of(model),
        "wrapped": isinstance(model, nn.parallel.DistributedDataParallel),
        "files": sorted(one.name for one in path.iterdir() if one.is_dir()),
        "first": first[0],
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_models_that_are_not_trained(ranks, tmp_path, config):
    one, two = ranks.run(2, evaluated, config, tmp_path / "saved")
    (alone,) = ranks.run(1, evaluated, ALONE | {"shardkit": {"data": {"split_batches": True}}}, tmp_path / "alone")
    assert one["dtype"] is torch.float16 and one["files"] == ["model", "optim", "state"]
    assert one["wrapped"] is (config is DDP)
    assert (one["sharded"] < 267) is (config is FSDP)
    for a, b in zip(one["teacher"], two["teacher"], strict=True):
        assert torch.equal(a, b)  # rank 0's, as for any model
    for a, b in zip(one["weights"], two["weights"], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(one["first"], alone["first"])
    assert any(not torch.equal(a, b) for a, b in zip(one["weights"], alone["weights"], strict=True))


def members(config: dict[str, Any]) -> dict[str, Any]:
    accelerator = Accelerator(config=config | {"mixed_precision": "bf16"})
    rank = accelerator.process_index
    model, optimizer, loader, scheduler = parts(8, 2)
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    model = accelerator.prepare_model(model, device_placement=True)
    optimizer = accelerator.prepare_optimizer(optimizer, device_placement=True)
    loader = accelerator.prepare_data_loader(loader, device_placement=False)
    scheduler = accelerator.prepare_scheduler(scheduler)
    values = torch.tensor([rank, 5 - rank])
    reduced = {how: accelerator.reduce(values, how).tolist() for how in ("sum", "mean", "max", "min")}
    scaled = accelerator.reduce({"a": values}, "max", scale=2.0)["a"].tolist()
    with accelerator.no_sync(model):
        output = model(Points(2).x)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(output.sum() * (rank + 1))
    gradient = next(model.parameters()).grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    with accelerator.join_uneven_inputs([model], even_batches=False), accelerator.maybe_context_parallel():
        batches = len(list(loader))
    inner = accelerator.unwrap_model(model)
    assert accelerator.unwrap_model(compiled) is compiled._orig_mod
    assert accelerator.unwrap_model(compiled, keep_torch_compile=True) is compiled
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator.even_batches = False
    with pytest.raises(UsageError, match=r"needs one value per argument \(got 1 for 2\)"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    with pytest.raises(UsageError, match="every rank reads its own part of the data"):
        accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=len)
    with pytest.raises(UsageError, match=r"use mean, sum, max, min or none"):
        accelerator.reduce(values, "median")
    return {
        "reduced": reduced,
        "scaled": scaled,
        "gradient": gradient,
        "batches": batches,
        "plain": not hasattr(inner.forward, "_shardkit_forward_before"),
        "ranks": (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank),
        "mesh": None if accelerator.torch_device_mesh is None else accelerator.torch_device_mesh.shape,
        "even": accelerator.even_batches,
        "cleared": accelerator.clear(model, optimizer),
        "kinds": (accelerator.is_fsdp2, accelerator.state.is_fsdp2, accelerator.state.deepspeed_plugin),
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_members_do_what_they_say(ranks, config):
    results = ranks.run(3, members, config)
    for rank, found in enumerate(results):
        assert found["reduced"] == {"sum": [3, 12], "mean": [1.0, 4.0], "max": [2, 5], "min": [0, 3]}
        assert found["scaled"] == [4.0, 10.0] and found["batches"] == 2 and found["plain"]
        assert torch.equal(found["gradient"], results[0]["gradient"])
        assert found["ranks"] == ((0, rank) if config is FSDP else (rank, 0))
        assert found["mesh"] == ((3,) if config is FSDP else None)
        assert found["even"] is False and found["cleared"] == (None, None)
        assert found["kinds"] == (config is FSDP, config is FSDP, None)


class Around(nn.Module):
    """A model whose part has the name that DDP gives to the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def prepared_again(config: dict[str, Any], is_compiled: bool) -> tuple[bool, str]:
    """Whether preparing the model again, and what its wrappers contain, gives the same; and the error of its part."""
    accelerator = Accelerator(config=config)
    model = Around()
    given = torch.compile(model) if is_compiled else model
    prepared = accelerator.prepare(given)
    found = [accelerator.prepare(one) for one in (model, given, prepared)]
    try:
        part = accelerator.prepare(model.module)
    except UsageError as error:
        return all(one is prepared for one in found), str(error)
    assert part is model.module
    return all(one is prepared for one in found), ""


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("config", [ALONE, FSDP, DDP], ids=lambda c: c["distributed_type"])
@pytest.mark.slow
def test_a_model_prepared_again_is_the_same_but_its_part_is_not(ranks, config, is_compiled):
    world_size = 1 if config is ALONE else 2
    for is_same, error in ranks.run(world_size, prepared_again, {**config, "num_processes": world_size}, is_compiled):
        assert is_same
        assert error.startswith("prepare: two models share weight, bias") == (config is not ALONE)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_model_of_one_process_is_pickled_whole_and_an_accelerator_is_not(mixed_precision):
    """torch.save(model, path), as scripts of one process do it."""
    accelerator = Accelerator(config={**ALONE, "mixed_precision": mixed_precision})
    model = accelerator.prepare(Model())
    read = pickle.loads(pickle.dumps(model))
    x = torch.ones(2, 6)
    torch.testing.assert_close(read(x), model(x), atol=0.05, rtol=0)
    read(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UsageError, match=r"Accelerator: cannot be pickled or copied .* a DataLoader's workers"):
        pickle.dumps(accelerator)


def test_prepared_optimizers_and_schedules_are_not_pickled(alone):
    accelerator = Accelerator(config=ALONE)
    optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
    for one in accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        for taken in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match=r"a prepared (SGD|StepLR) cannot be pickled.* its state_dict"):
                taken(one)


def test_what_is_no_model_is_not_unwrapped_and_has_no_weights(alone):
    accelerator = Accelerator(config=ALONE)
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    assert accelerator.unwrap_model(optimizer) is optimizer and accelerator.unwrap_model(None) is None
    with pytest.raises(UsageError, match=r"expected a model \(got AcceleratedOptimizer\); give the model"):
        accelerator.get_state_dict(optimizer)


SHARDED = r"^pickle: a sharded model cannot be pickled.*save_model.* copy.deepcopy\(accelerator.unwrap_model\("


def pickles(config, text):
    accelerator = Accelerator(config=config)
    model = accelerator.prepare(Model())
    with pytest.raises(UsageError, match=text):
        pickle.dumps(model)
    read = pickle.loads(pickle.dumps(copy.deepcopy(accelerator.unwrap_model(model))))
    x = torch.ones(2, 6)
    assert torch.equal(read(x), model(x)) and type(read) is Model


@pytest.mark.parametrize(
    ("config", "text"),
    [(FSDP, SHARDED), (DDP, r"^pickle: a model in DistributedDataParallel cannot be pickled.*unwrap_model")],
    ids=["sharded", "replicated"],
)
def test_a_prepared_model_is_pickled_as_a_copy(ranks, config, text):
    """The same call under every strategy."""
    ranks.run(2, pickles, config, text)


def copies_of_a_replica():
    accelerator = Accelerator(config=DDP)
    model = accelerator.prepare(Model())
    with pytest.raises(UsageError, match=r"cannot be pickled, .* or copied by copy.copy"):
        copy.copy(model)
    x = torch.ones(2, 6)
    return torch.equal(pickle.loads(pickle.dumps(accelerator.unwrap_model(model)))(x), copy.deepcopy(model)(x))


def test_a_replica_is_pickled_without_its_wrapper(ranks):
    assert ranks.run(2, copies_of_a_replica) == [True, True]


class WithModes(Model):
    """A class with modes of its own, as those that merge adapters, or keep layers frozen, for evaluation."""

    def train(self, mode=True, keep_frozen=False):
        self.is_kept = keep_frozen
        return super().train(mode)

    def eval(self):
        self.is_merged = True
        return super().eval()


def modes_of_a_class():
    model = Accelerator(config=DDP).prepare(WithModes())
    found = [model.eval() is model, model.is_merged, model.training, model.module.training]
    return [*found, model.train(keep_frozen=True) is model, model.is_kept, model.training, model.module.training]


def test_a_replica_has_the_modes_of_its_models_class(ranks):
    assert ranks.run(2, modes_of_a_class) == [[True, True, False, False, True, True, True, True]] * 2

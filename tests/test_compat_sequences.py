"""Context parallelism under Accelerate's names: what a script gives and sees, against one process."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardkit.compat import Accelerator, trainers
from shardkit.compat.mesh_sizes import DeepSpeedSequenceParallelConfig, ParallelismConfig, TorchContextParallelConfig
from shardkit.compat.states import AcceleratorState
from shardkit.errors import UsageError
from tests.ranks import log_lines

DDP, FSDP = ({"distributed_type": kind, "use_cpu": True} for kind in ("MULTI_CPU", "FSDP"))
SIZES = [
    ({}, [], ["dp_shard_cp"], 1, 1),
    ({"cp_size": 2}, ["cp"], ["dp_shard_cp"], 1, 2),
    ({"dp_shard_size": 2, "cp_size": 2}, ["dp_shard", "cp"], ["dp_shard_cp"], 2, 2),
    (
        {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2},
        ["dp_replicate", "dp_shard", "cp"],
        ["dp_replicate", "dp_shard_cp"],
        4,
        2,
    ),
]


@pytest.mark.parametrize(("sizes", "axes", "of_fsdp", "reading", "sharing"), SIZES)
def test_sizes_and_axes_are_accelerates(sizes, axes, of_fsdp, reading, sharing):
    config = ParallelismConfig(**sizes)
    assert config.active_mesh_dims == config.dp_cp_dim_names == axes and config.fsdp_dim_names == of_fsdp
    assert config.dp_dim_names == [axis for axis in axes if axis != "cp"]
    assert config.dp_shard_cp_dim_names == [axis for axis in axes if axis != "dp_replicate"]
    assert (config.data_parallel_size, config.non_data_parallel_size) == (reading, sharing)
    assert config.total_size == reading * sharing and config.non_dp_dim_names == ["cp"] * (sharing > 1)
    assert (config.cp_enabled, config.sp_enabled, config.tp_enabled) == (sharing > 1, False, False)


def test_what_sizes_mean_for_a_run():
    assert ParallelismConfig(cp_size=2).shardkit_settings() == {"shardkit.mesh.context_size": 2}
    assert ParallelismConfig(dp_shard_size=4, cp_size=2).shardkit_settings() == {
        "shardkit.mesh.context_size": 2,
        "distributed_type": "FSDP",
    }
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, cp_size=2).shardkit_settings()
    assert (mesh["shardkit.mesh.replicate_size"], mesh["shardkit.mesh.shard_size"]) == (2, 8)
    deepspeeds = ParallelismConfig(
        2, sp_size=4, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(256)
    )
    assert deepspeeds.shardkit_settings() == {"shardkit.mesh.context_size": 4}
    assert (deepspeeds.cp_size, deepspeeds.cp_enabled, deepspeeds.sp_size, deepspeeds.sp_enabled) == (4, True, 1, False)


def test_sizes_are_read_from_accelerates_variables(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig()
    assert (config.dp_shard_size, config.cp_size, config.cp_handler.cp_comm_strategy) == (4, 2, "alltoall")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"cp_size": 2, "sp_size": 2}, r"are the same here \(got 2 and 2\); give one of them"),
        ({"cp_size": 0}, r"sizes are at least 1 \(got cp_size=0\); leave out"),
        ({"sp_backend": "ring"}, r"sp_backend is not one of Accelerate's \(got ring\); use deepspeed"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes, words):
    with pytest.raises(UsageError, match=words):
        ParallelismConfig(**sizes)
    with pytest.raises(UsageError, match=r"is not one of the choices \(got ring\); use allgather or alltoall"):
        TorchContextParallelConfig("ring")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(8, 8)
        self.attended, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        query, key, value = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.attended(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def batch_of(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, shifted labels without those of a prompt, and positions."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[:, :3] = -100
    return tokens, labels, torch.arange(8).expand(len(tokens), -1).clone()


def trained(settings: dict[str, Any], sizes: dict[str, int] | None, samples: int) -> dict[str, Any]:
    """A loop as in Accelerate's examples, and an evaluation as the Trainer's, of 5 samples."""
    accelerator = Accelerator(config=settings, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    shares = accelerator.parallelism_config or ParallelismConfig()
    data = torch.randint(0, 16, (13, 8), generator=torch.Generator().manual_seed(5))
    loaders = [torch.utils.data.DataLoader(part, samples) for part in (data[:8], data[8:])]
    model = Attending()
    model, optimizer, *loaders = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5), *loaders)
    losses, repeated, right, predicted, of_slices = [], [], [], [], []
    for batch in loaders[0]:
        tokens, labels, positions = buffers = batch_of(batch)
        with accelerator.maybe_context_parallel([*buffers], [1, 1, 1], no_restore_buffers={tokens}):
            loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            counted = accelerator.gather_for_metrics((labels != -100).sum()).sum()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        assert labels.shape == positions.shape == (samples, 8) and tokens.size(1) * shares.cp_size == 8
        assert counted == 4 * samples * shares.data_parallel_size
    model.eval()
    for batch in loaders[1]:
        tokens, labels, positions = buffers = batch_of(batch)
        known = labels.detach()  # of whole sequences, as the Trainer keeps them
        items = accelerator.gather((labels != -100).sum()).sum() / shares.cp_size
        with torch.no_grad(), accelerator.maybe_context_parallel([*buffers], [1, 1, 1], {tokens, labels, positions}):
            logits = model(tokens, positions)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / items * accelerator.num_processes
        repeated.append(accelerator.gather_for_metrics(loss.repeat(samples)))
        right.append(accelerator.gather_for_metrics(logits.argmax(-1) == labels).sum().item())
        texts = accelerator.gather_for_metrics(["text"] * len(batch), use_gather_object=True)
        assert len(texts) == accelerator.gather_for_metrics(tokens).size(0) * shares.cp_size
        of_slices.append(torch.cat(accelerator.gather_for_metrics((logits.argmax(-1), tokens, known)), 1))
    for batch in loaders[1]:
        tokens, _, positions = batch_of(batch)
        with torch.no_grad():
            predicted.append(accelerator.gather_for_metrics(model(tokens, positions).argmax(-1)))
    mesh = accelerator.torch_device_mesh
    return {
        "losses": losses,
        "evaluated": torch.cat(repeated).mean().item(),
        "right": right,
        "predicted": torch.cat(predicted),
        "of slices": torch.cat(of_slices),
        "mesh": None if mesh is None else (mesh.mesh_dim_names, mesh["dp_cp"].size()),
        "rank": accelerator.context_parallel_rank,
        "shown": shares.to_json(),
        "same": AcceleratorState().parallelism_config is accelerator.parallelism_config,
    }


SHARED = {"shardkit": {"mesh": {"context_size": 2}}}


@pytest.mark.slow
@pytest.mark.requirement("U1")
@pytest.mark.parametrize(
    ("settings", "sizes", "world"),
    [
        (FSDP, {"cp_size": 2}, 2),
        (DDP, {"cp_size": 2}, 2),
        (FSDP | SHARED, None, 2),
        (FSDP | SHARED, {"dp_shard_size": 1}, 2),
        pytest.param(DDP | SHARED, None, 4, marks=pytest.mark.slow),
        pytest.param(FSDP, {"dp_shard_size": 2, "sp_size": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_splits_sequences_is_one_process(ranks, settings, sizes, world):
    (alone,) = ranks.run(1, trained, {"distributed_type": "NO", "use_cpu": True}, None, 4)
    found = ranks.run(world, trained, settings, sizes, 8 // world)
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert one["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-5)
        assert one["right"] == alone["right"] and torch.equal(one["predicted"], alone["predicted"])
        assert torch.equal(one["of slices"], alone["of slices"])
        assert one["rank"] == rank % 2 and one["same"]
        axis = "dp_replicate" if settings["distributed_type"] == "MULTI_CPU" else "dp_shard"
        assert one["mesh"] == (("cp",) if world == 2 else (axis, "cp"), world)
        assert one["shown"] | {"cp_size": 2, "sp_size": 1, f"{axis}_size": world // 2} == one["shown"]


def gathered_of_batches_of_two_lengths():
    """Of two groups, as the Trainer's evaluation: padded to the longest of all ranks, then gathered."""
    accelerator = Accelerator(config=DDP | SHARED)
    length, found = 4 + 4 * (accelerator.process_index // 2), {}
    tokens = torch.arange(2 * length).view(2, length)
    known = tokens.detach()
    with accelerator.maybe_context_parallel([tokens], [1]):
        found["split"], found["logits"] = tokens.clone(), tokens.unsqueeze(-1).expand(-1, -1, 3) + 0.5
        found["other"] = tokens.sum(1, keepdim=True).expand(-1, 3)
    found["whole"] = known
    padded = {name: accelerator.pad_across_processes(one, dim=1, pad_index=-100) for name, one in found.items()}
    return accelerator.gather_for_metrics(padded)


def test_values_along_slices_are_those_along_sequences(ranks):
    expected = torch.full((4, 8), -100)
    expected[:2, :4], expected[2:] = torch.arange(8).view(2, 4), torch.arange(16).view(2, 8)
    for found in ranks.run(4, gathered_of_batches_of_two_lengths):
        assert torch.equal(found["split"], expected) and torch.equal(found["whole"], expected)
        assert torch.equal(found["logits"][..., 2], torch.where(expected < 0, -100.0, expected + 0.5))
        assert found["other"].shape == (8, 3)


def sizes_that_are_not_those_of_the_ranks():
    with pytest.raises(UsageError, match=r"dp_shard_size=4 x cp_size=2 = 8 for 2 ranks, 2 of which share"):
        Accelerator(config=FSDP, parallelism_config=ParallelismConfig(dp_shard_size=4, cp_size=2))
    with log_lines(level=logging.INFO) as lines:
        accelerator = Accelerator(config=FSDP, parallelism_config=ParallelismConfig(sp_size=2))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(4, 8)))
    with pytest.raises(UsageError, match=r"a loader yields whole sequences here, .* \(got a group of 2 ranks"):
        accelerator.deepspeed_ulysses_dl_adapter(loader, nn.Linear(1, 1))
    return [line for line in lines if "sp_size=2 is shardkit.mesh.context_size here" in line]


def test_what_is_said_of_sizes_on_ranks(ranks):
    first, second = ranks.run(2, sizes_that_are_not_those_of_the_ranks)
    assert len(first) == 1 and "the Trainer splits them" in first[0] and second == []


class Trainers:
    """What the module transformers.trainer has."""

    class Trainer:
        def __init__(self, smoothing: float = 0.0, compute_loss_func: Any = None) -> None:
            self.args = SimpleNamespace(label_smoothing_factor=smoothing)
            trainers.refuse_unsplit(sys._getframe(), 2, True)

        def compute_loss(self) -> None: ...


class Logging(Trainers.Trainer):
    def compute_loss(self) -> None:
        super().compute_loss()


class OfItsOwn(Trainers.Trainer):
    def compute_loss(self) -> None: ...


class DPOTrainer(OfItsOwn):
    def compute_loss(self) -> None: ...


class SFTTrainer(OfItsOwn):
    def compute_loss(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            DPOTrainer,
            {},
            r"DPOTrainer: its loss needs whole .* \(got shardkit.mesh.context_size: 2\); leave",
        ),
        (
            SFTTrainer,
            {"smoothing": 0.1},
            r"label_smoothing_factor would .* \(got label_smoothing_factor=0.1 with",
        ),
        (Logging, {"compute_loss_func": trained}, r"compute_loss_func would .* \(got compute_loss_func=trained with"),
    ],
)
def test_losses_of_whole_sequences_are_refused_where_ranks_share_them(monkeypatch, kind, options, words):
    monkeypatch.setitem(sys.modules, "transformers.trainer", Trainers)
    monkeypatch.setattr(Trainers.Trainer, "__module__", "transformers.trainer")
    for one in (DPOTrainer, SFTTrainer):
        monkeypatch.setattr(one, "__module__", "trl.trainer")
    with pytest.raises(UsageError, match=words):
        kind(**options)
    with log_lines(level=logging.WARNING) as lines:
        for one in (Trainers.Trainer, Logging, OfItsOwn, SFTTrainer):
            one()
    assert [line.partition(":")[0] for line in lines] == ["OfItsOwn.compute_loss"]


def test_the_adapter_of_loaders_is_none_where_no_ranks_share_sequences(alone):
    loader = [1, 2]
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, nn.Linear(1, 1)) is loader
    assert accelerator.parallelism_config is None and accelerator.torch_device_mesh is None

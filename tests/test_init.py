"""First values: from a file by slices, from the modules themselves, equal on any number of ranks, and never garbage."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.checkpoint.states import state
from shardkit.cli.main import run
from shardkit.config.schema import Config
from shardkit.distributed import modules
from shardkit.distributed.modules import unwrapped
from shardkit.sharding import weight_files
from tests import checkpoints, models
from tests.engine import parallel
from tests.ranks import RankError


def config_for(world: int, strategy: int = 1, **fsdp: Any) -> Config:
    settings = {"fsdp_sharding_strategy": strategy, **fsdp}
    return Config(
        num_processes=world,
        num_machines=2 if world == 4 else 1,
        use_cpu=True,
        shardkit={"seed": 7},
        fsdp_config=settings,
    )


def values(model: nn.Module) -> dict[str, Any]:
    """All parameters and buffers, whole, as plain lists. Collective."""
    states = [*model.named_parameters(), *model.named_buffers()]
    return {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach().double().tolist() for fqn, t in states}


def empty(tied: bool = False) -> models.Gpt:
    with shardkit.init_empty_weights():
        return models.Gpt(tied=tied)


def test_empty_weights_have_shapes_and_no_memory():
    model = empty(tied=True)
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert not model.position.is_meta and torch.equal(model.position, models.Gpt().position)
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_parameter_registered_twice_stays_one():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.ones(3))
            shared.mark = "kept"  # type: ignore[attr-defined]
            self.first, self.second = shared, shared

    with shardkit.init_empty_weights():
        model = Twice()
    assert model.first is model.second and model.first.is_meta and model.first.mark == "kept"


def test_one_process_reads_the_file_as_well(tmp_path):
    expected = saved(tmp_path, tied=True, split=True)
    config = Config(distributed_type="NO", use_cpu=True)
    assert values(parallel(empty(tied=True), config, tmp_path)) == expected


def saved(folder: Path, tied: bool, split: bool) -> dict[str, Any]:
    """A model's weights in `folder`, in one file or in two with an index; and its values."""
    torch.manual_seed(5)
    model = models.Gpt(tied=tied)
    model.norm.weight.data.uniform_()
    state = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    if not split:
        save_file(state, folder / "model.safetensors")
        return values(model)
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in files.items():
        save_file({fqn: state[fqn] for fqn in mine}, folder / file)
    index = {"weight_map": {fqn: file for file, mine in files.items() for fqn in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return values(model)


def loaded(strategy: int, folder: Path, tied: bool) -> tuple[dict[str, Any], bool]:
    prepared = parallel(empty(tied), config_for(dist.get_world_size(), strategy), folder)
    model = unwrapped(prepared)  # which reduces the gradients as long as the prepared one exists
    models.next_token_loss(model, torch.zeros(1, 4, dtype=torch.long)).backward()
    return values(model), model.head.weight is model.embed.weight


@pytest.mark.slow
@pytest.mark.requirement("A7")
@pytest.mark.parametrize(
    ("strategy", "world", "tied", "split"),
    [(1, 2, True, False), (4, 4, False, True), (3, 2, True, True)],
)
def test_each_rank_reads_its_rows(ranks, tmp_path, strategy, world, tied, split):
    expected = saved(tmp_path, tied, split)
    for found, still_tied in ranks.run(world, loaded, strategy, tmp_path, tied):
        assert found == expected
        assert still_tied == tied


def bytes_read(folder: Path) -> list[int]:
    """Elements of each tensor that this rank copied."""
    sizes: list[int] = []
    found = weight_files.put

    def counting(target: torch.Tensor, read: Any) -> None:
        found(target, lambda rows: (sizes.append((piece := read(rows)).numel()), piece)[1])

    weight_files.put = counting  # type: ignore[assignment]
    try:
        parallel(empty(), config_for(2), folder / "model.safetensors")
    finally:
        weight_files.put = found
    return sizes


@pytest.mark.slow
@pytest.mark.requirement("A7")
def test_no_rank_reads_the_whole(ranks, tmp_path):
    saved(tmp_path, tied=False, split=False)
    total = sum(p.numel() for p in models.Gpt().parameters())
    read = [sum(sizes) for sizes in ranks.run(2, bytes_read, tmp_path)]
    assert sum(read) == total and max(read) < 0.55 * total


def initialised(strategy: int) -> dict[str, Any]:
    return values(unwrapped(parallel(empty(), config_for(dist.get_world_size(), strategy))))


@pytest.mark.requirement("A7")
@pytest.mark.slow
def test_own_initialisation_is_equal_for_any_world_and_strategy(ranks):
    expected = ranks.run(1, initialised, 1)[0]
    weights = torch.tensor(expected["blocks.0.up.weight"])
    assert 0.2 < weights.abs().max() <= 12**-0.5 and weights.unique().numel() == weights.numel()
    assert set(expected["norm.weight"]) == {1.0} and set(expected["norm.bias"]) == {0.0}
    for world, strategy in ((2, 1), (4, 4), (2, 3)):
        for found in ranks.run(world, initialised, strategy):
            assert found == expected


class ResetsAll(models.Gpt):
    """Its reset_parameters also initializes the modules in it, which are units of their own."""

    def reset_parameters(self) -> None:
        self.position = torch.linspace(-1, 1, 64 * 12).view(64, 12)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)


def all_reset(strategy: int, weights: Path | None = None) -> dict[str, Any]:
    with torch.device("meta"):
        model = ResetsAll()
    return values(unwrapped(parallel(model, config_for(dist.get_world_size(), strategy), weights)))


@pytest.mark.slow
def test_a_module_that_resets_those_of_other_units_is_equal_for_any_world_and_strategy(ranks):
    expected = ranks.run(1, all_reset, 1)[0]
    weights = torch.tensor(expected["blocks.0.up.weight"])
    assert 0.04 < weights.abs().max() < 0.1 and weights.unique().numel() == weights.numel()
    for strategy in (1, 3):
        for found in ranks.run(2, all_reset, strategy):
            assert found == expected


@pytest.mark.slow
def test_a_module_that_resets_those_of_other_units_leaves_loaded_weights(ranks, tmp_path):
    saved(tmp_path, tied=False, split=False)
    expected = load_file(tmp_path / "model.safetensors")
    for found in ranks.run(2, all_reset, 1, tmp_path):
        assert {fqn: found[fqn] for fqn in expected} == {fqn: t.double().tolist() for fqn, t in expected.items()}


class InitializesAll(models.Gpt):
    """Its constructor would end with `self.apply(self._init_weights)`, which leaves norms as they are."""

    def __init__(self, has_config: bool) -> None:
        super().__init__()
        del self.position
        self.register_buffer("position", torch.zeros(64, 12))
        if has_config:
            self.config = {"std": 0.02}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class InitializesAtOnce(InitializesAll):
    """Its constructor would end with `self._init_weights()`."""

    def _init_weights(self) -> None:  # type: ignore[override]
        for module in self.modules():
            super()._init_weights(module)


def by_the_model(kind: type[InitializesAll], has_config: bool) -> dict[str, Any]:
    with shardkit.init_empty_weights():
        model = kind(has_config)
    return values(unwrapped(parallel(model, config_for(2))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "has_config"), [(InitializesAll, False), (InitializesAll, True), (InitializesAtOnce, False)]
)
def test_the_models_own_initialization_goes_after_that_of_its_modules(ranks, kind, has_config):
    for found in ranks.run(2, by_the_model, kind, has_config):
        assert 0.015 < torch.tensor(found["blocks.0.up.weight"]).std() < 0.025
        assert set(found["blocks.0.norm1.weight"]) == {1.0} and set(found["norm.bias"]) == {0.0}


def batch_norm_on_meta() -> dict[str, Any]:
    with torch.device("meta"):
        model = models.ConvNet()
    return values(parallel(model, config_for(2, fsdp_transformer_layer_cls_to_wrap="ConvBlock")))


def test_buffers_on_meta_are_reset_by_their_module(ranks):
    for found in ranks.run(2, batch_norm_on_meta):
        assert set(found["blocks.0.norm.running_var"]) == {1.0}
        assert found["blocks.1.norm.num_batches_tracked"] == 0


def garbage(weights: Path | None) -> None:
    with torch.device("meta"):
        model = models.Gpt()
    parallel(model, config_for(2), weights)


def test_what_has_no_value_is_named(ranks, tmp_path):
    """`position` is a non-persistent buffer that only the constructor computes."""
    with pytest.raises(RankError, match=r"ModelError: model: no value after initialization for position; build the"):
        ranks.run(2, garbage, None)
    saved(tmp_path, tied=False, split=False)
    with pytest.raises(RankError, match=r"ModelError: model: no value after initialization for position"):
        ranks.run(2, garbage, tmp_path)


def wrong_weights(folder: Path) -> str:
    try:
        parallel(empty(), config_for(2), folder)
    except shardkit.ShardkitError as error:
        return str(error)
    return "accepted"


def test_weights_that_do_not_fit_are_all_named(ranks, tmp_path):
    torch.manual_seed(0)
    state = {fqn: p.detach().clone() for fqn, p in models.Gpt().named_parameters()}
    del state["head.weight"], state["norm.bias"]
    state["embed.weight"] = torch.zeros(20, 12)
    save_file(state, tmp_path / "model.safetensors")
    for text in ranks.run(2, wrong_weights, tmp_path):
        assert "embed.weight has a different shape than in the model (got (20, 12), the model has (19, 12))" in text
        assert "has no head.weight, norm.bias, for which the model has no values either" in text
        assert len(text.splitlines()) == 2


def one_rank_cannot_read(folder: Path) -> str:
    return wrong_weights(folder if dist.get_rank() == 0 else folder / "missing")


def test_a_file_that_one_rank_cannot_read_stops_all(ranks, tmp_path):
    saved(tmp_path, tied=False, split=False)
    first, second = ranks.run(2, one_rank_cannot_read, tmp_path)
    assert first == second and "missing: not readable as safetensors" in first
    assert len(first.splitlines()) == 1  # and no tensor is said to be lacked


def test_a_broken_file_is_said_so(ranks, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    assert "not readable as safetensors (got model.safetensors:" in ranks.run(1, wrong_weights, tmp_path)[0]


def test_a_checkpoint_in_place_of_weights_is_told_what_to_do(tmp_path):
    model = models.Gpt()
    checkpoints.save(state.Live([model]), tmp_path / "step")
    _, problems = weight_files.load(model, tmp_path / "step")
    command = f"shardkit checkpoint merge {tmp_path / 'step'} -o FOLDER"
    assert len(problems) == 1 and f"{tmp_path / 'step'}: is a checkpoint; " in problems[0] and command in problems[0]
    assert run(command.replace("FOLDER", str(tmp_path / "weights")).split()[1:]) == 0
    assert weight_files.load(model, tmp_path / "weights")[1] == []


@pytest.mark.parametrize(
    "index", [[], {"weight_map": {"a": 1}}, {"weight_map": {"a": "../model.safetensors"}}], ids=str
)
def test_an_index_that_names_no_files_of_its_folder_is_refused(tmp_path, index):
    folder = tmp_path / "model"
    folder.mkdir()
    saved(tmp_path, tied=False, split=False)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, problems = weight_files.load(models.Gpt(), folder)
    assert (
        len(problems) == 1
        and "model: not readable as safetensors (got model.safetensors.index.json: weight_map" in problems[0]
    )


def test_one_file_goes_before_an_index_of_several(tmp_path):
    """As in Transformers: the index is of an earlier export."""
    expected, older = saved(tmp_path, tied=False, split=False), models.Gpt()
    save_file({fqn: torch.zeros_like(p) for fqn, p in older.named_parameters()}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(dict(older.named_parameters()), "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weight_files.load(older, tmp_path)
    assert values(older) == expected


def real_on_rank_0() -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.Gpt() if dist.get_rank() == 0 else empty()
    return values(parallel(model, config_for(2)))


def test_ranks_without_weights_get_rank_0s(ranks):
    torch.manual_seed(0)
    expected = values(models.Gpt())
    assert ranks.run(2, real_on_rank_0) == [expected, expected]


def compiled(folder: Path, is_empty: bool) -> dict[str, Any]:
    model = empty() if is_empty else models.Gpt()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    whole = parallel(torch.compile(model, backend="eager"), config_for(2), folder)
    return {modules.clean_name(fqn): value for fqn, value in values(whole).items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_compiled_model_gets_the_weights_of_the_model(ranks, tmp_path, is_empty, prefix):
    expected = saved(tmp_path, tied=False, split=False)
    state = load_file(tmp_path / "model.safetensors")
    save_file({prefix + fqn: value for fqn, value in state.items()}, tmp_path / "model.safetensors")
    assert ranks.run(2, compiled, tmp_path, is_empty) == [expected, expected]

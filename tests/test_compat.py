"""shardkit.compat: every name of accelerate is there or says what to use instead; states, plugins, the facade."""

import inspect
import io
import itertools
import json
import logging
import subprocess
import sys
from datetime import timedelta
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp import ShardingStrategy as Torchs
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import BatchSampler, RandomSampler

from shardkit import bars
from shardkit.cli.main import run
from shardkit.compat import Accelerator, migrate, modules, names, scan
from shardkit.compat.differences import DIFFERENCES, VARIABLE, choices
from shardkit.compat.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from shardkit.compat.kinds import DistributedType, DynamoBackend, PrecisionType
from shardkit.compat.local_sgd import LocalSGD
from shardkit.compat.members import MEMBERS
from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.compat.models import get_mixed_precision_context_manager, load_checkpoint_in_model
from shardkit.compat.operations import gather, gather_object
from shardkit.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from shardkit.compat.startup import around_script
from shardkit.compat.states import AcceleratorState, PartialState, is_initialized, kind_of
from shardkit.compat.touched import TOUCHED, Touched, report
from shardkit.compat.window import GradientState
from shardkit.config.keys import resolve_name
from shardkit.config.schema import ShardingStrategy
from shardkit.errors import MachineError, UsageError
from shardkit.runtime import process_control
from shardkit.runtime.project import ProjectConfiguration
from tests.ranks import log_lines

ALONE = {"distributed_type": "NO", "use_cpu": True}
LISTED = Path(__file__).parent / "data" / "accelerate_names.txt"


def listed() -> dict[str, list[str]]:
    """The table of names: a heading `module:` or `class NAME:`, below it the names."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in LISTED.read_text().splitlines():
        if line.startswith("#"):
            continue
        if line.startswith(" "):
            found[current] += line.split()
        else:
            current = line.removesuffix(":")
            found[current] = []
    return found


@pytest.fixture
def clean_states(alone):
    """States as in a new process, before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    PartialState._timeout, PartialState._has_started_group = None, False
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- names ----


@pytest.mark.parametrize("module", sorted(key for key in listed() if not key.startswith("class ")))
def test_every_name_is_there_or_says_what_to_use_instead(module):
    below = "" if module == "accelerate" else module
    stand_in = import_module(f"shardkit.compat.{below}" if below else "shardkit.compat")
    silent = []
    for name in listed()[module]:
        found = getattr(stand_in, name, None)
        if found is None and name != "FSDP_MODEL_NAME":
            silent.append(name)
        elif isinstance(found, modules._RefusedType):
            with pytest.raises(UsageError, match=f"accelerate's {name}: .* \\(got a call\\); .+\\."):
                found()
    assert silent == []


def test_every_member_of_the_accelerator_and_its_table():
    told = listed()["class Accelerator"]
    assert len(told) == 86
    assert list(MEMBERS) and set(MEMBERS) == set(told)
    inherited = {name for name in told if hasattr(Accelerator, name)}
    assert set(told) - inherited == set()


@pytest.mark.parametrize("kind", ["PartialState", "AcceleratorState", "GradientState"])
def test_every_attribute_of_the_states(kind, clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    state = {"PartialState": PartialState, "AcceleratorState": AcceleratorState, "GradientState": GradientState}[kind]()
    assert [name for name in listed()[f"class {kind}"] if not hasattr(state, name)] == []
    assert accelerator.state.deepspeed_plugin is None and accelerator.state.fsdp_plugin is None


@pytest.mark.parametrize(
    "kind",
    [ParallelismConfig, FullyShardedDataParallelPlugin, GradientAccumulationPlugin, DataLoaderConfiguration],
)
def test_every_attribute_of_the_plugins(kind):
    assert [name for name in listed()[f"class {kind.__name__}"] if not hasattr(kind(), name)] == []


def test_a_refused_name_can_be_imported_compared_and_subclassed_but_not_used():
    refused = import_module("shardkit.compat.hooks").AlignDevicesHook
    assert not isinstance(3, refused)

    class Own(refused):
        pass

    for use in (refused, Own, lambda: refused.something):
        with pytest.raises(UsageError, match="is not supported"):
            use()


def test_what_is_skipped_stays_where_it_is_at_any_depth():
    send, x = import_module("shardkit.compat.utils").send_to_device, torch.ones(2)
    moved = send({"a": [{"kept": x, "b": x}], "kept": x}, "meta", skip_keys="kept")
    assert moved["kept"] is x and moved["a"][0]["kept"] is x and moved["a"][0]["b"].device.type == "meta"
    assert send({"a": x}, "meta", skip_keys=["b"])["a"].device.type == "meta"


def test_a_structure_is_made_again_with_tensors_without_dims_too():
    utils, given = import_module("shardkit.compat.utils"), {"loss": torch.tensor(1.0), "x": [torch.ones(2, 3)]}
    made = utils.initialize_tensors(utils.get_data_structure(given))
    assert made["loss"].shape == () and made["x"][0].shape == (2, 3)


def test_a_function_with_the_name_of_its_module_is_the_function():
    utils = import_module("shardkit.compat.utils")
    assert utils.tqdm is bars.tqdm
    assert import_module("shardkit.compat.utils.tqdm").tqdm is bars.tqdm
    assert utils.tqdm is bars.tqdm, "also after an import of the module"


def test_a_name_that_nobody_knows_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'shardkit.compat.utils' has no attribute 'no_such': .* 1\.15"):
        _ = import_module("shardkit.compat.utils").no_such
    with pytest.raises(ImportError):
        exec("from shardkit.compat.utils import no_such")
    with pytest.raises(ModuleNotFoundError):
        import_module("shardkit.compat.nothing")


def test_no_table_names_what_is_not_there():
    for module in names.modules():
        for name, (ours, inner) in names.places(module).items():
            assert hasattr(import_module(ours), inner), f"{module}.{name}"
        assert not set(names.places(module)) & set(names.refusals(module)), module


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_functions_take_the_arguments_of_accelerates_by_name():
    real = import_module("accelerate").Accelerator
    found = {f"Accelerator.{name}": (getattr(Accelerator, name), getattr(real, name, None)) for name in MEMBERS}
    for module in names.modules():
        theirs = import_module(f"accelerate.{module}" if module else "accelerate")
        for name, (ours, inner) in names.places(module).items():
            found[f"{module}.{name}"] = getattr(import_module(ours), inner), getattr(theirs, name, None)
    missing = {}
    for name, (ours, theirs) in found.items():
        if inspect.isfunction(theirs):
            taken, theirs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
            named = [one.name for one in theirs.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
            takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            missing[name] = [] if takes_any else [one for one in named if one not in taken]
    assert len(missing) > 100 and {name: lost for name, lost in missing.items() if lost} == {}


def test_sizes_are_those_of_accelerate():
    utils = import_module("shardkit.compat.utils")
    sizes = {"10GB": 10**10, "10Gb": 10**10 // 8, "10gb": 10**10 // 8, "5MiB": 5 * 2**20, "1e1GB": 10**10, 7: 7}
    assert {text: utils.convert_file_size_to_int(text) for text in sizes} == sizes
    for bad in ("10", "-1GB", -3):
        with pytest.raises(ValueError, match="not a size"):
            utils.convert_file_size_to_int(bad)
    assert utils.get_max_memory({0: "1MB", "cpu": 5e6}) == {0: 10**6, "cpu": 5e6}
    dtypes = {torch.float32: 4, torch.bool: 1 / 8, "float16": 2, "fp8": 1, torch.float8_e4m3fn: 1, torch.complex64: 8}
    dtypes |= {utils.CustomDtype.INT4: 1 / 2, utils.CustomDtype.INT2: 1 / 4, utils.CustomDtype.FP8: 1}
    assert {dtype: utils.dtype_byte_size(dtype) for dtype in dtypes} == dtypes
    with pytest.raises(ValueError, match="not a dtype"):
        utils.dtype_byte_size(None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Sequential(torch.nn.Linear(2, 3)))
    found = utils.compute_module_sizes(model, utils.CustomDtype.INT4, {"1.0.bias": torch.float32})
    assert dict(found) == {"": 17, "0": 2, "0.weight": 2, "1": 15, "1.0": 15, "1.0.weight": 3, "1.0.bias": 12}
    model.register_parameter("own", torch.nn.Parameter(torch.ones(100)))
    assert utils.calculate_maximum_sizes(model) == (452, (400, ["own"]))
    del model.own
    model._no_split_modules = ["Sequential"]
    assert utils.calculate_maximum_sizes(model)[1] == (36, ["1"])
    order = utils.get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in order] == ["0", "1.0", "1", ""]


def test_one_process_gathers_what_it_has(clean_states):
    accelerator, loss = Accelerator(config=ALONE), torch.tensor(2.5, requires_grad=True)
    for gathers in (gather, accelerator.gather, accelerator.gather_for_metrics):
        assert f"{gathers(loss):.1f}" == "2.5" and not gathers({"loss": loss})["loss"].requires_grad
    assert accelerator.gather_for_metrics(["a"]) == ["a"]


def objects_of_ranks():
    place = PartialState(cpu=True)
    rank = place.process_index
    given = [
        (rank, "x"),
        {rank},
        torch.tensor([rank, 5]).numpy(),
        torch.tensor([rank]),
        {"rank": rank},
        "ab",
        torch.tensor(rank),
    ]
    return [gather_object(one) for one in given]


def test_gathered_objects_are_one_list(ranks):
    for found in ranks.run(2, objects_of_ranks):
        assert found == [[0, "x", 1, "x"], [0, 1], [0, 5, 1, 5], [0, 1], [{"rank": 0}, {"rank": 1}], ["ab"] * 2, [0, 1]]


def test_a_class_is_returned_as_it_is(clean_states):
    kind = torch.optim.lr_scheduler.StepLR
    assert Accelerator(config=ALONE).prepare(kind) is kind


def saved_and_loaded(folder):
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    torch.manual_seed(accelerator.process_index)
    trained, other = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    trained, other = accelerator.prepare(trained, other)
    accelerator.save_model(trained, folder)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 3))
    for model, path in ((other, folder), (plain[0], folder / "model.safetensors")):
        load_checkpoint_in_model(model, path, strict=True)
    with pytest.raises(UsageError, match=r"lacks weights of the model \(got none for 0\.bias, 0\.weight\)"):
        load_checkpoint_in_model(plain, folder, strict=True)
    whole = accelerator.get_state_dict(trained)
    same = accelerator.get_state_dict(other)
    accelerator.free_memory()
    loaded = plain[0].state_dict()
    return [torch.equal(same[name], value) and torch.equal(loaded[name], value) for name, value in whole.items()]


def test_what_save_model_wrote_is_loaded_in_a_model(ranks, tmp_path):
    """As Accelerate's guide has it."""
    assert ranks.run(2, saved_and_loaded, tmp_path)[0] == [True, True]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.inner.weight


def names_by_tensor(distributed_type):
    accelerator = Accelerator(config={"distributed_type": distributed_type, "use_cpu": True})
    whole = accelerator.get_state_dict(accelerator.prepare(Tied()))
    accelerator.free_memory()
    return list(whole), len({value.data_ptr() for value in whole.values()})


@pytest.mark.parametrize("distributed_type", ["FSDP", "MULTI_CPU"])
def test_tied_weights_are_one_tensor_of_the_state_dict(ranks, distributed_type):
    """Transformers writes a tensor once that has several names; of two equal ones, both."""
    found = ranks.run(2, names_by_tensor, distributed_type)
    assert found[0] == (["inner.weight", "head.weight"], 1)


def test_weights_for_several_devices_or_without_memory_are_refused(tmp_path):
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="load_checkpoint_in_model: device_map is not supported"):
        load_checkpoint_in_model(linear, tmp_path, {"": 0})
    with pytest.raises(UsageError, match=r"on the meta device \(got bias, weight\)"):
        load_checkpoint_in_model(linear.to("meta"), tmp_path)
    with pytest.raises(UsageError, match=r"give a \.safetensors file or a folder"):
        load_checkpoint_in_model(torch.nn.Linear(2, 2), tmp_path / "pytorch_model.bin")


class Stream(torch.utils.data.IterableDataset):
    """Numbers in a random order of a generator of its own, without a length."""

    def __init__(self, length):
        self.length, self.generator = length, torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_parts_of_a_sampler_and_of_a_stream_are_those_of_accelerate():
    def parts_by(module, length, size, drops, splits, evens, ranks, rank):
        shares = {"num_processes": ranks, "process_index": rank, "split_batches": splits}
        sampler = BatchSampler(range(length), size, drops)
        try:
            sampler = module.BatchSamplerShard(sampler, **shares, even_batches=evens)
            stream = module.IterableDatasetShard(Stream(length), size, drops, **shares)
        except (ValueError, UsageError):
            return "refused"
        stream.set_epoch(3)
        return len(sampler), list(sampler), list(stream)

    both = [import_module(f"{package}.data_loader") for package in ("shardkit.compat", "accelerate")]
    either = (False, True)
    for case in itertools.product((0, 1, 2, 5, 8, 11), (1, 2, 3, 4), either, either, either, (1, 2, 3), (0, 1, 2)):
        if case[-1] < case[-2]:
            ours, theirs = (parts_by(module, *case) for module in both)
            assert ours == theirs, case
    before = torch.get_rng_state()
    assert len(both[0].BatchSamplerShard(BatchSampler(RandomSampler(range(8)), 2, False), 2)) == 2
    assert before.equal(torch.get_rng_state()), "the length draws no numbers"


def test_a_sampler_without_its_first_batches_has_the_length_of_the_rest():
    from shardkit.compat.data_loader import SkipBatchSampler  # ms-swift resumes with it

    rest = SkipBatchSampler(BatchSampler(range(7), 2, False), skip_batches=1)
    assert (list(rest), len(rest), rest.total_length) == ([[2, 3], [4, 5], [6]], 3, 4)
    assert [list(rest), list(SkipBatchSampler(range(4), 3))] == [[[2, 3], [4, 5], [6]], [3]]


def test_versions_are_compared_without_the_package_packaging(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging", None)
    monkeypatch.setitem(sys.modules, "packaging.version", None)
    utils = import_module("shardkit.compat.utils")
    assert utils.is_torch_version(">=", "2.9") and utils.compare_versions("torch", "<", "100")
    assert not utils.is_bnb_available(min_version="100")


def test_standing_in_hides_what_is_installed(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    kept = of_accelerate()
    try:
        modules.standing_in_for("accelerate")
        import accelerate
        from accelerate.utils.operations import gather_object
        from packaging.version import parse

        assert gather_object is import_module("shardkit.compat.utils").gather_object
        assert parse(metadata.version("accelerate")) >= parse("1.12.0") and accelerate.__version__
        assert accelerate.utils.DistributedType is DistributedType  # below, without an import of its own
        described = metadata.metadata("accelerate")  # as sentence-transformers checks whose package it is
        assert described["Name"] == "accelerate" and "huggingface" in described["Home-page"]
    finally:
        of_accelerate()
        sys.modules.update(kept)


def of_accelerate() -> dict[str, Any]:
    """The loaded modules of accelerate, taken out of sys.modules."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "accelerate"}


# ---- kinds and plugins ----


def test_kinds_are_equal_to_their_texts_and_list_their_members():
    assert DistributedType.FSDP == "FSDP" and DistributedType("MULTI_XPU")
    assert "bf16" in PrecisionType and "bf17" not in PrecisionType and str(PrecisionType.BF16) == "bf16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def settings_are_known(said: dict) -> bool:
    return all(resolve_name(name) is not None for name in said)


def test_what_plugins_say_has_names_of_ours():
    said = FullyShardedDataParallelPlugin(
        sharding_strategy=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap="Block, Other",
        cpu_offload=True,
        state_dict_type="sharded_state_dict",
        mixed_precision_policy={"param_dtype": torch.bfloat16},
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    ).shardkit_settings()
    assert said["shardkit.offload_activations"] is True
    assert settings_are_known(said)
    assert said["fsdp_config.fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
    assert said["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == ["Block", "Other"]
    assert said["shardkit.precision.param_dtype"] == "bf16"
    assert "fsdp_config.fsdp_min_num_params" not in said, "only what was said"
    for one in (
        DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10, comm_hook="bf16"),
        GradScalerKwargs(init_scale=8.0, growth_interval=5),
        InitProcessGroupKwargs(timeout=timedelta(minutes=3)),
        GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False),
        DataLoaderConfiguration(split_batches=True, even_batches=False, data_seed=3),
        TorchDynamoPlugin(backend="inductor"),
        ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    ):
        said = one.shardkit_settings()
        assert said and settings_are_known(said), one
    for quiet in (DistributedDataParallelKwargs(), DataLoaderConfiguration(), TorchDynamoPlugin(), ParallelismConfig()):
        assert quiet.shardkit_settings() == {}


def test_a_policy_with_its_block_classes_or_its_size_is_read_whole(clean_states):
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear, torch.nn.LSTM})
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=by_class)
    assert Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp.transformer_layer_cls_to_wrap == ["LSTM", "Linear"]
    by_size = partial(size_based_auto_wrap_policy, min_num_params=2000)
    for size in ({}, {"min_num_params": 3000}):
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=by_size, **size)
        found = Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp
        assert found.auto_wrap_policy == "SIZE_BASED_WRAP"
        assert found.min_num_params == size.get("min_num_params", 2000)


def test_the_policy_of_peft_means_the_blocks_that_prepare_finds(clean_states):
    other = pytest.importorskip("peft.utils.other")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model._no_split_modules = {"Linear"}
    policy = other.fsdp_auto_wrap_policy(model)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
    found = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert found.config.fsdp.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    found.state.fsdp_plugin.auto_wrap_policy = policy  # as the recipe does after the Trainer was made


def test_torchs_enumerations_are_read_as_their_names(clean_states):
    for said, strategy in (("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"), ("SHARD_GRAD_OP", "SHARD_GRAD_OP")):
        plugin = FullyShardedDataParallelPlugin(sharding_strategy=Torchs[said])
        assert plugin.shardkit_settings()["fsdp_config.fsdp_sharding_strategy"] == strategy
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=Torchs.SHARD_GRAD_OP)
    assert Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP


def test_load_takes_an_open_file(tmp_path):
    load, file = import_module("shardkit.compat.utils").load, io.BytesIO()
    torch.save({"a": torch.ones(1)}, file)
    file.seek(0)
    assert load(file)["a"] == 1
    with pytest.raises(UsageError, match="not a file of safetensors, JSON or torch"):
        load(io.BytesIO(b"text"))


def test_what_plugins_cannot_say_is_refused_with_all_problems_at_once():
    policy = MixedPrecision(param_dtype=torch.float64)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy, auto_wrap_policy="blocks")
    with pytest.raises(UsageError, match=r"(?s)\(got param_dtype=float64\).*\(got 'BLOCKS'\); use one of TRANS"):
        plugin.shardkit_settings()
    with pytest.raises(UsageError, match=r"set_state_dict_type: is not one of the choices \(got 'HALF'\); use one of"):
        plugin.set_state_dict_type("half")
    with pytest.raises(UsageError, match=r"(?s)ignored_modules: module objects.*param_init_fn: .*remove it"):
        FullyShardedDataParallelPlugin(param_init_fn=print, ignored_modules=[]).shardkit_settings()
    with pytest.raises(UsageError, match=r"got tp_size=2\); use dp_shard_size, dp_replicate_size and cp"):
        ParallelismConfig(tp_size=2)
    with pytest.raises(UsageError, match=r"only inductor is supported \(got ONNXRT\)"):
        TorchDynamoPlugin(backend="onnxrt").shardkit_settings()
    options = {"mode": "max-autotune", "fullgraph": True, "dynamic": False}
    with pytest.raises(UsageError, match=r"\(got mode='max-autotune', fullgraph=True\); leave it out, or call"):
        TorchDynamoPlugin(backend="inductor", **options).shardkit_settings()
    assert TorchDynamoPlugin(backend="inductor", mode="default").shardkit_settings() == {"shardkit.compile": True}
    with pytest.raises(UsageError, match=r"shardkit has no such setting \(got dim=1\)"):
        DistributedDataParallelKwargs(dim=1).shardkit_settings()


# ---- states and the facade, on ranks ----


def states_are_shared_and_reset():
    assert not is_initialized()
    partial = PartialState()
    assert PartialState._shared_state and PartialState().device is partial.device
    assert partial.distributed_type == "MULTI_CPU" and partial.use_distributed
    accelerator = Accelerator()
    assert is_initialized() and AcceleratorState().distributed_type == accelerator.distributed_type == "FSDP"
    assert accelerator.state.fsdp_plugin.sharding_strategy == "FULL_SHARD"
    assert "FULL_STATE_DICT" in str(accelerator.state.fsdp_plugin.state_dict_type)
    plugin = accelerator.state.fsdp_plugin
    plugin.activation_checkpointing, plugin.auto_wrap_policy, plugin.cpu_offload = False, plugin.auto_wrap_policy, False
    with pytest.raises(
        UsageError, match=r"fsdp_plugin\.activation_checkpointing: is fixed when .* \(got True, the run"
    ):
        plugin.activation_checkpointing = True
    with pytest.raises(UsageError, match=r"set fsdp_config\.fsdp_auto_wrap_policy in shardkit\.yaml"):
        plugin.auto_wrap_policy = "NO_WRAP"
    accelerator.state.fsdp_plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert accelerator.config.fsdp.state_dict_type == "SHARDED_STATE_DICT"
    accelerator.state.fsdp_plugin.state_dict_type = StateDictType.FULL_STATE_DICT  # torch's
    assert accelerator.config.fsdp.state_dict_type == "FULL_STATE_DICT"
    with pytest.raises(UsageError, match=r"state_dict_type: is not one of the choices \(got 'LOCAL'\)"):
        accelerator.state.fsdp_plugin.state_dict_type = "local"
    with pytest.raises(UsageError, match="is no already"):
        AcceleratorState(mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match="the state was reset"):
        _ = partial.device
    with pytest.raises(AttributeError, match="create an Accelerator"):
        _ = accelerator.state.fsdp_plugin
    assert PartialState().num_processes == 2
    return PartialState().process_index


def test_states_are_shared_and_reset(ranks):
    assert ranks.run(2, states_are_shared_and_reset) == [0, 1]


@pytest.mark.parametrize(("kind", "is_told"), [("SHARDED_STATE_DICT", True), ("FULL_STATE_DICT", False), (None, False)])
def test_the_trainer_writes_no_sharded_model_and_that_is_told(clean_states, monkeypatch, kind, is_told):
    monkeypatch.setitem(sys.modules, "transformers.trainer", sys)
    settings = {"use_cpu": True, "distributed_type": "FSDP", "num_processes": 1}
    settings |= {"fsdp_config": {"fsdp_state_dict_type": kind}} if kind else {}
    with log_lines(level=logging.WARNING) as lines:
        Accelerator(config=settings).end_training()
    assert any("the Trainer's save_model writes nothing; set FULL_STATE_DICT" in line for line in lines) == is_told


def test_what_the_first_state_was_given_is_the_accelerators_too(clean_states):
    PartialState(cpu=True, timeout=timedelta(seconds=77))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    assert accelerator.config.shardkit.launch.process_group_timeout_s == 77.0
    assert accelerator.config.use_cpu
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, timeout=timedelta(seconds=99))  # the group that is up keeps what it has
    assert Accelerator().config.shardkit.launch.process_group_timeout_s == 77.0


def a_loop_that_counts_its_own_windows():
    """As the Trainer's: no accumulate(), but gradient_state._set_sync_gradients and no_sync."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(32.0).reshape(8, 4) / 10
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=1))
    seen = []
    for number, batch in enumerate(loader):
        is_last = number % 2 == 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        apart = model.no_sync() if number else accelerator.no_sync(model)
        with torch.enable_grad() if is_last else apart:
            accelerator.backward(model(batch).mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader))
    whole = accelerator.get_state_dict(model)
    accelerator.end_training()
    return seen, {name: value.tolist() for name, value in whole.items()}


def test_a_loop_that_counts_its_own_windows_is_plain_torch(ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(32.0).reshape(8, 4) / 10
    for window in data.split(4):
        model(window).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, whole = ranks.run(2, a_loop_that_counts_its_own_windows)[0]
    assert seen == [(False, False), (True, False), (False, False), (True, True)]
    for name, value in model.state_dict().items():
        assert torch.allclose(torch.tensor(whole[name]), value, atol=1e-6)


def weights_after(steps_apart):
    """Of a loop of 6 batches, with LocalSGD or with DDP's exchange in every step; whether ranks differed inside."""
    accelerator, rank = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}), dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    have_differed = False
    with LocalSGD(accelerator, model, steps_apart or 1, enabled=steps_apart is not None) as local:
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            weights = accelerator.gather(model.weight.detach()[None])
            have_differed |= not torch.equal(weights[0], weights[1])
    whole = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    with pytest.raises(UsageError, match=r"LocalSGD: every rank needs all weights \(got FSDP\)"):
        LocalSGD(whole, model, 2)
    with LocalSGD(whole, model, 2, enabled=False) as off:
        off.step()
    return model.weight.detach().clone(), have_differed


def test_local_sgd_takes_the_mean_of_weights_now_and_then(ranks):
    (every, never), (one, _) = ranks.run(2, weights_after, None)[0], ranks.run(2, weights_after, 1)[1]
    assert torch.allclose(every, one, atol=1e-6) and not never, "the mean after each step of SGD is that of gradients"
    (first, differed), (second, _) = ranks.run(2, weights_after, 4)
    assert torch.equal(first, second) and differed and not torch.allclose(first, one, atol=1e-6)


class Rows:
    """What a `datasets.Dataset` is: a slice gives columns."""

    column_names = ("a",)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, chosen):
        return Rows([self.rows[number] for number in chosen])


def test_a_dataset_is_split_by_rows():
    assert [process_control.part_of(Rows("abcde"), rank, 2).rows for rank in (0, 1)] == [["a", "b", "c"], ["d", "e"]]
    assert process_control.part_of(Rows("abcde"), 1, 2, apply_padding=True).rows == ["d", "e", "e"]


def test_one_process_runs_what_is_for_any_rank(clean_states):
    assert PartialState(cpu=True).on_process(lambda: "here", process_index=3)() == "here"
    assert Accelerator(cpu=True).on_local_process(local_process_index=1)(lambda: "here")() == "here"


def saves_of_the_main_process(folder):
    """As scripts for diffusion models save: without the other ranks. What is loaded on all of them goes on alike."""
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loader = torch.utils.data.DataLoader(torch.arange(36.0).reshape(12, 3) / 36, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)
    is_sharded = accelerator.distributed_type == "FSDP"

    def train():
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.gather(model.weight.detach()[None]).tolist()

    def save(name):
        accelerator.save_state(folder / name)

    train()
    if accelerator.is_main_process and len(loader) > 1:
        save("in a function")
        accelerator.save_model(model, folder / "model")
    if accelerator.is_main_process or is_sharded:
        accelerator.save_state(folder / "or")
    if not accelerator.is_main_process:
        assert accelerator.process_index == 1
    else:
        accelerator.save_state(folder / "number")
    accelerator.on_main_process(save)("decorated")
    if accelerator.sync_gradients:
        accelerator.save_state(folder / "all")
    accelerator.wait_for_everyone()
    expected = train()
    found = []
    for name in ("in a function", "or", "number", "decorated", "all"):
        accelerator.load_state(folder / name)
        found.append(train())
    is_sharded = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    said = ""
    if is_sharded.is_main_process:
        try:
            is_sharded.save_state(folder / "never")
        except UsageError as error:
            said = str(error)
    return expected, found, said


def test_the_main_process_saves_alone_where_the_script_says_so(ranks, tmp_path):
    (expected, found, said), (_, others, nothing) = ranks.run(2, saves_of_the_main_process, tmp_path)
    assert found == others == [expected] * 5
    assert said.startswith("save_state: every rank must call it, but only some do (got ")
    assert "test_compat.py:" in said and said.endswith("call it outside of the condition.")
    assert nothing == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all",
        "decorated",
        "in a function",
        "model",
        "number",
        "or",
    ]


def state_dict_on_the_main_process(strategy: str):
    """What a trainer's own save, which returns early on other ranks, gets: by a method, as in many libraries."""
    accelerator = Accelerator(config={"distributed_type": strategy, "use_cpu": True})
    model, plain = accelerator.prepare(torch.nn.Linear(2, 1)), torch.nn.Linear(2, 1)

    def save(which):
        if not accelerator.is_local_main_process:
            return []
        return sorted(accelerator.get_state_dict(which))

    names = save(plain)
    try:
        return names + save(model)
    except UsageError as error:
        return str(error)


def test_the_state_dict_of_a_sharded_model_is_asked_for_on_every_rank(ranks):
    assert ranks.run(2, state_dict_on_the_main_process, "MULTI_CPU") == [["bias", "weight"] * 2, []]
    refused, nothing = ranks.run(2, state_dict_on_the_main_process, "FSDP")
    assert refused.startswith("get_state_dict: every rank must call it, but only some do (got the condition at ")
    assert nothing == []


def plateau_on_the_main_process():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    schedule.step(1.0)
    if accelerator.is_main_process:
        with pytest.raises(UsageError) as caught:
            schedule.step(0.5)
        return str(caught.value)
    return None


def test_a_schedule_by_a_metric_is_stepped_on_every_rank(ranks):
    refused, _ = ranks.run(2, plateau_on_the_main_process)
    assert refused.startswith("scheduler.step: every rank must call it, but only some do (got the condition at ")


def test_scripts_make_schedulers_of_accelerates_class(clean_states):
    made = import_module("shardkit.compat.scheduler").AcceleratedScheduler
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=r"AcceleratedScheduler: not a prepared optimizer \(got SGD\); give the"):
        made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    with_optimizer = made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer)
    always = made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), [optimizer], step_with_optimizer=False)
    assert isinstance(always, made) and isinstance(accelerator.prepare(with_optimizer), made)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            with_optimizer.step()
            always.step()
    assert (with_optimizer.scheduler.last_epoch, always.scheduler.last_epoch) == (1, 2)


def ends_on_the_main_process(folder):
    accelerator = Accelerator(cpu=True, project_dir=folder)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    if accelerator.is_main_process:
        accelerator.end_training()
    accelerator.wait_for_everyone()
    return accelerator.trackers


def test_the_main_process_ends_the_trackers_alone_where_the_script_says_so(ranks, tmp_path):
    assert ranks.run(2, ends_on_the_main_process, tmp_path)[0] == []
    assert "loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


def schedules_as_asked_for(meaning):
    import os

    os.environ["SHARDKIT_ACCELERATES_MEANING"] = meaning
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    schedule.step()
    accelerator.end_training()
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_steps_once_and_once_a_rank_where_that_is_asked_for(ranks):
    assert ranks.run(2, schedules_as_asked_for, "") == [0.5, 0.5]
    assert ranks.run(2, schedules_as_asked_for, "scheduler") == [0.25, 0.25]


def saved_as_accelerate_does(folder, meaning):
    """The refusals of saves of a script's own checkpoint of a sharded model: by both names, and on one rank only."""
    import os

    from shardkit.compat.utils import save

    os.environ["SHARDKIT_ACCELERATES_MEANING"] = meaning
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    expected = accelerator.unwrap_model(model).weight.full_tensor()
    checkpoint = {"model": model.state_dict(), "opt": optimizer.state_dict(), "ema": [model.weight], "epoch": 1}
    told = []
    for number, call in enumerate((accelerator.save, save)):
        try:
            call(checkpoint, folder / f"{number}.pt")
        except UsageError as error:
            told.append(str(error))
            continue
        if accelerator.is_main_process and meaning:
            found = torch.load(folder / f"{number}.pt")
            assert found["model"]["weight"].equal(expected) and found["ema"][0].equal(expected)
            assert found["opt"]["state"][0]["exp_avg"].shape == (2, 2) and found["epoch"] == 1
    if accelerator.is_main_process:
        try:
            accelerator.save({"w": model.weight}, folder / "never")
        except UsageError as error:
            told.append(str(error))
    accelerator.end_training()
    return told


def test_a_checkpoint_of_the_scripts_own_has_whole_tensors(ranks, tmp_path):
    (refused,), nothing = ranks.run(2, saved_as_accelerate_does, tmp_path, "save")
    assert refused.startswith("save: every rank must call it, but only some do (got ") and nothing == []
    for told in ranks.run(2, saved_as_accelerate_does, tmp_path, "")[0][:2]:
        assert (
            "split the object, or launch with --as-accelerate --accelerates-meaning save, which uses torch.save" in told
        )


def saved_on_machines_of_two(folder, each):
    """Every rank has a folder of its own, as if none were shared; those that have a file then."""
    import os

    from shardkit.compat.utils import save

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    (folder / f"{rank}").mkdir(parents=True)
    save({"epoch": 1}, folder / f"{rank}" / "state.json", save_on_each_node=each)
    return (folder / f"{rank}" / "state.json").exists()


def test_a_file_is_written_once_or_once_a_machine(ranks, tmp_path):
    assert ranks.run(4, saved_on_machines_of_two, tmp_path / "once", False) == [True, False, False, False]
    assert ranks.run(4, saved_on_machines_of_two, tmp_path / "each", True) == [True, False, True, False]


def trainers_files(folder, kind, is_new=False):
    from shardkit.compat.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step():
        accelerator.backward(model(torch.ones(2, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    step()
    before = torch.get_rng_state()
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    expected = step()
    step()
    load_fsdp_model(plugin, accelerator, model, folder)
    if is_new:
        optimizer = accelerator.prepare(getattr(torch.optim, kind)(model.parameters(), lr=0.1))
        before = torch.get_rng_state()
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    assert torch.equal(before, torch.get_rng_state()), "random generators are the script's own"
    again = step()
    return all(torch.equal(again[name], value) for name, value in expected.items())


def test_the_trainers_files_of_a_model_and_an_optimizer_come_back(ranks, tmp_path):
    whole = tmp_path / "whole"  # state of full tensors, loaded into a new optimizer
    assert ranks.run(2, trainers_files, str(whole), "Adafactor", True) == [True, True]
    tmp_path /= "each"
    assert ranks.run(2, trainers_files, str(tmp_path), "AdamW") == [True, True]
    assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model_fsdp_0", "optimizer_0"}
    stored = sum(path.stat().st_size for path in (tmp_path / "optimizer_0").rglob("*.safetensors"))
    assert stored > 0


def trainers_files_of_another_kind(folder):
    from shardkit.compat.utils import load_fsdp_model, load_fsdp_optimizer

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    texts = []
    for load, objects in ((load_fsdp_model, (model,)), (load_fsdp_optimizer, (optimizer, model))):
        with pytest.raises(FileNotFoundError) as error:
            load(None, accelerator, *objects, folder)
        texts.append(str(error.value))
    return texts


def test_a_trainers_checkpoint_of_ddp_or_deepspeed_is_named_as_such_under_fsdp(ranks, tmp_path):
    (tmp_path / "model.safetensors").touch()
    for of_model, of_optimizer in ranks.run(2, trainers_files_of_another_kind, str(tmp_path)):
        assert of_model == (
            f"checkpoint: {tmp_path}: was not saved under FSDP with shardkit (no pytorch_model_fsdp_0); resume with "
            "the distributed_type that it was saved with, or begin a new run with its weights: "
            f"from_pretrained('{tmp_path}'), without resume_from_checkpoint."
        )
        assert "(no optimizer_0)" in of_optimizer


def test_a_command_that_starts_accelerate_launch_is_told_which_script_to_start():
    from shardkit.compat.commands.launch import launch_command_parser

    with pytest.raises(UsageError, match=r"start the script itself with shardkit launch, such as -m trl\.scripts\.sft"):
        launch_command_parser()


def test_arguments_of_accelerates_that_shardkit_does_not_run_are_refused(clean_states):
    with pytest.raises(UsageError, match="does not run DeepSpeed"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(UsageError, match=r"Accelerator\(typo=...\): unknown argument \(got False\)"):
        Accelerator(typo=False)
    others = {"deepspeed_plugin": None, "log_with": [], "use_seedable_sampler": False}
    accelerator = Accelerator(cpu=True, even_batches=False, **others)
    assert not accelerator.even_batches, "an argument of older versions"
    with pytest.raises(UsageError, match="both given"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(3))
    with pytest.raises(MachineError, match=r"fp8 needs a GPU of compute capability 8\.9 \(got cpu\); write bf16"):
        Accelerator(mixed_precision="fp8")


def test_tpus_have_their_own_distributed_type_on_any_number_of_ranks():
    for mode in ("xla", "ddp"):  # of an Accelerator; of a PartialState before it
        for world_size in (1, 8):
            assert kind_of(mode, world_size, torch.device("xla")) is DistributedType.XLA


def test_the_autocast_context_of_an_fp8_run_is_bf16(clean_states):
    AcceleratorState(mixed_precision="fp8", cpu=True)
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_a_model_is_unwrapped_from_its_mixed_precision_where_that_is_asked_for(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, mixed_precision="bf16")
    model, seen = torch.nn.Sequential(torch.nn.Linear(1, 1)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    prepared = accelerator.prepare(model)
    for keeps in (True, False):
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=keeps)(torch.ones(1, 1))
    assert seen == [torch.bfloat16, torch.float32]


def test_the_facade_takes_accelerates_arguments_in_its_order():
    found = [*inspect.signature(Accelerator.__init__).parameters][1:5]
    assert found == ["device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"]


def test_log_accepts_dicts_of_numbers_and_anything_before_the_trackers_start(clean_states, tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.log(torch.ones(2, 3), step=1)  # images of a library's trainer, without a tracker
    accelerator.init_trackers("run")
    accelerator.log({"loss": torch.tensor(2.0), "parts": {"a": 1, "b": {"c": 0.5}}}, step=2)
    with pytest.raises(UsageError, match=r"log: 'image': not one number .*get_tracker"):
        accelerator.log({"image": torch.ones(2, 3)})
    accelerator.end_training()
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": 2, "loss": 2.0, "parts/a": 1, "parts/b/c": 0.5}.items()


def test_a_scripts_own_tracker_gets_what_the_script_logs(clean_states, tmp_path):
    class Mine(import_module("shardkit.compat.tracking").GeneralTracker):
        name, requires_logging_directory, said = "mine", False, []

        def log(self, values, step=None, **arguments):
            self.said.append((values, step))

    image = object()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with=Mine())
    accelerator.init_trackers("run")
    accelerator.log({"loss": 2.0}, step=7)  # counts otherwise than the optimizer: it has done no step
    accelerator.log({"image": image, "size": 3})
    accelerator.end_training()
    assert Mine.said == [({"loss": 2.0}, 7), ({"image": image, "size": 3}, None)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 7, "loss": 2.0}, {"step": 0, "size": 3}]


# ---- attributes that scripts set ----


def test_attributes_that_agree_with_the_run_can_be_set_and_others_are_refused(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, gradient_accumulation_steps=4)
    accelerator.native_amp = False
    with pytest.raises(UsageError, match=r"native_amp: the mixed precision of this run is no \(got .* True\)"):
        accelerator.native_amp = True
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator._models = [model]
    with pytest.raises(UsageError, match=r"the prepared models cannot be replaced \(got 0 for 1\); free_memory\(\)"):
        accelerator._models = []
    with pytest.raises(UsageError, match=r"step: a window cannot begin in its middle \(got 3 with 4 micro-batches"):
        accelerator.step = 3
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert accelerator.scaler is None
    with pytest.raises(UsageError, match=r"scaler: the run has one .* \(got a GradScaler .* no\)"):
        accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.device_placement = accelerator.step_scheduler_with_optimizer = False
    assert (accelerator._run.loops.device_placement, accelerator._run.loops.step_scheduler_with_optimizer) == (0, 0)


def test_a_step_of_0_begins_a_window(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, gradient_accumulation_steps=3)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    syncs = []
    for number in range(7):
        if number == 2:
            assert accelerator.step == 2
            accelerator.step = 0
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, False, False, False, True, False, False]


def models_in_a_list(kind: str) -> tuple[int, list[float]]:
    accelerator = Accelerator(config={"distributed_type": kind, "use_cpu": True}, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    for number in range(4):
        with accelerator.accumulate([first, second], optimizer, None):
            accelerator.backward(second(first(torch.full((1, 2), float(number)))).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator._run.counters.step, accelerator.unwrap_model(first).weight.flatten().tolist()


def test_accumulate_takes_models_in_a_list_and_what_is_no_model(ranks):
    alone = ranks.run(1, models_in_a_list, "NO")[0]
    assert alone[0] == 2
    for steps, weight in ranks.run(2, models_in_a_list, "MULTI_CPU"):
        assert (steps, weight) == (2, pytest.approx(alone[1]))


def test_trackers_and_the_project_can_be_chosen_after_the_accelerator(clean_states, tmp_path):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    assert accelerator.log_with == [] and accelerator.project_dir is None
    accelerator.project_configuration = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator.log_with = ["csv"]
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=1)
    assert [one.name for one in accelerator.trackers] == [*accelerator.log_with, "jsonl"]
    assert (tmp_path / "run" / "metrics.csv").exists()
    with pytest.raises(UsageError, match=r"log_with.*nothing"):
        accelerator.log_with = "nothing"
    with pytest.raises(UsageError, match=r"Accelerator.trackers: not a tracker \(got int\)"):
        accelerator.trackers = [3]
    kept = accelerator.trackers[:1]
    accelerator.trackers = kept
    assert accelerator.trackers == kept


def loops_over_loaders_that_were_taken_out():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(9), batch_size=2))
    accelerator._dataloaders.clear()
    taken_out = list(accelerator._dataloaders)
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    accelerator._dataloaders = []
    ends = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None].float()).sum())
            ends.append(accelerator.sync_gradients)
    return taken_out, gathered, ends


def test_a_loop_over_a_loader_that_was_taken_out_ends_windows_and_drops_padding(ranks):
    taken_out, gathered, ends = ranks.run(2, loops_over_loaders_that_were_taken_out)[0]
    assert (taken_out, gathered, ends) == ([], [[0, 1, 2, 3], [4, 5, 6, 7], [8]], [False, True, True])


def test_a_loader_that_skips_batches_has_the_length_of_the_rest(clean_states):
    accelerator = Accelerator(config=ALONE)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_size=2))
    rest = accelerator.skip_first_batches(loader, 3)
    assert isinstance(rest, torch.utils.data.DataLoader) and rest.batch_size == 2
    assert accelerator.prepare(rest) is rest and accelerator._dataloaders == [loader]
    assert (len(rest), [batch.tolist() for batch in rest]) == (2, [[6, 7], [8, 9]])
    assert (len(loader), len([*loader])) == (5, 5)
    assert len(accelerator.skip_first_batches(rest, 4)) == 1


def exchanges_as_the_handler_says():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2})
    assert accelerator.ddp_handler is None
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    first = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.ddp_handler.find_unused_parameters = False
    accelerator.ddp_handler.broadcast_buffers = False
    second = accelerator.prepare(torch.nn.Linear(1, 1))
    return [(one.find_unused_parameters, one.broadcast_buffers) for one in (first, second)]


def test_a_ddp_handler_that_is_set_or_changed_later_is_read_by_prepare(ranks):
    assert ranks.run(2, exchanges_as_the_handler_says)[0] == [(True, True), (False, False)]


def notes_of_two_prepares():
    config = {"distributed_type": "FSDP", "use_cpu": True, "num_processes": 2}
    with log_lines() as lines:
        accelerator = Accelerator(config=config, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
        accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.prepare(torch.nn.Linear(2, 2))
    return sum("bucket_cap_mb: has no effect" in line for line in lines)


def test_notes_on_a_ddp_handler_are_logged_once(ranks):
    assert ranks.run(2, notes_of_two_prepares)[0] == 1


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so at the first trace
def test_settings_objects_are_attributes_which_can_be_set_or_say_that_they_cannot(clean_states, tmp_path):
    kinds = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
    handlers = [kind() for kind in kinds]
    accelerator = Accelerator(config=ALONE, kwargs_handlers=handlers)
    shown = [accelerator.autocast_handler, accelerator.scaler_handler, accelerator.init_handler]
    assert [*shown, accelerator.profile_handler] == handlers and accelerator.ao_recipe_handler is None
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler, accelerator.fp8_backend) == (False, False, "NO")
    with pytest.raises(UsageError, match=r"a GradScalerKwargs is read when the Accelerator is made .*kwargs_handlers="):
        accelerator.scaler_handler = GradScalerKwargs(init_scale=8.0)
    with pytest.raises(UsageError, match="recipes for fp8 are not supported"):
        accelerator.te_recipe_handler = object()
    traced = []
    accelerator.profile_handler.on_trace_ready = traced.append
    with accelerator.profile() as profiler:
        torch.ones(1).sum()
    assert traced == [profiler]
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    with torch.autocast("cpu"), accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(UsageError, match=r"AutocastKwargs\(enabled=...\)"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def splits_batches_as_the_object_says():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2})

    def first_batch():
        return next(iter(accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=4)))).tolist()

    found = [first_batch()]
    accelerator.dataloader_config.split_batches = True
    found.append(first_batch())
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    found.append(first_batch())
    return found, accelerator.split_batches, accelerator.even_batches


def test_a_configuration_of_loaders_that_is_changed_later_is_read_by_prepare(ranks):
    found = ranks.run(2, splits_batches_as_the_object_says)
    assert found[0] == ([[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]], False, False)
    assert found[1] == ([[4, 5, 6, 7], [2, 3], [4, 5, 6, 7]], False, False)


def test_other_objects_that_are_changed_later_are_read_when_they_count(clean_states):
    accelerator = Accelerator(config=ALONE)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(5)))
    settings = accelerator.gradient_state.plugin_kwargs
    settings.update({"num_steps": 2})
    settings["sync_with_dataloader"] = False
    assert settings == {"num_steps": 2, "sync_with_dataloader": False} and accelerator.gradient_accumulation_steps == 2
    syncs = []
    for _ in loader:
        with accelerator.accumulate():
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, True, False]
    with pytest.raises(UsageError, match="plugin_kwargs: a setting of the run cannot be removed"):
        del settings["num_steps"]
    accelerator.state.dynamo_plugin.backend = DynamoBackend.TVM
    with pytest.raises(UsageError, match="TorchDynamoPlugin: backend: only inductor"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_a_loop_for_schedule_free_optimizers_runs_with_any(clean_states):
    accelerator = Accelerator(config=ALONE)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.train()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.eval()


def trains_under_fsdp_of_an_older_torch():
    from shardkit.sharding.fsdp import shard_model

    found, shard_model.can_reduce_unused = shard_model.can_reduce_unused, lambda: False
    try:
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10)]
        accelerator = Accelerator(kwargs_handlers=handlers, config={"use_cpu": True, "num_processes": 2})
        with log_lines() as lines:
            model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        return [line for line in lines if "find_unused_parameters" in line]
    finally:
        shard_model.can_reduce_unused = found


def test_an_older_torch_ignores_find_unused_parameters_under_fsdp_and_says_so(ranks):
    told, _ = ranks.run(2, trains_under_fsdp_of_an_older_torch)
    assert len(told) == 1 and "no effect under FSDP before torch 2.13" in told[0]


def test_a_hook_that_is_removed_leaves_a_forward_that_the_script_set():
    hooks = import_module("shardkit.compat.hooks")
    module = torch.nn.Linear(1, 1)
    module.forward = lambda x: "the script's"
    for append in (False, True):
        hooks.add_hook_to_module(module, hooks.ModelHook(), append)
    assert module(1) == "the script's"
    hooks.remove_hook_from_module(module)
    assert module(1) == "the script's" and "_hf_hook" not in vars(module)
    del module.forward
    hooks.remove_hook_from_module(hooks.add_hook_to_module(module, hooks.ModelHook()))
    assert "forward" not in vars(module)


def test_a_device_placement_that_is_not_one_for_each_is_refused(clean_states):
    accelerator = Accelerator(cpu=True)
    for given, got in (([True], "1 for 2"), (True, "True for 2")):
        with pytest.raises(UsageError, match=rf"needs one value per argument \(got {got}\); write a list"):
            accelerator.prepare(torch.nn.Linear(1, 1), "text", device_placement=given)
    assert accelerator.prepare(torch.nn.Linear(1, 1), "text", device_placement=[True, None])[1] == "text"


def test_a_run_is_no_failure_where_its_report_on_names_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(TOUCHED, "stood_in", {})
    kept = of_accelerate()
    try:
        with around_script(tmp_path / "removed"):
            exec("from accelerate import Accelerator", {"__name__": "__main__"})
    finally:
        of_accelerate()
        sys.modules.update(kept)
    told = capsys.readouterr().err
    assert "used, by script: Accelerator" in told
    assert told.endswith("removed/accelerate.txt cannot be written (No such file or directory).\n")


def test_prepare_gives_back_what_it_does_not_know(clean_states):
    accelerator = Accelerator(cpu=True)
    model, number, text = accelerator.prepare(torch.nn.Linear(1, 1), 3, "text")
    assert (number, text) == (3, "text") and isinstance(accelerator.unwrap_model(model), torch.nn.Linear)
    assert accelerator.prepare("text") == "text"


# ---- reading a script, and changing it ----

SCRIPT = """\
import accelerate.utils as helpers
import accelerate
from accelerate import (
    Accelerator,
    DeepSpeedPlugin as Plugin,
)

accelerator = Accelerator(rng_types=["torch"], deepspeed_plugin=Plugin())
schedule = get_scheduler("linear", num_training_steps=args.steps * accelerator.num_processes)
accelerate.utils.gather(helpers.no_such_thing)
accelerator.lomo_backward(1, 2)
"""


def test_migrate_changes_the_imports_and_nothing_else(tmp_path):
    changed = migrate.change_in(SCRIPT).new.splitlines()
    assert changed[:3] == [
        "import shardkit.compat.utils as helpers",
        "import shardkit.compat as accelerate",
        "from shardkit.compat import (",
    ]
    assert changed[3:] == SCRIPT.splitlines()[3:]
    assert migrate.change_in("\n".join(changed)).new == "\n".join(changed), "once is enough"
    (tmp_path / "train.py").write_text(SCRIPT)
    change = migrate.change_of(tmp_path / "train.py")
    text = change.diff()
    assert text.count("\n+") == 4 and text.count("\n-") == 3  # with the lines of file names
    said = migrate.remarks(change.found)
    assert any(line.startswith(f"{tmp_path}/train.py:9: num_processes: the schedule's length") for line in said)
    assert any("or launch with --as-accelerate --accelerates-meaning scheduler." in line for line in said)
    with pytest.raises(UsageError, match=r"migrate: script.py:1: not valid Python"):
        migrate.change_in("def (")
    with pytest.raises(UsageError, match=r"run.sh: only Python scripts are changed .* --as-accelerate` for"):
        migrate.change_in("accelerate launch \\\n  train.py\n", Path("run.sh"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import accelerate_extra, accelerate", "import accelerate_extra, shardkit.compat as accelerate"),
        ("import accelerate, accelerate.utils, os", "import {0}, {0}, os".format("shardkit.compat as accelerate")),
        ("import accelerate; import accelerate", "import {0}; import {0}".format("shardkit.compat as accelerate")),
        ("from  accelerate  import gather", "from  shardkit.compat  import gather"),
        ("text = 'éééééééééé'; import accelerate.utils as a", "text = 'éééééééééé'; import shardkit.compat.utils as a"),
        ("\ufefffrom accelerate import gather", "\ufefffrom shardkit.compat import gather"),
    ],
)
def test_migrate_changes_every_import_of_a_line(old, new):
    assert migrate.change_in(f"{old}\n").new == f"{new}\n"


def test_a_diff_of_a_last_line_without_an_end_is_one_for_patch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nfrom accelerate import gather")
    patch = ["patch", "--quiet", str(script)]
    subprocess.run(patch, input=migrate.change_of(script).diff(), text=True, check=True)
    assert script.read_text() == "import os\nfrom shardkit.compat import gather"


def test_migrate_names_imports_by_a_text(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        'import importlib\nstate = importlib.import_module("accelerate.state")\n'
        'whole = __import__("accelerate")\nother = importlib.import_module("accelerate_extra")\n'
    )
    said = migrate.remarks(migrate.change_of(script).found)
    assert [line.split(": is ")[0] for line in said] == [f"{script}:2: accelerate.state", f"{script}:3: accelerate"]
    assert all("write shardkit.compat in it." in line for line in said)


def test_migrate_names_commands_that_start_accelerates_launcher(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        '"""accelerate launch sweep.py"""\nimport os, subprocess\n'
        'subprocess.run(["accelerate", "launch", "train.py"])\n'
        'os.system(f"accelerate launch {os.name}")\nnames = ["accelerate", "deepspeed"]\n'
    )
    said = migrate.remarks(migrate.change_of(script).found)
    assert [line.split(": starts ")[0] for line in said] == [f"{script}:{line}: accelerate launch" for line in (3, 4)]
    assert all("write shardkit launch --as-accelerate" in line for line in said)


def test_migrate_changes_all_scripts_or_none(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import accelerate\n")
    (tmp_path / "b.ipynb").write_text('{"cells": [{"source": ["import accelerate"], "execution_count": null}]}')
    assert run(["migrate", "--write", *(str(tmp_path / name) for name in ("a.py", "b.ipynb", "c.py"))]) == 2
    out, error = capsys.readouterr()
    assert out == "" and (tmp_path / "a.py").read_text() == "import accelerate\n"
    assert "b.ipynb: only Python scripts are changed (got a notebook); in its cells, write" in error
    assert "c.py: no such file or folder" in error and error.endswith("2 errors. Nothing was changed.\n")


def test_migrate_of_a_folder_takes_the_scripts_below_it_that_import_accelerate(tmp_path, capsys):
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / "env/lib/site-packages/trl").mkdir(parents=True)
    for name in ("package/a.py", "package/inner/a.py", ".venv/a.py", "env/lib/site-packages/trl/a.py"):
        (tmp_path / name).write_text("from accelerate import Accelerator\nmodel = Accelerator().prepare(model)\n")
    (tmp_path / "package" / "b.py").write_text("import torch\n")
    assert run(["migrate", "--write", str(tmp_path)]) == 0
    out, said = capsys.readouterr()
    assert "b.py" not in out and said.count(": changed.") == 2 and said.count("differs: clip_grad_norm_") <= 1
    assert (tmp_path / "package" / "inner" / "a.py").read_text().startswith("from shardkit.compat import Accelerator")
    assert (tmp_path / ".venv" / "a.py").read_text().startswith("from accelerate")
    assert (tmp_path / "env/lib/site-packages/trl/a.py").read_text().startswith("from accelerate")
    (tmp_path / "empty").mkdir()
    assert run(["migrate", str(tmp_path / "empty")]) == 2
    assert "empty: no Python file below this folder mentions accelerate" in capsys.readouterr().err


LENGTH = """\
def main():
    steps = args.epochs * math.ceil(len(train) / args.window)
    logger.info(f"{len(train)} batches")
    schedule = get_scheduler("linear", num_training_steps=args.steps or steps)
    model, train, schedule = accelerator.prepare(model, train, schedule)
    steps = len(train)
"""


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("", "", [2]),
        ("or steps", "or len(train)", [2, 4]),
        ("len(train) / args.window", "len(train.dataset) / args.window", []),
        ("args.window)", "(args.window * accelerator.num_processes))", []),
        ("prepare(model, train, schedule)", "prepare(model, train)", []),
        ("def main():", "def main(split_batches=accelerator.of(split_batches=True)):", []),
        ("    logger", "def after():\n    logger", []),
    ],
)
def test_scan_finds_schedules_with_the_length_of_a_loader_that_is_prepared_later(old, new, lines):
    found = scan.scan_text(LENGTH.replace(old, new, 1), "train.py").remarks
    assert [(one.line, one.name) for one in found] == [(line, "len(train)") for line in lines]
    assert all("shardkit's steps once: take the prepared loader's length" in one.text for one in found)


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        ("lambda step: 1 - step / (args.steps * accelerator.num_processes)", [4]),
        ("[lambda step: 1 / (accelerator.num_processes * args.steps)]", [4]),
        ("decay", [2]),
        ("lambda step: 1 - step / args.steps", []),
        ("lambda step: 1 - step / (args.steps / accelerator.num_processes)", []),
    ],
)
@pytest.mark.parametrize("made_by", ["torch.optim.lr_scheduler.LambdaLR", "LambdaLR"])
def test_scan_finds_the_factor_of_a_schedule_in_a_function_of_the_step(made_by, function, lines):
    script = (
        "def decay(step):\n    return 1 - step / (args.steps * accelerator.num_processes)\n\n"
        f"scheduler = {made_by}(optimizer, {function})\n"
    )
    found = scan.scan_text(script, "train.py").remarks
    assert [(one.line, one.name) for one in found] == [(line, "num_processes") for line in lines]


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("accelerator.save_state('a')", True),
        ("x = accelerator.get_state_dict(model)", True),
        ("accelerator.unwrap_model(model).save_pretrained('a')", True),
        ("unet = unwrap_model(unet)\n    unet.save_pretrained('a')", True),
        ("p = StableDiffusionPipeline.from_pretrained('a', unet=model)\n    p.save_pretrained('b')", True),
        ("tokenizer.save_pretrained('a')", False),
        ("trainer.save_state()", False),
        ("pass\naccelerator.save_state('a')", False),
        ("accelerator.save_state('a')\nelse:\n    accelerator.save_state('b')", False),
    ],
)
def test_scan_finds_saves_that_only_one_rank_makes(call, is_found):
    script = f"if accelerator.is_main_process:\n    {call}\n"
    assert saves_of_one_rank(script) == ([script.count("\n")] if is_found else [])


@pytest.mark.parametrize(
    ("test", "is_found"),
    [
        ("accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED", True),
        ("accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.is_main_process", True),
        ("not (accelerator.distributed_type != DistributedType.MEGATRON_LM or not accelerator.is_main_process)", True),
        ("accelerator.is_main_process or accelerator.distributed_type == DistributedType.FSDP", False),
        ("accelerator.is_main_process or accelerator.distributed_type != DistributedType.DEEPSPEED", False),
        ("accelerator.is_main_process or is_fsdp", False),
    ],
)
def test_scan_knows_that_no_other_engine_runs(test, is_found):
    assert saves_of_one_rank(f"if {test}:\n    accelerator.save_state('a')\n") == ([2] if is_found else [])


def saves_of_one_rank(script: str) -> list[int]:
    return [one.line for one in scan.scan_text(script, "train.py").remarks if one.text == scan.OF_ONE_RANK]


@pytest.mark.parametrize(
    "prepares",
    [
        "model, lr_scheduler = accelerator.prepare(model, lr_scheduler)",
        "decay = torch.optim.lr_scheduler.LambdaLR(optimizer, f)\nmodel, decay = accelerator.prepare(model, decay)",
        "self.decay = OneCycleLR(optimizer, 1e-3, 9)\nself.decay = accelerator.prepare(self.decay)",
    ],
)
def test_a_prepared_schedule_is_told_to_step_once_before_a_run_and_after_a_diff(tmp_path, capsys, prepares):
    """Also where no factor is found: without one Accelerate's scheduler is through sooner."""
    script = tmp_path / "train.py"
    script.write_text(f"from accelerate import Accelerator\n{prepares}\n")
    differs = "differs: a prepared scheduler steps once per optimizer step; Accelerate's steps num_processes times"
    assert differs in scan.report(scan.scan_script(str(script)))
    assert run(["migrate", str(script)]) == 0
    assert differs in capsys.readouterr().err
    script.write_text("from accelerate import Accelerator\nmodel = accelerator.prepare(model)\n")
    assert run(["migrate", str(script)]) == 0
    assert differs not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("scheduler", "a prepared scheduler steps once"),
        ("scheduler", "the schedule's length is multiplied by the number of ranks"),
        ("position", "load_state moves the loaders"),
        ("save", "save writes safetensors"),
    ],
)
def test_what_a_run_takes_back_is_no_difference_of_it(word, told, tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "scheduler = get_scheduler(optimizer, num_training_steps=steps * accelerator.num_processes)\n"
        "scheduler = accelerator.prepare(scheduler)\naccelerator.load_state()\naccelerator.save(x)\n"
    )
    command = ["launch", "--as-accelerate", "--check", str(script)]
    assert run(command) == 0 and told in capsys.readouterr().out
    assert run([*command[:2], "--accelerates-meaning", word, *command[2:]]) == 0
    assert told not in capsys.readouterr().out
    names = ["Accelerator.prepare_scheduler", "Accelerator.load_state", "utils.save"]
    used = Touched(stood_in={name: {"script"} for name in names})
    usually = report(used)
    monkeypatch.setenv(VARIABLE, word)
    assert usually.count("differs: ") == report(used).count("differs: ") + 1


def test_scan_says_what_stands_in_what_is_refused_and_what_means_another_thing():
    found = scan.scan_text(SCRIPT, "train.py")
    assert {one.name for one in found.stands_in} >= {"Accelerator", "utils.gather", "Accelerator.num_processes"}
    assert {one.name for one in found.refused} == {
        "DeepSpeedPlugin",
        "Accelerator(deepspeed_plugin=)",
        "Accelerator.lomo_backward",
    }
    assert [one.place for one in found.missing] == ["train.py:10"]
    assert [one.place for one in found.remarks] == ["train.py:8", "train.py:9"]
    assert "3 not supported, 1 unknown" in scan.report(found)
    assert scan.scan_text(f"\ufeff{SCRIPT}", "train.py") == found, "with a byte order mark, too"
    (missing,) = scan.scan_text("import accelerate.checkpointing", "train.py").missing
    assert missing.name == "checkpointing"
    assert scan.report(scan.scan_text("import torch", "a.py")).startswith("The script uses no name of accelerate")
    broken = scan.report(scan.scan_text("from accelerate import Accelerator\nf(", "a.py"))
    assert broken.startswith("a.py:2: not valid Python for this interpreter ('(' was never closed); correct it.\n0 n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from accelerate.utils import *\nset_seed(1)\nx = DummyOptim", 3),
        ("from accelerate.utils import *\ndef DummyOptim(): pass\nDummyOptim()", None),
        ("import accelerate.utils as u\nclass A:\n    def b(self):\n        return u.DummyOptim", 4),
        ("from accelerate import dispatch_model as d", 1),
        ("def f():\n    import accelerate as a\n    a.Accelerator().lomo_backward(1, 2)", 3),
        ("from accelerate import Accelerator as A\nA(deepspeed_plugin=p)", 2),
        ("from accelerate import Accelerator as A\nA(deepspeed_plugin=None)", None),
        ("import accelerate\nself.a = accelerate.Accelerator()\nself.a.lomo_backward(1, 2)", 3),
        ("import accelerate\na = b = accelerate.Accelerator() if x else 1\nc = b\nc.lomo_backward(1, 2)", 4),
        ("from accelerate import Accelerator\ndef f(a: 'Accelerator | None'):\n    a.lomo_backward(1, 2)", 3),
        ("import accelerate\ndef f():\n    return accelerate.Accelerator()\na, b = f(), 1\na.lomo_backward(1)", 5),
        ("from accelerate import Accelerator\na, b = Accelerator(), 1\nb.lomo_backward(1, 2)", None),
    ],
)
def test_scan_finds_names_however_they_are_bound(text, line):
    found = scan.scan_text(text, "train.py")
    assert [one.line for one in found.refused] == ([] if line is None else [line])
    assert found.missing == [] and found.remarks == []


def test_scan_finds_nothing_in_a_script_on_shardkits_own_accelerator():
    script = LENGTH.replace("def main():", "def main(a=Accelerator(split_batches=True)):")
    assert scan.scan_text(script, "a.py").remarks
    assert scan.scan_text("from shardkit.compat import Accelerator\n" + script, "a.py").remarks
    assert scan.scan_text(
        "from shardkit import Accelerator\nimport accelerate.utils as u\nu.gather\n" + script, "a.py"
    ).remarks
    assert scan.scan_text("from shardkit import Accelerator\n" + script, "a.py") == scan.Found()


def test_differences_name_what_exists():
    known = {f"Accelerator.{name}" for name in MEMBERS} | {"Accelerator.state"}
    for module in names.modules():
        known |= {f"{module}.{name}" if module else name for name in names.places(module)}
    for one in DIFFERENCES:
        assert set(one.names) <= known, one.names
    assert choices() == ["scheduler", "position", "save"]


def test_a_handler_that_ends_autocast_for_the_whole_run_is_refused():
    with pytest.raises(UsageError, match=r"what a run computes in is its mixed precision \(got False\)"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs()])
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")

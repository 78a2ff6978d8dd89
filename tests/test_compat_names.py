"""Every name of accelerate is there or says what to use instead; its functions; what stands in for the package."""

import inspect
import itertools
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from shardkit import bars
from shardkit.compat import Accelerator, modules, names
from shardkit.compat.kinds import DistributedType
from shardkit.compat.members import MEMBERS
from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.compat.models import load_checkpoint_in_model
from shardkit.compat.operations import gather, gather_object
from shardkit.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from shardkit.compat.startup import around_script
from shardkit.compat.states import AcceleratorState, PartialState
from shardkit.compat.touched import TOUCHED
from shardkit.compat.window import GradientState
from shardkit.errors import UsageError

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

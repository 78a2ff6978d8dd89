"""save_model: every rank writes its parts of a model directly into safetensors files.

Nothing is gathered: all ranks compute the same plan (`export.plan` is a pure function), rank 0 makes the files, each
rank casts and writes block by block, and rank 0 renames the files. The extra memory is one block, and one tensor piece
if a piece is not contiguous.
"""

import copy
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import sizes
from shardkit.checkpoint import digest as digests
from shardkit.checkpoint import disk, export, faults, layout, per_rank, put, state, tensors
from shardkit.checkpoint import export_to_store as into_store
from shardkit.checkpoint.export import ExportFile, Opened
from shardkit.checkpoint.layout import Chunk, Index, Mesh, Stored
from shardkit.distributed.control import Attempt, ControlGroup, LostRank, Result
from shardkit.distributed.tensors import clean_name, local_part, unwrapped
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.log import get_logger
from shardkit.storage.url import Place, Url
from shardkit.wording import counted

logger = get_logger(__name__)

# Without `dtype`, 16-bit floats are saved in fp32. fp64, integers and 8-bit floats keep their dtype.
_WIDENED = {torch.float16, torch.bfloat16, torch.float32}
_CAST = {*_WIDENED, torch.float64}


@dataclass
class Part:
    """The contents of one folder: tensors by name, tied names, and the JSON files that `write_configs` writes."""

    folder: Place
    stem: str
    tensors: dict[str, torch.Tensor]
    buffers: set[str]
    ties: dict[str, str]
    one_file: bool
    write_configs: Callable[[Path, torch.dtype | None], None]


def save(
    model: nn.Module,
    folder: Place,
    control: ControlGroup,
    max_shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
    compare_buffers: bool = False,
) -> list[str]:
    """Write the whole model as safetensors files that torch, Transformers and peft can load. Collective.

    In fp32 unless `dtype` is given; tied weights once; of a peft model only its adapters. If one rank fails, all raise
    CheckpointSaveError, and an earlier export in the folder stays complete.

    Returns the names of buffers that differ between ranks (empty without `compare_buffers`). Those of rank 0 are saved.
    """
    limit = export.size_in_bytes(max_shard_size)
    wanted = None if dtype is None else tensors.TORCH_DTYPES[export.dtype_named(dtype, "save_model")]
    drifted = []
    for part in _together(control, folder, lambda: _parts(model, folder)).own or []:
        _save_files(part, control, limit, wanted)
        if compare_buffers and control.world_size > 1 and not state.gets_buffers_of_rank_0(model):
            drifted += _drifted(part, control)
    return drifted


def _parts(model: nn.Module, folder: Place) -> list[Part]:
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"expected a model (got {type(model).__name__}); give the model that prepare() returned")
    inner: Any = unwrapped(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        return [_adapter(inner, name, folder) for name in inner.peft_config]
    found = state.model_tensors(model)
    ties = state.tied_names(model, found)
    whole = {name: tensor for name, tensor in found.items() if name not in ties}
    buffers = {clean_name(name) for name, _ in inner.named_buffers()}
    return [Part(folder, "model", whole, buffers, ties, False, lambda at, kind: _write_model_config(inner, at, kind))]


def _adapter(model: Any, adapter: str, folder: Place) -> Part:
    """One adapter of a peft model, in peft's layout: the adapter `default` in the folder, others in subfolders."""
    from peft import get_peft_model_state_dict

    found = state.model_tensors(model)
    # save_embedding_layers="auto" may access the network, and its result may differ between ranks.
    with torch.no_grad():  # for p-tuning peft runs the prompt encoder and saves its output; FSDP gathers in its forward
        chosen = get_peft_model_state_dict(model, state_dict=found, adapter_name=adapter, save_embedding_layers=False)
    _warn_of_left_out(model, chosen)
    buffers = {id(found[name]) for name in map(clean_name, dict(model.named_buffers())) if name in found}
    held_by_rank_0 = {name for name, tensor in chosen.items() if id(tensor) in buffers}
    return Part(
        folder=folder if adapter == "default" else folder / adapter,
        stem="adapter_model",
        tensors=dict(chosen),
        buffers=held_by_rank_0,
        ties={},
        one_file=True,
        write_configs=lambda at, kind: _write_adapter_config(model, adapter, at),
    )


def _warn_of_left_out(model: nn.Module, chosen: Mapping[str, torch.Tensor]) -> None:
    """Warn of trained parameters that are not part of an adapter, and so are not saved."""
    saved = {local_part(tensor).data_ptr() for tensor in chosen.values()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and local_part(p).numel()}
    names = [clean_name(name) for name, p in trained.items() if local_part(p).data_ptr() not in saved]
    names = [name for name in names if not any(mark in name for mark in ("lora_", "prompt_encoder", "modules_to_save"))]
    if names:
        logger.warning(
            "save_model: trained parameters that are not part of an adapter are not saved: %s; add their modules to "
            "modules_to_save of the peft configuration.",
            ", ".join(names[:5]),
        )


def _write_model_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, if the model has them. Errors here are warnings."""
    try:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            if hasattr(config, "architectures"):
                config.architectures = [_class_name(model)]
            if hasattr(config, "dtype") and dtype is not None:
                config.dtype = dtype  # the dtype in which from_pretrained loads the weights
            config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
    except Exception as error:  # an error in another library must not prevent saving the weights
        logger.warning("save_model: %s: the model's configuration was not written (%s).", folder.parent, error)


def _class_name(model: nn.Module) -> str:
    """The name of the model's original class: fully_shard changes the object's class to a subclass."""
    kinds = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed.")]
    own = [kind for kind in kinds if not (kind.__name__.startswith("FSDP") and len(kind.__bases__) == 2)]
    return own[0].__name__


def _write_adapter_config(model: Any, adapter: str, folder: Path) -> None:
    config = copy.deepcopy(model.peft_config[adapter])
    base = model.base_model if config.is_prompt_learning else model.base_model.model
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        inner = model.get_base_model()
        mapping = {"base_model_class": _class_name(inner), "parent_library": type(inner).__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


def _save_files(part: Part, control: ControlGroup, limit: int, wanted: torch.dtype | None) -> None:
    index = _together(control, part.folder, lambda: _index(part, control.world_size)).own
    assert index is not None
    targets = {name: _target(tensor.dtype, wanted) for name, tensor in part.tensors.items()}
    shapes = {name: (tensors.DTYPES[targets[name]], entry.shape) for name, entry in index.sections["model"].items()}
    limit = max(limit, 1 << 62) if part.one_file else limit
    files = export.plan(shapes, part.ties, limit, part.stem)
    _same_on_all_ranks(part, files, control)
    plan = partial(export.plan, shapes, part.ties, limit, part.stem)
    if isinstance(part.folder, Url):
        _into_store(part, part.folder, index, targets, plan, control)
    else:
        _onto_disk(part, part.folder, index, targets, plan, control)
    size = sizes.in_words(export.total_bytes(files))
    logger.info("model saved in %s (%s, %s)", part.folder, size, counted(len(files), "file"))


Plan = Callable[[str], list[ExportFile]]
"""Returns the files for a suffix, which is part of their names if there are several."""


def _onto_disk(
    part: Part, folder: Path, index: Index, targets: Mapping[str, torch.dtype], plan: Plan, control: ControlGroup
) -> None:
    """Every rank writes its parts into files that rank 0 has made and renames at the end."""
    opened: list[Opened] = []
    try:
        temporary, tag = _together(
            control,
            folder,
            lambda: _begin(folder, part.stem, plan, control, opened),
            answer=lambda found: found,
            judge=lambda answers: answers[0],
        ).verdict
        _together(control, folder, lambda: _write_configs(part, opened, targets))
        _together(control, folder, lambda: _write(part, index, targets, plan(tag), Path(temporary), control))
        _together(control, folder, lambda: _publish(part, opened))
    except CheckpointSaveError:
        for mine in opened:
            export.discard(mine)
        raise


def _into_store(
    part: Part, url: Url, index: Index, targets: Mapping[str, torch.dtype], plan: Plan, control: ControlGroup
) -> None:
    """Every rank uploads its pieces; then each rank builds some of the files from the pieces of all."""
    export_id = uuid.uuid4().hex
    unnamed: list[ExportFile] | None = None

    def on_rank_0(action: Callable[[], Any]) -> Any:
        given = [action] if control.rank == 0 else []
        return _together(
            control, url, lambda: [one() for one in given], answer=lambda found: found, judge=lambda answers: answers[0]
        ).verdict

    try:
        [[tag, export_id]] = on_rank_0(lambda: [into_store.begin(url, plan("")), export_id])
        files = plan(tag)
        unnamed = files if len(files) > 1 else []
        places = {name: place for file in files for name, place in file.places.items()}
        pieces = tensors.pieces_to_write(index, "model", part.tensors, control.rank)
        control.work.expect(tensors.bytes_to_write({"model": pieces}))
        mine = into_store.pieces_of(url, export_id, control.rank)
        _together(control, url, lambda: into_store.put_pieces(mine, pieces, places, control.work))
        on_rank_0(lambda: into_store.put_files(url, lambda at: part.write_configs(at, _only_float(targets))))
        some = files[control.rank :: control.world_size]
        size = control.world_size
        _together(control, url, lambda: into_store.assemble(url, export_id, index, size, files, some))
        on_rank_0(lambda: into_store.publish(url, part.stem, files))
        unnamed = []
        on_rank_0(lambda: into_store.discard(url, export_id))
    except CheckpointSaveError:
        if unnamed is not None and control.rank == 0:
            with suppress(OSError):
                into_store.discard(url, export_id, unnamed)
        raise


def _index(part: Part, world_size: int) -> Index:
    """The index of a part's tensors, from which `layout` computes the pieces of each rank."""
    index = Index("full", world_size)
    everyone, first = Mesh((world_size,)), Mesh((1,))
    entries = index.sections.setdefault("model", {})
    for name, tensor in part.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name}: has no values yet (meta device); prepare() the model first")
        # Replicas of a buffer may differ (batch norm): rank 0 writes it alone, so that the result is not a mix.
        holders = first if name in part.buffers else everyone
        entries[name] = tensors.entry_of(tensor, index, holders, name)
    index.sort()
    return index


def _drifted(part: Part, control: ControlGroup) -> list[str]:
    """Buffers that differ between ranks. One digest of all is compared first, and each buffer only if it differs."""
    plain = {name: part.tensors[name] for name in sorted(part.buffers & {*part.tensors})}
    found = per_rank.of_tensors({name: tensor for name, tensor in plain.items() if not isinstance(tensor, DTensor)})
    if not control.decide(per_rank.together(found), lambda answers: len({*answers}) > 1):
        return []
    return control.decide(found, per_rank.differing)


def _target(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is not None:
        return wanted if dtype in _CAST else dtype
    return torch.float32 if dtype in _WIDENED else dtype


def _same_on_all_ranks(part: Part, files: list[ExportFile], control: ControlGroup) -> None:
    plan = disk.to_json([[file.name, file.header.hex()] for file in files])
    mine = [str(part.folder), digests.of_bytes("xxh3", plan)]
    problem = _together(
        control, part.folder, lambda: mine, answer=list, judge=partial(_difference, part.folder)
    ).verdict
    if problem:
        raise CheckpointSaveError(problem)


def _difference(folder: Place, answers: list[list[str]]) -> str | None:
    if any(other != answers[0][0] for other, _ in answers):
        return f"save_model: the ranks give different folders (got {[other for other, _ in answers]}); give the same."
    if any(other != answers[0] for other in answers):
        return f"save_model: {folder}: the models differ between ranks; call it on all ranks with the same model."
    return None


def _begin(folder: Path, stem: str, plan: Plan, control: ControlGroup, opened: list[Opened]) -> list[str] | None:
    """Rank 0 makes the files. Returns their temporary folder and the suffix of their names; None on other ranks."""
    if control.rank != 0:
        return None
    tag = export.free_tag(plan(""), export.names_in(folder))
    opened.append(export.begin(folder, plan(tag), stem))
    return [str(opened[0].temporary), tag]


def _write_configs(part: Part, opened: list[Opened], targets: Mapping[str, torch.dtype]) -> None:
    for mine in opened:
        part.write_configs(mine.temporary, _only_float(targets))


def _only_float(targets: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """The dtype of all floating-point tensors, if it is the same; else None."""
    floats = {dtype for dtype in targets.values() if dtype.is_floating_point}
    return floats.pop() if len(floats) == 1 else None


def _publish(part: Part, opened: list[Opened]) -> None:
    for mine in opened:
        export.publish(mine)


def _write(
    part: Part,
    index: Index,
    targets: Mapping[str, torch.dtype],
    files: list[ExportFile],
    temporary: Path,
    control: ControlGroup,
) -> None:
    """Write the pieces of this rank durably."""
    put.wait_until_seen(temporary)
    where = {name: (file.name, place) for file in files for name, place in file.places.items()}
    opened: dict[str, disk.Durable] = {}
    pieces = tensors.pieces_to_write(index, "model", part.tensors, control.rank)
    control.work.expect(tensors.bytes_to_write({"model": pieces}))
    with ExitStack() as stack:
        for chunk, piece in pieces:
            control.work()
            faults.reach("export-write", control.rank)
            name, place = where[chunk.name]
            if name not in opened:
                opened[name] = stack.enter_context(disk.Durable(temporary / name))
            _write_piece(opened[name], chunk, piece, place, targets[chunk.name])
            control.work(chunk.bytes)


def _write_piece(file: disk.Durable, chunk: Chunk, piece: torch.Tensor, place: Stored, target: torch.dtype) -> None:
    """Cast a piece and write it to its place in the file, a block at a time."""
    flat = piece.detach().contiguous().view(-1)
    item, done = layout.ITEM_BYTES[place.dtype], 0
    at_once = disk.BLOCK_BYTES // max(item, flat.element_size())
    for offset, length in layout.runs(place.shape, chunk.box, item):
        count = length // item
        for low in range(0, count, at_once):
            block = flat[done + low : done + min(low + at_once, count)].to("cpu", target)
            file.put(tensors.memory(block), place.begin + offset + low * item)
        done += count


def _together(
    control: ControlGroup,
    folder: Place,
    action: Callable[[], Result],
    answer: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda answers: None,
) -> Attempt[Result]:
    """The result of the action. Collective. If it failed on one rank, all raise the same error."""
    try:
        attempt = control.attempt(action, answer, judge)
    except LostRank as error:
        raise CheckpointSaveError(_report(folder, str(error))) from error
    if attempt.failure:
        raise CheckpointSaveError(_report(folder, attempt.failure))
    return attempt


def _report(folder: Place, reason: str) -> str:
    return f"save_model: {folder}: {reason}. The previous contents of the folder are unchanged."

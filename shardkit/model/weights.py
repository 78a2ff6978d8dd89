"""A module tree from safetensors headers: names, shapes and dtypes, without reading weights and without torch."""

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from shardkit.errors import ModelError
from shardkit.model.describe import ModelDescription
from shardkit.model.tree import ModuleNode, Parameter, by_numbers
from shardkit.wording import count_text, counted

# https://github.com/huggingface/safetensors#format: 8 bytes little-endian header size, at most 100 MB, then JSON.
_LARGEST_HEADER_BYTES = 100_000_000
_MOST_LEVELS = 100  # of modules in each other; the tree is walked by recursion
_PART = re.compile(r"r\d{5,7}-of-(?!0*1\.)\d{5,7}\.safetensors")  # a rank's, of several (checkpoint/files/layout.py)
_FLOATING = ("F", "BF")  # F64 to F8_E4M3 and F4
_BUFFERS = {"I64": "int64", "BOOL": "bool"}  # positions, masks, counters of batches; no weight is packed in these


def describe(spec: str, path: Path) -> ModelDescription:
    """The model whose weights are in a .safetensors file or in a folder of them.

    Such files have no class names: repeated blocks get the name of their list, such as `layers[*]`.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if (path / "MANIFEST.json").is_file() or any(_PART.fullmatch(file.name) for file in files):
        raise ModelError(
            f"{path}: is a checkpoint, whose files have each rank's part of the tensors; name the model that was "
            "trained, or the folder of whole weights that save_model or `shardkit checkpoint merge CHECKPOINT -o "
            "FOLDER` writes."
        )
    if not files:
        raise ModelError(f"{path}: no .safetensors file in this folder; name such a file or a folder with them.")
    entries: dict[str, Any] = {}
    again = _files_again(files)
    for file in files:
        entries |= {} if file in again else read_header(file)
    parameters = {name: _parameter(name, e) for name, e in entries.items() if e["dtype"].startswith(_FLOATING)}
    buffers = {name: _parameter(name, e, _BUFFERS[e["dtype"]]) for name, e in entries.items() if e["dtype"] in _BUFFERS}
    if not parameters:
        raise ModelError(f"{path}: no floating-point tensor in it; name the file that holds the model's weights.")
    return ModelDescription(
        spec=spec,
        name=path.stem if path.is_file() else path.name,
        tree=_tree("", _nested(parameters | buffers, path)),
        has_class_names=False,
        notes=(
            "Read from the weights' names: every tensor counts as a trainable fp32 parameter, tied ones once; "
            "activations are unknown.",
            *_left_out([entry for name, entry in entries.items() if name not in parameters | buffers]),
            *(
                f"{file.name}: not counted; it holds the same weights as the files model*.safetensors."
                for file in again
            ),
        ),
    )


def _files_again(files: Sequence[Path]) -> list[Path]:
    """Those with the weights of others under other names: Mistral publishes its own form beside Transformers'."""
    is_both = any(file.name.startswith("model") for file in files)
    return [file for file in files if is_both and file.name.startswith("consolidated")]


def _left_out(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note about tensors that are neither floating-point nor buffers."""
    if entries:
        dtypes = ", ".join(sorted({entry["dtype"] for entry in entries}))
        numbers = count_text(sum(prod(entry["shape"]) for entry in entries))
        yield (
            f"Not counted: {counted(len(entries), 'tensor')} of {dtypes}, {numbers} numbers in all; a weight packed in "
            "them (GPTQ, AWQ, bitsandbytes) is missing, so plan with the model's config.json or its unpacked weights."
        )


def read_header(file: Path) -> dict[str, Any]:
    """Name -> {"dtype", "shape", "data_offsets"} of one safetensors file; raises ModelError where it is not one."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if not 2 <= size <= _LARGEST_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        header.pop("__metadata__", None)
        if wrong := next((name for name, entry in header.items() if not _is_entry(name, entry)), None):
            raise ValueError(f"{wrong!r} is not a tensor")
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error}); check the path.") from None
    return header


def files_in_index(content: Any) -> dict[str, str] | None:
    """{tensor: its file}, as a Transformers index.json with this content has it; None where it does not name files of
    its own folder."""
    named = content.get("weight_map") if isinstance(content, dict) else None
    is_map = isinstance(named, dict) and all(isinstance(it, str) and Path(it).name == it for it in named.values())
    return named if is_map else None


def _is_entry(name: str, entry: Any) -> bool:
    """Whether this has the form of a tensor's entry, with a number of elements that fits 64 bits."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or name.count(".") > _MOST_LEVELS:
        return False
    shape = entry.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) and prod(shape) < 2**63


def _parameter(name: str, entry: Mapping[str, Any], dtype: str = "float32") -> Parameter:
    return Parameter(name.rpartition(".")[2], tuple(entry["shape"]), dtype)


def _nested(parameters: Mapping[str, Parameter], where: Path) -> dict[str, Any]:
    """Parameters nested by the parts of their names, numbers in numeric order. Raises ModelError where a name is both a
    tensor's and a module's."""
    root: dict[str, Any] = {}
    for name in sorted(parameters, key=by_numbers):
        *path, last = name.split(".")
        node = root
        for part in path:
            node = node.setdefault(part, {})
            if isinstance(node, Parameter):
                raise ModelError(f"{where}: {name} lies inside another tensor (got {part}); name the model's own file.")
        node[last] = parameters[name]
    return root


def _tree(fqn: str, parts: Mapping[str, Any], class_name: str = "Model") -> ModuleNode:
    modules = {name: part for name, part in parts.items() if isinstance(part, dict)}
    is_list = bool(modules) and len(modules) == len(parts) and all(name.isdigit() for name in modules)
    last = fqn.rpartition(".")[2]
    children = tuple(
        _tree(f"{fqn}.{name}" if fqn else name, part, f"{last}[*]" if is_list else name)
        for name, part in modules.items()
    )
    tensors = [part for part in parts.values() if isinstance(part, Parameter)]
    parameters = tuple(tensor for tensor in tensors if tensor.dtype not in _BUFFERS.values())
    buffers = tuple(tensor for tensor in tensors if tensor.dtype in _BUFFERS.values())
    return ModuleNode(fqn, "ModuleList" if is_list else class_name, parameters, children, is_list, buffers)

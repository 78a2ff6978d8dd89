"""Builds a model on the meta device and describes it.

Run in a child process by `sources.py`, because it loads torch and the user's own code.
"""

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.model import open_models
from shardkit.model.describe import PARAMETERS_IN_FP32, QUANTIZATION_NOT_APPLIED, ModelDescription, to_json
from shardkit.model.facts import longest_sequence, transformer_facts
from shardkit.model.live import tree_of
from shardkit.model.prepared import Prepared

# The folders of this package, of all installed packages, and of Python's own modules.
PACKAGE = Path(__file__).parent.parent
LIBRARIES = Path(torch.__file__).parent.parent
STANDARD_LIBRARY = Path(json.__file__).parent.parent


def main() -> None:
    """With the arguments KIND SPEC RESULT: writes the description, or the error, to RESULT."""
    kind, spec, result = sys.argv[1:4]
    try:
        if kind == "prepared":
            found = asdict(describe_prepared(spec))
        else:
            describe = {"factory": describe_factory, "transformers": describe_transformers}[kind]
            found = to_json(describe(spec))
        answer: dict[str, Any] = {"description": found}
    except (Exception, SystemExit) as error:
        answer = {"error": error_text(error), "where": where(error), "loads": loads_weights(error)}
    Path(result).write_text(json.dumps(answer))


def describe_factory(spec: str) -> ModelDescription:
    """The model that `module:function` returns, built on the meta device."""
    with torch.device("meta"):
        model, *others = _factory_parts(spec)
    config = getattr(model, "config", None)
    name, tree = type(model).__name__, tree_of(model)
    notes = _note_on_others(spec, name, others)
    if config is None or isinstance(config, Mapping):
        return ModelDescription(spec, name, tree, notes=notes)
    facts, longest = transformer_facts(config, model), longest_sequence(config)
    return ModelDescription(spec, name, tree, facts, notes=notes, longest=longest)


def _note_on_others(spec: str, name: str, others: Sequence[Any]) -> tuple[str, ...]:
    """A note on the models beside the first, which alone is described."""
    models = [type(other).__name__ for other in others if isinstance(other, nn.Module)]
    if not models:
        return ()
    return (
        f"{spec} returns {1 + len(models)} models, and only the first, {name}, is counted, not {', '.join(models)}; "
        "return one module that holds all of them.",
    )


def describe_prepared(spec: str) -> Prepared:
    """The parameters of the models, and of the optimizers if any, that `module:function` returns."""
    with torch.device("meta"):
        parts = built(spec)
    models = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    if not models:
        raise _no_model(spec, parts)
    names = {id(p): (number, name) for number, model in enumerate(models) for name, p in model.named_parameters()}
    strangers = [p for one in optimizers for group in one.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise ValueError(f"{spec} returns an optimizer of {len(strangers)} parameters that no model it returns has")
    return Prepared(
        [{name: parameter.requires_grad for name, parameter in model.named_parameters()} for model in models],
        [[[names[id(p)] for p in group["params"]] for group in one.param_groups] for one in optimizers],
    )


def imported(spec: str) -> Any:
    """The object that `module:name` names; the current folder's modules count."""
    module, _, name = spec.partition(":")
    if sys.path[0] != "":
        sys.path.insert(0, "")
    return attrgetter(name)(import_module(module))


def built(spec: str) -> Sequence[Any]:
    """The parts of `module:name`: what a function or class returns, called without arguments, or the object itself."""
    found = imported(spec)
    parts = found if isinstance(found, nn.Module) else found()
    return parts if isinstance(parts, (tuple, list)) else (parts,)


def build_factory(spec: str) -> nn.Module:
    """The model of `module:name`; the first part, where there are several."""
    return _factory_parts(spec)[0]


def _factory_parts(spec: str) -> Sequence[Any]:
    """The parts of `module:name`, the first of which is a model."""
    parts = built(spec)
    if not parts or not isinstance(parts[0], nn.Module):
        raise _no_model(spec, parts)
    return parts


def _no_model(spec: str, parts: Sequence[Any]) -> TypeError:
    kind = type(parts[0] if parts else parts).__name__
    return TypeError(f"{spec} returns an object of type {kind}, not a torch.nn.Module")


def describe_transformers(spec: str) -> ModelDescription:
    """The model of a Transformers config.json, or an open model by its name, with new weights on the meta device."""
    with torch.device("meta"):
        model = build_transformers(spec)
    notes = []
    if (name := open_models.meant_by(spec, Path())) is not None:
        notes.append(f"The sizes are those of {name}, as published; nothing was downloaded.")
    notes.append(PARAMETERS_IN_FP32)
    if getattr(model.config, "quantization_config", None):
        notes.append(QUANTIZATION_NOT_APPLIED)
    return ModelDescription(
        spec,
        type(model).__name__,
        tree_of(model),
        transformer_facts(model.config, model),
        notes=tuple(notes),
        longest=longest_sequence(model.config),
    )


def build_transformers(spec: str) -> nn.Module:
    """The architecture in the file, or of the open model of this name; if it has none, the first Auto class that
    supports its model type. Code that lies beside the file (`auto_map`) is never run."""
    import transformers

    try:
        if (name := open_models.meant_by(spec, Path())) is not None:
            config = transformers.AutoConfig.for_model(**open_models.SIZES[name])
        else:
            config = transformers.AutoConfig.from_pretrained(spec, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            "its model is code beside the file (auto_map), which is not run here; read that code, and give "
            "--model module:function, a function of yours that builds the model"
        ) from None
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)._from_config(config, dtype=torch.float32)
    for task in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        auto = getattr(transformers, f"AutoModelFor{task}")
        if type(config) in auto._model_mapping:
            return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return transformers.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)


def error_text(error: BaseException) -> str:
    """`TypeError: message`, one line only; two where the first announces the second by a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"


def where(error: BaseException) -> str | None:
    """file:line of the innermost frame in the user's code; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    not_theirs = (str(PACKAGE), str(LIBRARIES), str(STANDARD_LIBRARY), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(not_theirs)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def loads_weights(error: BaseException) -> bool:
    """Whether it comes from a `from_pretrained` that loads a model, not only a configuration."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [Path(frame.filename).name for frame in frames if frame.name == "from_pretrained"]
    return bool(calls) and not calls[0].startswith("configuration")


def in_library(error: BaseException) -> str | None:
    """package/file:line of the innermost frame in a library other than torch and shardkit; None if there is none."""
    ours = (PACKAGE, Path(torch.__file__).parent)
    files = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [
        f"{file.relative_to(LIBRARIES).as_posix()}:{line}"
        for file, line in files
        if file.is_relative_to(LIBRARIES) and not any(file.is_relative_to(folder) for folder in ours)
    ]
    return theirs[-1] if theirs else None

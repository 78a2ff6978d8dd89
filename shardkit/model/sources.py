"""Sources of models, all described by `describe(spec)`. torch is only loaded in a child process.

module:function            your own model, built on the meta device (no memory, no weights)
config.json, or its folder a Transformers configuration
weights.safetensors        a file or folder of weights; only headers are read
llama-3.1-8b, ...          an open model by name, also that on a hub; its sizes are built in, Transformers builds it
gpt-175b, gpt-1t           built in
gpt:layers=..,hidden=..,heads=..[,vocab=..][,seq=..][,tied=true]   sizes; gpt:NAME without a `=` is module:function
"""

import json
import os
import re
import tempfile
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import ModelError, ModelUnknown
from shardkit.model import child, gpt, open_models, weights
from shardkit.model.builtin import BUILTIN
from shardkit.model.describe import ModelDescription, from_json
from shardkit.model.prepared import Prepared

Kind = Literal["gpt", "transformers", "weights", "factory"]
FORMS = (
    "module:function, a Transformers config.json, a .safetensors file or folder, an open model's name (llama-3.1-8b), "
    + ", ".join(BUILTIN)
)
CLOSED_FORM_HINT = "or describe its sizes: --model gpt:layers=..,hidden=..,heads=.. needs no code"


def describe(spec: str, timeout_s: float = 180.0, folder: Path | None = None) -> ModelDescription:
    """The description of the model `spec`; relative paths and modules are resolved in `folder` (default: here).

    Raises ModelError for a model that does not exist, fails to build or takes too long.
    """
    folder, spec = Path.cwd() if folder is None else folder, os.path.expanduser(spec)
    match kind_of(spec, folder):
        case "gpt":
            return _by_formula(spec)
        case "weights":
            return weights.describe(spec, folder / spec)
        case None:
            raise ModelUnknown(_unknown(spec, folder / spec))
        case kind:
            return _described(kind, spec, timeout_s, folder)


def kind_of(spec: str, folder: Path) -> Kind | None:
    """What the spec names; None where it is no model."""
    if is_by_sizes(spec):
        return "gpt"
    path = folder / spec
    is_folder, is_file = os.path.isdir(path), os.path.isfile(path)  # pathlib's raise for a name that is too long
    if (is_folder and os.path.isfile(path / "config.json")) or (is_file and path.suffix == ".json"):
        return "transformers"
    if is_folder or (is_file and path.suffix == ".safetensors"):
        return "weights"
    if open_models.meant_by(spec, folder) is not None:
        return "transformers"
    return "factory" if _looks_like_factory(spec) else None


def describe_prepared(spec: str, timeout_s: float = 180.0, folder: Path | None = None) -> Prepared:
    """As `describe`, where a function may return all models and optimizers, as a script gives them to `prepare`."""
    folder = Path.cwd() if folder is None else folder
    if _looks_like_factory(spec) and not os.path.exists(folder / spec):
        return Prepared.from_json(_in_child("prepared", spec, timeout_s, folder))
    tree = describe(spec, timeout_s, folder).tree
    return Prepared([{name: parameter.trainable for name, parameter in tree.owned()}], [])


def folder_for(spec: str, file: Path | None) -> Path:
    """The folder in which to read the model that a configuration file names: the current one, or the file's if the
    model is only there, as for a command in a folder below that of the file."""
    here = Path.cwd()
    folders = [here] if file is None else [here, file.absolute().parent]
    return next((folder for folder in folders if _is_in(folder, spec)), here)


def _is_in(folder: Path, spec: str) -> bool:
    if _looks_like_factory(spec):
        package = folder / spec.partition(":")[0].partition(".")[0]
        return package.is_dir() or package.with_name(f"{package.name}.py").is_file()
    return os.path.exists(folder / os.path.expanduser(spec))


def is_by_sizes(spec: str) -> bool:
    """Whether the spec is a GPT given by its sizes. gpt:build is the function `build` of a module named gpt."""
    return spec in BUILTIN or (spec.startswith("gpt:") and not _looks_like_factory(spec))


def has_form(spec: str, folder: Path) -> bool:
    """Whether the spec has a valid form. Checks names only."""
    is_name = is_by_sizes(spec) or open_models.name_of(spec) is not None
    return is_name or os.path.exists(folder / os.path.expanduser(spec)) or _looks_like_factory(spec)


def _by_formula(spec: str) -> ModelDescription:
    shape = BUILTIN.get(spec) or gpt.parse(spec.removeprefix("gpt:"))
    name = spec if spec in BUILTIN else "GPT"
    return ModelDescription(spec, name, gpt.tree(shape), gpt.facts(shape))


def _looks_like_factory(spec: str) -> bool:
    module, colon, attribute = spec.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    return bool(colon) and not module.endswith(".py") and all(name.isidentifier() for name in names)


def _unknown(spec: str, path: Path) -> str:
    file, _, attribute = spec.partition(":")
    if file.endswith(".py"):
        *parents, module = Path(file.removesuffix(".py")).parts
        if not all(parent.isidentifier() for parent in parents):
            module, where = f"{module}:{attribute or 'FUNCTION'}", f", in the folder {Path(file).parent}"
        else:
            module, where = ".".join([*parents, f"{module}:{attribute or 'FUNCTION'}"]), ""
        return f"--model {spec}: a file is not a model; give module:function, as {module}{where}."
    if os.path.isfile(path):
        return f"--model {spec}: not a file that describes a model; give {FORMS}."
    near = get_close_matches(spec.rpartition("/")[2].lower(), [*BUILTIN, *open_models.SIZES], 3, cutoff=0.8)
    if near:
        return f"--model {spec}: unknown; did you mean {' or '.join(near)}?"
    is_file = path.suffix in {".json", ".safetensors"}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not is_file and not path.parent.exists():  # a name on a hub
        return f"--model {spec}: no such folder; models are not downloaded: give the folder of its config.json."
    if is_file or "/" in spec:
        return f"--model {spec}: no such file or folder; check the path."
    return f"--model {spec}: not a model; give {FORMS}, or gpt:layers=..,hidden=..,heads=.."


def _described(kind: str, spec: str, timeout_s: float, folder: Path) -> ModelDescription:
    description = from_json(_in_child(kind, spec, timeout_s, folder))
    if not description.tree.numel:
        raise ModelError(f"--model {spec}: {description.name} has no parameters (got 0); give a model to train.")
    return description


def _in_child(kind: str, spec: str, timeout_s: float, folder: Path) -> Any:
    """The answer of `probe.py` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="shardkit-model-") as scratch:
        result = Path(scratch) / "result.json"
        ended = child.run("shardkit.model.probe", [kind, spec, str(result)], folder, timeout_s)
        if ended is None:
            why = (
                "Transformers takes longer for this architecture; try again on a machine with less to do"
                if kind == "transformers"
                else "a factory should only build the model, without reading weights or data"
            )
            raise ModelError(f"--model {spec}: not built after {timeout_s:g} s; {why}, {CLOSED_FORM_HINT}.")
        if not result.is_file():
            raise ModelError(
                f"--model {spec}: the process that builds it {ended.how}; run the factory by hand, {CLOSED_FORM_HINT}."
            )
        answer = json.loads(result.read_text())
    if "error" in answer:
        place = child.relative_place(answer["where"], folder)
        raise ModelError(_not_built(kind, spec, answer["error"], place, answer["loads"]))
    return answer["description"]


def _not_built(kind: str, spec: str, error: str, place: str | None, loads: bool) -> str:
    """The error text for a model whose code failed, with the place in the user's files if known. `loads`: it failed
    where it loads weights."""
    or_sizes = "" if kind == "prepared" else f", {CLOSED_FORM_HINT}"  # sizes have no optimizers
    if place is None:
        what = {
            "factory": "check both names, and that it needs no arguments",
            "prepared": "check both names, and that it needs no arguments; let it return what prepare got",
            "transformers": "correct the file, or install a version of Transformers that knows this model",
        }[kind]
        return f"--model {spec}: cannot be built on the meta device ({error}); {what}{or_sizes}."
    advice = f"correct the code at {place}{or_sizes}"
    if loads:
        or_folder = "" if kind == "prepared" else ", or give --model the folder of that configuration"
        advice = f"no weights are needed: write from_config(AutoConfig.from_pretrained(...)) at {place}{or_folder}"
    return f"{place}: the model {spec} cannot be built on the meta device ({error}); {advice}."

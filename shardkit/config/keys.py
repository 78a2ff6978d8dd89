"""Names of all settings: clean ones in Python, Accelerate's in the YAML, and older spellings that are read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from typing import Any, get_args

from pydantic.fields import FieldInfo

from shardkit.config.schema import Config, Section
from shardkit.wording import alternatives

Path = tuple[str, ...]
KNOWN = "known here: "

# Other accepted spellings; canonical ones are written. By section name in the YAML.
SYNONYMS: dict[str, dict[str, str]] = {
    "": {"command": "commands"},
    "fsdp_config": {
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_wrap_policy": "fsdp_auto_wrap_policy",
        "wrap_policy": "fsdp_auto_wrap_policy",
        "min_num_param": "fsdp_min_num_params",
        "fsdp_min_num_param": "fsdp_min_num_params",
        "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_cpu_offload": "fsdp_offload_params",
        "cpu_offload": "fsdp_offload_params",
    },
}


@dataclass(frozen=True)
class Key:
    """One setting: `fsdp.offload_params` in Python, `fsdp_config.fsdp_offload_params` in the YAML."""

    path: Path
    yaml_path: Path
    section: type[Section]
    field: FieldInfo

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def yaml_name(self) -> str:
        return ".".join(self.yaml_path)

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)


@cache
def all_keys() -> dict[Path, Key]:
    """Every setting by its path in Python, in the order of the schema."""
    return {key.path: key for key in _walk(Config, (), ())}


@cache
def sections() -> dict[Path, Path]:
    """Every block of settings: its path in Python -> in the YAML."""
    found: dict[Path, Path] = {}
    for key in all_keys().values():
        for length in range(1, len(key.path)):
            found[key.path[:length]] = key.yaml_path[:length]
    return found


@cache
def yaml_paths() -> dict[Path, Path]:
    """Every setting and every block: its path in Python -> in the YAML."""
    return {**sections(), **{key.path: key.yaml_path for key in all_keys().values()}}


@cache
def names_in(section: Path) -> dict[str, Path]:
    """Names inside a block, in any spelling -> the path in Python of the setting or block."""
    found: dict[str, Path] = {}
    for path, yaml_path in yaml_paths().items():
        if path[:-1] == section:
            found |= {yaml_path[-1]: path, path[-1]: path}
    block = ".".join(sections().get(section, ()))
    return found | {other: found[name] for other, name in SYNONYMS.get(block, {}).items()}


def value_at(config: Config, path: Path) -> Any:
    """The value of a setting by its path in Python."""
    return attrgetter(".".join(path))(config)


def flat_name(name: str) -> Path | None:
    """The path in Python of an fsdp_ key without its block, as in Accelerate's flat files; None if it is none."""
    return names_in(("fsdp",)).get(name) if name.startswith("fsdp_") else None


def resolve_name(dotted: str) -> Path | None:
    """The path in Python of a setting given in either spelling, or mixed; None if there is none."""
    if flat := flat_name(dotted.strip()):
        return flat
    path: Path = ()
    for part in dotted.strip().split("."):
        step = names_in(path).get(part) if path in {(), *sections()} else None
        if step is None:
            return None
        path = step
    return path


NAMES_ELSEWHERE = {
    "fsdp.activation_checkpointing": ("gradient_checkpointing", "checkpoint_activations", "recompute_activations"),
    "shardkit.compile": ("torch_compile",),
    "shardkit.gradient_accumulation_steps": ("accumulate_grad_batches", "gradient_accumulation", "grad_accum"),
    "shardkit.mesh.context_size": (
        "cp_size",
        "sp_size",
        "context_parallel_size",
        "context_parallel_degree",
        "sequence_parallel_size",
        "ulysses_size",
        "ulysses_sequence_parallel_size",
    ),
    "shardkit.checkpoint.keep_last": ("save_total_limit", "total_limit", "save_top_k"),
}
"""By setting: what other tools call it. Not read, only suggested."""


def whole_name(part: str) -> str | None:
    """The full name of the setting whose name ends like this, such as `keep_last` or `checkpoint.keep_last`, in either
    spelling, allowing typos and a missing end, or that other tools call so; None if nothing is near."""
    last = part.rpartition(".")[2].lower()
    if elsewhere := next((name for name, words in NAMES_ELSEWHERE.items() if last in words), None):
        return elsewhere
    near = _begun(part, _ends()) or get_close_matches(part.lower(), _ends(), 1, 0.75)
    return _ends()[near[0]] if near else None


@cache
def _ends() -> dict[str, str]:
    """Ends of the settings' dotted names, in either spelling -> the full name; of `seed`, the one of fewest blocks."""
    found: dict[str, str] = {}
    for key in sorted(all_keys().values(), key=lambda key: len(key.path)):
        for path in (key.path, key.yaml_path):
            for start in range(len(path)):
                found.setdefault(".".join(path[start:]), key.name)
    return found


def _begun(name: str, known: Mapping[str, object]) -> list[str]:
    """The name that begins like this; empty if it is none, or several with different meanings, or a short beginning."""
    found = [each for each in known if each.startswith(name.lower())] if len(name) > 3 else []
    return found[:1] if len({known[each] for each in found}) == 1 else []


def suggestion_for_dotted(name: str) -> str:
    """The advice for an unknown dotted name, of a setting or a block: the nearest one, as it may be typed."""
    section: Path = ()
    start, (typed, *rest) = "", name.split(".")
    while rest and (inner := names_in(section).get(typed, ())) in sections():
        section, start, (typed, *rest) = inner, f"{start}{typed}.", rest
    if (rest or not start) and (meant := whole_name(name)):
        return f"did you mean {meant}?"
    return suggestion(typed, section, start)


def suggestion(name: str, section: Path = (), start: str = "") -> str:
    """The advice for an unknown name in a block: the nearest name, after the `start` of a dotted one, or where it
    belongs."""
    here = names_in(section)
    near = _begun(name, here)
    if not near and not _begun(name, _ends()):
        near = get_close_matches(name.lower(), here, 1, 0.75)
    elsewhere = [block for block in [(), *sections()] if block != section and name in names_in(block)]
    if not near and not elsewhere and (meant := whole_name(name)):
        return f"did you mean {'.'.join(all_keys()[tuple(meant.split('.'))].yaml_path)}?"
    if not near and elsewhere:
        block = ".".join(sections().get(elsewhere[0], ()))
        return f"{name} belongs {f'in the block {block}' if block else 'at the top level'}"
    near = near or get_close_matches(name.lower(), here, 1, 0.6)
    if near:
        return f"did you mean {start}{_spelling_near(near[0], name, section)}?"
    return f"{KNOWN}{', '.join(_written(section))}"


def nearest(value: Any, choices: Iterable[str]) -> str:
    """`did you mean X?` if a choice is near, else `write A, B or C.`"""
    choices = list(choices)
    near = get_close_matches(str(value).upper(), [choice.upper() for choice in choices], 1, 0.6)
    if near:
        return f"did you mean {next(choice for choice in choices if choice.upper() == near[0])}?"
    return f"write {alternatives(choices)}."


def _spelling_near(near: str, name: str, section: Path) -> str:
    path = names_in(section)[near]
    written = yaml_paths()[path][-1]
    return near if near == path[-1] and not name.startswith(written[:4]) else written


def _written(section: Path) -> list[str]:
    return [yaml_paths()[path][-1] for path in sorted(set(names_in(section).values()))]


def _walk(section: type[Section], path: Path, yaml_path: Path) -> Iterable[Key]:
    for name, field in section.model_fields.items():
        below = (*path, name), (*yaml_path, field.alias or name)
        inner = _section_of(field)
        if inner:
            yield from _walk(inner, *below)
        else:
            yield Key(*below, section, field)


def _section_of(field: FieldInfo) -> type[Section] | None:
    # In Python 3.10 list[str] passes for a class, of which issubclass then says that it is none.
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if not get_args(kind)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)

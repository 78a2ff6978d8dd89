"""A JSON Schema of the file, for editors that complete and check YAML."""

from typing import Any

from shardkit.config.accelerate_keys import INSTEAD
from shardkit.config.descriptions import text_of
from shardkit.config.keys import SYNONYMS, Key, Path, all_keys, sections, yaml_paths
from shardkit.config.schema import Config, FsdpConfig, Section, ShardingStrategy
from shardkit.config.validation import choices_of

_TRANSLATED = {
    "parallelism_config": "Accelerate's mesh; its sizes, but that of tensor parallelism, are read as shardkit.mesh.",
    **dict.fromkeys(
        ("dynamo_config", "dynamo_backend"), "Accelerate's torch.compile; INDUCTOR is read as shardkit.compile."
    ),
    "fp8_config": "Accelerate's fp8; backend AO is read as mixed_precision: fp8.",
    "fp16": "Of old files; true is read as mixed_precision: fp16.",
    "bf16": "Of old files; true is read as mixed_precision: bf16.",
}
_TRANSLATED_OF_FSDP = {
    "fsdp_activation_checkpointing_offload": "Accelerate's; true is read as shardkit.offload_activations.",
}
_URI = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of a file. It accepts every file that `dump` writes, and the usual other spellings of values."""
    schema = _block((), Config)
    schema["properties"] |= {name: _unsupported(text) for name, text in INSTEAD.items()}
    schema["properties"] |= _described(_TRANSLATED)
    return {"$schema": _URI, "title": "shardkit configuration", **schema}


def _block(path: Path, section: type[Section]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        below = (*path, name)
        inner = below in sections()
        rule = _optional_block(below, type(field.get_default())) if inner else _setting(all_keys()[below])
        properties[yaml_paths()[below][-1]] = rule | {"description": text_of(section, name)}
    if section is FsdpConfig:
        properties |= _other_spellings(properties) | _described(_TRANSLATED_OF_FSDP)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _optional_block(path: Path, section: type[Section]) -> dict[str, Any]:
    return {**_block(path, section), "type": ["object", "null"]}


def _setting(key: Key) -> dict[str, Any]:
    default = getattr(key.default, "value", key.default)
    rule = {"default": default} if default is not None else {}
    choices = choices_of(key.field)
    kind = str(key.field.annotation)
    if key.path == ("fsdp", "sharding_strategy"):
        return {**rule, "enum": [*choices, *(strategy.number for strategy in ShardingStrategy)]}
    if key.path == ("fsdp", "reshard_after_forward"):
        return {"enum": [True, False, None, "yes", "no", *ShardingStrategy]}
    if choices:
        also = [False] if {"no", "NO"} & set(choices) else []
        return {**rule, "enum": [*choices, *also, *([None] if default is None else [])]}
    return {**rule, **_kind(kind)}


def _kind(kind: str) -> dict[str, Any]:
    words = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": ["string", "null"]}]}
    if "dict" in kind:
        return {"type": ["object", "null"]}
    if "list" in kind:
        return words
    if "bool" in kind:
        return {"anyOf": [{"type": ["boolean", "null"]}, {"enum": ["yes", "no", "true", "false"]}]}
    if "int" in kind or "float" in kind:
        units = "[kKmMbB]?" if "int" in kind else ""
        return {"anyOf": [{"type": ["number", "null"]}, {"type": "string", "pattern": f"^[0-9][0-9_,.e+]*{units}$"}]}
    return {"type": ["string", "number", "null"]}


def _other_spellings(properties: dict[str, Any]) -> dict[str, Any]:
    spellings = SYNONYMS["fsdp_config"].items()
    return {other: properties[name] | {"deprecated": True} for other, name in spellings}


def _described(texts: dict[str, str]) -> dict[str, Any]:
    """Names of Accelerate that are translated, whatever their value."""
    return {name: {"description": text} for name, text in texts.items()}


def _unsupported(text: str) -> dict[str, Any]:
    return {"description": text, "deprecated": True, "enum": [None, {}, "", []]}

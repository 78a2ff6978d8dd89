"""A Config as readable YAML: important keys first, each below its description, without most of the defaults."""

import shlex
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import yaml

from shardkit.config.descriptions import text_of
from shardkit.config.keys import Path, all_keys, sections, value_at
from shardkit.config.meaning import counts_devices
from shardkit.config.schema import Config, DistributedType, Section

HEADER = """\
# shardkit configuration. The keys are those of Accelerate; a missing key has its default.
# change: shardkit config{output}    check: shardkit config validate{name}    run: shardkit launch{config} train.py
"""

# The first keys of a file; the rest follows in the order of the schema.
_FIRST = ["compute_environment", "distributed_type", "num_machines", "num_processes", "mixed_precision", "use_cpu"]
_ALWAYS = {(name,) for name in _FIRST}
_FSDP_ALWAYS = [
    "version",
    "sharding_strategy",
    "offload_params",
    "auto_wrap_policy",
    "backward_prefetch",
    "forward_prefetch",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "use_orig_params",
    "activation_checkpointing",
]
_WITH_FSDP = {("fsdp", name) for name in _FSDP_ALWAYS}
_WITH_MACHINES = {("main_process_ip",), ("main_process_port",), ("rdzv_backend",), ("same_network",)}


def render(config: Config, comments: bool, name: str | None = None, chosen: Collection[str] | None = None) -> str:
    """The text of the file. Reading it gives the same configuration. `name`: the file name for commands; None: none
    needed. `chosen`: the settings to write beside those that differ from their default; None: the important ones."""
    lines = [_header(name)] if comments else []
    block: Path = ()
    for path in _ordered_paths(config, chosen):
        lines += _block_heads(block, path[:-1], comments)
        block = path[:-1]
        lines += key_lines(path, value_at(config, path), comments)
    return "\n".join(lines) + "\n"


def _header(name: str | None) -> str:
    if name is None:
        return HEADER.format(output="", name="", config="")
    quoted = shlex.quote(name)
    return HEADER.format(output=f" -o {quoted}", name=f" {quoted}", config=f" --config {quoted}")


def key_lines(path: Path, value: Any, comments: bool) -> list[str]:
    """The lines of one setting, indented: its description if wanted, key and value."""
    key = all_keys()[path]
    indent = "  " * (len(path) - 1)
    text = [f"{indent}# {text_of(key.section, path[-1])}"] if comments else []
    return [*text, f"{indent}{key.yaml_path[-1]}: {value_text(path, value)}"]


def head_lines(block: Path, comments: bool) -> list[str]:
    """The line that opens a block, below its description."""
    indent = "  " * (len(block) - 1)
    section: type[Section] = Config
    for part in block[:-1]:
        section = type(section.model_fields[part].get_default())
    text = [f"{indent}# {text_of(section, block[-1])}"] if comments else []
    return [*text, f"{indent}{sections()[block][-1]}:"]


def value_text(path: Path, value: Any) -> str:
    """A value as one line of YAML; class names comma-separated, as Accelerate reads them."""
    if path == ("fsdp", "transformer_layer_cls_to_wrap") and value:
        return scalar_text(",".join(value))
    if isinstance(value, (list, dict)):
        return quoted(value)
    return scalar_text(value)


def scalar_text(value: Any) -> str:
    """A scalar that every YAML parser reads as the same value: ambiguous words are quoted."""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return value if _is_plain(value) else quoted(value)


def _is_plain(text: str) -> bool:
    """Whether the text needs no quotes: only letters, digits and harmless characters, and a string in YAML."""
    harmless = text.isascii() and text.replace("_", "").replace(".", "").replace("/", "").replace("-", "").isalnum()
    return harmless and text[0].isalnum() and _resolved(text) == "tag:yaml.org,2002:str"


def _resolved(text: str) -> str:
    return yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False))


def quoted(value: Any) -> str:
    """A string in double quotes, or a list or block in flow style, on one line."""
    quotes = None if isinstance(value, dict) else '"'
    text = yaml.safe_dump(value, default_flow_style=True, default_style=quotes, width=2**31, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _ordered_paths(config: Config, chosen: Collection[str] | None) -> list[Path]:
    """The settings to write, in the order of the file."""
    written = [path for path in all_keys() if _is_written(config, path, chosen)]
    first: dict[Path, int] = {(name,): position for position, name in enumerate(_FIRST)}

    def position(path: Path) -> tuple[int, int]:
        return len(path) if path[0] == "shardkit" else 0, first.get(path, len(first))

    return sorted(written, key=position)


def _is_written(config: Config, path: Path, chosen: Collection[str] | None) -> bool:
    if path == ("num_processes",) and counts_devices(config):
        return False
    if value_at(config, path) != all_keys()[path].default:
        return True
    if chosen is not None:
        return all_keys()[path].name in chosen
    if path in _ALWAYS:
        return True
    if config.distributed_type is DistributedType.FSDP and path in _WITH_FSDP:
        return True
    return config.num_machines > 1 and path in _WITH_MACHINES and value_at(config, path) is not None


def _block_heads(former: Path, block: Path, comments: bool) -> Iterator[str]:
    """The head lines of the blocks that begin between two settings."""
    for length in range(1, len(block) + 1):
        if former[:length] != block[:length]:
            yield from head_lines(block[:length], comments)

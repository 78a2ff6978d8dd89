"""The output of `shardkit config`: text, and the data of `--json`."""

from operator import attrgetter
from typing import TYPE_CHECKING

from shardkit.wording import counted

if TYPE_CHECKING:
    from shardkit.config.files import LoadedConfig
    from shardkit.config.schema import Config


def summary(loaded: "LoadedConfig") -> str:
    config = loaded.config
    count = counted(config.num_processes, "process", "processes")
    if loaded.origins["num_processes"].kind == "default" and config.distributed_type.value != "NO":
        count = "one process per device"
    kind = config.distributed_type.value
    how = config.fsdp.sharding_strategy.value if kind == "FSDP" else kind
    return f"{count}, {how}, mixed precision {config.mixed_precision}"


def values(config: "Config", names: list[str]) -> list[str]:
    """The settings, a line each; one alone is its value."""
    texts = [_text(config, name) for name in names]
    return texts if len(names) == 1 else [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]


def origins(loaded: "LoadedConfig", names: list[str], everything: bool) -> list[str]:
    """A table of settings, values and where each comes from; defaults of shardkit's own only with `everything`."""
    shown = [name for name in names if everything or loaded.origins[name].kind != "default" or "shardkit" not in name]
    texts = {name: _text(loaded.config, name) for name in shown}
    widths = max(map(len, shown)), max(map(len, texts.values()))
    return [f"{name:<{widths[0]}}  {texts[name]:<{widths[1]}}  {loaded.origins[name]}" for name in shown]


def data(
    loaded: "LoadedConfig", names: list[str], origin: bool, other: "LoadedConfig | None" = None
) -> dict[str, object]:
    """The value of each of the settings, with `origin` where it comes from; given another file, in both."""
    if other is not None:
        here, there = data(loaded, names, origin), data(other, names, origin)
        return {name: {"here": here[name], "other": there[name]} for name in names}
    values = {name: _value(loaded.config, name) for name in names}
    if not origin:
        return values
    return {
        name: {"value": value, "origin": loaded.origins[name].kind, "where": loaded.origins[name].where}
        for name, value in values.items()
    }


def differing(config: "Config", other: "Config", names: list[str]) -> list[str]:
    """Those settings that differ."""
    return [name for name in names if _value(config, name) != _value(other, name)]


def difference(loaded: "LoadedConfig", other: "LoadedConfig", names: list[str], origin: bool) -> list[str]:
    """A line for each of the settings: its value in both files, with `origin` where each comes from."""

    def side(of: "LoadedConfig", name: str) -> str:
        return _text(of.config, name) + (f" ({of.origins[name]})" if origin else "")

    return [f"{name}: {side(loaded, name)} -> {side(other, name)}" for name in names]


def _value(config: "Config", name: str) -> object:
    value = attrgetter(name)(config)
    return getattr(value, "value", value)


def _text(config: "Config", name: str) -> str:
    from shardkit.config.command import setting_text

    return setting_text(tuple(name.split(".")), _value(config, name))

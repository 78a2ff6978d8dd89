"""Typed text -> an answer. Each reader raises ValueError: `what is wrong (got ...); what to do.`"""

from collections.abc import Callable
from typing import Any

from shardkit.config import host_port
from shardkit.config.schema import MOST, SEEDS, read_count, read_names
from shardkit.digits import number_in
from shardkit.model import sources
from shardkit.plan.devices import memory_in
from shardkit.wizard.options import class_options
from shardkit.wizard.situation import HERE, SEVERAL, Situation

NONE_WORDS = {"none", "no", "-"}


class FormError(ValueError):
    """The text is not in the form in which such answers are typed; a file's value need not be."""


def in_range(typed: str, low: int, high: int) -> int:
    """A whole number: 2, 1e8, 100M, 100,000,000."""
    number = read_count(typed)
    allowed = f"{low:,} to {high:,}"
    if not isinstance(number, int):
        raise ValueError(f"not a whole number (got {typed!r}); give {allowed}.")
    if not low <= number <= high:
        raise ValueError(f"out of range (got {number:,}); give {allowed}.")
    return number


def whole_number(low: int) -> Callable[[Situation, str], int]:
    """A reader of integers from `low` on."""

    def read(s: Situation, typed: str) -> int:
        return in_range(typed, low, MOST)

    return read


def seed(s: Situation, typed: str) -> int | None:
    """A seed of torch's random generators, or none."""
    return None if typed.lower() in NONE_WORDS else in_range(typed, 0, SEEDS - 1)


def optional_text(s: Situation, typed: str) -> str | None:
    """Any text, or none."""
    return None if typed.lower() in NONE_WORDS else typed


def model(s: Situation, typed: str) -> str | None:
    """A model specification, checked by its form only; None: no model."""
    if typed.lower() in {*NONE_WORDS, "skip"}:
        return None
    if sources.has_form(typed, s.folder):
        return typed
    raise ValueError(f"not a model (got {typed!r}); give {sources.FORMS}, or press Enter to continue without one.")


def machines(s: Situation, typed: str) -> int:
    """The number of machines."""
    return in_range(typed, 2 if s.where == SEVERAL else 1, 4096)


def machine_rank(s: Situation, typed: str) -> int:
    """This machine's rank; "launch" leaves it to the launch command."""
    return 0 if typed.lower() in {"launch", *NONE_WORDS} else in_range(typed, 0, s.machines - 1)


def min_machines(s: Situation, typed: str) -> int | None:
    """The minimum of an elastic run, up to all machines; None: not elastic."""
    return None if typed.lower() in NONE_WORDS else in_range(typed, 1, s.machines)


def processes_per_machine(s: Situation, typed: str) -> int:
    """Processes per machine; on this machine's GPUs, at most one per GPU."""
    number = in_range(typed, 1, 4096)
    if s.where == HERE and not s.on_cpu and number > s.gpus:
        raise ValueError(f"more than the GPUs of this machine (got {number}); give 1 to {s.gpus}, or choose its CPU.")
    return number


def gpu_memory(s: Situation, typed: str) -> str:
    """The memory of one GPU, such as 48GiB."""
    if not memory_in(typed):
        raise ValueError(f"not a size (got {typed!r}); give the memory of one GPU, like 48GiB.")
    return typed


def address(s: Situation, typed: str) -> str | None:
    """A host, or host:port; None: set at launch."""
    if typed.lower() in NONE_WORDS:
        return None
    host, port = split_address(typed)
    if host_port.problem_of_host(host):
        raise ValueError(f"not an address (got {typed!r}); give a name or IP, and a port if wanted: node-a:29500.")
    if port is not None and not 1 <= port <= 65535:
        raise FormError(f"port out of range (got {port}); give 1 to 65535.")
    return typed


def split_address(address: str) -> tuple[str, int | None]:
    """("node-a", 29500) from "node-a:29500"; the port may be None. IPv6 with a port is in brackets."""
    host, port = host_port.split(address)
    return host, _port(port) if port else None


def _port(text: str) -> int:
    number = number_in(text)
    if number is None:
        raise ValueError(f"not a port (got {text!r}); give 1 to 65535.")
    return number


def classes(s: Situation, typed: str) -> list[str]:
    """Comma-separated class names; only the model's classes if they are known."""
    names = [] if typed.lower() in NONE_WORDS else read_names(typed)
    known = {option.value for option in class_options(s)}
    missing = [name for name in names if known and name not in known]
    if missing:
        raise ValueError(f"not a class of the model (got {missing[0]}); choose among {', '.join(sorted(known))}.")
    wrong = [name for name in names if not name.isidentifier()]
    if wrong:
        raise FormError(f"not a class name (got {wrong[0]!r}); give names with commas, like BertLayer, T5Block.")
    return names


def pairs(s: Situation, typed: str) -> list[str]:
    """Comma-separated NAME=value pairs."""
    found = names(s, typed)
    wrong = [pair for pair in found if not pair.partition("=")[0].isidentifier() or "=" not in pair]
    if wrong:
        raise FormError(f"not NAME=value (got {wrong[0]!r}); give pairs with commas, like XLA_USE_SPMD=1, DEBUG=0.")
    return found


def names(s: Situation, typed: str) -> list[Any]:
    """Comma-separated words."""
    return [] if typed.lower() in NONE_WORDS else read_names(typed)


def commands(s: Situation, typed: str) -> list[str]:
    """Commands separated by semicolons."""
    return [] if typed.lower() in NONE_WORDS else [part.strip() for part in typed.split(";") if part.strip()]


def identifier(s: Situation, typed: str) -> str:
    """The name of a function."""
    if not typed.isidentifier():
        raise FormError(f"not a function's name (got {typed!r}); give one like main.")
    return typed

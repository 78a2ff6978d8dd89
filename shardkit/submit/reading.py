"""Parses the flags of `shardkit submit`. Each function raises UsageError with all problems of its argument."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardkit.config import host_port
from shardkit.digits import number_in
from shardkit.errors import UsageError
from shardkit.sizes import read_bytes
from shardkit.submit.job import Volume
from shardkit.wording import counted

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> int:
    """Seconds of `4h`, `90m`, `1d12h`, or of SLURM's format: `2-12:00:00`, `04:00:00`."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,3}):([0-5]\d):([0-5]\d)", text.strip())
    if found:
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        parts = re.findall(r"(\d{1,9})([smhd])", text.strip().lower())
        is_whole = "".join(number + unit for number, unit in parts) == text.strip().lower()
        total = sum(int(number) * _SECONDS[unit] for number, unit in parts) if is_whole else 0
    if total < 1:
        raise UsageError(f"--time: not a duration (got {text!r}); write 4h, 90m, 1d12h or 1-12:00:00.")
    return total


def hosts(path: Path | None, ranks: int | None) -> tuple[str, ...]:
    """The hosts in a file, one per line, `name slots=8`; `#` begins a comment. `ranks`: of each machine, if known."""
    if path is None:
        raise UsageError("--hosts: the hosts are missing (got none); add --hosts FILE with one host per line.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"--hosts: {path}: cannot be read ({reason}); give a file with one host per line.") from None
    names: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            problems += [f"{path}:{number}: {text}" for text in _problems_of_host(*words, earlier=names, ranks=ranks)]
            names.setdefault(words[0], number)
    if not names:
        problems.append(f"{path}: contains no host; write one per line.")
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(names)


def _problems_of_host(name: str, *rest: str, earlier: Mapping[str, int], ranks: int | None) -> Iterator[str]:
    """What is wrong with a line of hosts. `earlier`: the lines of those before it."""
    if name in earlier:
        yield f"{name} is a duplicate (got it on line {earlier[name]}, too); there is one launch per host."
    elif not _is_host(name):
        yield (
            f"not a host name (got {name!r}); write user@name or name, an IPv6 address without brackets, and a port as "
            "an option of ssh: --ssh 'ssh -tt -p 2222'."
        )
    for word in rest:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or (slots := number_in(value)) is None:
            yield f"only `name slots=N` is supported (got {word!r}); remove the rest."
        elif key == "slots" and ranks is not None and slots != ranks:
            yield (
                f"{name} has {value} slots, but the configuration has {counted(ranks, 'rank')} per machine; change the "
                "slots, or num_processes."
            )


def _is_host(text: str) -> bool:
    """Whether ssh takes the text as a host, with or without a user."""
    host = text.rpartition("@")[2]
    is_plain = re.fullmatch(r"[A-Za-z0-9_.@:%-]+", text) is not None and not text.startswith("-")
    return is_plain and (":" not in host or host_port.is_ipv6(host))


def volumes(words: Sequence[str], is_claim: bool) -> tuple[Volume, ...]:
    """The volumes of SOURCE:FOLDER texts. SOURCE is a persistent volume claim, or the URL of a bucket."""
    problems: list[str] = []
    found: list[Volume] = []
    for word in words:
        source, _, path = word.rpartition(":")
        name = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?" if is_claim else r"[a-z0-9]+://\S+"
        if not path.startswith("/") or not re.fullmatch(name, source):
            form = "CLAIM:/folder" if is_claim else "s3://bucket:/folder"
            problems.append(f"--volume: invalid volume (got {word!r}); write {form}.")
        elif any(volume.path == path for volume in found):
            problems.append(f"--volume: {path} is used twice (got {word!r}); use another folder.")
        found.append(Volume(source, path))
    if problems:
        raise UsageError("\n".join(problems))
    return tuple(found)


def options(words: Sequence[str]) -> dict[str, str]:
    """{key: value} of KEY=VALUE texts; KEY alone has an empty value."""
    wrong = [word for word in words if not word.partition("=")[0].strip()]
    if wrong:
        raise UsageError(
            "\n".join(f"--option: not KEY=VALUE (got {word!r}); write --option KEY=VALUE." for word in wrong)
        )
    return {key.strip().lstrip("-"): value.strip() for key, _, value in (word.partition("=") for word in words)}


def variables(words: Sequence[str]) -> dict[str, str]:
    """{name: value} of NAME=VALUE texts."""
    parts = [word.partition("=") for word in words]
    wrong = [name for name, equals, _ in parts if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
    if wrong:  # without the value, which may be a secret
        raise UsageError("\n".join(f"--env: not NAME=VALUE (got {name!r}); write --env NAME=VALUE." for name in wrong))
    return {name: value for name, _, value in parts}


def size(text: str) -> int:
    """The bytes of a size such as `500GiB`."""
    found = read_bytes(text)
    if found is None:
        raise UsageError(f"--memory: not a size (got {text!r}); write 500GiB.")
    return found

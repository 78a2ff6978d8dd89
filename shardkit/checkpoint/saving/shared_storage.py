"""Whether the ranks of a run can save into a folder together; asked before training, without writing."""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from shardkit.distributed.control import ControlGroup

OF_ONE_MACHINE = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""Kinds of file systems (proc(5), mountinfo) that only the machine that mounts them sees."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
MOUNTS = Path("/proc/self/mountinfo")


def problem(folder: Path | None, control: ControlGroup) -> str:
    """What would make a save into this rank's folder fail, which need not exist yet; empty where nothing is known.

    Collective; None: this rank has no folder. No file is tried: NFS shows a new one late on other machines.
    """
    return control.decide(None if folder is None else _answer(folder), judged)


def judged(answers: Sequence[list[str] | None]) -> str:
    """As above, from each rank's [folder, host, identity of the machine, kind of file system, why it cannot write]."""
    asked = [(rank, *answer) for rank, answer in enumerate(answers) if answer is not None]
    for rank, folder, host, _, _, refused in asked:
        if refused:
            return f"{folder}: rank {rank} (host {host}) cannot write there ({refused})"
    if len({machine for _, _, _, machine, _, _ in asked if machine}) < 2:  # its containers can share a machine's disk
        return ""
    for rank, folder, host, _, kind, _ in asked:
        if kind in OF_ONE_MACHINE:
            return f"{folder}: rank {rank} (host {host}) has it on its own disk ({kind}), which others do not see"
    return ""


def _answer(folder: Path) -> list[str]:
    there = Path(os.path.realpath(folder))
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    return [str(folder), socket.gethostname(), _machine(), _kind(there), _refusal(there)]


def _machine() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:  # not Linux
        return ""


def _refusal(there: Path) -> str:
    if not there.is_dir():
        return f"{there} is not a folder"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"the file system of {there} is read-only" if _is_read_only(there) else f"no permission for {there}"


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:  # one that does not tell it
        return False


def _kind(path: Path) -> str:
    """The kind of the file system that a path is on; empty where the system does not tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    kind, depth = "", 0
    for line in lines:
        fields, _, behind = line.partition(" - ")
        at = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields.split(" ")[4]))
        if path.is_relative_to(at) and len(at.parts) >= depth:  # a later mount at the same place hides an earlier one
            kind, depth = behind.split(" ")[0], len(at.parts)
    return kind

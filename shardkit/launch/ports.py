"""Whether a port of this machine is free, and which process uses it (only on Linux, from /proc)."""

import errno
import socket
from pathlib import Path

LISTENING = "0A"  # TCP_LISTEN of linux/net/tcp_states.h


def obstacle(port: int) -> str | None:
    """Why a server could not listen on the port now, as `is in use by pid 812 (jupyter)`; None if it could."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"is in use by {owner(port)}"
            if error.errno == errno.EACCES:
                return "may not be used by this user, as most ports below 1024"
    return None


def owner(port: int, proc: Path = Path("/proc")) -> str:
    """`pid 812 (jupyter)`, or "another process" if that cannot be determined."""
    inodes = {inode for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, port)}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.glob("[0-9]*"):
        if wanted and _holds(process, wanted):
            return f"pid {process.name}{_command(process)}"
    return "another process"


def _command(process: Path) -> str:
    """` (jupyter)`; nothing where it has just ended."""
    try:
        return f" ({(process / 'comm').read_text(errors='replace').strip()})"
    except OSError:
        return ""


def _listening(table: Path, port: int) -> list[str]:
    """Inodes of the sockets that listen on the port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in sockets for link in (process / "fd").iterdir())
    except OSError:
        return False

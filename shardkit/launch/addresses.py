"""The addresses of this machine, and the interface by which it reaches another machine."""

import contextlib
import socket
import struct
import sys
import time
from pathlib import Path

LOOPBACK = "127.0.0.1"
SLOW_LOOKUP_S = 2.0
"""As long as no DNS server needs that answers."""
EVERYWHERE = "0.0.0.0"
LOOPBACK_INTERFACE = "lo" if sys.platform.startswith("linux") else "lo0"
SIOCGIFADDR = 0x8915  # linux/sockios.h
IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # a line each: 32 digits, ..., the interface


def resolve(host: str) -> str | None:
    """The first of `all_of` the host's addresses; None if the name cannot be resolved."""
    return next(iter(all_of(host)), None)


def all_of(host: str) -> list[str]:
    """The host's addresses: this machine's own first, then those with a route, loopback last; IPv4 before IPv6. Empty
    for a name that cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a part between two dots is empty, or longer than 63 characters
        return []
    known = dict.fromkeys(str(entry[4][0]) for entry in found)
    return sorted(known, key=lambda one: (is_loopback(one), not is_here(one), towards(one) is None, ":" in one))


def is_here(address: str | None) -> bool:
    """Whether this machine can listen on the address. False for None, the address of an unknown name."""
    if address is None:
        return False
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether the address is reachable only from this machine."""
    return address == "::1" or address.startswith("127.")


def means_loopback(host: str) -> bool:
    """Whether the name explicitly means loopback. Other names may resolve to loopback by /etc/hosts (Debian)."""
    return host == "localhost" or is_loopback(host)


def lookup_s(address: str) -> float:
    """How long it takes here to look up the name of an address, as torch does for each connection: seconds where no
    DNS server answers."""
    began_s = time.monotonic()
    with contextlib.suppress(OSError, UnicodeError):
        socket.getnameinfo((address, 0), 0)
    return time.monotonic() - began_s


def reached_by(host: str, address: str) -> str:
    """How to name a host that has answered at one of its addresses: by that one, since the others may not be reached.
    By its name where that means loopback, by which other machines do not reach it."""
    return host if is_loopback(address) else address


def gloo_variables(host: str, *others: str) -> dict[str, str]:
    """The variable that makes gloo use only the interface by which `host` is reached, or the first of `others` for
    which it is known; empty if none is."""
    if means_loopback(host):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    for known in (host, *others):
        resolved = resolve(known)
        ours = towards(resolved) if resolved and not is_loopback(resolved) else None
        if ours and (interface := interface_of(ours)):
            return {"GLOO_SOCKET_IFNAME": interface}
    return {}


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def towards(address: str) -> str | None:
    """This machine's address on the route to another address; None without a route. Sends nothing."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface with an address; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return LOOPBACK_INTERFACE if address.startswith("127.") else None


def _interface_of_ipv6(address: str) -> str | None:
    digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        rows = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:  # IPv6 is off
        return None
    return next((row[-1] for row in rows if row[0] == digits), None)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only; port 0: any free port."""
    listener = socket.socket(family_of(address))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def answers(address: str, port: int, timeout_s: float) -> str | None:
    """None if connections are accepted there; else the error as text."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None

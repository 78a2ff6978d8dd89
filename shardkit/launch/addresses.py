"""Which addresses are this machine's own, and over which interface it reaches another."""

import socket
import struct
import sys

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform.startswith("linux") else "lo0"
SIOCGIFADDR = 0x8915  # linux/sockios.h


def resolve(host: str) -> str | None:
    """The host's address, IPv4 where it has one; None where the name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(min(found, key=lambda entry: entry[0] is not socket.AF_INET)[4][0])


def is_here(address: str) -> bool:
    """Whether this machine can listen on the address."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address."""
    return address == "::1" or address.startswith("127.")


def means_loopback(host: str) -> bool:
    """Whether whoever wrote this name meant this machine alone; others are sent to loopback by /etc/hosts (Debian)."""
    return host == "localhost" or is_loopback(host)


def gloo_variables(host: str) -> dict[str, str]:
    """The variable that makes gloo listen on the interface over which `host` is reached, and on no other; none where
    that is not known."""
    if means_loopback(host):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    resolved = resolve(host)
    ours = towards(resolved) if resolved and not is_loopback(resolved) else None
    interface = interface_of(ours) if ours else None
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def towards(address: str) -> str | None:
    """The address by which this machine reaches another; None where there is no way. Sends nothing."""
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None where that is not known."""
    if not sys.platform.startswith("linux") or ":" in address:
        return None
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


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only; port 0: a free one."""
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
    """None where something accepts connections there; else what the system says."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None

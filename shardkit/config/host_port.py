"""Addresses as people write them: `node-a`, `node-a:29500`, `10.0.0.1`, `fd00::1`, `[fd00::1]:29500`, `:29500`."""

import ipaddress
import re


def split(address: str) -> tuple[str, str]:
    """(host, port) of an address; each may be empty. An IPv6 address has no port unless it is in brackets."""
    if found := re.fullmatch(r"\[(?P<host>[^\]]*)\](?::(?P<port>.*))?", address):
        return found["host"], found["port"] or ""
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def joined(host: str, port: int) -> str:
    """Host and port as one address, with an IPv6 address in brackets."""
    return f"{with_brackets(host)}:{port}"


def with_brackets(host: str) -> str:
    """An IPv6 address in brackets, as a port needs them; other hosts unchanged."""
    return f"[{host}]" if ":" in host else host


def without_brackets(host: str) -> str:
    """The IPv6 address in brackets without them; other texts unchanged."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def problem_of_host(host: str) -> str | None:
    """Why a text cannot be a host, and what to write; None if it may be one."""
    name, port = split(host)
    if not name or re.search(r"[^\w.:%\[\]-]", host):
        return f"is not a host (got {host!r}); write its name or IP address, such as node-a or 10.0.0.1."
    if port:
        return f"is the host alone (got {host}); write {name}, and its port as main_process_port: {port}."
    if ":" in name and not is_ipv6(name):
        return f"is not an IPv6 address (got {host}); write one such as fd00::1, or with its port [fd00::1]:29500."
    return None


def is_ipv6(text: str) -> bool:
    """Whether the text is an IPv6 address, without brackets."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False

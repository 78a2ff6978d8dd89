"""The store of all ranks at MASTER_ADDR:MASTER_PORT. Rank 0 hosts it where no launcher does."""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store, rendezvous

from shardkit import env
from shardkit.digits import number_in
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses, names, stores
from shardkit.log import get_logger
from shardkit.wording import ranks_text

log = get_logger(__name__)

# How often rank 0 looks who has come.
POLL_S = 0.02

_opened: dict[tuple[str | None, str | None], tuple[Store, int]] = {}
"""By address: this process's store there, and the number of process groups that were started on it."""


def of_next_group(rank: int, meet_timeout_s: float, timeout: timedelta) -> Store:
    """The store for this process's next process group of all ranks. Every rank must call it equally often. Raises as
    `_of_all_ranks`.

    The store outlives its groups, since rank 0 may host it, and each group has keys of its own: in those of an earlier
    one, gloo would find addresses where nobody listens any more.
    """
    address = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if address in _opened:
        store, number = _opened[address]
    elif env.get("TORCHELASTIC_RUN_ID"):
        store, number = _of_launched_ranks(rank, timeout), 0
    else:
        store, number = _of_all_ranks(rank, meet_timeout_s, timeout), 0
    _opened[address] = store, number + 1
    store.set_timeout(timeout)
    return PrefixStore(f"group-{number}", store)


_start: list[tuple[Store, str]] = []
"""Where torchrun's ranks name their starts, and the name of this one."""


def started_again() -> int | None:
    """A rank that was started again after it had met this one. None where there is no such rank."""
    for store, name in _start:
        if store.check([f"over/{name}"]):
            return int(store.get(f"over/{name}"))
    return None


def _of_launched_ranks(rank: int, timeout: timedelta) -> Store:
    """The store that the launcher hosts. Collective. That of torchrun still has the keys of earlier ranks where it has
    started these anew, and each machine counts such starts by itself."""
    store = next(rendezvous("env://", timeout=timeout))[0]
    if env.get(names.LAUNCHER_PID) is not None:
        return store  # a new one for each start
    size = number_in(env.get("WORLD_SIZE") or "") or 1
    starts = PrefixStore("starts", store)
    name = name_of_start(starts, rank, size, timeout.total_seconds())
    _start[:] = [(starts, name)]
    own = PrefixStore(name, store)
    choose_interface(env.get("MASTER_ADDR") or "", rank, size, own)
    return own


def name_of_start(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that all ranks of this start have, and those of no other. Collective. Raises MachineError where one does
    not come in time.

    Each rank writes a random name. Rank 0 answers to each name with its own, until all ranks have read that: a name
    that it reads may be of a process that has ended. A rank also writes which start it is in. One that finds such a
    name of its own has been started again, and ends that start for the ranks that are still in it.
    """
    mine, until = uuid4().hex, time.monotonic() + timeout_s
    if store.check([f"in/{rank}"]):
        store.set(f"over/{store.get(f'in/{rank}').decode()}", str(rank))
    store.set(f"name/{rank}", mine)
    if rank:
        while not store.check([f"answer/{mine}"]):
            _sleep(until, [0], timeout_s)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"in/{rank}", name)
        store.set(f"here/{name}/{rank}", "")
        return name
    store.set("in/0", mine)
    missing, answered = list(range(1, size)), set()
    while missing := [other for other in missing if not store.check([f"here/{mine}/{other}"])]:
        for other in missing:
            theirs = store.get(f"name/{other}").decode() if store.check([f"name/{other}"]) else None
            if theirs is not None and theirs not in answered:
                answered.add(theirs)
                store.set(f"answer/{theirs}", mine)
        _sleep(until, missing, timeout_s)
    return mine


def _sleep(until: float, missing: list[int], timeout_s: float) -> None:
    if time.monotonic() > until:
        raise MachineError(
            f"launch: {ranks_text(missing)} did not come within {timeout_s:.0f} s; see what the launcher says there."
        )
    time.sleep(POLL_S)


def _of_all_ranks(rank: int, meet_timeout_s: float, timeout: timedelta) -> Store:
    """This rank's store. Every rank must call it. Raises ConfigError where the address is not set, MachineError where
    rank 0 is not reached in time."""
    host, given = env.get("MASTER_ADDR"), env.get("MASTER_PORT") or ""
    port = number_in(given)
    if not host or port is None:
        raise ConfigError(
            f"launch: RANK and WORLD_SIZE are set, but not the address of rank 0 (got MASTER_ADDR={host!r}, "
            f"MASTER_PORT={given!r}); set both for every rank, or start the script with shardkit launch."
        )
    if rank == 0:
        store = stores.hosted(stores.listening_address(host, None, log.warning, "MASTER_ADDR"), port, timeout)
    else:
        advice = "check that rank 0 is running, that MASTER_ADDR is its machine, and that no firewall blocks the port"
        store = stores.reached(host, port, meet_timeout_s, log.warning, f"rank {rank}", "rank 0", advice)
        host = addresses.reached_by(host, store.host)
    choose_interface(host, rank, number_in(env.get("WORLD_SIZE") or "") or 1, store)
    return store


def choose_interface(host: str, rank: int, world_size: int, store: Store) -> None:
    """Makes gloo use the interface towards rank 0, unless the user has chosen one here. Collective. By itself gloo
    takes that of this machine's own name, which many systems have as loopback (127.0.1.1 in /etc/hosts)."""
    found = _gloo_variables(host, rank, world_size, PrefixStore("addresses", store)) if host else {}
    if not env.get("GLOO_SOCKET_IFNAME"):
        env.update(found)


def _gloo_variables(host: str, rank: int, world_size: int, store: Store) -> dict[str, str]:
    """The variable that makes gloo use the interface towards rank 0. Where `host` means this machine's loopback and is
    known to others by another address, it is the interface towards a rank on another machine."""
    resolved = addresses.resolve(host)
    ours = addresses.towards(resolved) if resolved else None
    store.set(str(rank), ours or "")
    found = addresses.gloo_variables(host)
    if found or ours is None or not addresses.is_loopback(ours):
        return found
    others = (store.get(str(other)).decode() for other in range(world_size) if other != rank)
    elsewhere = next((address for address in others if address and not addresses.is_loopback(address)), None)
    return addresses.gloo_variables(elsewhere) if elsewhere else {}

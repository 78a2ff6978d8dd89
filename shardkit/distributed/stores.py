"""The store for ranks that no launcher started: rank 0 hosts it at MASTER_ADDR:MASTER_PORT."""

from datetime import timedelta

from torch.distributed import Store

from shardkit import env
from shardkit.errors import ConfigError
from shardkit.launch import addresses, stores
from shardkit.log import get_logger

log = get_logger(__name__)


def of_all_ranks(rank: int, meet_timeout_s: float, timeout: timedelta) -> Store:
    """This rank's store. Every rank must call it. Raises ConfigError where the address is not set, MachineError where
    rank 0 is not reached in time."""
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT") or ""
    if not host or not port.isdigit():
        raise ConfigError(
            f"launch: RANK and WORLD_SIZE are set, but not the address of rank 0 (got MASTER_ADDR={host!r}, "
            f"MASTER_PORT={port!r}); set both for every rank, or start the script with shardkit launch."
        )
    if not env.get("GLOO_SOCKET_IFNAME"):
        env.update(addresses.gloo_variables(host))
    if rank == 0:
        store = stores.hosted(stores.listening_address(host, None, log.warning), int(port), timeout)
    else:
        advice = "check that rank 0 is running, that MASTER_ADDR is its machine, and that no firewall blocks the port"
        store = stores.reached(host, int(port), meet_timeout_s, log.warning, f"rank {rank}", "rank 0", advice)
        store.set_timeout(timeout)
    return store

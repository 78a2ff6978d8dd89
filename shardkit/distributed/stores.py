"""The store in which ranks meet that no launcher has started: rank 0 keeps it where MASTER_ADDR and MASTER_PORT say."""

from datetime import timedelta

from torch.distributed import Store

from shardkit import env
from shardkit.errors import ConfigError
from shardkit.launch import addresses, stores
from shardkit.log import get_logger

log = get_logger(__name__)


def of_all_ranks(rank: int, meet_timeout_s: float, timeout: timedelta) -> Store:
    """This rank's side of the store. Every rank calls it. Raises ConfigError where it is not said where, MachineError
    where rank 0 is not reached in time."""
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT") or ""
    if not host or not port.isdigit():
        raise ConfigError(
            f"launch: RANK and WORLD_SIZE are set, but not where rank 0 is (got MASTER_ADDR={host!r}, MASTER_PORT="
            f"{port!r}); set both for every rank, or start the script with shardkit launch."
        )
    if not env.get("GLOO_SOCKET_IFNAME"):
        env.update(addresses.gloo_variables(host))
    if rank == 0:
        store = stores.hosted(stores.listening_address(host, None, log.warning), int(port), timeout)
    else:
        advice = "check that rank 0 runs, that MASTER_ADDR is its machine, and let the port through"
        store = stores.reached(host, int(port), meet_timeout_s, log.warning, f"rank {rank}", "rank 0", advice)
        store.set_timeout(timeout)
    return store

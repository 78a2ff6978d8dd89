"""How the machines of a run find one another, as torch elastic's rendezvous handlers."""

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from shardkit.launch.spec import LaunchSpec

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=300)


def handler(spec: LaunchSpec, restart: int) -> RendezvousHandler:
    """The handler for one start of the ranks."""
    run_id = f"shardkit-{restart}"
    if spec.num_machines == 1:
        return OneMachine(run_id, spec.rendezvous.port)
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    meeting = spec.rendezvous
    settings: dict[str, object] = {}
    if meeting.backend == "static":
        settings = {"rank": spec.machine_rank}
    elif meeting.backend == "c10d":
        settings = {"is_host": str(spec.machine_rank == 0).lower()}
    return get_rendezvous_handler(
        RendezvousParameters(
            meeting.backend, meeting.endpoint, run_id, spec.num_machines, spec.num_machines, None, **settings
        )
    )


class OneMachine(RendezvousHandler):
    """A machine that meets nobody: its ranks share a store that listens on loopback only."""

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id, self._port = run_id, port
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = listening_store(LOOPBACK, self._port)
        self._store = store
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def shutdown(self) -> bool:
        self._store = None
        return True

    def get_backend(self) -> str:
        return "shardkit"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0


def listening_store(address: str, port: int) -> TCPStore:
    """A store in this process that listens on one address only; port 0: a free one. torch's own listens on all."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
        return TCPStore(
            address,
            listener.getsockname()[1],
            None,
            True,
            STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )

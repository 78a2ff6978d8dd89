"""A request to a store that takes long is told while it lasts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardkit.log import get_logger
from shardkit.storage.url import Url

# The packages of fsspec try a server that cannot be reached for minutes: botocore five times, 60 s each.
QUIET_S = 15.0

log = get_logger(__name__)


@contextmanager
def told(url: Url, what: str) -> Iterator[None]:
    """Logs a warning once the request inside has taken QUIET_S."""
    text = "storage: %s: %s has taken %.0f s so far; the store cannot be reached, or is slow. It goes on."
    timer = threading.Timer(QUIET_S, log.warning, (text, url, what, QUIET_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()

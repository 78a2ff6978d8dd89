"""Fixtures that all tests share. They also police: no test may leave a changed environment or working folder behind."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.ranks import Pool, leave

# A test decides itself whether it runs "in CI", by a scheduler, or with a user's settings.
for _name in [name for name in os.environ if name.startswith(("SHARDKIT_", "ACCELERATE_", "FSDP_", "SLURM_"))]:
    del os.environ[_name]
for _name in ("CI", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)
# A job in the background may have been started with Ctrl-C ignored; programs that tests start must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Live gloo ranks: `ranks.run(2, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """For tests that make an Accelerator in their own process: the process group that it starts ends with the test."""
    yield
    leave()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    environment, folder = dict(os.environ), os.getcwd()
    yield
    changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets the second when an optimizer is built
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"

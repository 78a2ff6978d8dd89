"""Fixtures that all tests share. They also police: no test may leave threads, a process group, files, a
changed environment or working folder behind."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Pool, leave

ROOT = Path(__file__).parent.parent
# Variables that pytest, torch (when an optimizer is built) and scikit-learn (at its import) set.
OF_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}

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


def pytest_configure(config: pytest.Config) -> None:
    """Hides the machine's GPUs from tests that are not about them, and from the processes that these start."""
    asked = [config.option.markexpr, *config.args]
    if shutil.which("nvidia-smi") and not any("gpu" in one.replace("not gpu", "") for one in asked):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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


@pytest.fixture
def clean_states(alone: None) -> Iterator[None]:
    """States of Accelerate's API as in a new process, before and after."""
    from shardkit.compat.states import AcceleratorState, PartialState
    from shardkit.compat.window import GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    PartialState._timeout, PartialState._has_started_group = None, False
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    environment, folder, files = dict(os.environ), os.getcwd(), _files_of_the_checkout()
    threads, had_group = _threads(), _has_group()
    yield
    changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    changed -= OF_LIBRARIES
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    assert had_group or not _has_group(), "the test left a process group up; let it use the fixture alone"
    left = _files_of_the_checkout() - files
    assert not left, f"the test, or one beside it, left files in the checkout: {sorted(left)}"
    assert not (more := _lasting(_threads() - threads)), f"the test left threads running: {[t.name for t in more]}"


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _files_of_the_checkout() -> set[str]:
    """Names at the top, where a test that writes into its working folder would leave something."""
    return set(os.listdir(ROOT)) - {".coverage", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _lasting(threads: set[threading.Thread], timeout_s: float = 5.0) -> set[threading.Thread]:
    """Those that do not end soon. Threads of pools and of torch that live as long as the process are not counted."""
    ours = {
        thread
        for thread in threads
        if not thread.name.startswith(
            ("ThreadPoolExecutor", "QueueFeeder", "pydevd", "tqdm_monitor", "fsspecIO", "asyncio_")
        )
    }
    until = time.monotonic() + timeout_s
    while (left := {t for t in ours if t.is_alive()}) and time.monotonic() < until:
        time.sleep(0.01)
    return left

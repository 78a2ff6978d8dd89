"""shardkit's log messages are printed once, with any logging setup of the script, and by rank 0 only."""

import os
import subprocess
import sys
from types import SimpleNamespace

from shardkit.log import get_logger

SCRIPT = """
import logging, sys
from shardkit.log import get_logger
early = get_logger("shardkit.early")
early.info("before")
if sys.argv[1] == "basic":
    logging.basicConfig(level=logging.INFO, format="%(name)s says %(message)s")
if sys.argv[1] == "file":
    logging.basicConfig(level=logging.INFO, filename=sys.argv[2])
for logger in (early, get_logger("shardkit.early"), get_logger("shardkit.late")):
    logger.info("information")
    logger.warning("warning")
"""


def lines(kind: str, rank: int, *arguments: str) -> list[str]:
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, *arguments], capture_output=True, text=True, env={**os.environ, **where}
    )
    assert done.returncode == 0 and not done.stdout, done.stderr
    return done.stderr.splitlines()


def test_each_message_is_told_once_and_information_by_rank_0_alone(tmp_path):
    told, warned = ["shardkit: information", "shardkit: warning"], ["shardkit: warning"]
    assert lines("own", 0) == ["shardkit: before", *told * 3]
    assert lines("own", 1) == warned * 3
    names = ("early", "early", "late")
    words = [f"shardkit.{name} says {word}" for name in names for word in ("information", "warning")]
    assert lines("basic", 0) == ["shardkit: before", *words]
    assert lines("basic", 1) == [word for word in words if word.endswith("warning")]
    assert lines("file", 0, str(tmp_path / "log")) == ["shardkit: before", *told * 3]  # a file is no screen
    assert (tmp_path / "log").read_text().count("information") == 3


def test_the_rank_is_that_of_a_group_that_the_script_has_started_without_variables(monkeypatch, caplog):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    log = get_logger("shardkit.spawned")
    for rank in (0, 1):
        group = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda rank=rank: rank)
        monkeypatch.setitem(sys.modules, "torch.distributed", group)
        log.info("of %d", rank)
        log.warning("warned %d", rank)
    assert caplog.messages == ["of 0", "warned 0", "warned 1"]

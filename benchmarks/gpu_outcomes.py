"""A plugin of pytest for `benchmarks.gpu`: writes the outcome of each test as it ends, a JSON line each, also of tests
that run side by side.

    python -m pytest -p benchmarks.gpu_outcomes --outcomes FILE
"""

import json
from pathlib import Path

import pytest

LONGEST_REASON = 5000  # characters; of the end of a report, which tells the error


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file that gets the lines."""
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """One process writes, to which those beside it report."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for a test's call, and one for a preparation or an end that did not pass."""
        if report.when != "call" and report.passed:
            return
        is_skipped = isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ") if is_skipped else report.longreprtext[-LONGEST_REASON:]
        line = {"name": report.nodeid.rpartition("::")[2], "outcome": report.outcome, "reason": reason}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

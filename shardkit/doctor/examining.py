"""Tests this machine, then all ranks together, for `shardkit doctor`."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit import env
from shardkit.config import files, hardware
from shardkit.config.schema import Config
from shardkit.doctor import findings, machine
from shardkit.doctor.findings import Finding, Level, as_json, from_json, has_error, render
from shardkit.errors import EXIT_MACHINE, ShardkitError
from shardkit.launch import attempts, declining, folders, spec
from shardkit.launch.preflight import Machine

PATIENCE_S = {"meet_timeout_s": 120.0, "hang_timeout_s": 60.0, "process_group_timeout_s": 120.0}
"""Upper limits of timeouts, which are longer in a run."""
ONCE = {"shardkit.launch.max_restarts": "0", "shardkit.launch.min_machines": "null"}
"""All machines are tried together, once."""


def examine(config: Config, config_name: str, folder: Path, in_json: bool) -> int:
    """Test this machine, then all ranks together. Prints the findings and returns the exit code."""
    here = Machine.of(hardware.detect())
    say("testing this machine")
    with nullcontext() if config.num_machines > 1 else left_as_it_was(folder):
        own = [
            replace(finding, machine=config.machine_rank)
            for finding in machine.findings(config, here, folder, env.copy())
        ]
        if has_error(own):
            say("a run would not start here, so the ranks are not tested")
            reasons = [f"{one.check}: {one.found}" for one in own if one.level is Level.ERROR]
            declining.tell_others(config, "\n".join(reasons))
            result: dict[str, Any] = {"machines": {}, "findings": as_json(own), "measured": []}
        else:
            result = together(config, config_name, folder, here, own)
    rows = from_json(result["findings"])
    if in_json:
        print(json.dumps({"ok": not has_error(rows), **result}, indent=2))
    else:
        print(render(rows, config.num_machines))
    return EXIT_MACHINE if has_error(rows) else 0


@contextmanager
def left_as_it_was(folder: Path) -> Iterator[None]:
    """Removes the folder and its parents afterwards, as far as they were not there before and are empty. For one
    machine: another one may still use them."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            for place in new:
                place.rmdir()


def together(config: Config, config_name: str, folder: Path, here: Machine, own: list[Finding]) -> dict[str, Any]:
    """The findings of the ranks on all machines, and of each machine alone."""
    limits = config.shardkit.launch
    soon = {f"shardkit.launch.{name}": f"{min(getattr(limits, name), most):g}" for name, most in PATIENCE_S.items()}
    try:
        with folder_of_logs() as logs:
            launched = spec.launch_spec(
                files.overlaid(config, {**soon, **ONCE, "shardkit.launch.log_dir": str(logs)}),
                str(Path(__file__).with_name("ranks.py")),
                config_name=config_name,
                cores=here.cores,
                variables=env.copy(),
                more_variables={findings.FOLDER: str(folder)},
                kind=here.kind,
            )
            (logs / findings.OWN_FILE).write_text(json.dumps(as_json(own)))
            attempts.run(replace(launched, has_prefix=False))
            result: dict[str, Any] = json.loads((logs / findings.RESULT_FILE).read_text())
    except ShardkitError as error:
        failed = Finding("ranks", str(error).removeprefix("launch: ").replace("\nlaunch: ", "\n"), Level.ERROR)
        return {"machines": {}, "findings": as_json([*own, failed]), "measured": []}
    return result


@contextmanager
def folder_of_logs() -> Iterator[Path]:
    """A temporary folder. It stays where an error names it, for the logs of the ranks that failed."""
    logs = Path(tempfile.mkdtemp(prefix=f"{folders.PREFIX}doctor-"))  # a TemporaryDirectory forked ranks would remove
    is_named = False
    try:
        with folders.locked(logs):  # where this process is killed, the next launch removes it
            yield logs
    except ShardkitError as error:
        is_named = folders.short(logs) in str(error)
        raise
    finally:
        if is_named:
            (logs / folders.IN_USE).unlink(missing_ok=True)
        else:
            shutil.rmtree(logs, ignore_errors=True)


def say(text: str) -> None:
    """Report progress on stderr."""
    print(f"doctor: {text}", file=sys.stderr, flush=True)

"""A real SLURM on this machine: a controller and several nodes, started for a test and ended after it.

Its programs are found in PATH and /usr/sbin (Debian: slurmctld, slurmd, slurm-client), or below
$UNPACKED_SLURM, where the packages were unpacked and not installed.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = Path(os.environ.get("UNPACKED_SLURM", "/"))
_FOLDERS = [str(PREFIX / "usr/bin"), str(PREFIX / "usr/sbin"), *os.environ["PATH"].split(":")]
_LIBRARIES = PREFIX / "usr/lib/x86_64-linux-gnu"


def program(name: str) -> str | None:
    """Where one of SLURM's programs is; Debian adds -wlm to the names of the daemons."""
    return next((found for one in (name, f"{name}-wlm") if (found := shutil.which(one, path=":".join(_FOLDERS)))), None)


def missing() -> str | None:
    """Why no SLURM can be started here; None where one can."""
    absent = [name for name in ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol") if not program(name)]
    if absent:
        return f"SLURM's programs are not here: {', '.join(absent)}; install slurm-wlm, or set UNPACKED_SLURM"
    return None if os.geteuid() == 0 else "SLURM's daemons run as root here"


@dataclass(frozen=True)
class Cluster:
    """A running one. `environment` makes its programs find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a program printed in the cluster's environment; it must end well."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, Restarts, ExitCode, ..."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait_for(self, number: str, *states: str, timeout_s: float = 240) -> dict[str, str]:
        """The job, once it is in one of the states."""
        until = time.monotonic() + timeout_s
        while (found := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, f"the job is {found['JobState']}, not {states}"
            time.sleep(0.3)
        return found


@contextlib.contextmanager
def cluster(folder: Path, nodes: tuple[str, ...] = (socket.gethostname(), "zzz-second")) -> Iterator[Cluster]:
    """A SLURM of these nodes, whose first must be a name of this machine."""
    ports = _free_ports(1 + len(nodes))
    plugins = next(path for path in (_LIBRARIES / "slurm-wlm", _LIBRARIES / "slurm") if path.is_dir())
    lines = [
        "ClusterName=test",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/none",
        "AuthInfo=cred_expire=5",  # a job that is queued again waits so long
        "CredType=cred/none",
        "SlurmUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/controller.pid",
        f"SlurmdPidFile={folder}/%n.pid",
        f"PluginDir={plugins}",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "KillWait=10",
        *(
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000"
            for name, port in zip(nodes, ports[1:], strict=True)
        ),
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "state").mkdir()
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": ":".join(_FOLDERS),
        "LD_LIBRARY_PATH": f"{_LIBRARIES}:{plugins}",
    }
    stepd, daemons = str(program("slurmstepd")), []
    try:
        controller = [str(program("slurmctld")), "-D", "-f", str(folder / "slurm.conf")]
        daemons.append(_daemon(controller, environment, folder / "controller.log"))
        for name in nodes:
            (folder / f"spool-{name}").mkdir()
            words = [str(program("slurmd")), "-D", "-N", name, "-d", stepd, "-f", str(folder / "slurm.conf")]
            daemons.append(_daemon(words, environment, folder / f"{name}.log"))
        found = Cluster(folder, environment)
        _wait_for_nodes(found, len(nodes))
        yield found
        _cancel_all(found)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)


def _cancel_all(found: Cluster) -> None:
    """End what still runs: the daemons leave it running."""
    found.run("scancel", "--user=root")
    until = time.monotonic() + 60
    while found.run("squeue", "--noheader"):
        assert time.monotonic() < until, "SLURM's jobs do not end"
        time.sleep(0.3)


def _daemon(words: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as stream:
        return subprocess.Popen(words, env=environment, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)


def _wait_for_nodes(found: Cluster, count: int) -> None:
    until = time.monotonic() + 60
    while True:
        with contextlib.suppress(AssertionError):
            if found.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").count("\n") == count:
                return
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(found.folder.glob("*.log")))
        assert time.monotonic() < until, f"SLURM's nodes do not come up:\n{logs}"
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]

"""Options and commands that people type from other tools, and what they are called here."""

from collections.abc import Mapping

_RANKS = ("gpus", "num-gpus", "n-gpus", "ngpus", "nproc", "np", "devices", "num-devices", "ranks", "world-size")
_MACHINES = ("nodes", "num-nodes", "machines")
_OF_A_RUN = {"--num-processes": (*_RANKS, "processes"), "--mixed-precision": ("precision", "dtype")}

HABITS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": {
        "--world": (*_RANKS, "num-processes", "processes", "n"),
        "--device": ("cpu", "gpu", "gpu-type", "device-type", "hardware", "accelerator"),
        "--memory": ("gpu-memory", "device-memory", "mem", "vram"),
        "--per-machine": ("gpus-per-node", "gpus-per-machine", "nproc-per-node", "per-node"),
        "--batch-size": ("bs", "micro-batch", "micro-batch-size", "per-device-train-batch-size"),
        "--seq-len": ("seqlen", "seq", "seq-length", "sequence-length", "context", "context-length", "max-length"),
        "--optimizer": ("optim", "opt"),
        "--network": ("bandwidth", "nic"),
    },
    "launch": {
        **_OF_A_RUN,
        "--num-machines": (*_MACHINES, "hosts"),
        "--logs": ("log", "log-folder", "output"),
    },
    "submit": {
        **_OF_A_RUN,
        "--num-machines": (*_MACHINES, "nnodes"),
        "--name": ("job-name", "job"),
        "--to": ("engine", "scheduler"),
        "--time": ("time-limit", "walltime"),
        "--check": ("dry-run",),
    },
}
"""By verb and option of shardkit: what else it is called, without leading dashes."""

COMMANDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {
        "plan": ("estimate", "estimate-memory", "memory"),
        "launch": ("run", "train", "start"),
        "doctor": ("test", "check"),
        "checkpoint merge": ("merge", "merge-weights", "export"),
        "checkpoint verify": ("verify",),
        "config convert": ("convert", "to-fsdp2"),
        "config validate": ("validate",),
    },
    "config": {
        "config --defaults": ("default", "create", "init"),
        "config": ("edit", "update", "change"),
        "config --set": ("set",),
        "config show": ("show", "get", "list", "print"),
        "config validate": ("validate", "check", "test"),
        "config convert": ("convert", "import", "export", "to-fsdp2"),
    },
    "checkpoint": {
        "checkpoint list": ("ls", "list"),
        "checkpoint inspect": ("show", "info"),
        "checkpoint verify": ("check", "test", "validate"),
        "checkpoint merge": ("export", "merge-weights", "consolidate"),
        "checkpoint prune": ("clean", "delete", "gc", "rm"),
    },
}
"""By verb, or as a verb, and command of shardkit: what else it is called."""

OF_ENGINES = ("partition", "account", "qos", "namespace", "queue")


def command_meant(verb: str, typed: str) -> str | None:
    """What an unknown command of this verb means, `check` or `--check` of config; without a verb: an unknown verb."""
    word = _word(typed)
    found = next((name for name, words in COMMANDS.get(verb, {}).items() if word in words), None)
    return f"shardkit {found}" if found and verb else found


def meant(verb: str, typed: str, takes_settings: bool) -> list[str]:
    """What an unknown option of this verb may mean: `--gpus` is `--world` of plan; a setting is given by `--set`."""
    word = _word(typed)
    found = [option for option, words in HABITS.get(verb, {}).items() if word in words]
    if found:
        return found
    if word in OF_ENGINES and verb == "submit":
        return [f"--option {word}=VALUE"]
    if not takes_settings:
        return []
    from shardkit.config.keys import whole_name

    name = whole_name(word.replace("-", "_"))
    return [f"--set {name}=VALUE"] if name else []


def _word(typed: str) -> str:
    """As the tables have it: without leading dashes, `_` as `-`, in small letters."""
    return typed.lstrip("-").replace("_", "-").lower()

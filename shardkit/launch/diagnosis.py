"""Which rank failed first, and why: pure functions from the outcomes of all ranks to a report.

When one rank dies, gloo and NCCL raise errors in the others, or the launcher kills them. Those are consequences. The
cause is the earliest failure that is not a consequence.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardkit.errors import EXIT_CHECK_FAILED, EXIT_MACHINE
from shardkit.launch.rank_files import RankError
from shardkit.wording import counted

_BY_A_SHARED_VALUE = 'decide by a value that is the same on all, as accelerator.reduce(value, "mean") is'

OF_UNLIKE_CALLS = (
    "a call for all ranks may be under `if accelerator.is_main_process`; under FSDP these include a forward, each unit "
    "in it (an expert, a branch), and `.item()` and `full_tensor()` of sharded values; or one rank has caught an error "
    "(`try`, `except`) and left out calls that the others make; or it has left a loop by a value of its own (early "
    f"stopping): {_BY_A_SHARED_VALUE}"
)
"""What makes ranks wait for each other in different collectives."""

_BY_EXIT_CODE: dict[int | None, str] = {
    -signal.SIGABRT: 'if the log says "collective mismatch" (gloo) or "collective operation timeout" (NCCL): '
    + OF_UNLIKE_CALLS,
    0: f"all ranks must leave a loop, and end, together: {_BY_A_SHARED_VALUE}, and not under "
    "`if accelerator.is_main_process`",
}

_BY_MESSAGE = (
    (
        r"^\[Errno 28\] No space left on device$|unable to allocate shared memory",
        "this is often /dev/shm, which the workers of data loaders share: see df -h; docker run --shm-size=16g makes "
        "it larger",
    ),
    (
        "unable to open shared memory object",
        "workers of data loaders share memory in /dev/shm: make it writable, or read without workers (num_workers=0)",
    ),
    (
        "bind: Address already in use",
        "gloo listens on a free port for each group of ranks, and found none: see the ports in use (ss -s) and their "
        "range (sysctl net.ipv4.ip_local_port_range)",
    ),
    (
        r"gloo/transport/tcp(?s:.*)connect",
        "gloo could not connect ranks: they listen on free ports of the interface in GLOO_SOCKET_IFNAME (default: the "
        "one on the route to --main); open all ports between the machines on it",
    ),
    (
        "Unable to find address for: |no socket interface found",
        "GLOO_SOCKET_IFNAME names an interface that this machine does not have (NCCL_SOCKET_IFNAME for NCCL): see "
        "ip address, and name one of this machine; without GLOO_SOCKET_IFNAME it is the one on the route to --main",
    ),
    (
        "Resource temporarily unavailable|can't start new thread",
        "the system allows no more processes or threads: raise ulimit -u, or the container's limit (pids.max)",
    ),
    (
        "got mixed torch.Tensor and DTensor",
        "an operation mixed a sharded parameter and a plain tensor: call the model's forward, or register the method "
        "that uses its parameters, with the module that has it: accelerator.register_forward_method(model, name). A "
        "module that reads weights of one inside it, without a call of that, must not be divided into units: wrap by "
        "class (fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP), or raise fsdp_min_num_params; "
        "p.full_tensor() returns a whole copy",
    ),
    (
        "attempted relative import with no known parent package",
        "start a script of a package by its module's name, in the folder that has the package: shardkit launch -m "
        "package.train",
    ),
    (
        "Encountered gradient which is undefined, but still allreduced",
        "under DDP with ddp_find_unused_parameters, a backward expects gradients of all that its forward used: add up "
        "the losses of one forward, and call backward once",
    ),
    (
        "Expected to mark a variable ready only once",
        "DDP takes the gradient of a parameter from one backward only: recompute by "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); leave parameters that forward did not use out of "
        "a penalty on the weights; or use a sharded strategy",
    ),
    (
        "Trying to backward an extra time",
        "kept products serve one backward: for two through the same blocks (a gradient penalty, retain_graph) set "
        "shardkit.recompute: blocks",
    ),
    (
        "grad can be implicitly created only for scalar outputs",
        'a backward begins at one number: reduce the loss, as loss.mean() does (reduction="none" and a model that '
        "returns a loss for each sample leave that to the script)",
    ),
    (
        "loaded state dict (has a different number of parameter groups|contains a parameter group that doesn't match)",
        "it is the state of an optimizer of other parameters: make the model, what of it is trained, and the "
        "optimizer's groups as when it was saved; accelerator.save_state(folder) and load_state(folder) keep both "
        "together",
    ),
    (
        "module 'torch' has no attribute 'xla'",
        "torch.utils.checkpoint does not know XLA devices: set xla_fsdp_grad_ckpt: true in place of it, or call "
        "torch_xla.utils.checkpoint.checkpoint",
    ),
    (
        r"Expected XLA tensor\. Got|not an XLA tensor|Expected all tensors to be on the same device",
        "a tensor is in host memory: prepare the loader, or send what the script makes itself to accelerator.device; "
        "so are the weights in a copy of a model with fsdp_offload_params: copied.to(accelerator.device)",
    ),
    (
        r"^KeyError: 'xla'|FixedLayout\('xla:",
        "torch.compile's compilers do not train on XLA devices: leave it out; XLA compiles every step by itself",
    ),
    (
        r"device_ready_queues_\.size\(\)",
        "torch counts devices at the first backward of a process: create the Accelerator before it, which starts the "
        "XLA devices",
    ),
    (
        r"No module named .jax.$|^Jax is required",
        "torch_xla computes some operators, as those of nn.GRU, by JAX: pip install 'torch_xla[pallas]', or "
        "another model",
    ),
    (
        r"TraceTypeManual|Expected a single top-level function: .*fsdp|'_Entry' object has no attribute '__|"
        r"unsupported input list type: Tensor\[\]",
        "torch.export, torch.jit and torch.onnx cannot take a sharded model: copy.deepcopy(model), on all ranks, is a "
        "whole one; export that",
    ),
    (
        r"^'\w+' object has no attribute 'module'$",
        "only DDP's wrapper has .module; a sharded model, and that of one process, is the script's own: use "
        "accelerator.unwrap_model(model), which is right for all of them; to save weights, on every rank "
        "accelerator.save_model(model, folder)",
    ),
    (
        r"^'(AcceleratedOptimizer|AcceleratedScheduler|PreparedLoader)' object is not callable$",
        "prepare returns its arguments in the order in which they were given: "
        "model, optimizer = accelerator.prepare(model, optimizer)",
    ),
    (
        "Default process group has not been initialized",
        "Accelerator() starts the process group, so create it before; one process has none, unless the script starts "
        "it, before Accelerator(): use accelerator.reduce, gather and wait_for_everyone, which need none, or write "
        "`if accelerator.num_processes > 1:` before calls of torch.distributed",
    ),
    (
        "trying to initialize the default process group twice",
        "Accelerator() has started the process group: remove init_process_group from the script",
    ),
    (
        "Could not resolve the process group",
        "a sharded tensor was read after the ranks had left their process group: call end_training() after the last "
        "save, as the last line of the script",
    ),
    (
        "invalid python storage",
        "a sharded tensor was written, or loaded into, as a plain one: call accelerator.save_model(model, folder) on "
        "every rank, or state_dict = accelerator.get_state_dict(model) there, which rank 0 then writes; to load it "
        "accelerator.prepare_model(model, weights=folder); or tensor.full_tensor() on every rank, of a single tensor; "
        "an optimizer's state is saved by accelerator.save_state(folder). A library that writes the model on one rank "
        "only needs DDP",
    ),
)
"""(regular expression, advice) for messages of errors."""

OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
)
"""Out-of-memory messages of torch and its libraries that are not torch.OutOfMemoryError."""

OF_THE_CAUSE = "    "
"""Begins the further lines of the cause in a report."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. `exit_code` is negative for a signal, None if the rank did not end by itself."""

    rank: int
    pid: int = 0
    exit_code: int | None = None
    ended_s: float | None = None
    error: RankError | None = None
    was_killed: bool = False
    """Whether the launcher killed it after another rank had failed."""
    phase: str = ""
    step: int = 0
    since_s: float = 0.0
    """When it entered its last phase."""
    is_timed_out: bool = False
    """Whether its log says that a collective timed out: NCCL then aborts the process."""
    memory_kills: int = 0
    """How many processes of the job on its machine the kernel has ended for lack of memory meanwhile."""

    @property
    def time_s(self) -> float:
        """When it failed, as far as known."""
        if self.error is not None:
            return self.error.time_s
        return float("inf") if self.ended_s is None else self.ended_s

    def shifted(self, seconds: float) -> "RankOutcome":
        """With all times shifted by `seconds`."""
        error = self.error and replace(self.error, time_s=self.error.time_s + seconds)
        ended_s = None if self.ended_s is None else self.ended_s + seconds
        return replace(self, error=error, ended_s=ended_s, since_s=self.since_s + seconds)


@dataclass(frozen=True)
class Diagnosis:
    """The rank that failed first, the report on it, and the exit code of the run."""

    rank: int
    cause: str
    where: str
    others: tuple[str, ...]
    exit_code: int
    outcome: RankOutcome


def diagnose(outcomes: Sequence[RankOutcome]) -> Diagnosis:
    """The root cause, if at least one rank failed."""
    root = root_of(outcomes)
    others = tuple(_consequence(outcome) for outcome in outcomes if outcome is not root and _failed(outcome))
    where = root.error.where if root.error is not None else ""
    return Diagnosis(root.rank, cause_of(root), where, others, exit_code_of(root), root)


def root_of(outcomes: Sequence[RankOutcome]) -> RankOutcome:
    """The outcome that caused the others."""
    own = [outcome for outcome in outcomes if _is_own_failure(outcome)]
    if own:
        missing = [outcome for outcome in outcomes if _did_not_arrive(outcome)]
        if missing and all(outcome.is_timed_out for outcome in own):
            return min(missing, key=lambda outcome: (outcome.step, outcome.since_s))
        # NCCL and gloo abort a process that lost a peer, so an abort is the cause only if there is no other failure.
        return min(own, key=lambda outcome: (outcome.exit_code == -signal.SIGABRT, outcome.time_s))
    left = [outcome for outcome in outcomes if outcome.exit_code == 0]
    if left:
        return min(left, key=lambda outcome: outcome.time_s)
    # A rank that did not lose a peer comes first: it may be the one that the others lost.
    failed = [outcome for outcome in outcomes if _failed(outcome)] or list(outcomes)
    return min(failed, key=lambda outcome: (_lost_a_peer(outcome), outcome.time_s))


def cause_of(outcome: RankOutcome) -> str:
    """What happened to a rank, in one or more lines."""
    error, code = outcome.error, outcome.exit_code
    if error is not None:
        return f"{error.kind}: {error.message}" if error.message else error.kind
    if code == 0:
        return "exited with code 0 while the other ranks still waited for it"
    if _did_not_arrive(outcome):
        return "did not arrive: the other ranks timed out waiting for it, and the launcher killed it"
    if code is not None and code < 0:
        is_for_memory = code == -signal.SIGKILL and outcome.memory_kills
        hint = " (by the kernel, for lack of memory)" if is_for_memory else _SIGNAL_HINTS.get(-code, "")
        return f"killed by {signal_name(-code)}{hint}"
    return f"exited with code {code} without a Python exception"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(outcome: RankOutcome) -> int:
    """The exit code of a run with this root cause: the rank's exit code, or 128 + the signal; never 0. That of a hang
    for a rank that did not arrive: the launcher's SIGKILL says nothing of its memory."""
    if outcome.error is not None:
        return outcome.error.exit_code
    code = outcome.exit_code
    if _did_not_arrive(outcome):
        return EXIT_MACHINE
    if code is None or code == 0:
        return EXIT_CHECK_FAILED
    return code if code > 0 else 128 - code


def render(diagnosis: Diagnosis, started_s: float, log_dir: str, saved_step: int = -1) -> str:
    """The report at the end of a failed run, cause first. `saved_step`: step of the newest checkpoint; -1: none."""
    outcome = diagnosis.outcome
    where = f" ({diagnosis.where})" if diagnosis.where else ""
    after = f", after {outcome.time_s - started_s:.1f} s" if outcome.time_s < float("inf") else ""
    phase = outcome.phase if outcome.phase.startswith("after ") else f"in {outcome.phase}"
    step = f", at step {outcome.step} {phase}" if outcome.phase not in {"", "starting"} else ""
    first, *more = diagnosis.cause.split("\n")
    next_step = _next_step(outcome)
    lines = [f"launch: rank {diagnosis.rank} failed first: {first}{where}{after}{step}."]
    lines += [f"{OF_THE_CAUSE}{line}" for line in more]
    if diagnosis.others:
        lines.append(f"  then     {'; '.join(diagnosis.others[:4])}{_and_more(len(diagnosis.others) - 4)}")
    if saved_step >= 0:
        lines.append(f"  saved    step {saved_step}; resume with --resume auto")
    if next_step:
        lines.append(f"  next     {next_step}")
    lines.append(f"  logs     {log_dir}/rank{diagnosis.rank}.log, and rank*.log of the other ranks")
    lines.append(f"  exit     {diagnosis.exit_code}")
    return "\n".join(lines)


def _next_step(outcome: RankOutcome) -> str:
    """Advice for an error of torch whose message has none; empty if there is none."""
    error = outcome.error
    if error is None:
        is_for_memory = outcome.exit_code == -signal.SIGKILL and outcome.memory_kills
        return _on_memory(outcome) if is_for_memory else _BY_EXIT_CODE.get(outcome.exit_code, "")
    if error.message == "EOF when reading a line":
        return (
            "only rank 0 reads the terminal, where the launch has one: make the answer an argument of the script, "
            "which all ranks get"
        )
    if error.rank and error.kind == "BdbQuit":
        return (
            "only rank 0 reads the terminal; the others wait for it at their next collective: "
            "if accelerator.is_main_process: breakpoint()"
        )
    if error.kind in {"OutOfMemoryError", "MemoryError"} or any(sign in error.message for sign in OUT_OF_MEMORY_SIGNS):
        return (
            "see what uses the memory, and what each change would save, with the function that builds the model: "
            "shardkit plan --model MODULE:FUNCTION"
        )
    # torch.onnx's own message does not begin with the cause, which is in the traceback.
    text = error.traceback if error.kind == "TorchExportError" else error.message
    found = (advice for pattern, advice in _BY_MESSAGE if re.search(pattern, text))
    return next(found, _on_memory(outcome))


def _on_memory(outcome: RankOutcome) -> str:
    """What to do where the kernel has ended processes for lack of memory: the rank, or a worker of its data loader."""
    if not outcome.memory_kills:
        return ""
    return (
        f"the kernel has ended {counted(outcome.memory_kills, 'process', 'processes')} of this job for lack of host "
        "memory: give the job more (--mem, the container's limit), or use less: fewer workers of data loaders "
        "(num_workers, prefetch_factor), fewer ranks on a machine"
    )


def saved(step: int) -> str:
    """A line on the newest checkpoint; empty if there is none (-1)."""
    return f"\n  Last checkpoint: step {step}; resume with --resume auto." if step >= 0 else ""


def _is_own_failure(outcome: RankOutcome) -> bool:
    """Whether a rank failed by itself: not because of a lost peer, and not because the launcher killed it."""
    if outcome.error is not None:
        return not _lost_a_peer(outcome)
    return _failed(outcome) and not outcome.was_killed


def _did_not_arrive(outcome: RankOutcome) -> bool:
    """Whether the launcher killed it, without an error of its own, after others had failed."""
    return outcome.was_killed and outcome.error is None and outcome.exit_code not in (0, -signal.SIGTERM)


def _lost_a_peer(outcome: RankOutcome) -> bool:
    return outcome.error is not None and outcome.error.is_lost_peer


def _failed(outcome: RankOutcome) -> bool:
    return outcome.error is not None or outcome.exit_code != 0


def _consequence(outcome: RankOutcome) -> str:
    where = f" ({outcome.error.where})" if outcome.error is not None and outcome.error.where else ""
    if _lost_a_peer(outcome):
        return f"rank {outcome.rank} lost its peer{where}"
    if outcome.was_killed and outcome.error is None:
        return f"rank {outcome.rank} was killed by the launcher"
    if outcome.is_timed_out:
        return f"rank {outcome.rank} waited for it until a collective timed out, and aborted"
    return f"rank {outcome.rank}: {cause_of(outcome).splitlines()[0]}{where}"


def _and_more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by a user, by the scheduler, or by the kernel when memory ran out: see dmesg)",
    signal.SIGSEGV: " (a crash in native code; the stack is in the log)",
    signal.SIGABRT: " (an abort in native code, such as NCCL's when a collective timed out; the log has its stack)",
    signal.SIGBUS: " (often because /dev/shm is full)",
}

"""Which rank failed first, and why: the report, from what ranks leave behind. Without ranks."""

import re
from dataclasses import replace

import pytest

from shardkit.errors import ConfigError, Preempted
from shardkit.launch import (
    diagnosis,
    failure,
)
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.rank_files import RankError


def error(rank: int, kind: str = "ValueError", lost: bool = False, time_s: float = 1.0, code: int = 1) -> RankError:
    return RankError(rank, kind, "words", "train.py:4 in step", "Traceback", code, lost, time_s)


def test_an_abort_after_a_timeout_of_nccl_is_known_by_the_log(tmp_path):
    log = tmp_path / "rank0.log"
    assert not failure.tells_of_timeout(log)
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)\n"
    log.write_text("step\n" * 20_000 + said + "  File x\n" * 1000)
    assert failure.tells_of_timeout(log)
    log.write_text(said + "step\n" * 20_000)
    assert not failure.tells_of_timeout(log)
    ended = [
        RankOutcome(0, exit_code=-6, ended_s=9.0, step=4, is_timed_out=True),
        RankOutcome(1, exit_code=-9, was_killed=True, phase="data", step=4),
    ]
    said = diagnosis.render(diagnosis.diagnose(ended), 0.0, "runs/x")
    assert said.startswith("launch: rank 1 failed first: did not arrive: the other ranks timed out waiting for"), said
    assert "  then     rank 0 waited for it until a collective timed out, and aborted\n" in said


@pytest.mark.parametrize(
    ("code", "message", "kills", "is_told"),
    [
        (-9, "", 1, True),
        (-9, "", 0, False),
        (1, "DataLoader worker (pid(s) 7) exited unexpectedly", 2, True),
        (1, "DataLoader worker (pid(s) 7) exited unexpectedly", 0, False),
        (1, "module 'torch' has no attribute 'xla'", 1, False),
    ],
)
def test_what_the_kernel_has_ended_for_lack_of_memory_is_named(code, message, kills, is_told):
    own = RankError(0, "RuntimeError", message, "", "", 1, False, 1.0) if message else None
    found = diagnosis.diagnose([RankOutcome(0, exit_code=code, error=own, memory_kills=kills), RankOutcome(1)])
    said = diagnosis.render(found, 0.0, "runs/x")
    assert ("the kernel has ended" in said) == is_told
    assert ("killed by SIGKILL (by the kernel, for lack of memory)" in said) == (is_told and not message)


@pytest.mark.fault_row(26)
@pytest.mark.fault_row(27)
@pytest.mark.parametrize(
    ("outcomes", "rank", "code"),
    [
        (
            [
                RankOutcome(0, exit_code=1, error=error(0, lost=True)),
                RankOutcome(1, exit_code=1, error=error(1, time_s=2)),
            ],
            1,
            1,
        ),
        ([RankOutcome(0, exit_code=-6, ended_s=1.0), RankOutcome(1, exit_code=1, error=error(1, time_s=2))], 1, 1),
        ([RankOutcome(0, exit_code=-6, ended_s=1.0), RankOutcome(1, exit_code=-9, was_killed=True)], 0, 134),
        (
            [
                RankOutcome(0, exit_code=-6, ended_s=1.0, step=4, is_timed_out=True),
                RankOutcome(1, exit_code=-9, was_killed=True, step=4, since_s=3.0),
                RankOutcome(2, exit_code=-9, was_killed=True, step=3, since_s=5.0),
            ],
            2,
            4,
        ),
        ([RankOutcome(0, exit_code=0, ended_s=3.0), RankOutcome(1, exit_code=1, error=error(1, lost=True))], 0, 1),
        (
            [
                RankOutcome(0, exit_code=0),
                RankOutcome(1, error=error(1, lost=True)),
                RankOutcome(2, exit_code=-15, was_killed=True),
            ],
            0,
            1,
        ),
        ([RankOutcome(0, exit_code=0), RankOutcome(1, exit_code=1, error=error(1))], 1, 1),
        (
            [RankOutcome(0, exit_code=1, error=error(0, lost=True)), RankOutcome(1, exit_code=-15, was_killed=True)],
            1,
            143,
        ),
        ([RankOutcome(0, exit_code=-15, was_killed=True), RankOutcome(1, exit_code=7, ended_s=1.0)], 1, 7),
        (
            [RankOutcome(0, exit_code=3, error=error(0, code=3, time_s=2)), RankOutcome(1, error=error(1, time_s=1))],
            1,
            1,
        ),
    ],
)
def test_the_cause_is_the_first_end_that_is_no_consequence(outcomes, rank, code):
    found = diagnosis.diagnose(outcomes)
    assert (found.rank, found.exit_code) == (rank, code)


def test_the_words_for_a_failure():
    found = diagnosis.diagnose(
        [
            RankOutcome(0, exit_code=1, error=error(0, lost=True, time_s=12.0)),
            RankOutcome(1, exit_code=1, error=error(1, time_s=11.5), phase="backward", step=7),
        ]
    )
    first, *rest = diagnosis.render(found, 10.0, "runs/x").splitlines()
    assert first == (
        "launch: rank 1 failed first: ValueError: words (train.py:4 in step), after 1.5 s, at step 7 in backward."
    )
    assert rest[0] == "  then     rank 0 lost its peer (train.py:4 in step)"
    assert rest[1].startswith("  logs     runs/x/rank1.log")
    saved = diagnosis.render(found, 10.0, "runs/x", saved_step=5)
    assert "  saved    step 5; resume with --resume auto" in saved
    on_the_host = replace(error(0, kind="RuntimeError"), message="DefaultCPUAllocator: can't allocate memory")
    on_a_tpu = replace(on_the_host, message="RESOURCE_EXHAUSTED: Attempting to allocate 4.00G. That was not possible.")
    for lack in (error(0, kind="OutOfMemoryError"), on_the_host, on_a_tpu):
        out_of_memory = diagnosis.diagnose([RankOutcome(0, exit_code=1, error=lack)])
        text = diagnosis.render(out_of_memory, 0.0, "runs/x")
        assert "builds the model: shardkit plan --model MODULE:FUNCTION" in text
    message = "aten.mm: got mixed torch.Tensor and DTensor, need to convert all"
    mixed = RankOutcome(0, exit_code=1, error=replace(error(0), message=message))
    text = diagnosis.render(diagnosis.diagnose([mixed]), 0.0, "runs/x")
    assert "accelerator.register_forward_method(model, name)" in text
    assert "raise fsdp_min_num_params" in text
    written = RankOutcome(0, exit_code=1, error=replace(error(0), message="data pointer on an invalid python storage."))
    text = diagnosis.render(diagnosis.diagnose([written]), 0.0, "runs/x")
    assert "state_dict = accelerator.get_state_dict(model)" in text
    for message, advice in (
        ("Encountered gradient which is undefined, but still allreduced by DDP reducer.", "call backward once"),
        ("Could not resolve the process group registered under the name 0", "end_training() after the last save"),
        ("Expected to mark a variable ready only once. This error is caused by", "use_reentrant=False"),
        ("Expected to mark a variable ready only once. This error is caused by", "out of a penalty on the weights"),
        ("Trying to backward an extra time. You are only allowed", "shardkit.recompute: blocks"),
        ("Expected XLA tensor. Got: torch.FloatTensor", "prepare the loader, or send what"),
        ("Expected all tensors to be on the same device, but found", "copied.to(accelerator.device)"),
        ("attempted relative import with no known parent package", "shardkit launch -m package.train"),
        ("KeyError: 'xla'\n\nSet TORCHDYNAMO_VERBOSE=1", "XLA compiles every step by itself"),
        ("LoweringException: AssertionError: \n FixedLayout('xla:0', torch", "torch.compile's compilers do not train"),
        ("Default process group has not been initialized, please", "`if accelerator.num_processes > 1:`"),
    ):
        twice = RankOutcome(0, exit_code=1, error=replace(error(0), message=message))
        assert advice in diagnosis.render(diagnosis.diagnose([twice]), 0.0, "runs/x")
    aborted = diagnosis.diagnose([RankOutcome(0, exit_code=-6, ended_s=1.0)])
    said = 'if the log says "collective mismatch" (gloo) or "collective operation timeout" (NCCL): a call'
    assert said in diagnosis.render(aborted, 0.0, "runs/x")
    for rank, kind in ((0, "BdbQuit"), (1, "BdbQuit"), (1, "ValueError")):  # a debugger, without a terminal on rank 1
        debugged = RankOutcome(rank, exit_code=1, error=error(rank, kind))
        text = diagnosis.render(diagnosis.diagnose([debugged]), 0.0, "runs/x")
        assert ("if accelerator.is_main_process: breakpoint()" in text) == (rank == 1 and kind == "BdbQuit")
    assert diagnosis.signal_name(9) == "SIGKILL"
    assert diagnosis.signal_name(77) == "signal 77"


def raised(function) -> BaseException:
    try:
        function()
    except BaseException as problem:
        return problem
    raise AssertionError("nothing was raised")


def lose_peer():
    raise RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711"
    )


@pytest.mark.parametrize(
    "message",
    [
        "NCCL communicator was aborted on rank 1.",
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.28.9\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_what_nccl_says_of_a_lost_peer_is_no_cause(message):
    assert failure.is_lost_peer(RuntimeError(message))


def lose_peer_after_an_error():
    try:
        raise ValueError("the cause")
    except ValueError:
        lose_peer()


def fail_because_of_a_lost_peer():
    try:
        lose_peer()
    except RuntimeError as problem:
        raise ValueError("saving failed") from problem


class WithoutText(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


def test_an_exception_becomes_a_record():
    lost = failure.describe(0, raised(lose_peer), set())
    assert lost.is_lost_peer
    assert lost.where.startswith("tests/test_diagnosis.py:")
    assert lost.where.endswith("in lose_peer")
    hidden = failure.describe(0, raised(lose_peer_after_an_error), set())
    assert (hidden.is_lost_peer, hidden.kind, hidden.message) == (False, "ValueError", "the cause")
    assert failure.describe(0, raised(fail_because_of_a_lost_peer), set()).is_lost_peer
    assert "test_diagnosis" not in failure.describe(0, raised(lose_peer), {__file__}).traceback
    assert failure.message_of(ConfigError(["one", "two", "three", "four"])).splitlines()[-1] == "four"
    assert failure.message_of(ValueError("one\ntwo\n\nthree\nfour")) == "one\ntwo\nthree"
    assert failure.message_of(WithoutText()) == "<exception str() failed>"
    assert failure.exit_code_of(SystemExit(5)) == 5
    assert failure.exit_code_of(SystemExit("words")) == 1
    assert failure.exit_code_of(SystemExit()) == 0
    assert failure.exit_code_of(Preempted("")) == 75
    assert failure.exit_code_of(KeyboardInterrupt()) == 130


def test_an_error_in_a_worker_of_a_data_loader_is_told_with_its_own_line():
    from torch._utils import ExceptionWrapper

    def get_item(error):
        raise error

    def carried(error):
        try:
            get_item(error)
        except Exception:
            wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
        return failure.message_of(raised(wrapper.reraise))

    caught = (
        r"Caught KeyError in DataLoader worker process 0 \(tests/test_diagnosis.py:\d+ in get_item\): KeyError: 'x'"
    )
    assert re.fullmatch(caught, carried(KeyError("x")))
    assert carried(ValueError("one\ntwo")).endswith("in get_item): ValueError: one\ntwo")
    full = "unable to allocate shared memory(shm) for file </torch_1_0>: No space left on device (28)"
    error = replace(failure.describe(1, RuntimeError(), set()), message=carried(RuntimeError(full)))
    said = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    assert full in said and "  next     this is often /dev/shm" in said


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("[Errno 28] No space left on device", "this is often /dev/shm"),
        (
            "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9",
            "GLOO_SOCKET_IFNAME names an interface that this machine does not have",
        ),
        ("[Errno 28] No space left on device: 'a.txt'", ""),
        ("unable to open shared memory object </torch_1_0> in read-write mode: Read-only file system (30)", "workers"),
        ("[/gloo/gloo/transport/tcp/listener.cc:1] bind: Address already in use", "gloo listens on a free port"),
        ("[/gloo/transport/tcp/pair.cc:1]\nfailed to connect", "gloo could not connect ranks"),
        ("[/gloo/transport/tcp/pair.cc:1] timed out", ""),
        ("grad can be implicitly created only for scalar outputs", "a backward begins at one number"),
        (
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            "it is the state of an optimizer of other parameters",
        ),
        ("'Gpt' object has no attribute 'module'", "only DDP's wrapper has .module"),
        ("'AcceleratedOptimizer' object is not callable", "prepare returns its arguments in the order"),
        ("EOF when reading a line", "only rank 0 reads the terminal, where the launch has one: make the answer"),
        ("trying to initialize the default process group twice!", "Accelerator() has started the process group"),
        ('iter->isIntList() INTERNAL ASSERT FAILED at "torch/csrc/autograd/TraceTypeManual.cpp":238', "torch.export, "),
        ("'_Entry' object has no attribute '__code__'", "torch.export, "),
        ("unsupported input list type: Tensor[]", "torch.export, "),  # by torch.jit.trace on CPU ranks
        ("can't start new thread", "the system allows no more processes or threads: raise ulimit -u"),
    ],
)
def test_errors_of_libraries_get_advice(message, advice):
    error = replace(failure.describe(1, RuntimeError(), set()), message=message)
    said = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    given = re.search(r"  next     (.*)", said)
    assert (given[1] if given else "").startswith(advice)
    assert bool(given) is bool(advice)


def test_an_export_to_onnx_gets_the_advice_on_its_cause():
    said = failure.describe(1, RuntimeError("Failed to export the model"), set())
    error = replace(
        said, kind="TorchExportError", traceback="AttributeError: '_Entry' object has no attribute '__code__'\n"
    )
    report = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    assert "  next     torch.export, torch.jit and torch.onnx cannot take a sharded model" in report

"""Conversations with the wizard, for tests: keys go in through prompt_toolkit's own pipe, a file comes out."""

from pathlib import Path

from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from shardkit.config.hardware import Device, Hardware
from shardkit.wizard.inplace import QuestionaryPrompter
from shardkit.wizard.prompter import PlainPrompter
from shardkit.wizard.run import WizardOptions, converse

GIB = 2**30
EIGHT_GPUS = Hardware((Device("NVIDIA H100", 80 * GIB, "cuda", 9.0),) * 8, cores=64, memory_bytes=1024 * GIB)
OLD_GPUS = Hardware((Device("Tesla V100", 32 * GIB, "cuda", 7.0),) * 2, cores=16, memory_bytes=128 * GIB)
CPU_ONLY = Hardware((), cores=2, memory_bytes=16 * GIB)
SMALL_GPT = "gpt:layers=4,hidden=256,heads=4,vocab=1000"

ENTER, DOWN, UP, BACK, STOP = "\r", "\x1b[B", "\x1b[A", "\x02", "\x03"


def talk(keys: str, hardware: Hardware = EIGHT_GPUS, **options) -> int:
    """The exit code of a conversation in which these keys are pressed. Fails where it needs more of them."""
    with create_pipe_input() as pipe:
        pipe.send_text(keys + STOP)
        return converse(WizardOptions(**options), QuestionaryPrompter(pipe, DummyOutput()), hardware)


def talk_plainly(lines: list[str], hardware: Hardware = EIGHT_GPUS, **options) -> int:
    """The same in plain mode: lines are typed."""
    left = iter([*lines])

    def read(prompt: str) -> str:
        print(prompt, end="")
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return converse(WizardOptions(**options), PlainPrompter(read=read), hardware)


def project(folder: Path, monkeypatch) -> Path:
    """An empty project with a separate state folder, as the current folder."""
    (folder / "project").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.chdir(folder / "project")
    return folder / "project"

"""The docs page of all questions, from the records."""

from shardkit.config.hardware import Device, Hardware
from shardkit.config.keys import all_keys
from shardkit.wizard.answers import settle
from shardkit.wizard.question import Question
from shardkit.wizard.questions import QUESTIONS
from shardkit.wizard.situation import ELSEWHERE, SEVERAL, TPU, Situation

HEAD = """# The questions of `shardkit config`

In the order in which they are asked. Those marked "advanced" take their default unless they are chosen in the review.
Every answer that has a key can be given by flag instead: `--set KEY=VALUE`.
This page is written by `make docs` from the same records that the wizard asks from.
"""


def questions_page() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *(_section(question) for question in QUESTIONS)])


def _section(question: Question) -> str:
    lines = [f"## {question.title}", ""]
    if _yaml_name(question):
        lines.append(f"- key: `{_yaml_name(question)}`")
    lines.append(f"- asked: {question.when}")
    if not question.options(_example(question)) or question.kind == "several":
        lines.append("- answer: typed")
    for option in question.options(_example(question)):
        lines.append(f"- `{option.label}`: {option.consequence}")
    lines += ["", question.help.replace("\n", "\n\n"), ""]
    return "\n".join(lines)


def _yaml_name(question: Question) -> str:
    """The key in the file, or keys where one answer fills two."""
    several = {"address": "main_process_ip, main_process_port", "processes_per_machine": "num_processes"}
    names = {key.name: key.yaml_name for key in all_keys().values()}
    return names.get(question.key) or several.get(question.key, "")


def _example(question: Question) -> Situation:
    """A situation in which the question applies, and nothing is ruled out: two machines of eight GPUs, another
    machine, or a TPU."""
    gpu = Device("NVIDIA H100", 80 * 2**30, "cuda", 9.0)
    start = Situation(Hardware((gpu,) * 8, 64, 2**40))
    on_gpus = settle(start, {"where": SEVERAL})
    elsewhere = settle(start, {"where": ELSEWHERE, "gpu": "other"})
    on_tpu = settle(start, {"where": TPU, "tpu_use_cluster": True})
    return next(here for here in (on_gpus, elsewhere, on_tpu) if question.applies(here) or here is on_tpu)

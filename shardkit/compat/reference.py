"""The docs page for those who come from Accelerate, from the tables of this package and a script's diff."""

from pathlib import Path

from shardkit.compat import migrate
from shardkit.compat.differences import DIFFERENCES
from shardkit.compat.members import ARGUMENTS, MEMBERS
from shardkit.compat.names import REFUSED

HEAD = """# Come from Accelerate

This page is written by `make docs` from `shardkit/compat/`.

Three ways, from the quickest:

1. **Change nothing.** `shardkit launch --as-accelerate train.py` runs a script, and the libraries that it uses (the
   Transformers Trainer, TRL, diffusers), with `import accelerate` and everything below it resolved to
   `shardkit.compat`, whether or not accelerate is installed. Settings come from `shardkit.yaml`. At the end of the run,
   rank 0 says which names stood in, which were refused, and what differs in meaning; the whole list is in
   `accelerate.txt` among the logs. `--check` says beforehand what the script's own text names, and starts nothing.
2. **Change the import.** `from shardkit.compat import Accelerator` in place of `from accelerate import Accelerator`,
   and the same for every module below; `shardkit migrate train.py` prints the diff, `--write` makes it.
3. **Use shardkit's own.** `from shardkit import Accelerator` has the methods below with shardkit's own arguments, and
   takes settings from objects too, see [settings in code](how-to/settings-in-code.md).

A configuration file of Accelerate's is read as it is: `shardkit launch --config accelerate.yaml train.py`, see
[configure](how-to/configure.md). A training state that Accelerate saved is converted by
`shardkit checkpoint convert FOLDER -o checkpoints`, see
[checkpoints](how-to/checkpoints.md#go-on-with-a-run-of-accelerate).
"""

TRAINER = """## The Transformers Trainer

`Trainer` and `Seq2SeqTrainer` run with `--as-accelerate` in one process, by DDP and by strategies 1, 2 and 4, on the
CPU too. Losses are those of one process with the same global batch. Checkpoints of the Trainer are resumed by
`resume_from_checkpoint`, also in the middle of an epoch; under FSDP their `pytorch_model_fsdp_0` and `optimizer_0` hold
checkpoints of shardkit. Where nobody has chosen `fsdp_state_dict_type`, it is FULL_STATE_DICT in such a run: only then
does the Trainer write a model for `from_pretrained`. Gradient accumulation is the Trainer's own
(`gradient_accumulation_steps` of `TrainingArguments`).

## Accelerate's own tests

Of the scripts that test Accelerate in its own package, `test_sync` ends at the last, short window (above), `test_ops`
at the check of a padding whose shapes differ (here they are compared where they are gathered), `test_script` at the
order of shuffled data, and `test_distributed_data_loop` at `even_batches=False`.
"""


def migration_page(script: Path) -> str:
    """The page, in Markdown. `script`: one that was written for Accelerate, whose diff is shown."""
    change, found = migrate.diff(script)
    change = change.replace(str(script), script.name)
    parts = [HEAD, _differences(), TRAINER, _members(), _arguments(), _refused(), _example(change)]
    remarks = "\n".join(f"- `{line}`" for line in migrate.remarks(found))
    last = f"Below it, `shardkit migrate train.py` says what an import does not change:\n\n{remarks}\n"
    return "\n".join([*parts, last])


def _differences() -> str:
    rows = [f"| {one.text} | {one.reason} |" for one in DIFFERENCES]
    return "\n".join(["## What differs, on purpose", "", "| here | because |", "|---|---|", *rows, ""])


def _members() -> str:
    rows = [f"| `{name}` | {text} |" for name, text in MEMBERS.items()]
    return "\n".join([f"## The {len(MEMBERS)} members of Accelerator", "", "| member | here |", "|---|---|", *rows, ""])


def _arguments() -> str:
    rows = [f"| `{name}` | {text} |" for name, text in ARGUMENTS.items()]
    head = (
        "## Arguments of Accelerator\n\nAll are taken; these mean something else, or are refused where they are given."
    )
    return "\n".join([head, "", "| argument | here |", "|---|---|", *rows, ""])


def _refused() -> str:
    """What is refused, by what to use instead."""
    names: dict[str, list[str]] = {}
    for module, table in REFUSED.items():
        for instead, words in table.items():
            names.setdefault(instead, []).extend(f"{module}.{word}" if module else word for word in words.split())
    rows = [f"| {', '.join(f'`{name}`' for name in found)} | {instead} |" for instead, found in names.items()]
    head = "## Names that are refused\n\nThey can be imported and compared; calling one raises, with these words."
    return "\n".join([head, "", "| name | instead |", "|---|---|", *rows, ""])


def _example(change: str) -> str:
    return f"## A script's diff\n\n```diff\n{change}```\n"

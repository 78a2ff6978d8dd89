"""Scripts for Accelerate that are read: what migrate changes, what a scan finds, and what differs in a run."""

import subprocess
from pathlib import Path

import pytest

from shardkit.cli.main import run
from shardkit.compat import migrate, names, scan
from shardkit.compat.differences import DIFFERENCES, VARIABLE, choices
from shardkit.compat.members import MEMBERS
from shardkit.compat.touched import Touched, report
from shardkit.errors import UsageError

SCRIPT = """\
import accelerate.utils as helpers
import accelerate
from accelerate import (
    Accelerator,
    DeepSpeedPlugin as Plugin,
)

accelerator = Accelerator(rng_types=["torch"], deepspeed_plugin=Plugin())
schedule = get_scheduler("linear", num_training_steps=args.steps * accelerator.num_processes)
accelerate.utils.gather(helpers.no_such_thing)
accelerator.lomo_backward(1, 2)
"""


def test_migrate_changes_the_imports_and_nothing_else(tmp_path):
    changed = migrate.change_in(SCRIPT).new.splitlines()
    assert changed[:3] == [
        "import shardkit.compat.utils as helpers",
        "import shardkit.compat as accelerate",
        "from shardkit.compat import (",
    ]
    assert changed[3:] == SCRIPT.splitlines()[3:]
    assert migrate.change_in("\n".join(changed)).new == "\n".join(changed), "once is enough"
    (tmp_path / "train.py").write_text(SCRIPT)
    change = migrate.change_of(tmp_path / "train.py")
    text = change.diff()
    assert text.count("\n+") == 4 and text.count("\n-") == 3  # with the lines of file names
    said = migrate.remarks(change.found)
    assert any(line.startswith(f"{tmp_path}/train.py:9: num_processes: the schedule's length") for line in said)
    assert any("or launch with --as-accelerate --accelerates-meaning scheduler." in line for line in said)
    with pytest.raises(UsageError, match=r"migrate: script.py:1: not valid Python"):
        migrate.change_in("def (")
    with pytest.raises(UsageError, match=r"run.sh: only Python scripts are changed .* --as-accelerate` for"):
        migrate.change_in("accelerate launch \\\n  train.py\n", Path("run.sh"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import accelerate_extra, accelerate", "import accelerate_extra, shardkit.compat as accelerate"),
        ("import accelerate, accelerate.utils, os", "import {0}, {0}, os".format("shardkit.compat as accelerate")),
        ("import accelerate; import accelerate", "import {0}; import {0}".format("shardkit.compat as accelerate")),
        ("from  accelerate  import gather", "from  shardkit.compat  import gather"),
        ("text = 'éééééééééé'; import accelerate.utils as a", "text = 'éééééééééé'; import shardkit.compat.utils as a"),
        ("\ufefffrom accelerate import gather", "\ufefffrom shardkit.compat import gather"),
    ],
)
def test_migrate_changes_every_import_of_a_line(old, new):
    assert migrate.change_in(f"{old}\n").new == f"{new}\n"


def test_a_diff_of_a_last_line_without_an_end_is_one_for_patch(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nfrom accelerate import gather")
    patch = ["patch", "--quiet", str(script)]
    subprocess.run(patch, input=migrate.change_of(script).diff(), text=True, check=True)
    assert script.read_text() == "import os\nfrom shardkit.compat import gather"


def test_migrate_names_imports_by_a_text(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        'import importlib\nstate = importlib.import_module("accelerate.state")\n'
        'whole = __import__("accelerate")\nother = importlib.import_module("accelerate_extra")\n'
    )
    said = migrate.remarks(migrate.change_of(script).found)
    assert [line.split(": is ")[0] for line in said] == [f"{script}:2: accelerate.state", f"{script}:3: accelerate"]
    assert all("write shardkit.compat in it." in line for line in said)


def test_migrate_names_commands_that_start_accelerates_launcher(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(
        '"""accelerate launch sweep.py"""\nimport os, subprocess\n'
        'subprocess.run(["accelerate", "launch", "train.py"])\n'
        'os.system(f"accelerate launch {os.name}")\nnames = ["accelerate", "deepspeed"]\n'
    )
    said = migrate.remarks(migrate.change_of(script).found)
    assert [line.split(": starts ")[0] for line in said] == [f"{script}:{line}: accelerate launch" for line in (3, 4)]
    assert all("write shardkit launch --as-accelerate" in line for line in said)


def test_migrate_changes_all_scripts_or_none(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import accelerate\n")
    (tmp_path / "b.ipynb").write_text('{"cells": [{"source": ["import accelerate"], "execution_count": null}]}')
    assert run(["migrate", "--write", *(str(tmp_path / name) for name in ("a.py", "b.ipynb", "c.py"))]) == 2
    out, error = capsys.readouterr()
    assert out == "" and (tmp_path / "a.py").read_text() == "import accelerate\n"
    assert "b.ipynb: only Python scripts are changed (got a notebook); in its cells, write" in error
    assert "c.py: no such file or folder" in error and error.endswith("2 errors. Nothing was changed.\n")


def test_migrate_of_a_folder_takes_the_scripts_below_it_that_import_accelerate(tmp_path, capsys):
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / "env/lib/site-packages/trl").mkdir(parents=True)
    for name in ("package/a.py", "package/inner/a.py", ".venv/a.py", "env/lib/site-packages/trl/a.py"):
        (tmp_path / name).write_text("from accelerate import Accelerator\nmodel = Accelerator().prepare(model)\n")
    (tmp_path / "package" / "b.py").write_text("import torch\n")
    assert run(["migrate", "--write", str(tmp_path)]) == 0
    out, said = capsys.readouterr()
    assert "b.py" not in out and said.count(": changed.") == 2 and said.count("differs: clip_grad_norm_") <= 1
    assert (tmp_path / "package" / "inner" / "a.py").read_text().startswith("from shardkit.compat import Accelerator")
    assert (tmp_path / ".venv" / "a.py").read_text().startswith("from accelerate")
    assert (tmp_path / "env/lib/site-packages/trl/a.py").read_text().startswith("from accelerate")
    (tmp_path / "empty").mkdir()
    assert run(["migrate", str(tmp_path / "empty")]) == 2
    assert "empty: no Python file below this folder mentions accelerate" in capsys.readouterr().err


LENGTH = """\
def main():
    steps = args.epochs * math.ceil(len(train) / args.window)
    logger.info(f"{len(train)} batches")
    schedule = get_scheduler("linear", num_training_steps=args.steps or steps)
    model, train, schedule = accelerator.prepare(model, train, schedule)
    steps = len(train)
"""


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("", "", [2]),
        ("or steps", "or len(train)", [2, 4]),
        ("len(train) / args.window", "len(train.dataset) / args.window", []),
        ("args.window)", "(args.window * accelerator.num_processes))", []),
        ("prepare(model, train, schedule)", "prepare(model, train)", []),
        ("def main():", "def main(split_batches=accelerator.of(split_batches=True)):", []),
        ("    logger", "def after():\n    logger", []),
    ],
)
def test_scan_finds_schedules_with_the_length_of_a_loader_that_is_prepared_later(old, new, lines):
    found = scan.scan_text(LENGTH.replace(old, new, 1), "train.py").remarks
    assert [(one.line, one.name) for one in found] == [(line, "len(train)") for line in lines]
    assert all("shardkit's steps once: take the prepared loader's length" in one.text for one in found)


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        ("lambda step: 1 - step / (args.steps * accelerator.num_processes)", [4]),
        ("[lambda step: 1 / (accelerator.num_processes * args.steps)]", [4]),
        ("decay", [2]),
        ("lambda step: 1 - step / args.steps", []),
        ("lambda step: 1 - step / (args.steps / accelerator.num_processes)", []),
    ],
)
@pytest.mark.parametrize("made_by", ["torch.optim.lr_scheduler.LambdaLR", "LambdaLR"])
def test_scan_finds_the_factor_of_a_schedule_in_a_function_of_the_step(made_by, function, lines):
    script = (
        "def decay(step):\n    return 1 - step / (args.steps * accelerator.num_processes)\n\n"
        f"scheduler = {made_by}(optimizer, {function})\n"
    )
    found = scan.scan_text(script, "train.py").remarks
    assert [(one.line, one.name) for one in found] == [(line, "num_processes") for line in lines]


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("accelerator.save_state('a')", True),
        ("x = accelerator.get_state_dict(model)", True),
        ("accelerator.unwrap_model(model).save_pretrained('a')", True),
        ("unet = unwrap_model(unet)\n    unet.save_pretrained('a')", True),
        ("p = StableDiffusionPipeline.from_pretrained('a', unet=model)\n    p.save_pretrained('b')", True),
        ("tokenizer.save_pretrained('a')", False),
        ("trainer.save_state()", False),
        ("pass\naccelerator.save_state('a')", False),
        ("accelerator.save_state('a')\nelse:\n    accelerator.save_state('b')", False),
    ],
)
def test_scan_finds_saves_that_only_one_rank_makes(call, is_found):
    script = f"if accelerator.is_main_process:\n    {call}\n"
    assert saves_of_one_rank(script) == ([script.count("\n")] if is_found else [])


@pytest.mark.parametrize(
    ("test", "is_found"),
    [
        ("accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED", True),
        ("accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.is_main_process", True),
        ("not (accelerator.distributed_type != DistributedType.MEGATRON_LM or not accelerator.is_main_process)", True),
        ("accelerator.is_main_process or accelerator.distributed_type == DistributedType.FSDP", False),
        ("accelerator.is_main_process or accelerator.distributed_type != DistributedType.DEEPSPEED", False),
        ("accelerator.is_main_process or is_fsdp", False),
    ],
)
def test_scan_knows_that_no_other_engine_runs(test, is_found):
    assert saves_of_one_rank(f"if {test}:\n    accelerator.save_state('a')\n") == ([2] if is_found else [])


def saves_of_one_rank(script: str) -> list[int]:
    return [one.line for one in scan.scan_text(script, "train.py").remarks if one.text == scan.OF_ONE_RANK]


@pytest.mark.parametrize(
    "prepares",
    [
        "model, lr_scheduler = accelerator.prepare(model, lr_scheduler)",
        "decay = torch.optim.lr_scheduler.LambdaLR(optimizer, f)\nmodel, decay = accelerator.prepare(model, decay)",
        "self.decay = OneCycleLR(optimizer, 1e-3, 9)\nself.decay = accelerator.prepare(self.decay)",
    ],
)
def test_a_prepared_schedule_is_told_to_step_once_before_a_run_and_after_a_diff(tmp_path, capsys, prepares):
    """Also where no factor is found: without one Accelerate's scheduler is through sooner."""
    script = tmp_path / "train.py"
    script.write_text(f"from accelerate import Accelerator\n{prepares}\n")
    differs = "differs: a prepared scheduler steps once per optimizer step; Accelerate's steps num_processes times"
    assert differs in scan.report(scan.scan_script(str(script)))
    assert run(["migrate", str(script)]) == 0
    assert differs in capsys.readouterr().err
    script.write_text("from accelerate import Accelerator\nmodel = accelerator.prepare(model)\n")
    assert run(["migrate", str(script)]) == 0
    assert differs not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("scheduler", "a prepared scheduler steps once"),
        ("scheduler", "the schedule's length is multiplied by the number of ranks"),
        ("position", "load_state moves the loaders"),
        ("save", "save writes safetensors"),
    ],
)
def test_what_a_run_takes_back_is_no_difference_of_it(word, told, tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "scheduler = get_scheduler(optimizer, num_training_steps=steps * accelerator.num_processes)\n"
        "scheduler = accelerator.prepare(scheduler)\naccelerator.load_state()\naccelerator.save(x)\n"
    )
    command = ["launch", "--as-accelerate", "--check", str(script)]
    assert run(command) == 0 and told in capsys.readouterr().out
    assert run([*command[:2], "--accelerates-meaning", word, *command[2:]]) == 0
    assert told not in capsys.readouterr().out
    names = ["Accelerator.prepare_scheduler", "Accelerator.load_state", "utils.save"]
    used = Touched(stood_in={name: {"script"} for name in names})
    usually = report(used)
    monkeypatch.setenv(VARIABLE, word)
    assert usually.count("differs: ") == report(used).count("differs: ") + 1


def test_scan_says_what_stands_in_what_is_refused_and_what_means_another_thing():
    found = scan.scan_text(SCRIPT, "train.py")
    assert {one.name for one in found.stands_in} >= {"Accelerator", "utils.gather", "Accelerator.num_processes"}
    assert {one.name for one in found.refused} == {
        "DeepSpeedPlugin",
        "Accelerator(deepspeed_plugin=)",
        "Accelerator.lomo_backward",
    }
    assert [one.place for one in found.missing] == ["train.py:10"]
    assert [one.place for one in found.remarks] == ["train.py:8", "train.py:9"]
    assert "3 not supported, 1 unknown" in scan.report(found)
    assert scan.scan_text(f"\ufeff{SCRIPT}", "train.py") == found, "with a byte order mark, too"
    (missing,) = scan.scan_text("import accelerate.checkpointing", "train.py").missing
    assert missing.name == "checkpointing"
    assert scan.report(scan.scan_text("import torch", "a.py")).startswith("The script uses no name of accelerate")
    broken = scan.report(scan.scan_text("from accelerate import Accelerator\nf(", "a.py"))
    assert broken.startswith("a.py:2: not valid Python for this interpreter ('(' was never closed); correct it.\n0 n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from accelerate.utils import *\nset_seed(1)\nx = DummyOptim", 3),
        ("from accelerate.utils import *\ndef DummyOptim(): pass\nDummyOptim()", None),
        ("import accelerate.utils as u\nclass A:\n    def b(self):\n        return u.DummyOptim", 4),
        ("from accelerate import dispatch_model as d", 1),
        ("def f():\n    import accelerate as a\n    a.Accelerator().lomo_backward(1, 2)", 3),
        ("from accelerate import Accelerator as A\nA(deepspeed_plugin=p)", 2),
        ("from accelerate import Accelerator as A\nA(deepspeed_plugin=None)", None),
        ("import accelerate\nself.a = accelerate.Accelerator()\nself.a.lomo_backward(1, 2)", 3),
        ("import accelerate\na = b = accelerate.Accelerator() if x else 1\nc = b\nc.lomo_backward(1, 2)", 4),
        ("from accelerate import Accelerator\ndef f(a: 'Accelerator | None'):\n    a.lomo_backward(1, 2)", 3),
        ("import accelerate\ndef f():\n    return accelerate.Accelerator()\na, b = f(), 1\na.lomo_backward(1)", 5),
        ("from accelerate import Accelerator\na, b = Accelerator(), 1\nb.lomo_backward(1, 2)", None),
    ],
)
def test_scan_finds_names_however_they_are_bound(text, line):
    found = scan.scan_text(text, "train.py")
    assert [one.line for one in found.refused] == ([] if line is None else [line])
    assert found.missing == [] and found.remarks == []


def test_scan_finds_nothing_in_a_script_on_shardkits_own_accelerator():
    script = LENGTH.replace("def main():", "def main(a=Accelerator(split_batches=True)):")
    assert scan.scan_text(script, "a.py").remarks
    assert scan.scan_text("from shardkit.compat import Accelerator\n" + script, "a.py").remarks
    assert scan.scan_text(
        "from shardkit import Accelerator\nimport accelerate.utils as u\nu.gather\n" + script, "a.py"
    ).remarks
    assert scan.scan_text("from shardkit import Accelerator\n" + script, "a.py") == scan.Found()


def test_differences_name_what_exists():
    known = {f"Accelerator.{name}" for name in MEMBERS} | {"Accelerator.state"}
    for module in names.modules():
        known |= {f"{module}.{name}" if module else name for name in names.places(module)}
    for one in DIFFERENCES:
        assert set(one.names) <= known, one.names
    assert choices() == ["scheduler", "position", "save"]

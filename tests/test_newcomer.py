"""What a newcomer meets in the wizard and in the commands; what they print: `test_printed_commands.py`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardkit import templates
from shardkit.cli.main import run
from shardkit.config import files
from shardkit.model.sources import describe
from shardkit.wizard.answers import settle
from shardkit.wizard.inplace import QuestionaryPrompter
from shardkit.wizard.prompter import Prompt
from shardkit.wizard.questions import QUESTIONS
from shardkit.wizard.situation import Situation
from tests.wizard_screen import wizard
from tests.wizard_talk import (
    CPU_ONLY,
    DOWN,
    EIGHT_GPUS,
    ENTER,
    SMALL_GPT,
    project,
    talk,
    talk_plainly,
)

SIZES = [(80, 24), (60, 12)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    return project(tmp_path, monkeypatch)


@pytest.fixture
def starter(folder) -> Path:
    """The project with the starter's model, in a module named gpt."""
    shutil.copy(templates.folder() / "gpt.py", folder)
    return folder


def saved(folder: Path) -> dict:
    return yaml.safe_load((folder / "shardkit.yaml").read_text())


# --- 2: models ---


@pytest.mark.slow
def test_2_a_module_named_gpt_is_a_module(starter, capsys):
    assert talk_plainly(["gpt:GPT", "", "", "", "", "", "save"], CPU_ONLY) == 0
    assert "model: gpt:GPT (GPT, 875,264 parameters, 4 x Block)" in capsys.readouterr().out
    assert "# model: gpt:GPT" in (starter / "shardkit.yaml").read_text()
    assert describe("gpt:GPT", folder=starter).numel == 875_264
    assert describe("gpt:layers=2,hidden=64,heads=4").name == "GPT"


@pytest.mark.slow
def test_2_a_model_that_cannot_be_built_is_told_at_its_own_question(starter, capsys):
    assert talk_plainly(["gpt:nothing", "gpt:GPT", "", "", "", "", "", "save"], CPU_ONLY) == 0
    shown = capsys.readouterr().out
    first, told, second = (
        shown.find(text) for text in ("Which model?", "no attribute 'nothing'", "Where will it run?")
    )
    assert 0 < first < told < second
    assert shown.count("Where will it run?") == shown.count("Precision?") == 1
    assert "# model: gpt:GPT" in (starter / "shardkit.yaml").read_text()


@pytest.mark.slow
def test_2_a_model_of_the_command_line_is_told_before_the_first_question(starter, capsys):
    assert talk_plainly(["", "", "", "", "", "", "save"], CPU_ONLY, model="gpt:nothing") == 0
    shown = capsys.readouterr().out
    assert 0 < shown.find("no attribute 'nothing'") < shown.find("Where will it run?")
    assert shown.count("Which model?") == 1


# --- 3: what is on the screen ---

ADDRESS = (
    "num_machines: 2\nnum_processes: 4\nmain_process_ip: gpu-node-017.cluster.example.org\nmain_process_port: 29500\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_3_a_default_is_shown_whole(folder, size):
    with wizard(folder, size=size) as terminal:
        terminal.answer("Which model?", ENTER)
        terminal.answer("Where will it run?", ENTER)
        terminal.answer("Processes on", ENTER)
        terminal.answer("Precision?", ENTER)
        terminal.answer("Sharding strategy?", ENTER)
        terminal.answer("one by one", "o" + ENTER)
        terminal.answer("CPU offload:", ENTER)
        terminal.answer("Wrapping:", "s" + ENTER)
        terminal.wait_for("Minimum parameters")
        terminal.wait_for("Enter takes 100,000,000: FSDP's usual value")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_3_an_address_is_shown_whole(folder, size):
    (folder / "shardkit.yaml").write_text(ADDRESS)
    with wizard(folder, size=size) as terminal:
        terminal.answer("edit it", ENTER)
        terminal.answer("Save to", "2" + ENTER)
        terminal.answer("Which answer?", "a" + ENTER)
        terminal.wait_for("Address of machine 0?")
        terminal.wait_for("gpu-node-017.cluster.example.org:29500")


@pytest.mark.parametrize("size", [(80, 24), (60, 12), (60, 40), (40, 14)])
def test_3_option_texts_are_shown_whole(size, monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size(size))
    prompter = QuestionaryPrompter()
    model = replace(describe(SMALL_GPT), spec="my_model:build")
    for given in ({"where": "several"}, {"where": "elsewhere"}, {"where": "tpu"}, {"details": "each"}):
        situation = settle(Situation(EIGHT_GPUS, model=model), given)
        for question in QUESTIONS:
            options = question.options(situation)
            for option, choice in zip(
                options, prompter._choices(options, Prompt(question.title), len(options) <= 9), strict=True
            ):
                text = " ".join(f"{choice.title} {choice.description or ''}".split())
                wanted = option.disabled or option.consequence
                assert " ".join(wanted.split()) in text, (question.key, option.label)
                lines = str(choice.title).splitlines()
                assert len(lines[0]) <= size[0] - 6 and all(len(line) < size[0] for line in lines)


def test_3_help_leaves_the_pointer_where_it_is(folder):
    keys = ENTER + DOWN + "?" + " " + ENTER
    assert talk(keys + ENTER * 7) == 0
    assert saved(folder)["use_cpu"] is True, "the second place was chosen, not the default"


@pytest.mark.slow
def test_3_help_at_a_typed_answer_goes_on_with_it(folder):
    assert talk(ENTER * 2 + "?" + " " + "4" + ENTER * 6) == 0
    assert saved(folder)["num_processes"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_3_help_does_not_pile_up(folder, size):
    with wizard(folder, size=size) as terminal:
        terminal.wait_for("Which model?")
        for _ in range(3):
            terminal.press("?")
            terminal.wait_for("(press any key)")
            assert "Which model?" not in terminal.text
            terminal.press(" ")
            terminal.wait_for("Which model?")
            assert "Nothing is downloaded" not in terminal.text


@pytest.mark.slow
def test_3_a_letter_goes_round_the_options_that_begin_with_it(folder):
    assert talk(ENTER + "s" + "s" + ENTER + "3" + ENTER * 8) == 0
    assert saved(folder)["num_machines"] == 3, "several, then SLURM"
    assert "main_process_ip" not in saved(folder), "SLURM's address comes from the job"


@pytest.mark.parametrize("text", ["num_processes: 4\n", "distributed_type: MULTI_GPU\nnum_processes: 8\n"])
def test_3_edit_opens_the_review(folder, capsys, text):
    (folder / "shardkit.yaml").write_text(text)
    assert talk_plainly(["edit", "save"]) == 0
    shown = capsys.readouterr().out
    assert "Where will it run?" not in shown and "Nothing is changed." in shown
    assert (folder / "shardkit.yaml").read_text() == text


def test_3_an_edit_that_was_stopped_goes_on_with_all_that_the_file_says(folder, capsys):
    text = "# by the team\ndistributed_type: FSDP\nnum_processes: 8\nshardkit:\n  checkpoint:\n    keep_last: 7\n"
    (folder / "shardkit.yaml").write_text(text)
    assert talk_plainly(["edit", "change", "processes", "4"]) == 130
    assert talk_plainly(["resume", "edit", "save"]) == 0
    written = (folder / "shardkit.yaml").read_text()
    assert written == text.replace("num_processes: 8", "num_processes: 4")


def test_3_changing_the_device_in_the_review_takes_its_defaults_along(folder, capsys):
    asked = ["", "CPU", "", "", "", "", "change", "where", "this machine", "done", "save"]
    assert talk_plainly(asked) == 0
    assert (saved(folder)["num_processes"], saved(folder)["mixed_precision"]) == (8, "bf16")
    shown = capsys.readouterr().out
    assert "processes per machine is now 8: one per GPU found here" in shown
    assert "mixed precision is now bf16" in shown


def test_3_an_answer_of_ones_own_stays_when_the_device_changes(folder):
    asked = ["", "CPU", "4", "bf16", "", "", "change", "where", "this machine", "done", "save"]
    assert talk_plainly(asked) == 0
    assert (saved(folder)["num_processes"], saved(folder)["mixed_precision"]) == (4, "bf16")


def test_3_gpus_elsewhere_are_asked_for_and_then_something_fits(folder, capsys):
    model = "gpt:layers=24,hidden=2048,heads=16"
    asked = ["another", "GPU", "L4 24 GB", "", "", "", "", "save"]
    assert talk_plainly(asked, CPU_ONLY, model=model) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[1]: line for line in shown.splitlines() if line.strip()[:3] in {"1. ", "3. "}}
    listed = re.findall(r"^( +\d+)\. (.*?) +\d+\.\d GiB of memory", shown, re.MULTILINE)
    assert len({len(number) for number, _ in listed}) == 1, "names stand below each other"
    assert [name for _, name in listed] == sorted(name for _, name in listed)
    assert "yes" in rows["FULL_SHARD"] and "NO" in rows["NO_SHARD"]
    assert "of 22.5 GiB (L4 24 GB)" in shown


def test_3_any_gpu_by_its_memory(folder, capsys):
    asked = ["another", "GPU", "another GPU", "lots", "2080ti", "16GiB", "", "", "", "", "save"]
    assert talk_plainly(asked, CPU_ONLY, model="gpt:layers=32,hidden=4096,heads=32") == 0
    shown = capsys.readouterr().out
    assert "not a size (got 'lots')" in shown and "not a size (got '2080ti')" in shown and "it has 16.0 GiB" in shown
    assert "--device 16GiB" in shown


# --- 4: the details of FSDP ---

DETAILS = ["offload_params", "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "state_dict_type"]


def test_4_offload_wrapping_prefetch_and_state_dict_are_on_the_way(folder, capsys):
    details = ["each", "yes", "SIZE", "50M", "NO_PREFETCH", "yes", "FULL", "yes"]
    details[0] = "one by one"
    assert talk_plainly(["", "", "", "", "", *details, "save"]) == 0
    fsdp = saved(folder)["fsdp_config"]
    assert fsdp["fsdp_offload_params"] is True and fsdp["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
    assert fsdp["fsdp_min_num_params"] == 50_000_000 and fsdp["fsdp_backward_prefetch"] == "NO_PREFETCH"
    assert fsdp["fsdp_forward_prefetch"] is True and fsdp["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert fsdp["fsdp_activation_checkpointing"] is True


def test_4_each_detail_has_its_cost_beside_it(folder, capsys):
    asked = ["", "", "", "1", "one by one", "", "", "", "", "", "", "", "", "save"]
    assert talk_plainly(asked, model="gpt:layers=32,hidden=4096,heads=32") == 0
    shown = " ".join(capsys.readouterr().out.split())
    names = ("no", "TRANSFORMER_BASED_WRAP", "NO_WRAP", "BACKWARD_PRE", "NO_PREFETCH")
    costs = [float(re.findall(rf" {name} ([\d.]+) GiB", shown)[0]) for name in names]
    assert costs[0] == costs[1] == costs[3]
    assert costs[2] > costs[0] >= costs[4]


def test_4_the_suggested_details_are_named_and_one_answer(folder, capsys):
    assert talk_plainly(["", "", "", "", "", "", "save"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no CPU offload; one unit for each repeated block; prefetch in backward; sharded state dict" in shown


def test_4_details_can_be_opened_and_closed_again_in_the_review(folder):
    opened = ["change", "FSDP details", "one by one", "yes", "", "", "", "", "", "", "done"]
    closed = ["change", "FSDP details", "as suggested", "done"]
    assert talk_plainly(["", "", "", "", "", "", *opened, *closed, "save"]) == 0
    assert saved(folder)["fsdp_config"]["fsdp_offload_params"] is False


def test_4_all_advanced_settings_can_be_asked_in_one_go(folder, capsys):
    situation = settle(Situation(EIGHT_GPUS), {})
    left = [q.key for q in QUESTIONS if q.key in situation.answers and not q.asked(situation)]
    assert len(left) > 10
    assert talk_plainly(["", "", "", "", "", "", "advanced", "all of these", *[""] * len(left), "done", "save"]) == 0
    assert capsys.readouterr().out.count("Which setting?") == 2


def test_4_readme_and_wizard_agree():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    [said] = [part for part in text.split("\n\n") if part.startswith("**`shardkit config`**")]
    for word in ("strategy 1 to 5", "offload", "wrapping", "prefetch", "state dict", "precision", "machines"):
        assert word in " ".join(said.split())


# --- 5: flags and files ---


def test_5_defaults_for_several_machines_ask_for_the_device(folder, capsys):
    words = ["config", "--defaults", "--set", "num_machines=2", "--set", "num_processes=16"]
    assert run(words) == 2
    assert "use_cpu is unknown for 2 machines (got no GPU on this one); add --set use_cpu=false" in (
        capsys.readouterr().err
    )
    assert run([*words, "--set", "use_cpu=false"]) == 0
    assert saved(folder)["use_cpu"] is False and saved(folder)["mixed_precision"] == "bf16"


def test_5_defaults_say_why_the_cpu_is_taken(folder, capsys):
    assert run(["config", "--defaults"]) == 0
    assert "use_cpu is true, because this machine has no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_5_from_a_file_nothing_is_asked(folder):
    (folder / "other.yaml").write_text("num_processes: 4\ndistributed_type: FSDP\n")
    for arguments in (
        ["--from", "other.yaml"],
        ["--template", "cpu", "--force"],
        ["--set", "shardkit.seed=1", "--force"],
    ):
        with wizard(folder, *arguments) as terminal:
            assert terminal.wait_for_end() == 0, terminal.text


@pytest.fixture
def accelerates_own(folder, monkeypatch) -> Path:
    """The file that `accelerate config` writes for its user."""
    monkeypatch.setenv("HF_HOME", str(folder.parent / "hf"))
    path = folder.parent / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("distributed_type: FSDP\nnum_processes: 6\nmixed_precision: bf16\n")
    return path


def test_5_accelerates_own_file_is_offered(folder, accelerates_own):
    assert talk_plainly(["", "save"]) == 0
    assert saved(folder)["num_processes"] == 6


def test_5_accelerates_own_file_is_mentioned_and_not_read(folder, accelerates_own, capsys):
    (folder / ".git").mkdir()
    assert run(["config", "show"]) == 0
    captured = capsys.readouterr()
    assert str(accelerates_own) in captured.err and "num_processes: 6" not in captured.out
    assert run(["config", "validate"]) == 2
    assert str(accelerates_own) in capsys.readouterr().err
    (folder / "train.py").write_text("")
    assert run(["launch", "--dry-run", "train.py"]) == 0
    assert str(accelerates_own) in capsys.readouterr().err


def test_json_of_a_launch_that_would_start_is_refused(tmp_path, monkeypatch, capsys):
    """It was ignored: the ranks ran, and a program read their lines as JSON."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert run(["launch", "--cpu", "--json", "train.py"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "launch: --dry-run is missing (got --json); add it, or remove --json." in said.err


def test_5_the_order_in_which_files_are_looked_for_is_in_the_docs():
    text = (Path(__file__).parent.parent / "docs" / "how-to" / "configure.md").read_text()
    places = ["--config", "$SHARDKIT_CONFIG", *files.NAMES[:1], files.ACCELERATE_NAMES[-1], "shardkit/config.yaml"]
    section = text.partition("## Which file is used")[2]
    assert section and sorted(section.find(place) for place in places) == [section.find(place) for place in places]


# --- 8: completion, help, checkpoints, keys ---


def completed(line: str) -> list[str]:
    """What bash offers at the end of a command line."""
    script = (
        f'eval "$({sys.executable} -m shardkit completion bash)"\n'
        f"COMP_WORDS=({line}); [[ '{line}' == *' ' ]] && COMP_WORDS+=('')\n"
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shardkit; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardkit pl", "plan"),
        ("shardkit config va", "validate"),
        ("shardkit config --temp", "--template"),
        ("shardkit config validate --j", "--json"),
        ("shardkit checkpoint ver", "verify"),
        ("shardkit plan --strategy HYBRID_SHARD_", "HYBRID_SHARD_ZERO2"),
        ("shardkit launch --set fsdp.off", "fsdp.offload_params="),
        ("shardkit config --template multi", "multi-node"),
        ("shardkit config convert --to ", "accelerate"),
        ("shardkit submit --to sl", "slurm"),
        ("shardkit help su", "submit"),
    ],
)
def test_8_the_shell_completes(line, offered):
    assert completed(line) == [offered]


@pytest.mark.slow
def test_8_the_shell_offers_the_words_of_a_flag_and_files_after_one_that_takes_any_value():
    assert completed("shardkit plan --loss ") == ["held", "dropped", "fused"]
    assert completed("shardkit launch --accelerates-meaning ") == ["scheduler", "position", "save"]
    assert completed("shardkit launch --config ") == completed("shardkit config validate --config ") == []
    assert "--config" in completed("shardkit launch --dry-run ")


@pytest.mark.parametrize(
    "line",
    [
        "env",
        "config validate good.yaml",
        "config validate bad.yaml",
        "config validate none.yaml",
        "config show --config good.yaml",
        "config show --config bad.yaml",
        "config show nothing",
        "plan --model gpt-1t --world 512 --device h100-80",
        "plan --model nothing",
        "plan --model gpt-1t --world none",
        "launch --dry-run --config good.yaml good.yaml",
        "launch --dry-run --config bad.yaml good.yaml",
        "launch good.yaml",
        "checkpoint list none",
        "checkpoint inspect none",
        "checkpoint verify none",
        "checkpoint diff none none",
        "checkpoint merge none -o to",
        "checkpoint pin none",
        "checkpoint prune none --keep-last 1",
        "checkpoint convert none -o to",
        "doctor --set nothing=1",
    ],
)
def test_json_is_alone_on_stdout_and_errors_leave_it_empty(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n")
    (tmp_path / "bad.yaml").write_text("num_procesess: 2\n")
    verb, *rest = line.split()
    code = run([verb, "--json", *rest] if verb in {"launch"} else [*line.split(), "--json"])
    out, err = capsys.readouterr()
    answers = code == 0 or verb + rest[0] == "configvalidate" if rest else True
    assert (json.loads(out) is not None) if answers else (code > 0 and not out and err)


def test_8_every_shell_gets_a_script(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert run(["completion", shell]) == 0
        said = capsys.readouterr().out
        assert "verify" in said
        if shutil.which(shell):  # without a configuration of the user's: zsh has no completion before compinit
            alone = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
            done = subprocess.run([shell, alone, "-c", said], capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, "")
    assert run(["completion", "bsh"]) == 2
    assert capsys.readouterr().err == "completion: unknown shell (got 'bsh'); use bash, zsh, fish.\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["config"],
        ["config", "validate"],
        ["config", "show"],
        ["plan"],
        ["launch"],
        ["checkpoint"],
        ["env"],
        ["doctor"],
        ["migrate"],
        ["completion"],
    ]
    + [["checkpoint", name] for name in ("list", "inspect", "verify", "diff", "merge", "prune", "convert")],
    ids=" ".join,
)
def test_8_h_is_help_everywhere_and_never_boxed(words, capsys):
    assert run([*words, "-h"]) == 0
    short = capsys.readouterr().out
    assert run([*words, "--help"]) == 0
    assert capsys.readouterr().out == short
    assert "Usage" in short or "VERB" in short
    assert not set(short) & set("╭╮╰╯│─<>")


def test_8_help_names_the_templates(capsys):
    assert run(["config", "-h"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in templates.names())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("checkpoint.keep_last", "shardkit.checkpoint.keep_last"),
        ("keep_last", "shardkit.checkpoint.keep_last"),
        ("keep_lst", "shardkit.checkpoint.keep_last"),
        ("shardin_strategy", "fsdp.sharding_strategy"),
        ("launch.max_restart", "shardkit.launch.max_restarts"),
        ("seed", "shardkit.seed"),
    ],
)
def test_8_a_key_without_its_prefix_is_suggested_in_full(name, meant, folder, capsys):
    assert run(["config", "--defaults", "--set", f"{name}=1"]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_8_a_key_of_a_file_without_its_prefix_too(folder, capsys):
    (folder / "shardkit.yaml").write_text("offload_param: true\nkeep_lst: 3\n")
    assert run(["config", "validate"]) == 2
    told = capsys.readouterr().err
    assert "did you mean fsdp_config.fsdp_offload_params?" in told
    assert "did you mean shardkit.checkpoint.keep_last?" in told


def test_8_sizes_have_one_unit():
    package = Path(__file__).parent.parent / "shardkit"
    for path in package.rglob("*.py"):
        assert "1e6:.1f} MB" not in path.read_text() and "%.1f MB" not in path.read_text(), path


# --- 9: one suggestion ---


def test_9_pages_wizard_and_plan_suggest_by_the_same_rule(folder, capsys):
    page = (Path(__file__).parent.parent / "docs" / "concepts" / "strategies.md").read_text()
    said = " ".join(page.split())
    assert "nothing is faster" not in said
    assert (
        "the one with the least traffic over the slowest link" in said and "fit with 20% of the memory to spare" in said
    )
    model = "gpt:layers=32,hidden=4096,heads=32"
    assert talk_plainly(["", "", "", "", "", "save"], model=model) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert run(["plan", "--world", "8", "--device", "h100-80", "--per-machine", "8", "--batch-size", "1"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert "Default: SHARD_GRAD_OP (least traffic over the slowest link among those that fit" in shown
    assert "Suggested: 2 SHARD_GRAD_OP (least traffic over the slowest link among those that fit" in planned


# --- 11: what README and tutorial print ---


LONG = pytest.param("docs/how-to/long-sequences.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-run.md", LONG])
def test_11_every_plan_in_order_in_a_fresh_folder_is_as_printed(page, folder, capsys):
    """The commands of a page, one after the other: what was configured before does not change what is printed."""
    (folder / ".git").mkdir()
    for name in ("gpt.py", "train.py"):
        shutil.copy(templates.folder() / name, folder)
    text = (Path(__file__).parent.parent / page).read_text()
    compared = 0
    command: list[str] = []
    for language, block in re.findall(r"^```(sh|text)\n(.*?)^```", text, re.M | re.S):
        joined = block.replace("\\\n", " ")
        if language == "text" and joined.startswith("$ shardkit plan"):
            command = shlex.split(joined.splitlines()[0])[2:]
            joined = joined.partition("\n")[2]
        elif language == "sh":
            for line in joined.splitlines():
                words = shlex.split(line, comments=True)[1:]
                if words and words[0] in {"plan", "config"}:
                    capsys.readouterr()
                    assert run(words) == 0, line
                    command = words
            continue
        if not command or command[0] != "plan":
            continue
        capsys.readouterr()
        assert run(command) == 0
        printed = capsys.readouterr().out
        for part in joined.split("...\n"):
            assert part.strip() in printed, f"{page}: {part}"
        compared, command = compared + 1, []
    assert compared == 1


def test_11_there_is_an_install_section_and_claims_have_a_date():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    assert "## Install" in text and "pip install ." in text
    section = text.partition("## Comparison")[2]
    assert section.startswith("\n\nAs of November 2026") and "LitData" in section

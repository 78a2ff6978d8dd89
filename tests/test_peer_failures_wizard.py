"""Ways in which `accelerate config` 1.15 fails its users: the same input through shardkit gives the right thing.

The numbers are those of the study in which each was run; the launcher's and the loader's are tested beside those parts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardkit.config import files
from shardkit.errors import ConfigError
from tests.wizard_screen import TIMEOUT_S, wizard
from tests.wizard_talk import BACK, CPU_ONLY, DOWN, EIGHT_GPUS, ENTER, STOP, project, talk, talk_plainly


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    return project(tmp_path, monkeypatch)


def saved(folder: Path) -> dict:
    return yaml.safe_load((folder / "shardkit.yaml").read_text())


# --- 6: late crashes lose every answer ---


def test_6a_the_default_number_of_processes_is_the_number_of_gpus(folder):
    assert talk(ENTER * 7) == 0
    assert saved(folder)["num_processes"] == 8


def test_6c_no_choice_can_be_taken_that_would_fail_later(folder, capsys):
    asked = ["", "", "", "fp8", "fp16", "HYBRID_SHARD", "1", "", ""]
    assert talk_plainly(asked, CPU_ONLY) == 0
    shown = capsys.readouterr().out
    assert "! HYBRID_SHARD is not possible: needs 2 machines." in shown
    assert "! not among the choices (got 'fp8')" in shown
    assert saved(folder)["mixed_precision"] == "fp16"


def test_6d_a_missing_folder_is_told_before_the_first_question(folder):
    with pytest.raises(ConfigError, match="there is no folder"):
        talk(ENTER * 7, output=folder / "missing" / "shardkit.yaml")


def test_6_a_stop_at_the_last_question_keeps_the_answers(folder):
    assert talk(ENTER * 2 + "4" + ENTER * 4 + STOP) == 130
    assert talk(ENTER + ENTER) == 0
    assert saved(folder)["num_processes"] == 4


# --- 7: wrong input ---


@pytest.mark.parametrize("typed", ["y", "Y", "yes", "YES", "2"])
def test_7_yes_is_understood_in_every_spelling(folder, typed):
    asked = ["", "", "", "", "1", ""]
    assert talk_plainly([*asked, "advanced", "forward prefetch", typed, "done", "save"]) == 0
    assert saved(folder)["fsdp_config"]["fsdp_forward_prefetch"] is True


@pytest.mark.parametrize("typed", ["2e8", "200M", "200_000_000", "200,000,000"])
def test_7_numbers_are_understood_as_they_are_printed(folder, typed):
    asked = ["", "", "", "", "1", ""]
    wanted = ["advanced", "auto wrap", "size", "min num params", typed, "done", "save"]
    assert talk_plainly([*asked, *wanted]) == 0
    assert saved(folder)["fsdp_config"]["fsdp_min_num_params"] == 200_000_000


@pytest.mark.parametrize(
    ("asked", "wrong", "message"),
    [
        (["", "several"], "two", "not a whole number (got 'two'); give 2 to 4,096."),
        (["", "several"], "0", "out of range (got 0); give 2 to 4,096."),
        (["", ""], "-5", "out of range (got -5); give 1 to 4,096."),
        (["", ""], "9", "more than the GPUs of this machine (got 9); give 1 to 8"),
        (["", "several", "2"], "node-a:99999", "port out of range (got 99999); give 1 to 65535."),
        (["", "several", "2"], ":29500", "not an address (got ':29500'); give a name or IP"),
        (["", "several", "2", "node-a"], "bogus", "not among the choices (got 'bogus'); enter 1 to 4"),
    ],
)
def test_7_wrong_answers_are_told_at_once_in_words(folder, capsys, asked, wrong, message):
    assert talk_plainly([*asked, wrong]) == 130
    assert message in " ".join(capsys.readouterr().out.replace("\n   ", " ").split())
    assert not (folder / "shardkit.yaml").exists()


# --- 8: stopping, going back, editing ---


def test_8_ctrl_c_is_one_line(folder, capsys):
    assert talk(STOP) == 130
    assert capsys.readouterr().err == "shardkit config: stopped, nothing was written.\n"


def test_8_ctrl_d_is_one_line(folder, capsys):
    assert talk("\x04") == 130
    assert capsys.readouterr().err == "shardkit config: stopped, nothing was written.\n"


def test_8_in_plain_mode_too_its_line_is_one_of_its_own(folder, capfd):
    assert talk_plainly([]) == 130
    captured = capfd.readouterr()
    assert captured.out.endswith("\nAnswer [none]: \n")
    assert captured.err == "shardkit config: stopped, nothing was written.\n"


def test_8_there_is_a_way_back_and_a_review(folder):
    assert talk(ENTER * 2 + "2" + ENTER + BACK + "4" + ENTER + ENTER * 4) == 0
    assert saved(folder)["num_processes"] == 4


def test_8_an_existing_file_is_edited_not_overwritten(folder):
    (folder / "shardkit.yaml").write_text("# mine\nnum_processes: 4\ndistributed_type: FSDP\n")
    assert talk(ENTER * 7) == 0
    assert (folder / "shardkit.yaml").read_text().startswith("# mine\nnum_processes: 4\n")


@pytest.mark.slow
def test_8_escape_goes_back_and_eats_no_key(folder):
    with wizard(folder) as terminal:
        terminal.answer("Which model?", ENTER)
        terminal.answer("Where will it run?", "\x1b")
        terminal.answer("Which model?", ENTER)
        terminal.answer("Where will it run?", DOWN + DOWN + ENTER)
        terminal.wait_for("where: ")
        assert "where: several machines" in terminal.text or "where: another machine" in terminal.text
        terminal.press(STOP)
        assert terminal.wait_for_end() == 130


# --- 9: no terminal ---


def test_9_without_a_terminal_it_is_two_lines_that_name_the_flags(folder):
    command = [sys.executable, "-m", "shardkit", "config"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "stdin is not a terminal" in done.stderr and "--defaults" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.slow
def test_9_in_a_ci_job_with_a_terminal_it_does_not_ask_either(folder):
    with wizard(folder, CI="true") as terminal:
        assert terminal.wait_for_end() == 2
    assert "$CI is set" in terminal.text and "--defaults" in terminal.text


# --- 10: terminals ---

SIZES = [(80, 24), (60, 10), (40, 14)]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_10_every_size_of_terminal_shows_whole_menus(folder, columns, rows):
    with wizard(folder, size=(columns, rows)) as terminal:
        terminal.answer("Which model?", ENTER)
        terminal.wait_for("Where will it run?")
        assert terminal.text.count("Where will it run?") == 1
        assert next(line for line in terminal.lines if line.startswith(" > ")).startswith(" > 1) this machine")
        terminal.press(DOWN)
        terminal.wait_for(" > 2) ")
        assert sum(line.startswith(" > ") for line in terminal.lines) == 1
        terminal.press("1")
        terminal.answer(" > 1) ", ENTER)
        terminal.answer("Processes on each machine?", "two" + ENTER)
        terminal.answer("! not a whole number", "1" + ENTER)
        terminal.answer("Precision?", ENTER)
        terminal.wait_for("What now?")
        assert sum(line.startswith(" > ") for line in terminal.lines) == 1
        terminal.press(ENTER)
        assert terminal.wait_for_end() == 0
    assert files.read(folder / "shardkit.yaml").config.num_processes == 1


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"SHARDKIT_PLAIN": "1", "NO_COLOR": "1"}])
def test_10_plain_mode_sends_no_control_codes(folder, variables):
    with wizard(folder, **variables) as terminal:
        terminal.answer("Answer [none]:", ENTER)
        terminal.answer("Choice [1]:", "\x03")
        assert terminal.wait_for_end() == 130
    assert b"\x1b" not in terminal.raw
    assert all(byte < 128 for byte in terminal.raw)


@pytest.mark.slow
def test_10_no_color_is_honoured(folder):
    with wizard(folder, NO_COLOR="1") as terminal:
        terminal.answer("Which model?", "\x03")
        assert terminal.wait_for_end() == 130
    codes = {code for found in re.findall(rb"\x1b\[([\d;]*)m", terminal.raw) for code in found.split(b";")}
    assert codes <= {b"", b"0", b"1", b"3", b"4", b"7"}, "only bold, italic, underlined and reversed"


def test_10_numbers_begin_at_one_and_every_choice_has_one(folder):
    assert talk(ENTER + "6" + ENTER + ENTER * 6) == 0
    assert saved(folder)["distributed_type"] == "XLA"


# --- 11: TPU ---


def test_11_tpu_answers_are_real_booleans_and_no_empty_strings(folder):
    pod = ["", "tpu", "y", "2", "", "", "4", "", "", "", ""]
    assert talk_plainly([*pod, "advanced", "tpu use sudo", "no", "tpu env", "", "tpu vm", "none", "done", "save"]) == 0
    written = saved(folder)
    assert not written.get("tpu_use_sudo")
    for key in ("tpu_env", "tpu_vm", "commands"):
        assert not written.get(key)
    assert files.read(folder / "shardkit.yaml").config.tpu_use_sudo is False


# --- 20, 21: the default file, the layer class ---


def test_20_the_file_goes_into_the_project_and_nothing_is_read_from_home(folder):
    hidden = Path(os.environ["XDG_CONFIG_HOME"]) / "shardkit"
    cache = folder.parent / "cache" / "huggingface" / "accelerate"
    for place in (cache,):
        place.mkdir(parents=True)
        (place / "default_config.yaml").write_text("num_processes: 99\n")
    assert talk(ENTER * 7) == 0
    assert (folder / "shardkit.yaml").exists() and not hidden.exists()
    assert saved(folder)["num_processes"] == 8


def test_21_the_layer_class_need_not_be_known(folder):
    assert talk(ENTER * 7, EIGHT_GPUS) == 0
    fsdp = saved(folder)["fsdp_config"]
    assert fsdp["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert "fsdp_transformer_layer_cls_to_wrap" not in fsdp, "empty: the model's own repeated classes"


MODEL = """
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 8)

def build():
    return nn.Sequential(nn.ModuleList(Encoder() for _ in range(3)), nn.Linear(8, 8))
"""


@pytest.mark.slow
def test_21_with_a_model_the_class_is_found_in_it(folder):
    (folder / "my_model.py").write_text(MODEL)
    assert talk(ENTER * 3 + "1" + ENTER * 3, model="my_model:build") == 0
    assert saved(folder)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Encoder"

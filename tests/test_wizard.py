"""The wizard, key by key: every path through the questions, the review, editing, stopping and resuming."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardkit.cli.main import run
from shardkit.config import files
from shardkit.config.hardware import Hardware
from shardkit.config.scheduler import Scheduler
from shardkit.config.schema import ShardingStrategy
from shardkit.model.adapters import Adapters
from shardkit.wizard.draft import Draft
from shardkit.wizard.prompter import PlainPrompter
from shardkit.wizard.run import WizardOptions, converse
from tests.wizard_talk import (
    BACK,
    CPU_ONLY,
    DOWN,
    EIGHT_GPUS,
    ENTER,
    OLD_GPUS,
    SMALL_GPT,
    STOP,
    UP,
    project,
    talk,
    talk_plainly,
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    return project(tmp_path, monkeypatch)


def saved(folder: Path, name: str = "shardkit.yaml") -> dict:
    return yaml.safe_load((folder / name).read_text())


# --- the way to the review ---


@pytest.mark.requirement("D1")
def test_enter_all_the_way_takes_at_most_six_questions_and_gives_a_file_that_loads(folder):
    assert talk(ENTER * 7) == 0
    config = files.read(folder / "shardkit.yaml").config
    assert (config.num_processes, config.mixed_precision) == (8, "bf16")
    assert config.fsdp.sharding_strategy is ShardingStrategy.FULL_SHARD


def test_with_a_model_given_there_is_one_less(folder):
    assert talk(ENTER * 6, model=SMALL_GPT) == 0
    assert "fsdp_transformer_layer_cls_to_wrap" not in saved(folder)["fsdp_config"], "sizes have no class names"
    assert f"# model: {SMALL_GPT}" in (folder / "shardkit.yaml").read_text()


@pytest.mark.slow
@pytest.mark.requirement("A1")
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_each_strategy_is_chosen_by_its_number(folder, strategy):
    machines = ENTER + "4" + ENTER + "2" + ENTER + "node-a:29501" + ENTER + ENTER
    assert talk(machines + ENTER + ENTER + f"{strategy.number}" + ENTER * 3) == 0
    config = files.read(folder / "shardkit.yaml").config
    assert config.fsdp.sharding_strategy is strategy
    assert (config.num_machines, config.num_processes, config.rdzv_backend) == (2, 16, "c10d")
    assert (config.main_process_ip, config.main_process_port) == ("node-a", 29501)


def test_arrows_and_first_letters_choose_too(folder):
    assert talk(ENTER + ENTER + ENTER + "F" + ENTER + DOWN + DOWN + UP + ENTER * 3) == 0
    assert saved(folder)["mixed_precision"] == "fp16"
    assert saved(folder)["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "precision"), [("", "no"), ("2", "fp16")])
def test_on_a_cpu_it_offers_two_processes_and_fp32(folder, choice, precision):
    assert talk(ENTER * 3 + choice + ENTER * 4, CPU_ONLY) == 0
    assert saved(folder)["use_cpu"] is True
    assert saved(folder)["num_processes"] == 2
    assert saved(folder)["mixed_precision"] == precision


@pytest.mark.slow
def test_gpus_without_bf16_get_fp16(folder):
    assert talk(ENTER * 7, OLD_GPUS) == 0
    assert saved(folder)["mixed_precision"] == "fp16"


def test_one_process_is_not_asked_how_to_split(folder):
    assert talk(ENTER * 2 + "1" + ENTER + ENTER + ENTER) == 0
    assert saved(folder)["distributed_type"] == "NO"


def test_another_machine_is_asked_for_its_gpus(folder):
    assert talk(ENTER + "2" + ENTER + "g" + ENTER + "1" + ENTER + "4" + ENTER * 5, CPU_ONLY) == 0
    assert saved(folder)["use_cpu"] is False
    assert saved(folder)["num_processes"] == 4


@pytest.mark.slow
def test_a_slurm_job_is_recognised(folder):
    job = Scheduler("SLURM", machines=4, machine_rank=1, main_address="node03", job="17")
    hardware = Hardware(EIGHT_GPUS.devices, 64, EIGHT_GPUS.memory_bytes, job)
    assert talk(ENTER * 9, hardware) == 0
    config = files.read(folder / "shardkit.yaml").config
    assert (config.num_machines, config.num_processes, config.main_process_ip) == (4, 32, "node03")
    assert config.machine_rank == 0


@pytest.mark.requirement("A10")
def test_a_tpu_pod_has_its_keys_and_none_of_fsdps(folder):
    asked = ["", "tpu", "yes", "2", "10.0.0.2", "", "4", "", "my-pod", "us-central1-a", ""]
    wanted = ["advanced", "downcast", "y", "tpu env", "A=1, B=2", "commands", "ls -l; echo a", "done", "save"]
    assert talk_plainly([*asked, *wanted]) == 0
    written = saved(folder)
    assert written["distributed_type"] == "XLA" and written["xla"] is True
    assert (written["num_machines"], written["num_processes"], written["main_process_ip"]) == (2, 8, "10.0.0.2")
    assert written["tpu_use_cluster"] is True and written["tpu_name"] == "my-pod" and written["downcast_bf16"] is True
    assert (written["tpu_env"], written["commands"]) == (["A=1", "B=2"], ["ls -l", "echo a"])
    assert "fsdp_config" not in written


@pytest.mark.parametrize(("address", "name"), [("10.0.0.2", "my-pod"), ("none", "none")])
def test_a_tpu_pod_is_started_on_all_its_machines_by_the_printed_command(folder, capsys, address, name):
    """The number of its machines was not asked for: the launch started one of them."""
    (folder / "train.py").write_text("")
    assert talk_plainly(["", "tpu", "yes", "2", address, "", "4", "", name, "none", "", "save"]) == 0
    (command,) = re.findall("^Run it: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert run([*shlex.split(command)[1:-1], "--dry-run", "train.py"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gcloud ")]
    expected = "TPU_NAME" if name == "none" else name
    assert [line.split("--command")[0] for line in lines] == [
        f"gcloud compute tpus tpu-vm ssh {expected} --worker {number} " for number in range(2)
    ]


# --- advanced ---


@pytest.mark.requirement("D1")
def test_advanced_asks_for_offload_wrapping_prefetch_and_state_dict_type_by_name(folder):
    asked = ["", "", "", "", "FULL_SHARD", ""]
    wanted = ["advanced", "offload params", "yes", "auto wrap", "SIZE_BASED_WRAP", "min num params", "50M"]
    wanted += ["backward prefetch", "NO_PREFETCH", "forward prefetch", "y", "state dict type", "FULL_STATE_DICT"]
    assert talk_plainly([*asked, *wanted, "done", "save"]) == 0
    fsdp = saved(folder)["fsdp_config"]
    assert fsdp["fsdp_offload_params"] is True
    assert fsdp["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
    assert fsdp["fsdp_min_num_params"] == 50_000_000
    assert fsdp["fsdp_backward_prefetch"] == "NO_PREFETCH"
    assert fsdp["fsdp_forward_prefetch"] is True
    assert fsdp["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shown", "missing"),
    [
        (None, ["1. 1 ", "2. 2 ", "3. 4 ", "4. 8 ", "1/8 of each sequence"], ["5. 16"]),
        ("gpt:layers=4,hidden=96,heads=6,vocab=1000", ["does not divide the 6 heads", "MiB, with"], ["4. 8 "]),
    ],
)
def test_ranks_that_share_sequences_are_divisors_of_the_ranks_and_heads(folder, capsys, model, shown, missing):
    asked = ["", "", "", "FULL_SHARD", ""] if model else ["", "", "", "", "FULL_SHARD", ""]
    wanted = ["advanced", "ranks that share", "2" if model else "3", "done", "save"]
    assert talk_plainly([*asked, *wanted], model=model) == 0
    assert saved(folder)["shardkit"]["mesh"]["context_size"] == (2 if model else 4)
    said = capsys.readouterr().out
    said = said[said.index("How many ranks share each sequence") :]
    said = said[: said.index("Which setting?")]
    assert all(text in said for text in shown) and not any(text in said for text in missing)


def test_fewer_ranks_take_back_how_many_share_a_sequence(folder):
    (folder / "shardkit.yaml").write_text("num_processes: 8\nshardkit: {mesh: {context_size: 4}}\n")
    assert talk_plainly(["edit", "change", "processes", "6", "done", "save"]) == 0
    assert saved(folder)["shardkit"]["mesh"]["context_size"] == 1
    (folder / "shardkit.yaml").write_text("num_processes: 8\nshardkit: {mesh: {context_size: 4}}\n")
    assert talk_plainly(["edit", "change", "processes", "4", "done", "save"]) == 0
    assert saved(folder)["shardkit"]["mesh"]["context_size"] == 4


MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

def build():
    return Net()
"""


@pytest.mark.slow
@pytest.mark.requirement("A3")
def test_block_classes_are_a_list_of_what_the_model_has(folder, capsys):
    (folder / "my_model.py").write_text(MODEL)
    asked = ["", "", "", "1", ""]
    wanted = ["advanced", "transformer", "?", "", "done", "save"]
    assert talk_plainly([*asked, *wanted], model="my_model:build") == 0
    assert saved(folder)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Layer"
    shown = capsys.readouterr().out
    assert re.search(r"1\. Layer +4 x 552, 97% of parameters \(chosen\)", shown)
    assert re.search(r"2\. Sequential +1 x 72, 3% of parameters", shown)


def test_block_classes_are_typed_where_there_is_no_model(folder, capsys):
    asked = ["", "", "", "", "1", ""]
    assert talk_plainly([*asked, "advanced", "transformer", "Bert-Layer", "BertLayer, T5Block", "done", "save"]) == 0
    assert saved(folder)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "BertLayer,T5Block"
    assert "not a class name (got 'Bert-Layer'); give names with commas" in capsys.readouterr().out


@pytest.mark.slow
def test_the_checkbox_of_classes_takes_space(folder):
    (folder / "my_model.py").write_text(MODEL)
    menu = "3" + ENTER + DOWN * 3 + ENTER
    keys = ENTER * 3 + "1" + ENTER + ENTER + menu + DOWN + " " + ENTER + BACK + ENTER
    assert talk(keys, model="my_model:build") == 0
    assert saved(folder)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Layer,Sequential"


@pytest.mark.slow
def test_a_class_that_the_model_does_not_have_is_not_kept(folder):
    (folder / "my_model.py").write_text(MODEL)
    (folder / "shardkit.yaml").write_text(
        "num_processes: 8\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: BertLayer\n"
    )
    assert talk(ENTER * 6, model="my_model:build") == 0
    assert saved(folder)["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Layer"


# --- the model's numbers ---


def test_with_a_model_memory_fit_and_traffic_stand_beside_each_strategy(folder, capsys):
    assert talk_plainly(["", "", "", "", "", ""], model="gpt:layers=32,hidden=4096,heads=32") == 0
    shown = capsys.readouterr().out
    rows = {line.split()[1]: line for line in shown.splitlines() if line.strip()[:3] in {"1. ", "2. ", "3. "}}
    assert "NO" in rows["NO_SHARD"] and "GiB  yes" in rows["FULL_SHARD"]
    assert "(suggested) (default)" in rows["SHARD_GRAD_OP"]
    assert "least traffic over the slowest link among those that fit with 20% to spare" in " ".join(shown.split())
    assert "activations of 2,048 tokens" in " ".join(shown.split())


PAGE = (Path(__file__).parent.parent / "docs" / "how-to" / "configure.md").read_text()


def test_the_page_shows_the_plain_session_as_it_is_printed(folder, capsys):
    [block] = re.findall(r"^```text\n\$ shardkit config --plain\n(.*?)^```", PAGE, re.M | re.S)
    prompt = re.compile(r"^((?:Answer|Choice) \[\w+\]: ?)(.*)\n", re.M)
    (folder / "train.py").touch()
    assert talk_plainly([typed for _, typed in prompt.findall(block)], CPU_ONLY) == 0
    shown = prompt.sub(lambda found: found[1].rstrip() + " ", block).replace(" \\\n  ", " ")
    assert capsys.readouterr().out == shown


def test_the_page_shows_the_numbers_of_a_model_as_they_are_printed(folder, capsys):
    rows = re.findall(r"^ [ >] (\d)\) (.* GiB.*)$", PAGE, re.M)
    assert len(rows) == 8
    several = ["several", "2", "node-a", "", "", "", "1", "one by one", *[""] * 8, "save"]
    assert talk_plainly(several, model="gpt:layers=32,hidden=4096,heads=32") == 0
    shown = capsys.readouterr().out
    assert not [text for number, text in rows if f"  {number}. {text}" not in shown]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "offloads", "said"),
    [(64, (False, True), "Optimizer state is in host memory: "), (112, (True, False), "CPU offload is on: ")],
)
def test_where_nothing_fits_the_least_offload_that_does_is_on_and_the_review_says_so(
    folder, capsys, layers, offloads, said
):
    model = f"gpt:layers={layers},hidden=8192,heads=64"
    assert talk_plainly(["several", "2", "", "", "", "", "", "", ""], model=model) == 0
    data = saved(folder)
    assert (
        data["fsdp_config"]["fsdp_offload_params"],
        data.get("shardkit", {}).get("offload_optimizer", False),
    ) == offloads
    shown = capsys.readouterr().out
    assert "least memory; no strategy fits" in shown
    assert said in shown


def test_a_machine_with_one_core_has_one_core(folder, capsys):
    assert talk_plainly(["", "", "2", "", "", "", "save"], replace(CPU_ONLY, cores=1)) == 0
    shown = capsys.readouterr().out
    assert "no GPU, 1 core," in shown and "CPU only, 1 core)" in shown and "more than the 1 core here" in shown


ADAPTERS = "adapters in place of all weights (shardkit config --lora 16)"


def test_with_adapters_the_estimates_are_those_of_the_plan_that_is_printed(folder, capsys):
    model, adapters = "gpt:layers=40,hidden=8192,heads=64", Adapters(16, ("qkv", "out"), are_packed=True)
    peaks = []
    for given in (None, adapters):
        assert talk_plainly(["", "", "", "1", "", "save"], model=model, adapters=given, force=True) == 0
        said = " ".join(capsys.readouterr().out.split())
        peaks.append(float(re.search(r"Memory of each rank: ([\d.]+) GiB", said)[1]))
    assert "LoRA of rank 16 (qkv, out), frozen weights in 4 bits, weights, gradients" in said
    flags = ["--lora", "16", "--lora-targets", "qkv,out", "--load-in-4bit"]
    assert f"Plan it: shardkit plan {' '.join(flags)}" in said
    assert run(["plan", *flags, "--batch-size", "1", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["strategies"][0]["peak_bytes"] / 2**30
    assert peaks[1] == pytest.approx(planned, abs=0.06)
    assert peaks[0] > 2 * peaks[1]


def test_layers_that_the_model_has_not_are_told_at_the_model(folder, capsys):
    asked = ["", "", "", "", "", "", "quit"]
    assert talk_plainly(asked, model="gpt:layers=4,hidden=256,heads=4", adapters=Adapters(8, ("q",))) == 0
    assert "--lora-targets: no linear layer has this name (got 'q'); " in " ".join(capsys.readouterr().out.split())


def test_adapters_are_for_the_questions(capsys):
    assert run(["config", "--defaults", "--dry-run", "--lora", "16"]) == 2
    assert "config: --lora, --lora-targets and --load-in-4bit are for the estimates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "hardware", "asked", "ways"),
    [
        ("layers=24,hidden=4096", CPU_ONLY, [""] * 5, f"activation checkpointing, more machines, {ADAPTERS}."),
        ("layers=24,hidden=4096", CPU_ONLY, ["", "1", ""], f"{ADAPTERS}."),
        ("layers=32,hidden=4096", EIGHT_GPUS, ["", "", "", "3"], f"FULL_SHARD, activation checkpointing, {ADAPTERS}."),
        (
            "layers=64,hidden=16384",
            EIGHT_GPUS,
            [*[""] * 4, "2", "no", "no", *[""] * 7],
            f"activation checkpointing, optimizer state in host memory, CPU offload, more machines, {ADAPTERS}.",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_what_would_need_less_of_what_is_chosen(
    folder, capsys, shape, hardware, asked, ways
):
    model = f"gpt:{shape},heads=32"
    assert talk_plainly([model, *asked, "quit"], hardware) == 0
    assert f"! This does not fit. It needs less with: {ways}" in " ".join(capsys.readouterr().out.split())


def test_the_fewest_ranks_that_share_a_sequence_so_that_it_fits_are_told(folder, capsys):
    pytest.importorskip("shardkit.plan.context")
    small = replace(EIGHT_GPUS, devices=(replace(EIGHT_GPUS.devices[0], memory_bytes=3000 * 2**20),) * 8)
    model = "gpt:layers=12,hidden=768,heads=12,vocab=50000"
    asked = ["", "", "", "1", "", "advanced", "ranks that share", "3", "done", "quit"]
    assert talk_plainly(asked, small, model=model) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"CPU offload, sequences shared by 4 ranks, more machines, {ADAPTERS}." in said
    assert "does not divide the 12 heads" in said
    assert said.count("! This does not fit.") == 1, "not after it was chosen"


@pytest.mark.slow
def test_a_model_that_cannot_be_read_is_asked_for_again_and_can_be_left_out(folder, capsys):
    assert talk_plainly(["", "", "", "", "", "", ""], model="nowhere:model") == 0
    shown = capsys.readouterr().out
    assert "! " in shown and "nowhere" in shown
    assert "# model:" not in (folder / "shardkit.yaml").read_text()


def test_what_is_not_a_model_is_said_at_once(folder, capsys):
    assert talk_plainly(["my model", "", "", "", "", "", "", "save"]) == 0
    assert "not a model (got 'my model'); give module:function" in capsys.readouterr().out


# --- back, review, edit, stop, resume ---


@pytest.mark.slow
def test_back_shows_the_former_answer_selected(folder):
    keys = ENTER * 2 + "4" + ENTER + BACK + BACK + ENTER + ENTER + ENTER * 4
    assert talk(keys) == 0
    assert saved(folder)["num_processes"] == 4


def test_after_another_answer_to_an_earlier_question_defaults_follow(folder):
    back = ["b"] * 4 + ["CPU of this machine"]
    assert talk_plainly([""] * 5 + back + [""] * 5) == 0
    written = saved(folder)
    assert (written["use_cpu"], written["num_processes"], written["mixed_precision"]) == (True, 2, "no")


def test_a_stopped_review_is_resumed_as_it_was_shown(folder, capsys):
    """The draft had the answer from before Back, and defaults that had followed had their former value."""
    assert talk_plainly([""] * 6 + ["change", "where", "several", "b", "where", "CPU of this machine", "done"]) == 130
    capsys.readouterr()
    assert talk_plainly(["resume", "save"]) == 0
    written = saved(folder)
    assert (written["num_machines"], written["num_processes"], written["mixed_precision"]) == (1, 2, "no")
    (folder / "shardkit.yaml").unlink()
    assert talk_plainly([""] * 6 + ["change", "where", "several", "b"]) == 130
    assert talk_plainly(["resume", "save"]) == 0
    assert saved(folder)["num_machines"] == 1


def test_an_answer_that_another_makes_impossible_is_named(folder, capsys):
    several = ["", "several", "4"] + [""] * 6
    asked = ["advanced", "machine rank", "3", "done", "change", "machines", "2", "done", "save"]
    assert talk_plainly([*several, *asked]) == 0
    assert "  machine rank is now 0: set at launch, so that all machines share one file\n" in capsys.readouterr().out


def test_back_at_the_first_question_asks_it_again(folder):
    assert talk(BACK * 3 + ENTER * 7) == 0


@pytest.mark.slow
def test_an_answer_is_changed_in_the_review_and_what_depends_on_it_is_asked(folder):
    change = "2" + ENTER + DOWN + ENTER + "4" + ENTER
    new = ENTER + "node-a" + ENTER + ENTER
    assert talk(ENTER * 6 + change + new + BACK + ENTER) == 0
    config = files.read(folder / "shardkit.yaml").config
    assert (config.num_machines, config.num_processes, config.main_process_ip) == (2, 16, "node-a")


@pytest.mark.slow
def test_back_while_changing_leaves_everything_as_it_was(folder):
    change = "2" + ENTER + DOWN + ENTER + "4" + ENTER
    assert talk(ENTER * 6 + change + BACK + BACK + ENTER) == 0
    assert saved(folder)["num_machines"] == 1


def test_an_answer_that_is_not_possible_any_more_is_asked_again(folder):
    several = ["", "several", "2", "", "", "", "", "HYBRID_SHARD", ""]
    alone = ["change", "where", "this machine", "NO_SHARD", "done", "save"]
    assert talk_plainly([*several, *alone]) == 0
    assert saved(folder)["fsdp_config"]["fsdp_sharding_strategy"] == "NO_SHARD"


def test_it_saves_elsewhere_and_refuses_a_folder_that_is_not_there(folder, capsys):
    assert talk_plainly([""] * 6 + ["another", "no/where.yaml", "other.yaml", "save"]) == 0
    assert (folder / "other.yaml").exists() and not (folder / "shardkit.yaml").exists()
    captured = capsys.readouterr().out
    assert "no/where.yaml: there is no folder no; create it" in captured
    assert "-o other.yaml" in captured


@pytest.mark.slow
def test_quitting_writes_nothing(folder, capsys):
    assert talk(ENTER * 6 + "5" + ENTER) == 0
    assert list(folder.iterdir()) == []
    assert "Nothing was written" in capsys.readouterr().err


OURS = """# chosen by the team on Monday
distributed_type: FSDP
num_processes: 8   # one node
mixed_precision: bf16
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD  # see issue 12
shardkit:
  checkpoint:
    keep_last: 7
"""


@pytest.mark.slow
def test_editing_keeps_comments_and_other_settings_shows_a_diff_and_leaves_a_backup(folder, capsys):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk(ENTER + "2" + ENTER + "s" + ENTER + "2" + ENTER + BACK + ENTER) == 0
    text = (folder / "shardkit.yaml").read_text()
    assert "# chosen by the team on Monday" in text and "# one node" in text
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP  # see issue 12" in text
    assert files.read(folder / "shardkit.yaml").config.shardkit.checkpoint.keep_last == 7
    assert (folder / "shardkit.yaml.bak").read_text() == OURS
    shown = capsys.readouterr().out
    assert "-  fsdp_sharding_strategy: FULL_SHARD" in shown
    assert "+  fsdp_sharding_strategy: SHARD_GRAD_OP" in shown
    assert "+num_processes" not in shown


def test_editing_with_a_model_keeps_the_line_ends(folder):
    (folder / "shardkit.yaml").write_bytes(OURS.replace("\n", "\r\n").encode())
    assert talk_plainly(["edit", "save"], model=SMALL_GPT) == 0
    first, second, rest = (folder / "shardkit.yaml").read_bytes().decode().split("\r\n", 2)
    assert (first, second) == ("# chosen by the team on Monday", f"# model: {SMALL_GPT}")
    assert rest == OURS.partition("\n")[2].replace("\n", "\r\n")


def test_the_review_tells_when_comments_cannot_be_kept(folder, capsys):
    theirs = "# mine\nnum_processes: 8\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 4}\n"
    (folder / "shardkit.yaml").write_text(theirs)
    change = ["change", "processes per machine", "6"]
    assert talk_plainly(["edit", *change, "done", "save"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("! It cannot be changed line by line, so it is written anew, without its comments.") == 1
    assert "# mine" not in (folder / "shardkit.yaml").read_text()


def test_editing_without_a_change_leaves_the_text_as_it_is(folder):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk(ENTER * 7) == 0
    assert (folder / "shardkit.yaml").read_text() == OURS


def test_a_remark_beside_the_model_stays_as_long_as_the_model_does(folder):
    path = folder / "shardkit.yaml"
    path.write_text(f"# model: {SMALL_GPT}   # our small one\n{OURS}")
    assert talk_plainly(["edit", "save"]) == 0
    assert path.read_text() == f"# model: {SMALL_GPT}   # our small one\n{OURS}"
    other = SMALL_GPT.replace("layers=4", "layers=2")
    assert talk_plainly(["edit", "save"], model=other) == 0
    assert path.read_text() == f"# model: {other}\n{OURS}"


def test_suggested_details_of_a_stopped_edit_are_resumed(folder):
    """The file's own details came back."""
    path = folder / "shardkit.yaml"
    path.write_text(OURS.replace("  fsdp_sharding", "  fsdp_offload_params: true\n  fsdp_sharding"))
    assert talk_plainly(["edit", "change", "FSDP details", "1", "done"]) == 130
    assert talk_plainly(["resume", "edit", "save"]) == 0
    assert path.read_text() == OURS.replace("  fsdp_sharding", "  fsdp_offload_params: false\n  fsdp_sharding")


def test_a_value_that_is_not_typed_that_way_is_kept_by_enter(folder):
    text = "distributed_type: XLA\nnum_processes: 8\ntpu_env:\n- LIBTPU_INIT_ARGS=--xla_a=1,--xla_b=2\n- DEBUG=1\n"
    (folder / "shardkit.yaml").write_text(text)
    assert talk_plainly(["edit", "advanced", "tpu env", "", "done", "save"]) == 0
    assert (folder / "shardkit.yaml").read_text() == text


def test_saving_without_a_change_keeps_the_backup_of_the_last_change(folder):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk_plainly(["edit", "change", "sharding", "2", "done", "save"]) == 0
    assert talk_plainly(["edit", "save"]) == 0
    assert (folder / "shardkit.yaml.bak").read_text() == OURS


def talk_while_somebody_edits(path, before_line, lines):
    """A conversation in plain mode; before that line is typed, something else writes the file."""

    def typed(prompt):
        number, line = next(left)
        if number == before_line:
            path.write_text(OURS.replace("num_processes: 8", "num_processes: 4"))
        return line

    left = iter(enumerate(lines))
    return converse(WizardOptions(), PlainPrompter(read=typed), EIGHT_GPUS)


def test_a_file_that_changes_before_its_edit_begins_is_read_again(folder):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk_while_somebody_edits(folder / "shardkit.yaml", 0, ["edit", "save"]) == 0
    assert saved(folder)["num_processes"] == 4


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_changes_while_it_is_edited_is_replaced_only_if_asked(folder, capsys, is_there):
    path = folder / "shardkit.yaml"
    if is_there:
        path.write_text(OURS)
    lines = ["edit"] if is_there else [""] * 6
    assert talk_while_somebody_edits(path, len(lines), [*lines, "save", "no", "quit"]) == 0
    assert "./shardkit.yaml was changed meanwhile. Replace it?" in capsys.readouterr().out
    assert saved(folder)["num_processes"] == 4
    path.write_text(OURS) if is_there else path.unlink()
    start = ["edit"] if is_there else ["start over"] + [""] * 6
    assert talk_while_somebody_edits(path, len(start), [*start, "save", "yes"]) == 0
    assert saved(folder)["num_processes"] == 8
    assert "num_processes: 4" in (folder / "shardkit.yaml.bak").read_text()


def test_a_file_that_cannot_be_written_is_told_and_another_name_asked_for(folder, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    assert talk_plainly([""] * 6 + ["save", "another", "other.yaml", "save"], user=True) == 0
    assert "cannot be written (Not a directory); choose another file" in " ".join(capsys.readouterr().out.split())
    assert saved(folder, "other.yaml")["num_processes"] == 8
    assert run(["config", "--defaults", "--user"]) == 2
    assert "cannot be written (Not a directory); choose another file" in capsys.readouterr().err


def test_an_edited_file_keeps_its_comments_under_another_name_and_its_mode(folder):
    (folder / "shardkit.yaml").write_text(OURS)
    (folder / "shardkit.yaml").chmod(0o600)
    assert talk_plainly(["edit", "another", "other.yaml", "save"]) == 0
    assert (folder / "other.yaml").read_text() == OURS
    assert talk_plainly(["edit", "change", "sharding", "2", "done", "save"]) == 0
    assert (folder / "shardkit.yaml").stat().st_mode & 0o777 == 0o600


def test_an_accelerate_file_in_the_folder_is_a_beginning(folder):
    (folder / "default_config.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: 'no'\nfsdp_config:\n  fsdp_sharding_strategy: 2\n"
    )
    assert talk(ENTER * 7) == 0
    assert saved(folder)["num_processes"] == 4 and saved(folder)["mixed_precision"] == "no"
    assert saved(folder)["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"


def test_several_machines_are_told_how_to_start(folder, capsys):
    assert talk_plainly(["", "several", "2", "node-a", "", "", "", "", "", "save"]) == 0
    assert "Run it on machine 1: shardkit launch --machine-rank 1 SCRIPT.py\n" in capsys.readouterr().out


@pytest.mark.slow
def test_starting_over_keeps_the_old_file_beside_it(folder):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk("2" + ENTER + ENTER * 7) == 0
    assert "Monday" not in (folder / "shardkit.yaml").read_text()
    assert (folder / "shardkit.yaml.bak").read_text() == OURS


def test_a_file_that_cannot_be_read_is_not_lost(folder, capsys):
    (folder / "shardkit.yaml").write_text("num_procesess: 8\n")
    assert talk("2" + ENTER) == 0
    assert "num_procesess" in capsys.readouterr().out
    assert (folder / "shardkit.yaml").read_text() == "num_procesess: 8\n"


@pytest.mark.slow
def test_ctrl_c_writes_nothing_and_the_next_run_resumes(folder, capsys):
    assert talk(ENTER * 2 + "4" + ENTER + STOP) == 130
    captured = capsys.readouterr()
    assert captured.err == "shardkit config: stopped, nothing was written; the next run offers to resume.\n"
    assert list(folder.iterdir()) == []
    assert talk(ENTER + ENTER * 4) == 0
    assert saved(folder)["num_processes"] == 4
    assert talk(ENTER + STOP) == 130


@pytest.mark.parametrize("model", ["", f"# model: {SMALL_GPT}\n"])
def test_a_stopped_edit_is_resumed_with_the_values_that_the_file_has_by_then(folder, model):
    """The draft had all values of the file too, which replaced what was written into it since."""
    path = folder / "shardkit.yaml"
    path.write_text(model + OURS)
    assert talk_plainly(["edit", "change", "sharding", "2", "done"]) == 130
    path.write_text(path.read_text().replace("processes: 8", "processes: 4").replace(": bf16", ": 'no'"))
    edited = path.read_text()
    assert talk_plainly(["resume", "edit", "save"]) == 0
    assert path.read_text() == edited.replace("FULL_SHARD", "SHARD_GRAD_OP")


def test_a_model_given_to_a_stopped_edit_is_resumed(folder):
    """The file's own one came back."""
    other = SMALL_GPT.replace("layers=4", "layers=2")
    (folder / "shardkit.yaml").write_text(f"# model: {SMALL_GPT}\n{OURS}")
    assert talk_plainly(["edit", "change", "model", other, "done"]) == 130
    assert talk_plainly(["resume", "edit", "save"]) == 0
    assert (folder / "shardkit.yaml").read_text() == f"# model: {other}\n{OURS}"


def test_an_edit_without_another_answer_leaves_nothing_to_resume(folder, capsys):
    (folder / "shardkit.yaml").write_text(OURS)
    assert talk_plainly(["edit", "change", "sharding", "2", "sharding", "1", "done"]) == 130
    assert "stopped, nothing was written.\n" in capsys.readouterr().err


@pytest.mark.slow
def test_the_answers_for_another_file_are_kept(folder):
    assert talk(ENTER * 2 + "4" + ENTER + STOP) == 130
    assert talk(ENTER * 7, output=Path("other.yaml")) == 0
    assert talk(ENTER + ENTER * 4) == 0
    assert saved(folder)["num_processes"] == 4
    assert list((folder.parent / "state" / "shardkit" / "drafts").iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "ago"),
    [(5, "just now"), (60, "1 minute ago"), (600, "10 minutes ago"), (7200, "2 hours ago")],
)
def test_a_draft_says_how_old_it_is(seconds, ago):
    assert Draft("shardkit.yaml", {"where": "here"}, 0.0).text(seconds) == f"1 answer, {ago}"


def test_a_resumed_run_can_start_fresh(folder):
    assert talk(ENTER * 2 + "4" + ENTER + STOP) == 130
    assert talk("2" + ENTER + ENTER * 7) == 0
    assert saved(folder)["num_processes"] == 8


def test_a_dry_run_prints_the_file_and_writes_nothing(folder, capsys):
    assert talk(ENTER * 7, dry_run=True) == 0
    assert list(folder.iterdir()) == []
    assert "fsdp_sharding_strategy: FULL_SHARD" in capsys.readouterr().out


@pytest.mark.slow
def test_the_user_file_goes_to_the_user_folder_only_when_asked(folder):
    assert talk(ENTER * 7, user=True) == 0
    assert files.user_path().is_file()
    assert list(folder.iterdir()) == []


# --- the command that gives the same file ---


def test_the_printed_command_writes_the_file_that_was_saved(folder, capsys):
    """Of a user's file that was saved elsewhere it named --user, which would have written the other one."""
    assert talk_plainly([""] * 6 + ["another", "other.yaml", "save"], user=True) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("-o other.yaml --force")
    assert talk_plainly([""] * 6 + ["save"], user=True) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("--force --user")


@pytest.mark.parametrize("model", [None, SMALL_GPT])
def test_the_printed_command_gives_the_same_file(folder, capsys, model):
    asked = ["several", "2", "node-a", "", "4", "fp16", "HYBRID_SHARD", ""]
    wanted = ["advanced", "seed", "7", "reduce dtype", "bf16", "backward", "BACKWARD_POST", "done", "save"]
    assert talk_plainly([*([] if model else [""]), *asked, *wanted], model=model) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    first = (folder / "shardkit.yaml").read_text()
    (folder / "shardkit.yaml").unlink()
    assert run(shlex.split(command)[1:]) == 0
    assert (folder / "shardkit.yaml").read_text() == first


# --- nobody to ask ---


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--no-input"], ["--plain"]])
def test_without_a_terminal_it_never_asks_and_names_the_flags(folder, arguments):
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "config", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--defaults" in done.stderr and "--set" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


FIRST_PROMPT = """
import sys
import shardkit.cli.config
from shardkit.wizard.prompter import PlainPrompter
from shardkit.wizard.run import WizardOptions, converse
from tests.wizard_talk import talk, ENTER, STOP
assert talk(STOP) == 130
assert talk(ENTER * 3 + STOP, model="gpt:layers=4,hidden=256,heads=4") == 130
assert "questionary" in sys.modules
assert "torch" not in sys.modules, "torch was loaded"
"""


@pytest.mark.slow
def test_the_wizards_process_does_not_load_torch(folder):
    here = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(here)!r})" + FIRST_PROMPT],
        check=True,
        timeout=120,
        capture_output=True,
    )

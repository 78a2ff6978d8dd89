"""`shardkit plan`: the report, JSON, the searches, the picture, and what it says when something is missing."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from shardkit.cli.main import run
from shardkit.config import hardware
from shardkit.config.schema import Config, FsdpConfig, ShardingStrategy
from shardkit.errors import UsageError
from shardkit.model.describe import TransformerFacts
from shardkit.model.sources import describe
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.plan import devices, measured, optimizers, plot, roofline
from shardkit.plan.activations import Loss
from shardkit.plan.answer import Answer, PlanRequest, possible_strategies, row
from shardkit.plan.answering import SimulationOptions, answer
from shardkit.plan.json_answer import to_json
from shardkit.plan.notes import check_seq_len, frozen_in_fp32
from shardkit.plan.png import figure_of
from shardkit.plan.rank_memory import CATEGORIES, Memory, Moment, RankMemory
from shardkit.plan.report import render
from shardkit.plan.request import build, configuration
from shardkit.plan.search import Question, find
from shardkit.plan.simulated_optimizers import optimizer_factory
from shardkit.plan.suggest import changes, suggest_from
from shardkit.sizes import read_bytes
from shardkit.wording import count_text

SIMULATED = SimulationOptions(every_strategy=False, is_exact=False)
SMALL = "gpt:layers=4,hidden=64,heads=4,vocab=500,seq=32"
GIB = 2**30


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No configuration of this machine plays in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["plan", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["plan", *arguments])
    return code, capsys.readouterr().err


def test_the_model_may_be_given_without_its_flag(capsys):
    assert plan(capsys, SMALL, "--world", "2") == plan(capsys, "--model", SMALL, "--world", "2")
    assert run(["plan", SMALL, "--model", "gpt-1t"]) == 2
    assert f"plan: two models (got {SMALL} and --model gpt-1t); give one." in capsys.readouterr().err


@pytest.mark.requirement("B5")
def test_sequences_that_nobody_has_chosen_are_said_where_they_are_long(capsys):
    model = ["gpt:layers=2,hidden=64,heads=2,seq=131072", "--world", "2", "--device", "h100-80", "--batch-size", "1"]
    said = [plan(capsys, *model, *more) for more in ([], ["--seq-len", "131072"], ["--seq-len", "2048"])]
    longest = "(the longest sequences that the model takes; --seq-len plans shorter ones)"
    assert f"131,072 tokens a rank\n{longest}\n" in said[0]
    assert "131,072 tokens a rank\n\n" in said[1] and "2,048 tokens a rank\n\n" in said[2]


def test_the_report_for_gpt_175b(capsys):
    out = plan(
        capsys,
        *("--model", "gpt-175b", "--world", "128", "--batch-size", "1", "--device", "h100-80"),
        *("--set", "fsdp_config.fsdp_activation_checkpointing=true"),
    )
    assert out.startswith("gpt-175b, 175 B parameters, 96 x Block\n128 ranks on 16 machines, H100 80 GB, bf16, adamw")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line[2:3].isdigit() and line.rstrip().endswith(("yes", "NO"))]
    assert [line.split()[-1] for line in rows] == ["yes", "NO", "NO", "NO", "NO"]
    assert rows[0].startswith("* 1 FULL_SHARD")
    assert "Suggested: 1 FULL_SHARD (least traffic over the slowest link among those that" in out
    assert "an estimate" in out
    said = " ".join(out.split())
    assert "35% to 59% of the device's peak arithmetic (published: llm-foundry's benchmarks on H100" in said
    assert "80% of its links" in said


def test_without_a_file_the_precision_is_that_of_a_launch(capsys):
    arguments = ("--model", "gpt:layers=2,hidden=64,heads=2", "--world", "2")
    for device, precision in [("h100-80", "bf16"), ("cpu", "fp32"), ("CPU", "fp32")]:
        assert f", {precision}, adamw" in plan(capsys, *arguments, "--device", device)
    assert "CPU, fp32, adamw" in plan(capsys, *arguments, "--set", "use_cpu=true")
    assert "CPU, bf16, adamw" in plan(capsys, *arguments, "--device", "cpu", "--set", "mixed_precision=bf16")


def test_ranks_on_the_cpu_share_the_memory_of_this_machine(capsys):
    """As the wizard counts it. A CPU of the table, on another machine, has an unknown memory."""
    asked = ("--model", "gpt:layers=2,hidden=64,heads=2", "--batch-size", "1", "--world", "4", "--per-machine", "2")
    here = hardware.detect().memory_bytes
    found = json.loads(plan(capsys, *asked, "--set", "use_cpu=true", "--json"))
    assert (found["device"]["name"], found["device"]["memory_bytes"]) == ("CPU", here // 2)
    assert [row["fits"] for row in found["strategies"]] == [True] * 5
    said = plan(capsys, *asked, "--set", "use_cpu=true")
    assert f"is within a rank's share of the host memory, {here / 2 / 2**30:,.1f} GiB" in " ".join(said.split())
    there = json.loads(plan(capsys, *asked, "--device", "cpu", "--json"))
    assert there["device"]["memory_bytes"] is None


def test_a_file_that_nobody_named_is_told(capsys, tmp_path):
    (tmp_path / "shardkit.yaml").write_text("mixed_precision: fp16\n")
    for more, told in (([], True), (["--config", "shardkit.yaml"], False)):
        assert run(["plan", "gpt:layers=2,hidden=64,heads=2", "--world", "2", "--device", "h100-80", *more]) == 0
        out, err = capsys.readouterr()
        assert ", fp16, adamw" in out
        assert (err == f"plan: settings of {tmp_path / 'shardkit.yaml'}\n") is told


def test_the_docs_show_what_is_printed(capsys):
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "plan.md").read_text()
    shown = page[page.index("```text\n") + 8 :]
    shown = shown[: shown.index("```")]
    out = plan(
        capsys,
        *("--model", "gpt-175b", "--world", "128", "--batch-size", "1", "--device", "h100-80"),
        *("--set", "fsdp_config.fsdp_activation_checkpointing=true"),
    )
    assert out.startswith(shown)


def test_what_is_configured_is_marked(capsys):
    out = plan(capsys, "--model", SMALL, "--world", "2", "--strategy", "2", "--device", "l4")
    marked = [line for line in out.splitlines() if line.startswith("* ")]
    assert len(marked) == 2
    assert all(line.startswith("* 2 SHARD_GRAD_OP") for line in marked)
    assert "Not counted: all activations: add --batch-size." in " ".join(out.split())
    assert "No strategy is suggested: not counted: all activations: add --batch-size." in " ".join(out.split())
    assert not [line for line in out.splitlines() if line.endswith("yes")]


@pytest.mark.parametrize(
    ("arguments", "marked", "suggests"),
    [
        (("--set", "distributed_type=MULTI_GPU", "--world", "4"), "* 3 NO_SHARD", True),
        (("--set", "distributed_type=NO"), "* 3 NO_SHARD", False),
        (("--strategy", "4", "--world", "2"), "* 4 HYBRID_SHARD", True),
        (("--set", "distributed_type=XLA", "--world", "8", "--device", "tpu-v5e"), "* 3 NO_SHARD", True),
        (("--set", "distributed_type=XLA", "--set", "xla=true", "--device", "tpu-v5e"), "* 1 FULL_SHARD", False),
        (("--set", "use_cpu=true", "--world", "2"), "* 1 FULL_SHARD", True),
    ],
)
def test_every_kind_of_run_has_its_row(capsys, arguments, marked, suggests):
    out = plan(capsys, "--model", SMALL, "--batch-size", "1", *arguments)
    assert f"\n{marked}" in out
    assert ("Suggested:" in out) is suggests


TPU = ("--set", "distributed_type=XLA", "--world", "8", "--device", "tpu-v5e", "--batch-size", "4")


def test_what_a_tpu_runs_is_planned(capsys):
    """`xla` shards the parameters, `xla_fsdp_grad_ckpt` recomputes, `downcast_bf16` halves what is kept."""

    def rows(*settings: str) -> dict[int, dict]:
        pairs = [part for each in settings for part in ("--set", each)]
        data = json.loads(plan(capsys, "--model", SMALL, *TPU, *pairs, "--json"))
        return {row["number"]: row for row in data["strategies"]}

    plain = rows("xla=true")
    assert list(plain) == [1, 3]
    assert rows() == plain  # `xla` chooses among them
    assert rows("xla=true", "xla_fsdp_grad_ckpt=true") == rows(
        "xla=true", "fsdp_config.fsdp_activation_checkpointing=true"
    )
    assert rows("xla=true", "xla_fsdp_settings={compute_dtype: bfloat16}") == rows("xla=true", "mixed_precision=bf16")
    kept, narrow = (found[3]["peak"] for found in (rows("mixed_precision=no"), rows("downcast_bf16=true")))
    for category in ("parameters", "gradients", "optimizer_state"):
        assert narrow[category] == kept[category] / 2
    marked = plan(capsys, "--model", SMALL, *TPU, "--strategy", "1")
    assert "* 1 FULL_SHARD" in marked and "PyTorch/XLA schedules its own collectives" in marked


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--strategy", "2"), "fsdp_sharding_strategy: the compiler decides when gathered parameters are freed"),
        (("--set", "fsdp_config.fsdp_offload_params=true"), "fsdp_offload_params: parameters stay on the devices"),
        (("--set", "downcast_bf16=true", "--simulate"), "--simulate: downcast_bf16 is not simulated (got true)"),
    ],
)
def test_what_a_tpu_cannot_run_is_refused(capsys, arguments, text):
    code, err = refused(capsys, "--model", SMALL, *TPU, *arguments)
    assert code == 2
    assert text in err


@pytest.mark.slow
def test_what_to_change_when_it_does_not_fit(capsys):
    out = plan(capsys, "--model", "gpt-175b", "--world", "64", "--batch-size", "2", "--device", "a100-40")
    assert "1 FULL_SHARD needs" in out
    for change in ("fsdp_offload_params: true", "fsdp_activation_checkpointing: true", "--world 128", "--batch-size 1"):
        line = next(line for line in out.splitlines() if change in line)
        assert line.split()[0].startswith("-")
        assert line.split()[1] == "GiB"
        assert line.split()[2] in {"yes", "NO"}
    assert max(map(len, out.splitlines())) <= 80


def test_changes_of_a_small_model_are_in_its_unit(capsys):
    out = plan(capsys, "--model", SMALL, "--world", "8", "--batch-size", "64", "--device", "1GiB")
    assert re.search(r"needs [\d,]+\.\d MiB\. Changes", out)
    assert " GiB " not in out.partition("Changes that lower it")[2].partition("\n\n")[0]


def test_a_change_that_saves_less_than_is_printed_is_not_minus_nothing(capsys):
    out = plan(
        capsys, "--model", "gpt:layers=1,hidden=64,heads=1", "--world", "7", "--batch-size", "1", "--device", "1GiB"
    )
    assert re.search(r"^ +<0\.1 GiB  NO +--world 14 ", out, re.M)
    assert "-0.0" not in out


def test_each_change_alone_has_the_effect_that_is_said():
    request = make_request(world_size=8, batch_size=4, strategy=3)
    for change in changes(request):
        if change.text == "fsdp_sharding_strategy: FULL_SHARD":
            assert change.peak_bytes == row(request, ShardingStrategy.FULL_SHARD).memory.peak.total
            return
    pytest.fail("no other strategy was named")


@pytest.mark.slow
def test_the_largest_batch_of_an_own_model_is_not_sent_in_a_circle(capsys):
    own = ("--model", "torch.nn:Transformer", "--world", "2", "--find", "max-batch")
    code, err = refused(capsys, *own)
    assert code == 2
    assert err.endswith("unknown from its source; --simulate runs its code, with --batch if that is your own.\n")
    code, err = refused(capsys, *own, "--simulate", "--batch", "my:batch")
    assert code == 2
    assert err.endswith("plan for one size after the other without --find.\n")


OF_FSDP = "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmain_process_ip: a\n"


@pytest.mark.slow
@pytest.mark.requirement("U5")
@pytest.mark.parametrize(
    "file",
    [
        "distributed_type: MULTI_GPU\nnum_processes: 8\n",
        "distributed_type: XLA\nnum_processes: 8\n",
        OF_FSDP + "fsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n",
        OF_FSDP + "mixed_precision: bf16\nshardkit:\n  gradient_accumulation_steps: 3\n",
        OF_FSDP + "fsdp_config:\n  fsdp_sharding_strategy: 5\nshardkit:\n  mesh:\n    shard_size: 4\n",
        OF_FSDP + "fsdp_config:\n  fsdp_sharding_strategy: 4\nshardkit:\n  mesh:\n    replicate_size: 4\n",
    ],
)
def test_each_change_has_the_effect_that_is_said_when_it_is_typed(capsys, file):
    Path("shardkit.yaml").write_text(file)
    given = {"--model": "gpt:layers=8,hidden=2048,heads=16", "--batch-size": "16", "--device": "20GiB"}
    words = [word for pair in given.items() for word in pair]
    said = json.loads(plan(capsys, *words, "--json"))["changes"]
    assert said
    for change in said:
        flags, settings = dict(given), list[str]()
        for part in change["text"].split(" and "):
            for words in re.sub(r" \(.*\)$", "", part).split(", "):
                if words.startswith("--"):
                    flags |= dict([words.split()])
                else:
                    settings.append(words.replace(": ", "="))
        words = [word for pair in [*flags.items(), *(("--set", each) for each in settings)] for word in pair]
        found = json.loads(plan(capsys, *words, "--json"))
        after = next(row for row in found["strategies"] if row["strategy"] == found["chosen"])
        for name, value in (("peak_bytes", after["peak_bytes"]), ("host_bytes", sum(after["host"].values()))):
            assert value == change[name], change["text"]
        assert after["fits"] is change["fits"], change["text"]


@pytest.mark.slow
def test_shorter_sequences_are_a_change_where_the_models_longest_were_taken():
    request = make_request("gpt:layers=8,hidden=2048,heads=16,seq=32768")
    (change,) = [change for change in changes(request) if change.text.startswith("--seq-len 8192 ")]
    assert change.peak_bytes == row(replace(request, seq_len=8192)).memory.peak.total and change.fits
    for usual in (replace(request, seq_len=32768), make_request("gpt:layers=32,hidden=4096,heads=32,seq=8192")):
        assert not any("--seq-len" in change.text for change in changes(usual))


LONG = "gpt:layers=32,hidden=4096,heads=32,seq=131072"


def sharing(request: PlanRequest, ranks: int) -> PlanRequest:
    return request.with_config(request.config.changed(shardkit={"mesh": {"context_size": ranks}}))


def recomputing(request: PlanRequest) -> PlanRequest:
    return request.with_config(request.config.changed(fsdp={"activation_checkpointing": True}))


@pytest.mark.slow
def test_the_fewest_ranks_that_have_to_share_a_sequence_are_a_change():
    request = recomputing(make_request(LONG, device="a100-40"))
    (change,) = [change for change in changes(request) if "context_size" in change.text]
    assert change.text == "shardkit.mesh.context_size: 8 (8 ranks share each sequence)"
    assert (change.peak_bytes, change.fits) == (row(sharing(request, 8)).memory.peak.total, True)
    assert not row(sharing(request, 4)).fits
    told = " ".join(render(answer(request)).split())
    assert "forward and loss run inside of accelerator.context_parallel. A step then has fewer sequences;" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("gpt-175b", {}),  # its state alone is too large
        ("gpt:layers=32,hidden=4096,heads=32,seq=8192", {"batch_size": 32}),  # one sequence fits
        (LONG, {"world_size": 7, "ranks_per_machine": 7}),  # which divides no heads
        (LONG, {"device": devices.find("10GiB")}),  # none is enough
    ],
)
def test_no_ranks_are_to_share_sequences_where_that_does_not_help(model, changed):
    request = recomputing(make_request(model, device="h100-80"))
    found = changes(replace(request, **changed))
    assert found
    assert not any(change.text.startswith("shardkit.mesh") for change in found)


def test_attention_in_windows_is_not_to_be_shared():
    request = recomputing(make_request(LONG, device="a100-40"))
    facts = replace(request.description.facts, window=4096)
    windowed = replace(request, description=replace(request.description, facts=facts))
    assert not any("context_size" in change.text for change in changes(windowed))


def test_a_plan_of_ranks_that_share_sequences(capsys):
    flags = (LONG, "--world", "16", "--device", "h100-80", "--batch-size", "2", "--tokens", "300B")
    recomputes = ("--set", "fsdp_config.fsdp_activation_checkpointing=true")
    without = (*recomputes, "--set", "shardkit.gradient_accumulation_steps=3")
    settings = (*without, "--set", "shardkit.mesh.context_size=8")
    told = " ".join(plan(capsys, *flags, *settings).split())
    assert "micro-batch 2 x 131,072 tokens for 8 ranks, which share each sequence," in told
    assert "each computes 32,768 tokens of a micro-batch, and a step has 12 sequences over all ranks." in told
    assert "steps of 1,572,864 tokens" in told  # 12 x 131,072
    found = json.loads(plan(capsys, *flags, *settings, "--json"))
    assert found["context"] == {"size": 8, "rank_tokens": 32768, "step_sequences": 12}
    alone = json.loads(plan(capsys, *flags, *without, "--json"))
    assert alone["context"] == {"size": 1, "rank_tokens": 262144, "step_sequences": 96}
    for one, other in zip(found["strategies"], alone["strategies"], strict=True):
        assert one["peak"]["activations"] < 0.14 * other["peak"]["activations"]
        times = [each["step_time_estimate"] for each in (one, other)]
        assert [8 * each for each in times[0]["compute_s"]] == pytest.approx(times[1]["compute_s"])
        exchanged = sum(each["payload_bytes"] for each in one["traffic"]["collectives"] if each["axis"] == "context")
        assert times[0]["exchange_s"] == pytest.approx(exchanged * 7 / 8 / (450e9 * 0.8), rel=1e-3)
        assert times[0]["fastest_s"] >= times[0]["compute_s"][0] + times[0]["exchange_s"]
        assert times[1]["exchange_s"] == 0


def test_the_largest_batch_of_ranks_that_share_sequences(capsys):
    request = sharing(recomputing(make_request(LONG, device="h100-80")), 8)
    found = find(Question.MAX_BATCH, request)
    assert found.text.startswith(f"Largest micro-batch: {found.value} sequences of 131,072 tokens per 8 ranks, which")
    assert row(replace(request, batch_size=found.value)).fits
    assert not row(replace(request, batch_size=found.value + 1)).fits
    small = replace(request, device=devices.find("10GiB"))
    assert "of 131,072 tokens per 8 ranks, which share each, fits: " in find(Question.MAX_BATCH, small).text


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (["--set", "shardkit.mesh.context_size=3"], ["does not divide the number of ranks (got 3 of 8)"]),
        (
            ["--set", "shardkit.mesh.context_size=8", "--seq-len", "1001"],
            ["does not divide a sequence's tokens (got 8 for 1,001)", "the attention heads (got 8 for 4)"],
        ),
    ],
)
def test_ranks_that_cannot_share_sequences(capsys, flags, problems):
    model = "gpt:layers=4,hidden=64,heads=4,vocab=500,seq=2048"
    code, err = refused(capsys, model, "--world", "8", "--batch-size", "1", *flags)
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == len(problems)
    for problem, line in zip(problems, lines, strict=True):
        assert problem in line and "choose a divisor" in line


def test_what_is_not_known_of_ranks_that_share_sequences_is_said(capsys):
    told = " ".join(plan(capsys, SMALL, "--world", "8", "--set", "shardkit.mesh.context_size=4").split())
    assert "sequences shared by 4 ranks" in told
    assert "what they exchange in attention is not in the traffic: add --batch-size." in told


def test_changes_together_where_none_is_enough():
    request = make_request("gpt:layers=32,hidden=4096,heads=32", world_size=8, batch_size=8, device="l4")
    *single, together = changes(request)
    assert not any(change.fits for change in single)
    assert together.fits
    assert "fsdp_activation_checkpointing: true" in together.text
    assert together.text.count(" and ") >= 1


@pytest.mark.slow
def test_changes_together_are_compared_with_what_was_given():
    request = replace(make_request("gpt-175b", world_size=1, device="h100-80"), loss=Loss.FUSED)
    config = request.config.model_copy(update={"use_cpu": True})  # without offload
    *_, together = changes(request.with_config(config))
    assert "--world 64 (64 x the ranks)" in together.text


@pytest.mark.slow
def test_a_gpu_is_planned_as_a_gpu_with_a_file_for_the_cpu(capsys):
    Path("shardkit.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 8\n")
    out = plan(capsys, "--model", "gpt-175b", "--device", "h100-80", "--batch-size", "1")
    assert "fsdp_offload_params: true" in out


def make_request(
    model: str = SMALL, world_size: int = 8, batch_size: int | None = 1, strategy: int = 1, device: str = "l4"
) -> PlanRequest:
    config = Config(mixed_precision="bf16", fsdp=FsdpConfig(sharding_strategy=strategy))
    return PlanRequest(
        description=describe(model),
        config=config,
        world_size=world_size,
        ranks_per_machine=min(8, world_size),
        device=devices.find(device),
        batch_size=batch_size,
    )


def test_the_largest_batch_fits_and_the_next_one_does_not():
    request = make_request("gpt:layers=24,hidden=1024,heads=16", world_size=8)
    found = find(Question.MAX_BATCH, request)
    assert isinstance(found.value, int)
    assert row(_with(request, batch_size=found.value)).fits
    assert not row(_with(request, batch_size=found.value + 1)).fits
    assert str(found.value) in found.text


def test_a_search_for_the_largest_batch_evaluates_few_sizes():
    evaluated = []

    def evaluate(request: PlanRequest):
        evaluated.append(request.batch_size)
        return row(request)

    found = find(Question.MAX_BATCH, make_request("gpt:layers=24,hidden=1024,heads=16"), evaluate)
    assert evaluated == [1, 2, found.value, found.value + 1]  # a simulation of each takes seconds


def _with(request: PlanRequest, **changed: object) -> PlanRequest:
    from dataclasses import replace

    return replace(request, **changed)


def test_the_fewest_gpus_fit_and_fewer_do_not():
    request = make_request("gpt:layers=32,hidden=4096,heads=32", world_size=8, device="a100-80")
    found = find(Question.MIN_GPUS, request)
    assert isinstance(found.value, int)
    assert row(_with(request, world_size=found.value)).fits
    fewer = found.value - (8 if found.value > 8 else 1)
    assert not row(_with(request, world_size=fewer)).fits


def test_the_fewest_gpus_that_share_sequences_in_threes_are_found():
    """Neither 8 times a power of 2 nor every number of machines is a multiple of 3."""
    request = recomputing(make_request("gpt:layers=96,hidden=6144,heads=48,seq=6144", device="a100-40"))
    request = sharing(replace(request, world_size=48), 3)
    assert find(Question.MIN_GPUS, request).value == 24
    assert row(replace(request, world_size=24)).fits and not row(replace(request, world_size=6)).fits


@pytest.mark.parametrize(("mesh", "fewest"), [({"replicate_size": 3}, 24), ({"shard_size": 16}, 16)])
def test_the_fewest_gpus_of_a_mesh_are_found(mesh, fewest):
    request = make_request("gpt:layers=48,hidden=4096,heads=32", 48, strategy=4, device="a100-40")
    found = find(Question.MIN_GPUS, request.with_config(request.config.changed(shardkit={"mesh": mesh})))
    assert found.value == fewest, found.text


def test_nothing_fits_is_said():
    request = make_request("gpt:layers=8,hidden=25600,heads=160", device="l4")
    fewest, largest = find(Question.MIN_GPUS, request), find(Question.MAX_BATCH, request)
    assert (fewest.value, largest.value) == (None, None)
    assert fewest.text.startswith("FULL_SHARD does not fit on any number up to 65,536; the smallest peak is on 1,024: ")
    assert (
        "92.7 GiB per rank, of which 46.3 are gradients being reduced and 34.3 are gathered units. Use" in fewest.text
    )
    assert fewest.text.endswith("Use smaller units or larger devices.")
    assert "Not even one sequence of 2,048 tokens per rank fits" in largest.text
    found = find(Question.STRATEGY, request)
    assert found.value is None
    assert found.text == "Strategy: 1 FULL_SHARD (least memory; no strategy fits)."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "recomputes", "advice"),
    [
        ("gpt:layers=80,hidden=8192,heads=64", 3, False, "FULL_SHARD, an optimizer with less state or"),
        ("gpt:layers=80,hidden=8192,heads=64", 2, True, "FULL_SHARD, smaller units or larger devices."),
        ("gpt:layers=8,hidden=2048,heads=16,seq=65536", 1, False, "activation checkpointing, a smaller micro-batch,"),
        ("gpt:layers=8,hidden=2048,heads=16,seq=65536", 1, True, "a smaller micro-batch, shorter sequences, sequences"),
    ],
)
def test_a_search_in_vain_names_what_lowers_the_largest_part(model, strategy, recomputes, advice):
    request = make_request(model, strategy=strategy)
    request = request.with_config(request.config.changed(fsdp={"activation_checkpointing": recomputes}))
    assert f" Use {advice}" in find(Question.MIN_GPUS, request).text


def test_a_search_for_the_largest_batch_names_the_sequences():
    """The model's longest are planned where no length is given."""
    request = make_request("gpt:layers=8,hidden=1024,heads=16,vocab=64,seq=100000")
    implied = find(Question.MAX_BATCH, request).text
    assert implied.endswith("100,000 tokens per rank fits: FULL_SHARD on 8 x L4 24 GB. --seq-len plans shorter ones.")
    given = find(Question.MAX_BATCH, replace(request, seq_len=10_000)).text
    assert given.startswith("Largest micro-batch: ") and given.endswith(
        " of 10,000 tokens per rank (FULL_SHARD on 8 x L4 24 GB)."
    )


@pytest.mark.slow
def test_a_change_to_host_memory_says_how_much(capsys):
    asked = ("gpt-1t", "--world", "8", "--batch-size", "1", "--device", "h100-80")
    found = json.loads(plan(capsys, *asked, "--json"))
    (change,) = (each for each in found["changes"] if each["text"].startswith("fsdp_offload_params"))
    assert change["host_bytes"] == pytest.approx(16 * found["model"]["parameters"] / 8, rel=0.01)
    text = plan(capsys, *asked)
    line = text.index("fsdp_offload_params: true")
    assert text[line:].splitlines()[1].strip() == "with 1,880 GiB of host memory a rank: more than its part"


def test_what_is_offloaded_is_compared_with_the_memory_of_the_machine(capsys):
    """16 bytes a parameter of the shards, and 8 GiB for each rank's process, in a machine of eight."""
    asked = ("gpt:layers=4,hidden=2048,heads=16", "--world", "16", "--batch-size", "1", "--device", "h100-80")
    asked += ("--set", "fsdp_config.fsdp_offload_params=true")
    usual = plan(capsys, *asked)
    found = json.loads(plan(capsys, *asked, "--json"))
    (held,) = (sum(one["host"].values()) for one in found["strategies"] if one["strategy"] == "FULL_SHARD")
    assert held == pytest.approx(16 * found["model"]["parameters"] / 16, rel=0.01)
    assert found["device"]["host_bytes_per_rank"] == 256 * 10**9
    told = " ".join(usual.split())
    assert f"Host memory: {held * 8 / GIB:,.1f} GiB, pinned, for 8 ranks of a machine; a rank's part is 238.4" in told
    assert "(usual for H100 80 GB; --host-memory sets it), less 8 GiB for Python" in told
    needed = 8 * (held + 8 * GIB)
    for size, fits in ((needed - 2**20, False), (needed + 2**20, True)):
        given = (*asked, "--host-memory", f"{size // 2**20}MiB")
        data = json.loads(plan(capsys, *given, "--json"))
        assert data["strategies"][0]["fits"] is fits
        text = plan(capsys, *given)
        lines = text.splitlines()
        below = lines[next(number for number, line in enumerate(lines) if "1 FULL_SHARD" in line) + 1]
        assert below.endswith("in the host's memory, more than its part") is not fits
        assert "(from --host-memory), less 8 GiB" in " ".join(text.split())
        assert ("That is too little: keep less there, or use more machines" in " ".join(text.split())) is not fits
        assert not data["changes"]  # they lower the peak on the device, which fits
        assert data["suggested"] != "FULL_SHARD" or fits  # what is not offloaded (NO_SHARD) may fit
    fewest = plan(capsys, *asked, "--host-memory", "10GiB", "--find", "min-gpus")
    assert "GiB in host memory, where its part is" in " ".join(fewest.split())
    unknown = " ".join(plan(capsys, *asked[:-3], "80GiB", *asked[-2:]).split())
    assert "pinned, for 8 ranks of a machine; what a machine has is not known, and not compared: add" in unknown
    assert (
        "--host-memory: not the memory of a machine (got 'much'); write 512GiB."
        in refused(capsys, *asked, "--host-memory", "much")[1]
    )


def test_the_largest_batch_fits_the_host_memory_too():
    """Where blocks keep their inputs in host memory."""
    request = make_request("gpt:layers=24,hidden=2048,heads=16", device="h100-80", world_size=8)
    request = request.with_config(
        request.config.changed(fsdp={"activation_checkpointing": True}, shardkit={"offload_activations": True})
    )
    free = find(Question.MAX_BATCH, request).value
    limited = replace(request, host_bytes=8 * (8 + 2) * GIB)
    found = find(Question.MAX_BATCH, limited).value
    assert isinstance(found, int) and isinstance(free, int)
    assert 0 < found < free
    assert row(_with(limited, batch_size=found)).fits
    assert row(_with(limited, batch_size=found + 1)).fits is False


@pytest.mark.parametrize(("world", "said"), [(64, None), (60, "gathered as, 53% more (")])
def test_shards_that_are_mostly_padding_are_said(capsys, world, said):
    """64 rows on 60 ranks: 2 on each of 32, and none on 28."""
    out = plan(capsys, "gpt:layers=2,hidden=64,heads=4,vocab=64,seq=64", "--world", str(world), "--device", "l4")
    assert (said in " ".join(out.split())) if said else "are padded" not in out


def test_what_a_search_finds_is_what_is_planned(capsys):
    asked = ("gpt:layers=8,hidden=2048,heads=16", "--device", "l4", "--json")
    found = json.loads(plan(capsys, *asked, "--world", "4", "--find", "max-batch"))
    assert found["batch_size"] == found["finding"]["value"] > 1
    assert found["strategies"][0]["fits"]
    found = json.loads(plan(capsys, *asked, "--memory", "8GiB", "--batch-size", "1", "--find", "min-gpus"))
    assert found["world_size"] == found["finding"]["value"] > 1
    assert found["strategies"][0]["fits"]
    in_vain = json.loads(plan(capsys, *asked, "--world", "1", "--find", "max-batch", "--memory", "8GiB"))
    assert (in_vain["finding"]["value"], in_vain["batch_size"]) == (None, 1)
    assert in_vain["changes"]


def test_the_size_of_a_checkpoint(capsys):
    """12 bytes a parameter with AdamW, under every strategy, also where they are in host memory."""
    asked = ("gpt:layers=8,hidden=2048,heads=16", "--world", "16", "--device", "h100")
    for flags in (
        ("--strategy", "1"),
        ("--strategy", "3"),
        ("--strategy", "4"),
        ("--set", "shardkit.offload_optimizer=true"),
    ):
        found = json.loads(plan(capsys, *asked, *flags, "--json"))
        assert found["checkpoint_bytes"] == pytest.approx(12 * found["model"]["parameters"], rel=0.01)
    size = found["checkpoint_bytes"]
    told = " ".join(plan(capsys, *asked).split())
    assert f"A checkpoint (save_state) takes about {size / GIB:.1f} GiB on disk: {size / 2e9:.2g} seconds where" in told
    assert json.loads(plan(capsys, *asked, "--ema", "trained", "--json"))["checkpoint_bytes"] is None


@pytest.mark.parametrize(("dtype", "precision", "is_told"), [("float32", "bf16", 1), ("bfloat16", "bf16", 0)])
def test_frozen_weights_in_fp32_are_told(dtype, precision, is_told):
    frozen, trained = Parameter("weight", (10, 10), dtype, trainable=False), Parameter("weight", (2, 2))
    request = make_request(batch_size=1)
    description = replace(request.description, tree=matrices(frozen, trained))
    request = replace(request, description=description).with_config(Config(mixed_precision=precision))
    assert (frozen_in_fp32(request) is not None) is bool(is_told)
    assert frozen_in_fp32(request.with_config(Config(mixed_precision="no"))) is None


def test_a_device_of_unknown_memory_asks_for_it(capsys):
    asked = ("--model", SMALL, "--world", "2", "--device", "cpu", "--batch-size", "1")
    text = "Whether it fits is not known: add --memory, for example 16GiB, a rank's share of the host's."
    assert text in " ".join(plan(capsys, *asked).split())
    assert "not known" not in plan(capsys, *asked, "--memory", "16GiB")


def test_one_is_no_plural_and_thousands_have_commas(capsys):
    out = plan(capsys, SMALL, "--world", "1", "--batch-size", "1", "--seq-len", "1", "--tokens", "1")
    assert "1 rank, " in out and "micro-batch 1 x 1 token a rank" in out
    assert "A run of 1 token, an estimate: 1 step of 1 token\n" in out
    assert "<0.01 - <0.01 seconds" in out
    assert "1 token a micro-batch" in " ".join(out.split())
    assert "got '1000000T'" in refused(capsys, *RUN, "--tokens", "1000000T")[1]
    assert count_text(5 * 10**15) == "5,000 T"


def test_logits_in_16_bits_are_counted_in_fp32_and_a_note_says_so(capsys):
    asked = ("--model", SMALL, "--world", "8", "--batch-size", "1", "--json")
    for dtype, is_said in (("bf16", True), ("fp32", False)):
        notes = json.loads(plan(capsys, *asked, f"--set=shardkit.precision.output_dtype={dtype}"))["notes"]
        assert any("output_dtype: logits in bf16 are counted as if" in note for note in notes) is is_said


def test_a_time_without_the_copies_of_offload_says_so(capsys):
    offload = "--set=fsdp_config.fsdp_offload_params=true"
    asked = ("--model", SMALL, "--world", "8", "--batch-size", "1", "--json", offload)
    for device, is_said in (("a100", True), ("80GiB", False), ("cpu", False)):
        notes = json.loads(plan(capsys, *asked, "--device", device))["notes"]
        assert any("Offload to the host makes a step longer" in note for note in notes) is is_said


def test_the_answer_for_programs_has_the_settings_of_the_headline(capsys):
    pairs = ["mixed_precision=fp8", "shardkit.gradient_accumulation_steps=4", "shardkit.recompute_every=2"]
    pairs.append("fsdp_config.fsdp_activation_checkpointing=true")
    asked = [*("--model", SMALL, "--world", "2", "--batch-size", "1"), *(f"--set={pair}" for pair in pairs)]
    found = json.loads(plan(capsys, *asked, "--json"))
    assert (found["device"]["link_bytes_per_s"], found["device"]["network_bytes_per_s"]) == (450e9, 50e9)
    assert found["settings"] == {
        "mixed_precision": "fp8",
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": True,
        "recompute": "blocks",
        "recompute_every": 2,
        "offload_params": False,
        "offload_activations": False,
        "offload_optimizer": False,
        "compile": False,
    }
    assert "H100 80 GB, bf16 and fp8, adamw," in plan(capsys, *asked)


def test_a_search_says_where_it_ended():
    found = find(Question.MAX_BATCH, make_request("gpt:layers=1,hidden=2,heads=1,vocab=2,seq=1"))
    assert found.value == 65_536
    assert "65,536 sequences of 1 token per rank, the most that is tried (" in found.text


def test_words_of_flags_may_have_underscores(capsys):
    asked = (SMALL, "--world", "2", "--device", "l4", "--find")
    assert plan(capsys, *asked, "max_batch") == plan(capsys, *asked, "max-batch")


def test_find_strategy(capsys):
    found = find(Question.STRATEGY, make_request(world_size=16))
    assert found.value in {strategy.value for strategy in ShardingStrategy}
    assert "least traffic over the slowest link" in found.text
    asked = ("--model", SMALL, "--world", "16", "--batch-size", "1")
    reason = "least traffic over the slowest link"
    assert "Suggested: " in plan(capsys, *asked)
    said = plan(capsys, *asked, "--find", "strategy")
    assert "Strategy: " in said and " ".join(said.split()).count(reason) == 1


@pytest.mark.parametrize(
    ("question", "changed", "text"),
    [
        (Question.MIN_GPUS, {"device": devices.find("cpu")}, "memory is unknown; add --memory"),
        (
            Question.MIN_GPUS,
            {"batch_size": None},
            "would be too low, because it does not count all activations: add --batch-size; or add --simulate",
        ),
        (Question.STRATEGY, {"batch_size": None}, "no strategy can be suggested .*: all activations: add --batch-size"),
    ],
)
def test_a_question_that_cannot_be_answered(question, changed, text):
    with pytest.raises(UsageError, match=text):
        find(question, _with(make_request(), **changed))


@pytest.mark.slow
def test_a_search_that_lacks_what_the_model_saves_says_what_to_add(capsys):
    code, err = refused(capsys, "gpt2", "--world", "4", "--batch-size", "1", "--find", "max-batch")
    assert code == 2
    assert err.endswith("in addition to those of a plain Transformer; add --simulate, which counts everything.\n")


def test_json(capsys):
    out = plan(capsys, "--model", SMALL, "--world", "16", "--batch-size", "2", "--find", "max-batch", "--json")
    data = json.loads(out)
    assert data["model"]["parameters"] == describe(SMALL).numel
    assert [r["number"] for r in data["strategies"]] == [1, 2, 3, 4, 5]
    for found in data["strategies"]:
        assert found["peak_bytes"] == sum(found["peak"].values())
        traffic = found["traffic"]
        assert traffic["sent_bytes"] == traffic["inside_bytes"] + traffic["between_bytes"]
        assert found["step_time_estimate"]["fastest_s"] <= found["step_time_estimate"]["slowest_s"]
    assert data["finding"]["question"] == "max-batch"
    assert data["suggested"] in {s.value for s in ShardingStrategy}


LARGE = ("gpt-175b", "--world", "1024", "--batch-size", "1", "--device", "h200", "--tokens", "300B")
RUN = (SMALL, "--world", "16", "--batch-size", "2", "--device", "h100-80")


@pytest.mark.parametrize(
    ("text", "tokens"), [("1e", None), ("1,5B", None), ("2.5M", 2_500_000), ("1_000_000", 10**6), ("15t", 15 * 10**12)]
)
def test_the_time_and_the_price_of_a_run_follow_from_the_time_of_a_step(capsys, text, tokens):
    if tokens is None:
        code, err = refused(capsys, *RUN, "--tokens", text, "--price", "0")
        assert code == 2
        assert err == (
            f"--tokens: is not the number of tokens of a run (got '{text}'); write 300B or 15T.\n"
            "--price: is not the price of one device for an hour (got '0'); write 2.50.\n"
        )
        return
    data = json.loads(plan(capsys, *RUN, "--tokens", text, "--price", "2.5", "--json"))
    assert data["run"] == {"tokens": tokens, "price": 2.5, "device_hours": 50_000}
    for found in data["strategies"]:
        run, time = found["run_estimate"], found["step_time_estimate"]
        assert run["steps"] == -(-tokens // (16 * 2 * 32))
        assert run["seconds"] == pytest.approx([run["steps"] * time["fastest_s"], run["steps"] * time["slowest_s"]])
        assert run["price"] == pytest.approx([seconds / 3600 * 16 * 2.5 for seconds in run["seconds"]])


def test_a_run_is_shown_for_the_strategies_that_fit(capsys):
    out = plan(capsys, *RUN, "--tokens", "15T", "--price", "2.5")
    assert "A run of 15 T tokens, an estimate: 14,648,437,500 steps of 1,024 tokens\n" in out
    assert re.search(r"^\* 1 FULL_SHARD +\S+ - \S+ hours +\S+ - \S+ +\S+ - \S+$", out, re.MULTILINE)
    assert re.search(r" days +\S+ - \S+ +\S+ - \S+ M$", plan(capsys, *LARGE, "--price", "2.5"), re.MULTILINE)
    assert re.search(r"^\* 1 FULL_SHARD +\S+ - \S+ seconds ", plan(capsys, *RUN, "--tokens", "1M"), re.MULTILINE)
    assert "price" not in plan(capsys, *RUN, "--tokens", "15T")
    assert "its time is not known: add --batch-size." in plan(capsys, SMALL, "--tokens", "1B")
    assert "its time is not known: no strategy fits." in plan(capsys, *RUN, "--memory", "3MiB", "--tokens", "1B")
    assert "got no --tokens, but --price" in refused(capsys, *RUN, "--price", "2")[1]
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_file_names_the_model_and_the_settings(capsys):
    Path("shardkit.yaml").write_text(
        f"# model: {SMALL}\ndistributed_type: FSDP\nmixed_precision: fp16\nnum_processes: 4\n"
        "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    )
    out = plan(capsys, "--device", "4090")
    assert "4 ranks, RTX 4090, fp16" in out
    assert "* 2 SHARD_GRAD_OP" in out


OF_A_FILE = {
    "own:build": ("own.py", "from torch import nn\n\n\ndef build():\n    return nn.Linear(8, 8)\n"),
    "conf/config.json": ("conf/config.json", '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}'),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", list(OF_A_FILE))
def test_the_model_of_a_file_is_found_from_a_folder_below_it(tmp_path, monkeypatch, capsys, model):
    name, text = OF_A_FILE[model]
    (tmp_path / "conf").mkdir()
    (tmp_path / name).write_text(text)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "shardkit.yaml").write_text(f"# model: {model}\ndistributed_type: FSDP\nnum_processes: 2\n")
    (tmp_path / "sub folder").mkdir()
    monkeypatch.chdir(tmp_path / "sub folder")
    assert "2 ranks" in plan(capsys)
    Path("train.py").touch()
    assert run(["submit", "--to", "slurm", "--batch-size", "1", "train.py"]) == 0
    assert "not planned" not in capsys.readouterr().err
    if model == "conf/config.json":
        assert "simulated" in plan(capsys, "--simulate", "--seq-len", "16").lower()
    code, said = refused(capsys, "--model", model)
    assert code != 0 and f"--model {model}" in said, "what is typed is of the current folder"


def test_machines_of_the_file_have_as_many_ranks_in_another_world(capsys):
    Path("shardkit.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n"
        "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    )
    of_eight = ("--world", "16", "--per-machine", "8")
    for arguments, machines, shards in [((), 2, 4), (("--world", "16"), 4, 4), (of_eight, 2, 8)]:
        data = json.loads(plan(capsys, "--model", SMALL, *arguments, "--json"))
        hybrid = next(row for row in data["strategies"] if row["strategy"] == "HYBRID_SHARD")
        assert (data["world_size"] // data["ranks_per_machine"], hybrid["shards"]) == (machines, shards)


def test_no_model_is_refused_with_the_forms(capsys):
    code, err = refused(capsys, "--world", "8")
    assert code == 2
    assert "--model: no model (no configuration here names one); give module:function" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "h1000"), "--device: unknown (got 'h1000'); did you mean h100?"),
        (("--device", "abacus"), "use one of a100-pcie, a100-40"),
        (("--device", " "), "--device: unknown (got ' '); use one of a100-pcie, "),
        (("--device", "tpu-v7"), "--device: unknown (got 'tpu-v7'); did you mean tpu-v7x?"),
        (("--device", "tpu9"), "--device: unknown (got 'tpu9'); use one of a100-pcie, "),
        (("--device", "b3"), "--device: unknown (got 'b3'); did you mean b300?"),
        (("--optimizer", "soap"), "or add --simulate --optimizer module:function, a function that makes yours."),
        (
            ("--world", "1000000"),
            "--world 1000000, in machines of 8: is too large (got '125000'); write 100000 or less.",
        ),
        (("--device", "2080ti"), "(got '2080ti'); use one of a100-pcie, "),
        (("--device", "h1000"), "(got 'h1000'); did you mean h100? If not, give its memory: 80GiB."),
        (("--device", "GTX 1080 Ti"), "--device: unknown (got 'GTX 1080 Ti'); "),
        (("--device", "3090 ti"), "--device: unknown (got '3090 ti'); did you mean 3090?"),
        (("--memory", "2080ti"), "--memory: not the memory of a device (got '2080ti'); write 80GiB."),
        (("--memory", "much"), "--memory: not the memory of a device (got 'much'); write 80GiB."),
        (("--optimizer", "adamq"), "--optimizer: unknown (got 'adamq'); did you mean adam"),
        (("--optimizer", "lion8bit"), "only adam8bit, adamw8bit, adam4bit, adamw4bit, adamfp8, adamwfp8 are known by"),
        (("--find", "cheapest"), "--find: unknown (got 'cheapest'); use one of max-batch, min-gpus, strategy."),
        (("--ema", "half"), "--ema: unknown (got 'half'); use one of no, trained, model."),
        (("--set", "mixed_precision"), "--set: is not KEY=VALUE (got 'mixed_precision')"),
        (("--plot", "picture.bmp"), "--plot: unknown file type (got 'picture.bmp'); use .svg, .html or .png."),
    ],
)
def test_wrong_flags_say_what_to_do(capsys, arguments, text):
    code, err = refused(capsys, "--model", SMALL, "--world", "2", *arguments)
    assert code == 2
    assert text in err


def test_a_batch_of_ones_own_is_named_and_has_no_other_size(monkeypatch):
    asked = replace(make_request(batch_size=7), own_batch="my:batch")
    with pytest.raises(UsageError, match=r"--batch-size: the function of --batch gives the micro-batch \(got both\)"):
        answer(replace(asked, description=replace(asked.description, facts=None)), None, SIMULATED)
    monkeypatch.setattr("shardkit.plan.answering.refine", lambda request, rows, *_, **__: (rows, ()))
    found = answer(asked, None, SIMULATED)
    told = " ".join(render(found).split())
    assert "micro-batch of my:batch, micro-batch 7 x 32 tokens a rank in the closed form" in told
    assert to_json(found)["batch"] == "my:batch"


def test_all_wrong_flags_are_reported_at_once_before_the_model_is_read(capsys):
    wrong = {"--find": "cheapest", "--loss": "lost", "--ema": "half", "--optimizer": "adamq", "--plot": "a.bmp"}
    wrong |= {"--world": "0", "--per-machine": "many", "--batch-size": "-1", "--seq-len": "1.5", "--network": "inf"}
    wrong |= {"--device": "abacus", "--memory": "much", "--strategy": "9", "--measured": "nothing"}
    arguments = [word for pair in wrong.items() for word in pair]
    code, err = refused(capsys, "--model", "missing:model", "--exact", *arguments)
    assert code == 2
    unreported = [flag for flag in (*wrong, "--exact") if f"{flag}:" not in err and f"{flag} " not in err]
    assert not unreported, err
    assert "missing:model" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--memory", "0GiB"), "--memory: not the memory of a device (got '0GiB')"),
        (("--device", "0GiB"), "--device: unknown (got '0GiB')"),
        (("--strategy", "all"), "--strategy all: only used in simulations (got no --simulate); add --simulate."),
        (("--measured", "nothing", "--json"), "--measured nothing: no measurement found"),
    ],
)
def test_flags_without_a_meaning_are_refused(capsys, arguments, text):
    code, err = refused(capsys, "--model", SMALL, "--world", "2", *arguments)
    assert code == 2
    assert text in err


@pytest.mark.parametrize("question", ["max-batch", "min-gpus"])
@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO"])
def test_searches_name_what_is_configured(capsys, question, kind):
    ranks = "1" if kind == "NO" else "2"
    asked = ("--world", ranks, "--batch-size", "1", "--device", "l4", "--set", f"distributed_type={kind}")
    data = json.loads(plan(capsys, "--model", SMALL, *asked, "--find", question, "--json"))
    assert data["chosen"] == "NO_SHARD"
    assert "NO_SHARD" in data["finding"]["text"]


@pytest.mark.slow
def test_the_fewest_gpus_are_on_full_machines(capsys):
    asked = ("--model", "gpt:layers=32,hidden=4096,heads=32", "--batch-size", "1", "--device", "l4")
    asked = (*asked, "--find", "min-gpus")
    found = [
        plan(capsys, *asked, "--world", world).partition("Fewest: ")[2].split(",")[0] for world in ("1", "64", "100")
    ]
    assert found[0] == found[1] and "machines)" in found[0], "the world that the search starts from is no machine"
    assert found[0] == found[2], "100 ranks are on machines of 5"


def test_more_ranks_are_on_full_machines_where_these_can_have_them(capsys):
    """12 ranks are on two machines of 6, and 24 on three of 8: HYBRID_SHARD shards over more."""
    asked = ("--model", "gpt:layers=32,hidden=4096,heads=32", "--batch-size", "1", "--device", "l4")
    asked = (*asked, "--set", "fsdp_sharding_strategy=4", "--json")
    change = next(c for c in json.loads(plan(capsys, *asked, "--world", "12"))["changes"] if "--world 24" in c["text"])
    rows = json.loads(plan(capsys, *asked, "--world", "24"))["strategies"]
    assert change["peak_bytes"] == next(row for row in rows if row["number"] == 4)["peak_bytes"]


def test_ddp_on_one_rank_is_one_process(capsys):
    """Without other ranks there are no buckets, and nothing is sent."""
    rows = [
        json.loads(plan(capsys, "--model", SMALL, "--world", "1", "--batch-size", "1", "--json", *arguments))
        for arguments in (("--strategy", "3"), ("--set", "distributed_type=NO"))
    ]
    ddp, alone = ({row["number"]: row for row in each["strategies"]}[3] for each in rows)
    assert ddp["peak"] == alone["peak"]
    assert ddp["traffic"]["sent_bytes"] == 0


def test_ranks_on_the_cpu_are_planned_for_it(capsys):
    out = plan(capsys, "--model", SMALL, "--world", "2", "--set", "distributed_type=MULTI_CPU")
    assert "2 ranks, CPU" in out


def test_nothing_is_offloaded_from_a_cpu(capsys):
    """A CPU is the host itself, whether the file or --device says it."""
    asked = ["--model", SMALL, "--world", "2", "--batch-size", "1", "--json", "--set", "mixed_precision=no"]
    cpu, offload = ["--device", "cpu", "--memory", "16GiB"], ["--set", "fsdp_config.fsdp_offload_params=true"]
    strategy = ["--strategy", "FULL_SHARD"]
    plain = json.loads(plan(capsys, *asked, *strategy, *cpu))["strategies"]
    assert json.loads(plan(capsys, *asked, *strategy, *cpu, *offload))["strategies"] == plain
    by_file = json.loads(plan(capsys, *asked, *strategy, "--set", "use_cpu=true", "--memory", "16GiB", *offload))
    assert by_file["strategies"] == plain
    small = plan(capsys, *asked[:-3], *asked[-2:], *strategy, "--device", "cpu", "--memory", "1MiB")
    assert "offload" not in small


def test_ten_thousand_ranks(capsys):
    out = plan(
        capsys, "--model", SMALL, "--world", "10000", "--batch-size", "1", "--device", "h100", "--find", "max-batch"
    )
    assert "10,000 ranks on 1,250 machines" in out
    assert "(FULL_SHARD on 10,000 x" in out


def test_a_device_by_its_memory(capsys):
    assert "device of 40GiB" in plan(capsys, "--model", SMALL, "--world", "2", "--device", "40GiB")
    assert "has 94.0 GiB" in plan(capsys, "--model", SMALL, "--world", "2", "--device", "h100", "--memory", "94GiB")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
        ("h100 80GB", "H100 80 GB"),
        ("H100 PCIe", "H100 PCIe 80 GB"),
        ("Tesla V100-SXM2-32GB", "V100 32 GB"),
        ("rtx4090", "RTX 4090"),
        ("RTX A6000", "RTX A6000"),
        ("a100", "A100 80 GB"),
        ("B300 288GB", "B300"),
        ("NVIDIA A10G", "A10G 24 GB"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("rtx6000", "RTX 6000 Ada"),
        ("RTX PRO 6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("6000-pro", "RTX PRO 6000"),
        ("h20", "H20 96 GB"),
        ("mi355x", "MI355X"),
        ("MI250X", "MI250X"),
        ("h800", "H800 80 GB"),
        ("tpu7x", "TPU7x"),
        ("TPU v5p", "TPU v5p"),
        ("v6e", "TPU v6e"),
        ("24GB", "device of 24GB"),
    ],
)
def test_a_device_as_people_write_it(name, expected):
    assert devices.find(name).name == expected


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85_520_809_984, "H100 80 GB"),
        ("NVIDIA A100-SXM4-40GB", 42_949_672_960, "A100 40 GB"),
        ("NVIDIA H100 PCIe", 85_520_809_984, "H100 PCIe 80 GB"),
        ("NVIDIA H100 NVL", 100_485_038_080, "H100 NVL 94 GB"),
        ("NVIDIA H200 NVL", 150_754_820_096, "H200 NVL 141 GB"),
        ("NVIDIA H200", 150_754_820_096, "H200 141 GB"),
        ("NVIDIA A100 80GB PCIe", 85_899_345_920, "A100 PCIe"),
        ("NVIDIA A100-PCIE-40GB", 42_949_672_960, "A100 PCIe"),
        ("Tesla V100-PCIE-32GB", 34_359_738_368, "V100 PCIe"),
        ("Tesla V100-SXM2-32GB", 34_359_738_368, "V100 32 GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17_171_480_576, "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("Tesla T4", 16_106_127_360, "T4 16 GB"),
        ("NVIDIA L40S", 48_305_799_168, "L40S 48 GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10**10, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("NVIDIA GeForce RTX 4090", 25_757_220_864, "RTX 4090"),
        ("NVIDIA A10G", 24_146_608_128, "A10G 24 GB"),
        ("NVIDIA B300 SXM6 AC", 288_400_343_040, "B300"),
        ("NVIDIA RTX 6000 Ada Generation", 51_527_024_640, "RTX 6000 Ada"),
        ("Quadro RTX 6000", 24 * GIB, "Quadro RTX 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102_642_286_592, "RTX PRO 6000"),
        ("NVIDIA RTX PRO 5000 Blackwell", 48 * GIB, "NVIDIA RTX PRO 5000 Blackwell"),
        ("GAUDI3", 128 * GIB, "Gaudi 3"),
        ("Intel(R) Data Center GPU Max 1550", 64 * GIB, "Max 1550"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 102_642_286_592, "RTX PRO 6000"),
        ("NVIDIA H20", 102_625_181_696, "H20 96 GB"),
        ("NVIDIA GB300", 298_013_687_808, "GB300"),
        ("AMD Instinct MI355X", 309_220_868_096, "MI355X"),
        ("AMD Instinct MI250X", 68_702_699_520, "MI250X"),
        ("NVIDIA A800-SXM4-80GB", 85_899_345_920, "A800 80 GB"),
        ("NVIDIA GeForce GTX 1080", 8 * GIB, "NVIDIA GeForce GTX 1080"),
        ("NVIDIA GB10", 0, "NVIDIA GB10"),  # it shares the host's memory, and the driver tells no size
    ],
)
def test_a_device_by_the_drivers_name(name, memory, expected):
    found = devices.of_hardware(name, memory)
    assert (found.name, found.memory_bytes) == (expected, memory or None)


@pytest.mark.parametrize(
    ("name", "both_directions", "of_a_chip", "devices_of_a_chip"),
    [("v5e", 400, 25, 1), ("v5p", 1200, 50, 1), ("v6e", 800, 100, 1), ("v7x", 1200, 100, 2)],
)
def test_links_of_tpus_count_in_one_direction(name, both_directions, of_a_chip, devices_of_a_chip):
    """As published: GB/s in both directions together between chips, and Gb/s of network a chip."""
    found = devices.find(f"tpu-{name}")
    assert found.link_bytes_per_s == both_directions * 1e9 / 2 / devices_of_a_chip
    assert found.network_bytes_per_s == pytest.approx(of_a_chip * 1e9 / 8 / devices_of_a_chip, rel=0.01)


@pytest.mark.parametrize(
    ("device", "world", "machines", "place", "leaves"),
    [
        ("tpu-v5e", 256, 32, "in its pod", False),
        ("tpu-v5e", 512, 64, "in its pod", True),
        ("tpu-v5p", 64, 16, "in its pod", False),
        ("gb200", 72, 18, "in its rack", False),
        ("gb300", 144, 36, "in its rack", True),
        ("h100", 72, 9, "in its machine", True),
    ],
)
def test_links_of_a_pod_or_a_rack_join_its_machines(capsys, device, world, machines, place, leaves):
    arguments = ("--model", SMALL, "--world", str(world), "--batch-size", "1", "--device", device)
    text = plan(capsys, *arguments)
    assert f"{world} ranks on {machines} machines" in text
    assert place in text and ("to others" in text) is leaves
    (full, *_), joined = (json.loads(plan(capsys, *arguments, "--json"))[key] for key in ("strategies", "ranks_joined"))
    sent, between = full["traffic"]["sent_bytes"], full["traffic"]["between_bytes"]
    assert between == pytest.approx(sent / joined if leaves else 0, rel=1e-4)


def test_a_tpu_is_planned_with_what_trains_there(capsys, tmp_path):
    arguments = ("--model", SMALL, "--world", "8", "--batch-size", "1")
    by_default = plan(capsys, *arguments, "--device", "v6e")
    given = ("--set", "distributed_type=XLA", "--set", "xla=true")
    assert by_default == plan(capsys, *arguments, *given) == plan(capsys, *arguments, *given, "--device", "tpu-v6e")
    note = "on TPUs shardkit trains with PyTorch/XLA, and this plan is for distributed_type FSDP"
    of_fsdp = plan(capsys, *arguments, "--device", "v6e", "--set", "distributed_type=FSDP")
    assert note in of_fsdp.replace("\n", " ") and note not in by_default.replace("\n", " ")


def test_a_device_without_bf16_says_what_a_run_does(capsys):
    arguments = ("--model", SMALL, "--world", "2", "--batch-size", "1", "--device", "t4")
    in_bf16, in_fp32, in_fp16 = (
        plan(capsys, *arguments, "--set", f"mixed_precision={value}") for value in ("bf16", "no", "fp16")
    )
    note = "T4 16 GB does not support bf16, so a run there trains in fp32, with a warning"
    assert note in in_bf16.replace("\n", " ")
    assert in_bf16.split("\n\n")[:-1] == in_fp32.split("\n\n")[:-1]
    assert "does not support" not in in_fp16
    without_a_file = plan(capsys, *arguments)
    assert without_a_file == in_fp16


@pytest.mark.slow
def test_a_device_without_8_bits_is_no_faster_by_them_and_says_so(capsys):
    def planned(device: str, precision: str) -> dict:
        arguments = ("--model", SMALL, "--world", "2", "--batch-size", "1", "--json", "--device", device)
        return json.loads(plan(capsys, *arguments, "--set", f"mixed_precision={precision}"))

    for device, kind, computes in (("a100", "fp8", False), ("h100", "fp8", True), ("h100", "mxfp8", False)):
        found, usual = planned(device, kind), planned(device, "bf16")
        fastest, before = (one["strategies"][0]["step_time_estimate"]["compute_s"][0] for one in (found, usual))
        assert (fastest < before) is computes
        assert any(f"does not compute in {kind}" in note for note in found["notes"]) is not computes


def test_the_page_names_every_device():
    page = (Path(__file__).parent.parent / "docs/how-to/plan.md").read_text()
    listed = re.search(r"`--device` knows (.*?);", page, re.DOTALL)
    assert listed
    names = re.findall(r"[\w-]+", listed[1].replace(" and ", " "))
    assert sorted(devices.find(name).name for name in names) == sorted(one.name for one in devices.DEVICES.values())


def test_the_page_names_every_optimizer():
    page = (Path(__file__).parent.parent / "docs/how-to/plan.md").read_text()
    listed = re.search(r"`--optimizer` (.*?) for the matrices", page)
    assert listed
    assert {optimizers.check(name) for name in re.findall(r"[\w-]+", listed[1])} == {*optimizers.STATE}


@pytest.mark.parametrize("name", [*optimizers.STATE, *optimizers.QUANTIZED])
def test_every_optimizer_by_name_can_be_simulated(name):
    (made,) = optimizer_factory(name)({"weight": torch.nn.Parameter(torch.ones(2, 2))})
    assert isinstance(made, torch.optim.Optimizer)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * GIB), ("24 gb", 24 * 10**9), ("1.5g", GIB * 3 // 2)])
def test_sizes(text, size):
    assert read_bytes(text) == size


def test_another_network(capsys):
    """100 Gb/s for a machine of 8 are 1.5625 GB/s for each rank."""
    arguments = ("--model", SMALL, "--world", "16", "--batch-size", "1", "--device", "h100", "--json")
    slow = json.loads(plan(capsys, *arguments, "--network", "100"))["strategies"][0]
    expected = slow["traffic"]["between_bytes"] / (100e9 / 8 / 8 * 0.8)
    assert slow["step_time_estimate"]["between_s"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("alive", "reserved", "expandable", "fits", "has_retries", "text"),
    [
        (
            70,
            75,
            72,
            True,
            False,
            "reserves 75.00 GiB (CUDA's allocator, replayed); 72.00 with expandable",
        ),
        (70, 79, 72, True, True, "slower. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."),
        (70, 79, 78.5, True, True, "slower. Use a smaller micro-batch, or lower the peak otherwise."),
        (
            79,
            85,
            84,
            False,
            False,
            "reserves 85.00 GiB (CUDA's allocator, replayed); 84.00 with expandable",
        ),
        (70, None, None, True, None, "Add --exact for the memory that CUDA's allocator reserves."),
    ],
)
def test_only_what_is_alive_says_no(alive, reserved, expandable, fits, has_retries, text):
    """Of 79.6 GiB, 2 are for the context and others."""
    request, gib = make_request(device="h100-80"), 2**30
    asked = row(request)
    peak = Memory(parameters=alive * gib)
    sizes = {"reserved_bytes": reserved and reserved * gib, "expandable_bytes": expandable and int(expandable * gib)}
    memory = RankMemory(peak, "forward", (Moment("forward", "", peak),), Memory(), True, **sizes)
    found = replace(asked, simulated=memory, fits=request.device.fits(peak.total))
    answer = Answer(request, (found,), found.strategy, None, "")
    told = " ".join(render(answer).split())
    assert text in told
    (strategy,) = to_json(answer)["strategies"]
    assert (found.fits, strategy["runs_with_retries"]) == (fits, has_retries)
    assert ("the allocator retries" in told) is bool(has_retries)
    tpu = replace(answer, request=replace(request, device=devices.find("tpu-v5p")))
    assert "CUDA" not in render(tpu)


def test_step_time_by_hand():
    """24 x 2,048 tokens, 6 N + 12 layers x hidden x sequence flops each, of 989 Tflop/s; one machine."""
    request = make_request("gpt:layers=24,hidden=1024,heads=16", world_size=8, batch_size=24, device="h100")
    found = row(request)
    tree = request.description.tree
    matrices = tree.numel - (50257 + 2048) * 1024
    flops = 24 * 2048 * (6 * matrices + 12 * 24 * 1024 * 2048)
    assert found.time is not None
    assert found.time.model_flops == flops
    assert found.time.compute_s == pytest.approx([flops / (989e12 * part) for part in (0.46, 0.40, 0.32)])
    assert found.time.inside_s == pytest.approx(found.estimate.traffic.sent_bytes / (450e9 * 0.8))
    assert found.time.between_s == 0
    assert found.time.best_mfu == pytest.approx(0.46)
    checkpointed = request.config.fsdp.model_copy(update={"activation_checkpointing": True})
    slower = row(request.with_config(request.config.model_copy(update={"fsdp": checkpointed})))
    assert slower.time is not None
    assert slower.time.compute_s[1] == pytest.approx(found.time.compute_s[1] * 4 / 3 * 0.40 / 0.54)
    compiled = request.config.shardkit.model_copy(update={"compile": True})
    faster = row(request.with_config(request.config.model_copy(update={"shardkit": compiled})))
    assert faster.time is not None
    assert faster.time.fastest_s == pytest.approx(found.time.fastest_s / 1.16)
    assert faster.time.slowest_s == found.time.slowest_s
    whole = row(request.with_config(request.config.model_copy(update={"mixed_precision": "no"})))
    assert whole.time is not None
    assert whole.time.compute_s == pytest.approx([flops / (67e12 * part) for part in (0.75, 0.50, 0.25)])


@pytest.mark.parametrize(("batch", "is_timed"), [(["--batch-size", "4", "--seq-len", "2048"], True), ([], False)])
def test_one_rank_has_a_time_and_no_traffic(capsys, batch, is_timed):
    told = plan(capsys, "gpt:layers=16,hidden=2048,heads=16", "--world", "1", "--device", "h200", *batch)
    assert ("\nTime of the step, an estimate\n" in told) is is_timed
    assert bool(re.search(r"\n\* 1 FULL_SHARD +[\d.]+ ms - [\d.]+ ms +25% - 65%\n", told)) is is_timed
    assert "sends" not in told and "links" not in told


def test_a_tied_embedding_is_the_heads_matrix_too():
    tied = describe("gpt:layers=2,hidden=16,heads=2,vocab=50,seq=8,tied=true")
    apart = describe("gpt:layers=2,hidden=16,heads=2,vocab=50,seq=8")
    assert roofline.work_per_token(tied.tree, tied.facts, 8) == roofline.work_per_token(apart.tree, apart.facts, 8)


FACTS = TransformerFacts(layers=1, hidden=4, heads=1, key_value_heads=1, feed_forward=16)


def matrices(*parameters: Parameter) -> ModuleNode:
    children = tuple(ModuleNode(f"m{i}", "Linear", (parameter,)) for i, parameter in enumerate(parameters))
    return ModuleNode("", "Model", children=children)


def test_a_token_passes_through_some_experts():
    """100 weights of 8 experts each, and 40 of the router; two experts a token."""
    tree = matrices(Parameter("weight", (8, 10, 10)), Parameter("weight", (8, 5)))
    facts = replace(FACTS, experts=8, active_experts=2)
    attention = 4 * 4 * 16
    assert roofline.work_per_token(tree, facts, 16) == roofline.Work(2 * 240 + attention, 4 * 240 + 2 * attention)


def test_frozen_parameters_need_less_backward():
    """Before the first trained one nothing is computed backward, after it the gradients of what goes in."""
    frozen, trained = Parameter("weight", (10, 10), trainable=False), Parameter("weight", (10, 10))
    attention = 4 * 4 * 16
    found = roofline.work_per_token(matrices(frozen, trained, frozen), FACTS, 16)
    assert found == roofline.Work(2 * 300 + attention, 2 * 200 + 2 * 100 + 2 * attention)
    assert roofline.work_per_token(matrices(trained), replace(FACTS, window=4), 16).forward == 200 + 4 * 4 * 4
    table = ModuleNode("table", "Embedding", (trained,), is_lookup=True)
    above = replace(matrices(frozen), children=(table, *matrices(frozen).children))
    assert roofline.work_per_token(above, FACTS, 16).backward == 200 + 2 * attention, "gradients pass to the table"


def test_parameters_in_bf16_are_timed_and_counted_as_bf16():
    """Without mixed precision, a model that is in bf16 computes in it."""
    request = make_request("gpt:layers=24,hidden=1024,heads=16", batch_size=1, device="h100")
    plain = request.with_config(request.config.model_copy(update={"mixed_precision": "no"}))
    bf16 = replace(plain, description=replace(plain.description, tree=_in_bf16(plain.description.tree)))
    assert row(bf16).time.peak_flops == 989e12
    assert row(plain).time.peak_flops == 67e12
    assert row(bf16).memory.peak.activations < 0.7 * row(plain).memory.peak.activations


def _in_bf16(node: ModuleNode) -> ModuleNode:
    parameters = tuple(replace(parameter, dtype="bfloat16") for parameter in node.parameters)
    return replace(node, parameters=parameters, children=tuple(_in_bf16(child) for child in node.children))


def test_a_row_without_activations_is_never_suggested_nor_compared_with_a_simulated_one():
    request = make_request(world_size=8)
    rows = [row(request, strategy) for strategy in possible_strategies(request)]
    unknown = row(replace(request, batch_size=None), ShardingStrategy.NO_SHARD)
    assert unknown.fits is None
    assert suggest_from([unknown], request.device)[0] is None
    assert suggest_from([*rows[:2], unknown], request.device)[0] in (rows[0].strategy, rows[1].strategy)
    simulated = replace(rows[0], simulated=rows[0].estimate.memory)
    assert suggest_from([simulated, *rows[1:]], request.device) == (
        None,
        "simulated and closed-form memory are not compared; add --strategy all",
    )
    too_large = make_request("gpt:layers=48,hidden=8192,heads=64", batch_size=None)
    assert row(too_large, ShardingStrategy.NO_SHARD).fits is False


def test_the_effect_of_a_change_is_the_closed_forms_own():
    request = make_request("gpt:layers=32,hidden=4096,heads=32", batch_size=8)
    peak = row(request).memory.peak.total
    for change in changes(request):
        assert change.saved_bytes == peak - change.peak_bytes
    assert changes(replace(request, batch_size=None)) == ()


def test_a_peak_that_is_a_lower_bound_has_changes_too():
    """DDP under autocast, whose copies are not counted, where the rest alone does not fit."""
    request = make_request("gpt:layers=32,hidden=4096,heads=32", strategy=3, batch_size=8)
    facts = replace(request.description.facts, casts_once=False)
    request = replace(request, description=replace(request.description, facts=facts))
    assert not row(request).memory.activations_known
    assert "fsdp_sharding_strategy: FULL_SHARD" in {change.text for change in changes(request)}
    told = render(answer(request))
    assert max(map(len, told.splitlines())) <= 80
    text = " ".join(told.split())
    assert re.search(r"3 NO_SHARD needs at least [\d,.]+ GiB\. Changes that lower it", text)


@pytest.mark.parametrize(("part", "text"), [({"recompute": "operators"}, "blocks"), ({"recompute_every": 4}, "1")])
def test_to_recompute_everything_is_a_change_where_a_part_is_recomputed(part, text):
    request = recomputing(make_request("gpt:layers=32,hidden=4096,heads=32", batch_size=32))
    (name,) = part
    found = changes(request.with_config(request.config.changed(shardkit=part)))
    (change,) = [one for one in found if one.text == f"shardkit.{name}: {text} (more compute)"]
    assert change.peak_bytes == row(request).memory.peak.total
    assert not any(one.text.startswith("shardkit.recompute") for one in changes(request))


def test_estimates_of_one_division_divide_once():
    request = make_request("gpt:layers=32,hidden=4096,heads=32", batch_size=8)

    def divided() -> list[object]:
        return [key for key in request.description.tree.computed if isinstance(key, tuple) and key[0] == "layout"]

    first, *others = (row(replace(request, batch_size=size)).estimate for size in (1, 2, 4))
    assert {first.units} == {each.units for each in others}
    assert len(divided()) == 1
    row(replace(request, world_size=16))
    row(request.with_config(request.config.changed(fsdp={"min_num_params": 7})))
    assert len(divided()) == 3


def test_more_tokens_than_positions_are_refused_and_more_than_configured_are_said():
    request = replace(make_request("gpt:layers=2,hidden=16,heads=2,seq=32"), seq_len=64)
    with pytest.raises(UsageError, match=r"--seq-len: the model has positions for 32 tokens \(got 64\)"):
        check_seq_len(request)
    tree = matrices(Parameter("weight", (32, 16)))
    facts = replace(FACTS, seq_len=32)
    other = replace(request, description=replace(request.description, tree=tree, facts=facts))
    assert check_seq_len(other) == "--seq-len 64 exceeds the 32 tokens of the model's configuration."


def test_an_unknown_loss_is_refused(capsys):
    code, err = refused(capsys, "--model", SMALL, "--loss", "lost")
    assert (code, err) == (2, "--loss: unknown (got 'lost'); use one of held, dropped, fused.\n")


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_picture(capsys, suffix):
    plan(
        capsys,
        *("--model", "gpt-175b", "--world", "128", "--batch-size", "1", "--device", "h100"),
        *("--set", "fsdp_config.fsdp_activation_checkpointing=true", "--plot", f"plan.{suffix}"),
    )
    text = Path(f"plan.{suffix}").read_text()
    svg = text[text.index("<svg") : text.index("</svg>") + 6]
    picture = ElementTree.fromstring(svg)
    edges = [text for group in picture.iter(f"{SVG}g") if group.get("aria-hidden") for text in group]
    words = [element.text for element in picture.iter(f"{SVG}text") if element not in edges]
    assert edges and {edge.text for edge in edges} <= set(words)  # drawn in white first, then to be read
    assert "gpt-175b on 128 x H100 80 GB" in words
    assert set(plot.NAMES.values()) <= set(words)
    assert any(word.startswith("peak 4") for word in words)
    assert words.count("H100 80 GB: 79.6 GiB") == 2
    assert sum(word.endswith("GiB, too big") for word in words) == 4
    patterns = picture.findall(".//{http://www.w3.org/2000/svg}pattern")
    paths = ["".join(path.get("d", "") for path in p.iter("{http://www.w3.org/2000/svg}path")) for p in patterns]
    assert len(set(paths)) == len(CATEGORIES)  # tells them apart without colour


def test_each_chart_of_the_page_has_its_own_patterns(capsys):
    """Those of a tab that is hidden draw nothing."""
    plan(capsys, "--model", SMALL, "--world", "8", "--strategy", "2", "--plot", "plan.html")
    pictures = Path("plan.html").read_text().split("<div class='picture'")[1:]
    names = [re.findall(r'<pattern id="([^"]+)"', picture) for picture in pictures]
    assert len({name for own in names for name in own}) == len(pictures) * len(CATEGORIES)
    for own, picture in zip(names, pictures, strict=True):
        assert set(re.findall(r"url\(#([^)]+)\)", picture)) == set(own)


def test_the_scale_of_a_picture_is_in_the_units_of_its_sizes():
    assert [plot.ticks(maximum)[1] for maximum in (100, 100 * 2**10, 100 * 2**20, 100 * 2**30)] == [
        *("KiB", "KiB", "MiB", "GiB")
    ]
    assert plot.ticks(100 * 2**10) == (20 * 2**10, "KiB", 2**10)


@pytest.mark.slow
def test_the_picture_as_png(capsys):
    plan(capsys, "--model", SMALL, "--world", "2", "--device", "l4", "--plot", "plan.png")
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_texts_of_a_png_are_inside_of_it(capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr("shardkit.plan.picture.save_png", lambda answer, path: found.append(answer))
    sizes = ("--model", "gpt-175b", "--world", "128", "--device", "h100-80", "--batch-size", "1")
    plan(capsys, *sizes, "--plot", "plan.png")
    figure = figure_of(found[0])
    figure.canvas.draw()
    bars = figure.axes[1]
    shown = [text.get_window_extent() for text in bars.texts]
    assert len(shown) == 5 and max(box.x1 for box in shown) < bars.get_window_extent().x1


def test_a_chart_that_cannot_be_written_is_refused_before_the_plan(capsys):
    Path("folder.svg").mkdir()
    model = ("--model", "nowhere:build", "--batch-size", "1")
    code, text = refused(capsys, *model, "--plot", "nowhere/a.svg")
    assert code == 2 and text.endswith("there is no folder nowhere; create it, or give another file.\n")
    assert refused(capsys, *model, "--plot", "folder.svg") == (2, "--plot: folder.svg is a folder; give a file.\n")
    assert "unknown file type" in refused(capsys, *model, "--plot", "a.pdf")[1]


def test_a_measurement_of_another_model_is_said(capsys):
    path = Path("logs/rank0.memory.json")
    path.parent.mkdir()
    size = plan_json(capsys, "--model", SMALL, "--world", "1", "--strategy", "3")["model"]["parameters"] * 4
    names = ("peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    path.write_text(json.dumps(dict.fromkeys(names, size) | {"rank": 0, "device": "cpu"}))
    arguments = ("--world", "1", "--strategy", "3", "--set", "mixed_precision=no", "--measured", "logs")
    same = plan(capsys, "--model", SMALL, *arguments)
    assert "The parameters differ" not in same and "the measured peak is what the process grew by" in same
    assert "The parameters differ: the run had another model" in plan(capsys, "--model", "gpt-175b", *arguments)


def plan_json(capsys, *arguments):
    return json.loads(plan(capsys, *arguments, "--json"))


def test_a_png_without_matplotlib_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, err = refused(capsys, "--model", SMALL, "--world", "2", "--device", "l4", "--plot", "plan.png")
    assert code == 4
    assert "pip install matplotlib, or use .svg or .html" in err


@pytest.mark.slow
def test_the_closed_form_loads_no_torch():
    code = (
        "import sys; from shardkit.cli.main import run; "
        "assert run(['plan', '--model', 'gpt-1t', '--world', '512', '--device', 'h100', '--plot', 'p.svg']) == 0; "
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_an_optimizer_of_ones_own_is_named():
    asked = replace(make_request(), own_optimizer="mine:optimizer")
    answer = Answer(asked, (row(asked),), row(asked).strategy, None, "")
    assert ", bf16, mine:optimizer, micro-batch 1 x" in render(answer)
    assert to_json(answer)["optimizer"] == "mine:optimizer"


@pytest.mark.parametrize(
    "words",
    [
        ["--world", "8", "--set", "num_processes=4"],
        ["--strategy", "2", "--set", "fsdp_config.fsdp_sharding_strategy=3"],
        ["--world", "8", "--per-machine", "4", "--set", "num_machines=4"],
    ],
)
def test_flags_that_contradict_each_other_are_refused(capsys, words):
    assert run(["plan", "gpt-175b", "--batch-size", "1", *words]) != 0
    name = words[-1].partition("=")[0]
    assert f"--set {name}: sets the same as {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "world", "per_machine", "expected"),
    [
        ("mixed_precision: bf16\n", 12, None, (2, 6)),
        ("mixed_precision: bf16\n", 13, None, (13, 1)),
        ("mixed_precision: bf16\n", 5, None, (1, 5)),
        ("mixed_precision: bf16\n", 12, 3, (4, 3)),
        ("num_processes: 8\nnum_machines: 2\n", 6, None, (2, 3)),
        ("num_processes: 8\nnum_machines: 2\n", 12, None, (3, 4)),
    ],
)
def test_a_world_is_on_machines_with_equal_numbers_of_ranks(tmp_path, file, world, per_machine, expected):
    path = tmp_path / "shardkit.yaml"
    path.write_text(file)
    config = configuration(path, [], None, world, per_machine, None)
    assert (config.num_machines, config.processes_per_machine) == expected
    assert build(config, "gpt-175b", devices.DEVICES["h100-80"], per_machine=per_machine).machines == expected[0]


def test_ranks_that_do_not_fill_the_given_machines_are_refused():
    with pytest.raises(UsageError, match=r"--per-machine: does not divide the number of ranks \(got 8 of 12\)"):
        configuration(None, [], None, 12, 8, None)
    with pytest.raises(UsageError, match=r"--per-machine: does not divide the number of ranks \(got 3 of 8\)"):
        configuration(None, ["num_processes=8"], None, None, 3, None)


def test_the_command_beside_a_measurement_plans_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"peak_bytes": 1 << 20, "parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 1}
    Path("rank0.memory.json").write_text(json.dumps({"rank": 0, "device": "cpu", **sizes}))
    Path("other.yaml").write_text("num_processes: 4\nuse_cpu: true\n")
    said = measured.beside_the_plan(Config(num_processes=4), Path("other.yaml"), Path("."))
    assert said.endswith(": shardkit plan --config other.yaml --model MODULE:FUNCTION --world 4 --measured .")


@pytest.mark.slow
@pytest.mark.parametrize(("device", "half"), [("v100-32", "fp16"), ("a100-80", "bf16")])
def test_the_16_bit_dtype_that_is_offered_is_one_of_the_device(device, half, capsys):
    model = "gpt:layers=24,hidden=4096,heads=16"
    flags = ("--world", "8", "--device", device, "--batch-size", "20", "--set", "mixed_precision=no")
    assert run(["plan", model, *flags, "--strategy", "1"]) == 0
    offered = capsys.readouterr().out
    assert set(re.findall(r"mixed_precision: (\w+)", offered)) == {half}

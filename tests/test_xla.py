"""PyTorch/XLA: what it does of a configuration, the commands for TPUs, and training on four devices that share the CPU.

The last need torch_xla with its own torch (`make test-xla`), and are skipped with the reason where that is missing.
Losses are compared with those of plain torch in one process, which the same environment has too.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.cli.main import run as command_line
from shardkit.config import xla
from shardkit.config.schema import Config
from shardkit.errors import MachineError, RankFailure
from shardkit.launch import pod
from tests.printed import ROOT
from tests.test_gpu import loops_part, variables

ON_XLA = [
    pytest.mark.xla,
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed here: make test-xla"),
]


def config(**settings: Any) -> Config:
    return Config.model_validate({"distributed_type": "XLA", "xla": True, **settings})


# ---- what a configuration says ----


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"fsdp_config": {"fsdp_sharding_strategy": 2}},
            "SHARD_GRAD_OP); write one of FULL_SHARD, HYBRID_SHARD, NO_SH",
        ),
        ({"fsdp_config": {"fsdp_sharding_strategy": 5}}, "(got HYBRID_SHARD_ZERO2); write one of FULL_SHARD"),
        ({"fsdp_config": {"fsdp_reshard_after_forward": False}}, "fsdp_reshard_after_forward: the compiler decides"),
        ({"fsdp_config": {"fsdp_offload_params": True}}, "fsdp_offload_params: parameters stay on the devices"),
        ({"mixed_precision": "fp16"}, "not for TPUs (got fp16); write bf16."),
        ({"shardkit": {"precision": {"reduce_dtype": "bf16"}}}, "reduce_dtype: the compiler reduces gradients"),
        ({"shardkit": {"compile": True}}, "XLA compiles every step by itself"),
        ({"shardkit": {"recompute": "operators"}}, "only whole blocks are computed again (got operators)"),
        ({"shardkit": {"ddp": {"comm_hook": "bf16"}}}, "gradients are sent as they are (got bf16)"),
        (
            {"xla_fsdp_settings": {"flatten_parameters": True}},
            "flatten_parameters is a setting of one process a device",
        ),
        ({"xla_fsdp_settings": {"compute_dtype": "float16"}}, "(got 'float16'); write bfloat16."),
        (
            {"xla_fsdp_settings": {"compute_dtype": "float32"}, "mixed_precision": "bf16"},
            "compute_dtype says float32 and mixed_precision bf16 (got both)",
        ),
    ],
)
def test_settings_without_a_counterpart_are_named(settings, says):
    (text,) = xla.problems(config(**settings))
    assert text.startswith("distributed_type XLA: ") and says in text
    assert not xla.problems(Config.model_validate({**settings, "xla_fsdp_settings": {}}))


def test_what_has_a_counterpart_passes():
    from shardkit.config.meaning import dtypes

    for strategy in (1, 3, 4):
        assert not xla.problems(config(fsdp_config={"fsdp_sharding_strategy": strategy}))
    assert xla.shards(config()) and not xla.shards(config(xla=False))
    assert not xla.shards(config(fsdp_config={"fsdp_sharding_strategy": 3}))
    assert not xla.problems(config(xla=False, fsdp_config={"fsdp_sharding_strategy": 2}))
    assert dtypes(config(xla_fsdp_settings={"compute_dtype": "torch.bfloat16"})).param == "bf16"
    assert dtypes(config(xla_fsdp_settings={"compute_dtype": "float32"})).param is None


@pytest.mark.parametrize(
    ("torch", "torch_xla", "says"),
    [
        ("2.9.0", "2.9.0", None),
        ("2.9.1+cpu", "2.9.0", None),
        ("2.13.0", None, "needs the package torch_xla, which is not installed; pip install 'shardkit[tpu]'"),
        ("2.13.0", "2.9.0", "(got torch_xla 2.9.0 and torch 2.13.0)"),
        (None, "2.9.0", "(got torch_xla 2.9.0 and torch None)"),
    ],
)
def test_what_is_not_installed_is_said_with_what_to_install(torch, torch_xla, says):
    found = xla.versions_problem(torch, torch_xla)
    assert found is None if says is None else says in str(found)


def test_what_torch_xla_reads_of_the_environment():
    on_cpu = config(use_cpu=True, num_processes=4, downcast_bf16=True)
    assert xla.variables(on_cpu, {}) == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_DOWNCAST_BF16": "1"}
    assert xla.variables(config(), {}) == {"PJRT_DEVICE": "TPU"}
    assert xla.variables(config(), {"PJRT_DEVICE": "CPU"}) == {}
    assert xla.variables(config(use_cpu=True), {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}) == {}


def test_the_speed_is_that_of_all_devices_without_their_memory(monkeypatch):
    import torch

    from shardkit.distributed import xla as devices
    from shardkit.plan.devices import DEVICES
    from shardkit.runtime.speed import Speed

    here = devices.Devices(torch.device("xla"), None, 2, 4, processes=1)
    monkeypatch.setattr(devices, "_started", [here])
    monkeypatch.setattr(devices, "name_of_hardware", lambda: "TPU v6e")
    counters = SimpleNamespace(step=1, samples_seen=8)
    parts = {"device": here.device, "config": config(mixed_precision="bf16"), "process": SimpleNamespace(world_size=1)}
    run = SimpleNamespace(**parts, counters=counters, events=SimpleNamespace(), loads=0)
    speed = Speed(run)
    run.events.on_step()
    counters.step, counters.samples_seen = 2, 16
    assert speed.values().keys() == {"speed/step_time_s", "speed/samples_per_s"}
    assert speed._peak_flops() == 8 * DEVICES["tpu-v6e"].flops["bf16"]


# ---- pods ----

POD = {"tpu_use_cluster": True, "tpu_name": "pod", "tpu_zone": "us-east5-a", "num_machines": 2, "num_processes": 8}
POD |= {"main_process_ip": "10.0.0.2", "tpu_env": ["XLA_FLAGS=--a --b"], "commands": ["pip install -r needs.txt"]}


@pytest.mark.requirement("A10")
def test_a_pod_is_started_by_one_command_a_machine(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    keys = {"distributed_type": "XLA", "xla": True, **POD}
    (tmp_path / "pod.yaml").write_text(json.dumps(keys))
    monkeypatch.chdir(tmp_path)
    asked = [
        "launch",
        "--config",
        "pod.yaml",
        "--mixed-precision",
        "bf16",
        "--dry-run",
        "--json",
        "train.py",
        "--lr",
        "1",
    ]
    assert command_line(asked) == 0
    first, second = json.loads(capsys.readouterr().out)["commands"]
    head = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "us-east5-a", "--worker"]
    assert first[:-3] == head and (first[-3], second[-3]) == ("0", "1")
    assert first[-2:] == [
        "--command",
        f"cd {tmp_path} && export 'XLA_FLAGS=--a --b' && pip install -r needs.txt && python3 -m shardkit launch --set "
        "tpu_use_cluster=false --machine-rank 0 --config pod.yaml --set mixed_precision=bf16 train.py --lr 1",
    ]
    assert second[-1] == first[-1].replace("--machine-rank 0", "--machine-rank 1")


def test_every_flag_reaches_the_machines_of_a_pod(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "pod.yaml").write_text(json.dumps({"distributed_type": "XLA", "xla": True, **POD}))
    monkeypatch.chdir(tmp_path)
    switches = "--no-prefix --force --as-accelerate --accelerates-meaning scheduler,save"
    given = f"launch --config pod.yaml {switches} --logs x --show all --dry-run --json -m train a --measure"
    assert command_line(given.split()) == 0
    for line in json.loads(capsys.readouterr().out)["commands"]:
        assert f" {switches} -m train a --measure" in line[-1]
        assert "--set shardkit.launch.log_dir=x" in line[-1] and "--set shardkit.launch.show=all" in line[-1]


def test_memory_that_torch_xla_does_not_tell_is_not_measured(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    flags = ["--cpu", "--set", "distributed_type=XLA", "--measure", "--dry-run"]
    assert command_line(["launch", *flags, "train.py"]) != 0
    assert "--measure: torch_xla tells no memory where a process drives all devices" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "1"])
def test_a_number_of_this_machine_is_refused_where_the_pod_gives_numbers(tmp_path, capsys, monkeypatch, number):
    (tmp_path / "train.py").touch()
    (tmp_path / "pod.yaml").write_text(json.dumps({"distributed_type": "XLA", "xla": True, **POD}))
    monkeypatch.chdir(tmp_path)
    assert command_line(["launch", "--config", "pod.yaml", "--machine-rank", number, "--dry-run", "train.py"]) == 2
    assert f"gets its number (got {number}); leave it out, or start this machine alone" in capsys.readouterr().err
    alone = ["--set", "tpu_use_cluster=false", "--dry-run"]
    code = command_line(["launch", "--config", "pod.yaml", "--machine-rank", number, *alone, "train.py"])
    assert "gets its number" not in capsys.readouterr().err and code != 2  # torch_xla may be missing here


def test_names_of_machines_sudo_and_a_file_of_commands(tmp_path):
    (tmp_path / "before.sh").write_text("a\n\nb\n")
    found = config(**POD | {"tpu_vm": ["x", "y"], "tpu_use_sudo": True, "command_file": str(tmp_path / "before.sh")})
    assert not pod.problems(found)
    first, second = pod.commands(found, ["train.py"], tmp_path)
    assert first[5] == "x" and second[5] == "y" and "--worker" not in first
    assert "&& a && b && pip install -r needs.txt && sudo -E python3 -m shardkit launch" in first[-1]


def test_what_a_pod_lacks_is_said_at_once():
    text = "\n".join(pod.problems(config(tpu_vm=["x"], num_machines=2, command_file="no.sh")))
    for part in ("tpu_vm has 1 machine (got num_machines 2)", "does not exist (got no.sh)"):
        assert part in text
    assert "needs the name of the TPU (got none); write tpu_name." in pod.problems(config())[0]


@pytest.mark.slow
def test_the_commands_of_a_pod_run_at_once_and_end_together(tmp_path, monkeypatch):
    with pytest.raises(MachineError, match="needs no-such-gcloud, which is not installed"):
        pod.run([["no-such-gcloud"]])
    script = tmp_path / "gcloud"
    script.write_text('#!/bin/sh\necho "$@" >> told-$1\nsleep $2\nexit $3\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    pod.run([["gcloud", "a", "0", "0"], ["gcloud", "b", "0.5", "0"]])
    assert (tmp_path / "told-a").exists() and (tmp_path / "told-b").exists()
    with pytest.raises(RankFailure, match=r"machine 1 failed \(got exit code 3\)"):
        pod.run([["gcloud", "a", "60", "0"], ["gcloud", "b", "0", "3"]])


def test_a_signal_ends_the_commands_of_a_pod(tmp_path):
    code = "from shardkit.launch import pod\npod.run([['sh', '-c', 'echo $$; exec sleep 60']] * 2)"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    pids = [int(running.stdout.readline()) for _ in range(2)]
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert "launch: SIGTERM ended the commands of all machines." in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- training on four devices ----

DEVICES = {"distributed_type": "XLA", "xla": True, "use_cpu": True, "num_processes": 4}
ALONE = {"distributed_type": "NO", "use_cpu": True}


def printed_by(code: str, folder: Path) -> list[str]:
    """The lines that Python code prints in a process of its own, on four XLA devices of the CPU."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, cwd=folder, env=variables()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(folder: Path, config: dict[str, Any], **order: Any) -> dict[str, Any]:
    """What one process reports that trained in this way."""
    number = len([*folder.glob("order-*.json")])
    asked, answer = folder / f"order-{number}.json", folder / f"answer-{number}.json"
    given = {name: str(value) if isinstance(value, Path) else value for name, value in order.items()}
    asked.write_text(json.dumps({"config": config, **given}))
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "scripts" / "on_xla.py", asked, answer],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text())


def reference(steps: int = 4, micro_batches: int = 1) -> list[float]:
    """The losses of a plain loop in one process: what tests/scripts/on_xla.py trains, in torch's own words."""
    import torch

    from tests import models
    from tests.scripts.on_xla import Tokens

    torch.manual_seed(0)
    model = models.Gpt(width=16, layers=2, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    batches = iter(torch.utils.data.DataLoader(Tokens(), batch_size=8))
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = models.next_token_loss(model, next(batches))
            (loss / micro_batches).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def on_xla(*values: Any) -> Any:
    return pytest.param(*values, marks=ON_XLA)


WAYS = {
    "full": ({}, {}),
    "size": ({"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}}, {}),
    "no_wrap": ({"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}, {}),
    "recomputed": ({"xla_fsdp_grad_ckpt": True}, {}),
    "whole": ({"xla": False}, {}),
    "hybrid": ({"fsdp_config": {"fsdp_sharding_strategy": 4}, "shardkit": {"mesh": {"shard_size": 2}}}, {}),
    "accumulated": ({}, {"accumulate": 2, "steps": 3}),
}


@pytest.mark.requirement("A10")
@pytest.mark.parametrize("way", [on_xla(name) for name in WAYS])
def test_training_on_four_devices_equals_plain_torch(tmp_path, way):
    settings, order = WAYS[way]
    found = run(tmp_path, {**DEVICES, **settings}, **order)
    assert found["losses"] == pytest.approx(reference(order.get("steps", 4), order.get("accumulate", 1)), abs=1e-4)
    assert (found["device"], found["num_processes"], found["type"]) == ("xla:0", 1, "XLA")
    assert found["is_tied"]
    is_sharded = way != "whole"
    assert all(("devices=" in layout) == is_sharded for layout in found["spread"]["parameters"])
    assert all(is_spread == is_sharded for is_spread in found["spread"]["state"])


@pytest.mark.parametrize("settings", [on_xla({}), on_xla({"downcast_bf16": True})])
def test_training_in_bf16_is_near(tmp_path, settings):
    found = run(tmp_path, {**DEVICES, "mixed_precision": "bf16", **settings})
    assert found["losses"] != pytest.approx(reference(), abs=1e-5)
    assert found["losses"] == pytest.approx(reference(), abs=0.2)


@pytest.mark.requirement("A10")
@pytest.mark.parametrize("way", [on_xla("blocking"), on_xla("beside")])
def test_a_state_goes_from_the_devices_to_a_process_and_back(tmp_path, way):
    """One format: six steps, of which the first three and the last three are trained on other kinds of devices."""
    saving = {"save" if way == "blocking" else "save_beside": tmp_path / "state"}
    losses = reference(6)
    first = run(tmp_path, DEVICES, steps=3, **saving, export=tmp_path / "model")
    rest = run(tmp_path, ALONE, steps=3, load=tmp_path / "state", save=tmp_path / "back")
    assert first["losses"] + rest["losses"] == pytest.approx(losses, abs=1e-4)
    back = run(tmp_path, DEVICES, steps=2, load=tmp_path / "back")
    assert back["losses"] == pytest.approx(reference(8)[6:], abs=1e-4)
    assert all("devices=" in layout for layout in back["spread"]["parameters"]) and all(back["spread"]["state"])
    again = run(tmp_path, DEVICES, steps=0, load=tmp_path / "state", load_whole=True)
    assert again["sum"] == first["sum"]
    assert all("devices=" in layout for layout in again["spread"]["parameters"])


@pytest.mark.parametrize("settings", [on_xla({}), on_xla({"xla": False})])
def test_a_state_is_restored_in_the_process_that_went_on_training(tmp_path, settings):
    found = run(tmp_path, {**DEVICES, **settings}, steps=2, go_back=tmp_path / "state", dropout=0.3)
    trained, more, again = found["losses"][:2], found["losses"][2:4], found["losses"][4:]
    assert again == pytest.approx(more, abs=1e-5) and again != pytest.approx(trained, abs=1e-2)
    is_sharded = not settings
    assert all(("devices=" in layout) == is_sharded for layout in found["spread"]["parameters"])


SHARED = """
import copy, torch
from torch import nn
from shardkit import Accelerator

accelerator = Accelerator(config={"distributed_type": "XLA", "use_cpu": True, "num_processes": 4})
tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
tied[1].weight = nn.Parameter(tied[0].weight.data)
compiled = nn.Sequential(nn.Linear(3, 3))
compiled[0].compile()
for model in (tied, torch.jit.script(nn.Linear(3, 3)), torch.compile(nn.Linear(3, 3)), compiled):
    try:
        accelerator.prepare(model)
    except Exception as error:
        print(error)


class Block(nn.Linear):
    pass


settings = {"fsdp_activation_checkpointing": True, "fsdp_transformer_layer_cls_to_wrap": "Block"}
config = {"distributed_type": "XLA", "use_cpu": True, "num_processes": 4, "fsdp_config": settings}
model = Accelerator(config=config).prepare(nn.Sequential(Block(3, 3), Block(3, 3)))
zero = copy.deepcopy(model)
with torch.no_grad():
    for p in zero.parameters():
        p.zero_()
inputs = torch.ones(4, 3, device=accelerator.device, requires_grad=True)
print([bool(one(inputs).any()) for one in (model, zero)])
with torch.inference_mode():
    print([bool(one(inputs).any()) for one in (model, zero)])
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_a_copy_has_parameters_of_its_own_and_what_would_lose_them_is_refused(tmp_path, _):
    assert printed_by(SHARED, tmp_path) == [
        "model: 0.weight and 1.weight are different tensors in the same memory, which they would not share on XLA "
        "devices; give both modules the same parameter, or copy one of them (.clone()).",
        "model: it is a TorchScript module, whose parameters stay in host memory; give the module that it was made "
        "from.",
        *(
            f"model: {name} is compiled by torch.compile, whose compilers do not train on XLA devices; leave that out: "
            "XLA compiles every step by itself."
            for name in ("it", "0")
        ),
        "[True, False]",
        "[True, False]",
    ]


BARRIERS = """
import warnings, torch
from torch import nn
from shardkit import Accelerator


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, batch):
        batch["x"] *= 1.5
        batch["x"] = self.down(torch.tanh(self.up(batch["x"])))
        batch["weight"] = self.up.weight
        return batch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        batch = {"x": self.first(x)}
        for block in self.blocks:
            batch = block(batch)
            batch["x"] += 0.5
        return batch["x"]


def gradients(model, device):
    model(torch.linspace(-1, 1, 32, device=device).view(4, 8)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


accelerator = Accelerator(config={"distributed_type": "XLA", "xla": True, "use_cpu": True, "num_processes": 4})
import torch_xla
torch.manual_seed(0)
model = Net()
expected = gradients(model, "cpu")
model = accelerator.prepare(model)
model.zero_grad()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    before = [torch_xla._XLAC._get_xla_sharding_spec(p) for p in model.parameters()]
    found = gradients(model, accelerator.device)
    print([torch_xla._XLAC._get_xla_sharding_spec(p) for p in model.parameters()] == before)
    print(torch_xla._XLAC._get_xla_tensors_hlo(found).count("opt-barrier("))
    torch.testing.assert_close([one.cpu() for one in found], expected)
    model.zero_grad()
    model.first.requires_grad_(False)
    found = gradients(model, accelerator.device)
    print(torch_xla._XLAC._get_xla_tensors_hlo(found).count("opt-barrier("))
    torch.testing.assert_close([one.cpu() for one in found], expected[2:])
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_the_backward_of_units_is_compiled_by_itself_whatever_they_do_with_tensors(tmp_path, _):
    assert printed_by(BARRIERS, tmp_path) == [
        "True",
        "3",
        "2",
    ]  # what is before the first block needs no gradient at last


ATTENTION = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from shardkit import Accelerator


class Attention(nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).chunk(3, -1)
        return scaled_dot_product_attention(q * x.cos(), k * x.sin(), v, is_causal=True)


def outcome(model, x):
    found = model(x)
    found.square().mean().backward()
    return [one.detach().float().cpu() for one in (found, *(p.grad for p in model.parameters()))]


settings = {"distributed_type": "XLA", "xla": True, "use_cpu": True, "num_processes": 4, "mixed_precision": "bf16"}
accelerator = Accelerator(config=settings)
torch.manual_seed(0)
model, x = Attention(8, 24), torch.linspace(-1, 1, 96).view(4, 3, 8)
with torch.autocast("cpu", dtype=torch.bfloat16):
    expected = outcome(model, x)
model = accelerator.prepare(model)
model.zero_grad()
torch.testing.assert_close(outcome(model, x.to(accelerator.device)), expected, atol=0.01, rtol=0.01)
with torch.autocast("xla", dtype=torch.bfloat16):
    print(scaled_dot_product_attention(*[torch.ones(1, 4, 8, device=accelerator.device)] * 3).dtype)
print(scaled_dot_product_attention(*[torch.ones(1, 4, 8, device=accelerator.device)] * 3).dtype)
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_attention_is_in_bf16_where_queries_are_not(tmp_path, _):
    assert printed_by(ATTENTION, tmp_path) == ["torch.bfloat16", "torch.float32"]


LOADED = """
import torch
from torch import nn
from shardkit import Accelerator
from shardkit.compat import load_checkpoint_in_model
from shardkit.distributed import xla

config = {"distributed_type": "XLA", "xla": True, "use_cpu": True, "num_processes": 4}
accelerator = Accelerator(config=config)
model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)), nn.BatchNorm1d(4)))
accelerator.save_model(model, "weights")
layouts = [xla.layout_of(p) for p in model.parameters()]
part = {name: torch.full_like(value, 2.0) for name, value in model[1].state_dict().items()}
for load in (
    lambda: load_checkpoint_in_model(model, "weights"),
    lambda: accelerator.prepare_model(model, weights="weights"),
    lambda: model[1].load_state_dict(part),
):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    load()
    xla.flush()
    print([xla.layout_of(p) for p in model.parameters()] == layouts, model[1][0].weight.sum().item())
try:
    Accelerator(config={**config, "xla_fsdp_grad_ckpt": True}).prepare(model)
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_weights_that_are_loaded_are_spread_as_before(tmp_path, _):
    first, second, third, refused = printed_by(LOADED, tmp_path)
    assert first == second and first.startswith("True ") and third == "True 64.0"
    assert refused == (
        "model: is already sharded (got a sharded Linear in it), by the script, by an Accelerator with other settings, "
        "or as a part of another model; build the model anew, and prepare it once."
    )


RESUMED = """
import torch
from torch import nn
from shardkit import Accelerator

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.inner(x) * self.scale

def trained(first, last):
    accelerator = Accelerator(config={"distributed_type": "XLA", "xla": True, "use_cpu": True, "num_processes": 4})
    torch.manual_seed(0)
    model = Scaled()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    if first:
        accelerator.load_state("state")
    for step in range(first, last):
        loss = model(torch.full((8, 8), 1.0 + step, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("state" if last < 4 else f"state-{first}")
    accelerator.free_memory()
    return f"{loss.item():.4f}"

print(trained(0, 4), trained(0, 2) and trained(2, 4))
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_a_parameter_of_one_number_is_resumed_with_the_steps_of_its_optimizer(tmp_path, _):
    whole, resumed = printed_by(RESUMED, tmp_path)[-1].split()
    assert whole == resumed


GATHERED = """
import torch
from shardkit import Accelerator
from shardkit.distributed import xla

settings = {"distributed_type": "XLA", "use_cpu": True, "num_processes": 4, "xla": True}
for strategy in (1, 4):
    mesh = {"mesh": {"shard_size": 2}} if strategy == 4 else {}
    fsdp = {"fsdp_config": {"fsdp_sharding_strategy": strategy}}
    accelerator = Accelerator(config={**settings, **fsdp, "shardkit": mesh})
    import torch_xla.debug.metrics as metrics
    for shape in [(5, 3), (8, 8), (2,), (1, 1), (3, 7), (6, 1, 2)]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            host = (torch.randn(shape) * 5).to(dtype)
            found = [xla.to_host(xla.send(host, spec)) for spec in (None, xla.shard_spec(shape))]
            assert all(one.dtype == dtype and torch.equal(one, host) for one in found), (shape, dtype)
    model = accelerator.prepare(torch.nn.Linear(8, 5))
    accelerator.save_state(f"state-{strategy}")
    accelerator.get_state_dict(model)
    print(metrics.metric_data("CompileTime"))
    accelerator.free_memory()
    host = torch.randn(8, 4)
    sent = xla.send(host, xla.shard_spec(host.shape)).requires_grad_()
    assert torch.equal(xla.to_host(sent.t()), host.t())
    with torch.no_grad():
        sent.mul_(2)
    assert torch.equal(xla.to_host(sent), host * 2)
    metrics.clear_metrics()
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_what_is_spread_is_put_together_in_host_memory_without_a_compilation(tmp_path, _):
    assert printed_by(GATHERED, tmp_path) == ["None", "None"]


REPEATED = """
import copy, torch
import torch_xla.debug.metrics as metrics
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset
from shardkit import Accelerator


class Net(torch.nn.Sequential):
    def save_pretrained(self, path):
        save_file(self.state_dict(), path)


settings = {"distributed_type": "XLA", "use_cpu": True, "num_processes": 4, "xla": True}
accelerator = Accelerator(config=settings)
model = Net(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 4)
loaders = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
model, optimizer, scheduler, train, evaluation = accelerator.prepare(model, optimizer, scheduler, *loaders)
for epoch in range(4):
    for x, y in train:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss.item()
    labels, counts = [], torch.zeros(4, device=accelerator.device)
    with torch.no_grad():
        for x, y in evaluation:
            found, wanted = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            labels += wanted.tolist()
            assert found.cpu().shape == (8,)
            counts += torch.nn.functional.one_hot(found, 4).sum(0)
    print(labels == data.tensors[1].tolist(), int(accelerator.reduce(counts).cpu().sum()))
    if epoch == 2:
        before = metrics.metric_data("CompileTime")[0]
print(metrics.metric_data("CompileTime")[0] - before)
accelerator.save({**model.state_dict(), "counts": counts}, "own.safetensors")
accelerator.save_model(model, "whole")
best = copy.deepcopy(model)
model.save_pretrained("pretrained.safetensors")
best.save_pretrained("best.safetensors")
whole, counts = load_file("whole/model.safetensors"), 0
for name in ("own", "pretrained", "best"):
    found = load_file(f"{name}.safetensors")
    counts += int(found.pop("counts", torch.zeros(())).sum())
    print(name, whole.keys() == found.keys() and all(torch.equal(found[name], value) for name, value in whole.items()))
print(counts)
"""


@pytest.mark.parametrize("_", [on_xla(None)])
def test_epochs_after_the_first_compile_nothing_and_what_the_script_saves_itself_is_whole(tmp_path, _):
    assert printed_by(REPEATED, tmp_path) == [*["True 24"] * 4, "0", "own True", "pretrained True", "best True", "24"]


@pytest.mark.parametrize("part", [on_xla(number) for number in range(24)])
def test_loops_that_people_write_are_plain_torch(tmp_path, part):
    loops_part(tmp_path, "xla", part, 24)


def launch(folder: Path, steps: int, *arguments: str) -> dict[int, float]:
    """The losses that the template prints, by step, where it goes on with what is in the folder."""
    command = [sys.executable, "-m", "shardkit", "launch", "--resume", "auto", *arguments]
    command += [str(ROOT / "templates" / "train.py"), "--steps", str(steps), "--log-every", "1", "--save-every", "2"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--global-batch", "8"], capture_output=True, text=True, timeout=280, cwd=folder, env=variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.requirement("A10")
@pytest.mark.parametrize("_", [on_xla(None)])
def test_launch_trains_the_template_from_devices_to_gloo_ranks_and_back(tmp_path, _):
    tpu = ("--config", str(ROOT / "templates" / "tpu.yaml"), "--cpu", "-n", "4", "--mixed-precision", "no")
    ranks = ("--set", "distributed_type=MULTI_CPU", "-n", "2", "--cpu")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    found = launch(parts, 2, *tpu) | launch(parts, 4, *ranks) | launch(parts, 6, *tpu)
    assert [*found] == [1, 2, 3, 4, 5, 6] and found == pytest.approx(launch(whole, 6, *ranks), abs=2e-3)
    assert (parts / "runs" / "gpt" / "export").is_dir()


@pytest.mark.parametrize("_", [on_xla(None)])
def test_a_doctor_starts_the_devices_by_one_rank(tmp_path, _):
    command = [sys.executable, "-m", "shardkit", "doctor", "--config", str(ROOT / "templates" / "tpu.yaml")]
    done = subprocess.run(
        [*command, "--cpu", "-n", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env=variables(),
    )
    found = {one["check"]: one["found"] for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stderr
    assert (found["configuration"], found["devices"]) == ("1 rank on 1 machine, xla", "4 XLA devices (CPU)")
    assert found["cores"].endswith(" for 1 rank")


@pytest.mark.parametrize("_", [on_xla(None)])
def test_another_number_of_devices_is_refused(tmp_path, _):
    code = "from shardkit import Accelerator; Accelerator(config={'distributed_type': 'XLA', 'num_processes': 3})"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=variables)
    assert done.returncode != 0
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    several = subprocess.run(
        [sys.executable, "-c", code.replace("3", "2")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**variables, **rank},
    )
    assert "the devices are those of 1 machine (got 2 launched); launch one process on each machine" in several.stderr
    assert (
        "num_processes: 3 asked for (got 2 XLA devices); leave it out: on a TPU it is the number of all its devices."
        in done.stderr
    )


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="here there may be a TPU")
@pytest.mark.parametrize("_", [on_xla(None)])
def test_a_machine_without_a_tpu_is_refused_with_what_to_do(tmp_path, _):
    code = "from shardkit import Accelerator; Accelerator(config={'distributed_type': 'XLA', 'num_processes': 4})"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=variables)
    assert done.returncode != 0
    assert (
        "MachineError: distributed_type XLA: torch_xla starts no device here (got libtpu not found); on a TPU pip "
        "install 'shardkit[tpu]', elsewhere try it with --cpu." in done.stderr
    )

"""`make gpu` ends in time and keeps what it has: sections that fail, hang or are cut short do not lose the others."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_words
from shardkit.config import hardware
from tests import test_gpu

ROOT = Path(__file__).parent.parent
LONG = "test_with_a_name_that_leaves_pytest_no_room_for_the_reason_why_it_is_skipped"


def begins(options):
    yield {"shardkit": {"a": 1.0}}
    raise gpu.Failed("Traceback\nRuntimeError: by hand does not start")


def breaks(options):
    yield {"rows": []}
    yield {"rows": [{"changes": {"strategy": 1}, "failed": "OutOfMemoryError"}]}
    raise KeyError("peak_bytes")


def takes_long(options):
    yield {"on the device": {"layers": 3, "parameters": 10**9, "is_limit": False}}
    gpu.run(options, [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(600)"])


def ends(options):
    yield {"shardkit": {"a": 1.0}, "by hand": {"a": 1.0}}


@pytest.mark.slow
def test_a_section_that_fails_keeps_what_it_has_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    sections = {"steps": (begins, 1.0), "plan": (breaks, 1.0), "largest": (takes_long, 1.0), "waits": (ends, 7.0)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    output, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--minutes", "0.1", "--output", str(output), "--table", str(table), "--device", "cpu"]
    )
    began = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 1 and time.monotonic() - began < 280
    found = json.loads(output.read_text())
    assert found["steps"]["failed"].endswith("by hand does not start") and found["steps"]["shardkit"] == {"a": 1.0}
    assert found["plan"]["rows"] and "KeyError: 'peak_bytes'" in found["plan"]["failed"]
    assert found["largest"]["on the device"]["layers"] == 3
    assert found["largest"]["ended_early"].endswith(gpu.OVER)
    assert "failed" not in found["waits"]
    said = capsys.readouterr().out
    assert "  failed: RuntimeError: by hand does not start" in said
    assert "  strategy 1: not measured (OutOfMemoryError)\n  failed: KeyError: 'peak_bytes'" in said
    assert f"3 layers) and more\n  ended early: {gpu.OVER}" in said
    assert "| waits | within the goal: no more often than by hand |" in table.read_text()


def test_sections_measured_in_parts_come_together(tmp_path, monkeypatch):
    """Of the same versions on such a device; where a process is killed while it writes, what was there stays."""
    output = tmp_path / "gpu.json"
    options = gpu.Options(output=output)
    here = {"device_name": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.13.0"}, "small": False, "load": 0.1}
    assert gpu._measured_before(options, here) == {}
    gpu._write(options, {**here, "waits": {"shardkit": {"a": 1.0}}})
    found = gpu._measured_before(options, {**here, "load": 3.0})
    assert found == {"waits": {"shardkit": {"a": 1.0}}}
    assert gpu._measured_before(options, {**here, "device_name": "NVIDIA H200"}) == {}
    for text in ("", "[1, 2]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(SystemExit, match=r"other\.json is not of this benchmark, or damaged"):
            gpu._measured_before(gpu.Options(output=tmp_path / "other.json"), here)

    def write_half(path, text):
        path.write_bytes(text[: len(text) // 2].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        gpu._write(options, {**here, "waits": {"shardkit": {"a": 2.0}}})
    assert json.loads(output.read_text())["waits"] == {"shardkit": {"a": 1.0}}


def test_what_a_stopped_section_leaves_does_not_look_complete(monkeypatch):
    monkeypatch.setattr(gpu, "SECTIONS", {"waits": (ends, 1.0)})
    found = gpu.measured_section("waits", gpu.Options())
    assert "ended early: the benchmark was stopped" in [*gpu_words.lines("waits", next(found))]
    assert [*found] == [{"shardkit": {"a": 1.0}, "by hand": {"a": 1.0}}]


def test_a_result_that_cannot_be_written_now_ends_nothing(tmp_path, capsys):
    gone = tmp_path / "gone" / "gpu.json"
    gpu._write(gpu.Options(output=gone), {"small": True})
    assert capsys.readouterr().err == f"benchmarks.gpu: {gone}.begun: not written (No such file or directory)\n"


@pytest.mark.parametrize(("gib", "layers", "batch"), [(None, 22, 4), (80, 22, 4), (24, 13, 2), (16, 8, 1), (1, 1, 1)])
def test_the_model_has_as_many_layers_as_the_device_has_room_for(gib, layers, batch):
    """The whole one takes 35 GiB; on a device with less nothing was measured."""
    options = gpu.Options(memory_bytes=gib and gib * 2**30)
    order = gpu.order_of(options, "steps", "shardkit")
    assert (order.layers, order.batch, order.hidden, order.steps) == (layers, batch, 2048, 10)
    assert gpu.order_of(options, "steps", "shardkit", layers=60).layers == 60, "what is looked for is not changed"
    assert gpu.fitted(options, {"strategy": 2, "batch": 16})["batch"] == max(1, 16 * min(40, gib or 40) // 40)


@pytest.mark.slow
def test_on_a_device_without_bf16_all_compute_in_fp32():
    """shardkit trains in fp32 there, with a warning that nobody saw, and the loop by hand in bf16 that is emulated."""
    for contestant in ("shardkit", "by hand"):
        assert gpu.order_of(gpu.Options(precision="no"), "steps", contestant).precision == "no"
    assert gpu.order_of(gpu.Options(precision="no"), "steps", "shardkit", precision="fp8").precision == "fp8"
    options = gpu.Options(device="cpu", small=True)
    assert gpu.described(options)["device"] == "cpu" and options.precision == "bf16"
    size = {"layers": 8, "hidden": 2048, "batch": 1, "seq": 2048, "precision": "no"}
    assert gpu_words._model(size) == "8 layers, width 2,048, 1 x 2,048 tokens, fp32"


def test_who_takes_no_part_is_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(gpu, "measured", lambda *given, **order: {"step_s": 1.0})
    monkeypatch.setattr(gpu, "_speed", lambda *given: {"tokens_a_s": 1.0, "mfu": None})
    monkeypatch.setattr(gpu.interleaved, "surroundings", lambda: {"versions": {}})
    for device, reason in (("cuda", "it is not installed"), ("cpu", "its FSDP is not measured on the device cpu")):
        *_, found = gpu.steps(gpu.Options(device=device, rounds=1))
        assert f"accelerate: left out ({reason})" in [*gpu_words.lines("steps", found)]


@pytest.mark.parametrize("free_gib", [6, 8, 12, 1000])
def test_the_folder_for_temporary_files_has_room_for_two_checkpoints(free_gib, monkeypatch):
    seen, free_bytes = [], free_gib * 2**30
    monkeypatch.setattr(gpu, "measured", lambda *given, layers: seen.append(layers) or {})
    monkeypatch.setattr(gpu.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    assert len([*gpu.checkpoint(gpu.Options())]) == 1
    (layers,) = seen
    assert 2 * (12 * 135_000_000 + layers * gpu._bytes_of_layer(12)) < free_bytes
    assert layers == 8 or free_gib < 1000


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_measures_what_is_asked_for_and_keeps_the_path_of_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/packages")
    command = ["make", "--silent", "gpu", "GPU_PYTHON=printenv PYTHONPATH; echo", "GPU_ONLY=tests waits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    path, benchmark = done.stdout.splitlines()
    assert path == f"{ROOT}:/packages"
    assert benchmark.startswith("-m benchmarks.gpu --only tests --only waits --minutes 19 ")


def test_an_order_leaves_packages_beside_the_checkout_where_they_are(tmp_path, monkeypatch):
    """Such as those that `pip install --target` has put into a folder that PYTHONPATH names."""
    (tmp_path / "only_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(test_gpu, "ROOT", tmp_path)
    (tmp_path / "tests" / "scripts").mkdir(parents=True)
    (tmp_path / "tests" / "scripts" / "on_device.py").write_text("import only_here")
    begun = test_gpu.started(tmp_path / "order.json", tmp_path / "answer.json", {})
    assert begun.communicate(timeout=60)[1] == "" and begun.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.xpu.is_available(), reason="the device that is missing elsewhere is here")
def test_without_its_device_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "xpu"])
    with pytest.raises(SystemExit, match=r"benchmarks.gpu: torch cannot use the device xpu \(got .*XPU.*\); run it"):
        gpu.main()


def test_what_ends_early_leaves_its_minutes_to_the_next(monkeypatch):
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 1000.0)
    until = list(gpu._ends(list(gpu.SECTIONS), 19.0))
    assert until == sorted(until) and until[-1] == pytest.approx(1000 + 19 * 60)
    assert until[0] == pytest.approx(1000 + gpu.SECTIONS["tests"][1] * 60)


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [[], ["-p", "xdist", "-n", "2"]])
def test_outcomes_are_kept_also_of_tests_side_by_side(tmp_path, side_by_side):
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\ndef test_one(): pass\n\n"
        "@pytest.mark.parametrize('a', [1])\ndef test_two(a): assert a == 2\n\n"
        "@pytest.fixture\ndef ends_badly():\n    yield\n    raise OSError\n\n"
        "def test_three(ends_badly): pass\n\n"
        f"@pytest.mark.skip(reason='no (CUDA) device')\ndef {LONG}(): pass\n"
    )
    outcomes = tmp_path / "outcomes"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *side_by_side, str(tmp_path)]
    gpu.run(gpu.Options(), [*command, "-p", "benchmarks.gpu_outcomes", "--outcomes", str(outcomes)])
    found = gpu._counted(outcomes)
    not_passed = found.pop("not_passed")
    assert sorted(not_passed) == ["test_three", "test_two[1]"] and "OSError" in not_passed["test_three"]
    assert found == {"passed": 1, "skipped": {LONG: "no (CUDA) device"}}
    assert list(gpu_words.lines("tests", found | {"not_passed": {"test_two[1]": not_passed["test_two[1]"]}})) == [
        "1 passed, 1 failed, 1 skipped",
        "failed: test_two[1]: assert 1 == 2",
        f"skipped: {LONG}: no (CUDA) device",
    ]


COMPILER = """Traceback (most recent call last):
  File "cpp_builder.py", line 108, in cpp_compiler_search
    raise exc.InvalidCxxCompiler
[rank0]: torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found

[rank0]: Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (exit code 1)"""
GROUP = """[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.
[rank0]:[W1125 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not called (exit code 1)"""


def test_the_reason_is_the_error_and_not_the_advice_or_the_warnings_after_it():
    compiler, group = gpu_words.last_line(COMPILER), gpu_words.last_line(GROUP)
    assert compiler.endswith("InductorError: InvalidCxxCompiler: No working C++ compiler found")
    assert group == "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
    assert gpu_words.last_line("began\nends without an error\n") == "ends without an error"
    assert gpu_words.last_line("\n") == "no output"


def test_a_process_is_one_of_its_own_whatever_job_and_container_are_around_it(monkeypatch):
    around = {"SLURM_NTASKS": "8", "WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "FSDP_VERSION": "1"}
    for name, value in {**around, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}.items():
        monkeypatch.setenv(name, value)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(gpu.run(gpu.Options(), [sys.executable, "-c", show]).stdout)
    assert {name: seen.get(name) for name in around} == {**dict.fromkeys(around), "WORLD_SIZE": "1", "RANK": "0"}
    assert seen["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "0" and seen["PATH"]


def test_the_largest_model_is_looked_for_within_the_limit_of_a_container(monkeypatch):
    gib = 2**30
    here = hardware.Hardware((hardware.Device("a GPU", 80 * gib, "cuda"),), 16, 16 * gib)
    monkeypatch.setattr(hardware, "detect", lambda: here)
    monkeypatch.setattr(gpu.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 2**29}[name])
    layers = int(0.7 * 16 * gib) // gpu._bytes_of_layer(16)
    assert gpu._layers_that_may_fit(gpu.Options(), True) == (layers, layers)


@pytest.mark.slow
def test_warnings_of_the_machines_own_packages_fail_no_test(tmp_path, monkeypatch):
    """Such as that of pynvml, at the import of torch, and of plugins of pytest."""
    (tmp_path / "pynvml.py").write_text("import warnings\nwarnings.warn('deprecated', FutureWarning)\n")
    (tmp_path / "loud.py").write_text("raise RuntimeError('a plugin that needs another pytest')\n")
    about = tmp_path / "loud-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: loud\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[pytest11]\nloud = loud\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    *_, found = gpu.measured_section("tests", gpu.Options())
    assert "failed" not in found, found["failed"]
    assert not found["not_passed"] and len(found["skipped"]) + found["passed"] > 10


@pytest.mark.parametrize(("limit", "tried"), [(70, [64, 72]), (81, [64, 72, 80, 88]), (50, [64, 56, 48]), (999, None)])
def test_the_largest_model_is_looked_for_by_eighths(monkeypatch, limit, tried):
    seen = []

    def measured(options, task, contestant, **order):
        seen.append(order["layers"])
        if order["layers"] > limit:
            raise gpu.Failed("torch.OutOfMemoryError: CUDA out of memory")
        return {"parameters": 10 * order["layers"], "order": order}

    monkeypatch.setattr(gpu, "measured", measured)
    *_, last = gpu._most_layers(gpu.Options(), False, 64, 96)
    assert seen == (tried or [64, 72, 80, 88, 96])
    best = max(layers for layers in seen if layers <= limit)
    assert last == {"layers": best, "parameters": 10 * best, "is_limit": limit < 96}


@pytest.mark.loops
@pytest.mark.timeout(1260)
def test_every_section_runs_on_the_cpu(tmp_path):
    """As `make gpu` calls it; figures of so small a model mean nothing, and the tests that need a GPU are skipped."""
    output, table = tmp_path / "gpu.json", tmp_path / "gpu.md"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--device", "cpu", "--rounds", "1"]
    command += ["--output", str(output), "--table", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found.keys() >= gpu.SECTIONS.keys()
    assert not found["tests"]["not_passed"]
    assert [row["planned_s"] for row in found["plan"]["rows"]]
    assert found["steps"]["compiled"]["ratios"] and found["checkpoint"]["bytes"] > 0
    assert found["largest"]["in host memory"] == {**found["largest"]["on the device"], "is_limit": False}
    assert all(f"| {name} |" in table.read_text() for name in ("on", *gpu.SECTIONS))

"""`shardkit submit`: what it writes for each engine, what it refuses, and that nothing is lost in quotes on the way."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shardkit.cli.main import run
from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.plan import devices
from shardkit.submit import job as jobs
from shardkit.submit import reading, sending, sizing
from shardkit.submit.engines import ENGINES
from tests.launches import script

CONFIGURATION = """distributed_type: FSDP
num_machines: 2
num_processes: 16
mixed_precision: bf16
main_process_ip: 10.0.0.1
main_process_port: 29500
machine_rank: 1
"""
CPU = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 4\nuse_cpu: true\n"
WORDS = ["it's", "a b", "$HOME", "$(touch x)", "`touch y`", 'say "hi"', "x;y", "# no", "--time", "ü", "a\\b", "*", ""]
IMAGE = ("--image", "team/train:1")
NEEDED = {
    "slurm": (),
    "kubeflow": IMAGE,
    "jobset": IMAGE,
    "skypilot": ("--device", "h100-80"),
    "ray": (),
    "ssh": ("--hosts", "hosts"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    folder = tmp_path / "my $HOME project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    Path("shardkit.yaml").write_text(CONFIGURATION)
    Path("train.py").write_text("")
    Path("hosts").write_text("\ufeffnode-a slots=8\n# ours\n\nme@node-b  # the other\n")


def submit(capsys, *words: str, code: int = 0) -> tuple[str, str]:
    found = run(["submit", *words])
    output = capsys.readouterr()
    assert found == code, output.err
    return output.out, output.err


def objects(text: str) -> list[dict]:
    return list(yaml.safe_load_all(text))


def pod_of(jobset_spec: dict) -> dict:
    return jobset_spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


# what is written


def test_a_batch_script(capsys):
    text, _ = submit(
        capsys, "--to", "slurm", "--time", "1d12h", "--option", "partition=gpu", "--option", "exclusive", "train.py"
    )
    lines = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert lines == {
        "job-name": "train",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "mem": "0",
        "gpus-per-node": "8",
        "time": "1-12:00:00",
        "signal": "TERM@150",  # stop_timeout_s and the margin
        "requeue": "",
        "open-mode": "append",
        "chdir": shlex.quote(str(Path.cwd())),
        "output": "%x-%j.log",
        "partition": "gpu",
        "exclusive": "",
    }
    assert 'if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi' in text
    assert "--kill-on-bad-exit=0 --wait=60" in text
    assert "\n# train: 2 machines with 8 GPUs each." in text
    for on_cpu in ("use_cpu=true", "distributed_type=MULTI_CPU"):
        text, _ = submit(capsys, "--to", "slurm", "--set", "num_processes=2", "--set", on_cpu, "train.py")
        assert "\n# train: 2 machines with 1 rank on the CPU each." in text
        assert "--gpus-per-node" not in text and "--cpus-per-task=1\n" in text


def test_options_of_sbatch_that_exclude_one_of_ours_replace_it(capsys):
    """sbatch refused the job: memory per core or GPU, and the type of the GPUs, could not be asked for."""
    for option, gone in (
        ("mem-per-cpu=2G", "--mem="),
        ("mem-per-gpu=60G", "--mem="),
        ("gres=gpu:a100:8", "--gpus-per"),
    ):
        text, _ = submit(capsys, "--to", "slurm", "--option", option, "train.py")
        assert f"#SBATCH --{option}\n" in text and gone not in text
    text, _ = submit(capsys, "--to", "slurm", "--option", "gres=tmpfs:10", "train.py")
    assert "--gpus-per-node=8\n" in text and "--mem=0\n" in text


def test_sbatch_reads_folders_and_values_as_they_are(capsys, tmp_path, monkeypatch):
    """Its backslashes count in quotes, too; and it replaces %j in the folder of the log."""
    text, _ = submit(capsys, "--to", "slurm", "--option", r"comment=a\z", "train.py")
    assert r"#SBATCH --comment='a\\z'" in text
    (tmp_path / "at 100 %j").mkdir()
    monkeypatch.chdir(tmp_path / "at 100 %j")
    Path("train.py").write_text("")
    text, _ = submit(capsys, "--to", "slurm", "-n", "8", "train.py")
    assert f"#SBATCH --chdir='{tmp_path}/at 100 %j'\n#SBATCH --output='{tmp_path}/at 100 %%j/%x-%j.log'\n" in text
    (tmp_path / "a\\b").mkdir()
    monkeypatch.chdir(tmp_path / "a\\b")
    Path("train.py").write_text("")
    _, error = submit(capsys, "--to", "slurm", "-n", "8", "train.py", code=2)
    assert "submit: SLURM writes no log below a folder with a backslash or a line break (got" in error


@pytest.mark.parametrize("engine", NEEDED)
def test_the_configuration_goes_along_without_its_place(capsys, engine):
    """What runs is what was configured when it was submitted; addresses, port and number are the engine's. So are
    restarts, where the engine starts the job again as often as configured. What nobody has chosen is left to the
    script, as in a launch here."""
    settings = ["--set", "shardkit.seed=3", "--set", "shardkit.launch.bind_address=10.0.0.3", "--restarts", "3"]
    settings += ["--set", "fsdp_config.fsdp_state_dict_type=SHARDED_STATE_DICT", "--set", "machine_rank=0"]
    text, _ = submit(capsys, "--to", engine, *NEEDED[engine], *settings, "train.py")
    if engine in ("kubeflow", "jobset", "skypilot"):
        found = objects(text)[-1]
        spec = found.get("spec", {})
        container = spec["trainer"] if engine == "kubeflow" else pod_of(spec)["containers"][0] if spec else {}
        text = container["command"][-1].replace("$$", "$") if container else found["run"]
    inside = re.search(r"<<'END_OF_CONFIGURATION'\n(.*?)\nEND_OF_CONFIGURATION\n", text, re.DOTALL)
    inside = inside or re.search(r'"""\\\n(.*?)"""', text, re.DOTALL)
    assert inside is not None
    config, chosen = files.read_text(inside[1]).config, files.read_text(inside[1]).chosen.keys()
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (16, 2, "bf16")
    assert {"fsdp.state_dict_type", "num_processes", "num_machines"} <= chosen
    assert not {"fsdp.auto_wrap_policy", "use_cpu", "machine_rank", "shardkit.launch.bind_address"} & chosen
    assert (config.main_process_ip, config.main_process_port, config.machine_rank) == (None, None, 0)
    assert (config.shardkit.seed, config.shardkit.checkpoint.resume) == (3, "auto")
    assert config.shardkit.launch.bind_address is None
    assert config.shardkit.launch.max_restarts == (0 if engine in ("kubeflow", "jobset", "skypilot") else 3)


def test_a_jobset_and_a_train_job(capsys):
    words = [
        *IMAGE,
        "--volume",
        "checkpoints:/data",
        "--time",
        "4h",
        "--memory",
        "500GiB",
        "--set",
        "shardkit.launch.max_restarts=3",
    ]
    [jobset] = objects(submit(capsys, "--to", "jobset", *words, "train.py")[0])
    batch = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = pod_of(jobset["spec"])
    assert (batch["parallelism"], batch["completions"], batch["completionMode"]) == (2, 2, "Indexed")
    assert batch["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert batch["podFailurePolicy"]["rules"][1]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert batch["activeDeadlineSeconds"] == 4 * 3600
    [_, of_time] = jobset["spec"]["failurePolicy"]["rules"]
    assert (of_time["action"], of_time["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])
    assert pod["terminationGracePeriodSeconds"] == 150 and pod["restartPolicy"] == "Never"
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "500Gi"}
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "NNODES": "2",
        "MASTER_ADDR": "train-node-0-0.train",
        "MASTER_PORT": "29500",
    }
    assert {"name": "volume-0", "mountPath": "/data"} in container["volumeMounts"]
    runtime, train_job = objects(submit(capsys, "--to", "kubeflow", *words, "train.py")[0])
    assert (runtime["kind"], train_job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "train",
    }
    trainer = train_job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "team/train:1")
    assert train_job["spec"]["activeDeadlineSeconds"] == 4 * 3600
    assert "env" not in pod_of(runtime["spec"]["template"]["spec"])["containers"][0]  # PET_* come from the trainer
    [alone] = objects(
        submit(capsys, "--to", "kubeflow", *IMAGE, "--option", "runtime=torch-distributed", "train.py")[0]
    )
    assert alone["spec"]["runtimeRef"] == {"name": "torch-distributed"}


@pytest.mark.parametrize(
    ("script", "name"),
    [("01_train.py", "job-01-train"), ("__main__.py", "main"), (f"{'my_long_' * 8}.py", ("my-long-" * 5).rstrip("-"))],
)
def test_a_job_is_named_for_its_script_as_kubernetes_takes_it(capsys, script, name):
    [jobset] = objects(submit(capsys, "--to", "jobset", "--image", "team/train:1", script)[0])
    assert jobset["metadata"]["name"] == name


def test_a_clusters_own_runtime_leaves_restarts_to_the_launch(capsys):
    words = [*IMAGE, "--option", "runtime=torch-distributed", "--restarts", "3"]
    [alone] = objects(submit(capsys, "--to", "kubeflow", *words, "train.py")[0])
    assert "max_restarts: 3\n" in alone["spec"]["trainer"]["command"][-1]


def test_a_task_of_skypilot(capsys):
    words = ["--device", "a100-80", "--volume", "s3://bucket/runs:/data", "--option", "use-spot=true"]
    [task] = objects(submit(capsys, "--to", "skypilot", *words, "--option", "setup=pip install x", "train.py")[0])
    assert task["num_nodes"] == 2 and task["setup"] == "pip install x"
    assert task["resources"]["accelerators"] == "A100-80GB:8" and task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75], "max_restarts_on_errors": 0}
    assert task["file_mounts"] == {"/data": {"source": "s3://bucket/runs", "mode": "MOUNT"}}


VARIABLES = ["--env", "HF_HOME=/data/$hf", "--env", "EMPTY="]


def test_environment_variables_reach_the_pods(capsys):
    words = [*IMAGE, *VARIABLES, "--option", "env-secret=tokens"]
    secret, expected = [{"secretRef": {"name": "tokens"}}], {"HF_HOME": "/data/$$hf", "EMPTY": ""}
    submit(capsys, "--to", "jobset", *words, "--check", "-o", "job.yaml", "train.py")
    [jobset] = objects(read())
    [container] = pod_of(jobset["spec"])["containers"]
    assert container["envFrom"] == secret
    assert expected.items() <= {one["name"]: one["value"] for one in container["env"]}.items()
    submit(capsys, "--to", "kubeflow", *words, "--check", "--force", "-o", "job.yaml", "train.py")
    runtime, train_job = objects(read())
    [container] = pod_of(runtime["spec"]["template"]["spec"])["containers"]
    assert container["envFrom"] == secret
    assert {one["name"]: one["value"] for one in train_job["spec"]["trainer"]["env"]} == expected
    [task] = objects(submit(capsys, "--to", "skypilot", "--device", "l4", *VARIABLES, "train.py")[0])
    assert task["envs"] == {"HF_HOME": "/data/$hf", "EMPTY": ""}


def read() -> str:
    return Path("job.yaml").read_text()


def test_the_plans_numbers(capsys):
    """Host memory and time of the run come from the plan where a model is named; what a flag says holds."""
    plan = [
        "--model",
        "gpt:layers=8,hidden=512,heads=8",
        "--device",
        "h100-80",
        "--batch-size",
        "8",
        "--steps",
        "100000",
    ]
    text, notes = submit(capsys, "--to", "slurm", *plan, "train.py")
    assert re.search(r"#SBATCH --mem=6\dG\n", text) and re.search(r"#SBATCH --time=0-\d\d:\d0:00\n", text)
    assert notes == ""
    text, _ = submit(capsys, "--to", "slurm", *plan, "--memory", "1TiB", "--time", "90m", "train.py")
    assert "#SBATCH --mem=1024G\n" in text and "#SBATCH --time=0-01:30:00\n" in text
    large = ["--model", "gpt:layers=96,hidden=12288,heads=96", "--device", "h100-80", "--batch-size", "1"]
    _, notes = submit(capsys, "--to", "slurm", *large, "train.py")
    assert "note: by the plan a rank needs" in notes and "shardkit plan --model" in notes
    assert re.search(r"stop_timeout_s is 120; add --set shardkit.launch.stop_timeout_s=\d+\.", notes)
    _, error = submit(capsys, "--to", "slurm", "--steps", "5", "--seq-len", "8", "train.py", code=2)
    assert "--seq-len, --steps: for the plan, which needs a model (got none); add --model." in error


# nothing is lost in quotes


def words_of_a_shell(text: str, stop: str) -> list[str]:
    """What a shell hands to the program in the script's last command, which `stop` begins."""
    show = f"{shlex.quote(sys.executable)} -c 'import sys; print(repr(sys.argv[1:]))'"
    line = text[text.index(stop) :].removeprefix("exec ")
    line = re.sub(r"^(.*?) launch ", lambda _: f"{show} launch ", line, count=1, flags=re.DOTALL)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True)
    found = eval(done.stdout.splitlines()[0])
    return found[found.index("train.py") :]


def test_arguments_arrive_as_they_were_typed(capsys):
    wanted = ["train.py", *WORDS]
    text, _ = submit(capsys, "--to", "slurm", "train.py", *WORDS)
    assert words_of_a_shell(text.partition("\ncode=$?")[0], "srun ") == wanted
    [jobset] = objects(submit(capsys, "--to", "jobset", *IMAGE, "train.py", *WORDS)[0])
    command = pod_of(jobset["spec"])["containers"][0]["command"][-1]
    assert re.search(r"\$(?!\$)", command.replace("$$", "")) is None  # Kubernetes reads $(NAME), and $$ as $
    assert words_of_a_shell(command.replace("$$", "$"), "exec ") == wanted
    [task] = objects(submit(capsys, "--to", "skypilot", *NEEDED["skypilot"], "train.py", *WORDS)[0])
    assert words_of_a_shell(task["run"], "shardkit launch") == wanted
    text, _ = submit(capsys, "--to", "ray", "train.py", *WORDS)
    assert f'"arguments": {WORDS!r}' in text
    assert not Path("x").exists() and not Path("y").exists()


# what is refused, all of it at once


def test_every_problem_is_said_at_once_and_nothing_is_written(capsys):
    Path("shardkit.yaml").write_text("num_processes: many\nmixd_precision: bf16\nnum_machines: 2\n")
    Path("job.sh").write_text("mine")
    words = ["--time", "soon", "--memory", "big", "--device", "h1", "--option", "=x", "--image", "i", "-o", "job.sh"]
    words += ["--cpus", "0", "--batch-size", "-1", "--seq-len", "x", "--steps", "0"]
    _, error = submit(capsys, "--to", "slurmm", *words, "--submit", "trian.py", code=2)
    assert Path("job.sh").read_text() == "mine"
    for line in (
        "--to: unknown engine (got 'slurmm'); did you mean slurm?",
        "job.sh: exists; replace it with --force",
        "submit: script trian.py does not exist",
        "shardkit.yaml:1:16: num_processes: ",
        "shardkit.yaml:2:1: ",
        "--time: not a duration (got 'soon'); write 4h, 90m, 1d12h or 1-12:00:00.",
        "--memory: not a size (got 'big'); write 500GiB.",
        "--device: unknown (got 'h1');",
        "--option: not KEY=VALUE (got '=x')",
        "--cpus: is not a whole number from 1 to 1,000,000,000 (got '0'); give one.",
        "--batch-size: is not a whole number from 1 to 1,000,000,000 (got '-1'); give one.",
        "--seq-len: is not a whole number from 1 to 1,000,000,000 (got 'x'); give one.",
        "--steps: is not a whole number from 1 to 1,000,000,000 (got '0'); give one.",
        "errors. Nothing was written or submitted.",
    ):
        assert line in error, error


def test_flags_that_an_engine_does_not_take_are_said_whatever_the_file_is(capsys):
    Path("shardkit.yaml").write_text("num_processes: many\n")
    words = ["--hosts", "hosts", "--name", "my job", "--option", "queu=a"]
    _, error = submit(capsys, "--to", "jobset", *words, "train.py", code=2)
    for line in (
        "shardkit.yaml:1:16: num_processes: ",
        "--hosts: is not supported by jobset (only by ssh); remove it.",
        "--name: may only have letters, digits, dots and dashes (got 'my job'); give another name.",
        "--option: jobset has no option with this name (got 'queu'); did you mean queue?",
        "4 errors. Nothing was written or submitted.",
    ):
        assert line in error, error


def test_an_engine_may_be_written_in_capitals(capsys):
    assert submit(capsys, "--to", "SLURM", "train.py") == submit(capsys, "--to", "slurm", "train.py")
    _, error = submit(capsys, "--to", "SLURMM", "train.py", code=2)
    assert "--to: unknown engine (got 'SLURMM'); did you mean slurm?" in error


def test_flags_whose_variables_are_not_set_are_told(capsys):
    """A job had no time limit, or a container without an image."""
    _, error = submit(capsys, "--to", "jobset", "--time=", "--memory=", "--image=", "--resume=", "train.py", code=2)
    assert "--time: not a duration (got '');" in error and "--memory: not a size (got '');" in error
    assert "--resume: has no value (got an empty text, as from a variable that is not set); write one." in error
    assert "--image: a container image with the script and shardkit is missing (got none)" in error


@pytest.mark.parametrize("engine", ["slurm", "kubeflow", "jobset", "skypilot", "ssh"])
def test_the_flags_of_launch_reach_the_job(capsys, engine):
    more = {"kubeflow": ["--image", "a:1"], "jobset": ["--image", "a:1"], "ssh": ["--hosts", "hosts"]}
    more["skypilot"] = ["--device", "h100-80"]
    settings = "--mixed-precision bf16 --restarts 3 --fsdp shard_grad_op --show 0 --resume auto"
    switches = "--no-prefix --measure --as-accelerate --accelerates-meaning scheduler,save"
    text, _ = submit(
        capsys, "--to", engine, *more.get(engine, []), *settings.split(), *switches.split(), "train.py", "--measure"
    )
    words = " ".join(text.replace("\\\n", " ").split())
    assert f"{switches} train.py --measure" in words
    restarts = {"kubeflow": "maxRestarts: 3", "jobset": "maxRestarts: 3", "skypilot": "max_restarts_on_errors: 3"}
    for line in ("mixed_precision: bf16", "fsdp_sharding_strategy: SHARD_GRAD_OP", 'show: "0"'):
        assert line in text
    assert restarts.get(engine, "max_restarts: 3") in text


def test_flags_that_need_another_are_refused_before_a_job_is_made(capsys):
    _, errors = submit(capsys, "--to", "slurm", "--accelerates-meaning", "x", "--fsdp", "y", "train.py", code=2)
    assert "submit: --as-accelerate is missing" in errors and "unknown value (got x)" in errors and "'y'" in errors
    _, errors = submit(capsys, "--to", "ray", "--as-accelerate", "train.py", code=2)
    assert "--as-accelerate: is not supported by ray (only by slurm" in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.py"], "--to: the engine is missing (got none); add --to slurm, or one of kubeflow"),
        (["--to", "slurm"], "submit: no script is given; write: shardkit submit --to ENGINE SCRIPT.py"),
        (
            ["--to", "slurm", *IMAGE, "train.py"],
            "--image: is not supported by slurm (only by kubeflow, jobset, skypilot)",
        ),
        (["--to", "slurm", "--option", "-p=gpu", "train.py"], "not a long option of sbatch without dashes (got 'p')"),
        (
            ["--to", "slurm", "--option", "gres=gpu:a100:4", "train.py"],
            "--option gres: another number of GPUs than a machine has ranks (got gpu:a100:4, and 8 ranks); change it",
        ),
        (
            ["--to", "slurm", "--option", "mem-per-cpu=2G", "--memory", "1TiB", "train.py"],
            "--option mem-per-cpu: says the memory in another way than --memory; remove one of them.",
        ),
        (
            ["--to", "slurm", "--option", "nodes=3", "train.py"],
            "--option nodes: is set by shardkit (from num_machines)",
        ),
        (
            ["--to", "slurm", "--time", "3m", "train.py"],
            "--time: leaves no time to train (got 0-00:03:00): SIGTERM comes 150",
        ),
        (
            ["--to", "slurm", "--resume", "never", "train.py"],
            "--resume: a job resumes from the newest checkpoint, since",
        ),
        (
            ["--to", "slurm", "--resume", "runs/it's/step-00000100", "train.py"],  # each start would begin there again
            "preemption (got runs/it's/step-00000100); leave it out, write `accelerator.resume() or "
            'accelerator.load_state("runs/it\'s/step-00000100")` in the script, and save to a new folder.',
        ),
        (["--to", "slurm", "--name", "a b", "train.py"], "--name: may only have letters, digits, dots and dashes"),
        (["--to", "jobset", "--name", "Train", "train.py"], "--name: may only have lower-case letters"),
        (["--to", "jobset", "train.py"], "--image: a container image with the script and shardkit is missing"),
        (
            ["--to", "jobset", *IMAGE, "--volume", "s3://b:/data", "x.py"],
            "--volume: invalid volume (got 's3://b:/data')",
        ),
        (["--to", "jobset", *IMAGE, "--option", "quue=a", "x.py"], "(got 'quue'); did you mean queue?"),
        (
            ["--to", "jobset", *IMAGE, "--option", "queue", "x.py"],
            "--option queue: has no value (got 'queue'); write queue=V",
        ),
        (["--to", "skypilot", "--option", "instance-type=", "x.py"], "--option instance-type: has no value"),
        (["--to", "jobset", *IMAGE, "--env", "MASTER_PORT=1", "x.py"], "--env MASTER_PORT: is set by the job"),
        (["--to", "jobset", *IMAGE, "--env", "A-B=1", "x.py"], "--env: not NAME=VALUE (got 'A-B')"),
        (["--to", "slurm", "--env", "A=1", "train.py"], "--env: is not supported by slurm (only by kubeflow, jobset,"),
        (["--to", "skypilot", "train.py"], "--device: the GPU type is missing"),
        (
            ["--to", "skypilot", "--device", "l4", "--cpu", "train.py"],
            "the configuration trains on the CPU (got l4); add",
        ),
        (["--to", "skypilot", "--device", "80GiB", "train.py"], "--device: the GPU type is missing (got no name of"),
        (["--to", "skypilot", "--device", "cpu", "train.py"], "--device: the GPU type is missing (got no name of one)"),
        (["--to", "skypilot", "--device", "l4", "/train.py"], "skypilot uploads this folder"),
        (["--to", "skypilot", "--device", "l4", "../train.py"], "a relative path in it (got ../train.py)"),
        (["--to", "ray", "a/../../train.py"], "a relative path in it (got a/../../train.py)"),
        (["--to", "ssh", "train.py"], "--hosts: the hosts are missing (got none); add --hosts FILE"),
        (["--to", "ssh", "--hosts", "none", "train.py"], "--hosts: none: cannot be read (No such file or directory)"),
        (
            ["--to", "ray", "--submit", "train.py"],
            "ray uploads the folder, and the job must be a file in it; add --output",
        ),
        (["--to", "ray", "--option", "min-workers=99", "train.py"], "--option min-workers: not a number from 1 to 16"),
        (
            ["--to", "slurm", "--set", "shardkit.launch.min_machines=1", "train.py"],
            "shardkit.launch.min_machines: the engines' jobs have a fixed number of machines",
        ),
    ],
)
def test_what_an_engine_cannot_take_is_refused_in_words(capsys, words, says):
    _, error = submit(capsys, *words, code=2)
    assert any(part in error for part in says.split("|")), error


def test_the_number_of_ranks_is_not_guessed_from_this_machine(capsys):
    Path("shardkit.yaml").write_text("mixed_precision: bf16\n")
    _, error = submit(capsys, "--to", "slurm", "train.py", code=2)
    assert "num_processes: the total number of ranks is missing (" in error and "set it there, or add -n N." in error
    text, _ = submit(capsys, "--to", "slurm", "-n", "8", "train.py")
    assert "#SBATCH --nodes=1\n" in text and "#SBATCH --gpus-per-node=8\n" in text


def test_a_file_of_hosts_is_checked_line_by_line():
    Path("hosts").write_text("a slots=4\nb slots=8 \na\n-o x\nc cores=2\n")
    with pytest.raises(UsageError) as caught:
        reading.hosts(Path("hosts"), 8)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        "hosts:1",
        "hosts:3",
        "hosts:4",
        "hosts:4",
        "hosts:5",
    ]


def test_a_host_is_what_ssh_takes_as_one():
    Path("hosts").write_text("me@node-a\nfd00::1\nme@fe80::1%eth0\n")
    assert reading.hosts(Path("hosts"), 8) == ("me@node-a", "fd00::1", "me@fe80::1%eth0")
    Path("hosts").write_text("node-a:2222\n[fd00::1]\n")
    says = r"hosts:1: not a host name \(got 'node-a:2222'\).* --ssh 'ssh -tt -p 2222'\.\nhosts:2: .*'\[fd00::1\]'"
    with pytest.raises(UsageError, match=says):
        reading.hosts(Path("hosts"), 8)


@pytest.mark.parametrize(("text", "seconds"), [("4h", 14400), ("1d12h", 129600), ("90m", 5400), ("1-00:00:30", 86430)])
def test_times(text, seconds):
    assert reading.seconds(text) == seconds
    for wrong in ("4", "4 h", "0m", "00:30", "h", ""):
        with pytest.raises(UsageError, match="--time: not a duration"):
            reading.seconds(wrong)


# written, checked, handed over


def test_a_file_is_replaced_only_by_force(capsys):
    out, _ = submit(capsys, "--to", "slurm", "-o", "job.sh", "train.py")
    assert out == "job.sh\n" and Path("job.sh").read_text().startswith("#!/bin/bash\n")
    _, error = submit(capsys, "--to", "slurm", "-o", "job.sh", "train.py", code=2)
    assert "job.sh: exists; replace it with --force" in error
    submit(capsys, "--to", "slurm", "-o", "job.sh", "--force", "--name", "other", "train.py")
    assert "--job-name=other" in Path("job.sh").read_text() and Path("job.sh.bak").exists()


@pytest.mark.parametrize("engine", ["kubeflow", "jobset", "skypilot", "ray", "ssh"])
def test_what_is_written_is_valid(capsys, engine):
    more = ["--option", "namespace=team", "--option", "queue=gpus"] if engine in ("kubeflow", "jobset") else []
    _, said = submit(capsys, "--to", engine, *NEEDED[engine], *more, "--check", "train.py", *WORDS)
    assert said.startswith("valid: checked by ")


def test_an_object_with_a_mistake_is_refused_by_its_schema(capsys):
    text, _ = submit(capsys, "--to", "kubeflow", *IMAGE, "train.py")
    for right, wrong, says in (
        (
            "numNodes: 2\n    numProc",
            "numNodes: two\n    numProc",
            "TrainJob: spec.trainer.numNodes: 'two' is not of type",
        ),
        ("restartPolicy: Never", "restartPolicy: OnFailure", "'Never' was expected"),
        ("completionMode", "completionmode", "('completionmode' was unexpected)"),
        ("kind: TrainingRuntime\n    name", "kind: Runtime\n    name", "TrainJob: spec.runtimeRef.kind: 'Runtime'"),
    ):
        assert right in text
        assert says in "\n".join(sending.schema_problems(text.replace(right, wrong)))


@pytest.mark.parametrize("engine", ["slurm", "kubeflow", "jobset", "skypilot", "ray", "ssh"])
def test_without_its_program_nothing_is_submitted(capsys, engine, monkeypatch):
    monkeypatch.setenv("PATH", str(Path("nothing")))
    _, error = submit(capsys, "--to", engine, *NEEDED[engine], "--submit", "-o", "job", "train.py", code=4)
    assert f"the program {ENGINES[engine].submit[0]} is not installed here" in error


def test_the_engines_program_gets_the_job_and_its_code_is_ours(capsys, monkeypatch, tmp_path):
    for name in ("sbatch", "sky"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/{name}.words\ncat ${{4:-/dev/stdin}} > {tmp_path}/{name}.file\nexit 3\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for engine, name, words in (("slurm", "sbatch", ""), ("skypilot", "sky", "jobs launch --yes /")):
        text, _ = submit(capsys, "--to", engine, *NEEDED[engine], "train.py")
        _, error = submit(capsys, "--to", engine, *NEEDED[engine], "--submit", "train.py", code=3)
        assert f"submit: {name} failed (got exit code 3)" in error
        assert (tmp_path / f"{name}.words").read_text().startswith(words)
        assert (tmp_path / f"{name}.file").read_text() == text


def test_the_time_to_save_that_is_advised_is_more_than_the_one_that_is_too_short(monkeypatch):
    def note_at(bytes_per_s: float) -> str:
        monkeypatch.setattr(sizing, "SAVE_BYTES_PER_S", bytes_per_s)
        config = files.overlaid(Config(), {"num_processes": 8})
        return sizing.sized(config, "gpt-175b", sizing.Load(devices.find("h100-80"), 1, None, None)).notes[-1]

    found = re.search(r"about (\d+) s", note_at(1))
    assert found is not None
    assert note_at(int(found[1]) * sizing.MARGIN / 120.5).endswith(
        "stop_timeout_s is 120; add --set shardkit.launch.stop_timeout_s=150."
    )


def test_host_memory_that_is_asked_for_is_not_a_lack_of_the_devices():
    """More than an H100's machine usually has, by the plan; the job asks for it."""
    config = files.overlaid(Config(), {"num_processes": 8, "fsdp_config.fsdp_offload_params": True})
    found = sizing.sized(config, "gpt-175b", sizing.Load(devices.find("h100-80"), None, None, None))
    assert found.memory_bytes > 8 * 256 * 10**9
    assert not any("more than H100 80 GB has" in note for note in found.notes)


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [
        ("a100", "A100-80GB"),  # as the plan takes it
        ("A100-SXM4-80GB", "A100-80GB"),
        ("a100-40", "A100"),
        ("NVIDIA A100 PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("RTX 4090", "RTX4090"),
        ("6000-ada-48", "RTX6000-Ada"),
    ],
)
def test_the_gpu_of_a_task_is_the_one_that_is_planned_for(capsys, device, accelerator):
    text, _ = submit(capsys, "--to", "skypilot", "--device", device, "train.py")
    assert objects(text)[0]["resources"]["accelerators"] == f"{accelerator}:8"


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("h100-80", "accelerator_type='H100')"),
        ("a100-pcie", "accelerator_type='A100')"),
        ("mi300x-192", "accelerator_type='AMD-Instinct-MI300X-OAM')"),
        ("4090-24", "resources_per_worker={'CPU': 8, 'GPU': 1})"),  # Ray has no one name for it
    ],
)
def test_ray_is_asked_for_the_gpu_by_its_own_name(capsys, device, kind):
    text, _ = submit(capsys, "--to", "ray", "--device", device, "train.py")
    assert f"{kind},\n" in text


# ssh for real, with a stand-in that runs every host's line here


@pytest.fixture
def ssh(tmp_path) -> str:
    """A program that does what ssh does with HOST and LINE, on this machine, in another folder."""
    program = tmp_path / "ssh here"
    program.write_text(
        '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\necho "$1" >> "$0.hosts"\n'
        'cd / && exec setsid --wait env --default-signal=TERM,HUP,INT "${LOGIN_SHELL:-bash}" -c "$2"\n'
    )
    program.chmod(0o755)
    return shlex.join([str(program), "-o"])


def start(ssh: str, *words: str) -> "subprocess.Popen[str]":
    Path("shardkit.yaml").write_text(CPU)
    Path("hosts").write_text("127.0.0.1\nme@127.0.0.2\n")
    assert run(["submit", "--to", "ssh", "--hosts", "hosts", "--ssh", ssh, "-o", "job.sh", *words]) == 0
    return subprocess.Popen(
        ["bash", "job.sh"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_ssh_starts_a_launch_on_each_host_and_passes_a_signal_on(ssh, tmp_path):
    running = start(ssh, "--name", "t", script("steps"))
    until = time.monotonic() + 100
    while not any("step 2" in path.read_text() for path in Path("runs").glob("t-*/rank3.log")):
        assert time.monotonic() < until and running.poll() is None, running.communicate()[0]
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGTERM)  # to all that it started too, as `timeout` and a closed terminal do
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 75, said
    assert "saving" in said and (tmp_path / "ssh here.hosts").read_text().split()[:2] in (
        ["127.0.0.1", "me@127.0.0.2"],
        ["me@127.0.0.2", "127.0.0.1"],
    )


def test_an_ipv6_host_is_an_address_with_its_port(ssh):
    Path("shardkit.yaml").write_text(CPU)
    Path("hosts").write_text("me@::1\nnode-b\n")
    flags = ["--hosts", "hosts", "--ssh", ssh, "--program", "echo"]
    assert run(["submit", "--to", "ssh", *flags, "-o", "job.sh", "train.py"]) == 0
    done = subprocess.run(["bash", "job.sh"], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r" --main \[::1\]:2\d{4} ", done.stdout), done.stdout


def test_a_wish_to_stop_is_passed_on(tmp_path):
    Path("waits.sh").write_text("trap 'echo told; exit 75' TERM\necho ready\nwhile :; do sleep 0.05; done\n")
    code = "import sys; from shardkit.submit.sending import _code_of; sys.exit(_code_of(['bash', 'waits.sh']))"
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=60)[0] == "told\n" and running.returncode == 75


def test_a_signal_before_the_program_has_begun_ends_it_too(tmp_path):
    Path("waits.sh").write_text("while :; do sleep 0.05; done\n")
    code = (
        "import os, subprocess, sys; from shardkit.submit import sending\n"
        "class Told(subprocess.Popen):\n"
        "    def __init__(self, *args, **options):\n"
        "        super().__init__(*args, **options)\n"
        "        os.kill(os.getpid(), 15)\n"
        "subprocess.Popen = Told\n"
        "sys.exit(sending._code_of(['bash', 'waits.sh']))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    running.communicate(timeout=60)  # until the program, too, has closed its output
    assert running.returncode == -signal.SIGTERM & 0xFF


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    Path("waits.sh").write_text("trap 'echo told; exit 75' TERM\necho ready\nwhile :; do sleep 0.05; done\n")
    code = "import sys; from shardkit.submit.sending import _code_of; sys.exit(_code_of(['bash', 'waits.sh']))"
    words = ["nohup", sys.executable, "-c", code]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=60)[0] == "told\n" and running.returncode == 75


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh"])
def test_a_host_that_fails_ends_the_job_of_all_with_its_code(ssh, shell, tmp_path, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    monkeypatch.setenv("LOGIN_SHELL", shell)
    (tmp_path / "it's a folder").mkdir()
    monkeypatch.chdir(tmp_path / "it's a folder")
    Path("fails.py").write_text(
        "import os, sys, time\nprint(sys.argv[1:])\nsys.exit(7) if os.environ['RANK'] == '3' else time.sleep(600)\n"
    )
    running = start(ssh, "fails.py", *WORDS)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 7, said
    assert repr(WORDS) in said
    assert not Path("x").exists() and not Path("y").exists()


def test_the_time_to_save_is_the_configurations():
    config = files.read_text(CONFIGURATION + "shardkit: {launch: {stop_timeout_s: 300}}\n").config
    assert jobs.Job("a", ("train.py",), False, config, Path("/")).grace_s == 330

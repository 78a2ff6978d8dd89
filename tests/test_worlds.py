"""What schedulers, srun and mpirun say by environment: no task trains alone without a word.

The variables are those that MPICH's and Open MPI's launchers set when asked, and that the manuals of the others name.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

from shardkit import env
from shardkit.config import scheduler as schedulers
from shardkit.config import tasks
from shardkit.config.schema import Config
from shardkit.config.tasks import launch_problem, world_of
from shardkit.distributed.rank_store import _gloo_variables, choose_interface
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses, connectivity, preflight, stores
from tests.launches import free_port, script

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": text
    for name, text in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "1212", strict=True)
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PODS = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PYTORCH_JOB = {**PODS, "RANK": "1", "WORLD_SIZE": "2"}
TRAIN_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
ELASTIC_PYTORCH_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "1:3",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
}
ONE_A_MACHINE = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}
DAEMON = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu02", "SLURM_NODEID": "0"} | {
    "SLURM_JOB_NODELIST": "gpu[01-02]"
}
"""Of mpirun's daemon, which srun starts on all machines but the first."""
VERTEX = {
    "CLOUD_ML_JOB_ID": "17",
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {
                "workerpool0": ["job-workerpool0-0:2222"],
                "workerpool1": ["job-workerpool1-0:2222", "job-workerpool1-1:2222"],
                "workerpool2": ["reducer:2222"],
            },
            "task": {"type": "workerpool1", "index": 1},
        }
    ),
}
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "a1f-2b#1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}
AWS_BATCH_MAIN = {**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}
LWS = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "2",
    "LWS_LEADER_ADDRESS": "train-0.train.default",
}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
}


# a process that no launcher of ranks has started


def test_a_task_of_srun_knows_its_place():
    assert world_of(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "27110",
    }
    named = world_of({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"})
    assert named is not None and (named["MASTER_ADDR"], named["MASTER_PORT"]) == ("10.0.0.9", "1234")
    four_each = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8"}
    assert (world_of(four_each) or {})["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, {**MPICH, **SRUN, "SLURM_STEP_NUM_TASKS": "1"}])
def test_a_task_of_mpirun_knows_its_place(variables):
    found = world_of(variables)
    assert found is not None
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "1", "2"]
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert found == world_of(variables)  # the port is the same for all tasks of one mpirun


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", **SRUN},  # said to be alone
        {"WORLD_SIZE": "1"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a job's script, outside of srun
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
        {**SKY, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"},
        {**SAGEMAKER, "SM_HOSTS": '["algo-2"]', "SM_NUM_GPUS": "0"},
        {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},  # a group for each run
        {"AWS_BATCH_JOB_ID": "a1f-2b", "AWS_BATCH_JOB_ARRAY_INDEX": "1"},
        {"LOCAL_RANK": "-1"},  # Accelerate's and the Trainer's word for none
        {"LOCAL_RANK": "0", "NODE_RANK": "0"},
        {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"},  # an array of runs of their own
    ],
)
def test_who_is_alone_is_left_alone(variables):
    assert world_of(variables) is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "8"}, r"RANK must be a number below WORLD_SIZE \(got RANK=None, WORLD_SIZE='8'\)"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, r"got RANK='8', WORLD_SIZE='8'"),
        ({"RANK": "a", "WORLD_SIZE": "8"}, r"got RANK='a'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "9"}, "srun started this process as one of several"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "its variables are incomplete"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, r"does not provide the machine of rank 0 \(got 4 ranks"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID=None"),
        (TRAIN_JOB, "Kubernetes reports a job of 2 machines with 8 ranks each; start it with `shardkit launch`"),
        (SKY, "SkyPilot reports a job of 2 machines with 4 ranks each"),
        (SAGEMAKER, "SageMaker reports a job of 2 machines with 8 ranks each"),
        (AWS_BATCH, "AWS Batch reports a job of 3 machines"),
        (LWS, "LeaderWorkerSet reports a job of 4 machines"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "with SM_CURRENT_HOST among them"),
        ({**PYTORCH_JOB, "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}, "this pod should have 8 ranks"),
        ({**PODS, "JOB_COMPLETION_INDEX": "0"}, "NNODES: how many pods has the job?"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK says that this process is one of several"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, "NODE_RANK says that this process is one of several"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, "PMIX_RANK says that this process is one of several"),
        (FLUX, "flux run started this process as one of several"),
        ({**TRAIN_JOB, "PET_NNODES": "4:x"}, r"PET_NNODES: is not a number of machines, nor MIN:MAX \(got '4:x'\)"),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, "Kubernetes reports a job of 4 machines with 8 ranks each; start it with"),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_refused(variables, says):
    with pytest.raises(ConfigError, match=says):
        world_of(variables)


def test_without_a_local_rank_pods_are_counted(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert env.ranks() == env.Ranks(1, 1, 2, 2)  # by hand, on one machine
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert env.ranks() == env.Ranks(1, 1, 2, 2)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert env.ranks() == env.Ranks(1, 0, 2, 1, one_a_machine=True)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # a PyTorchJob's first pod calls itself localhost
    assert env.ranks() == env.Ranks(1, 0, 2, 1, one_a_machine=True)


def outputs_of(*environments: dict[str, str]) -> list[tuple[int, str]]:
    """together.py, once for each environment and all at once: exit codes and screens."""
    found = {name: text for name, text in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    started = [
        subprocess.Popen(
            [sys.executable, script("together")],
            env={**found, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in environments
    ]
    return [(process.wait(timeout=120), process.communicate()[0]) for process in started]


@pytest.mark.slow
def test_tasks_make_their_world_or_refuse():
    """Two tasks as srun starts them on one machine, and a pod of a TrainJob, with no launcher between."""
    step = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    places = [{**step, "SLURM_NODEID": "0", "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    *both, (code, refused) = outputs_of(*places, TRAIN_JOB)
    for rank, (ended, said) in enumerate(both):
        assert ended == 0 and f"rank {rank} of 2, sum 3" in said, said
    assert code != 0 and "ConfigError: launch: this is a single process, but Kubernetes reports" in refused, refused


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("mpiexec") or shutil.which("mpirun")), reason="there is no mpiexec here")
def test_mpirun_itself():
    mpiexec = shutil.which("mpiexec") or shutil.which("mpirun")
    command = [str(mpiexec), "-n", "2", sys.executable, script("together")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2, sum 3" in done.stdout and "rank 1 of 2, sum 3" in done.stdout


# a launch on each machine


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (SRUN, ("SLURM", 2, 1, "gpu03", "4711", 24711, None)),
        (SKY, ("SkyPilot", 2, 1, "10.0.0.1", None, None, 4)),
        (TRAIN_JOB, ("Kubernetes", 2, 1, "job-node-0-0.job", None, 29400, 8)),
        (SAGEMAKER, ("SageMaker", 2, 1, "algo-1", None, None, 8)),
        (PYTORCH_JOB, ("Kubernetes", 2, 1, "job-master-0", None, 23456, None)),
        ({**PODS, "NNODES": "4", "JOB_COMPLETION_INDEX": "3"}, ("Kubernetes", 4, 3, "job-master-0", None, 23456, None)),
        (ELASTIC_PYTORCH_JOB, ("Kubernetes", 3, None, "job-worker-0", None, 23456, None, 1)),
        ({**ELASTIC_PYTORCH_JOB, "PET_RDZV_BACKEND": "etcd"}, ("Kubernetes", 3, None, None, None, None, None, 1)),
        (ONE_A_MACHINE, ("mpirun (Open MPI)", 2, 1, None, None, None, None)),
        ({**ONE_A_MACHINE, **MASTER}, ("mpirun (Open MPI)", 2, 1, "10.0.0.9", None, 1234, None)),
        ({**ONE_A_MACHINE, **DAEMON}, ("mpirun (Open MPI)", 2, 1, "gpu01", "4711", 24711, None)),
        ({**ONE_A_MACHINE, **SRUN}, ("mpirun (Open MPI)", 2, 1, "gpu03", "4711", 24711, None)),
        (VERTEX, ("Vertex AI", 3, 2, "job-workerpool0-0", "17", 2222, None)),
        (AWS_BATCH, ("AWS Batch", 3, 2, "10.0.0.7", "a1f-2b", 20012, None)),
        (AWS_BATCH_MAIN, ("AWS Batch", 3, 0, socket.gethostname(), "a1f-2b", 20012, None)),
        (LWS, ("LeaderWorkerSet", 4, 2, "train-0.train.default", None, None, None)),
    ],
)
def test_what_a_launch_takes_from_the_scheduler(variables, says):
    assert schedulers.scheduler(variables) == schedulers.Scheduler(*says)


@pytest.mark.parametrize(
    ("job", "file", "name"), [("LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSF"), ("PBS_JOBID", "PBS_NODEFILE", "PBS")]
)
def test_hosts_that_are_listed_in_a_file(tmp_path: Path, job, file, name):
    here = socket.gethostname()
    (tmp_path / "hosts").write_text(f"first\nfirst\n{here}\n{here}\n")
    found = schedulers.scheduler({job: "17.server", file: str(tmp_path / "hosts")})
    assert found == schedulers.Scheduler(name, 2, 1, "first", "17.server", 20017)


@pytest.mark.parametrize(
    ("job", "file", "name"), [("LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSF"), ("PBS_JOBID", "PBS_NODEFILE", "PBS")]
)
def test_a_process_on_a_later_host_is_no_script_of_the_job(tmp_path: Path, job, file, name):
    """blaunch and pbsdsh say nothing of ranks; the job's own script runs on the first host, and may be alone."""
    variables = {job: "17", file: str(tmp_path / "hosts")}
    (tmp_path / "hosts").write_text(f"first\n{socket.gethostname()}\n")
    with pytest.raises(ConfigError, match=f"{name} reports a job of 2 machines"):
        world_of(variables)
    (tmp_path / "hosts").write_text(f"{socket.gethostname()}\nsecond\n")
    assert world_of(variables) is None
    assert tasks.left_alone(variables) == (
        f"the {name} job has 2 machines, and this is one process; start shardkit launch on each."
    )


def test_a_port_of_the_job():
    task = {**SKY, "SKYPILOT_TASK_ID": "sky-managed-2026-01-01_train_17-0"}
    found = schedulers.scheduler(task)
    assert found is not None and found.main_port == schedulers.port_of(task["SKYPILOT_TASK_ID"])
    assert "the hosts of the job (PBS_JOBID) are not listed here" in str(tasks.left_alone({"PBS_JOBID": "1"}))
    lsf = schedulers.scheduler({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "first 2 second 4"})
    assert lsf is not None and (lsf.machines, lsf.main_address) == (2, "first")
    assert tasks.left_alone({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}) == (
        "PET_NPROC_PER_NODE is auto, and this is one process; shardkit launch starts one for each device."
    )


def test_one_launch_a_machine():
    assert "srun starts 3 tasks on this machine" in str(launch_problem(SRUN))
    assert "mpiexec starts 2 tasks on this machine" in str(launch_problem(MPICH))
    for variables in ({}, SKY, TRAIN_JOB, {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}):
        assert launch_problem(variables) is None
    job = schedulers.scheduler(SRUN)
    assert "num_machines is 1; each machine on which this is started trains separately" in str(
        preflight.job_warning(Config(), job, SRUN)
    )
    assert preflight.job_warning(Config(num_machines=2, num_processes=2), job, SRUN) is None


@pytest.mark.parametrize(
    ("machines", "changed", "says"),
    [
        (1, {}, "the SLURM job has 2 machines, but num_machines is 1; each machine on which this is started trains"),
        (4, {}, "has 2 machines, but num_machines is 4; add --num-machines 2 for one run on all of them."),
        (2, {}, None),
        (2, {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "2"}, None),  # each machine has a step of its own
        (
            2,
            {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "1"},
            "has 1 machine, but num_machines is 2; start the others as well, or add --num-machines 1 for a run on this",
        ),
        (2, {"SLURM_STEP_ID": None}, "srun did not start this launch: it waits for those on the others; start one on"),
    ],
)
def test_a_launch_that_is_not_on_all_machines_of_its_slurm_job_is_told(machines, changed, says):
    variables = {name: value for name, value in (SRUN | changed).items() if value is not None}
    job, config = schedulers.scheduler(variables), Config(num_machines=machines, num_processes=4)
    warning = preflight.job_warning(config, job, variables)
    assert warning is None if says is None else says in str(warning)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", **MASTER},
            "WORLD_SIZE=2 and RANK=1 say that this is one of 2 processes, and num_machines is 1: each that starts this "
            "trains separately; where each is a machine of one run, add --num-machines 2 --machine-rank 1 --main "
            "10.0.0.9:1234, else unset these variables.",
        ),
        ({"NNODES": "2", "NODE_RANK": "0"}, "--num-machines 2 --machine-rank 0 --main HOST:PORT"),
        (
            {"PBS_JOBID": "1", "PBS_NODEFILE": "/var/spool/pbs/aux/1"},
            "the hosts of the job (PBS_JOBID) are not listed here (got PBS_NODEFILE='/var/spool/pbs/aux/1'); if it has "
            "several, each on which this is started trains separately: copy that file to a folder that all share, and "
            "set PBS_NODEFILE to the copy, ",
        ),
    ],
)
def test_a_launch_on_one_machine_where_variables_tell_of_others_is_told(variables, says):
    assert says in str(preflight.job_warning(Config(), None, variables))
    assert preflight.job_warning(Config(num_machines=2, num_processes=2), None, variables) is None
    in_a_rank = {**variables, "TORCHELASTIC_RUN_ID": "shardkit-0"}
    assert preflight.job_warning(Config(), None, in_a_rank) is preflight.job_warning(Config(), None, {}) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cluster": 1, "task": 2}', '{"cluster": {}, "task": {}}', "9" * 9999]
)
def test_a_cluster_of_another_program_is_not_that_of_vertex(text):
    assert schedulers.scheduler({"CLUSTER_SPEC": text}) is None
    reducer = VERTEX["CLUSTER_SPEC"].replace('"type": "workerpool1"', '"type": "workerpool2"')
    assert schedulers.scheduler({"CLUSTER_SPEC": reducer}) is None


def test_a_machine_that_its_job_does_not_name_is_not_machine_0():
    two = Config(num_machines=2, num_processes=2, main_process_ip="no-such-name.invalid")
    job = schedulers.Scheduler("PBS", 2, None, "no-such-name.invalid")
    (found,) = preflight.number_problems(two, job)
    assert found.text == (
        "launch: machine_rank is missing: the PBS job has 2 machines, from no-such-name.invalid on, and nothing says "
        f"which one this is (got the host name {socket.gethostname()}); start it with the scheduler's own program on "
        "each machine, or give each its number with --machine-rank N, from 0 on."
    )
    assert preflight.number_problems(Config(**{**two.model_dump(), "main_process_ip": "127.0.0.1"}), job) == []


def test_a_launch_that_a_rank_starts_is_told():
    rank = {"TORCHELASTIC_RUN_ID": "shardkit-0", "RANK": "3", "LOCAL_WORLD_SIZE": "2"}
    assert str(preflight.rank_warning(rank)).startswith(
        "warning: rank 3 of another launch starts this one; if all its 2"
    )
    assert preflight.rank_warning({**rank, "LOCAL_WORLD_SIZE": "1"}) is preflight.rank_warning({}) is None


def test_a_name_that_means_loopback_only_here_is_not_listened_on(monkeypatch):
    said: list[str] = []
    assert stores.listening_address("localhost", None, said.append) == "127.0.0.1"
    monkeypatch.setattr(addresses, "resolve", lambda host: "127.0.1.1")  # as Debian's /etc/hosts has it
    assert stores.listening_address("gpu03", None, said.append) == "0.0.0.0"
    assert "gpu03 resolves to 127.0.1.1, which other machines cannot reach (see /etc/hosts)" in said[0]
    assert stores.listening_address("gpu03", "127.0.1.1", said.append) == "127.0.1.1"
    assert addresses.gloo_variables("gpu03") == {}


@pytest.mark.parametrize(("host", "is_what"), [("10.9.9.9", "is not"), ("gpu03", "is 10.9.9.9, which is not")])
def test_a_machine_0_without_the_address_of_main_is_asked_for_its_number(monkeypatch, host, is_what):
    said: list[str] = []
    monkeypatch.setattr(addresses, "resolve", lambda host: "10.9.9.9")
    monkeypatch.setattr(addresses, "is_here", lambda address: False)
    assert stores.listening_address(host, None, said.append) == "0.0.0.0"
    assert said == [
        f"warning: --main {host} {is_what} an address of this machine; listening on all interfaces (to select one: "
        "shardkit.launch.bind_address). If this is not machine 0, give it its own number with --machine-rank."
    ]


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_to_listen_on_that_is_not_here_is_refused(address):
    says = rf"launch: shardkit.launch.bind_address is not an address of this machine \(got {address}\); give one"
    with pytest.raises(MachineError, match=says):
        stores.listening_address("localhost", address, lambda text: None)
    assert stores.listening_address("localhost", "0.0.0.0", lambda text: None) == "0.0.0.0"


def test_a_machine_whose_own_name_means_loopback_takes_part_by_the_way_to_the_others(monkeypatch):
    monkeypatch.setattr(addresses, "resolve", {"gpu03": "127.0.1.1", "10.0.0.2": "10.0.0.2"}.get)
    with connectivity.open_to_others("gpu03") as endpoint:
        assert endpoint is not None and endpoint[0] == "gpu03"  # the others know its address
        assert addresses.answers("127.0.0.1", endpoint[1], 1) is addresses.answers("127.0.0.2", endpoint[1], 1) is None
    monkeypatch.setattr(addresses, "towards", {"10.0.0.2": "10.0.0.1"}.get)
    monkeypatch.setattr(addresses, "interface_of", {"10.0.0.1": "eth7"}.get)
    assert addresses.gloo_variables("gpu03", "10.0.0.2") == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_the_interface_of_an_ipv6_address_is_known(monkeypatch, tmp_path):
    rows = tmp_path / "if_inet6"
    rows.write_text("00000000000000000000000000000001 01 80 10 80       lo\n")
    monkeypatch.setattr(addresses, "IPV6_ADDRESSES", rows)
    assert addresses.interface_of("::1") == "lo"
    assert addresses.interface_of("fd00::1") is None


def test_a_script_of_a_job_that_starts_one_process_is_told():
    assert "the SLURM job has 4 tasks" in str(tasks.left_alone({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}))
    assert tasks.left_alone({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) is None
    assert tasks.left_alone(SRUN) is None


def test_starters_are_told_apart():
    assert len({(one.rank, one.local_rank) for one in tasks.STARTERS}) == len(tasks.STARTERS)


def test_a_rank_whose_machine_takes_its_own_name_for_loopback_learns_its_interface_from_others(monkeypatch):
    store = HashStore()

    def variables(rank: int, names: dict[str, str], routes: dict[str, str]) -> dict[str, str]:
        monkeypatch.setattr(addresses, "resolve", lambda host: names.get(host, host))
        monkeypatch.setattr(addresses, "towards", routes.get)
        monkeypatch.setattr(addresses, "interface_of", {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}.get)
        return _gloo_variables("gpu03", rank, 3, store)

    store.set("1", "127.0.0.1")  # a rank beside rank 0
    assert variables(2, {"gpu03": "10.0.0.1"}, {"10.0.0.1": "10.0.0.2"}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    here = {"127.0.1.1": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
    assert variables(0, {"gpu03": "127.0.1.1"}, here) == {"GLOO_SOCKET_IFNAME": "eth0"}
    store.set("2", "127.0.0.1")
    assert variables(0, {"gpu03": "127.0.1.1"}, here) == {}  # all on this machine


def test_a_rank_with_an_interface_of_its_own_choice_tells_the_others_its_address_all_the_same(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(addresses, "towards", lambda address: "10.0.0.2")
    monkeypatch.setattr(addresses, "interface_of", lambda address: "eth1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    choose_interface("10.0.0.1", 1, 2, store)
    assert (env.get("GLOO_SOCKET_IFNAME"), store.get("addresses/1")) == ("ib0", b"10.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    choose_interface("10.0.0.1", 1, 2, store)
    assert env.get("GLOO_SOCKET_IFNAME") == "eth1"

"""Checkpoints in S3, as moto's server plays it. `make test-storage` has the packages; `make test` leaves these out."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file

from shardkit import env
from shardkit.checkpoint.files import folder, manifest, verify
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import in_store, retention
from shardkit.cli import main
from shardkit.errors import CheckpointSaveError
from shardkit.storage import objects, upload
from shardkit.storage.url import place_of
from tests import checkpoints, forked, test_storage
from tests.training import parts, plain

pytest.importorskip("s3fs", reason="needs s3fs; make test-storage installs it")
moto = pytest.importorskip("moto.server", reason="needs moto[server]; make test-storage installs it")

pytestmark = [pytest.mark.storage, pytest.mark.filterwarnings("default")]

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
KEYS |= {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
SCRIPT = Path(__file__).parent / "accelerator_script.py"
WIDTH = 150_000  # of an embedding of 25 rows: 14 MiB in fp32, three parts of 5 MiB


@pytest.fixture(scope="module")
def server():
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def endpoint(server, monkeypatch):
    """A server with an empty bucket, which this process uses."""
    urlopen(Request(f"{server}/moto-api/reset", method="POST"), timeout=60).read()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    objects.is_exclusive.cache_clear()
    forget()
    import s3fs

    s3fs.S3FileSystem(use_listings_cache=False).mkdir("bucket")
    return server


def forget():
    """What fsspec keeps of stores: they have taken the endpoint from the environment."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


ROOT = "s3://bucket/run/checkpoints"


def use(endpoint, function, *args):
    """On a rank: the function, with this server."""
    os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
    return function(*args)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_save_load_and_go_on_to_the_bit(endpoint, strategy):
    outcomes = forked.run(2, use, endpoint, save_and_go_on, strategy)
    assert [outcome.error for outcome in outcomes] == [None, None]
    digest = outcomes[0].value
    alone = checkpoints.build("plain", seed=1)
    checkpoints.load_newest(alone, ROOT)
    assert checkpoints.digest_of(alone) == digest
    assert [found.step for found in folder.steps(place_of(ROOT))] == [3, 2]


def save_and_go_on(strategy):
    live = checkpoints.build(strategy)
    checkpoints.train(live, 2)
    for step in (1, 2, 3):
        checkpoints.save(live, f"{ROOT}/step-{step:08d}", step, in_series=True, keep_last=2)
    digest, losses = checkpoints.digest_of(live), checkpoints.train(live, 2, first=2)
    again = checkpoints.build(strategy, seed=1)
    loaded = checkpoints.load_newest(again, ROOT)
    assert loaded.checkpoint.manifest.step == 3 and checkpoints.digest_of(again) == digest
    assert checkpoints.train(again, 2, first=2) == losses, "dropout too"
    return digest


def test_killed_in_the_middle_of_an_upload(endpoint):
    outcomes = forked.run(2, use, endpoint, save_large, "part:1:kill")
    assert outcomes[1].exit_code == -signal.SIGKILL and "part.1" in outcomes[1].marks
    assert "failed: write: a rank died or did not answer" in outcomes[0].value
    root = place_of(ROOT)
    assert [found.step for found in folder.steps(root)] == [1]
    assert verify.damages(locate.checkpoint(root)) == []
    left = [name for name in objects.names(root) if name.startswith(".tmp-step-00000002")]
    assert left, "rank 0 does not know what a lost rank still writes"
    with retention_of_the_dead():
        assert len(retention.clean_debris(root)) == 1
    assert objects.names(root / "step-00000002") == []


@contextmanager
def retention_of_the_dead():
    found, in_store.DEAD_AFTER_S = in_store.DEAD_AFTER_S, -1.0
    try:
        yield
    finally:
        in_store.DEAD_AFTER_S = found


def save_large(fault):
    upload.PART_BYTES = 5 << 20
    live = checkpoints.build("fsdp", width=WIDTH)
    checkpoints.save(live, f"{ROOT}/step-00000001", 1, in_series=True)
    forked.arm(fault)
    try:
        checkpoints.save(live, f"{ROOT}/step-00000002", 2, in_series=True, timeout_s=5.0)
    except CheckpointSaveError as error:
        return str(error)
    return "saved"


def test_a_large_file_goes_in_parts_and_comes_back(endpoint, monkeypatch):
    monkeypatch.setattr(upload, "PART_BYTES", 5 << 20)
    live = checkpoints.build("plain", width=WIDTH)
    checkpoints.save(live, f"{ROOT}/step-00000001", 1)
    again = checkpoints.build("plain", seed=1, width=WIDTH)
    checkpoints.load(again, f"{ROOT}/step-00000001")
    pairs = zip(live.models[0].parameters(), again.models[0].parameters(), strict=True)
    assert all(one.equal(two) for one, two in pairs)


def test_puts_that_have_a_condition(endpoint):
    root, url = place_of(ROOT), place_of(f"{ROOT}/one")
    assert objects.is_exclusive(root) and objects.names(root) == []
    objects.put_new(url, b"first")
    with pytest.raises(FileExistsError):
        objects.put_new(url, b"second")
    seen = objects.look(url)
    objects.put_over(url, b"third", seen)
    with pytest.raises(FileExistsError):
        objects.put_over(url, b"fourth", seen)
    assert objects.read(url, 10) == b"third"
    with pytest.raises(OSError, match="larger than the limit of 3 bytes"):
        objects.read(url, 3)
    objects.remove(root)
    assert objects.look(url) is None and not objects.is_there(root)


class Proxy(ThreadingHTTPServer):
    """Hands requests on, and loses the answers to as many writes of manifests as it is told to."""

    daemon_threads = True

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.to_lose, self.lost = target.removeprefix("http://"), 0, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _hand_on(self):
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = HTTPConnection(self.server.target, timeout=60)
        upstream.request(self.command, self.path, body, {k: v for k, v in self.headers.items() if k != "Expect"})
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if self.command == "PUT" and manifest.NAME in self.path and self.server.lost < self.server.to_lose:
            self.server.lost += 1
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        size = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", size)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _hand_on

    def log_message(self, *args):
        pass


@contextmanager
def through_a_proxy(endpoint, to_lose):
    proxy = Proxy(endpoint)
    proxy.to_lose = to_lose
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    found, os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"], proxy.url
    forget()
    try:
        yield proxy
    finally:
        os.environ["AWS_ENDPOINT_URL"] = found
        forget()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def test_the_answer_to_the_commit_is_lost_after_it_was_done(endpoint):
    live = test_storage.prepared("plain")
    with through_a_proxy(endpoint, to_lose=2) as proxy:
        checkpoints.save(live, f"{ROOT}/step-00000001", 1)
        assert proxy.lost == 2
        checkpoints.save(live, f"{ROOT}/step-00000001", 1, replace=True)
    assert verify.damages(locate.checkpoint(place_of(f"{ROOT}/step-00000001"))) == []


def test_two_writers_of_one_step(endpoint, monkeypatch):
    test_storage.test_of_two_writers_of_one_step_one_wins_and_the_other_is_told(
        place_of(ROOT), test_storage.prepared("plain"), monkeypatch
    )


def test_retention(endpoint):
    test_storage.test_retention_pins_and_marks(place_of(ROOT), test_storage.prepared("plain"))


def test_wrong_credentials_and_no_bucket_are_said_in_words(endpoint, monkeypatch):
    denied = re.compile(rf"storage: {ROOT}: cannot be written: writing was denied \(.+\); check the credentials\.")
    assert objects.problem(place_of(ROOT)) is None
    assert "nosuch: no such bucket" in objects.problem(place_of("s3://nosuch/run"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    forget()
    assert denied.fullmatch(objects.problem(place_of(ROOT)))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    forget()
    allow_without_auth(endpoint, "0")
    try:
        assert denied.fullmatch(objects.problem(place_of(ROOT)))
        with pytest.raises(CheckpointSaveError, match="check the credentials"):
            checkpoints.save(test_storage.prepared("plain"), f"{ROOT}/step-00000001", 1)
    finally:
        allow_without_auth(endpoint, "inf")


def allow_without_auth(endpoint, requests):
    """From now on the server looks at keys, once there were so many requests."""
    plain = {"Content-Type": "text/plain"}
    url = f"{endpoint}/moto-api/reset-auth"
    urlopen(Request(url, data=requests.encode(), headers=plain, method="POST"), timeout=60).read()


def launched(endpoint, folder, stop_at, *flags):
    """The script of the launched tests on two ranks, its project in the bucket."""
    command = [sys.executable, "-m", "shardkit", "launch", "-n", "2", "--cpu", "--logs", str(folder / "logs"), *flags]
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), str(stop_at), "s3://bucket/gpt"],
        env=env.copy() | {"PYTHONPATH": str(SCRIPT.parent.parent), **KEYS, "AWS_ENDPOINT_URL": endpoint},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )


def test_a_launched_run_stops_and_resumes_in_the_store(endpoint, tmp_path):
    (tmp_path / "shardkit.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n")
    stopped = launched(endpoint, tmp_path, 3)
    assert stopped.returncode == 75, stopped.stdout
    assert "saved in s3://bucket/gpt/checkpoints/step-" in stopped.stdout
    newest = folder.steps(place_of("s3://bucket/gpt/checkpoints"))[0]
    finished = launched(endpoint, tmp_path, 99, "--resume", str(newest.path))
    assert finished.returncode == 0, finished.stdout
    assert f"resumed True at step {newest.step}" in finished.stdout
    weights = load_file(tmp_path / "weights.safetensors")
    expected = dict(zip(dict(parts(8, 4)[0].named_parameters()), plain(56, 8, 2, 2)["weights"], strict=True))
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name])
    refused = launched(endpoint, tmp_path, 99, "--resume", "s3://bucket/gpt/checkpoints/step-00000099")
    assert refused.returncode == 2 and "no object with this name" in refused.stdout, refused.stdout
    refused = launched("http://127.0.0.1:9", tmp_path, 99, "--set", "shardkit.checkpoint.resume=auto")
    assert "storage: s3://bucket/gpt: cannot be written" in refused.stdout, refused.stdout
    assert not [path for path in tmp_path.rglob("*") if "s3:" in path.name]


def test_commands_read_the_store(endpoint, tmp_path, capsys):
    live = test_storage.prepared("plain")
    for step in (1, 2, 3):
        test_storage.save_step(live, ROOT, step)
    capsys.readouterr()
    for command, said in {
        "list s3://bucket/run": "2 checkpoints",
        "inspect s3://bucket/run": "step      3",
        "verify s3://bucket/run": "step-00000003: valid",
        f"merge s3://bucket/run -o {tmp_path}/merged": "step 3",
        f"diff {ROOT}/step-00000002 {ROOT}/step-00000003": "not.",
        f"pin {ROOT}/step-00000002": "pinned",
        "prune s3://bucket/run --keep-last 1": "0 checkpoints",
        f"pin --undo {ROOT}/step-00000002": "no longer pinned",
        "prune s3://bucket/run --keep-last 1 --dry-run": "would delete s3://bucket/run/checkpoints/step-00000002",
    }.items():
        code = main.run(["checkpoint", *command.split()])
        told = capsys.readouterr()
        assert code in (0, 1) and said in told.out, (command, told)
    assert (tmp_path / "merged" / "model.safetensors").exists()
    assert main.run(["checkpoint", "merge", ROOT, "-o", "s3://bucket/merged"]) == 2
    assert "an object store is not supported here" in capsys.readouterr().err

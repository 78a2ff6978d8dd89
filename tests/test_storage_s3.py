"""Checkpoints in S3, as moto's server plays it. `make test-storage` has the packages; `make test` leaves these out."""

import os
import signal
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import pytest

from shardkit.checkpoint import folder, in_store, locate, manifest, retention, verify
from shardkit.errors import CheckpointSaveError
from shardkit.storage import objects, upload
from shardkit.storage.url import place_of
from tests import checkpoints, forked, test_storage

pytest.importorskip("s3fs", reason="needs s3fs; make test-storage installs it")
moto = pytest.importorskip("moto.server", reason="needs moto[server]; make test-storage installs it")

pytestmark = [pytest.mark.storage, pytest.mark.filterwarnings("default")]

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
KEYS |= {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
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
    assert "rank 1" in outcomes[0].value and "failed" in outcomes[0].value
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
    with pytest.raises(OSError, match="more than 3 bytes"):
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
        self.send_header(
            "Content-Length", answer.getheader("Content-Length", "0") if self.command == "HEAD" else len(data)
        )
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
    assert objects.problem(place_of(ROOT)) is None
    assert "nosuch: no such bucket" in objects.problem(place_of("s3://nosuch/run"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    forget()
    assert "is refused" in objects.problem(place_of(ROOT)) and "credentials" in objects.problem(place_of(ROOT))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    forget()
    urlopen(Request(f"{endpoint}/moto-api/reset-auth", data=b"0", method="POST"), timeout=60).read()
    try:
        assert "is refused" in objects.problem(place_of(ROOT)) and "credentials" in objects.problem(place_of(ROOT))
        with pytest.raises(CheckpointSaveError, match="see to the credentials"):
            checkpoints.save(test_storage.prepared("plain"), f"{ROOT}/step-00000001", 1)
    finally:
        urlopen(Request(f"{endpoint}/moto-api/reset-auth", data=b"inf", method="POST"), timeout=60).read()

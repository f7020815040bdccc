"""The remote tier against a real S3 protocol server, behind a network that misbehaves."""

import time

import pytest
import torch
from helpers import fill, key, key_of, read
from test_entry import same, sample

from mpic_rag import Document, Engine
from mpic_rag.bench.proxy import Proxy
from mpic_rag.store import Store, feed

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def connect(server, proxy, tmp_path, request):
    """Opens stores on different folders, and so machines, that share a bucket."""
    import boto3

    secrets = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    bucket = "b" + str(abs(hash(request.node.name)))
    url = f"http://127.0.0.1:{server}"
    boto3.client("s3", endpoint_url=url, **secrets).create_bucket(Bucket=bucket)
    stores = []

    def connect(machine, timeout=2.0, **options):
        store = Store(
            tmp_path / machine,
            remote=f"s3://{bucket}/caches",
            remote_timeout=timeout,
            key="k",
            secret="s",
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            config_kwargs={"retries": {"max_attempts": 0}},
            use_listings_cache=False,
            skip_instance_cache=True,
            **options,
        )
        stores.append(store)
        return store

    yield connect
    proxy.mode = "refuse"


def test_a_remote_hit_fills_the_disk_and_objects_are_written_once(connect):
    one, two = connect("one"), connect("two")
    fill(one.dynamic, 3, "amber")
    one.drain()
    assert not two.dynamic.contains(key_of(1))
    assert same(read(two, 1), sample(seed=1))
    two.drain()
    assert two.dynamic.contains(key_of(1))
    (stored,) = two.dynamic.disk.find([key_of(1)]).values()
    assert same(two.dynamic.disk.open(stored).kv(features=True), sample(seed=1))
    two.dynamic.put(key_of(2), sample(seed=2), "amber")
    two.drain()
    assert one.faults.counts == two.faults.counts == {}


def test_layers_of_a_large_entry_come_in_ranges(connect):
    one, two = connect("one"), connect("two", timeout=20)
    kv = sample(tokens=20_000)
    one.dynamic.put(key_of(1), kv)
    one.drain()
    (found,) = two.find([two_candidates(two, 1)])
    keys, _ = found.entry.layer(1)
    assert torch.equal(keys, kv.keys[1])
    assert found.entry.bytes_read < found.entry.size


def test_a_large_entry_without_pictures_comes_in_ranges(connect, text_model):
    page = Document.of("amber", [["its keeper is maria, and " * 12]])
    one = Engine(text_model, connect("one", adaptive=False))
    one.compile([page])
    one.drain()
    (row,) = one.store.dynamic.rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpic_rag.store.remote.AHEAD", row.size // 2)
        patch.setattr("mpic_rag.store.entry.AHEAD", 1 << 12)
        patch.setattr("mpic_rag.retrieval.SMALL", 0)
        two = Engine(text_model, connect("two", adaptive=False))
        answer = two.ask("who?", page.chunks, max_tokens=4)
        two.drain()
    assert [c.tier for c in answer.report.chunks] == ["remote"]
    assert answer.ids == one.ask("who?", page.chunks, max_tokens=4).ids
    assert two.store.faults.counts == {}
    assert two.store.dynamic.contains(row.key)


def two_candidates(store, n):
    from mpic_rag.store import Candidate

    return [Candidate("document", store.dynamic, key_of(n))]


def test_deleting_reaches_the_remote_and_other_machines(connect, monkeypatch):
    monkeypatch.setattr(feed, "POLL", 0.0)
    monkeypatch.setattr(feed, "SOON", 0.0)
    one, two, three = connect("one"), connect("two"), connect("three")
    fill(one.dynamic, 3, "amber")
    one.drain()
    assert read(two, 1)
    two.drain()
    assert one.dynamic.delete_document("amber") == 3
    for machine in (one, two, three):
        assert [read(machine, n) for n in range(3)] == [None] * 3
    one.dynamic.put(key_of(1), sample(seed=1), "amber")
    one.drain()
    for machine in (one, two, three):
        machine._absent.clear()
        assert same(read(machine, 1), sample(seed=1))


def test_a_damaged_object_is_replaced(connect):
    one, two = connect("one"), connect("two")
    fill(one.dynamic, 1)
    one.drain()
    path = one.remote.path("dynamic", key_of(0))
    data = one.remote.fs.cat_file(path)
    one.remote.fs.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    assert read(two, 0) is None
    assert two.faults.counts == {"damaged": 1}
    two.drain()
    two.dynamic.put(key_of(0), sample(seed=0))
    two.drain()
    assert same(read(connect("three"), 0), sample(seed=0))


def test_speeds_are_measured(connect):
    one, two = connect("one"), connect("two")
    fill(one.dynamic, 2)
    one.drain()
    assert read(two, 1)
    assert two.costs.tiers["remote"].looks == 1
    assert two.dynamic.fetch(key_of(0))
    assert two.dynamic.contains(key_of(0))
    assert two.costs.tiers["remote"].looks == 2


def test_a_remote_that_is_slower_than_computing_is_not_waited_for(connect, proxy, text_model):
    page = Document.of("amber", [["amber station."], ["its keeper is maria."]])
    one = Engine(text_model, connect("one"))
    one.compile([page])
    one.drain()
    two = Engine(text_model, connect("two"))
    two.store.costs.token_s[two.identity] = 1e-6
    two.store.costs.measure_look("remote", 1.0)
    served = proxy.served
    answer = two.ask("who?", page.chunks, max_tokens=1)
    assert [c.miss for c in answer.report.chunks] == ["quicker to compute"] * 2
    two.drain()
    assert proxy.served > served  # one entry was fetched beside it, to see how long that takes
    assert two.store.costs.tiers["remote"].looks == 2
    answer = two.ask("who?", page.chunks, max_tokens=1)
    assert [c.tier for c in answer.report.chunks] == ["disk", ""]
    two.drain()


def test_what_an_outage_kept_back_is_sent_later(connect, proxy):
    one = connect("one", timeout=0.3)
    proxy.mode = "refuse"
    fill(one.dynamic, 2, "amber")
    one.drain()
    proxy.mode = "pass"
    again = connect("one")
    assert all(again.dynamic.push(key_of(n)) for n in range(2))
    assert same(read(connect("two"), 1), sample(seed=1))
    assert not again.dynamic.push(key_of(9))


@pytest.mark.parametrize("mode", ["refuse", "cut", "hang", "drip"])
def test_a_failing_remote_costs_little_and_is_left_alone(connect, proxy, mode):
    one = connect("one")
    fill(one.dynamic, 1)
    one.drain()
    proxy.mode = mode
    two = connect("two", timeout=0.5)
    began = time.monotonic()
    assert read(two, 0) is None
    assert time.monotonic() - began < 2.0
    assert sum(two.faults.counts.values()) == 1
    began, served = time.monotonic(), proxy.served
    for n in range(20):
        assert read(two, n) is None
    assert time.monotonic() - began < 0.5
    assert proxy.served == served
    assert sum(two.faults.counts.values()) == 1


def test_a_remote_that_is_back_is_used_again(connect, proxy, monkeypatch):
    monkeypatch.setattr("mpic_rag.store.remote.REST", 0.2)
    one, two = connect("one"), connect("two", timeout=0.5)
    fill(one.dynamic, 1)
    one.drain()
    proxy.mode = "hang"
    assert read(two, 0) is None
    proxy.mode = "pass"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := read(two, 0):
            assert same(found, sample(seed=0))
            return
        time.sleep(0.1)
    pytest.fail("never asked again")


def test_answers_are_those_of_a_healthy_remote(connect, proxy, text_model):
    texts = [["amber station."], ["its keeper is maria."], ["x"]]
    page = Document.of("amber", texts)
    ask = {"max_tokens": 6}
    one = Engine(text_model, connect("one", adaptive=False))
    one.compile([page])
    expected = one.ask("who?", page.chunks, **ask)
    one.drain()
    two = Engine(text_model, connect("two", adaptive=False))
    answer = two.ask("who?", page.chunks, **ask)
    assert [c.tier for c in answer.report.chunks] == ["remote"] * 3
    assert answer.ids == expected.ids
    two.drain()
    again = two.ask("who?", page.chunks, **ask)
    assert [c.tier for c in again.report.chunks] == ["memory"] * 3
    full = one.ask("who?", page.chunks, selector="full", **ask)
    for mode in ("hang", "refuse", "cut"):
        proxy.mode = mode
        three = Engine(text_model, connect(mode, timeout=0.3, adaptive=False))
        lost = three.ask("who?", page.chunks, **ask)
        assert lost.ids == full.ids
        assert all(c.miss for c in lost.report.chunks)
    assert key(one, page.chunks[0]) == key(two, page.chunks[0])

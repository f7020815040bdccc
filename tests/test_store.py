"""Whatever happens to a file, the store gives the right bytes or an error."""

import random
import threading

import pytest
import torch

from mpic_rag.store import Store, StoreError

KEY = "ab" * 32
TENSORS = {
    "ids": torch.arange(5),
    "keys": torch.randn(2, 3, 5, 4),
    "values": torch.randn(2, 3, 5, 4).bfloat16(),
    "features": torch.empty(0, 8),
}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.put(KEY, TENSORS)
    return store


def test_round_trip(store):
    found, size = store.get(KEY, list(TENSORS))
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert size >= sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_reads_only_what_is_asked_for(store):
    _, all_bytes = store.get(KEY, list(TENSORS))
    found, size = store.get(KEY, ["ids"])
    assert list(found) == ["ids"]
    assert size < all_bytes


def test_missing_delete_contains(store):
    assert store.contains(KEY)
    assert store.delete(KEY)
    assert not store.delete(KEY)
    assert not store.contains(KEY)
    with pytest.raises(KeyError):
        store.get(KEY, ["ids"])


@pytest.mark.parametrize("key", ["../../etc/passwd", "AB" * 32, "ab", "", "ab" * 32 + "\n"])
def test_only_content_keys_name_files(store, key):
    with pytest.raises(ValueError, match="not a content key"):
        store.path(key)


def test_every_cut_is_noticed(store):
    data = store.path(KEY).read_bytes()
    for length in [0, 1, 7, 8, 9, 50, *range(100, len(data), 97), len(data) - 1]:
        store.path(KEY).write_bytes(data[:length])
        with pytest.raises(StoreError):
            store.get(KEY, list(TENSORS))


def test_every_flipped_bit_is_noticed_or_harmless(store):
    data = store.path(KEY).read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        broken = bytearray(data)
        broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        store.path(KEY).write_bytes(broken)
        try:
            found, _ = store.get(KEY, list(TENSORS))
        except StoreError:
            continue
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"ids": 3, "__metadata__": {"ids": "x"}}',
        b'{"__metadata__": 7}',
        b'{"ids":{"dtype":"I64","shape":[-1],"data_offsets":[8,0]},"__metadata__":{"ids":""}}',
        b'{"ids":{"dtype":"I64","shape":[1099511627776],"data_offsets":[0,8796093022208]},'
        b'"__metadata__":{"ids":""}}',
        b"\xff\xfe",
    ],
)
def test_hostile_headers(store, header):
    store.path(KEY).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StoreError):
        store.get(KEY, ["ids"])


def test_readers_never_see_a_half_written_entry(store):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            store.put(KEY, TENSORS)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            assert torch.equal(store.get(KEY, ["keys"])[0]["keys"], TENSORS["keys"])
    finally:
        stop.set()
        thread.join()
    assert not list(store.root.rglob("*.part"))

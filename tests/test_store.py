"""A store on one machine: tiers, limits, expiry, libraries, deletion, and whatever may go wrong."""

import errno
import os
import random
import sqlite3
import threading
import time

import pytest
from helpers import fill, key_of, read, value_file
from test_entry import same, sample

from mpic_rag.store import Policy, Store


def test_disk_then_memory(store):
    fill(store.dynamic, 2)
    assert same(read(store, 1), sample(seed=1))
    assert len(store.memory) == 1
    value_file(store.dynamic, key_of(1)).unlink()
    assert same(read(store, 1), sample(seed=1))
    assert read(store, 7) is None


def test_memory_holds_its_limit(open_store):
    size = sum(t.numel() * t.element_size() for t in (sample().keys, sample().values)) + 500
    store = open_store(memory=3 * size)
    fill(store.dynamic, 9)
    for n in range(9):
        read(store, n)
    assert 0 < store.memory.bytes <= 3 * size
    assert store.memory.get(("dynamic", key_of(8)))
    assert not store.memory.get(("dynamic", key_of(0)))


def test_disk_evicts_the_least_recently_used_but_nothing_pinned(open_store):
    store = open_store(memory=0)
    library = store.dynamic
    fill(library, 4, tokens=2000)
    size = next(library.rows()).size
    library.disk.pin([key_of(0)])
    library.touch([key_of(1)])
    library.set_policy(Policy(limit=library.disk.volume() + size // 2))
    library.put(key_of(9), sample(tokens=2000))
    assert {r.key for r in library.rows()} == {key_of(n) for n in (0, 1, 3, 9)}
    library.touch([key_of(0)])
    assert next(r for r in library.rows() if r.key == key_of(0)).pinned


def test_expiry_is_put_off_by_use(open_store):
    store = open_store(memory=0)
    library = store.dynamic
    library.set_policy(Policy(ttl_s=1.0))
    fill(library, 2)
    time.sleep(0.6)
    library.touch([key_of(0)])
    time.sleep(0.6)
    assert library.contains(key_of(0))
    assert not library.contains(key_of(1))
    assert library.disk.expire() == 1


def test_what_cannot_be_read_is_counted_logged_once_and_set_aside(store, caplog):
    library = store.dynamic
    fill(library, 4)
    for n in range(3):
        path = value_file(library, key_of(n))
        path.write_bytes(path.read_bytes()[:-5] if n else b"")
    assert [read(store, n) for n in range(3)] == [None] * 3
    assert store.faults.counts["damaged"] == 3
    assert len([r for r in caplog.records if "damaged" in r.message]) == 1
    assert len(list(library.disk.quarantine.iterdir())) == 3
    assert [r.key for r in library.rows()] == [key_of(3)]


def test_a_vanished_file(store):
    fill(store.dynamic, 1)
    value_file(store.dynamic, key_of(0)).unlink()
    assert read(store, 0) is None
    assert store.faults.counts == {"vanished": 1}
    assert not store.dynamic.contains(key_of(0))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOSPC, "full disk"),
        (errno.EROFS, "read-only disk"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "disk error"),
    ],
)
def test_a_disk_that_refuses(store, monkeypatch, number, name):
    fill(store.dynamic, 1)

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("mpic_rag.store.local.open_file", refuse)
        assert store.dynamic.open(key_of(0)) is None
        assert store.faults.counts == {name: 1}
        patch.setattr("mpic_rag.store.files.Files.store", refuse)
        with pytest.raises(OSError, match="can't store") as error:
            store.dynamic.put(key_of(1), sample())
        assert error.value.errno == number
    assert same(read(store, 0), sample(seed=0))
    assert store.dynamic.check() == []


def test_flips_in_the_index_are_found_harmless_or_mended(tmp_path):
    for round_ in range(100):
        folder = tmp_path / str(round_)
        store = Store(folder, memory=0)
        fill(store.dynamic, 6)
        store.dynamic.close()
        path = folder / "dynamic/entries/cache.db"
        data = bytearray(path.read_bytes())
        draw = random.Random(round_)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        store = Store(folder, memory=0)
        for n in range(6):
            found = read(store, n)
            assert found is None or same(found, sample(seed=n))
        store.dynamic.put(key_of(8), sample(seed=8))
        assert same(read(store, 8), sample(seed=8))
        store.dynamic.check()
        assert store.dynamic.check() == []
        store.close()


def test_a_lost_index_is_rebuilt_from_the_entries(store, open_store):
    fill(store.dynamic, 5, "amber")
    store.dynamic.close()
    (store.dynamic.folder / "entries/cache.db").write_bytes(b"nonsense" * 1000)
    again = open_store()
    assert all(same(read(again, n), sample(seed=n)) for n in range(5))
    assert again.dynamic.delete_document("amber") == 5


def test_a_rebuilt_index_brings_nothing_back_and_keeps_the_rules(store, open_store):
    store.dynamic.set_policy(Policy(ttl_s=100.0))
    fill(store.dynamic, 2)
    path = value_file(store.dynamic, key_of(1))
    left = path.read_bytes()
    store.dynamic.delete([key_of(1)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(left)  # as if the process had died before it removed the file
    store.dynamic.close()
    (store.dynamic.folder / "entries/cache.db").write_bytes(b"nonsense" * 1000)
    again = open_store()
    assert read(again, 0)
    assert read(again, 1) is None
    assert all(row.expires for row in again.dynamic.rows())


def test_an_index_cannot_make_anyone_unpickle_or_leave_the_folder(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    fill(store.dynamic, 2)
    database = sqlite3.connect(store.dynamic.folder / "entries/cache.db")
    database.execute("UPDATE Cache SET mode = 4, value = ?", (b"cos\nsystem\n(S'false'\ntR.",))
    database.execute("UPDATE Cache SET filename = ? WHERE key = ?", ("../../../outside", key_of(1)))
    database.commit()
    assert read(store, 0) is None or same(read(store, 0), sample(seed=0))
    store.dynamic.delete([key_of(1)])
    assert outside.read_bytes() == b"x"


def test_check_mends_and_leaves_no_stray_files(store):
    library = store.dynamic
    fill(library, 3)
    stray = library.folder / "entries/aa/bb"
    stray.mkdir(parents=True)
    (stray / ("c" * 28 + ".val")).write_bytes(b"half an ent")
    path = value_file(library, key_of(2))
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert len(library.check()) >= 2
    assert library.check() == []
    files = list((library.folder / "entries").rglob("*.val"))
    assert len(files) == 2


def crowd(stores, readers, writers, seconds):
    """Threads read and write under a limit that forces eviction; says what went wrong."""
    library = stores[0].dynamic
    fill(library, 1, tokens=500)
    size = next(library.rows()).size
    limit = library.disk.volume() + 12 * size
    for each in stores:
        each.dynamic.set_policy(Policy(limit=limit))
    stop, problems, reads = threading.Event(), [], []

    def work(n):
        draw, mine, count = random.Random(n), stores[n % len(stores)], 0
        try:
            while not stop.is_set():
                which = draw.randrange(40)
                if n < writers:
                    mine.dynamic.put(key_of(which), sample(500, seed=which))
                    if (over := library.disk.volume() - limit) > writers * size:
                        problems.append(f"{over} bytes over the limit")
                elif found := read(mine, which):
                    count += 1
                    if not same(found, sample(500, seed=which)):
                        problems.append("another entry")
        except BaseException as error:
            problems.append(error)
        reads.append(count)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(readers + writers)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    for each in stores:
        # An entry that was evicted while it was about to be opened.
        problems += set(each.faults.counts) - {"vanished"}
    return problems, sum(reads)


def test_readers_and_writers_at_once(store, open_store):
    problems, reads = crowd([store, open_store(memory=0)], 4, 2, seconds=4)
    assert problems == []
    assert reads > 50


@pytest.mark.slow
def test_a_crowd_for_a_minute(store, open_store):
    problems, reads = crowd([store, open_store(memory=0)], 16, 4, seconds=60)
    assert problems == []
    assert reads > 500

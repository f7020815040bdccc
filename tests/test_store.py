"""A store on one machine: tiers, limits, expiry, libraries, deletion, and whatever may go wrong."""

import errno
import os
import random
import sqlite3
import threading
import time

import pytest
from helpers import value_file
from test_entry import same, sample

from mpic_rag.store import Candidate, Policy, Store, StoreError
from mpic_rag.store.archive import export, import_


def key_of(n):
    return f"{n:064x}"


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store again, as another process would."""
    return lambda **options: Store(tmp_path / "store", **options)


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def library(store):
    return store.dynamic


def fill(library, count, document="", **kwargs):
    for n in range(count):
        library.put(key_of(n), sample(seed=n, **kwargs), document)


def read(store, n, library=None):
    """The entry as a request would get it, kept in memory as a request would keep it."""
    library = library or store.dynamic
    (found,) = store.find([[Candidate("document", library, key_of(n))]])
    if found is None:
        return None
    if found.tier == "memory":
        return found.entry.kv
    since = library.mark()
    try:
        entry = found.entry if found.tier == "remote" else library.disk.open(found.entry)
        kv = entry.kv(features=True)
    except (StoreError, OSError) as error:
        library.fault(key_of(n), error, found.tier)
        return None
    library.keep(key_of(n), entry, kv, since)
    return kv


def test_disk_then_memory(store):
    fill(store.dynamic, 2)
    assert same(read(store, 1), sample(seed=1))
    assert len(store.memory) == 1
    value_file(store.dynamic, key_of(1)).unlink()
    assert same(read(store, 1), sample(seed=1))
    assert read(store, 7) is None


@pytest.mark.parametrize("key", ["../../etc/passwd", "AB" * 32, "ab", "", "ab" * 32 + "\n"])
def test_only_content_keys_name_entries(library, key):
    for use in (library.contains, library.open, lambda k: library.delete([k])):
        with pytest.raises(ValueError, match="not a content key"):
            use(key)
    with pytest.raises(ValueError, match="not a content key"):
        library.put(key, sample())


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


def test_rules_outlive_the_process_and_are_not_loosened_by_damage(library, open_store):
    library.set_policy(Policy(1 << 20, 60.0, True))
    assert open_store().dynamic.policy == Policy(1 << 20, 60.0, True)
    (library.folder / "policy.json").write_text('{"limit": 3}')
    with pytest.raises(ValueError, match="damaged"):
        open_store().dynamic  # noqa: B018


def test_deleting_a_document_reaches_every_holder(store, open_store):
    fill(store.dynamic, 3, "amber")
    store.dynamic.put(key_of(9), sample(), "cliff")
    other = open_store()
    assert read(other, 1)
    assert other.memory.get(("dynamic", key_of(1)))
    assert store.dynamic.delete_document("amber") == 3
    for holder in (store, other):
        assert [read(holder, n) for n in range(3)] == [None] * 3
        assert read(holder, 9)


def test_work_begun_before_a_deletion_does_not_bring_an_entry_back(store, open_store):
    other = open_store()
    since = other.dynamic.mark()
    store.dynamic.put(key_of(1), sample(), "amber")
    store.dynamic.delete_document("amber")
    assert not other.dynamic.put(key_of(1), sample(), "amber", since=since)
    assert read(other, 1) is None
    assert other.dynamic.put(key_of(1), sample(), "amber")
    assert read(store, 1)
    entry = other.dynamic.open(key_of(1))
    since = other.dynamic.mark()
    store.dynamic.delete([key_of(1)])
    other.dynamic.keep(key_of(1), entry, entry.kv(), since)
    assert read(other, 1) is None


def test_two_owners(store):
    one, two = store.static("one"), store.static("two")
    one.put(key_of(1), sample(), "mine")
    assert read(store, 1, one)
    assert read(store, 1, two) is None
    assert list(two.rows()) == []
    assert two.delete([key_of(1)]) == 0
    assert two.delete_document("mine") == 0
    assert read(store, 1, one)
    assert store.static("../one").folder.parent == store.root


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


def test_readers_and_writers_at_once(store, open_store):
    others = [store, open_store(memory=0)]
    library = store.dynamic
    fill(library, 1, tokens=500)
    limit = library.disk.volume() + 12 * next(library.rows()).size
    for each in others:
        each.dynamic.set_policy(Policy(limit=limit))
    stop, errors = threading.Event(), []

    def work(n):
        draw, mine = random.Random(n), others[n % 2]
        try:
            while not stop.is_set():
                which = draw.randrange(40)
                if n < 2:
                    mine.dynamic.put(key_of(which), sample(500, seed=which))
                else:
                    found = read(mine, which)
                    assert found is None or same(found, sample(500, seed=which))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(5)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert library.disk.volume() <= limit + 2 * next(library.rows()).size
    assert not {"damaged", "index damaged"} & set(store.faults.counts)


def test_archive_round_trip(store, tmp_path):
    fill(store.dynamic, 4, "amber")
    archive = tmp_path / "library.tar"
    assert export(store.dynamic, archive) == 4
    other = Store(tmp_path / "other")
    assert import_(other.dynamic, archive) == 4
    assert all(same(read(other, n), sample(seed=n)) for n in range(4))
    assert other.dynamic.delete_document("amber") == 4
    with pytest.raises(ValueError, match="names its library"):
        import_(other.static("me"), archive)


@pytest.mark.parametrize("name", ["../../evil", "/etc/x", "dynamic/../x", "dynamic/" + "z" * 64])
def test_an_archive_stays_in_its_folder(store, tmp_path, name):
    import io
    import tarfile

    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(name)
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    before = {p for p in tmp_path.rglob("*") if "store" not in p.parts}
    with pytest.raises(ValueError, match="no entry"):
        import_(store.dynamic, path)
    assert {p for p in tmp_path.rglob("*") if "store" not in p.parts} == before
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        import_(store.dynamic, path)

"""Whose an entry is: rules, deletion, owners that know nothing of each other, archives."""

import sys

import pytest
from helpers import fill, key_of, read
from test_entry import same, sample
from tiny import picture

from mpic_rag import Document, Engine
from mpic_rag.store import Policy, Store
from mpic_rag.store.archive import export, import_


@pytest.mark.parametrize("key", ["../../etc/passwd", "AB" * 32, "ab", "", "ab" * 32 + "\n"])
def test_only_content_keys_name_entries(library, key):
    for use in (library.contains, library.open, lambda k: library.delete([k])):
        with pytest.raises(ValueError, match="not a content key"):
            use(key)
    with pytest.raises(ValueError, match="not a content key"):
        library.put(key, sample())


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


def calls(work):
    """The functions of this package that some work calls in this thread, in order."""
    seen = []

    def note(frame, event, _):
        if event == "call" and "mpic_rag" in frame.f_code.co_filename:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_nobody_learns_from_time_what_another_owner_has(vision_model, tmp_path):
    def read(colour="red"):
        return Document.of("amber", [["amber station."], [picture((56, 28), colour)]])

    traces, keys = [], set()
    for others in ((), ("one",), ("one", "three")):
        page = read()
        store = Store(tmp_path / str(len(others)), adaptive=False)
        for owner in others:
            engine = Engine(vision_model, store, owner=owner)
            engine.compile([page])
            engine.ask("who?", page.chunks, max_tokens=1)  # into memory, too
            keys |= {engine.candidates(chunk)[0].key for chunk in page.chunks}
        two = Engine(vision_model, store, owner="two")
        two.compile_later = lambda chunks: None
        two.ask("who?", read("blue").chunks, max_tokens=1)  # imports and the like
        answers, page = [], read()  # nothing about it is known from before
        traces.append(
            calls(
                lambda two=two, answers=answers, page=page: answers.append(
                    two.ask("who?", page.chunks, max_tokens=1)
                )
            )
        )
        assert all(chunk.miss for chunk in answers[0].report.chunks)
        keys |= {two.candidates(chunk)[0].key for chunk in page.chunks}
        store.close()
    assert traces[0] == traces[1] == traces[2]
    assert len(traces[0]) > 50
    assert len(keys) == 6  # two chunks of three owners, none under another's key


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

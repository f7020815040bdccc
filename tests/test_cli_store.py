"""`mpic-rag store`: what an owner does with a store."""

import json

import pytest

from mpic_rag import guide

PAGE = guide.FOLDER / "shelf-1" / "larkmouth.md"


@pytest.fixture
def store(mpic_rag, tmp_path):
    """Runs `mpic-rag store ...` on a store that holds one page of the guide."""
    assert mpic_rag("compile", PAGE)[0] == 0

    def run(*arguments, options=()):
        where = ("--store", tmp_path / "store", *options)
        return mpic_rag("store", *where, *arguments)

    return run


def rows(store, *arguments, **kwargs):
    return json.loads(store(*arguments, "--json", **kwargs)[1])["rows"]


def test_list_pin_remove(store):
    listed = rows(store, "ls")
    assert {r["source"] for r in listed} == {"larkmouth#0", "larkmouth#1", "larkmouth#2"}
    assert all(r["mode"] == "document" and r["tokens"] and r["bytes"] for r in listed)
    assert "3 entries" in store("ls")[1]
    assert rows(store, "ls", "--document", "another") == []
    assert "3 entries pinned" in store("pin", "larkmouth")[1]
    assert all(r["pinned"] for r in rows(store, "ls"))
    assert "1 entries deleted" in store("rm", listed[0]["key"][:12])[1]
    assert "2 entries deleted" in store("rm", "--document", "larkmouth")[1]
    assert rows(store, "ls") == []


def test_stats_and_check_and_gc(store, tmp_path):
    library = next(r for r in rows(store, "stats") if r["what"] == "library")
    assert (library["name"], library["entries"], library["documents"]) == ("dynamic", 3, 1)
    assert "Measured speeds" in store("stats")[1]
    assert "all is well" in store("check")[1]
    path = next((tmp_path / "store/dynamic/entries").rglob("*.val"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "checksum" in store("check")[1]
    assert "1 set aside" in store("gc")[1]
    assert len(rows(store, "ls")) == 2


def test_a_library_is_carried_elsewhere(store, tmp_path):
    archive = tmp_path / "library.tar"
    assert "3 entries" in store("export", archive)[1]
    other = ("--store", tmp_path / "other")
    (tmp_path / "other").mkdir()
    assert "3 entries stored" in store("import", archive, options=other)[1]
    assert len(rows(store, "ls", options=other)) == 3


def test_rules(store, mpic_rag):
    assert "for ever; compiled in their" in store("rules")[1]
    assert (
        "1.0 MB; entries live 2 h unused; compiled in isolation only"
        in (store("rules", "--limit", 10**6, "--ttl", 7200, "--isolated-only")[1])
    )
    library = next(r for r in rows(store, "stats") if r["what"] == "library")
    assert (library["limit"], library["ttl_s"], library["isolated_only"]) == (10**6, 7200, True)
    assert mpic_rag("compile", PAGE)[0] == 0
    assert {r["mode"] for r in rows(store, "ls")} == {"document", "isolated"}
    assert "for ever" in store("rules", "--ttl", 0)[1]


def test_owners_are_apart(store):
    assert rows(store, "ls", options=("--owner", "me")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm",), "name keys"),
        (("rm", "abc"), "more letters"),
        (("pin", "nobody"), "no entry belongs"),
        (("warm",), "--remote"),
        (("import", "none.tar"), "there is no file"),
    ],
)
def test_mistakes_are_explained(store, arguments, message):
    status, _, err = store(*arguments)
    assert status == 1
    assert message in err

"""`index`, `compile` and `ask` on a command line."""

import json

import pytest

from mpic_rag import guide


def rows(out):
    return json.loads(out)["rows"][0]


def test_from_a_folder_to_an_answer(mpic_rag, tmp_path):
    shelf = guide.FOLDER / "shelf-1"
    status, out, _ = mpic_rag("index", shelf, "--out", "idx", "--passage", 0, "--json")
    assert status == 0
    report = rows(out)
    assert report["files_new"] == 8
    assert report["chunks_compiled"] == report["chunks"] > 16
    status, out, err = mpic_rag("ask", "idx", "who keeps larkmouth?", "--show-sources")
    assert status == 0
    assert "victor" in out
    assert "larkmouth.md" in out
    assert "document" in err  # the cache that served a passage
    status, out, _ = mpic_rag(
        "ask", "idx", "who keeps larkmouth?", "--json", "--top-k", 3, "--around", 0
    )
    row = rows(out)
    assert len(row["sources"]) == 3
    assert row["recomputed"] == 0
    assert row["sources"][0]["ranks"]
    again = rows(mpic_rag("index", "--out", "idx", "--json")[1])
    assert again["files_unchanged"] == 8
    assert again["chunks_compiled"] == 0


def test_a_picture_as_the_question(mpic_rag):
    shelf = guide.FOLDER / "shelf-1"
    mpic_rag("index", shelf, "--out", "idx", "--passage", 0)
    sign = shelf / "images" / "larkmouth.png"
    status, out, _ = mpic_rag("ask", "idx", "what is this?", "--image", sign, "--json")
    assert status == 0
    assert any("query picture" in source["ranks"] for source in rows(out)["sources"])


def test_compile_later(mpic_rag, tmp_path):
    (tmp_path / "a.md").write_text("the sign of larkmouth")
    report = rows(mpic_rag("index", "a.md", "--out", "idx", "--no-compile", "--json")[1])
    assert report["chunks_compiled"] == 0
    status, out, _ = mpic_rag("compile", "idx")
    assert status == 0
    assert "1 of 1 chunks compiled" in out
    assert "0 of 1 chunks compiled" in mpic_rag("compile", "idx")[1]


def test_an_estimate_writes_nothing(mpic_rag, tmp_path):
    (tmp_path / "a.md").write_text("the sign of larkmouth")
    (tmp_path / "b.md").touch()
    status, out, _ = mpic_rag("index", tmp_path, "--dry-run", "--json")
    assert status == 0
    row = rows(out)
    assert (row["files"], row["skipped"], row["chunks"]) == (2, 1, 1)
    assert row["tokens"] > 0
    assert row["minutes"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.md", "b.md"]
    assert "Estimate" in mpic_rag("index", tmp_path, "--dry-run")[1]


def test_what_was_skipped_is_said(mpic_rag, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text('hello <img src="https://example.invalid/x.png">')
    (tmp_path / "docs" / "b.pdf").write_bytes(b"%PDF-1.7")
    status, out, _ = mpic_rag("index", "docs", "--out", "idx")
    assert status == 0
    assert "b.pdf" in out
    assert "damaged PDF" in out
    assert "not fetched" in out
    status, out, _ = mpic_rag("index", "--out", "idx", "--forget", "docs", "--json")
    assert rows(out)["files_deleted"] == 2
    assert rows(out)["passages"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["index", "--out", "idx"], "nothing to index"),
        (["index", "nowhere", "--out", "idx"], "there is no file or folder"),
        (["index", "--dry-run"], "nothing to index"),
        (["ask", "nowhere", "who?"], "there is no file"),
        (["ask", "."], "the question comes last"),
        (["index", ".", "--text-embedder", "/nowhere"], "can't load the text embedder"),
    ],
)
def test_errors_in_one_line(mpic_rag, arguments, words):
    status, _, err = mpic_rag(*arguments)
    assert status == 1
    assert words in err


def test_help_teaches(mpic_rag):
    for command in ("index", "ask", "compile"):
        status, out, _ = mpic_rag(command, "--help")
        assert status == 0
        assert "Ctrl-C is safe" in out or command != "index"


def test_a_store_elsewhere_is_remembered(mpic_rag, tmp_path):
    page = guide.FOLDER / "shelf-1" / "larkmouth.md"
    report = rows(mpic_rag("index", page, "--out", "idx", "--store", "elsewhere", "--json")[1])
    assert report["chunks_compiled"] > 0
    assert not (tmp_path / "idx/caches").exists()
    row = rows(mpic_rag("ask", "idx", "who keeps larkmouth?", "--json")[1])
    assert row["reused_tokens"] > 0
    assert row["recomputed"] == 0
    assert "0 of" in mpic_rag("compile", "idx")[1]

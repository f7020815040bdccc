"""Whatever happens to a store's files, answers are those of a clean store or of full prefill."""

import random
import shutil

import pytest
from test_exactness import run

from mpic_rag import Document, Engine, Store

QUESTION = "who keeps amber?"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A compiled store, and what is answered from it by how many of its chunks."""
    folder = tmp_path_factory.mktemp("clean")
    from conftest import family

    model = family("llama")
    page = Document.of("amber", [["amber station."], ["its keeper is maria."], ["x"]])
    engine = Engine(model, Store(folder, memory=0, adaptive=False))
    engine.compile([page])
    engine.store.close()
    return model, page, folder


def open_(model, folder):
    engine = Engine(model, Store(folder, memory=0, adaptive=False))
    engine.compile_later = lambda chunks: None
    return engine


def logits_without(clean, monkeypatch, expected, missing, tmp_path):
    """Logits of a store that lacks these entries, from an undamaged one."""
    model, page, folder = clean
    name = "-".join(map(str, sorted(missing))) or "none"
    if name not in expected:
        home = tmp_path / name
        shutil.copytree(folder, home)
        engine = open_(model, home)
        library = engine.libraries[0]
        library.delete([engine.compiler.key(page.chunks[i], library) for i in missing])
        expected[name] = run(engine, QUESTION, page.chunks, "none", monkeypatch, steps=2)[1]
        engine.store.close()
    return expected[name]


@pytest.mark.parametrize(("what", "flips"), [("values", 500), ("index", 100)])
def test_a_flipped_bit_changes_no_answer(clean, tmp_path, monkeypatch, what, flips):
    model, page, folder = clean
    draw, expected, found = random.Random(0), {}, 0
    for n in range(flips):
        home = tmp_path / "damaged"
        shutil.copytree(folder, home)
        entries = home / "dynamic/entries"
        paths = sorted(entries.rglob("*.val")) if what == "values" else [entries / "cache.db"]
        path = draw.choice(paths)
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        engine = open_(model, home)
        answer, logits = run(engine, QUESTION, page.chunks, "none", monkeypatch, steps=2)
        missing = [i for i, chunk in enumerate(answer.report.chunks) if chunk.miss]
        clean_logits = logits_without(clean, monkeypatch, expected, missing, tmp_path)
        assert (logits == clean_logits).all(), (n, path, missing)
        found += bool(missing)
        engine.store.close()
        shutil.rmtree(home)
    if what == "values":
        assert found == flips

"""Entries that are read layer by layer while the model runs: exact, and a fault costs time only."""

import pytest
import torch
from helpers import key, value_file
from test_exactness import TOLERANCE, run

from mpic_rag import Document, Engine, Store
from mpic_rag.store.entry import Entry

QUESTION = "who keeps amber?"


@pytest.fixture
def layered(monkeypatch):
    """Treats every entry as large."""
    monkeypatch.setattr("mpic_rag.retrieval.SMALL", 0)


@pytest.mark.parametrize("selector", ["none", "first_k:3", "epic:2"])
def test_equal_to_reading_at_once(model, shelf, make_engine, layered, monkeypatch, selector):
    engine = make_engine(model, store={"memory": 0})
    engine.compile(shelf)
    chunks = [shelf[d].chunks[c] for d, c in [(1, 1), (0, 2), (2, 0), (0, 2)]]
    answer, logits = run(engine, QUESTION, chunks, selector, monkeypatch)
    assert [c.tier for c in answer.report.chunks] == ["disk"] * 4
    monkeypatch.setattr("mpic_rag.retrieval.SMALL", 1 << 20)
    once, expected = run(engine, QUESTION, chunks, selector, monkeypatch)
    assert torch.equal(logits, expected)
    assert answer.report.bytes_read == once.report.bytes_read > 0
    engine.drain()


def test_what_was_read_by_layers_is_kept_in_memory(text_model, make_engine, layered):
    engine = make_engine(text_model)
    page = Document.of("amber", [["amber station."], ["its keeper is maria."]])
    engine.compile([page])
    first = engine.ask(QUESTION, page.chunks, max_tokens=4)
    engine.drain()
    second = engine.ask(QUESTION, page.chunks, max_tokens=4)
    assert [c.tier for c in second.report.chunks] == ["memory"] * 2
    assert second.ids == first.ids


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_found_damaged_under_way(text_model, make_engine, layered, monkeypatch, layer):
    engine = make_engine(text_model, store={"memory": 0})
    pages = [Document.of(n, [[f"{n} station is kept by maria."]]) for n in ("amber", "cliff")]
    engine.compile(pages)
    chunks = [page.chunks[0] for page in pages]
    path = value_file(engine.store.dynamic, key(engine, chunks[0]))
    data = bytearray(path.read_bytes())
    start = Entry(None, lambda a, b: torch.frombuffer(data, dtype=torch.uint8)[a:b], "disk")
    data[start._parts[f"layer.{layer}"].start] ^= 1
    path.write_bytes(data)
    answer, logits = run(engine, QUESTION, chunks, "none", monkeypatch)
    assert [bool(c.miss) for c in answer.report.chunks] == [True, False]
    assert engine.store.faults.counts == {"damaged": 1}
    engine.store.dynamic.delete([key(engine, chunks[0])])
    again, expected = run(engine, QUESTION, chunks, "none", monkeypatch)
    assert [bool(c.miss) for c in again.report.chunks] == [True, False]
    assert (logits - expected).abs().max() < TOLERANCE
    engine.drain()
    assert engine.ask(QUESTION, chunks, max_tokens=1).report.recomputed == 0


def test_what_is_quicker_to_compute_is_computed_but_orphans_are_loaded(text_model, tmp_path):
    engine = Engine(text_model, Store(tmp_path / "store", memory=0))
    page = Document.of("amber", [["amber station."], ["its keeper is maria."], ["x, 1904."]])
    engine.compile([page])
    engine.store.costs.token_s[engine.identity] = 1e-9
    whole = engine.ask(QUESTION, page.chunks, max_tokens=4)
    assert [c.miss for c in whole.report.chunks] == ["quicker to compute"] * 3
    assert whole.ids == engine.ask(QUESTION, page.chunks, selector="full", max_tokens=4).ids
    engine.store.costs.token_s[engine.identity] = 1e-9
    torn = engine.ask(QUESTION, page.chunks[1:], max_tokens=4)
    assert [c.tier for c in torn.report.chunks] == ["disk", ""]
    engine.drain()
    assert len(list(engine.store.dynamic.rows())) == 3  # nothing was compiled in isolation


def test_a_request_that_fails_compiles_nothing_behind_its_back(text_model, make_engine):
    engine = make_engine(text_model)
    page = Document.of("amber", [["amber station. " * 200]])
    with pytest.raises(ValueError, match="retrieve fewer"):
        engine.ask(QUESTION, page.chunks, max_tokens=1)
    engine.drain()
    assert list(engine.store.dynamic.rows()) == []

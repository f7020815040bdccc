"""The exactness ladder on the bundled model and collection."""

from itertools import pairwise

import oracles
import pytest
from oracles import Reused
from test_exactness import STEPS, TOLERANCE, chosen, compiled_behind, fresh_end, run

from mpic_rag import Model, guide
from mpic_rag.baselines import PrefixReuse
from mpic_rag.retrievers.shelf import retrieve_shelf


@pytest.fixture(scope="module")
def bundled():
    return Model.load(device="cpu")


@pytest.fixture(scope="module")
def shelves():
    return guide.shelves()


@pytest.mark.parametrize("mode", ["document", "isolated", "bare"])
@pytest.mark.parametrize("selector", ["full", "none", "first_k:8", "epic:8"])
def test_exact(bundled, shelves, make_engine, monkeypatch, mode, selector):
    documents = shelves["shelf-1"]
    engine = make_engine(bundled, mode=mode)
    engine.compile(documents)
    where = {id(c): (d, n) for d in documents for n, c in enumerate(d.chunks)}
    chunks = retrieve_shelf(documents, seed=3)[::-1]
    question = guide.questions()[0].question
    answer, logits = run(engine, question, chunks, selector, monkeypatch)
    prompt = [oracles.plain(bundled.codec.template().prefix)]
    for chunk in chunks:
        document, index = where[id(chunk)]
        own = oracles.encode(bundled, chunk.parts, "\n")
        if selector == "full":
            prompt.append(own)
        else:
            behind = compiled_behind(engine, document, index, mode)
            prompt.append(Reused(behind, own, chosen(own, selector)))
    prompt.append(fresh_end(engine, question, answer))
    if selector == "full":
        expected = oracles.full_prefill(bundled, [row for rows in prompt for row in rows])
    else:
        expected = oracles.two_copies(bundled, prompt)
    assert (logits - expected[-STEPS:]).abs().max() < TOLERANCE


def test_prefix_reuse_answers_as_full_prefill(bundled, shelves, make_engine):
    engine, prefix = make_engine(bundled), PrefixReuse(bundled)
    for n, question in enumerate(guide.questions()[:6]):
        chunks = retrieve_shelf(shelves[question.shelf], seed=n // 2)
        full = engine.ask(question.question, chunks, selector="full")
        reused = prefix.ask(question.question, chunks)
        assert reused.ids == full.ids
        assert (reused.report.recomputed_tokens == 0) == (n % 2 == 1)


def test_shelf_retrieval_keeps_documents_whole(shelves):
    documents = shelves["shelf-1"]
    orders = {tuple(c.source for c in retrieve_shelf(documents, seed)) for seed in range(9)}
    assert len(orders) == 9
    for order in orders:
        names = [source.split("#")[0] for source in order]
        assert sorted(order) == sorted(c.source for d in documents for c in d.chunks)
        assert sum(a != b for a, b in pairwise(names)) == len(documents) - 1


def test_the_guide_is_eight_pictures_and_eight_texts_a_shelf(shelves):
    for documents in shelves.values():
        chunks = [c for d in documents for c in d.chunks]
        with_picture = sum(any(not isinstance(p, str) for p in c.parts) for c in chunks)
        assert (with_picture, len(chunks)) == (8, 16)

"""The exactness ladder: every way of reuse equals its oracle, on every family, in fp32."""

import oracles
import pytest
import torch
from helpers import key
from oracles import Reused
from tiny import picture

from mpic_rag import Chunk
from mpic_rag.linker import Piece
from mpic_rag.selection import Selector

TOLERANCE = 1e-4
STEPS = 4
QUESTION = "who keeps amber?"

# (document, chunk) in prompt order: moved, reordered, torn out, repeated; pictures first and last.
ORDERS = {
    "in-order": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)],
    "shuffled": [(1, 1), (3, 1), (0, 2), (2, 0), (0, 0), (1, 2), (3, 0)],
    "orphans": [(0, 2), (1, 2), (3, 1)],
    "repeated": [(0, 1), (2, 0), (0, 1), (0, 1)],
    "one": [(1, 2)],
}


def run(engine, question, chunks, selector, monkeypatch, steps=STEPS):
    """Answer with a fixed number of tokens; returns the answer and each step's logits."""
    seen = []
    logits = engine.model.logits
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "stop_ids", frozenset())
        patch.setattr(engine.model, "logits", lambda h: seen.append(logits(h)) or seen[-1])
        answer = engine.ask(question, chunks, selector=selector, max_tokens=steps)
    return answer, torch.cat(seen)


def fresh_end(engine, question, answer):
    """Rows of the question, the template's end, and the answer but its last token."""
    template = engine.model.codec.template()
    return (
        oracles.encode(engine.model, [question])
        + oracles.plain(template.suffix)
        + oracles.plain(answer.ids[:-1])
    )


def compiled_behind(engine, document, index, mode):
    """Rows that a chunk was compiled behind."""
    if mode == "bare":
        return []
    rows = oracles.plain(engine.model.codec.template().prefix)
    if mode == "document":
        for chunk in document.chunks[:index]:
            rows += oracles.encode(engine.model, chunk.parts, "\n")
    return rows


@pytest.mark.parametrize("order", ORDERS)
def test_recompute_all_is_full_prefill(model, shelf, make_engine, monkeypatch, order):
    engine = make_engine(model)
    engine.compile(shelf)
    chunks = [shelf[d].chunks[c] for d, c in ORDERS[order]]
    for selector in ("full", "encoder", "epic:1000"):
        answer, logits = run(engine, QUESTION, chunks, selector, monkeypatch)
        rows = oracles.plain(model.codec.template().prefix)
        for chunk in chunks:
            rows += oracles.encode(model, chunk.parts, "\n")
        rows += fresh_end(engine, QUESTION, answer)
        expected = oracles.full_prefill(model, rows)[-STEPS:]
        assert (logits - expected).abs().max() < TOLERANCE, selector
        assert answer.report.recomputed == 1


@pytest.mark.parametrize("mode", ["document", "isolated", "bare"])
@pytest.mark.parametrize("selector", ["none", "first_k:2", "epic:3"])
@pytest.mark.parametrize("order", ORDERS)
def test_reuse_is_the_two_copies_oracle(
    model, shelf, make_engine, monkeypatch, mode, selector, order
):
    engine = make_engine(model, mode=mode)
    engine.compile(shelf)
    chunks = [shelf[d].chunks[c] for d, c in ORDERS[order]]
    answer, logits = run(engine, QUESTION, chunks, selector, monkeypatch)

    prompt = [oracles.plain(model.codec.template().prefix)]
    for d, c in ORDERS[order]:
        own = oracles.encode(model, shelf[d].chunks[c].parts, "\n")
        behind = compiled_behind(engine, shelf[d], c, mode)
        prompt.append(Reused(behind, own, chosen(own, selector)))
    prompt.append(fresh_end(engine, QUESTION, answer))
    expected = oracles.two_copies(model, prompt)[-STEPS:]
    assert (logits - expected).abs().max() < TOLERANCE
    assert all(chunk.hit for chunk in answer.report.chunks)


@pytest.mark.parametrize("mode", ["document", "isolated", "bare"])
@pytest.mark.parametrize("selector", ["query:20%", "deviation:12"])
@pytest.mark.parametrize("order", ORDERS)
def test_scored_reuse_is_the_two_copies_oracle(
    model, shelf, make_engine, monkeypatch, mode, selector, order
):
    """Scores, the tokens that they choose and what comes of these, from eager passes alone."""
    engine = make_engine(model, mode=mode)
    engine.compile(shelf)
    chunks = [shelf[d].chunks[c] for d, c in ORDERS[order]]
    answer, logits = run(engine, QUESTION, chunks, selector, monkeypatch)

    prompt = [oracles.plain(model.codec.template().prefix)]
    for d, c in ORDERS[order]:
        own = oracles.encode(model, shelf[d].chunks[c].parts, "\n")
        prompt.append(Reused(compiled_behind(engine, shelf[d], c, mode), own, [False] * len(own)))
    asked = [*oracles.encode(model, [QUESTION]), *oracles.plain(model.codec.template().suffix)]
    rule = oracles.question_scores if selector.startswith("query") else oracles.key_deviations
    scores = rule(model, [*prompt, asked])
    left_alone = set()
    if mode == "document":
        places = ORDERS[order]
        left_alone = {n for n, (d, c) in enumerate(places) if c and (d, c - 1) not in places[:n]}
    number = selector.partition(":")[2]
    total = sum(map(len, scores))
    budget = round(int(number[:-1]) / 100 * total) if number[-1] == "%" else int(number)
    ranked = sorted(
        (
            (-float(score), n, m)
            for n, some in enumerate(scores)
            for m, score in enumerate(some)
            if n not in left_alone
        ),
    )
    for _, n, m in ranked[:budget]:
        prompt[1 + n].chosen[m] = True
    prompt.append(fresh_end(engine, QUESTION, answer))
    expected = oracles.two_copies(model, prompt)[-STEPS:]
    assert (logits - expected).abs().max() < TOLERANCE
    assert answer.report.recomputed_tokens == len(ranked[:budget])
    assert (answer.report.scored > 0) == bool(ranked[:budget])


def test_random_choice_keeps_its_budget_and_repeats(model, shelf, make_engine, monkeypatch):
    engine = make_engine(model)
    engine.compile(shelf)
    chunks = [chunk for document in shelf for chunk in document.chunks]
    runs = [run(engine, QUESTION, chunks, "random:25%", monkeypatch) for _ in range(2)]
    assert torch.equal(runs[0][1], runs[1][1])
    report = runs[0][0].report
    assert report.recomputed_tokens == round(0.25 * report.chunk_tokens)
    other, _ = run(engine, "why?", chunks, "random:25%", monkeypatch)
    assert [c.recomputed for c in other.report.chunks] != [c.recomputed for c in report.chunks]


@pytest.mark.parametrize("selector", ["none", "full", "query:20%"])
def test_scoring_an_answer_is_stepping_through_it(model, shelf, make_engine, monkeypatch, selector):
    engine = make_engine(model)
    engine.compile(shelf)
    chunks = [shelf[1].chunks[1], shelf[0].chunks[2]]
    answer, logits = run(engine, QUESTION, chunks, selector, monkeypatch)
    scored, report = engine.score(QUESTION, chunks, answer.ids, selector)
    assert (scored - logits.log_softmax(-1)).abs().max() < TOLERANCE
    assert report.recomputed_tokens == answer.report.recomputed_tokens
    one, _ = engine.score(QUESTION, chunks, answer.ids[:1], selector)
    assert (one - scored[:1]).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match="empty"):
        engine.score(QUESTION, chunks, (), selector)


def chosen(own, selector):
    """The rule of each selector, written from its definition."""
    name, _, k = selector.partition(":")
    if name == "none":
        return [False] * len(own)
    if name == "epic":
        return [n < int(k) for n in range(len(own))]
    return [row is None or n < int(k) for _, row, _, n in own]


@pytest.mark.parametrize("mode", ["document", "isolated"])
def test_warm_up_context(model, shelf, make_engine, monkeypatch, mode):
    warmup = [Chunk.of("Some passage that is in no prompt."), Chunk.of("And another.")]
    engine = make_engine(model, mode=mode, warmup=warmup)
    engine.compile(shelf)
    answer, logits = run(engine, QUESTION, [shelf[1].chunks[1]], "none", monkeypatch)
    behind = compiled_behind(engine, shelf[1], 1, mode)
    start = len(model.codec.template().prefix)
    passages = [row for c in warmup for row in oracles.encode(model, c.parts, "\n")]
    own = oracles.encode(model, shelf[1].chunks[1].parts, "\n")
    prompt = [
        oracles.plain(model.codec.template().prefix),
        Reused(behind[:start] + passages + behind[start:], own, [False] * len(own)),
        fresh_end(engine, QUESTION, answer),
    ]
    expected = oracles.two_copies(model, prompt)[-STEPS:]
    assert (logits - expected).abs().max() < TOLERANCE


def test_missing_chunk_is_computed_in_place(model, shelf, make_engine, monkeypatch):
    engine = make_engine(model)
    engine.compile(shelf)
    order = [(1, 1), (0, 2), (2, 0)]
    chunks = [shelf[d].chunks[c] for d, c in order]
    assert engine.store.dynamic.delete([key(engine, chunks[1])])
    answer, logits = run(engine, QUESTION, chunks, "none", monkeypatch)
    prompt = [oracles.plain(model.codec.template().prefix)]
    for n, (d, c) in enumerate(order):
        own = oracles.encode(model, chunks[n].parts, "\n")
        behind = compiled_behind(engine, shelf[d], c, "document")
        prompt.append(Reused(behind, own, [n == 1] * len(own)))
    prompt.append(fresh_end(engine, QUESTION, answer))
    expected = oracles.two_copies(model, prompt)[-STEPS:]
    assert (logits - expected).abs().max() < TOLERANCE
    hits = [(c.hit, c.miss) for c in answer.report.chunks]
    assert hits == [("document", ""), ("", "not compiled"), ("document", "")]
    assert answer.report.recomputed_tokens == len(prompt[2].own)


def test_full_recompute_oracles_agree(model, shelf):
    """The two oracles share little: where they must coincide, they do."""
    parts = [shelf[1].chunks[0].parts, shelf[0].chunks[2].parts]
    rows = [oracles.encode(model, p, "\n") for p in parts]
    prompt = [Reused(rows[1], rows[0], [True] * len(rows[0])), rows[1]]
    copies = oracles.two_copies(model, prompt)
    full = oracles.full_prefill(model, rows[0] + rows[1])
    assert (copies - full).abs().max() < TOLERANCE


def test_first_k_on_a_known_segment(vision_model):
    small, large = picture((56, 28), "red"), picture((56, 84), "blue")
    segment = vision_model.segments([["see", small, large]])[0]
    piece = Piece(segment, layer=lambda n: None)
    (rows,) = Selector.parse("first_k:1").choose(vision_model, None, [piece]).rows
    assert rows[segment.images == 0].all()
    assert rows[segment.images > 0].sum() == 2

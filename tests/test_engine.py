"""Requests, conversations and faults."""

import threading

import oracles
import pytest
import torch
from helpers import key, value_file
from oracles import Reused
from test_exactness import TOLERANCE, compiled_behind, run
from tiny import picture

from mpic_rag import Chunk, Document, Picture, Sampling

QUESTION = "who keeps amber?"


@pytest.fixture
def engine(text_model, make_engine):
    return make_engine(text_model)


@pytest.fixture
def page(engine):
    document = Document.of("amber", [["amber station."], ["its keeper is maria."], ["x"]])
    engine.compile([document])
    return document


def conversation_logits(engine, turns, selector, monkeypatch, steps=3):
    """Run turns (question, chunks) of fixed length; returns the last turn's logits and answers."""
    seen, answers = [], []
    logits = engine.model.logits
    conversation = engine.conversation()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "stop_ids", frozenset())
        patch.setattr(engine.model, "logits", lambda h: seen.append(logits(h)) or seen[-1])
        for question, chunks in turns:
            seen.clear()
            answers.append(conversation.ask(question, chunks, selector=selector, max_tokens=steps))
    return torch.cat(seen), answers


@pytest.mark.parametrize("selector", ["full", "none"])
def test_second_turn_extends_the_first(model, shelf, make_engine, monkeypatch, selector):
    engine = make_engine(model)
    engine.compile(shelf)
    turns = [
        ("and who?", [(0, 1), (2, 0)]),
        ("why?", [(1, 1), (0, 2)]),
        ("what else?", []),
    ]
    asked = [(q, [shelf[d].chunks[c] for d, c in order]) for q, order in turns]
    logits, answers = conversation_logits(engine, asked, selector, monkeypatch)
    template = model.codec.template()
    prompt = [oracles.plain(template.prefix)]
    for n, (question, order) in enumerate(turns):
        if n:
            prompt.append(oracles.plain(template.between))
        for d, c in order:
            own = oracles.encode(model, shelf[d].chunks[c].parts, "\n")
            behind = compiled_behind(engine, shelf[d], c, "document")
            prompt.append(Reused(behind, own, [selector == "full"] * len(own)))
        prompt.append(oracles.encode(model, [question]) + oracles.plain(template.suffix))
        prompt.append(oracles.plain(answers[n].ids))
    prompt[-1] = prompt[-1][:-1]
    if selector == "full":
        rows = [r for item in prompt for r in (item.own if isinstance(item, Reused) else item)]
        expected = oracles.full_prefill(model, rows)
    else:
        expected = oracles.two_copies(model, prompt)
    assert (logits - expected[-len(logits) :]).abs().max() < TOLERANCE
    assert answers[2].report.chunk_tokens == 0
    assert answers[2].report.cached_tokens > answers[1].report.chunk_tokens


def test_interleaved_streams_are_independent(engine, page):
    asks = [(QUESTION, page.chunks), ("what is x?", page.chunks[:1])]
    alone = [list(engine.conversation().stream(*ask, max_tokens=12)) for ask in asks]
    streams = [engine.conversation().stream(*ask, max_tokens=12) for ask in asks]
    mixed = [[], []]
    iterators = [iter(stream) for stream in streams]
    live = [0, 1]
    while live:
        for n in list(live):
            try:
                mixed[n].append(next(iterators[n]))
            except StopIteration:
                live.remove(n)
    assert mixed == alone


def test_threads_share_an_engine_while_it_compiles(engine, page):
    expected = engine.ask(QUESTION, page.chunks, max_tokens=8).text
    found = []

    def work():
        found.append(engine.ask(QUESTION, page.chunks, max_tokens=8).text)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    others = [Document.of(f"d{n}", [[f"another text {n}"], ["more"]]) for n in range(5)]
    engine.compile(others)
    for thread in threads:
        thread.join()
    assert found == [expected] * 3
    again = engine.ask("?", [others[4].chunks[1]], max_tokens=4)
    engine.store.dynamic.delete([key(engine, others[4].chunks[1])])
    engine.compile(others)
    assert engine.ask("?", [others[4].chunks[1]], max_tokens=4).ids == again.ids


def test_stopping_early_keeps_the_conversation_exact(engine, page, monkeypatch):
    monkeypatch.setattr(engine.model, "stop_ids", frozenset())
    conversation = engine.conversation()
    stream = conversation.stream(QUESTION, page.chunks, selector="full", max_tokens=50)
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    said = list(conversation.answer)
    second = conversation.ask("why?", selector="full", max_tokens=1)
    template = engine.model.codec.template()
    rows = oracles.plain(template.prefix)
    for chunk in page.chunks:
        rows += oracles.encode(engine.model, chunk.parts, "\n")
    rows += oracles.encode(engine.model, [QUESTION]) + oracles.plain(template.suffix)
    rows += oracles.plain(said) + oracles.plain(template.between)
    rows += oracles.encode(engine.model, ["why?"]) + oracles.plain(template.suffix)
    assert second.ids == (int(oracles.full_prefill(engine.model, rows)[-1].argmax()),)


def test_one_answer_at_a_time_in_a_conversation(engine, page):
    conversation = engine.conversation()
    stream = iter(conversation.stream(QUESTION, page.chunks, max_tokens=9))
    next(stream)
    with pytest.raises(RuntimeError, match="still being streamed"):
        conversation.ask("why?")
    list(stream)
    assert conversation.ask("why?", max_tokens=2).ids


def test_equal_content_hits_under_any_name(engine, page):
    copy = Document.of("another name", [c.parts for c in page.chunks])
    report = engine.ask(QUESTION, copy.chunks, max_tokens=1).report
    assert [c.hit for c in report.chunks] == ["document"] * 3
    assert engine.compile([copy]) == 0


def test_changed_content_and_changed_context_miss(engine, page):
    changed = Document.of("amber", [["amber  station."], ["its keeper is maria."], ["x"]])
    report = engine.ask(QUESTION, changed.chunks, max_tokens=1).report
    assert [bool(c.miss) for c in report.chunks] == [True, True, True]


def test_another_system_prompt_and_a_second_turn_still_hit(engine, page):
    conversation = engine.conversation("You are a pirate.")
    for question in (QUESTION, "and then?"):
        report = conversation.ask(question, page.chunks, max_tokens=2).report
        assert [c.hit for c in report.chunks] == ["document"] * 3
        assert report.recomputed == 0


def test_keys_cover_what_the_kv_depends_on(text_model, make_engine, page):
    chunk = page.chunks[1]
    engines = [
        make_engine(text_model),
        make_engine(text_model, mode="isolated"),
        make_engine(text_model, mode="bare"),
        make_engine(text_model, warmup=[Chunk.of("warm")]),
        make_engine(text_model, mode="isolated", warmup=[Chunk.of("warm")]),
    ]
    keys = [key(e, chunk) for e in engines]
    assert len(set(keys)) == len(keys)
    first = page.chunks[0]
    assert key(engines[0], first) == key(engines[1], first)


def test_fingerprint_follows_the_weights(text_model):
    from tiny import tiny

    one, two = tiny("llama"), tiny("llama")
    assert one.fingerprint == two.fingerprint == text_model.fingerprint
    with torch.no_grad():
        next(two.network.parameters())[0, 0] += 1e-3
    del two.fingerprint
    assert one.fingerprint != two.fingerprint
    assert tiny("llama", torch.bfloat16).fingerprint != one.fingerprint


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "delete"])
def test_damaged_entries_are_computed_and_replaced(engine, page, damage, monkeypatch):
    chunk = page.chunks[1]
    path = value_file(engine.store.dynamic, key(engine, chunk))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[-3] ^= 4
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    answer, logits = run(engine, QUESTION, [chunk], "none", monkeypatch)
    assert answer.report.chunks[0].miss
    assert answer.report.recomputed == 1
    _, full = run(engine, QUESTION, [chunk], "full", monkeypatch)
    assert (logits - full).abs().max() < TOLERANCE
    engine.drain()
    again = engine.ask(QUESTION, [chunk], max_tokens=1).report.chunks[0]
    assert (again.hit, again.recomputed) == ("isolated", 0)
    assert engine.compile([page]) == 1
    assert engine.ask(QUESTION, [chunk], max_tokens=1).report.chunks[0].hit == "document"


def test_compiling_resumes_where_it_stopped(engine, page):
    longer = Document.of("amber", [c.parts for c in page.chunks] + [("one more",)])
    assert engine.compile([longer]) == 1
    engine.store.dynamic.delete([key(engine, longer.chunks[1])])
    assert engine.compile([longer]) == 1
    assert engine.compile([longer]) == 0


@pytest.mark.parametrize("question", ["", "  \n", [], ["", " "]])
def test_an_empty_question(engine, question):
    with pytest.raises(ValueError, match="empty"):
        engine.ask(question)


def test_bad_arguments(engine, make_engine, text_model):
    for selector in ("best", "epic:0", "epic:x", "none:3", "query:0%", "random:101%", ""):
        with pytest.raises(ValueError, match=r"selector|number|choose|share"):
            engine.ask("q", selector=selector or "?")
    with pytest.raises(ValueError, match="max_tokens"):
        engine.ask("q", max_tokens=0)
    with pytest.raises(ValueError, match="mode"):
        make_engine(text_model, mode="fast")
    with pytest.raises(ValueError, match="empty"):
        Chunk.of("  ")
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature=-1)


def test_a_prompt_that_is_too_long_leaves_the_conversation_usable(engine, page):
    conversation = engine.conversation()
    first = conversation.ask(QUESTION, page.chunks, max_tokens=4)
    with pytest.raises(ValueError, match="retrieve fewer"):
        conversation.ask("x " * 3000)
    second = conversation.ask("why?", max_tokens=4)
    fresh = engine.conversation()
    assert fresh.ask(QUESTION, page.chunks, max_tokens=4).ids == first.ids
    assert fresh.ask("why?", max_tokens=4).ids == second.ids


def test_a_failed_pass_leaves_the_conversation_usable(engine, page, monkeypatch):
    conversation = engine.conversation()
    conversation.ask(QUESTION, page.chunks, max_tokens=4)
    length = conversation.cache.length
    conversation.cache = conversation.cache.grown(2000)  # so that the next turn writes in place
    forward = engine.model.forward

    def fail(*args):
        forward(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", fail)
        with pytest.raises(MemoryError):
            conversation.ask("why?", page.chunks, max_tokens=4)
    assert conversation.cache.length == length
    fresh = engine.conversation()
    fresh.ask(QUESTION, page.chunks, max_tokens=4)
    again = conversation.ask("why?", max_tokens=4)
    assert again.ids == fresh.ask("why?", max_tokens=4).ids


def test_an_interrupted_step_leaves_the_conversation_usable(engine, page, monkeypatch):
    monkeypatch.setattr(engine.model, "stop_ids", frozenset())
    conversation, other = engine.conversation(), engine.conversation()
    forward, calls = engine.model.forward, []

    def interrupt(*args):
        calls.append(args)
        hidden = forward(*args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask(QUESTION, page.chunks, max_tokens=9)
    stream = other.stream(QUESTION, page.chunks, max_tokens=len(conversation.answer))
    assert list(stream)
    assert other.answer == conversation.answer
    assert conversation.ask("why?", max_tokens=5).ids == other.ask("why?", max_tokens=5).ids


def test_background_work_is_done_once_and_its_errors_are_kept(engine, page, monkeypatch):
    engine.store.dynamic.delete([key(engine, page.chunks[1])])
    compiled = []
    compile_ = engine.compiler.compile
    monkeypatch.setattr(
        engine.compiler, "compile", lambda chunks: compiled.append(chunks) or compile_(chunks)
    )
    with engine.model.lock:  # nothing is compiled before all have asked
        engine.compile_later([page.chunks[1]] * 3)
        engine.compile_later([page.chunks[1]])
    engine.drain()
    assert len(compiled) == 1

    def fail(chunks):
        raise OSError("disk full")

    monkeypatch.setattr(engine.compiler, "compile", fail)
    engine.compile_later([page.chunks[2]])
    engine.ask("q", max_tokens=1)
    with pytest.raises(OSError, match="disk full"):
        engine.drain()


def test_a_document_longer_than_the_model(engine):
    with pytest.raises(ValueError, match="split the document"):
        engine.compile([Document.of("long", [["word " * 1000]])])


def test_the_questions_own_picture(vision_model, make_engine, monkeypatch):
    engine = make_engine(vision_model)
    own = picture((56, 56), "green")
    answer, logits = run(engine, [own, "what is this?"], [], "none", monkeypatch)
    template = vision_model.codec.template()
    rows = oracles.plain(template.prefix)
    rows += oracles.encode(vision_model, [own, "what is this?"])
    rows += oracles.plain(template.suffix) + oracles.plain(answer.ids[:-1])
    expected = oracles.full_prefill(vision_model, rows)[-len(logits) :]
    assert (logits - expected).abs().max() < TOLERANCE


def test_pictures_for_a_text_model(engine):
    with pytest.raises(ValueError, match="texts only"):
        engine.ask("q", [Chunk.of(picture((56, 56), "red"))])


def test_extreme_pictures(vision_model, make_engine):
    engine = make_engine(vision_model)
    wide = engine.ask("q", [Chunk.of(picture((20_000, 300), "red"))], max_tokens=1)
    assert 0 < wide.report.chunk_tokens < 60
    with pytest.raises(ValueError, match="can't take the picture thin"):
        engine.ask("q", [Chunk.of(picture((20_000, 20), "red", "thin"))])
    assert engine.ask("q", [Chunk.of(picture((1, 1), "red"))], max_tokens=1).report.chunk_tokens
    with pytest.raises(ValueError, match="not a picture"):
        engine.ask("q", [Chunk.of(Picture(b"rubbish"))])


def test_sampling_is_repeatable_and_follows_its_limits(engine, page):
    def draw(**kwargs):
        return engine.ask(QUESTION, page.chunks, max_tokens=12, sampling=Sampling(**kwargs)).ids

    greedy = draw()
    assert draw(temperature=2.0, seed=3) == draw(temperature=2.0, seed=3)
    assert draw(temperature=2.0, seed=3) != draw(temperature=2.0, seed=4)
    assert draw(temperature=2.0, top_k=1) == greedy
    assert draw(temperature=2.0, top_p=1e-6) == greedy


def test_report_adds_up(engine, page):
    report = engine.ask(QUESTION, page.chunks, selector="epic:2", max_tokens=5).report
    assert report.chunk_tokens == report.reused_tokens + report.recomputed_tokens
    assert report.recomputed_tokens == 2 * 3
    prefix = len(engine.model.codec.template().prefix)
    assert report.cached_tokens == prefix
    assert report.context_tokens == prefix + report.chunk_tokens + report.fresh_tokens
    assert 0 < sum(report.seconds.values()) <= report.ttft_s
    assert report.bytes_read > 0

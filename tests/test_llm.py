"""The LLM as LlamaIndex uses it."""

import asyncio
import base64
from itertools import pairwise
from typing import ClassVar

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ToolCallBlock,
    VideoBlock,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from tiny import picture

from mpic_rag import Document
from mpic_rag.catalog import Catalog
from mpic_rag.llm import LinkedLLM

LONG = "the harbour of amber has three piers, and ships call on mondays."


@pytest.fixture
def engine(vision_model, make_engine):
    return make_engine(vision_model)


@pytest.fixture
def page(engine):
    page = Document.of(
        "amber", [[LONG], [picture((56, 28), "red")], ["its keeper is maria, so they say"]]
    )
    engine.compile([page])
    return page


@pytest.fixture
def llm(engine, page):
    return LinkedLLM(engine, Catalog([page]), max_tokens=6)


def user(*blocks):
    shown = [TextBlock(text=b) if isinstance(b, str) else b for b in blocks]
    return ChatMessage(role="user", blocks=shown)


def said(text):
    return ChatMessage(role="assistant", content=text)


def image(part):
    return ImageBlock(image=part.data)


def test_it_is_a_chat_llm_of_llama_index(llm):
    assert BaseLLM in LinkedLLM.__mro__
    assert llm.metadata.is_chat_model
    assert llm.metadata.context_window == llm.engine.model.max_tokens
    assert llm.metadata.num_output == 6
    assert "multi" in LinkedLLM.class_name()
    assert "engine" not in str(llm.to_payload())


def test_all_eight_methods_say_the_same(llm):
    async def awaited():
        streamed = [r async for r in await llm.astream_chat([user("who?")])]
        completed = [r async for r in await llm.astream_complete("who?")]
        return [
            (await llm.achat([user("who?")])).message.content,
            "".join(r.delta for r in streamed),
            (await llm.acomplete("who?")).text,
            "".join(r.delta for r in completed),
        ]

    answers = [
        llm.chat([user("who?")]).message.content,
        "".join(r.delta for r in llm.stream_chat([user("who?")])),
        llm.complete("who?").text,
        "".join(r.delta for r in llm.stream_complete("who?")),
        *asyncio.run(awaited()),
    ]
    assert answers[0]
    assert set(answers) == {answers[0]}


def test_a_stream_grows_and_ends_with_its_report(llm):
    *pieces, last = llm.stream_chat([user("who?")])
    for before, after in pairwise(pieces):
        assert after.message.content == before.message.content + after.delta
    assert last.delta == ""
    assert last.raw["usage"]["completion_tokens"] == 6
    assert last.raw["usage"]["prompt_tokens"] == last.additional_kwargs["prompt_tokens"]
    assert last.raw["ttft_s"] > 0


def test_blocks_are_linked_in_their_order(llm, page, engine):
    order = [1, 2, 0]
    blocks = ["see", *(page.chunks[n].parts[0] for n in order), "why?"]
    response = llm.chat([user(*(b if isinstance(b, str) else image(b) for b in blocks))])
    content = ["see", *(page.chunks[n] for n in order), "why?"]
    expected = engine.conversation().ask(content, max_tokens=6)
    assert response.message.content == expected.text
    chunks = response.raw["chunks"]
    assert [c["source"] for c in chunks] == [page.chunks[n].source for n in order]
    assert all(c["hit"] == "document" and c["recomputed"] == 0 for c in chunks)
    assert [c["slot"] for c in chunks] == sorted(c["slot"] for c in chunks)


def test_joined_texts_hit_in_every_role(llm, page):
    joined = f"Context:\n\n{LONG} its keeper is maria, so they say\n\nAnswer."
    for messages in (
        [user(joined)],
        [ChatMessage(role="system", content=joined), user("who?")],
        [user(joined), said("she"), user("why?")],
    ):
        raw = llm.chat(messages).raw
        assert [c["hit"] for c in raw["chunks"]] == ["document", "document"]
        assert raw["recomputed_tokens"] == 0


def test_the_next_turn_stands_on_the_last(llm):
    first = user(LONG, "who?")
    answer = llm.chat([first]).message.content
    again = [first, said(answer.strip()), user("why?")]
    raw = llm.chat(again).raw
    total = raw["usage"]["prompt_tokens"]
    assert raw["cached_tokens"] > total / 2
    replayed = LinkedLLM(llm.engine, llm.catalog, max_tokens=6).chat(again)
    assert replayed.raw["cached_tokens"] < raw["cached_tokens"]
    # The same question after another answer is another conversation.
    other = llm.chat([first, said("nobody"), user("why?")])
    assert other.raw["cached_tokens"] < raw["cached_tokens"]


def test_an_earlier_turn_that_is_not_cached_is_replayed_exactly(llm, engine):
    turns = [user(LONG, "who?"), said("maria"), user("why?")]
    response = llm.chat(turns)
    from mpic_rag.conversation import Turn

    chunk = llm.catalog.find([LONG])[0]
    earlier = Turn([chunk, "who?"], "maria")
    expected = engine.conversation(None, [earlier]).ask("why?", max_tokens=6)
    assert response.message.content == expected.text


def test_two_streams_side_by_side(llm):
    asks = [[user(LONG, "who?")], [user("why is that?")]]
    alone = [[r.delta for r in llm.stream_chat(ask)] for ask in asks]
    one, two = (llm.stream_chat(ask) for ask in asks)
    mixed = [[], []]
    for a, b in zip(one, two, strict=False):
        mixed[0].append(a.delta)
        mixed[1].append(b.delta)
    for n in (0, 1):
        assert mixed[n] == alone[n][: len(mixed[n])]


def test_eight_requests_at_once(llm):
    async def ask():
        return await asyncio.gather(*(llm.achat([user(LONG, f"who, {n}?")]) for n in range(8)))

    together = [r.message.content for r in asyncio.run(ask())]
    assert together == [llm.chat([user(LONG, f"who, {n}?")]).message.content for n in range(8)]


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (AudioBlock(audio=b"RIFF0000WAVE"), "audio"),
        (VideoBlock(video=b"0000ftypmp42"), "video"),
        (DocumentBlock(data=b"%PDF-1.4"), "document"),
        (ToolCallBlock(tool_name="t", tool_kwargs={}), "tool_call"),
    ],
)
def test_other_blocks_are_refused_in_words(llm, block, word):
    with pytest.raises(ValueError, match=f"a {word} block can't be shown"):
        llm.chat([user(block, "what?")])


def test_hints_and_citable_blocks(llm, page):
    point = CachePoint(cache_control={"type": "ephemeral"})
    cited = CitableBlock(title="amber", source="guide", content=[TextBlock(text=LONG)])
    raw = llm.chat([user(cited, point, "who?")]).raw
    assert [c["hit"] for c in raw["chunks"]] == ["document"]


def test_pictures_come_from_bytes_files_and_data_urls_but_not_from_the_web(llm, page, tmp_path):
    red = page.chunks[1].parts[0]
    path = tmp_path / "red.png"
    path.write_bytes(red.data)
    url = "data:image/png;base64," + base64.b64encode(red.data).decode()
    answers = set()
    for block in (image(red), ImageBlock(path=path), ImageBlock(url=url)):
        response = llm.chat([user(block, "what?")])
        assert [c["hit"] for c in response.raw["chunks"]] == ["document"]
        answers.add(response.message.content)
    assert len(answers) == 1
    with pytest.raises(ValueError, match="fetch_pictures=True"):
        llm.chat([user(ImageBlock(url="https://example.invalid/a.png"), "what?")])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no question"),
        ([user("hi"), said("yes")], "last message must be the user's"),
        ([user("hi"), ChatMessage(role="tool", content="42")], "ReAct agent"),
        ([user(" ")], "question is empty"),
    ],
)
def test_messages_that_make_no_sense(llm, messages, words):
    with pytest.raises(ValueError, match=words):
        llm.chat(messages)


def test_options(llm):
    assert llm.chat([user("who?")], max_tokens=1).raw["usage"]["completion_tokens"] == 1
    draws = {llm.chat([user("who?")], temperature=5.0, seed=n).message.content for n in range(5)}
    assert len(draws) > 1
    with pytest.raises(ValueError, match="no option nope"):
        llm.chat([user("who?")], nope=1)


def test_events_tell_of_each_call(llm):
    class Names(BaseEventHandler):
        names: ClassVar[list] = []

        @classmethod
        def class_name(cls):
            return "Names"

        def handle(self, event, **kwargs):
            self.names.append(event.class_name())

    handler, dispatcher = Names(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        llm.chat([user("who?")])
        list(llm.stream_chat([user("who?")]))
    finally:
        dispatcher.event_handlers.remove(handler)
    assert handler.names.count("LLMChatStartEvent") == 2
    assert handler.names.count("LLMChatEndEvent") == 2
    assert "LLMChatInProgressEvent" in handler.names

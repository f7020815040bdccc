"""LlamaIndex's chat messages as system prompt, earlier turns and a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
)

from mpic_rag.catalog import Catalog
from mpic_rag.conversation import Turn
from mpic_rag.documents import Chunk, Content, Part, Picture

CHUNKS = (
    "mpic_rag_chunks"  # in a message's `additional_kwargs`: block number to (context, document)
)
_SYSTEM = {MessageRole.SYSTEM, MessageRole.DEVELOPER}
_ANSWER = {MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL}


class Chat(NamedTuple):
    """A request, as the engine takes it."""

    system: Content
    turns: tuple[Turn, ...]
    question: Content


def read(messages: Sequence[ChatMessage], catalog: Catalog, fetch: bool = False) -> Chat:
    """Sort messages into a chat, known contents into chunks.

    Raises `ValueError` for what can't be shown to the model, and for pictures on the web unless
    `fetch`.
    """
    system: list[Part | Chunk] = []
    turns: list[Turn] = []
    user: list[Part | Chunk] = []
    for message in messages:
        content = _content(message, catalog, fetch)
        if message.role in _SYSTEM and not user and not turns:
            system += _apart(system, content)
        elif message.role in _SYSTEM or message.role is MessageRole.USER:
            user += _apart(user, content)
        elif message.role in _ANSWER:
            if not all(isinstance(item, str) for item in content):
                raise ValueError("an earlier answer holds a picture; answers are texts")
            turns.append(Turn(tuple(user), "".join(map(str, content))))
            user = []
        else:
            raise ValueError(
                f"a message of role {message.role.value!r} needs a model that calls functions;"
                " this one doesn't: use a ReAct agent, which asks for tools in plain text"
            )
    if not user and not turns:
        system, user = [], system
    if not user:
        raise ValueError("there is no question: the last message must be the user's")
    return Chat(tuple(system), tuple(turns), tuple(user))


def _content(message: ChatMessage, catalog: Catalog, fetch: bool) -> list[Part | Chunk]:
    chunks = message.additional_kwargs.get(CHUNKS, {})
    found: list[Part | Chunk] = []
    for number, block in enumerate(flat(message.blocks)):
        shown = part(block, fetch)
        if shown == "":
            continue
        if number in chunks:
            context, document, source = chunks[number]
            found.append(Chunk((shown,), source, context, document))
        else:
            last = next((item for item in found[::-1] if isinstance(item, Chunk)), None)
            before = last.following if last else None
            found += _apart(found, catalog.find([shown], before=before))
    return found


def _apart(before: Sequence[Part | Chunk], after: Sequence[Part | Chunk]) -> list[Part | Chunk]:
    """What follows a text and is one needs a line of its own."""
    both = before and after and isinstance(before[-1], str) and isinstance(after[0], str)
    return ["\n", *after] if both else [*after]


def flat(blocks: Iterable[object]) -> Iterator[object]:
    """Blocks, those inside citable ones too, without hints about caching."""
    for block in blocks:
        if isinstance(block, CitableBlock):
            yield from flat(block.content)
        elif not isinstance(block, CachePoint):
            yield block


def part(block: object, fetch: bool = False) -> Part:
    """A block's text or picture; raises `ValueError` for blocks of other kinds."""
    if isinstance(block, TextBlock):
        return block.text
    if not isinstance(block, ImageBlock):
        kind = getattr(block, "block_type", type(block).__name__)
        raise ValueError(f"a {kind} block can't be shown to this model: texts and pictures only")
    there = block.image or block.path or str(block.url or "data:").startswith("data:")
    if not there and not fetch:
        raise ValueError(
            f"the picture {block.url} is on the web, and nothing is fetched unasked:"
            " download it, or set fetch_pictures=True"
        )
    name = str(block.path.name if block.path else "picture")
    try:
        data = block.resolve_image().read()
    except (OSError, ValueError) as error:
        raise ValueError(f"can't read the picture {name}: {error}") from error
    return Picture(data, name)

"""LlamaIndex's LLM over linked caches: what was compiled is found in whatever messages hold it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import BaseNode

from mpic_rag.catalog import Catalog
from mpic_rag.conversation import Conversation, Turn
from mpic_rag.documents import Chunk, Content, Part
from mpic_rag.engine import Engine
from mpic_rag.messages import Chat, flat, part, read
from mpic_rag.model import BUNDLED, Model
from mpic_rag.nodes import documents
from mpic_rag.report import Report
from mpic_rag.sampling import Sampling
from mpic_rag.store import Store

_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_KEPT = 4  # conversations whose caches wait for their next turn


class LinkedLLM(LLM):
    """A chat model that links precompiled caches into its prompts.

    Texts and pictures that `compile` (or an index) made known are found in the messages by their
    bytes, wherever they stand; everything else is computed as usual.
    """

    max_tokens: int = Field(default=256, description="Tokens of an answer, at most.", gt=0)
    temperature: float = Field(default=0.0, ge=0.0, description="0 takes the likeliest token.")
    fetch_pictures: bool = Field(default=False, description="Download pictures on the web.")
    model_name: str = Field(default="mpic_rag", description="For logs.")

    _engine: Engine = PrivateAttr()
    _catalog: Catalog = PrivateAttr()
    _conversations: dict[tuple[object, ...], Conversation] = PrivateAttr()
    _lock: Any = PrivateAttr()

    def __init__(self, engine: Engine, catalog: Catalog | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._engine = engine
        self._catalog = catalog if catalog is not None else Catalog()
        self._conversations = {}
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, model: str | Path = BUNDLED, store: str | Path = "caches", **kwargs: Any
    ) -> LinkedLLM:
        """Load a model folder, a .gguf file or a hub name, with a folder for its caches."""
        return cls(Engine(Model.load(model), Store(store)), model_name=str(model), **kwargs)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex looks for "multi" in the names of models that take pictures."""
        return "mpic_rag_multi_modal_llm"

    @property
    def engine(self) -> Engine:
        """What answers."""
        return self._engine

    @property
    def catalog(self) -> Catalog:
        """What is known to be compiled."""
        return self._catalog

    @property
    def metadata(self) -> LLMMetadata:
        """The true context window, which prompts are packed by."""
        return LLMMetadata(
            context_window=self._engine.model.max_tokens,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self.model_name,
        )

    def compile(self, nodes: Iterable[BaseNode]) -> int:
        """Compile nodes, each in its document's context; returns how many chunks were new."""
        made = list(documents(nodes, self._engine.room, self._engine.model.count))
        self._catalog.add(made)
        return self._engine.compile(made)

    def count(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of messages, without what the chat template puts between them."""
        model = self._engine.model
        shown = (part(block, self.fetch_pictures) for m in messages for block in flat(m.blocks))
        return sum(model.count(p) + 1 for p in shown if p)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer in one go; `kwargs` are max_tokens, selector, and how to sample."""
        return list(self._answer(messages, kwargs))[-1]

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer piece by piece; the last response, with an empty delta, has usage and times."""

        def pieces() -> ChatResponseGen:
            yield from self._answer(messages, kwargs)

        return pieces()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer in one go, in a thread."""
        return await asyncio.to_thread(lambda: list(self._answer(messages, kwargs))[-1])

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer piece by piece, each in a thread."""
        answer = self._answer(messages, kwargs)

        async def pieces() -> ChatResponseAsyncGen:
            while (piece := await asyncio.to_thread(next, answer, None)) is not None:
                yield piece

        return pieces()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt as a user's message."""
        return chat_to_completion_decorator(self.chat)(prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer a prompt as a user's message, piece by piece."""
        return stream_chat_to_completion_decorator(self.stream_chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a prompt as a user's message."""
        return await achat_to_completion_decorator(self.achat)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt as a user's message, piece by piece."""
        return await astream_chat_to_completion_decorator(self.astream_chat)(prompt, **kwargs)

    def _answer(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> Iterator[ChatResponse]:
        unknown = set(kwargs) - {*_SAMPLING, "max_tokens", "selector"}
        if unknown:
            raise ValueError(f"there is no option {', '.join(sorted(unknown))}")
        options = {name: kwargs[name] for name in _SAMPLING if name in kwargs}
        sampling = Sampling(**{"temperature": self.temperature, **options})
        chat = read(messages, self._catalog, self.fetch_pictures)
        conversation = self._conversation(chat)
        stream = conversation.stream(
            chat.question,
            selector=kwargs.get("selector"),
            max_tokens=kwargs.get("max_tokens", self.max_tokens),
            sampling=sampling,
        )
        text = ""
        for piece in stream:
            text += piece
            yield ChatResponse(message=_said(text), delta=piece)
        self._keep(chat, text, conversation)
        yield _last(stream.report, text, len(conversation.answer))

    def _conversation(self, chat: Chat) -> Conversation:
        """The conversation that this one goes on from, else a new one."""
        with self._lock:
            found = self._conversations.pop(_name(chat.system, chat.turns), None)
        if found is not None:
            return found
        system: str | Content | None = chat.system or None
        if all(isinstance(item, str) for item in chat.system):
            system = "".join(map(str, chat.system)) or None
        return self._engine.conversation(system, chat.turns)

    def _keep(self, chat: Chat, answer: str, conversation: Conversation) -> None:
        name = _name(chat.system, [*chat.turns, Turn(chat.question, answer)])
        with self._lock:
            self._conversations[name] = conversation
            while len(self._conversations) > _KEPT:
                self._conversations.pop(next(iter(self._conversations)))


def _name(system: Content, turns: Iterable[Turn]) -> tuple[object, ...]:
    """What a conversation's cache holds, to be recognised by; answers come back trimmed."""
    marks = [(tuple(map(_mark, turn.user)), turn.answer.strip()) for turn in turns]
    return tuple(map(_mark, system)), *marks


def _mark(item: Part | Chunk) -> object:
    """A chunk is not the same with another context: it is in another state."""
    if isinstance(item, Chunk):
        return item.digest, item.context
    return item if isinstance(item, str) else item.digest


def _last(report: Report, text: str, tokens: int) -> ChatResponse:
    usage = {
        "prompt_tokens": report.context_tokens,
        "completion_tokens": tokens,
        "total_tokens": report.context_tokens + tokens,
    }
    raw = {
        "usage": usage,
        "ttft_s": report.ttft_s,
        "seconds": dict(report.seconds),
        "reused_tokens": report.reused_tokens,
        "cached_tokens": report.cached_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "fresh_tokens": report.fresh_tokens,
        "chunks": [dict(chunk.__dict__) for chunk in report.chunks],
    }
    return ChatResponse(message=_said(text), delta="", raw=raw, additional_kwargs=usage)


def _said(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)

"""LlamaIndex's chat engine over linked caches: each turn retrieves, and stands on those before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from threading import Thread
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from mpic_rag.llm import LinkedLLM
from mpic_rag.messages import CHUNKS
from mpic_rag.packing import Prompt, fate
from mpic_rag.query_engine import LinkedSynthesizer


class LinkedChatEngine(BaseChatEngine):
    """Answers each message from what it retrieves for it.

    Earlier turns stay in the prompt with their sources, so that nothing of them is computed again.
    What a turn needs again, it finds there. When the context is full, the oldest turns go.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        synthesizer: LinkedSynthesizer,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        chat_history: Sequence[ChatMessage] = (),
    ) -> None:
        self.retriever, self.synthesizer = retriever, synthesizer
        self.node_postprocessors = list(node_postprocessors)
        self.callback_manager: CallbackManager = synthesizer.callback_manager
        self._history = list(chat_history)

    @classmethod
    def from_args(
        cls,
        retriever: BaseRetriever,
        llm: LinkedLLM,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        chat_history: Sequence[ChatMessage] = (),
        **kwargs: Any,
    ) -> LinkedChatEngine:
        """Build one; `kwargs` go to `LinkedSynthesizer`."""
        return cls(retriever, LinkedSynthesizer(llm, **kwargs), node_postprocessors, chat_history)

    @property
    def chat_history(self) -> list[ChatMessage]:
        """All turns that are still in the prompt, with their sources."""
        return list(self._history)

    def reset(self) -> None:
        """Forget all turns."""
        self._history = []

    @trace_method("chat")
    def chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Answer; a `QueryBundle` may bring a picture."""
        query = self._begin(message, chat_history)
        prompt = self._prompt(query, self._postprocess(self.retriever.retrieve(query), query))
        return self._answered(prompt, self.llm.chat(self._messages(prompt)))

    @trace_method("chat")
    def stream_chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer piece by piece."""
        query = self._begin(message, chat_history)
        prompt = self._prompt(query, self._postprocess(self.retriever.retrieve(query), query))

        def pieces() -> Generator[Any, None, None]:
            text = ""
            for response in self.llm.stream_chat(self._messages(prompt)):
                text = response.message.content or ""
                yield response
            self._remember(prompt, text)

        streamed = StreamingAgentChatResponse(chat_stream=pieces(), source_nodes=prompt.shown)
        thread = Thread(target=streamed.write_response_to_history, args=(_Nothing(),), daemon=True)
        streamed.write_response_to_history_thread = thread
        thread.start()
        return streamed

    @trace_method("chat")
    async def achat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Answer; a `QueryBundle` may bring a picture."""
        query = self._begin(message, chat_history)
        prompt = self._prompt(query, await self._aretrieve(query))
        return self._answered(prompt, await self.llm.achat(self._messages(prompt)))

    @trace_method("chat")
    async def astream_chat(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer piece by piece."""
        query = self._begin(message, chat_history)
        prompt = self._prompt(query, await self._aretrieve(query))

        async def pieces() -> AsyncGenerator[Any, None]:
            text = ""
            async for response in await self.llm.astream_chat(self._messages(prompt)):
                text = response.message.content or ""
                yield response
            self._remember(prompt, text)

        streamed = StreamingAgentChatResponse(achat_stream=pieces(), source_nodes=prompt.shown)
        work = streamed.awrite_response_to_history(_Nothing())
        streamed.awrite_response_to_history_task = asyncio.create_task(work)
        return streamed

    @property
    def llm(self) -> LinkedLLM:
        """What answers."""
        return self.synthesizer.llm

    def _begin(
        self, message: str | QueryBundle, chat_history: list[ChatMessage] | None
    ) -> QueryBundle:
        if chat_history is not None:
            self._history = list(chat_history)
        return QueryBundle(message) if isinstance(message, str) else message

    def _postprocess(self, nodes: list[NodeWithScore], query: QueryBundle) -> list[NodeWithScore]:
        for postprocessor in self.node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query)
        return nodes

    async def _aretrieve(self, query: QueryBundle) -> list[NodeWithScore]:
        nodes = await self.retriever.aretrieve(query)
        for postprocessor in self.node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query)
        return nodes

    def _prompt(self, query: QueryBundle, nodes: list[NodeWithScore]) -> Prompt:
        """Leave out what an earlier turn shows already; drop old turns to make room for the rest.

        At least half of the context is for this turn.
        """
        half = self.llm.metadata.context_window // 2
        while self._history and self.llm.count(self._history) > half:
            del self._history[: _turn(self._history)]
        seen = {
            chunk[2]
            for message in self._history
            for chunk in message.additional_kwargs.get(CHUNKS, {}).values()
        }
        new = [found for found in nodes if found.node.node_id not in seen]
        prompt = self.synthesizer.prompt(query, new, self.llm.count(self._history))
        shown = [f for f in nodes if f.node.node_id in seen or f in prompt.shown]
        return Prompt(prompt.message, shown, prompt.left_out)

    def _messages(self, prompt: Prompt) -> list[ChatMessage]:
        return self.synthesizer.messages(prompt, self._history)

    def _answered(self, prompt: Prompt, response: ChatResponse) -> AgentChatResponse:
        text = response.message.content or ""
        self._remember(prompt, text)
        known = {"mpic_rag": fate(prompt, response)}
        return AgentChatResponse(text, source_nodes=prompt.shown, metadata=known)

    def _remember(self, prompt: Prompt, answer: str) -> None:
        said = ChatMessage(role=MessageRole.ASSISTANT, content=answer)
        self._history += [prompt.message, said]


def _turn(history: Sequence[ChatMessage]) -> int:
    """How many messages the first turn has."""
    answers = (n for n, m in enumerate(history) if m.role is MessageRole.ASSISTANT)
    return next(answers, len(history) - 1) + 1


class _Nothing:
    """A memory for LlamaIndex to write to: ours keeps the sources too."""

    def put(self, message: ChatMessage) -> None:
        pass

    async def aput(self, message: ChatMessage) -> None:
        pass

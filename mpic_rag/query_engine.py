"""LlamaIndex's query engine over linked caches: retrieved nodes stay whole, in their order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType

from mpic_rag.documents import Part, Picture
from mpic_rag.llm import LinkedLLM
from mpic_rag.packing import Prompt, fate, pack

dispatcher = get_dispatcher(__name__)

QUESTION = PromptTemplate("{query_str}")
CITING = PromptTemplate(
    "{query_str}\nAnswer from the sources above, and name each one that you use by its number, as"
    " in [1]."
)


class LinkedSynthesizer(BaseSynthesizer):
    """Shows a `LinkedLLM` the retrieved nodes, each as it was compiled, then the question.

    Takes as many nodes as the context holds by the model's own count. What became of each is in
    the response's metadata, under "mpic_rag", once the answer is complete.
    """

    def __init__(
        self,
        llm: LinkedLLM,
        *,
        streaming: bool = False,
        cite: bool = False,
        question_template: BasePromptTemplate | None = None,
        system_prompt: str | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(
            llm,
            callback_manager,
            streaming=streaming,
            empty_response=empty_response,
            multimodal=True,
        )
        self.llm = llm
        self.cite = cite
        self.system_prompt = system_prompt
        self.question_template = question_template or (CITING if cite else QUESTION)

    def _get_prompts(self) -> dict[str, Any]:
        return {"question_template": self.question_template}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        self.question_template = prompts.get("question_template", self.question_template)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> Any:
        """Answer from texts that have no nodes; also called by LlamaIndex's summary index."""
        return self._respond(self._texts(query_str, text_chunks), {})

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> Any:
        """Answer from texts that have no nodes."""
        return await self._arespond(self._texts(query_str, text_chunks), {})

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes."""
        if not nodes:
            return super().synthesize(query, nodes)
        with self._synthesis(query, nodes, additional_source_nodes) as synthesis:
            synthesis.answer(self._respond(synthesis.prompt, synthesis.fate))
        return synthesis.response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes."""
        if not nodes:
            return await super().asynthesize(query, nodes)
        with self._synthesis(query, nodes, additional_source_nodes) as synthesis:
            synthesis.answer(await self._arespond(synthesis.prompt, synthesis.fate))
        return synthesis.response

    def prompt(self, query: QueryBundle, nodes: Sequence[NodeWithScore], taken: int = 0) -> Prompt:
        """Lay out nodes in their order, then the query's picture, then the question.

        `taken` tokens of the context are spoken for, by earlier turns.
        """
        question: list[Part] = [Picture.load(query.image_path)] if query.image_path else []
        question.append(self.question_template.format(query_str=query.query_str))
        return pack(self.llm, nodes, question, self.system_prompt, self.cite, taken)

    def messages(self, prompt: Prompt, earlier: Sequence[ChatMessage] = ()) -> list[ChatMessage]:
        """All that the model is shown."""
        system = [ChatMessage(role="system", content=self.system_prompt)]
        return [*(system if self.system_prompt else []), *earlier, prompt.message]

    @contextmanager
    def _synthesis(
        self,
        query: QueryType,
        nodes: Sequence[NodeWithScore],
        more: Sequence[NodeWithScore] | None,
    ) -> Iterator[_Synthesis]:
        """Tell LlamaIndex's observers that an answer begins, and that it is there."""
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=bundle))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            synthesis = _Synthesis(self, self.prompt(bundle, nodes), more or ())
            yield synthesis
            event.on_end(payload={EventPayload.RESPONSE: synthesis.response})
        dispatcher.event(SynthesizeEndEvent(query=bundle, response=synthesis.response))

    def _texts(self, query: str, texts: Sequence[str]) -> Prompt:
        shown = [*texts, self.question_template.format(query_str=query)]
        blocks: list[TextBlock | ImageBlock] = [TextBlock(text=text) for text in shown]
        return Prompt(ChatMessage(blocks=blocks), [], [])

    def _respond(self, prompt: Prompt, known: dict[str, Any]) -> str | Generator[str, None, None]:
        if not self._streaming:
            response = self.llm.chat(self.messages(prompt))
            known |= fate(prompt, response)
            return response.message.content or ""

        def pieces() -> Generator[str, None, None]:
            for response in self.llm.stream_chat(self.messages(prompt)):
                known.update(fate(prompt, response))
                yield response.delta or ""

        return pieces()

    async def _arespond(
        self, prompt: Prompt, known: dict[str, Any]
    ) -> str | AsyncGenerator[str, None]:
        if not self._streaming:
            response = await self.llm.achat(self.messages(prompt))
            known |= fate(prompt, response)
            return response.message.content or ""

        async def pieces() -> AsyncGenerator[str, None]:
            async for response in await self.llm.astream_chat(self.messages(prompt)):
                known.update(fate(prompt, response))
                yield response.delta or ""

        return pieces()


class _Synthesis:
    """One answer on its way: its prompt, and what becomes of its nodes."""

    response: RESPONSE_TYPE

    def __init__(
        self, synthesizer: LinkedSynthesizer, prompt: Prompt, more: Sequence[NodeWithScore]
    ) -> None:
        self.prompt = prompt
        self.fate: dict[str, Any] = {}  # complete when the answer is
        self._synthesizer, self._sources = synthesizer, [*prompt.shown, *more]

    def answer(self, said: Any) -> None:
        """Wrap a text, or a stream of its pieces, as LlamaIndex expects it."""
        self.response = self._synthesizer._prepare_response_output(said, self._sources)
        self.response.metadata = {**(self.response.metadata or {}), "mpic_rag": self.fate}


class LinkedQueryEngine(RetrieverQueryEngine):
    """A retriever, and a `LinkedLLM` that answers from what it finds."""

    @classmethod
    def from_args(
        cls,
        retriever: BaseRetriever,
        llm: LinkedLLM,
        *,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **kwargs: Any,
    ) -> LinkedQueryEngine:
        """Build one; `kwargs` go to `LinkedSynthesizer`."""
        synthesizer = LinkedSynthesizer(llm, callback_manager=callback_manager, **kwargs)
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

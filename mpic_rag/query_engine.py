"""LlamaIndex's query engine over linked caches: retrieved nodes stay whole, in their order."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, NamedTuple

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ImageBlock, TextBlock
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
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeWithScore,
    QueryBundle,
    QueryType,
)

from mpic_rag.documents import Chunk, Picture
from mpic_rag.llm import LinkedLLM
from mpic_rag.messages import CHUNKS
from mpic_rag.nodes import CONTEXT, parts

dispatcher = get_dispatcher(__name__)

QUESTION = PromptTemplate("{query_str}")
CITING = PromptTemplate(
    "{query_str}\nAnswer from the sources above, and name each one that you use by its number, as"
    " in [1]."
)
_CITED = re.compile(r"\[(\d+)\]")


class Prompt(NamedTuple):
    """A question with its sources, and which of these did not fit."""

    message: ChatMessage
    shown: list[NodeWithScore]
    left_out: list[str]


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
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=bundle))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            prompt = self.prompt(bundle, nodes)
            fate: dict[str, Any] = {}
            said = self._respond(prompt, fate)
            response = self._response(said, prompt, fate, additional_source_nodes)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=bundle, response=response))
        return response

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
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=bundle))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: bundle.query_str}
        ) as event:
            prompt = self.prompt(bundle, nodes)
            fate: dict[str, Any] = {}
            said = await self._arespond(prompt, fate)
            response = self._response(said, prompt, fate, additional_source_nodes)
            event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=bundle, response=response))
        return response

    def prompt(self, query: QueryBundle, nodes: Sequence[NodeWithScore], taken: int = 0) -> Prompt:
        """Lay out nodes in their order, then the query's picture, then the question.

        `taken` tokens of the context are spoken for, by earlier turns.
        """
        model, metadata = self.llm.engine.model, self.llm.metadata
        question: list[TextBlock | ImageBlock] = []
        if query.image_path:
            question.append(_block(Picture.load(query.image_path)))
        text = self.question_template.format(query_str=query.query_str)
        question.append(TextBlock(text=text))
        template = model.codec.template(self.system_prompt)
        room = metadata.context_window - metadata.num_output - taken
        room -= sum(map(len, (template.prefix, template.suffix, template.between)))
        room -= model.count(text)
        if query.image_path:
            room -= model.count(Picture.load(query.image_path))
        blocks: list[TextBlock | ImageBlock] = []
        chunks: dict[int, tuple[str, str, str]] = {}
        shown: list[NodeWithScore] = []
        left_out: list[str] = []
        for found in nodes:
            node = found.node
            label = [f"Source {len(shown) + 1}:\n"] if self.cite else []
            about = node.get_metadata_str(MetadataMode.LLM).strip()
            label += [about + "\n"] if about else []
            parts = self.chunks(node)
            tokens = sum(model.count(p) + 1 for p in [*label, *(c.parts[0] for c in parts)])
            if tokens > room:
                left_out.append(node.node_id)
                continue
            room -= tokens
            blocks += [TextBlock(text="".join(label))] if label else []
            for chunk in parts:
                chunks[len(blocks)] = (chunk.context, chunk.document, node.node_id)
                blocks.append(_block(chunk.parts[0]))
            shown.append(found)
        message = ChatMessage(blocks=[*blocks, *question], additional_kwargs={CHUNKS: chunks})
        return Prompt(message, shown, left_out)

    def chunks(self, node: BaseNode) -> list[Chunk]:
        """A node's contents as they were compiled, by its metadata, or else by its bytes."""
        contents = parts(node, self.llm.fetch_pictures)
        context = node.metadata.get(CONTEXT)
        document = node.ref_doc_id or ""
        if context is None:
            found = self.llm.catalog.find(contents)
            return [c if isinstance(c, Chunk) else Chunk.of(c) for c in found]
        made: list[Chunk] = []
        for part in contents:
            made.append(Chunk((part,), node.node_id, context, document))
            context = made[-1].following
        return made

    def _texts(self, query: str, texts: Sequence[str]) -> Prompt:
        blocks = [TextBlock(text=text) for text in texts]
        question = TextBlock(text=self.question_template.format(query_str=query))
        return Prompt(ChatMessage(blocks=[*blocks, question]), [], [])

    def messages(self, prompt: Prompt, earlier: Sequence[ChatMessage] = ()) -> list[ChatMessage]:
        """All that the model is shown."""
        system = [ChatMessage(role="system", content=self.system_prompt)]
        return [*(system if self.system_prompt else []), *earlier, prompt.message]

    def _respond(self, prompt: Prompt, fate: dict[str, Any]) -> str | Generator[str, None, None]:
        if not self._streaming:
            response = self.llm.chat(self.messages(prompt))
            settle(fate, prompt, response)
            return response.message.content or ""

        def pieces() -> Generator[str, None, None]:
            for response in self.llm.stream_chat(self.messages(prompt)):
                settle(fate, prompt, response)
                yield response.delta or ""

        return pieces()

    async def _arespond(
        self, prompt: Prompt, fate: dict[str, Any]
    ) -> str | AsyncGenerator[str, None]:
        if not self._streaming:
            response = await self.llm.achat(self.messages(prompt))
            settle(fate, prompt, response)
            return response.message.content or ""

        async def pieces() -> AsyncGenerator[str, None]:
            async for response in await self.llm.astream_chat(self.messages(prompt)):
                settle(fate, prompt, response)
                yield response.delta or ""

        return pieces()

    def _response(
        self,
        said: Any,
        prompt: Prompt,
        fate: dict[str, Any],
        more: Sequence[NodeWithScore] | None,
    ) -> RESPONSE_TYPE:
        response = self._prepare_response_output(said, [*prompt.shown, *(more or [])])
        response.metadata = {**(response.metadata or {}), "mpic_rag": fate}
        return response


def settle(fate: dict[str, Any], prompt: Prompt, response: ChatResponse) -> None:
    """Note what became of each node, as soon as the model has said so."""
    if not response.raw:
        return
    chunks: dict[str, list[dict[str, Any]]] = {node.node_id: [] for node in prompt.shown}
    for chunk in response.raw["chunks"]:
        if chunk["source"] in chunks:
            chunks[chunk["source"]].append({k: v for k, v in chunk.items() if k != "source"})
    numbers = {int(n) for n in _CITED.findall(response.message.content or "")}
    fate |= {k: v for k, v in response.raw.items() if k != "chunks"}
    fate |= {
        "nodes": chunks,
        "left_out": prompt.left_out,
        "cited": [n.node_id for i, n in enumerate(prompt.shown, 1) if i in numbers],
    }


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


def _block(part: str | Picture) -> TextBlock | ImageBlock:
    return TextBlock(text=part) if isinstance(part, str) else ImageBlock(image=part.data)

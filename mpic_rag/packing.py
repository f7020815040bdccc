"""A question and its LlamaIndex nodes as one message, and what became of each node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ImageBlock, TextBlock
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from mpic_rag.documents import Chunk, Part
from mpic_rag.llm import LinkedLLM
from mpic_rag.messages import CHUNKS
from mpic_rag.nodes import CONTEXT, parts

_CITED = re.compile(r"\[(\d+)\]")


class Prompt(NamedTuple):
    """A question with its sources, and which of these did not fit."""

    message: ChatMessage
    shown: list[NodeWithScore]
    left_out: list[str]


def pack(
    llm: LinkedLLM,
    nodes: Sequence[NodeWithScore],
    question: Sequence[Part],
    system: str | None = None,
    cite: bool = False,
    taken: int = 0,
) -> Prompt:
    """Lay out nodes in their order, then the question, by the model's own token counts.

    Nodes for which the context has no room are left out; `taken` tokens of it are spoken for.
    """
    model, metadata = llm.engine.model, llm.metadata
    template = model.codec.template(system)
    room = metadata.context_window - metadata.num_output - taken
    room -= sum(map(len, (template.prefix, template.suffix, template.between)))
    room -= sum(map(model.count, question))
    blocks: list[TextBlock | ImageBlock] = []
    chunks: dict[int, tuple[str, str, str]] = {}
    shown: list[NodeWithScore] = []
    left_out: list[str] = []
    for found in nodes:
        node = found.node
        label = [f"Source {len(shown) + 1}:\n"] if cite else []
        about = node.get_metadata_str(MetadataMode.LLM).strip()
        label += [about + "\n"] if about else []
        contents = _chunks(llm, node)
        tokens = sum(model.count(p) + 1 for p in [*label, *(c.parts[0] for c in contents)])
        if tokens > room:
            left_out.append(node.node_id)
            continue
        room -= tokens
        blocks += [TextBlock(text="".join(label))] if label else []
        for chunk in contents:
            chunks[len(blocks)] = (chunk.context, chunk.document, node.node_id)
            blocks.append(_block(chunk.parts[0]))
        shown.append(found)
    blocks += map(_block, question)
    message = ChatMessage(blocks=blocks, additional_kwargs={CHUNKS: chunks})
    return Prompt(message, shown, left_out)


def fate(prompt: Prompt, response: ChatResponse) -> dict[str, Any]:
    """What became of each node, and of the answer; empty before the model has said so."""
    if not response.raw:
        return {}
    chunks: dict[str, list[dict[str, Any]]] = {node.node_id: [] for node in prompt.shown}
    for chunk in response.raw["chunks"]:
        if chunk["source"] in chunks:
            chunks[chunk["source"]].append({k: v for k, v in chunk.items() if k != "source"})
    numbers = {int(n) for n in _CITED.findall(response.message.content or "")}
    return {
        **{k: v for k, v in response.raw.items() if k != "chunks"},
        "nodes": chunks,
        "left_out": prompt.left_out,
        "cited": [n.node_id for i, n in enumerate(prompt.shown, 1) if i in numbers],
    }


def _chunks(llm: LinkedLLM, node: BaseNode) -> list[Chunk]:
    """A node's contents as they were compiled, by its metadata, or else by its bytes."""
    contents = parts(node, llm.fetch_pictures)
    context = node.metadata.get(CONTEXT)
    if context is None:
        found = llm.catalog.find(contents)
        return [c if isinstance(c, Chunk) else Chunk.of(c) for c in found]
    made: list[Chunk] = []
    for part in contents:
        made.append(Chunk((part,), node.node_id, context, node.ref_doc_id or ""))
        context = made[-1].following
    return made


def _block(part: Part) -> TextBlock | ImageBlock:
    return TextBlock(text=part) if isinstance(part, str) else ImageBlock(image=part.data)

"""LlamaIndex's nodes as documents to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, NodeRelationship

from mpic_rag.documents import Document, Part
from mpic_rag.messages import part

CONTEXT = "mpic_rag_context"  # in a node's metadata: what its document says before it, digested


def parts(node: BaseNode, fetch: bool = False) -> list[Part]:
    """A node's texts and pictures as prompts show them, a caption before its picture."""
    blocks = node.get_content_blocks(MetadataMode.NONE)
    found = [part(block, fetch) for block in blocks]
    if isinstance(node, ImageNode):  # whose blocks lack the text
        found.insert(0, node.text)
    stripped = [p.strip() if isinstance(p, str) else p for p in found]
    return [p for p in stripped if p]


def documents(
    nodes: Iterable[BaseNode], room: int, count: Callable[[Part], int]
) -> Iterator[Document]:
    """Put nodes together to documents of at most `room` tokens, in reading order, as they come.

    A longer document is cut, and the second half does not know the first.
    """
    groups: dict[str, list[BaseNode]] = {}
    for node in nodes:
        groups.setdefault(node.ref_doc_id or node.node_id, []).append(node)
    for name, members in groups.items():
        chunks = [p for node in _in_order(members) for p in parts(node)]
        for n, window in enumerate(windows(chunks, room, count)):
            made = Document.of(name if n == 0 else f"{name}/{n}", [[p] for p in window])
            yield made


def windows(
    chunks: Sequence[Part], room: int, count: Callable[[Part], int]
) -> Iterator[list[Part]]:
    """Cut chunks into runs of at most `room` tokens; a longer chunk stands alone."""
    run: list[Part] = []
    used = 0
    for chunk in chunks:
        tokens = count(chunk) + 1  # a newline ends it
        if run and used + tokens > room:
            yield run
            run, used = [], 0
        run.append(chunk)
        used += tokens
    if run:
        yield run


def _in_order(nodes: Sequence[BaseNode]) -> list[BaseNode]:
    """Follow the links from each node to the next; those without any stay as given."""
    ids = {node.node_id: node for node in nodes}
    after = {}
    for node in nodes:
        link = node.relationships.get(NodeRelationship.NEXT)
        if link is not None and not isinstance(link, list) and link.node_id in ids:
            after[node.node_id] = link.node_id
    ordered: dict[str, BaseNode] = {}
    heads = [node.node_id for node in nodes if node.node_id not in set(after.values())]
    for name in [*heads, *ids]:
        step: str | None = name
        while step is not None and step not in ordered:
            ordered[step] = ids[step]
            step = after.get(step)
    return list(ordered.values())

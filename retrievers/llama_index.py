"""An index as a LlamaIndex retriever."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import (
    MediaResource,
    Node,
    NodeRelationship,
    NodeWithScore,
    ObjectType,
    QueryBundle,
    RelatedNodeInfo,
)

from mpic_rag.documents import Picture
from mpic_rag.indexing.collection import Collection
from mpic_rag.indexing.rows import Row
from mpic_rag.nodes import CONTEXT
from mpic_rag.retrievers.search import Found, Search


class IndexRetriever(BaseRetriever):
    """Passages of an index as nodes, in the order of their fused rank.

    With some `around` each, those of a document stand together, in reading order.
    """

    def __init__(
        self, search: Search, similarity_top_k: int = 8, around: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.search, self.similarity_top_k, self.around = search, similarity_top_k, around

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        picture = Picture.load(query_bundle.image_path) if query_bundle.image_path else None
        found = self.search.search(
            query_bundle.query_str, picture, self.similarity_top_k, around=self.around
        )
        return nodes(self.search.collection, found)


def nodes(collection: Collection, found: list[Found]) -> list[NodeWithScore]:
    """Found passages as scored nodes."""
    paths = collection.paths()
    return [
        NodeWithScore(node=node(collection, f.row, paths.get(f.row.document, "")), score=f.score)
        for f in found
    ]


def node(collection: Collection, row: Row, path: str = "") -> Node:
    """A passage as a node; neither the model nor an embedder sees its metadata."""
    metadata = {
        "file": path,
        "title": row.name,
        "headings": " > ".join(row.headings),
        "page": row.page,
        CONTEXT: row.context,
    }
    source = RelatedNodeInfo(node_id=row.document, node_type=ObjectType.DOCUMENT)
    return Node(
        id_=row.id,
        text_resource=MediaResource(text=row.text) if row.text else None,
        image_resource=(
            MediaResource(path=collection.pictures.path(row.picture)) if row.picture else None
        ),
        metadata=metadata,
        excluded_llm_metadata_keys=list(metadata),
        excluded_embed_metadata_keys=list(metadata),
        relationships={NodeRelationship.SOURCE: source},
    )

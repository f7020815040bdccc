"""A FAISS vector store for LlamaIndex that deletes, replaces, filters, and saves at once."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, Node
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import (
    build_metadata_filter_fn,
    metadata_dict_to_node,
    node_to_metadata_dict,
)

from mpic_rag.retrievers.vectors import Vectors

FILE = "faiss.safetensors"


class FaissStore(BasePydanticVectorStore):
    """Nodes with their vectors; similarity is the cosine, whatever the vectors' lengths.

    Nodes are kept whole, pictures included, so that no document store is needed beside it.
    """

    stores_text: bool = True

    _vectors: Vectors | None = PrivateAttr(default=None)
    _rows: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)
    _lock: Any = PrivateAttr(default_factory=threading.RLock)

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex names it."""
        return "MpicRagFaissStore"

    @classmethod
    def from_persist_dir(cls, persist_dir: str | Path) -> FaissStore:
        """Read what `persist` wrote; raises `ValueError` where it is damaged."""
        return cls.from_persist_path(Path(persist_dir) / FILE)

    @classmethod
    def from_persist_path(cls, persist_path: str | Path) -> FaissStore:
        """Read what `persist` wrote; raises `ValueError` where it is damaged."""
        store = cls()
        store._vectors, extra = Vectors.load(Path(persist_path))
        store._rows = json.loads(extra)
        if set(store._rows) != set(store._vectors):
            raise ValueError(f"{persist_path} is damaged: its nodes are not those of its vectors")
        return store

    def persist(self, persist_path: str | Path, fs: Any = None) -> None:
        """Write all to one file, which is replaced at once; a folder gets one inside."""
        if fs is not None:
            raise ValueError("this store is written to local disks only")
        path = Path(persist_path)
        path = path if path.suffix else path / FILE
        with self._lock:
            vectors = self._vectors or Vectors(1)
            vectors.save(path, json.dumps(self._rows).encode())

    @property
    def client(self) -> Vectors | None:
        """The vectors; None as long as there are none."""
        return self._vectors

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes with their embeddings, in place of those with the same ids."""
        if not nodes:
            return []
        matrix = np.array([node.get_embedding() for node in nodes], dtype=np.float32)
        with self._lock:
            if not self._vectors:
                self._vectors = Vectors(matrix.shape[1])
            self._vectors.add([node.node_id for node in nodes], matrix)
            self._rows |= {node.node_id: _pack(node) for node in nodes}
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes."""
        with self._lock:
            ids = [key for key, row in self._rows.items() if row["ref_doc_id"] == ref_doc_id]
            self._remove(ids)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes by id, or by metadata, or those that both choose."""
        if node_ids is None and filters is None:
            raise ValueError("say which nodes to delete; `clear` deletes all")
        with self._lock:
            self._remove(self._chosen(node_ids, None, filters))

    def clear(self) -> None:
        """Delete everything."""
        with self._lock:
            self._vectors, self._rows = None, {}

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes by id or metadata, without their embeddings."""
        with self._lock:
            return [_unpack(self._rows[key]) for key in self._chosen(node_ids, None, filters)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to an embedding; filters apply before the search, not after."""
        if query.mode is not VectorStoreQueryMode.DEFAULT:
            raise ValueError(f"{query.mode.value} queries are not supported, only default ones")
        if query.query_embedding is None:
            raise ValueError("the query has no embedding")
        with self._lock:
            if not self._vectors:
                return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
            among = None
            if query.node_ids or query.doc_ids or query.filters:  # LlamaIndex sends empty lists
                among = self._chosen(query.node_ids or None, query.doc_ids or None, query.filters)
            vector = np.array(query.query_embedding)
            found = self._vectors.search(vector, query.similarity_top_k, among)
            return VectorStoreQueryResult(
                nodes=[_unpack(self._rows[key]) for key, _ in found],
                similarities=[score for _, score in found],
                ids=[key for key, _ in found],
            )

    def _chosen(
        self,
        node_ids: Iterable[str] | None,
        doc_ids: Iterable[str] | None,
        filters: MetadataFilters | None,
    ) -> list[str]:
        keys = [*self._rows] if node_ids is None else [key for key in node_ids if key in self._rows]
        if doc_ids is not None:
            documents = set(doc_ids)
            keys = [key for key in keys if self._rows[key]["ref_doc_id"] in documents]
        if not filters:
            return keys
        return [key for key in keys if _passes(self._rows[key], filters)]

    def _remove(self, keys: Sequence[str]) -> None:
        if self._vectors:
            self._vectors.remove(keys)
        for key in keys:
            self._rows.pop(key, None)


def _passes(row: dict[str, Any], filters: MetadataFilters) -> bool:
    """LlamaIndex's own test, which knows no filters inside filters."""
    inner = [f for f in filters.filters if isinstance(f, MetadataFilters)]
    plain = [f for f in filters.filters if not isinstance(f, MetadataFilters)]
    results = [_passes(row, f) for f in inner]
    condition = filters.condition.value if filters.condition else "and"
    for one in plain:
        test = build_metadata_filter_fn(lambda _: row, MetadataFilters(filters=[one]))
        results.append(test(""))
    if condition == "not":
        return not any(results)
    return any(results) if condition == "or" else all(results)


def _pack(node: BaseNode) -> dict[str, Any]:
    row = node_to_metadata_dict(node)
    resource = node.image_resource if isinstance(node, Node) else None
    if resource is not None and resource.data is not None:  # LlamaIndex leaves it out
        row["_picture"] = resource.data.decode()
    return row


def _unpack(row: dict[str, Any]) -> BaseNode:
    node = metadata_dict_to_node(row)
    if "_picture" in row and isinstance(node, Node) and node.image_resource is not None:
        node.image_resource.data = base64.b64encode(base64.b64decode(row["_picture"]))
    return node

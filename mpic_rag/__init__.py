"""Multimodal RAG whose retrieved images and texts arrive with their KV caches computed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpic_rag.conversation import Answer, Conversation
from mpic_rag.documents import Chunk, Document, Picture, read_folder
from mpic_rag.engine import Engine
from mpic_rag.families import UnsupportedModelError
from mpic_rag.model import Model
from mpic_rag.sampling import Sampling
from mpic_rag.store import Store

if TYPE_CHECKING:
    from mpic_rag.chat_engine import LinkedChatEngine
    from mpic_rag.index import Index
    from mpic_rag.llm import LinkedLLM
    from mpic_rag.query_engine import LinkedQueryEngine

__all__ = [
    "Answer",
    "Chunk",
    "Conversation",
    "Document",
    "Engine",
    "Index",
    "LinkedChatEngine",
    "LinkedLLM",
    "LinkedQueryEngine",
    "Model",
    "Picture",
    "Sampling",
    "Store",
    "UnsupportedModelError",
    "read_folder",
]

# LlamaIndex and FAISS take a second to import, which those pay who use them.
_LATER = {
    "Index": "index",
    "LinkedChatEngine": "chat_engine",
    "LinkedLLM": "llm",
    "LinkedQueryEngine": "query_engine",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"mpic_rag.{_LATER[name]}"), name)
    raise AttributeError(f"module 'mpic_rag' has no attribute {name!r}")

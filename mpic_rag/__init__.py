"""Multimodal RAG whose retrieved images and texts arrive with their KV caches computed."""

from mpic_rag.conversation import Answer, Conversation
from mpic_rag.documents import Chunk, Document, Picture, read_folder
from mpic_rag.engine import Engine
from mpic_rag.families import UnsupportedModelError
from mpic_rag.model import Model
from mpic_rag.sampling import Sampling
from mpic_rag.store import Store

__all__ = [
    "Answer",
    "Chunk",
    "Conversation",
    "Document",
    "Engine",
    "Model",
    "Picture",
    "Sampling",
    "Store",
    "UnsupportedModelError",
    "read_folder",
]

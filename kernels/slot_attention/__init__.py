"""Attention of chosen rows of a prompt, each to all slots up to its own."""

from mpic_rag.kernels.slot_attention.blocked import Block, blocks, slot_attention

__all__ = ["Block", "blocks", "slot_attention"]

"""Keys to new positions."""

from mpic_rag.kernels.rerotate.reference import rerotate

__all__ = ["rerotate"]

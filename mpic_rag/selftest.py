"""Whether moved caches of a model are what the model would compute where they were moved to."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import torch
from PIL import Image
from transformers import DynamicCache

from mpic_rag.compiler import Compiler, compute
from mpic_rag.documents import Chunk, Part, Picture
from mpic_rag.linker import Piece, link, place
from mpic_rag.model import Model

TEXT = "The harbour lies at the mouth of a river."
AHEAD = "Boats come in with the tide, and leave before dark. " * 3
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2}  # of the largest number; others: 1e-1

_known: WeakKeyDictionary[Model, str] = WeakKeyDictionary()


def fault(model: Model) -> str:
    """What is wrong with a model's moved caches, or nothing; tried once for each loaded model.

    Warns if something is: an engine then computes every prompt in full.
    """
    if model not in _known:
        with model.lock:
            _known[model] = _moved(model)
        if _known[model]:
            warnings.warn(
                f"this model's caches can't be moved: {_known[model]}; every prompt is computed"
                " in full",
                stacklevel=3,
            )
    return _known[model]


@torch.inference_mode()
def _moved(model: Model) -> str:
    """Link a chunk behind some text; compare with transformers' own pass, begun there.

    RoPE is relative: a chunk that sees nothing but itself has the same values wherever it starts,
    and keys that are rotated further.
    """
    parts: list[Part] = [TEXT]
    if model.family.markers is not None:
        parts.append(Picture.of(Image.radial_gradient("L").convert("RGB").resize((112, 84))))
    (kv,) = Compiler(model, "bare").compile([Chunk(tuple(parts))])
    before, position = compute(model, [model.text_segment(model.codec.encode(AHEAD))])
    cache = before.grown(before.length + len(kv.segment))
    (piece,), _ = place([Piece(kv.segment, kv)], before.length, position)
    link(model, cache, [piece])
    expected = DynamicCache()
    everything = torch.arange(len(kv.segment))
    model.forward(model.embed(kv.segment, everything), piece.positions, expected)
    tolerance = TOLERANCE.get(model.dtype, 1e-1)
    for n, (ours, theirs) in enumerate(zip(cache.layers, expected.layers, strict=True)):
        for name in ("keys", "values"):
            right = getattr(theirs, name)[0].float()
            found = getattr(ours, name)[0, :, piece.slot : cache.length].float()
            apart = float((found - right).abs().max() / right.abs().max())
            if not apart < tolerance:
                return f"{name} of layer {n} are {apart:.1%} off"
    return ""

"""How much each token of the linked chunks is worth computing afresh: a score a token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from mpic_rag.cache import LinkedCache
from mpic_rag.linker import Piece, prefill
from mpic_rag.model import Model

# Scores [tokens] of each piece (none where nothing is reused), and the work it took.
Scores = tuple[list[torch.Tensor], float]
Score = Callable[[Model, LinkedCache, Sequence[Piece]], Scores]

CHECK = 1  # the layer whose keys tell what deviates, as in CacheBlend's published code


def query(model: Model, cache: LinkedCache, pieces: Sequence[Piece]) -> Scores:
    """The question's attention to a token times the norm of its value, balanced over chunks.

    CONDUIT's rule (EMNLP 2026 Findings): averaged over heads, the question's tokens and layers;
    a chunk's tokens count as much more as its mean stands above the mean of all chunks.
    """
    rows = [torch.full((len(p.segment),), not p.reused) for p in pieces]
    asked = len(pieces[-1].segment)
    first, total = pieces[0].slot, cache.length
    worth = torch.zeros(total, device=model.device)

    def watch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> None:
        mass = attention_mass(query[0, :, -asked:], key[0], scale)
        worth.add_(mass * value[0].float().square().sum((0, 2)).sqrt())

    with model.watched(watch):
        prefill(model, cache, pieces, rows)
    parts = worth[first:].split([len(p.segment) for p in pieces])
    means = torch.stack([part.mean() for part, p in zip(parts, pieces, strict=True) if p.reused])
    mean = means.mean().clamp_min(torch.finfo(means.dtype).tiny)
    slots = torch.cat([p.slots for p in pieces if not p.reused])
    return [part * part.mean() / mean for part in parts], model.work(slots)


def attention_mass(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """What share of the last tokens' attention each key gets [total], a mean over heads and rows.

    queries [heads, rows, dim] stand at the last slots, keys [kv heads, total, dim] at all.
    """
    heads, rows, dim = queries.shape
    total = keys.shape[1]
    grouped = queries.reshape(len(keys), -1, dim)  # [kv heads, group * rows, dim]
    logits = (grouped.float() @ keys.float().transpose(1, 2) * scale).view(heads, rows, total)
    slots = torch.arange(total, device=keys.device)
    hidden = slots > slots[total - rows :, None]
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1).mean((0, 1))


def deviation(model: Model, cache: LinkedCache, pieces: Sequence[Piece]) -> Scores:
    """How far a token's key in the second layer is from what full prefill makes of it.

    CacheBlend's rule (EuroSys 2025). What is computed for it is not kept: the chosen tokens are
    computed again, in all layers.
    """
    scratch = cache.first_layers(CHECK + 1, pieces[0].slot)
    cache.ready(CHECK)
    rows = [torch.ones(len(p.segment), dtype=torch.bool) for p in pieces]
    scratch.extend(cache.length - scratch.length)
    with model.only_layers(CHECK + 1):
        prefill(model, scratch, pieces, rows)
    new, old = (c.layers[CHECK].keys[0, :, : c.length].float() for c in (scratch, cache))
    apart = (new - old).square().sum((0, 2))[pieces[0].slot :]
    slots = torch.cat([p.slots for p in pieces])
    return (
        list(apart.split([len(p.segment) for p in pieces])),
        model.work(slots) * (CHECK + 1) / model.layers,
    )


def random(model: Model, cache: LinkedCache, pieces: Sequence[Piece]) -> Scores:
    """By lot, the same for the same prompt: the control."""
    ids = torch.cat([piece.segment.ids for piece in pieces])
    seed = int.from_bytes(hashlib.sha256(ids.numpy().tobytes()).digest()[:7], "big")
    lots = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))
    return list(lots.split([len(piece.segment) for piece in pieces])), 0.0

"""A quicker way through the same Qwen2.5-VL modules, for pictures of one size, and Muon.

`transformers` runs vision attention picture by picture and builds masks that plain causal
contexts with right padding do not need. `check` asserts that the results agree.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from mpic_rag.data.layout import GRID, MERGE, PATCH, Batch


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))


def picture_features(model: Model, pixels: Tensor) -> Tensor:
    """Vision tower over pictures of one size: [pictures, 144, 588] to [pictures, 36, width]."""
    tower = model.model.visual
    kernel = tower.patch_embed.proj.weight.sum(dim=2)  # both frames of a still picture are equal
    x = F.linear(pixels, kernel.flatten(1))
    side = GRID // MERGE
    axes = torch.meshgrid(*(torch.arange(n) for n in (side, side, MERGE, MERGE)), indexing="ij")
    rows, columns = (axes[0] * MERGE + axes[2]).flatten(), (axes[1] * MERGE + axes[3]).flatten()
    cos, sin = tower.rotary_pos_emb(x, torch.stack((rows, columns), dim=-1))
    for block in tower.blocks:
        heads = block.attn.num_heads
        qkv = block.attn.qkv(_norm(block.norm1, x)).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + block.attn.proj(mixed.transpose(1, 2).flatten(2))
        x = x + _mlp(block.mlp, _norm(block.norm2, x))
    merged = _norm(tower.merger.ln_q, x).unflatten(1, (-1, MERGE * MERGE)).flatten(2)
    return tower.merger.mlp(merged)


def hidden_states(
    model: Model, embeds: Tensor, positions: Tensor, context: int, mask: Tensor, tap: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The language model over causal contexts and the branches behind them.

    Returns the last hidden states, those after `tap` layers, [batch, length, width], and how
    much some heads look from branches at the contexts, [2, batch, branches, context]: those of
    the first group three layers after `tap`, and those of the last group two layers after it.
    """
    lm = model.model.language_model
    cos, sin = lm.rotary_emb(embeds, positions)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x = tapped = embeds
    looks: list[Tensor] = []
    for n, layer in enumerate(lm.layers, 1):
        attn, h = layer.self_attn, _norm(layer.input_layernorm, x)
        q, k, v = (
            p(h).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q[:, :, :context], k[:, :, :context], v[:, :, :context], is_causal=True, enable_gqa=True
        )
        if mask.numel():
            asked = F.scaled_dot_product_attention(
                q[:, :, context:], k, v, attn_mask=mask, enable_gqa=True
            )
            mixed = torch.cat((mixed, asked), dim=2)
            if tap and n in (tap + 2, tap + 3):
                group = attn.num_key_value_groups
                heads = q[:, :group] if n == tap + 3 else q[:, -group:]
                shared = k[:, :1] if n == tap + 3 else k[:, -1:]
                scores = heads[:, :, context:] @ shared.mT * attn.head_dim**-0.5
                weights = scores.masked_fill(~mask, -1e9).softmax(dim=-1)
                looks.insert(0, weights[..., :context].mean(dim=1))
        x = x + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + _mlp(layer.mlp, _norm(layer.post_attention_layernorm, x))
        tapped = x if n == tap else tapped
    return _norm(lm.norm, x), tapped, torch.stack(looks) if looks else embeds


def answer_logits(model: Model, batch: Batch, tap: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the answers' tokens, and the rest of `hidden_states`."""
    embeds = model.model.language_model.embed_tokens(batch.ids)
    if len(batch.pixels):
        features = picture_features(model, batch.pixels).flatten(0, 1)
        flat = embeds.flatten(0, 1).index_copy(0, batch.picture_places, features)
        embeds = flat.view_as(embeds)
    hidden, tapped, looks = hidden_states(
        model, embeds, batch.positions, batch.context, batch.mask, tap
    )
    logits = model.lm_head(hidden.flatten(0, 1)[batch.target_places - 1])
    return logits, tapped.flatten(0, 1), looks


@torch.no_grad()
def check(model: Model, batch: Batch) -> float:
    """Largest difference to `transformers` on a batch of one context with one branch."""
    doubled = batch.pixels.unflatten(-1, (3, 1, PATCH, PATCH)).expand(-1, -1, -1, 2, -1, -1)
    is_picture = torch.zeros_like(batch.ids)
    is_picture.view(-1)[batch.picture_places] = 1
    logits = model(
        input_ids=batch.ids,
        attention_mask=torch.ones_like(batch.ids),
        mm_token_type_ids=is_picture,
        pixel_values=doubled.flatten(2).flatten(0, 1),
        image_grid_thw=torch.tensor([[1, GRID, GRID]] * len(batch.pixels)),
    ).logits
    difference = logits[0, batch.target_places - 1] - answer_logits(model, batch)[0]
    return float(difference.abs().max())


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised in float32 (torch's own does it in bfloat16, slow on many CPUs)."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Matrices of one shape are handled together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, _orthogonal(torch.stack(updates)), strict=True):
                    p.add_(update, alpha=scale)


def _orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices."""
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if flip else x

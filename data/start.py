"""Starting weights: heads that look back a token or more, and heads that find what they saw.

From plain random weights a model this small takes very long to find out that it can compare
tokens at all. Here the first layer notes which tokens came before each one, some later heads
attend to tokens that came after one like the present (induction), and what the other heads
read they write back much as it was, with queries that resemble keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration as Model

LIKE = 0.7  # how much queries resemble keys
SHARP = 5.5  # size of the biases of the heads that look back
MATCH = 1.2  # size of the weights that compare
NOTE = 0.3  # how strongly the first layer notes what came before
BACK = (1, 2, 3)


@torch.no_grad()
def prepare(model: Model) -> None:
    """Changes the weights of the language model in place."""
    lm = model.model.language_model
    lm.embed_tokens.weight.mul_(2.0)
    width = lm.embed_tokens.weight.shape[1]
    for layer in lm.layers:
        attn = layer.self_attn
        size, shared = attn.head_dim, attn.num_key_value_groups
        query = attn.q_proj.weight.view(-1, size, width)
        key = attn.k_proj.weight.view(-1, size, width).repeat_interleave(shared, 0)
        value = attn.v_proj.weight.view(-1, size, width).repeat_interleave(shared, 0)
        query.mul_((1 - LIKE**2) ** 0.5).add_(key, alpha=LIKE)
        copied = value.permute(2, 0, 1).reshape(width, -1)
        attn.o_proj.weight.mul_(0.25).add_(copied, alpha=0.7)
        layer.mlp.down_proj.weight.mul_(0.25)
    axes = torch.linalg.qr(torch.randn(width, width))[0]
    size = lm.layers[0].self_attn.head_dim
    read, *notes = (axes[i * size : (i + 1) * size] for i in range(1 + len(BACK)))
    first = lm.layers[0].self_attn
    first.v_proj.weight[:size] = read
    first.q_proj.weight[: len(BACK) * size] *= 0.2
    first.k_proj.weight[:size] *= 0.2
    for head, back in enumerate(BACK):
        first.o_proj.weight[:, head * size : (head + 1) * size] = NOTE * notes[head].T
        _look_back(first.q_proj.bias, first.k_proj.bias, head, back, lm.rotary_emb.inv_freq)
    for layer, note in zip(lm.layers[1:4], notes, strict=True):
        attn = layer.self_attn
        attn.k_proj.weight[:size] = MATCH * note
        heads = attn.q_proj.weight[: len(BACK) * size].view(-1, size, width)
        heads.mul_(0.1).add_(read, alpha=MATCH)


def _look_back(query: Tensor, key: Tensor, head: int, back: int, rates: Tensor) -> None:
    """Biases that make a head of the first group attend `back` tokens before its own."""
    half = len(rates)
    key[:3] = SHARP
    for i in range(3):
        angle = -rates[i] * back
        query[head * 2 * half + i] = SHARP * torch.cos(angle)
        query[head * 2 * half + half + i] = SHARP * torch.sin(angle)

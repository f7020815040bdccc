"""Keys moved by us against keys that the model rotates itself."""

import pytest
import torch
from tiny import tiny
from transformers import DynamicCache

from mpic_rag.kernels.rerotate import rerotate

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
    },
}
CASES = [("llama", rope) for rope in ROPES] + [("llava", "default"), ("qwen2_5_vl", "default")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "rope"), CASES)
@torch.inference_mode()
def test_moved_key_is_bit_identical(family, rope, dtype):
    model = tiny(family, dtype, ROPES[rope] if family == "llama" else None)
    torch.manual_seed(1)
    tokens = 37
    embeds = torch.randn(tokens, 48, dtype=dtype)
    start = torch.randint(0, 1900, (model.family.axes, 1))
    positions = torch.arange(tokens).repeat(model.family.axes, 1) + start
    cache = DynamicCache()
    with model.captured_keys() as keys:
        model.forward(embeds, positions, cache)
    cos, sin = model.rotary(positions)
    for before, layer in zip(keys, cache.layers, strict=True):
        assert torch.equal(rerotate(before, cos, sin), layer.keys[0])


def test_hooks_are_gone_after_an_error(text_model):
    def hooks():
        return sum(len(m._forward_hooks) for m in text_model.network.modules())

    def fail_inside():
        with text_model.captured_keys():
            assert hooks() > before
            raise RuntimeError

    before = hooks()
    with pytest.raises(RuntimeError):
        fail_inside()
    assert hooks() == before

"""What is loaded, and what is refused and why."""

import oracles
import pytest
import torch
from tiny import CHATML, tiny
from transformers import (
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MistralConfig,
)

from mpic_rag import Model, UnsupportedModelError
from mpic_rag.families import check

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = {
    "mamba": (MambaConfig(), "recurrent state"),
    "gpt2": (GPT2Config(), "learned absolute positions"),
    "gemma": (GemmaConfig(), "not supported yet"),
    "dynamic": (LlamaConfig(rope_parameters=DYNAMIC), "length of the prompt"),
    "llava-mistral": (LlavaConfig(text_config=MistralConfig()), "llava on mistral"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name, tmp_path):
    config, reason = REFUSED[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        Model.load(tmp_path)
    assert str(caught.value).count(".") <= 1
    assert "\n" not in str(caught.value)


def test_load_names_cause_and_cure(tmp_path):
    with pytest.raises(ValueError, match=r"can't load the model .*--model takes a folder"):
        Model.load(tmp_path / "none")
    LlamaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=99).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="can't load the model"):
        Model.load(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    model = tiny("llama")
    model.network.config.save_pretrained(tmp_path)
    model.codec.tokenizer.save_pretrained(tmp_path)
    torch.save(model.network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="can't load the model"):
        Model.load(tmp_path)


def test_a_saved_model_loads_the_same(model, tmp_path):
    model.network.save_pretrained(tmp_path)
    model.codec.tokenizer.save_pretrained(tmp_path)
    if model.image_processor is not None:
        model.image_processor.save_pretrained(tmp_path)
    loaded = Model.load(tmp_path, device="cpu")
    assert loaded.fingerprint == model.fingerprint
    assert loaded.dtype == torch.float32
    assert loaded.codec.template() == model.codec.template()


def test_a_model_without_chat_template():
    model = tiny("llama")
    model.codec.tokenizer.chat_template = None
    assert model.codec.template().prefix == ()
    model.codec.tokenizer.chat_template = CHATML


def test_positions_follow_the_models_own_rule(vision_model, shelf):
    for document in shelf:
        for chunk in document.chunks:
            rows = oracles.encode(vision_model, chunk.parts, "\n")
            segment = vision_model.segments([chunk.parts])[0]
            expected = oracles.positions(vision_model, rows)
            assert torch.equal(segment.positions, expected)
            assert segment.ids.tolist() == [i for i, *_ in rows]
            assert segment.span == int(expected.max()) + 1


def test_checks_need_no_weights():
    assert check(LlamaConfig()).axes == 1

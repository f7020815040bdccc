"""Tiny random-weight models of each family, with tokenizers and image processors of their kind."""

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
)

from mpic_rag import Picture
from mpic_rag.model import Model

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As llava-hf's: content is a list of parts, and the beginning-of-text token is not in it.
VICUNA = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role | upper }}: "
    "{% for c in m.content %}{% if c.type is defined and c.type == 'text' %}{{ c.text }}"
    "{% endif %}{% endfor %}{% if m.role == 'user' %} {% else %}</s>{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def picture(size, color, name="picture"):
    """A coloured picture with a white line across."""
    image = Image.new("RGB", size, color)
    ImageDraw.Draw(image).line((0, 0, *size), fill="white", width=3)
    return Picture.of(image, name)


def byte_tokenizer(special):
    """One token a byte, as Qwen's and SmolLM2's fall back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_tokens(special, special_tokens=True)
    fast.chat_template = CHATML
    return fast


def sentencepiece_tokenizer():
    """Llama's kind: a space before each encoded text, and a beginning-of-text token."""
    characters = [chr(n) for n in range(33, 127)] + ["\u2581"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *characters]
    tokenizer = Tokenizer(
        models.BPE(
            {t: n for n, t in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.add_tokens(["<image>"], special_tokens=True)
    fast.chat_template = VICUNA
    return fast


TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large enough that every wrong key shows in the logits
}


def tiny(family, dtype=torch.float32, rope=None):
    """Build a model of the family with fixed random weights."""
    torch.manual_seed(0)
    if family == "llama":
        tokenizer = byte_tokenizer(MARKERS)
        config = LlamaConfig(vocab_size=len(tokenizer), rope_parameters=rope, **TEXT)
        network, images = LlamaForCausalLM(config), None
    elif family == "llava":
        tokenizer = sentencepiece_tokenizer()
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=42,
            patch_size=14,
        )
        config = LlavaConfig(
            text_config=LlamaConfig(vocab_size=len(tokenizer), **TEXT),
            vision_config=vision,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        )
        network = LlavaForConditionalGeneration(config)
        images = CLIPImageProcessor(
            size={"shortest_edge": 42}, crop_size={"height": 42, "width": 42}
        )
    else:
        tokenizer = byte_tokenizer(MARKERS + VISION)
        ids = {
            name: tokenizer.convert_tokens_to_ids(f"<|{token}|>")
            for name, token in [
                ("image_token_id", "image_pad"),
                ("video_token_id", "video_pad"),
                ("vision_start_token_id", "vision_start"),
                ("vision_end_token_id", "vision_end"),
            ]
        }
        config = Qwen2_5_VLConfig(
            text_config={
                **TEXT,
                "vocab_size": len(tokenizer),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 2, 2],
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 48,
                "fullatt_block_indexes": [0, 1],
            },
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **ids,
        )
        network = Qwen2_5_VLForConditionalGeneration(config)
        images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=28 * 28 * 16)
    return Model(network.to(dtype), tokenizer, images)

"""Which architectures can be served from moved caches, how they differ, why others can't be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart: where its text model is, positions, image markers."""

    decoder: str
    axes: int = 1
    markers: tuple[str, str] | None = None  # None: texts only


FAMILIES = {
    "llama": Family("model"),
    "llava": Family("model.language_model", markers=("", "")),
    "qwen2_5_vl": Family("model.language_model", 3, ("<|vision_start|>", "<|vision_end|>")),
}
_REFUSED = {
    "a recurrent state, which can't be cut at chunk borders": (
        "mamba mamba2 falcon_mamba jamba bamba rwkv recurrent_gemma qwen3_next zamba zamba2"
    ),
    "learned absolute positions, which are part of every key and value and can't be moved": (
        "gpt2 gpt_neo gpt_bigcode openai-gpt opt bert roberta biogpt xglm"
    ),
}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # angles don't depend on the length


class UnsupportedModelError(ValueError):
    """The model can't be served from moved caches; the message says why, in one sentence."""


def check(config: Any) -> Family:
    """Return the family of a config; raises `UnsupportedModelError` with the reason."""
    kind = config.model_type
    text = config.get_text_config()
    for reason, kinds in _REFUSED.items():
        if {kind, text.model_type} & set(kinds.split()):
            raise UnsupportedModelError(f"{kind} can't be supported: it has {reason}.")
    if kind not in FAMILIES or (kind == "llava" and text.model_type != "llama"):
        name = kind if text.model_type == kind else f"{kind} on {text.model_type}"
        raise UnsupportedModelError(
            f"{name} is not supported yet; supported are {', '.join(FAMILIES)} (llava on llama)."
        )
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"{kind} with {rope} RoPE can't be supported: its angles change with the length of"
            " the prompt, so a stored key can't be moved."
        )
    if set(getattr(text, "layer_types", None) or []) - {"full_attention"}:
        raise UnsupportedModelError(f"{kind} with sliding-window layers is not supported yet.")
    return FAMILIES[kind]

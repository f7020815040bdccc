"""Text to token ids: the chat template cut into fixed pieces, everything else as plain text."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Template:
    """A chat as token ids: `prefix` user `suffix` answer `between` user `suffix` answer ...

    With a system prompt, `prefix` is `opening`, the prompt, `closing`.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    between: tuple[int, ...]
    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Codec:
    """Encodes texts one by one, so that a chunk has the same tokens everywhere.

    Only the chat template may yield control tokens. Text that merely looks like one, from a
    document or a user, is encoded character by character, as the plain text that it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("this model has no tokenizer.json; convert its tokenizer first")
        self.tokenizer = tokenizer
        spec = json.loads(backend.to_str())
        spec["post_processor"] = None  # adds a beginning-of-text token to whatever is encoded
        self._markers = Tokenizer.from_str(json.dumps(spec))
        self._marker_texts = [token["content"] for token in spec["added_tokens"]]
        self._control = {token["id"] for token in spec["added_tokens"]}
        for stage in ("normalizer", "pre_tokenizer"):
            spec[stage] = _without_prefix_space(spec[stage])
        self._plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
        self._templates: dict[str | None, Template] = {}

    @property
    def spec(self) -> str:
        """The tokenizer's definition; part of a model's fingerprint."""
        return self.tokenizer.backend_tokenizer.to_str()

    def encode(self, text: str) -> list[int]:
        """Encode a text of any origin; never returns a control token."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._control.isdisjoint(ids):
            raise ValueError(f"the tokenizer makes control tokens of plain text: {text[:80]!r}")
        return ids

    def control(self, text: str) -> list[int]:
        """Encode a piece of the model's own template, or a marker; "" gives nothing.

        From the first marker on as the tokenizer does it, which may put a space behind each
        marker; what stands before it continues a text and gets none.
        """
        cut = min((n for n in map(text.find, self._marker_texts) if n >= 0), default=len(text))
        head, tail = (
            tokenizer.encode(piece, add_special_tokens=False).ids
            for tokenizer, piece in ((self._plain, text[:cut]), (self._markers, text[cut:]))
        )
        return head + tail

    def template(self, system: str | None = None) -> Template:
        """Render the chat template once around placeholders and cut it there."""
        if system not in self._templates:
            roles = ["system"] if system else []
            *heads, _, between, suffix = self._cut([*roles, "user", "assistant", "user"])
            opening, closing = self._first(heads[0]), []
            if system:  # a template that has no place for it shows it ahead of what the user says
                closing = self.control(heads[1]) if heads[1:] else self.encode("\n\n")
            prefix = [*opening, *self.encode(system or ""), *closing]
            parts = (prefix, self.control(suffix), self.control(between), opening, closing)
            self._templates[system] = Template(*map(tuple, parts))
        return self._templates[system]

    def _cut(self, roles: list[str]) -> list[str]:
        """Render a chat whose contents are placeholders, and return what stands between them."""
        if not self.tokenizer.chat_template:
            return ["", "\n", "\n", "\n"]
        slots = [f"@@{secrets.token_hex(8)}@@" for _ in roles]
        messages: list[dict[str, Any]] = [
            {"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)
        ]
        # A date in a template would change the compile prefix, and with it every key, each day.
        fixed = {"tokenize": False, "add_generation_prompt": True, "date_string": "1 Jan 2024"}
        text = self.tokenizer.apply_chat_template(messages, **fixed)
        if slots[-1] not in text:  # vision templates that only take a list of parts
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
            text = self.tokenizer.apply_chat_template(messages, **fixed)
        pieces = []
        for role, slot in zip(roles, slots, strict=True):
            piece, found, rest = text.partition(slot)
            if found:
                pieces.append(piece)
                text = rest
            elif role != "system":
                raise ValueError("the chat template does not show user and assistant in turn")
        return [*pieces, text]

    def _first(self, text: str) -> list[int]:
        """Encode what opens the prompt as the tokenizer itself would, with one BOS at most."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        opening = self.tokenizer("", add_special_tokens=True)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return [bos, *ids] if bos in opening[:1] and ids[:1] != [bos] else ids


class Detokenizer:
    """Token ids to text as they come, holding back characters that are not complete.

    `tokenizers.DecodeStream` does this too, but raises on bytes that are no UTF-8, which a model
    is free to produce.
    """

    def __init__(self, codec: Codec) -> None:
        self._decode = codec.tokenizer.backend_tokenizer.decode
        self._ids: list[int] = []
        self._shown = 0  # ids whose text has been returned ...
        self._start = 0  # ... and a little before them, since a decoder looks at neighbours

    def step(self, token: int) -> str:
        """Return the text that a token completes, which may be none."""
        self._ids.append(token)
        text = self._new()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """Return what was held back."""
        text = self._new()
        self._start = self._shown = len(self._ids)
        return text

    def _new(self) -> str:
        shown = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(shown) :]


def _without_prefix_space(stage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Stop SentencePiece-style stages from putting a space before each encoded piece."""
    if stage is None:
        return None
    if stage["type"] == "Sequence":
        name = "normalizers" if "normalizers" in stage else "pretokenizers"
        kept = [s for s in map(_without_prefix_space, stage[name]) if s is not None]
        return {**stage, name: kept}
    if stage["type"] == "Prepend":
        return None
    if stage["type"] == "Metaspace":
        return {**stage, "prepend_scheme": "never"}
    if stage["type"] == "ByteLevel":
        return {**stage, "add_prefix_space": False}
    return stage

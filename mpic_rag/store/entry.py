"""One chunk KV as bytes: safetensors' layout, one contiguous range a layer, every bit checked.

    u64 header length | JSON header | segment | layer.0 | layer.1 | ... | features

Each part is an opaque U8 tensor with an xxh3-128 checksum; the header holds a checksum of itself.
A layer is its keys, then its values, [heads, tokens, dim], as `quantise` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import xxhash

from mpic_rag.segment import ChunkKV, Segment
from mpic_rag.store import quantise

FORMAT = 2
HEADER_LIMIT = 1 << 20
AHEAD = 1 << 16  # read at once when an entry is opened
KEY = re.compile(r"[0-9a-f]{64}")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SEAL = re.compile(rb'"header": ?"([0-9a-f]{32})"')
_BLANK = b'"header": "%s"' % (b"0" * 32)

Read = Callable[[int, int], torch.Tensor]


class StoreError(Exception):
    """An entry is there but can't be trusted; the message says why."""


class Part(NamedTuple):
    """Where a part lies in the file, and the checksum of its bytes."""

    start: int
    end: int
    checksum: str


def checksum(data: torch.Tensor) -> str:
    """xxh3-128 of bytes [n]."""
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def encode(
    key: str, kv: ChunkKV, facts: Mapping[str, str], int8: bool = False
) -> tuple[bytes, dict[str, Any]]:
    """Serialise an entry; returns its bytes and the facts in its header."""
    segment = kv.segment
    layers, heads, tokens, dim = kv.keys.shape
    layout = [segment.ids, *segment.positions, segment.images]
    parts = {"segment": _bytes(torch.stack([row.to(torch.int32) for row in layout]))}
    codec = quantise.INT8 if int8 else quantise.PLAIN
    for n in range(layers):
        parts[f"layer.{n}"] = codec.encode(kv.keys[n].cpu(), kv.values[n].cpu())
    parts["features"] = _bytes(segment.features)
    header: dict[str, Any] = {}
    start = 0
    for name, data in parts.items():
        end = start + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, end]}
        start = end
    about: dict[str, Any] = {
        **facts,
        "format": FORMAT,
        "key": key,
        "storage": "int8" if int8 else "model",
        "dtype": _NAMES[kv.keys.dtype],
        "shape": [layers, heads, tokens, dim],
        "axes": len(segment.positions),
        "features": list(segment.features.shape),
        "key_norm": _norms(kv.keys),
        "value_norm": _norms(kv.values),
        "checksums": {name: checksum(data) for name, data in parts.items()},
    }
    header["__metadata__"] = {"mpic_rag": json.dumps(about), "header": "0" * 32}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    seal = xxhash.xxh3_128_hexdigest(text).encode()
    text = text.replace(_BLANK, b'"header": "%s"' % seal)
    body = b"".join(data.numpy().tobytes() for data in parts.values())
    return len(text).to_bytes(8, "little") + text + body, about


def _norms(states: torch.Tensor) -> list[float]:
    """Mean length of a layer's states: a cheap look at what an entry holds."""
    return [round(x, 4) for x in states.float().norm(dim=-1).mean(dim=(1, 2)).tolist()]


class Entry:
    """An entry opened for reading: facts now, layers when they are asked for.

    `read(start, end)` gives those bytes of the file [end - start]. Every method raises
    `StoreError` where the bytes are not what was written, and `OSError` as `read` does.
    """

    def __init__(self, key: str | None, read: Read, tier: str) -> None:
        """Open for a key, or whatever key it has."""
        self.tier = tier
        self._read = read
        self._ahead: dict[str, torch.Tensor] = {}  # read, not yet asked for
        self._got: dict[str, torch.Tensor] = {}  # of a remote entry, to keep it on this disk
        head = read(0, AHEAD)
        length = int.from_bytes(head[:8].numpy().tobytes(), "little")
        if len(head) < 8 or length > HEADER_LIMIT:
            raise StoreError("not an entry")
        if 8 + length > len(head):
            head = read(0, 8 + length)
        self._head, self._body = head, 8 + length
        self.bytes_read = self._here = len(head)
        self._raw = head.numpy().data
        try:
            self._parse(key, head[8 : 8 + length].numpy().tobytes())
        # What a damaged or hostile header makes the parser raise.
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise StoreError(f"unreadable header: {error!r}") from error

    def _parse(self, key: str | None, text: bytes) -> None:
        seal = _SEAL.search(text)
        if len(text) < self._body - 8:
            raise StoreError("is cut short")
        if seal is None:
            raise StoreError("not an entry of this program")
        blank = text[: seal.start()] + _BLANK + text[seal.end() :]
        if xxhash.xxh3_128_hexdigest(blank).encode() != seal[1]:
            raise StoreError("its header does not match its checksum")
        header = json.loads(text)
        if header["__metadata__"]["header"].encode() != seal[1]:
            raise StoreError("not an entry of this program")
        about = json.loads(header["__metadata__"]["mpic_rag"])
        if about["format"] != FORMAT:
            raise StoreError(f"format {about['format']}, this program reads {FORMAT}")
        if key is not None and about["key"] != key:
            raise StoreError("holds another key")
        self.facts: dict[str, Any] = about
        self._codec = quantise.INT8 if about["storage"] == "int8" else quantise.PLAIN
        self.dtype = DTYPES[about["dtype"]]
        self.layers, self.heads, self.tokens, self.dim = (int(n) for n in about["shape"])
        self._parts = {}
        for name, mark in about["checksums"].items():
            start, end = header[name]["data_offsets"]
            self._parts[name] = Part(self._body + start, self._body + end, mark)
        self.size = max(part.end for part in self._parts.values())
        if not KEY.fullmatch(about["key"]) or min(part.start for part in self._parts.values()) < 0:
            raise StoreError("not an entry of this program")
        size = self._codec.size(self.heads, self.tokens, self.dim, self.dtype)
        for n in range(self.layers):
            part = self._parts[f"layer.{n}"]
            if part.end - part.start != size:
                raise StoreError(f"layer {n} does not have the size that its header says")

    @property
    def kv_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(p.end - p.start for name, p in self._parts.items() if name[:6] == "layer.")

    def _part(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        if part.end <= self._here:
            data = self._head[part.start : part.end]
            if len(data) != part.end - part.start:
                raise StoreError("is cut short")
            mark = xxhash.xxh3_128_hexdigest(self._raw[part.start : part.end])
        else:
            # No request for nothing: object stores refuse an empty range.
            length = part.end - part.start
            data = self._ahead.pop(name, torch.empty(0).byte())
            if length and not len(data):
                data = self._read(part.start, part.end)
                self.bytes_read += len(data)
            if len(data) != part.end - part.start:
                raise StoreError("is cut short")
            mark = checksum(data)
        if mark != part.checksum:
            raise StoreError(f"{name} does not match its checksum")
        if self.tier == "remote":
            self._got[name] = data
        return data

    def raw(self) -> bytes:
        """The whole entry; what is still missing is read at once."""
        if self._here < self.size and any(name not in self._got for name in self._parts):
            rest = self._read(self._here, self.size)
            self.bytes_read += len(rest)
            self._head = torch.cat([self._head, rest])
            self._raw, self._here = self._head.numpy().data, self.size
        parts = (self._got[n] if n in self._got else self._part(n) for n in self._parts)
        head = self._head[: self._body].numpy().tobytes()
        return head + b"".join(part.numpy().tobytes() for part in parts)

    def segment(self, features: bool = False) -> Segment:
        """The tokens; image features [rows, hidden] only where they are asked for."""
        data = self._part("features") if features else torch.empty(0, dtype=torch.uint8)
        try:
            rows = self._part("segment").view(torch.int32).view(self.facts["axes"] + 2, -1)
            shown = data.view(self.dtype).view(self.facts["features"] if features else (0, 0))
        except (RuntimeError, TypeError, KeyError) as error:  # sizes that don't fit
            raise StoreError(f"unreadable segment: {error!r}") from error
        if rows.shape[1] != self.tokens or len(rows) < 3:
            raise StoreError("its segment does not have the size that its header says")
        return Segment(rows[0].long(), rows[1:-1].long(), rows[-1], shown)

    def ahead(self, first: int, last: int) -> None:
        """Read layers from `first` up to `last` in one request; `layer` then has them."""
        parts = {f"layer.{n}": self._parts[f"layer.{n}"] for n in range(first, last)}
        start, end = min(p.start for p in parts.values()), max(p.end for p in parts.values())
        if end <= self._here or end - start != sum(p.end - p.start for p in parts.values()):
            return  # here already, or not in a row
        data = self._read(start, end)
        self.bytes_read += len(data)
        for name, part in parts.items():
            self._ahead[name] = data[part.start - start : part.end - start]

    def layer(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE and values of one layer, both [heads, tokens, dim]."""
        data = self._part(f"layer.{n}")
        try:
            return self._codec.decode(data, self.heads, self.tokens, self.dim, self.dtype)
        except RuntimeError as error:  # a forged size or place
            raise StoreError(f"unreadable layer {n}: {error}") from error

    def kv(self, features: bool = False) -> ChunkKV:
        """All layers at once, [layers, heads, tokens, dim]."""
        if self._codec is quantise.PLAIN and self.size <= self._here:
            return ChunkKV(self.segment(features), *self._all_layers())
        pairs = [self.layer(n) for n in range(self.layers)]
        keys, values = (torch.stack([pair[i] for pair in pairs]) for i in (0, 1))
        return ChunkKV(self.segment(features), keys, values)

    def _all_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of an entry that was read whole, without a copy."""
        parts = [self._parts[f"layer.{n}"] for n in range(self.layers)]
        for n in range(self.layers):
            self._part(f"layer.{n}")
        if any(a.end != b.start for a, b in pairwise(parts)):
            raise StoreError("its layers are not in a row")
        shape = (self.layers, 2, self.heads, self.tokens, self.dim)
        try:
            data = self._head[parts[0].start : parts[-1].end].view(self.dtype).view(shape)
        except RuntimeError as error:  # a forged size or place
            raise StoreError(f"unreadable layers: {error}") from error
        return data[:, 0], data[:, 1]

    def verify(self) -> None:
        """Read everything, to find damage."""
        for name in self._parts:
            self._part(name)

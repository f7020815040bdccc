"""Chunk KVs on disk: one safetensors file a key, written atomically, checked when read."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_KEY = re.compile(r"[0-9a-f]{64}")
_HEADER_LIMIT = 1 << 20


class StoreError(Exception):
    """An entry is there but can't be trusted; the message says why."""


class Store:
    """Maps a content key (64 hexadecimal digits) to named tensors below `root`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """The file of a key, whether or not it exists."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a content key")
        return self.root / key[:2] / f"{key}.safetensors"

    def contains(self, key: str) -> bool:
        """Whether an entry is there; only `get` tells whether it is sound."""
        return self.path(key).is_file()

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry; a reader sees the old one, the new one or none, never a part."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
        data = save(tensors, metadata=checksums)
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(data)
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def get(self, key: str, names: Collection[str]) -> tuple[dict[str, torch.Tensor], int]:
        """Read the named tensors, and say how many bytes that took.

            Raises `KeyError` where there is no entry, `StoreError` where it is torn or damaged, and
        `OSError` where it can't be read.
            Reads into buffers of its own: a file cut short under a memory map kills the process.
        """
        try:
            with self.path(key).open("rb", buffering=0) as file:
                return _read(file.fileno(), names)
        except FileNotFoundError:
            raise KeyError(key) from None
        # What a damaged header makes the parser raise.
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise StoreError(f"unreadable: {error!r}") from error

    def delete(self, key: str) -> bool:
        """Delete an entry; returns whether there was one."""
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True


def _read(fd: int, names: Collection[str]) -> tuple[dict[str, torch.Tensor], int]:
    """Parse safetensors' layout: u64 header length, JSON header, tensor bytes."""
    head = os.pread(fd, 1 << 13, 0)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > _HEADER_LIMIT:
        raise StoreError("not a safetensors file")
    if 8 + length > len(head):
        head = os.pread(fd, 8 + length, 0)
    header = json.loads(head[8 : 8 + length])
    checksums = header.get("__metadata__", {})
    size = os.fstat(fd).st_size
    tensors, total = {}, 8 + length
    for name in names:
        if name not in header or name not in checksums:
            raise StoreError(f"has no {name}")
        entry = header[name]
        dtype, shape = _DTYPES.get(entry["dtype"]), entry["shape"]
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        if dtype is None or end - start != math.prod(shape) * dtype.itemsize or min(shape) < 0:
            raise StoreError(f"{name} does not have the size that its header says")
        if end > size:
            raise StoreError("is cut short")
        buffer = torch.empty(end - start, dtype=torch.uint8)
        done = 0
        while done < end - start:  # one call reads 2 GiB at most
            read = os.preadv(fd, [buffer.numpy().data[done:]], start + done)
            if not read:
                raise StoreError("is cut short")
            done += read
        tensors[name] = buffer.view(dtype).view(shape)
        if _checksum(tensors[name]) != checksums[name]:
            raise StoreError(f"{name} does not match its checksum")
        total += end - start
    return tensors, total


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)

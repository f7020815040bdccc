"""Read chunk KVs while the model runs: layer l + 1 loads while layer l is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError

import torch

from mpic_rag.segment import ChunkKV, Segment
from mpic_rag.store import Entry, Found
from mpic_rag.store.costs import Costs
from mpic_rag.store.remote import RemoteError

SMALL = 1 << 20  # bytes of an entry that is not worth a thread
REQUEST = 1 << 21  # bytes, at most, unless a layer has more
Pair = tuple[torch.Tensor, torch.Tensor]

# A disk is kept busy by few, a latency hidden by more; too many, and late layers delay early ones.
_readers = {"disk": ThreadPoolExecutor(4, "disk"), "remote": ThreadPoolExecutor(8, "remote")}


class LoadError(Exception):
    """An entry could not be read to its end; `error` says why."""

    def __init__(self, loading: Loading, error: Exception) -> None:
        super().__init__(str(error))
        self.loading, self.error = loading, error


class Loading:
    """The layers of one entry, on their way."""

    def __init__(
        self, found: Found, entry: Entry, segment: Segment, deadline: float, since: int
    ) -> None:
        self.found, self.entry, self.segment = found, entry, segment
        self.since = since
        self.began, self.deadline = time.monotonic(), deadline
        self.ended = 0.0
        # A request to a remote costs something whatever it brings: some layers come in one.
        size = entry.kv_bytes // entry.layers
        self.step = max(1, REQUEST // size) if entry.tier == "remote" else 1
        self._futures: list[Future[list[Pair]]] = []

    def start(self, first: int) -> None:
        """Queue the layers of the next request; all entries' first ones come before any second."""
        last = min(first + self.step, self.entry.layers)
        self._futures.append(_readers[self.entry.tier].submit(self._read, first, last))

    def _read(self, first: int, last: int) -> list[Pair]:
        if last - first > 1:
            self.entry.ahead(first, last)
        pairs = [self.entry.layer(n) for n in range(first, last)]
        self.ended = time.monotonic()
        return pairs

    def layer(self, n: int) -> Pair:
        """Wait for a layer; raises `LoadError`."""
        try:
            left = self.deadline - time.monotonic()
            future = self._futures[n // self.step]
            pairs = future.result(None if left == float("inf") else max(0.0, left))
            return pairs[n % self.step]
        except TimeoutError as error:
            if future.done():  # its own error
                raise LoadError(self, error) from error
            slow = RemoteError("remote timeout", "the entry came too slowly")
            raise LoadError(self, slow) from error
        except Exception as error:
            raise LoadError(self, error) from error

    def abandon(self) -> None:
        """Read no further."""
        for future in self._futures:
            future.cancel()

    def finish(self) -> ChunkKV:
        """All layers together, once they have come."""
        pairs = [self.layer(n) for n in range(self.entry.layers)]
        keys, values = (torch.stack([pair[i] for pair in pairs]) for i in (0, 1))
        return ChunkKV(self.segment, keys, values)


def start(loadings: Sequence[Loading]) -> None:
    """Begin to read entries side by side, layer by layer."""
    for n in range(max((loading.entry.layers for loading in loadings), default=0)):
        for loading in loadings:
            if n % loading.step == 0 and n < loading.entry.layers:
                loading.start(n)


def measure(costs: Costs, loadings: Sequence[Loading]) -> None:
    """Tell the costs what reading these entries took."""
    for tier in {loading.entry.tier for loading in loadings}:
        mine = [loading for loading in loadings if loading.entry.tier == tier]
        size = sum(loading.entry.bytes_read for loading in mine)
        seconds = max(x.ended for x in mine) - min(x.began for x in mine)
        costs.measure_load(tier, size, seconds)

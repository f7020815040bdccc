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
Pair = tuple[torch.Tensor, torch.Tensor]

# A disk is kept busy by few, a network's latency is hidden by many.
_readers = {"disk": ThreadPoolExecutor(4, "disk"), "remote": ThreadPoolExecutor(16, "remote")}


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
        self._futures: list[Future[Pair]] = []

    def start(self, layer: int) -> None:
        """Queue the next layer; all entries' first ones come before any second one."""
        self._futures.append(_readers[self.entry.tier].submit(self._read, layer))

    def _read(self, layer: int) -> Pair:
        pair = self.entry.layer(layer)
        self.ended = time.monotonic()
        return pair

    def layer(self, n: int) -> Pair:
        """Wait for a layer; raises `LoadError`."""
        try:
            left = self.deadline - time.monotonic()
            return self._futures[n].result(None if left == float("inf") else max(0.0, left))
        except TimeoutError as error:
            if self._futures[n].done():  # its own error
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
            loading.start(n)


def measure(costs: Costs, loadings: Sequence[Loading]) -> None:
    """Tell the costs what reading these entries took."""
    for tier in {loading.entry.tier for loading in loadings}:
        mine = [loading for loading in loadings if loading.entry.tier == tier]
        size = sum(loading.entry.bytes_read for loading in mine)
        seconds = max(x.ended for x in mine) - min(x.began for x in mine)
        costs.measure_load(tier, size, seconds)

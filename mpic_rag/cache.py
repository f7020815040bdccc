"""A preallocated KV cache on transformers' own classes: scatter while linking, append after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class LinkedLayer(CacheLayerMixin):
    """One layer's keys (after RoPE) and values, [1, heads, capacity, dim]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.rows: torch.Tensor | None = None
        self.fill: Callable[[], None] | None = None  # writes what is still being loaded
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers come with the constructor."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states into the chosen slots, or behind the last one; return all slots."""
        if self.fill is not None:
            self.fill()
            self.fill = None
        if self.rows is not None:
            self.keys.index_copy_(2, self.rows, key_states)
            self.values.index_copy_(2, self.rows, value_states)
        else:
            end = self.length + key_states.shape[2]
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
            self.length = end
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that the next pass attends to, and the first one's index."""
        return self.length + (query_length if self.rows is None else 0), 0

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.length

    def get_max_length(self) -> int:
        """Slots allocated."""
        return self.keys.shape[2]


class LinkedCache(Cache):
    """All layers of one conversation."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take buffers [layers, 1, heads, capacity, dim]; their content is not read."""
        super().__init__(layers=[LinkedLayer(k, v) for k, v in zip(keys, values, strict=True)])
        self._keys, self._values = keys, values

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> LinkedCache:
        """Allocate for (layers, heads, capacity, dim)."""
        layers, heads, capacity, dim = shape
        size = (layers, 1, heads, capacity, dim)
        keys, values = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def length(self) -> int:
        """Slots in use."""
        return self.layers[0].length

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self._keys.shape[3]

    def extend(self, slots: int) -> None:
        """Count further slots as in use; the caller fills each before anything attends to it."""
        if self.length + slots > self.capacity:
            raise ValueError(f"{self.length + slots} tokens in a cache of {self.capacity}")
        for layer in self.layers:
            layer.length += slots

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill slots [tokens] in all layers; keys and values [layers, heads, tokens, dim]."""
        self._keys[:, 0].index_copy_(2, slots, keys)
        self._values[:, 0].index_copy_(2, slots, values)

    def defer(self, slots: torch.Tensor, read: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
        """Fill slots [tokens] of each layer when the next pass comes to it.

        `read(layer)` gives keys and values, both [heads, tokens, dim].
        """

        def fill(n: int) -> None:
            keys, values = read(n)
            self._keys[n, 0].index_copy_(1, slots, keys)
            self._values[n, 0].index_copy_(1, slots, values)

        for n, layer in enumerate(self.layers):
            layer.fill = partial(fill, n)

    def ready(self, layer: int) -> None:
        """Wait for what is deferred of one layer."""
        waiting = self.layers[layer]
        if waiting.fill is not None:
            waiting.fill()
            waiting.fill = None

    def first_layers(self, count: int, length: int) -> LinkedCache:
        """Return a cache of the first layers, as large, with a copy of the first slots."""
        _, _, heads, _, dim = self._keys.shape
        cache = LinkedCache.allocate(
            (count, heads, self.capacity, dim), self._keys.dtype, self._keys.device
        )
        cache._keys[:, :, :, :length] = self._keys[:count, :, :, :length]
        cache._values[:, :, :, :length] = self._values[:count, :, :, :length]
        cache.extend(length)
        return cache

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)
            layer.fill = None

    def scatter(self, rows: torch.Tensor | None) -> None:
        """Make the next passes write to these slots [tokens]; None: append."""
        for layer in self.layers:
            layer.rows = rows

    def grown(self, capacity: int) -> LinkedCache:
        """Return a cache with room for `capacity` slots and the same content."""
        layers, _, heads, _, dim = self._keys.shape
        cache = LinkedCache.allocate(
            (layers, heads, capacity, dim), self._keys.dtype, self._keys.device
        )
        cache._keys[:, :, :, : self.length] = self._keys[:, :, :, : self.length]
        cache._values[:, :, :, : self.length] = self._values[:, :, :, : self.length]
        cache.extend(self.length)
        return cache

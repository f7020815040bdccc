"""Load or compute: what is quicker here, by what was measured here."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECENT = 0.3  # weight of the newest measurement
WORTH = 0.85  # a plan must promise this share of the simpler one's seconds to be preferred


@dataclass
class Tier:
    """Moving averages of one tier: seconds until the first byte, bytes a second after it."""

    latency: float
    bandwidth: float
    samples: int = 0

    def measure(self, size: int, seconds: float, first: float = 0.0) -> None:
        """Take in that `size` bytes came in `seconds`, the first of them after `first`."""
        weight = RECENT if self.samples else 1.0
        self.latency += weight * (first - self.latency)
        speed = size / max(seconds - first, 1e-6)
        self.bandwidth += weight * (speed - self.bandwidth)
        self.samples += 1


def _tiers() -> dict[str, Tier]:
    """Guesses to start from, on the side of trying."""
    return {"disk": Tier(1e-4, 1e9), "remote": Tier(0.02, 1e8)}


@dataclass
class Costs:
    """Measured speeds of tiers, and of prefill by model; kept in `path` between runs."""

    path: Path | None = None
    tiers: dict[str, Tier] = field(default_factory=_tiers)
    token_s: dict[str, float] = field(default_factory=dict)  # seconds a token, by model and device

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        try:
            kept = json.loads(self.path.read_text()) if self.path else {}
            self.tiers |= {name: Tier(**t) for name, t in kept.get("tiers", {}).items()}
            self.token_s |= {str(k): float(v) for k, v in kept.get("token_s", {}).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # figures only: they are measured again

    def save(self) -> None:
        """Keep the figures; a store that can't be written to does without."""
        if self.path:
            part = self.path.with_suffix(".part")
            figures = {"tiers": {n: asdict(t) for n, t in self.tiers.items()}}
            try:
                part.write_text(json.dumps(figures | {"token_s": self.token_s}))
                part.replace(self.path)
            except OSError:
                return

    def measure_load(self, tier: str, size: int, seconds: float, first: float = 0.0) -> None:
        """Take in a load; `memory` has no figures, it always wins."""
        with self._lock:
            if tier in self.tiers and size:
                self.tiers[tier].measure(size, seconds, first)

    def measure_prefill(self, model: str, tokens: int, seconds: float) -> None:
        """Take in a prefill that is long enough to say something."""
        with self._lock:
            if tokens >= 64:
                old = self.token_s.get(model, seconds / tokens)
                self.token_s[model] = old + RECENT * (seconds / tokens - old)

    def to_compute(self, model: str, entries: Sequence[tuple[str, int, int]]) -> set[int]:
        """Which entries (tier, bytes, tokens) are better computed than loaded.

        Loading runs beside computing, layer by layer, so a plan takes as long as the longer of the
        two. Mixed plans must promise a good deal more than loading or computing everything.
        """
        rate = self.token_s.get(model)
        if rate is None:
            return set()
        loads = [self.load_s(tier, size) for tier, size, _ in entries]
        computes = [rate * tokens for _, _, tokens in entries]
        order = sorted(range(len(entries)), key=lambda i: computes[i] / (loads[i] + 1e-9))
        latency = max((self.tiers[t].latency for t, _, _ in entries if t in self.tiers), default=0)
        best, best_s = 0, latency + sum(loads)
        for m in range(1, len(order) + 1):
            load = sum(loads[i] for i in order[m:]) + (latency if m < len(order) else 0)
            seconds = max(load, sum(computes[i] for i in order[:m]))
            if seconds < WORTH * best_s:
                best, best_s = m, seconds
        return set(order[:best])

    def load_s(self, tier: str, size: int) -> float:
        """Expected seconds for bytes of a tier, once they flow."""
        return size / self.tiers[tier].bandwidth if tier in self.tiers else 0.0

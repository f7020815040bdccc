"""A library's rules, in a file beside its entries."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Policy:
    """A library's rules: bytes on this disk, seconds an unused entry lives, how chunks compile."""

    limit: int = 50_000_000_000
    ttl_s: float | None = None
    isolated_only: bool = False

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy; a damaged file must not turn into a laxer one."""
        if not path.exists():
            return cls()
        try:
            kept = json.loads(path.read_text())
            return cls(**{field.name: kept[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged: set the library's rules again") from error

    def write(self, path: Path) -> None:
        """Write it so that others see all of it or nothing."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

"""Where entries can lie: memory, disks of any speed, an S3 server on loopback behind a network."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpic_rag.documents import Chunk
from mpic_rag.engine import Engine
from mpic_rag.model import Model
from mpic_rag.store import Store
from mpic_rag.store.entry import Entry, Read
from mpic_rag.store.files import Stored
from mpic_rag.store.local import Local

QUESTION = "What is this about?"
BUCKET = "s3://caches"
_SECRETS = {"key": "bench", "secret": "bench"}


def ttft(engine: Engine, chunks: list[Chunk], selector: str) -> float:
    """Seconds to the first token."""
    return engine.ask(QUESTION, chunks, selector=selector, max_tokens=1).report.ttft_s


@dataclass
class Place:
    """Entries of a store in one place; each `ttft` finds them there and nowhere nearer.

    `rate` [bytes/s] slows the disk down, `cold` drops its page cache, `port` is an S3 server.
    """

    name: str
    memory: bool = False
    rate: float | None = None
    cold: bool = False
    port: int | None = None

    @contextlib.contextmanager
    def engine(self, model: Model, home: Path, adaptive: bool) -> Iterator[Engine]:
        """An engine on entries that `home` or the server has, with speeds of its own measuring."""
        options: dict[str, Any] = {"memory": 1 << 34 if self.memory else 0, "adaptive": adaptive}
        if self.port:
            home = home / f"{self.name}-{adaptive}"
            options |= remote(self.port)
        store = Store(home, **options)
        store.costs.path = None
        engine = Engine(model, store)
        # A chunk that is passed over must not turn into an entry that is nearer.
        engine.compile_later = lambda chunks: None  # type: ignore[method-assign]
        with contextlib.ExitStack() as stack:
            if self.rate or self.cold:
                stack.enter_context(SlowDisk(engine.libraries[0].disk, self.rate, self.cold))
            yield engine
        store.close()

    def ttft(self, engine: Engine, chunks: list[Chunk]) -> float:
        """Seconds to the first token, everything that could be reused."""
        seconds = ttft(engine, chunks, "none")
        engine.drain()
        if self.port:
            disk = engine.libraries[0].disk
            disk.delete([row.key for row in disk.rows()])
        return seconds


class SlowDisk:
    """Makes a library's disk deliver so many bytes a second, whoever reads; or forget its cache."""

    def __init__(self, disk: Local, rate: float | None = None, cold: bool = False) -> None:
        self.disk, self.rate, self.cold = disk, rate, cold
        self._open, self._free_at, self._lock = disk.open, 0.0, threading.Lock()

    def __enter__(self) -> None:
        self.disk.open = self._slowly  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self.disk.open = self._open  # type: ignore[method-assign]

    def _slowly(self, stored: Stored) -> Entry:
        if self.cold:
            self._forget(stored)
        entry = self._open(stored)
        if self.rate:
            entry._read = partial(self._wait, entry._read)
            self._charge(entry.bytes_read)
        return entry

    def _wait(self, read: Read, start: int, end: int) -> torch.Tensor:
        self._charge(end - start)
        return read(start, end)

    def _charge(self, size: int) -> None:
        assert self.rate
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.rate
            wait = self._free_at - now
        time.sleep(wait)

    def _forget(self, stored: Stored) -> None:
        fd = os.open(self.disk.folder / "entries" / stored.file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remote(port: int, timeout: float = 2.0) -> dict[str, Any]:
    """What a `Store` needs to reach the server of `s3`."""
    return {
        "remote": f"{BUCKET}/bench",
        "remote_timeout": timeout,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "config_kwargs": {"retries": {"max_attempts": 0}, "max_pool_connections": 64},
        **_SECRETS,
    }


@contextlib.contextmanager
def s3() -> Iterator[int]:
    """Moto's S3 server, in a process of its own; gives its port. Needs the extra `bench`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await(server, port)
        import s3fs

        url = f"http://127.0.0.1:{port}"
        s3fs.S3FileSystem(**_SECRETS, endpoint_url=url, skip_instance_cache=True).mkdir(BUCKET)
        yield port
    finally:
        server.terminate()
        server.wait()


def _await(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError("moto's S3 server doesn't start: pip install 'mpic-rag[bench]'")

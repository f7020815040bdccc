"""The remote tier: content-addressed objects behind any `fsspec` URL, and a circuit breaker."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from mpic_rag.store.entry import Entry, Read

AHEAD = 1 << 18  # bytes of the first request: all of a small entry, the header of a large one
AT_ONCE = 32  # requests
REST = 30.0  # seconds until a remote that failed is looked at again


class RemoteError(OSError):
    """The remote storage failed; `cause` is the kind of fault."""

    def __init__(self, cause: str, detail: object) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


def _cause(error: BaseException) -> str:
    if isinstance(error, FutureTimeout | TimeoutError | asyncio.TimeoutError):
        return "remote timeout"
    return "remote refused" if isinstance(error, PermissionError) else "remote error"


class Remote:
    """Objects below `url`; one call takes at most `timeout` seconds.

    After a failure nothing is asked for `REST` seconds; then a probe in the background, which no
    request waits for, says whether the remote is back.
    """

    def __init__(self, url: str, timeout: float = 2.0, **options: Any) -> None:
        self.url, self.timeout = url, timeout
        # Cached listings would hide what other machines deleted.
        options = {"use_listings_cache": False, "skip_instance_cache": True} | options
        self.fs, self.base = fsspec.core.url_to_fs(url, **options)
        self._pool = ThreadPoolExecutor(8, "remote")
        self._lock = threading.Lock()
        self._open_until = 0.0
        self._probing = False

    @property
    def available(self) -> bool:
        """Whether requests are sent; starts a probe where it is time for one."""
        with self._lock:
            if not self._open_until:
                return True
            if time.monotonic() >= self._open_until and not self._probing:
                self._probing = True
                threading.Thread(target=self._probe, daemon=True).start()
            return False

    def rest(self) -> None:
        """Ask for nothing for a while."""
        with self._lock:
            self._open_until = time.monotonic() + REST

    def _probe(self) -> None:
        try:
            self._call("cat_file", f"{self.base}/probe")
        except RemoteError:
            return  # it has been put off again
        except FileNotFoundError:
            pass  # an answer like any other
        finally:
            self._probing = False
        with self._lock:
            self._open_until = 0.0

    def _start(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.fs.async_impl:
            work = getattr(self.fs, f"_{name}")(*args, **kwargs)
            return asyncio.run_coroutine_threadsafe(work, self.fs.loop)
        return self._pool.submit(getattr(self.fs, name), *args, **kwargs)

    def _finish(self, future: Future[Any], deadline: float) -> Any:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FileNotFoundError:
            raise
        except FileExistsError:
            return None  # equal keys mean equal content
        except Exception as error:  # client libraries raise what they like
            future.cancel()
            self.rest()
            raise RemoteError(_cause(error), f"{error!r} from {self.url}") from error

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + self.timeout
        return self._finish(self._start(name, *args, **kwargs), deadline)

    def path(self, library: str, key: str) -> str:
        """Where an entry's object is."""
        return f"{self.base}/{library}/{key[:2]}/{key}"

    def open(
        self, wanted: Sequence[tuple[str, str]]
    ) -> list[Callable[[], Entry] | RemoteError | None]:
        """Ask for the heads of entries (library, key) at once.

        For each: what opens it, why it can't be had, or None where there is none. Small entries
        come whole.
        """
        began = time.monotonic()
        started = [
            self._start("cat_file", self.path(library, key), start=0, end=AHEAD)
            for library, key in wanted
        ]
        found: list[Callable[[], Entry] | RemoteError | None] = []
        for (library, key), future in zip(wanted, started, strict=True):
            try:
                head = self._finish(future, began + self.timeout)
                read = self._reader(self.path(library, key), head)
                found.append(partial(Entry, key, read, "remote"))
            except FileNotFoundError:
                found.append(None)
            except RemoteError as error:
                found.append(error)
        return found

    def _reader(self, path: str, head: bytes) -> Read:
        first = _tensor(head)

        def read(start: int, end: int) -> torch.Tensor:
            if start == 0 or end <= len(first) or len(first) < AHEAD:
                return first[start : max(end, AHEAD)]  # a shorter head is the whole object
            return _tensor(self._call("cat_file", path, start=start, end=end))

        return read

    def put(self, library: str, key: str, data: bytes, document: str) -> None:
        """Create an object, unless it is there; an object store shows it whole or not at all."""
        if document:
            self._create(f"{self.base}/{library}/documents/{document}/{key}", b"")
        self._create(self.path(library, key), data)

    def _create(self, path: str, data: bytes) -> None:
        if isinstance(self.fs, LocalFileSystem):  # a mounted share: not atomic by itself
            part = f"{path}.{uuid.uuid4().hex}.part"
            self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
            self._call("pipe_file", part, data)
            self._call("mv", part, path)
        else:
            self._call("pipe_file", path, data, mode="create")

    def keys(self, library: str, document: str = "") -> list[str]:
        """Keys of all entries of a library, or of a document."""
        below = f"{self.base}/{library}/" + (f"documents/{document}" if document else "")
        try:
            names = [path.rpartition("/")[2] for path in self._call("find", below)]
        except FileNotFoundError:
            return []
        return sorted({name for name in names if len(name) == 64})

    def delete(self, library: str, keys: Sequence[str], document: str = "") -> None:
        """Remove objects; leaves a note from which other machines learn of it."""
        marks = [f"{self.base}/{library}/documents/{document}/{k}" for k in keys if document]
        self._each("rm_file", [*(self.path(library, key) for key in keys), *marks])
        names = [*keys, *([document] if document else [])]
        note = f"{self.base}/{library}/deleted/{time.time_ns():020}-{uuid.uuid4().hex}"
        self._create(note, "\n".join(names).encode())

    def discard(self, library: str, key: str) -> None:
        """Remove a damaged object, so that a sound one can take its place."""
        self._each("rm_file", [self.path(library, key)])

    def deletions(self, library: str, after: str) -> tuple[list[str], str]:
        """What was deleted after a note, by all machines, and the newest note."""
        try:
            notes = sorted(self._call("find", f"{self.base}/{library}/deleted"))
        except FileNotFoundError:
            return [], after
        new = [n for n in notes if n.rpartition("/")[2] > after]
        texts = self._each("cat_file", new)
        newest = new[-1].rpartition("/")[2] if new else after
        return [name for text in texts for name in (text or b"").decode().split("\n")], newest

    def _each(self, name: str, paths: Sequence[str]) -> list[Any]:
        """Call something for many objects, some at once; None for those that aren't there."""
        results: list[Any] = []
        for start in range(0, len(paths), AT_ONCE):
            deadline = time.monotonic() + self.timeout
            for future in [self._start(name, path) for path in paths[start : start + AT_ONCE]]:
                try:
                    results.append(self._finish(future, deadline))
                except FileNotFoundError:
                    results.append(None)
        return results


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()

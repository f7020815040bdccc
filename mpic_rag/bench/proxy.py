"""A TCP proxy that delays, slows, cuts, refuses, drips or hangs, as networks do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 1 << 18


class Proxy:
    """Passes connections on to a local port, for as long as it is entered.

    `mode` is pass, refuse, cut, hang or drip; `delay` [s] is added to each round trip, `rate`
    [bytes/s] bounds all answers together; `served` counts connections.
    """

    def __init__(self, target: int, delay: float = 0.0, rate: float | None = None) -> None:
        self.target, self.delay, self.rate = target, delay, rate
        self.mode, self.served = "pass", 0
        self._free_at, self._lock = 0.0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.served += 1
            if self.mode == "refuse":
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as server,
            client,
        ):
            up = threading.Thread(target=self._ask, args=(client, server), daemon=True)
            up.start()
            self._answer(server, client)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(PIECE):
                # A request that fits in one piece, as those that read do, is one round trip.
                time.sleep(self.delay)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(PIECE):
                if self.mode == "cut":
                    client.sendall(data[: len(data) // 2])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                if self.mode == "hang":
                    time.sleep(30)
                    return
                if self.mode == "drip":
                    for n in range(len(data)):
                        client.sendall(data[n : n + 1])
                        time.sleep(0.1)
                    return
                self._wait(len(data))
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)

    def _wait(self, size: int) -> None:
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.rate
            wait = self._free_at - now
        time.sleep(wait)

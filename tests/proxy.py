"""A TCP proxy that delays, cuts, refuses, drips or hangs, as networks do."""

import contextlib
import socket
import threading
import time


class Proxy:
    """Passes connections on to a port; `mode` says how badly, `served` counts connections."""

    def __init__(self, port):
        self.target, self.mode, self.delay, self.served = port, "pass", 0.0, 0
        self.rate = None  # bytes a second, of all answers together
        self._free_at, self._lock = 0.0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
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

    def _serve(self, client):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as server,
            client,
        ):
            up = threading.Thread(target=self._pump, args=(client, server, False), daemon=True)
            up.start()
            self._pump(server, client, True)

    def _pump(self, source, sink, answer):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answer and not self._spoil(sink, data):
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _spoil(self, sink, data):
        """Delay an answer's piece; false where the connection is lost instead."""
        if self.mode == "cut":
            sink.sendall(data[: len(data) // 2])
            sink.shutdown(socket.SHUT_RDWR)
            return False
        if self.mode == "hang":
            time.sleep(30)
            return False
        if self.mode == "drip":
            for n in range(len(data)):
                sink.sendall(data[n : n + 1])
                time.sleep(0.1)
            return False
        time.sleep(self.delay)
        if self.rate:
            with self._lock:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(data) / self.rate
                wait = self._free_at - now
            time.sleep(max(0.0, wait))
        return True

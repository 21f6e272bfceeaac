"""The other end of a worker's link, as short as it can be."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

from veloxquant.supervisor.framing import pack, recv_frame
from veloxquant.supervisor.messages import Beat, Command, Hello, Launch, LaunchSpec, Message

_Kind = TypeVar("_Kind", bound=Message)


class FakeSupervisor:
    """Starts one real worker process and talks to it."""

    def __init__(self, spec: LaunchSpec, home: Path, *, token: str = "") -> None:
        self.received: list[Any] = []
        self._news: queue.Queue[Any] = queue.Queue()
        ours, theirs = socket.socketpair()
        self._sock = ours
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        environment = {**os.environ, "VELOXQUANT_HOME": str(home), "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [
                sys.executable, "-P", "-m", "veloxquant.worker",
                "--parent", str(os.getpid()), "--link", str(theirs.fileno()),
            ],
            pass_fds=(theirs.fileno(), listener.fileno()),
            env=environment,
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        fd = listener.fileno()
        self.send(Hello("supervisor", "test", os.getpid()))
        self.send(Launch(spec, token=token, listen_fd=fd, state_dir=str(home)))
        listener.close()
        self._closed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def url(self) -> str:
        """Where the worker listens."""
        return f"http://127.0.0.1:{self.port}"

    def send(self, message: Message) -> None:
        self._sock.sendall(pack(message))

    def _read(self) -> None:
        try:
            while messages := recv_frame(self._sock):
                for message in messages:
                    self.received.append(message)
                    self._news.put(message)
        except OSError:
            pass
        self._news.put(None)

    def expect(self, kind: type[_Kind], timeout: float = 50.0) -> _Kind:
        """The next message of a kind; fails with what came instead."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._news.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message
            if message is None:
                raise AssertionError(f"no {kind.__name__}; got {self.received[-5:]}")

    def ask(self, op: Any, **args: Any) -> None:
        self.send(Command(f"{op}-1", op, args))

    def _beat(self) -> None:
        while not self._closed.wait(1.0):
            try:
                self.send(Beat(time.monotonic()))
            except OSError:
                return

    def wait(self, timeout: float = 15.0) -> int:
        """The worker's exit code."""
        return self.process.wait(timeout)

    def hang_up(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self.process.kill()
        self.process.wait(5)
        if self.process.stderr:
            self.process.stderr.close()
        self._sock.close()

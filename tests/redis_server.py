"""A Redis of a test's own, on a socket in a folder; it can be killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import poll

START_S = 10.0


class RedisProcess:
    """One server that keeps nothing over a restart."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis+unix://{self.socket}"

    def start(self) -> None:
        words = [
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        process = self._process = subprocess.Popen(
            [self._program, *words], cwd=self._folder, stdout=subprocess.DEVNULL
        )

        def answers() -> bool:
            assert process.poll() is None, "redis-server ended"
            try:
                return self.say(b"PING\r\n").startswith(b"+PONG")
            except OSError:
                return False

        poll(answers, what="redis-server answers", deadline_s=START_S, every_s=0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def empty(self) -> None:
        """Forget everything."""
        assert self.say(b"FLUSHALL\r\n") == b"+OK\r\n"

    def say(self, words: bytes) -> bytes:
        """The beginning of the answer to a command."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            link.sendall(words)
            return link.recv(4096)


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisProcess]:
    """A server that answers; skips where there is none to start."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server here")
    server = RedisProcess(program, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()

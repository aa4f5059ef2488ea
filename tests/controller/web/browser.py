"""A small driver of a real headless Chromium over the DevTools protocol, for the dashboard's tests.

One page, one thread. It is no test framework: tests say what they expect.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_S = 30.0
_KEY_CODES = {"Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Enter": 13}


class Browser:
    """One headless browser with one page; use it as a context."""

    def __init__(self, folder: Path) -> None:
        """Start it.

        Args:
            folder: An empty folder for its profile.
        """
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._number = 0
        self._open = contextlib.ExitStack()
        self.errors: list[str] = []
        """Exceptions, console errors and refusals of the content security policy so far."""
        self.requests: list[str] = []
        """URLs asked for so far."""
        try:
            self._socket = self._connect(folder / "DevToolsActivePort")
        except BaseException:
            self._process.kill()
            raise
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with contextlib.suppress(WebSocketException, OSError):
            self.command("Browser.close")
            self._open.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _connect(self, port_file: Path) -> ClientConnection:
        until_s = time.monotonic() + PATIENCE_S
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert time.monotonic() < until_s, "the browser does not start"
            assert self._process.poll() is None, "the browser ended"
            time.sleep(0.05)
        port, path = port_file.read_text().splitlines()
        root = f"ws://127.0.0.1:{port}"
        with self._reach(root + path, int(port)) as whole:
            whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            targets = json.loads(whole.recv(PATIENCE_S))["result"]["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        return self._open.enter_context(self._reach(f"{root}/devtools/page/{page}", int(port)))

    @staticmethod
    def _reach(url: str, port: int) -> ClientConnection:
        # A socket of our own: no proxy of the environment is asked for the way.
        # No pings: what a test does not read for a while would hold up their answers.
        return connect(
            url,
            sock=socket.create_connection(("127.0.0.1", port)),
            max_size=2**26,
            ping_interval=None,
        )

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Order one thing of the DevTools protocol, and answer with its result."""
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        for message in self._messages():
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError(f"{method}: no answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            message = json.loads(self._socket.recv(PATIENCE_S))
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        seen = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(seen["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if seen["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(seen["args"]))
            case "Log.entryAdded" if seen["entry"]["level"] == "error":
                self.errors.append(f"{seen['entry']['text']} {seen['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(seen["request"]["url"])

    def view(self, width: int, height: int, *, scheme: str = "light", scale: float = 1) -> None:
        """Set the size of the page, CSS pixels, and the colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        """Go to a page and forget what was noted of the one before."""
        self._go("about:blank")  # what the page before still asks for must not count for this one
        self.errors.clear()
        self.requests.clear()
        self._go(url)

    def _go(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        there = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        self.wait_for(there)

    def js(self, expression: str) -> Any:
        """The value of an expression on the page, waited for if it is a promise."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element shows as text."""
        shown: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return shown

    def wait_for(self, expression: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until an expression is true, and answer with its value."""
        until_s = time.monotonic() + patience_s
        while not (value := self.js(expression)):
            assert time.monotonic() < until_s, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press and release a key by its name."""
        code = _KEY_CODES[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write what the page looks like as PNG."""
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

"""An engine that costs next to nothing: answers at once, or streams a token every 2 ms.

    python engine.py PORT

OpenAI's chat interface, whatever it is asked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools

MODEL = "m"
TOKENS = 64
TOKEN_S = 0.002


class Engine(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self) -> None:
        """Begin without a request."""
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()

    def connection_made(self, transport: Any) -> None:
        """A proxy connects."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes come."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._body += body

    def on_message_complete(self) -> None:
        """A request is whole."""
        body = json.loads(self._body) if self._body else {}
        self._body.clear()
        if body.get("stream"):
            self._transport.write(HEAD)
            self._left = TOKENS
            self._next()
        else:
            self._transport.write(ANSWER if body else HEALTHY)

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        self._transport.write(TOKEN if self._left else LAST)
        if self._left:
            asyncio.get_running_loop().call_later(TOKEN_S, self._next)


def _event(content: dict[str, Any]) -> bytes:
    event = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 300, "completion_tokens": tokens, "total_tokens": 300 + tokens}


BASE = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
WHOLE = BASE | {
    "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop",
                 "message": {"role": "assistant", "content": "word " * TOKENS}}],
    "usage": _usage(TOKENS),
}  # fmt: skip
PART = BASE | {"object": "chat.completion.chunk"}
BODY = json.dumps(WHOLE).encode()
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ANSWER = JSON_HEAD % len(BODY) + BODY
HEALTHY = JSON_HEAD % 2 + b"{}"
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
DELTA = {"role": "assistant", "content": "word "}
TOKEN = _event(PART | {"choices": [{"index": 0, "delta": DELTA, "finish_reason": None}]})
STOP = {"index": 0, "delta": {}, "finish_reason": "stop"}
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LAST = _event(PART | {"choices": [STOP]}) + _event(PART | {"choices": [], "usage": _usage(TOKENS)})
LAST += DONE


async def serve_engine(port: int) -> None:
    """Be the engine until a signal ends it."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_engine(int(sys.argv[1])))

"""A small real engine: OpenAI's interface over uvicorn, with answers that say how they came about.

Run as `python engine_app.py PORT NAME [TOKEN_S]`. Words of the prompt steer it: `tokens=N`, `slow`
(a tenth of a second a token), `wait=S` (before the first token), `status=N`, `sse_error=N`, `huge`
(8 KiB a token).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class Engine:
    """Counts what it was asked, so that tests can ask back."""

    def __init__(self, name: str, token_s: float) -> None:
        self.name, self.token_s = name, token_s
        self.begun = self.finished = self.cut = 0
        self.running = self.most_running = 0
        self.seen: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, str]] = []
        self.healthy = True

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/counts", self.counts),
                Route("/metrics", self.metrics),
                Route("/sick", self.sick, methods=["POST"]),
                Route("/forget-most", self.forget_most, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/embeddings", self.complete, methods=["POST"]),
                Route("/v1/responses", self.complete, methods=["POST"]),
                Route("/v1/messages", self.complete, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def tokenize(self, request: Request) -> Response:
        self.tokenized.append(dict(request.headers))
        return JSONResponse({"count": len((await request.body()).split())})

    async def sick(self, request: Request) -> Response:
        self.healthy = not self.healthy
        return Response()

    async def forget_most(self, request: Request) -> Response:
        self.most_running = self.running
        return Response()

    async def counts(self, request: Request) -> Response:
        counts: dict[str, Any] = {"begun": self.begun, "finished": self.finished, "cut": self.cut}
        counts |= {"running": self.running, "most_running": self.most_running}
        counts |= {"name": self.name}
        if "brief" not in request.query_params:
            counts["seen"] = self.seen
        # Bodies may hold NaN.
        return Response(json.dumps(counts), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            'trimtab_queue_length{engine="0",tier="T0"} 2.0\n'
            'trimtab_queue_length{engine="0",tier="T3"} 5.0\n'
            'trimtab_kv_use_ratio{engine="0"} 0.25\n'
        )

    async def complete(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw)
        self.begun += 1
        self.seen.append(
            {"headers": dict(request.headers), "path": request.url.path, "bytes": len(raw)}
            | {"body": body if len(raw) < 10_000 else None, "fields": sorted(body)}
        )
        prompt = json.dumps(body.get("messages") or body.get("prompt") or body.get("input") or "")
        status = _number(prompt, "status", 0)
        if status:
            error = {"message": "as asked", "type": "server_error", "code": int(status)}
            return JSONResponse({"error": error}, status_code=int(status))
        tokens = int(_number(prompt, "tokens", 5))
        if body.get("stream"):
            return StreamingResponse(
                self._events(body, prompt, tokens), media_type="text/event-stream"
            )
        self._enter()
        await asyncio.sleep(_number(prompt, "wait", 0.0) + tokens * self._token_s(prompt))
        self.running -= 1
        self.finished += 1
        usage = _usage(prompt, tokens)
        text = " ".join(f"{self.name}{i}" for i in range(tokens))
        message = {"index": 0, "finish_reason": "stop", "text": text}
        message["message"] = {"role": "assistant", "content": text}
        return JSONResponse(
            {"id": "x", "object": "x", "model": body["model"], "created": 1}
            | {"choices": [message], "usage": usage},
            headers={"x-engine": self.name, "connection": "x-secret-hop", "x-secret-hop": "1"},
        )

    async def _events(self, body: dict[str, Any], prompt: str, tokens: int) -> AsyncIterator[bytes]:
        chat = "messages" in body
        done = False
        self._enter()
        try:
            await asyncio.sleep(_number(prompt, "wait", 0.0))
            error = int(_number(prompt, "sse_error", 0))
            if error:
                yield _event({"error": {"message": "as asked", "code": error}})
            else:
                if chat:
                    yield _event(_chunk(body, {"delta": {"role": "assistant", "content": ""}}))
                for number in range(tokens):
                    text = f"{self.name}{number} " + ("x" * 8192 if "huge" in prompt else "")
                    part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
                    yield _event(_chunk(body, part))
                    await asyncio.sleep(self._token_s(prompt))
                yield _event(_chunk(body, {"delta": {}, "text": "", "finish_reason": "stop"}))
                options = body.get("stream_options")
                if isinstance(options, dict) and options.get("include_usage"):
                    yield _event(_chunk(body, None) | {"usage": _usage(prompt, tokens)})
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            self.running -= 1
            self.finished += done
            self.cut += not done

    def _enter(self) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)

    def _token_s(self, prompt: str) -> float:
        return 0.1 if "slow" in prompt else self.token_s


def _chunk(body: dict[str, Any], part: dict[str, Any] | None) -> dict[str, Any]:
    choices = [] if part is None else [{"index": 0, "finish_reason": None} | part]
    kind = "chat.completion.chunk" if "messages" in body else "text_completion"
    return {"id": "x", "object": kind, "created": 1, "model": body["model"], "choices": choices}


def _usage(prompt: str, tokens: int) -> dict[str, Any]:
    words = len(prompt.split())
    return {"prompt_tokens": words, "completion_tokens": tokens, "total_tokens": words + tokens} | {
        "prompt_tokens_details": {"cached_tokens": words // 2}
    }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def _number(prompt: str, name: str, default: float) -> float:
    found = re.search(rf"\b{name}=([0-9.]+)", prompt)
    return default if found is None else float(found[1])


if __name__ == "__main__":
    engine = Engine(sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    uvicorn.run(
        engine.app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", lifespan="off"
    )

"""A small engine with a tokenizer and a prefix cache: a word is a token, a block has 16."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.engine_bridge.gateway.engine_app import Engine

BLOCK = 16


class TokenEngine(Engine):
    """Answers at once, with the tokens that were cached in its usage.

    `refuses` answers prompts of ids with 503, `hangs` never answers them, `waits` never those of an
    odd number; `mute` says nothing of the cache, `counts_only` knows no `/tokenize`. `drop_last`
    finds a block less than it has cached, as with EAGLE, `keeps_none` caches nothing;
    `whole_status` is the answer to what is no slice, `longest` its context.
    """

    def __init__(self, name: str, token_s: float) -> None:
        super().__init__(name, token_s)
        self.cache: set[tuple[int, ...]] = set()
        self.tokenized = 0
        self.prompts: list[int] = []
        """Length of each prompt, in order."""
        self.refuses = self.hangs = self.mute = self.counts_only = False
        self.drop_last = self.keeps_none = self.waits = False
        self.whole_status = 200
        self.longest = 1 << 20

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        return app

    async def tokenize(self, request: Request) -> Response:
        if self.counts_only:
            return JSONResponse({"error": {"message": "none"}}, status_code=404)
        self.tokenized += 1
        ids = _ids(await request.json())
        return JSONResponse({"count": len(ids), "max_model_len": self.longest, "tokens": ids})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.begun += 1
        self.seen.append({"headers": dict(request.headers), "path": request.url.path, "body": body})
        ids = _ids(body)
        self.prompts.append(len(ids))
        if isinstance(body.get("prompt"), list):
            if self.refuses:
                return JSONResponse({"error": {"message": "no", "code": 503}}, status_code=503)
            while self.hangs or (self.waits and len(ids) % 2):
                if await request.is_disconnected():
                    self.cut += 1
                    return Response()
                await asyncio.sleep(0.01)
        elif self.whole_status != 200:
            error = {"message": "no", "code": self.whole_status}
            return JSONResponse({"error": error}, status_code=self.whole_status)
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        details = None if self.mute else {"cached_tokens": self._read(ids)}
        whole: dict[str, Any] = {**usage, "prompt_tokens_details": details}
        self.finished += 1
        if not body.get("stream"):
            choice = {"index": 0, "text": self.name, "message": {"content": self.name}}
            return JSONResponse({"model": body["model"], "choices": [choice], "usage": whole})
        token = {"choices": [{"index": 0, "delta": {"content": self.name}}]}
        events = [token, {"choices": [], "usage": whole}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return StreamingResponse(iter([text, "data: [DONE]\n\n"]), media_type="text/event-stream")

    def _read(self, ids: list[int]) -> int:
        """Tokens that were cached; caches all whole blocks."""
        blocks = [tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        held = next((at for at, one in enumerate(blocks) if one not in self.cache), len(blocks))
        if not self.keeps_none:
            self.cache.update(blocks)
        return max(0, min((held - self.drop_last) * BLOCK, len(ids) - 1))


def _ids(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        text = " ".join(f"<{one['role']}> {one['content']}" for one in body["messages"])
    elif isinstance(body["prompt"], list):
        return list(body["prompt"])
    else:
        text = body["prompt"]
    return [zlib.crc32(word.encode()) for word in text.split()]

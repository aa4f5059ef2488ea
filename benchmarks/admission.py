"""What admission adds to a request in vLLM's API server, beside the middleware without it.

    python benchmarks/admission.py [--requests N] [--redis URL] [--json F]

An application that does nothing but answer stands in for vLLM, so that what is left is the
middleware's own work: the body read, labelled and written anew, and with admission judged, its
answer looked at, its quotas trued up. Both variants take turns in one process; each figure is the
median over batches of the CPU time of a request, and the difference is that of the medians. Answers
are `stream`, of 100 events, and `whole`, of a kilobyte. The tenant has every quota, a budget and a
limit on its requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.redis_ledger import open_limiter
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.admission_door import AdmissionDoor, InnerRequests
from trimtab.engine_bridge.vllm.identity import IdentitySettings
from trimtab.engine_bridge.vllm.middleware import IdentityMiddleware

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
PATH = "/v1/chat/completions"
BATCHES = 21
EVENTS = 100
MANY = 2_000_000_000
LIMITS = {
    "requests_per_minute": MANY,
    "prompt_tokens_per_minute": MANY,
    "output_tokens_per_minute": MANY,
    "concurrent_requests": 1000,
    "budget_per_day": 1e12,
    "max_prompt_tokens": 100_000,
    "longest_output_tokens": 4096,
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":400,"completion_tokens":100}}\n\n'
WHOLE = json.dumps(
    {"choices": [{"message": {"content": "word " * 200}}], "usage": {"prompt_tokens": 400}}
).encode()


async def answers(scope: Message, receive: Any, send: Any) -> None:
    """Answers at once, as vLLM's server would in time."""
    await receive()
    stream = dict(scope["headers"]).get(b"x-stream") == b"1"
    kind = b"text/event-stream" if stream else b"application/json"
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(EVENTS if stream else 0):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    last = LAST + b"data: [DONE]\n\n" if stream else WHOLE
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def sent(message: Message) -> None:
    """Takes an answer and drops it."""


async def batch(app: App, requests: int, *, stream: bool) -> float:
    """Microseconds of a request."""
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 256}
    raw = json.dumps({**body, "stream": stream}).encode()
    headers = [(b"content-type", b"application/json"), (b"x-stream", b"%d" % stream)]
    message = {"type": "http.request", "body": raw, "more_body": False}

    async def receive() -> Message:
        return message

    started_s = time.process_time()
    for _ in range(requests):
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        await app(scope, receive, sent)
    return (time.process_time() - started_s) * 1e6 / requests


def middleware(storage: str | None) -> IdentityMiddleware:
    """The middleware, with admission over a storage or without."""
    settings = IdentitySettings()
    door = None
    if storage is not None:
        plan = load_plan()
        rules = AdmissionSettings.model_validate({"tiers": {"T3": LIMITS}})
        limiter = open_limiter(storage, time_out_s=1.0, monotonic_s=time.monotonic)
        admission = Admission(rules, plan, limiter=limiter, monotonic_s=time.monotonic)
        door = AdmissionDoor(answers, admission, InnerRequests(answers))
    return IdentityMiddleware(answers, settings=settings, secret=b"0" * 16, door=door)


async def compare(storage: str, requests: int, *, stream: bool) -> dict[str, float]:
    """Medians without and with admission, and what it adds, microseconds a request."""
    plain, judged = middleware(None), middleware(storage)
    times: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(BATCHES + 1):
        one = await batch(plain, requests, stream=stream)
        other = await batch(judged, requests, stream=stream)
        if number:  # the first ones warm up
            times["without"].append(one)
            times["with"].append(other)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {**medians, "added": medians["with"] - medians["without"]}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="requests in a batch")
    parser.add_argument("--redis", help="URL of a Redis to measure beside memory")
    parser.add_argument("--json", help="write the figures here")
    given = parser.parse_args()
    storages = ["memory://", *([given.redis] if given.redis else [])]
    found = {}
    for storage in storages:
        for kind in ("whole", "stream"):
            name = f"{storage.partition(':')[0]}_{kind}"
            run = compare(storage, given.requests, stream=kind == "stream")
            found[name] = asyncio.run(run)
    print(f"{'':14}{'without':>10}{'with':>10}{'added':>10}  us a request")
    for name, row in found.items():
        print(f"{name:14}{row['without']:10.1f}{row['with']:10.1f}{row['added']:10.1f}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"schema": 1, "microseconds": found}, file, indent=1)


if __name__ == "__main__":
    main()

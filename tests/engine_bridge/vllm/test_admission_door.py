"""Admission inside the identity middleware, in front of what answers as vLLM does."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.engine_bridge.admission.rig import PLAN, Clock, settings
from tests.engine_bridge.admission.test_media import png
from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.counting import EngineTokenCounter
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.outcome import Outcome, Used
from trimtab.engine_bridge.vllm.admission_door import AdmissionDoor, InnerRequests
from trimtab.engine_bridge.vllm.identity import IdentitySettings
from trimtab.engine_bridge.vllm.middleware import IdentityMiddleware

SECRET = b"0123456789abcdef"
CHAT = "/v1/chat/completions"
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass
class Vllm:
    """Answers as vLLM does, as far as its middleware sees it."""

    tokens: int = 3
    status: int = 200
    error_event: Mapping[str, object] | None = None
    breaks_after: int | None = None
    waits_after: int | None = None
    waits_before: bool = False
    """Whether it says nothing at all before its client leaves."""
    pieces: int = 1
    """Each body is sent in so many pieces, cut anywhere."""
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = json.loads(body)
        self.bodies.append((scope["path"], asked))
        self.roots.append(str(scope.get("root_path", "")))
        if scope["path"].endswith(("/tokenize", "/count_tokens")):
            await self._whole(send, 200, {"count": len(json.dumps(asked).split("word"))})
        elif self.waits_before:
            assert (await receive())["type"] == "http.disconnect"
        elif self.status != 200:
            await self._whole(send, self.status, {"error": {"message": "no"}})
        elif asked.get("stream"):
            await self._stream(asked, receive, send)
        else:
            choices = [{"message": {"content": 'he said \\"usage\\": {"prompt_tokens": 9}'}}]
            await self._whole(send, 200, {"choices": choices, "usage": self.usage, "more": None})

    @property
    def usage(self) -> dict[str, Any]:
        details = {"cached_tokens": 4}
        return {
            "prompt_tokens": 10,
            "completion_tokens": self.tokens,
            "prompt_tokens_details": details,
        }

    async def _whole(self, send: Send, status: int, content: object) -> None:
        await self._start(send, status, b"application/json")
        await self._send(send, json.dumps(content).replace('": ', '":').encode())
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, asked: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await self._start(send, 200, b"text/event-stream; charset=utf-8")
        await self._event(send, {"choices": [{"delta": {"role": "assistant"}}]})
        for number in range(self.tokens):
            if number == self.breaks_after:
                raise RuntimeError("the engine is gone")
            if number == self.waits_after:
                assert (await receive())["type"] == "http.disconnect"
                return
            await self._event(send, {"choices": [{"delta": {"content": "x"}}]})
        if self.error_event is not None:
            await self._event(send, {"error": self.error_event})
        if (asked.get("stream_options") or {}).get("include_usage"):
            await self._event(send, {"choices": [], "usage": self.usage})
        await self._send(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send, status: int, kind: bytes) -> None:
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _event(self, send: Send, content: object) -> None:
        text = json.dumps(content, separators=(",", ":")).encode()
        await self._send(send, b"data: " + text + b"\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        size = max(1, -(-len(body) // self.pieces))
        for at in range(0, len(body), size):
            piece = body[at : at + size]
            await send({"type": "http.response.body", "body": piece, "more_body": True})


class Ends:
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.used: list[Used] = []

    def decided(self, tier: str, code: str) -> None:
        pass

    def ended(self, tier: str, used: Used) -> None:
        self.used.append(used)


@dataclass
class House:
    """The middleware with admission in front of such an application."""

    limits: dict[str, Any] = field(default_factory=dict)
    vllm: Vllm = field(default_factory=Vllm)
    identity: IdentitySettings = field(default_factory=IdentitySettings)
    clock: Clock = field(default_factory=Clock)
    usage_always: bool = False

    def __post_init__(self) -> None:
        asks = InnerRequests(self.vllm)
        self.ends = Ends()
        self.admission = Admission(
            settings(T3=self.limits),
            PLAN,
            limiter=MemoryLedger(self.clock),
            monotonic_s=self.clock,
            counter=EngineTokenCounter(asks.post),
            observer=self.ends,
        )
        always = self.usage_always
        door = AdmissionDoor(self.vllm, self.admission, asks, usage_always=always)
        self.app = IdentityMiddleware(self.vllm, settings=self.identity, secret=SECRET, door=door)
        self.sent: list[Message] = []

    def post(
        self,
        body: object,
        *,
        path: str = CHAT,
        root: str = "",
        headers: Any = (),
        leaves: bool = True,
    ) -> int:
        """Status of the answer; `sent` has all of it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        queue = [{"type": "http.request", "body": raw, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": root + path, "root_path": root}
        scope |= {"headers": [(b"content-type", b"application/json"), *headers], "app": self.vllm}
        self.sent = []

        async def receive() -> Message:
            if not queue and not leaves:
                await asyncio.Event().wait()
            return queue.pop(0) if queue else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def answer(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def last(self) -> Used:
        return self.ends.used[-1]


def ask(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


def used(outcome: Outcome, output: int | None = 3) -> Used:
    return Used(outcome=outcome, prompt_tokens=10, cached_tokens=4, output_tokens=output)


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_usage_is_read_from_an_answer_and_every_byte_passes(pieces: int) -> None:
    house = House(vllm=Vllm(pieces=pieces))
    assert house.post(ask(max_tokens=5)) == 200
    assert json.loads(house.answer)["usage"] == house.vllm.usage
    assert house.last == used(Outcome.FINISHED)


@pytest.mark.parametrize("pieces", [1, 2, 7, 60])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_of_a_stream_reaches_only_who_has_asked_for_it(
    options: dict[str, bool] | None, pieces: int
) -> None:
    house = House(vllm=Vllm(pieces=pieces))
    wanted = options is not None and options["include_usage"]
    body = ask(stream=True, max_tokens=5)
    if options is not None:
        body["stream_options"] = options
    assert house.post(body) == 200
    assert house.answer.count(b"data: ") == 5 + wanted
    assert (b'"usage"' in house.answer) == wanted
    assert house.answer.endswith(b"data: [DONE]\n\n")
    assert house.last == used(Outcome.FINISHED)
    assert house.vllm.bodies[0][1]["stream_options"] == {"include_usage": True}


def test_an_operator_who_wants_usage_in_every_stream_gets_it() -> None:
    house = House(usage_always=True)
    house.post(ask(stream=True))
    assert b'"usage"' in house.answer


def test_a_stream_is_not_held_back() -> None:
    house = House()
    house.post(ask(stream=True))
    pieces = [m["body"] for m in house.sent if m["type"] == "http.response.body" and m["body"]]
    assert len(pieces) == 5


def test_a_quota_is_a_429_that_says_when_to_come_again() -> None:
    house = House({"output_tokens_per_minute": 10})
    assert house.post(ask(max_tokens=5)) == 200
    assert house.post(ask(max_tokens=8)) == 429  # 3 of the 5 were used
    assert int(house.headers[b"retry-after"]) == 61
    assert json.loads(house.answer)["error"]["code"] == "output_tokens_quota"
    assert house.post(ask(max_tokens=7)) == 200
    house.clock.s += 61
    assert house.post(ask(max_tokens=8)) == 200
    assert len(house.vllm.bodies) == 3


def test_a_long_prompt_is_counted_by_the_server_itself_and_never_reaches_the_engine() -> None:
    house = House({"max_prompt_tokens": 500})
    assert house.post(ask(messages=[{"role": "user", "content": "word" * 400}])) == 200
    assert [path for path, _ in house.vllm.bodies] == ["/tokenize", CHAT]
    assert house.post(ask(messages=[{"role": "user", "content": "word" * 600}])) == 413
    assert [path for path, _ in house.vllm.bodies] == ["/tokenize", CHAT, "/tokenize"]
    assert json.loads(house.answer)["error"]["code"] == "prompt_too_long"


def test_it_asks_itself_below_the_prefix_that_it_is_served_under() -> None:
    house = House({"max_prompt_tokens": 500})
    body = ask(messages=[{"role": "user", "content": "word" * 400}])
    assert house.post(body, root="/llm") == 200
    assert [path for path, _ in house.vllm.bodies] == ["/llm/tokenize", f"/llm{CHAT}"]
    assert house.vllm.roots == ["/llm", "/llm"]


def test_labels_are_stamped_and_a_clients_own_dropped_as_without_admission() -> None:
    house = House({"longest_output_tokens": 9})
    lies = {"priority": -9, "cache_salt": "stolen", "vllm_xargs": {"trimtab_tier": "T0"}}
    assert house.post(ask(max_tokens=1000, **lies)) == 200
    body = house.vllm.bodies[0][1]
    assert body["vllm_xargs"] == {"trimtab_tenant": "anonymous", "trimtab_tier": "T3"}
    assert (body["max_tokens"], body["priority"]) == (9, 3)
    assert body["cache_salt"] != "stolen"


def test_unknown_keys_are_refused_before_anything_is_counted(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sk-crowd").hexdigest()
    keys.write_text(f"crowd: {{tier: T3, keys_sha256: [{digest}]}}\n")
    house = House({"requests_per_minute": 1}, identity=IdentitySettings(keys=str(keys)))
    for _ in range(3):
        assert house.post(ask()) == 401
    assert house.headers[b"www-authenticate"] == b"Bearer"
    key = [(b"authorization", b"Bearer sk-crowd")]
    assert house.post(ask(), headers=key) == 200
    assert house.post(ask(), headers=key) == 429


@pytest.mark.parametrize("body", [b"{no", b"", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    house = House()
    assert house.post(body) == 400
    assert json.loads(house.answer)["error"]["code"] == "invalid_json"
    assert not house.vllm.bodies


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Outcome.INVALID),
        (404, Outcome.INVALID),
        (429, Outcome.REFUSED),
        (503, Outcome.REFUSED),
        (500, Outcome.FAILED),
        (504, Outcome.TIMED_OUT),
    ],
)
def test_an_error_of_the_engine(status: int, outcome: Outcome) -> None:
    house = House({"output_tokens_per_minute": 100}, Vllm(status=status))
    assert house.post(ask(max_tokens=100)) == status
    assert house.last.outcome is outcome
    house.vllm.status = 200
    worked = outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    assert house.post(ask(max_tokens=100)) == (429 if worked else 200)


@pytest.mark.parametrize(
    ("event", "outcome"),
    [({"code": 500}, Outcome.FAILED), ({"code": 503}, Outcome.REFUSED), ({}, Outcome.FAILED)],
)
def test_an_error_in_a_stream(event: dict[str, object], outcome: Outcome) -> None:
    house = House(vllm=Vllm(error_event={"message": "no", **event}))
    house.post(ask(stream=True))
    assert house.last.outcome is outcome


def test_a_client_that_leaves_is_charged_what_was_streamed_to_it() -> None:
    house = House({"output_tokens_per_minute": 100, "concurrent_requests": 1})
    house.vllm.tokens, house.vllm.waits_after = 50, 7
    house.post(ask(stream=True, max_tokens=100))
    assert house.last == Used(outcome=Outcome.CANCELLED, output_tokens=7)
    house.vllm.waits_after = None
    assert house.post(ask(max_tokens=93)) == 200


def test_an_engine_that_breaks_off_gives_the_place_back() -> None:
    house = House({"concurrent_requests": 1}, Vllm(breaks_after=2))
    with pytest.raises(RuntimeError):
        house.post(ask(stream=True))
    assert house.last.outcome is Outcome.FAILED
    house.vllm.breaks_after = None
    assert house.post(ask()) == 200


def test_a_cancelled_door_gives_the_place_back() -> None:
    house = House({"concurrent_requests": 1}, Vllm(tokens=50, waits_after=3))

    async def served() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await serve_patiently(house)
        assert house.admission.open_tickets == 0

    asyncio.run(served())
    assert house.last.outcome is Outcome.CANCELLED


async def serve_patiently(house: House) -> None:
    """A request whose client stays and waits."""
    queue = [{"type": "http.request", "body": json.dumps(ask(stream=True)).encode()}]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive() -> Message:
        if not queue:
            await asyncio.Event().wait()
        return queue.pop()

    async def send(message: Message) -> None:
        pass

    await house.app(scope, receive, send)


def test_who_leaves_a_stream_before_it_begins_pays_for_no_output() -> None:
    house = House({"output_tokens_per_minute": 100})
    for _ in range(3):
        house.vllm.waits_before = True
        house.post(ask(stream=True, max_tokens=90))
        assert house.last.outcome is Outcome.CANCELLED
        assert house.last.output_tokens == 0
    house.vllm.waits_before = False
    assert house.post(ask(max_tokens=100)) == 200


def test_a_cancel_costs_nothing() -> None:
    house = House({"requests_per_minute": 1})
    for _ in range(5):
        assert house.post({}, path="/v1/responses/resp_1/cancel") == 200
    assert house.post(ask()) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
    ],
)
def test_what_takes_the_tokenizers_time_is_a_request_of_no_tokens(path: str) -> None:
    limits = {"prompt_tokens_per_minute": 400, "max_prompt_tokens": 400, "concurrent_requests": 1}
    house = House({"requests_per_minute": 3, **limits})
    long = ask(messages=[{"role": "user", "content": "word" * 5000}])
    for _ in range(2):
        assert house.post(long, path=path) == 200
        assert house.vllm.bodies[-1] == (path, long)
    assert house.post(ask(messages=[{"role": "user", "content": "x" * 150}])) == 200
    assert house.post(long, path=path) == 429
    assert json.loads(house.answer)["error"]["code"] == "requests_quota"
    assert house.admission.open_tickets == 0
    house.clock.s += 61
    assert house.post(b" " * ((64 << 20) + 1), path=path) == 413


def test_text_in_another_encoding_is_no_shorter() -> None:
    house = House({"max_prompt_tokens": 500})
    text = json.dumps(ask(messages=[{"role": "user", "content": "語" * 300}]), ensure_ascii=False)
    assert house.post(text.encode("utf-16")) == 200
    assert house.vllm.bodies[0][0] == "/tokenize"


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)
names = st.sampled_from(
    ["messages", "prompt", "stream", "stream_options", "max_tokens", "n", "vllm_xargs", "priority",
     "cache_salt", "tier", "tenant", "input", "tools"]
)  # fmt: skip
bodies = st.one_of(
    st.binary(),
    st.dictionaries(st.one_of(names, st.text()), anything).map(
        lambda body: json.dumps(body).encode("utf-8", "surrogatepass")
    ),
)


@given(bodies, st.sampled_from([CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]))
@hypothesis_settings(max_examples=150)
def test_whatever_comes_in_nothing_reaches_the_engine_without_its_label(
    body: bytes, path: str
) -> None:
    house = House({"requests_per_minute": 10, "max_prompt_tokens": 40, "concurrent_requests": 3})
    status = house.post(body, path=path)
    assert status in (200, 400, 413)
    for reached, inner in house.vllm.bodies:
        if reached not in ("/tokenize", "/v1/messages/count_tokens"):
            assert inner["vllm_xargs"] == {"trimtab_tenant": "anonymous", "trimtab_tier": "T3"}
            assert inner["priority"] == 3
    assert house.admission.open_tickets == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_what_is_shown_counts_in_the_prompt(path: str) -> None:
    """Real pictures, as each interface takes them: 12 tiles of 256 tokens, and one."""

    def body(width: int, height: int) -> dict[str, object]:
        data = base64.b64encode(png(width, height)).decode()
        address = f"data:image/png;base64,{data}"
        if path == "/v1/responses":
            part: dict[str, object] = {"type": "input_image", "image_url": address}
            return {"model": "m", "input": [{"role": "user", "content": [part]}]}
        if path == "/v1/messages":
            source = {"type": "base64", "media_type": "image/png", "data": data}
            part = {"type": "image", "source": source}
            return ask(messages=[{"role": "user", "content": [part]}], max_tokens=5)
        part = {"type": "image_url", "image_url": {"url": address}}
        return ask(messages=[{"role": "user", "content": [part]}])

    house = House({"max_prompt_tokens": 1000})
    assert house.post(body(1920, 1080), path=path) == 413
    assert json.loads(house.answer)["error"]["code"] == "prompt_too_long"
    assert house.post(body(512, 512), path=path) == 200

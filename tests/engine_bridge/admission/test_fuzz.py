"""Whatever a body holds, admission answers: never an exception, never a crash of its own."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.engine_bridge.admission.rig import Rig, now, settings
from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.counting import EngineTokenCounter
from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.admission.refusal import CODES, Refusal
from trimtab.engine_bridge.vllm.identity import Identity

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(),
    st.sampled_from(["data:image/png;base64,", "data:", "https://x/y.png", "user", "\ud800"]),
)
FIELDS = (
    "model", "prompt", "messages", "input", "system", "instructions", "tools", "content", "role",
    "type", "text", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "stream",
    "stream_options", "image_url", "input_audio", "video_url", "url", "data", "source", "format",
    "image", "audio", "suffix", "priority", "vllm_xargs",
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), inner, max_size=5),
    ),
    max_leaves=25,
)
bodies = st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), values, max_size=8)
heads = st.sampled_from(
    [b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBPVP8X", b"RIFFxxxxWAVE"]
)
payloads = st.builds(
    lambda head, rest: base64.b64encode(head + rest).decode(), heads, st.binary(max_size=80)
)
parts = st.one_of(
    st.builds(
        lambda kind, p: {"type": kind, kind: {"url": f"data:x;base64,{p}"}},
        st.sampled_from(["image_url", "audio_url", "video_url"]),
        payloads,
    ),
    st.builds(
        lambda p, f: {"type": "input_audio", "input_audio": {"data": p, "format": f}},
        payloads,
        scalars,
    ),
    values,
)
chats = st.builds(
    lambda contents, more: {**more, "messages": [{"role": "user", "content": c} for c in contents]},
    st.lists(st.one_of(st.text(), st.lists(parts, max_size=4)), max_size=4),
    bodies,
)
RULES = settings(
    T0={
        "requests_per_minute": 1000,
        "prompt_tokens_per_minute": 10_000,
        "output_tokens_per_minute": 10_000,
        "concurrent_requests": 100,
        "budget_per_day": 10_000,
        "max_prompt_tokens": 50,
        "longest_output_tokens": 1000,
    }
)


async def answers(path: str, body: bytes) -> tuple[int, bytes]:
    """An engine that parses what it is asked, and counts."""
    json.loads(body)
    return 200, b'{"count": 7}'


def judge(path: str, body: dict[str, Any]) -> None:
    rig = Rig(RULES, more={"counter": EngineTokenCounter(answers)})
    length = len(json.dumps(body))
    asked = Asked(identity=Identity("acme", "T0"), path=path, body=body, body_bytes=length)
    judged = now(rig.admission.admit(asked))
    if isinstance(judged, Refusal):
        assert judged.code in CODES
        assert judged.status in (400, 413, 429)
        assert json.loads(judged.body())["error"]["message"].isprintable()
        return
    json.dumps({**body, **judged.changes})
    bound = judged.changes
    assert all(isinstance(value, int) and 0 < value <= 1000 for value in bound.values())
    now(judged.finished(outcome=Outcome.FINISHED, prompt_tokens=-5, output_tokens=10**30))


@given(st.sampled_from(PATHS), bodies)
@hypothesis_settings(max_examples=400)
def test_any_object(path: str, body: dict[str, Any]) -> None:
    judge(path, body)


@given(st.sampled_from(PATHS), chats)
@hypothesis_settings(max_examples=400)
def test_any_chat(path: str, body: dict[str, Any]) -> None:
    judge(path, body)


def test_deep_nesting() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    for path in PATHS:
        judge(path, {"messages": deep, "prompt": deep, "input": deep})

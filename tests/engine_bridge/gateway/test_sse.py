"""Event streams on their way through, however they are cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.gateway.sse import EventStream, holds_token


def event(content: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(content)}{end}".encode()


def token(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
DONE = b"data: [DONE]\n\n"


def pass_through(stream: EventStream, pieces: list[bytes]) -> bytes:
    return b"".join(stream.feed(piece) for piece in pieces) + stream.rest()


@given(
    st.lists(st.text(max_size=20), max_size=8),
    st.sampled_from(("\n\n", "\r\n\r\n")),
    st.booleans(),
    st.data(),
)
def test_what_comes_out_is_what_went_in_less_the_usage(
    words: list[str], end: str, strip: bool, data: st.DataObject
) -> None:
    body = b"".join(event(token(word), end) for word in words)
    usage = event({"choices": [], "usage": USAGE}, end)
    whole = body + usage + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stream = EventStream(strip_usage=strip)
    assert pass_through(stream, pieces) == (body + DONE if strip else whole)
    assert stream.usage.prompt_tokens == 9
    assert stream.usage.cached_tokens == 2
    assert stream.usage.output_tokens == 4
    assert stream.error is None


@given(st.lists(st.binary(max_size=50), max_size=8), st.booleans())
def test_bytes_that_are_no_events_pass_unharmed(pieces: list[bytes], strip: bool) -> None:
    stream = EventStream(strip_usage=strip)
    assert pass_through(stream, pieces) == b"".join(pieces)


def test_null_usage_and_words_about_usage_are_left_alone() -> None:
    odd = event(token('"usage":{"prompt_tokens":7} "error"')) + event({**token("x"), "usage": None})
    stream = EventStream(strip_usage=True)
    assert stream.feed(odd) == odd
    assert stream.usage.prompt_tokens is None
    assert stream.error is None


def test_usage_beside_an_answer_is_read_and_left() -> None:
    both = event({**token("x"), "usage": USAGE})
    stream = EventStream(strip_usage=True)
    assert stream.feed(both) == both
    assert stream.usage.output_tokens == 4


def test_anthropics_stream_is_understood() -> None:
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 5}}})
    end = event({"type": "message_delta", "usage": {"output_tokens": 3}})
    stream = EventStream(strip_usage=False)
    assert stream.feed(start) + stream.feed(end) == start + end
    assert (stream.usage.prompt_tokens, stream.usage.output_tokens) == (5, 3)
    assert not holds_token(start)


def test_anthropics_cached_tokens_are_part_of_the_prompt() -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 80, "cache_creation_input_tokens": 15}
    stream = EventStream(strip_usage=False)
    stream.feed(event({"type": "message_start", "message": {"usage": usage}}))
    assert (stream.usage.prompt_tokens, stream.usage.cached_tokens) == (100, 80)


def test_an_error_inside_a_stream_is_seen() -> None:
    stream = EventStream(strip_usage=False)
    stream.feed(event({"error": {"message": "x", "code": 503}}))
    assert stream.error is not None
    assert stream.error["code"] == 503


def test_the_first_token_is_told_from_the_role() -> None:
    def chat(delta: Any, **more: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, **more}]})

    assert not holds_token(chat({"role": "assistant", "content": ""}))
    assert not holds_token(chat({"role": "assistant"}))
    assert not holds_token(b": ping\n\n")
    assert holds_token(chat({"content": "x"}))
    assert holds_token(chat({"tool_calls": [{"index": 0}]}))
    assert holds_token(chat({"reasoning": "x"}))
    assert holds_token(chat({}, finish_reason="stop"))
    assert holds_token(event({"choices": [{"index": 0, "text": "x"}]}))
    assert holds_token(DONE)
    assert holds_token(b"data: nonsense\n\n")


def test_only_events_that_hold_a_part_of_the_answer_count() -> None:
    def counted(*events: bytes) -> int:
        stream = EventStream(strip_usage=True)
        for one in events:
            stream.feed(one)
        together = EventStream(strip_usage=True)
        together.feed(b"".join(events))
        assert together.events == stream.events
        return stream.events

    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    odd = [token(text) for text in ('data: data:\n\ndata: "x"', '"role":', "[DONE]", '"usage"', "")]
    usage = event({"choices": [], "usage": USAGE})
    assert counted(role, event(token("x")), usage, DONE) == 1
    assert counted(role, *map(event, odd), DONE) == len(odd)
    spoken = event({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]})
    assert counted(role, spoken, b": ping\n\n", DONE) == 1
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0, "type": "function"}]}}
    assert counted(event({"choices": [call]}), event({"error": {"code": 500}})) == 1
    plain = [event({"choices": [{"index": 0, "text": text}]}, "\r\n\r\n") for text in "abc"]
    assert counted(*plain) == 3
    named = [
        b"event: %b\n%b" % (kind.encode(), event({"type": kind, "delta": {"text": "x"}}))
        for kind in (
            *("message_start", "content_block_start", "ping", "content_block_delta"),
            *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
            *("response.created", "response.output_text.delta", "response.output_text.done"),
        )
    ]
    assert counted(*named) == 3

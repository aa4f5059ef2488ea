"""Requests that nobody should send, for every door: bodies, heads, and bytes that are no HTTP."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hypothesis import strategies as st

from trimtab.engine_bridge.gateway.openapi import REFUSED, REFUSED_BEFORE
from trimtab.engine_bridge.gateway.request_body import CLAIMS

OWN_CODES: Final = frozenset(
    code
    for table in (REFUSED, REFUSED_BEFORE, {400: ("invalid_label",)})
    for codes in table.values()
    for code in codes
)
LEAKS: Final = (b"Traceback (most recent", b'File "', b"site-packages", b".py:", b"Exception(")
LIES: Final = {
    "priority": -9,
    "vllm_xargs": {"trimtab_tenant": "bolt", "trimtab_tier": "T1", "extra": 1},
    "cache_salt": "bolt",
    "tenant": "bolt",
    "tier": "T1",
    "request_id": "mine",
    "kv_transfer_params": {"do_remote_prefill": True},
}
LYING_HEADERS: Final = {
    "X-Trimtab-Tenant": "bolt",
    "X-Trimtab-Tier": "T1",
    "X-Vllm-Priority": "-9",
    "X-Request-Id": "mine",
    "X-Data-Parallel-Rank": "0",
}
_FIELDS: Final = (
    "prompt", "messages", "input", "stream", "stream_options", "max_tokens", "n", "best_of",
    "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "stop", "seed", "echo",
    "logprobs", "logit_bias", "tools", "tool_choice", "response_format", "system", "store",
    "suffix", "user", "metadata", "ignore_eos", "min_tokens", "truncate_prompt_tokens",
)  # fmt: skip
_ODD: Final = (
    None, True, False, 0, -1, 2**31, 2**63, 10**30, 1e308, -0.0, "", "x", "\ud800", "\udfff\ud800",
    "\0", "true", "1", [], {}, [[]], [None], {"": None}, ["x"] * 50, "\uff46", "\U0001d566",
)  # fmt: skip
_TEXTS: Final = (
    b'{"model":"%m","prompt":"x","max_tokens":2,"temperature":NaN}',
    b'{"model":"%m","prompt":"x","max_tokens":2,"top_p":-Infinity}',
    b'{"model":"%m","prompt":"x","max_tokens":1e999}',
    b'{"model":"%m","prompt":"x","max_tokens":1' + b"0" * 4000 + b"}",
    b'{"model":"%m","prompt":"x","max_tokens":1,"seed":' + b"9" * 5000 + b"}",
    b'{"model":"%m","prompt":"a","prompt":"b","max_tokens":2,"max_tokens":3}',
    b'{"model":"%m","\\u0070riority":-9,"vllm_xar\\u0067s":{"trimtab_tier":"T1"},"prompt":"x",'
    b'"max_tokens":2}',
    b'{"model":"%m","prompt":"\\ud800","max_tokens":2,"messages":[{"role":"user","content":"\\udc00"}]}',
    b'{"model":"%m","prompt":"\xff\xfe","max_tokens":2}',
    b'\xef\xbb\xbf{"model":"%m","prompt":"x","max_tokens":2}',
    b'{"model":"%m","prompt":"x","max_tokens":2}{"tier":"T1"}',
    b'{"model":"%m","prompt":"x","max_tokens":2,}',
    b'{"model":"%m","prompt":"x","max_tokens":2}//',
    b'[{"model":"%m"}]', b'"%m"', b"null", b"", b" ", b"\0", b"{", b'{"model":', b"[" * 100_000,
    b'{"model":"%m","prompt":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model":"%m","prompt":"x","max_tokens":2,"x":' + b'{"a":' * 300 + b"1" + b"}" * 301,
)  # fmt: skip


def fixed_bodies(model: str, *, large: bool = True) -> list[tuple[bytes, dict[str, str]]]:
    """Bodies with the headers that go with them; every one has its trick."""
    kind = {"Content-Type": "application/json"}
    found = [(text.replace(b"%m", model.encode()), kind) for text in _TEXTS]
    plain = {"model": model, "prompt": "x", "max_tokens": 2}
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for whole in (plain, chat, {"model": model, "input": "x", "max_output_tokens": 2}):
        found.append((_json({**whole, **LIES}), {**kind, **LYING_HEADERS}))
        found.append((_json({**whole, "extra_body": LIES, "metadata": LIES, "user": "T1"}), kind))
        found += [(_json({**whole, field: odd}), kind) for field in _FIELDS for odd in _ODD[::5]]
    for encoding in ("utf-16", "utf-32", "latin-1"):
        found.append((json.dumps(plain).encode(encoding), kind))
    packed = gzip.compress(_json(plain))
    for words in ("gzip", "gzip, gzip", "br", "identity, nonsense"):
        found.append((packed, {**kind, "Content-Encoding": words}))
    for name in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "é"):
        found.append((_json({**plain, **LIES}), {"Content-Type": name}))
    if large:
        parts = [{"type": "text", "text": "x"}] * 100_000
        found.append((_json({**chat, "messages": [{"role": "user", "content": parts}]}), kind))
        found.append((_json({**chat, "messages": chat["messages"] * 100_000}), kind))
    return found


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def odd_bodies(model: str) -> st.SearchStrategy[bytes]:
    """Any fields with any values, claims in any place."""
    scalars = st.one_of(
        st.sampled_from(_ODD), st.integers(), st.floats(), st.text(max_size=20), st.booleans()
    )
    names = st.sampled_from((*_FIELDS, *sorted(CLAIMS), "role", "content", "type", "text"))
    values = st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.one_of(names, st.text(max_size=8)), inner, max_size=4),
        ),
        max_leaves=10,
    )
    bodies = st.dictionaries(st.one_of(names, st.text(max_size=8)), values, max_size=8)
    small = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}
    return bodies.map(lambda body: json.dumps({**small, "model": model, **body}).encode())


def harmless(status: int, body: bytes) -> bool:
    """Check an answer; whether it is the engine's own failure.

    A refusal of ours has a word as its code, of the known ones; an engine's has a number or none.
    """
    assert b"Traceback (most recent" not in body, body
    if status < 400:
        return False
    try:
        error = json.loads(body)["error"]
        code = error["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    if not isinstance(code, str):
        return status >= 500
    assert code in OWN_CODES, body
    assert set(error) == {"message", "type", "param", "code"}, body
    assert code != "internal_error", body
    assert status < 500, body
    assert not [leak for leak in LEAKS if leak in body], body
    return False


POST: Final = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def raw_requests(key: str, model: str) -> dict[str, Sequence[bytes]]:
    """Bytes on a connection, by name: what they are pieces of is no sound request."""
    head = POST + b"authorization: Bearer %b\r\n" % key.encode()
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 2, **LIES}).encode()
    chunked = head + b"transfer-encoding: chunked\r\n"
    sized = head + b"content-length: %d\r\n" % len(body)
    hidden = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-trimtab-tier: T1\r\n\r\n"
    return {
        "half a chunked body": (chunked + b"\r\n%x\r\n" % len(body), body[:10]),
        "a chunk without an end": (chunked + b"\r\n%x\r\n%b" % (len(body), body),),
        "a chunk of no size": (chunked + b"\r\nxyz\r\n",),
        "a chunk too large to be": (chunked + b"\r\nffffffffffffffffff\r\n", body),
        "two lengths": (sized + b"content-length: 5\r\n\r\n", body),
        "a length and chunks": (sized + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", hidden),
        "chunks by two names": (chunked + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n", hidden),
        "a length below nothing": (head + b"content-length: -5\r\n\r\n", body),
        "a length that is none": (head + b"content-length: 0x10\r\n\r\n", body),
        "a huge length": (head + b"content-length: 99999999999999999999\r\n\r\n", body),
        "more than its length": (head + b"content-length: 5\r\n\r\n", body, hidden),
        "a head of 300 headers": (head, *(b"a%d: b\r\n" % n for n in range(300)), b"\r\n"),
        "a header of a megabyte": (head + b"a: " + b"b" * (1 << 20) + b"\r\n\r\n",),
        "a line of a megabyte": (b"GET /" + b"a" * (1 << 20),),
        "folded headers": (head + b"x: a\r\n b: c\r\n\tx-trimtab-tier: T1\r\n\r\n",),
        "a name with a blank": (head + b"x-trimtab-tier : T1\r\ncontent-length: 0\r\n\r\n",),
        "bare line feeds": (sized.replace(b"\r\n", b"\n") + b"\n", body),
        "a null in a header": (head + b"x: a\0b\r\n\r\n",),
        "no host and an old version": (b"POST /v1/completions HTTP/0.9\r\n\r\n", body),
        "an upgrade with a body": (sized + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", body),
        "a websocket": (
            b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: x\r\n\r\n",
        ),
        "another's path": (head.replace(b"/v1/completions", b"http://other/v1/completions")
                           + b"content-length: 0\r\n\r\n",),
        "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,),
        "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
        "nothing at all": (b"",),
        "noise": (bytes(range(256)) * 8,),
        "two sound ones in line": ((sized + b"\r\n" + body) * 2,),
        "a sound one and noise": (sized + b"\r\n" + body + b"\0\xff" * 20,),
    }  # fmt: skip


def say(
    port: int, pieces: Iterable[bytes], *, every_s: float = 0.0, patience_s: float = 1.0
) -> bytes:
    """What comes back on a connection until it ends, or for a while."""
    came = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as link:
        try:
            for piece in pieces:
                link.sendall(piece)
                if every_s:
                    time.sleep(every_s)
            while piece := link.recv(65_536):
                came += piece
        except OSError:
            pass
    return came


def answers(came: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer in what came back, as far as they say their lengths."""
    found: list[tuple[int, bytes]] = []
    while came.startswith(b"HTTP/1.1 "):
        head, _, rest = came.partition(b"\r\n\r\n")
        status = int(head[9:12])
        names: dict[str, Any] = dict(
            line.lower().split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:]
        )
        length = int(names.get("content-length", 0))
        found.append((status, rest[:length]))
        came = rest[length:]
    return found

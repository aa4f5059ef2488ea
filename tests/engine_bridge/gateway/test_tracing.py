"""Spans of requests, from a real gateway with real engines to a real collector."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    RunningEngine,
    RunningGateway,
    raw_engine,
    run,
    running_gateway,
    start_engine,
    until,
)

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from tests.otlp_receiver import Receiver, Span, otlp_receiver
from trimtab.engine_bridge.gateway import span_export
from trimtab.engine_bridge.gateway.settings import TraceSettings
from trimtab.engine_bridge.gateway.trace_context import client_context
from trimtab.engine_bridge.gateway.tracing import UNFOLLOWED, FinishedRequest, Followed, Tracer

CHAT = "POST /v1/chat/completions"
COMPLETION = "POST /v1/completions"
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
UNSAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"


@pytest.fixture(autouse=True)
def _sends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "EVERY_S", 0.01)


@asynccontextmanager
async def traced(
    folder: Path, receiver: Receiver, engines: dict[str, Any], **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway that follows all requests, unless `traces` says otherwise."""
    traces = {"endpoint": receiver.url, "sampled_fraction": 1.0, **settings.pop("traces", {})}
    async with running_gateway(folder, engines, traces=traces, **settings) as gateway:
        yield gateway


async def the(receiver: Receiver, name: str, number: int = 1) -> Span:
    """The only span of a name, or the last of so many."""
    await until(lambda: len(receiver.named(name)) == number, what=f"{number} spans {name!r}")
    return receiver.named(name)[-1]


def sent_context(engine: RunningEngine) -> tuple[str, str, str]:
    """Trace, span and flags that an engine was sent last."""
    _, trace, span, flags = engine.engine.seen[-1]["headers"]["traceparent"].split("-")
    return trace, span, flags


def test_a_stream_is_a_span_with_its_attempt_below_and_the_engines_below_that(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        with otlp_receiver() as receiver:
            async with traced(tmp_path, receiver, {"a": engine.url}) as gateway:
                await gateway.stream("tokens=3 secret-words")
                server = await the(receiver, CHAT)
        (attempt,) = receiver.below(server)
        assert (server.kind, server.parent_id, server.failed) == ("SERVER", "", False)
        assert server.service == "trimtab-gateway"
        assert server.attributes.items() >= {
            "http.request.method": "POST", "http.route": "/v1/chat/completions",
            "http.response.status_code": 200, "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL, "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 2, "trimtab.engine": "a",
            "trimtab.outcome": "finished", "trimtab.retries": 0,
        }.items()  # fmt: skip
        assert "trimtab.tenant" not in server.attributes
        assert (attempt.kind, attempt.name, attempt.failed) == ("CLIENT", f"chat {MODEL}", False)
        assert attempt.attributes["http.response.status_code"] == 200
        assert sent_context(engine) == (server.trace_id, attempt.span_id, "01")
        first_ns = attempt.events["first_token"]
        first_s = server.attributes["gen_ai.response.time_to_first_chunk"]
        assert server.began_ns <= attempt.began_ns <= first_ns <= attempt.ended_ns
        assert attempt.ended_ns <= server.ended_ns
        assert first_s == pytest.approx((first_ns - server.began_ns) / 1e9)
        assert "secret" not in str(receiver.spans)
        await engine.kill()

    run(test())


def test_a_retried_request_has_a_span_for_each_attempt(tmp_path: Path) -> None:
    async def test() -> None:
        async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pass  # `raw_engine` closes the connection

        good = await start_engine("good")
        with otlp_receiver() as receiver:
            # Among so many prompts there is one that goes to `bad` first; then `bad` is out.
            patient = {"probes": {"eject_after": 1}}
            async with (
                raw_engine(breaks) as bad,
                traced(tmp_path, receiver, {"bad": bad, "good": good.url}, **patient) as gateway,
            ):
                for number in range(20):
                    assert (await gateway.ask(f"{number}")).status_code == 200
                await the(receiver, COMPLETION, 20)
        server = next(
            one for one in receiver.named(COMPLETION) if one.attributes["trimtab.retries"]
        )
        first, second = receiver.below(server)
        assert [one.attributes["trimtab.engine"] for one in (first, second)] == ["bad", "good"]
        assert [one.failed for one in (first, second)] == [True, False]
        assert first.attributes["error.type"] == "closed"
        assert second.attributes["http.request.resend_count"] == 1
        assert not server.failed
        contexts = [one["headers"]["traceparent"] for one in good.engine.seen]
        assert f"00-{server.trace_id}-{second.span_id}-01" in contexts
        assert first.ended_ns <= second.began_ns
        await good.kill()

    run(test())


def test_a_request_that_no_engine_takes_shows_its_wait(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        with otlp_receiver() as receiver:
            times = {"time_outs": {"wait_s": 0.05}}
            async with traced(tmp_path, receiver, {"a": engine.url}, **times) as gateway:
                await engine.kill()
                await until(lambda: gateway.states()["a"] == "out", what="the ejection")
                assert (await gateway.ask()).status_code == 503
                server = await the(receiver, COMPLETION)
        (wait,) = receiver.below(server)
        assert (wait.name, wait.kind) == ("wait", "INTERNAL")
        assert wait.attributes == {"error.type": "no_engine"}
        assert wait.ended_ns - wait.began_ns >= 40_000_000
        assert server.failed
        assert server.attributes["error.type"] == "no_engine"
        assert server.attributes["trimtab.refusal"] == "no_engine"

    run(test())


def test_a_refused_request_says_by_whom_and_not_what_was_asked(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({
            "acme": {"tier": "T3", "keys_sha256": [hashlib.sha256(b"sk-acme").hexdigest()]}
        }))  # fmt: skip
        (tmp_path / "admission.yaml").write_text("tiers: {T3: {max_prompt_tokens: 1}}\n")
        files = {name: str(tmp_path / f"{name}.yaml") for name in ("keys", "admission")}
        with otlp_receiver() as receiver:
            traces = {"tenants": "hashed"}
            async with traced(
                tmp_path, receiver, {"a": engine.url}, traces=traces, **files
            ) as gateway:
                key = {"Authorization": "Bearer sk-acme"}
                assert (await gateway.ask("word " * 50, headers=key)).status_code == 413
                long = await the(receiver, COMPLETION)
                assert (await gateway.ask(headers={"x-api-key": "sk-secret"})).status_code == 401
                unknown = await the(receiver, COMPLETION, 2)
                assert (await gateway.ask(model="sk-secret", headers=key)).status_code == 404
                no_model = await the(receiver, COMPLETION, 3)
                await gateway.client.get("/v1/sk-secret", headers=key)
                other = await the(receiver, "GET")
        assert long.attributes["trimtab.refusal"] == "prompt_too_long"
        assert long.attributes["trimtab.tenant"] == hashlib.sha256(b"acme").hexdigest()[:16]
        assert not long.failed
        (admission,) = receiver.below(long)
        assert (admission.name, admission.failed) == ("admission", False)
        assert admission.attributes == {"error.type": "prompt_too_long"}
        assert unknown.attributes["http.response.status_code"] == 401
        assert "trimtab.tier" not in unknown.attributes
        assert no_model.attributes["trimtab.refusal"] == "model_not_found"
        assert other.attributes["trimtab.refusal"] == "not_served"
        assert "secret" not in str(receiver.spans)
        assert "sk-" not in str(receiver.spans)
        await engine.kill()

    run(test())


def test_a_client_that_leaves_and_an_engine_that_breaks_off_are_told_apart(tmp_path: Path) -> None:
    async def test() -> None:
        async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event)
            )
            await writer.drain()

        engine = await start_engine("a")
        with otlp_receiver() as receiver:
            async with (
                raw_engine(breaks_off) as bad,
                traced(
                    tmp_path,
                    receiver,
                    {"a": engine.url, "bad": {"url": bad, "models": ["broken"]}},
                ) as gateway,
            ):
                assert (await gateway.stream(model="broken"))[-1]["error"]
                broken = await the(receiver, CHAT)
                body = {"model": MODEL, "prompt": "slow tokens=50", "stream": True}
                async with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
                    await anext(answer.aiter_raw())
                left = await the(receiver, COMPLETION)
        assert broken.failed
        assert broken.attributes["error.type"] == "failed"
        (attempt,) = receiver.below(broken)
        assert attempt.failed
        assert "first_token" in attempt.events
        assert left.attributes["trimtab.outcome"] == "cancelled"
        assert not left.failed
        (attempt,) = receiver.below(left)
        assert (attempt.failed, attempt.attributes["error.type"]) == (False, "cancelled")
        await engine.kill()

    run(test())


def test_unfollowed_requests_send_nothing_and_tell_the_engine_so(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        traces = {"sampled_fraction": 0.0}
        with otlp_receiver() as receiver:
            async with traced(tmp_path, receiver, {"a": engine.url}, traces=traces) as gateway:
                # A client cannot have itself followed, nor choose a trace for the engine.
                await gateway.ask(headers={"traceparent": SAMPLED, "tracestate": "a=b"})
        headers = engine.engine.seen[-1]["headers"]
        assert sent_context(engine)[2] == "00"
        assert CLIENT_TRACE not in headers["traceparent"]
        assert "tracestate" not in headers
        assert receiver.spans == []
        await engine.kill()

    run(test())


@pytest.mark.parametrize(
    ("setting", "header", "follows", "joins", "links"),
    [
        ("link", SAMPLED, True, False, True),
        ("link", UNSAMPLED, True, False, True),
        ("ignore", SAMPLED, True, False, False),
        ("parent", SAMPLED, True, True, False),
        ("parent", UNSAMPLED, False, True, False),
        ("parent", "nonsense", True, False, False),
    ],
)
def test_what_a_clients_own_trace_counts_for(
    setting: str, header: str, follows: bool, joins: bool, links: bool
) -> None:
    kept: list[FinishedRequest] = []
    settings = TraceSettings(endpoint="http://h", sampled_fraction=1.0, client_context=setting)  # type: ignore[arg-type]
    tracer = Tracer(
        settings,
        kept.append,
        generator=random.Random(1),
        monotonic_ns=lambda: 5,
        wall_ns=lambda: 1005,
    )
    scope: dict[str, Any] = {
        "headers": [(b"a", b"b"), (b"traceparent", header.encode()), (b"tracestate", b"x=1")]
    }
    spans = tracer.begin(scope)
    assert scope["headers"] == [(b"a", b"b")]
    assert isinstance(spans, Followed) is follows
    if isinstance(spans, Followed):
        assert (spans.parent_id == int(CLIENT_SPAN, 16)) is joins
        assert (spans.link == (int(CLIENT_TRACE, 16), int(CLIENT_SPAN, 16))) is links
        spans.start("attempt", "a")
    assert (f"traceparent: 00-{CLIENT_TRACE}-".encode() in spans.heads) is joins
    assert (b"tracestate: x=1\r\n" in spans.heads) is joins
    assert spans.heads.count(b"\r\n") == 1 + joins


def test_so_many_requests_are_followed_as_the_settings_say() -> None:
    settings = TraceSettings(endpoint="http://h", sampled_fraction=0.25)
    tracer = Tracer(
        settings,
        lambda request: None,
        generator=random.Random(7),
        monotonic_ns=lambda: 1,
        wall_ns=lambda: 2,
    )
    followed = sum(isinstance(tracer.begin({"headers": []}), Followed) for _ in range(4000))
    assert 900 < followed < 1100


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate"]), st.binary())))
def test_no_header_breaks_it(headers: list[tuple[bytes, bytes]]) -> None:
    parent, state = client_context(headers)
    assert parent is None or (parent[0] and parent[1])
    assert b"\r" not in state
    assert b"\n" not in state
    assert len(state) <= 512


@pytest.mark.parametrize(
    "value",
    [
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-{'0' * 16}-01",
        f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        f"{SAMPLED}-more",
        SAMPLED.upper(),
        SAMPLED[:-1],
        "",
    ],
)
def test_a_traceparent_that_is_none_by_the_standard_counts_for_nothing(value: str) -> None:
    assert client_context([(b"traceparent", value.encode())]) == (None, b"")


def test_a_later_version_of_the_standard_is_read_as_far_as_it_is_known() -> None:
    later = f"cc-{CLIENT_TRACE}-{CLIENT_SPAN}-03-what-comes"
    found, _ = client_context([(b"traceparent", later.encode())])
    assert found == (int(CLIENT_TRACE, 16), int(CLIENT_SPAN, 16), True)


def test_headers_and_a_token_go_with_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_TRACES_TOKEN", "tok-1")
    headers = tmp_path / "headers.yaml"
    headers.write_text('X-Team: "42"\n')

    async def test() -> None:
        engine = await start_engine("a")
        traces = {"headers_file": str(headers), "service_name": "front"}
        with otlp_receiver() as receiver:
            async with traced(tmp_path, receiver, {"a": engine.url}, traces=traces) as gateway:
                await gateway.ask()
                server = await the(receiver, COMPLETION)
        assert server.service == "front"
        assert receiver.headers[0]["authorization"] == "Bearer tok-1"
        assert receiver.headers[0]["x-team"] == "42"
        await engine.kill()

    run(test())


def test_a_collector_that_hangs_costs_spans_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "MOST_QUEUED", 3)
    monkeypatch.setattr(span_export, "LAST_S", 0.05)

    async def test() -> None:
        engine = await start_engine("a")
        with otlp_receiver() as receiver:
            receiver.goes_on.clear()
            async with traced(
                tmp_path, receiver, {"a": engine.url}, traces={"time_out_s": 60.0}
            ) as gateway:
                export = gateway.gateway._tracing.export  # type: ignore[union-attr]
                await gateway.ask()
                await until(lambda: not export._queue, what="the first one's sending")
                for _ in range(5):
                    assert (await gateway.ask()).status_code == 200
                assert export.counts() == {"exported": 0, "queue_full": 4, "failed": 0}
                admin = f"http://127.0.0.1:{gateway.gateway.admin_port}/metrics"
                page = (await gateway.client.get(admin)).text
                assert 'trimtab_gateway_spans_total{outcome="queue_full"} 4.0' in page
            # The gateway has stopped by now, although the collector still hangs.
            assert export.counts()["failed"] == 6
        await engine.kill()

    run(test())


def test_a_collector_that_refuses_is_told_of_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        with otlp_receiver() as receiver:
            receiver.status = 401
            async with traced(tmp_path, receiver, {"a": engine.url}) as gateway:
                export = gateway.gateway._tracing.export  # type: ignore[union-attr]
                for failed in (2, 4, 6):
                    await gateway.ask()
                    await until(lambda n=failed: export.counts()["failed"] == n, what="a failure")  # type: ignore[misc]
                receiver.status = 200
                await gateway.ask()
                await until(lambda: export.counts()["exported"] == 2, what="the return")
        await engine.kill()

    with caplog.at_level(logging.INFO):
        run(test())
    lines = [record.getMessage() for record in caplog.records]
    assert sum("401" in line for line in lines) == 1
    assert sum("takes spans again" in line for line in lines) == 1


def test_without_a_section_nothing_of_opentelemetry_is_imported(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("engines: {a: {url: 'http://127.0.0.1:9', models: [m]}}\n")
    code = (
        "import asyncio, sys, pathlib\n"
        "from trimtab.engine_bridge.gateway.setup import read_files\n"
        "from trimtab.engine_bridge.gateway.server import Gateway\n"
        f"path = pathlib.Path({str(config)!r})\n"
        "async def make(): return Gateway(path, read_files(path))\n"
        "asyncio.run(make())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_gateway_without_traces_passes_a_clients_context_on(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            await gateway.ask(headers={"traceparent": SAMPLED})
        assert engine.engine.seen[-1]["headers"]["traceparent"] == SAMPLED
        await engine.kill()

    run(test())
    assert UNFOLLOWED.heads == b""

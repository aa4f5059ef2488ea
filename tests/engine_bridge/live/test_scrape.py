"""An engine's page over real HTTP: what is read, and what is said when it cannot be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from tests.engine_bridge.live.engine_page import EnginePage, over_http, served
from tests.faulty_links import NOISE, Behaviour, Proxy
from trimtab.engine_bridge.live import http_get
from trimtab.engine_bridge.live.http_get import SourceError
from trimtab.engine_bridge.live.scrape import ScrapeSource, parse
from trimtab.engine_bridge.live.series import HISTOGRAM_ENDS, OTHER_NAMES, PREFIX, WANTED
from trimtab.engine_bridge.live.snapshot import TelemetryUnavailableError, Unavailable

DEADLINE_S = 0.5
LATE_S = 1.0
"""What a read may take beyond its deadline on a busy machine, seconds."""


@pytest.fixture
def page() -> EnginePage:
    made = EnginePage()
    made.interval(served(3), served(1, queue_length=4, ttft_ms_p99=812.5))
    return made


@pytest.fixture
def proxy(page: EnginePage) -> Iterator[Proxy]:
    with over_http([page]) as (target,), Proxy(f"http://{target}") as made:
        yield made


def source(proxy: Proxy) -> ScrapeSource:
    return ScrapeSource(f"{proxy.url}/metrics", timeout_s=DEADLINE_S)


def refused(read: ScrapeSource) -> TelemetryUnavailableError:
    began_s = time.monotonic()
    with pytest.raises(TelemetryUnavailableError) as found:
        read.read()
    assert time.monotonic() - began_s < DEADLINE_S + LATE_S
    assert "\n" not in str(found.value)
    return found.value


def test_what_is_read_is_what_prometheus_would_read(page: EnginePage, proxy: Proxy) -> None:
    found = source(proxy).read()
    samples = [
        sample
        for family in text_string_to_metric_families(page.text.decode())
        for sample in family.samples
        if sample.name.removeprefix(PREFIX) in WANTED
    ]
    assert len(samples) > 100
    for sample in samples:
        (own,) = [value for label, value in sample.labels.items() if label != "engine"] or [""]
        value = found.values[sample.name.removeprefix(PREFIX)][own]
        assert value == sample.value or (value != value and sample.value != sample.value)
    assert sum(map(len, found.values.values())) == len(samples)
    assert found.values["ttft_p99_seconds"]["T1"] == 0.8125
    assert found.delay_s == 0.0


def test_other_names_are_not_those_of_other_metrics(page: EnginePage) -> None:
    names = {
        sample.name.removeprefix(PREFIX)
        for family in text_string_to_metric_families(page.text.decode())
        for sample in family.samples
    }
    assert set(OTHER_NAMES) <= names
    assert not (WANTED - set(OTHER_NAMES)) & names


def test_vllms_own_lines_and_other_ranks_are_left_out(page: EnginePage) -> None:
    other = EnginePage(rank="1")
    other.interval(served(50))
    foreign = b'vllm:num_requests_running{engine="0",model_name="m"} 7.0\n# HELP trimtab_x "\n'
    found = parse(foreign + page.text + other.text, "0")
    assert found.values["arrivals_total"]["T0"] == 3
    assert not any(name.endswith(HISTOGRAM_ENDS) for name in found.names)


@pytest.mark.parametrize(
    ("behaviour", "reason", "words"),
    [
        (Behaviour.DOWN, Unavailable.UNREACHABLE, "refused"),
        (Behaviour.HANG, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.SLOW, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.DRIP, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.UNAVAILABLE, Unavailable.REFUSED, "503"),
        (Behaviour.GARBAGE, Unavailable.NO_DATA, "no series"),
    ],
)
def test_a_source_that_fails_is_named_in_time(
    proxy: Proxy, behaviour: Behaviour, reason: Unavailable, words: str
) -> None:
    read = source(proxy)
    read.read()
    proxy.behave(behaviour)
    error = refused(read)
    assert error.reason is reason
    assert words in str(error)
    assert proxy.url in str(error)
    proxy.behave(Behaviour.NORMAL)
    assert read.read().values


@contextmanager
def says(*pieces: bytes, every_s: float = 0.0, closes: bool = True) -> Iterator[str]:
    """A server that says some bytes to whoever comes, whatever is asked."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while not over.is_set():
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    try:
                        link.recv(65536)
                        for piece in pieces:
                            link.sendall(piece)
                            over.wait(every_s)
                        if not closes:
                            over.wait(30)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_headers_that_drip_end_with_the_deadline() -> None:
    drops = [bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000]
    with says(*drops, every_s=0.05) as url:
        assert refused(ScrapeSource(url, timeout_s=DEADLINE_S)).reason is Unavailable.TIMEOUT


def test_what_is_no_http_is_named() -> None:
    with says(NOISE) as url:
        error = refused(ScrapeSource(url, timeout_s=DEADLINE_S))
    assert error.reason is Unavailable.MALFORMED
    assert "no HTTP" in str(error)


def test_a_page_that_breaks_off_is_not_half_believed(page: EnginePage) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page.text)
    with says(head + page.text[: len(page.text) // 2]) as url:
        error = refused(ScrapeSource(url, timeout_s=DEADLINE_S))
    assert error.reason is Unavailable.MALFORMED


def test_a_page_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_get, "MOST_BYTES", 1 << 20)
    with says(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * (3 << 20), closes=False) as url:
        error = refused(ScrapeSource(url, timeout_s=DEADLINE_S))
    assert error.reason is Unavailable.MALFORMED
    assert "MiB" in str(error)


def test_nobody_is_followed_elsewhere(page: EnginePage) -> None:
    with over_http([page]) as (target,):
        moved = b"HTTP/1.1 302 Found\r\nlocation: http://%s/metrics\r\ncontent-length: 0\r\n\r\n"
        with says(moved % target.encode()) as url:
            assert "302" in str(refused(ScrapeSource(url, timeout_s=DEADLINE_S)))


def test_a_page_in_pieces_is_read_whole(page: EnginePage) -> None:
    half = len(page.text) // 2
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (page.text[:half], page.text[half:], b"")
    )
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with says(head, chunks) as url:
        assert ScrapeSource(url, timeout_s=5).read().values["arrivals_total"]["T0"] == 3


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (b"vllm:x 1\n", Unavailable.NO_DATA, "PROMETHEUS_MULTIPROC_DIR"),
        (b"<html>hello</html>", Unavailable.NO_DATA, "trimtab serve"),
        (b'trimtab_steps_total{engine="3"} 5\n', Unavailable.NO_DATA, "of engine 0; there are"),
        (b'trimtab_steps_total{engine="0"} five\n', Unavailable.MALFORMED, "five"),
    ],
)
def test_a_page_of_something_else_is_named(text: bytes, reason: Unavailable, words: str) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text)
    with says(head + text) as url:
        error = refused(ScrapeSource(url, timeout_s=DEADLINE_S))
    assert error.reason is reason
    assert words in str(error)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000/metrics", "ftp://h/metrics", "http://", "http://h:x/m", "http://u:p@h/"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SourceError) as error:
        ScrapeSource(url)
    assert "u:p" not in str(error.value)


def test_what_may_be_secret_is_not_shown() -> None:
    read = ScrapeSource("http://127.0.0.1:1/metrics?token=secret", timeout_s=DEADLINE_S)
    assert "secret" not in read.place
    assert "secret" not in str(refused(read))

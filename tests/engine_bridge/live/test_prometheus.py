"""A real Prometheus between engine and source: figures with their true age, and clear failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("prometheus_api_client")

from tests.engine_bridge.live.engine_page import EnginePage, over_http, served
from tests.faulty_links import Behaviour, Proxy
from tests.live_parts import Prometheus, poll, prometheus
from trimtab.engine_bridge.live.assemble import Assembler
from trimtab.engine_bridge.live.http_get import SourceError
from trimtab.engine_bridge.live.prometheus import PrometheusSource
from trimtab.engine_bridge.live.snapshot import (
    Snapshot,
    TelemetryUnavailableError,
    Unavailable,
)

SCRAPE_S = 1.0
DEADLINE_S = 0.5
LATE_S = 1.0
"""What a read may take beyond its deadline on a busy machine, seconds."""


@pytest.fixture(scope="module")
def pages() -> list[EnginePage]:
    return [EnginePage(), EnginePage(), EnginePage(rank="1")]


@pytest.fixture(scope="module")
def targets(pages: list[EnginePage]) -> Iterator[list[str]]:
    with over_http(pages) as found:
        yield found


@pytest.fixture(scope="module")
def server(targets: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes three engines; the last one is of another rank."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, targets, f"{SCRAPE_S:g}s") as started:
        poll(
            lambda: len(started.query("trimtab_engine_time_seconds")) == len(targets),
            what="the first scrape of all",
        )
        yield started


@pytest.fixture
def proxy(server: Prometheus) -> Iterator[Proxy]:
    with Proxy(server.url) as made:
        yield made


def source(url: str, target: str, **how: object) -> PrometheusSource:
    match = {"job": "vllm", "instance": target}
    return PrometheusSource(url, match=match, **({"timeout_s": 10.0} | how))  # type: ignore[arg-type]


def until(read: PrometheusSource, time_s: float) -> Snapshot:
    """The first figures of that engine time."""
    found: list[Snapshot] = []

    def came() -> bool:
        found.append(read.read())
        return found[-1].values["engine_time_seconds"][""] == time_s

    poll(came, what=f"engine time {time_s:g} s")
    return found[-1]


def refused(read: PrometheusSource, deadline_s: float = 10.0) -> TelemetryUnavailableError:
    began_s = time.monotonic()
    with pytest.raises(TelemetryUnavailableError) as found:
        read.read()
    assert time.monotonic() - began_s < deadline_s + LATE_S
    return found.value


def test_an_interval_comes_through_prometheus_whole(
    pages: list[EnginePage], targets: list[str], server: Prometheus
) -> None:
    read, assembler = source(server.url, targets[0]), Assembler(pages[0].plan)
    pages[0].interval(served(1))
    assembler.take(until(read, pages[0].time_s))
    pages[0].interval(served(5, queue_length=3), served(2), kv_use_fraction=0.5, steps=11)
    taken = assembler.take(until(read, pages[0].time_s))
    assert taken.fresh
    assert taken.notices == ()
    seen = assembler.latest
    assert seen is not None
    assert [tier.arrivals for tier in seen.tiers] == [5, 2, 0, 0]
    assert (seen.tiers[0].queue_length, seen.kv_use_fraction, seen.steps) == (3, 0.5, 11)
    assert seen.interval_s == 2.0


def test_the_delay_is_that_of_the_samples(
    pages: list[EnginePage], targets: list[str], server: Prometheus
) -> None:
    read = source(server.url, targets[0])
    pages[0].interval(served(1))
    delays_s = [until(read, pages[0].time_s).delay_s]
    # Just scraped, and then older and older until the next scrape, by Prometheus' clock.
    assert delays_s[0] < SCRAPE_S
    end_s = time.monotonic() + 1.5 * SCRAPE_S
    while time.monotonic() < end_s:
        delays_s.append(read.read().delay_s)
    assert max(delays_s) > 0.5 * SCRAPE_S
    assert max(delays_s) < SCRAPE_S + LATE_S
    assert any(later > sooner for sooner, later in pairwise(delays_s))
    assert any(later < sooner for sooner, later in pairwise(delays_s))


def test_several_targets_that_match_are_named(targets: list[str], server: Prometheus) -> None:
    error = refused(PrometheusSource(server.url, match={"job": "vllm"}, timeout_s=10))
    assert error.reason is Unavailable.MALFORMED
    assert f'instance="{targets[0]}"' in str(error)
    assert f'instance="{targets[1]}"' in str(error)
    assert targets[2] not in str(error)
    alone = PrometheusSource(server.url, match={"job": "vllm"}, rank="1", timeout_s=10)
    assert alone.read().values


def test_no_target_is_no_data(server: Prometheus) -> None:
    error = refused(source(server.url, "nobody:1"))
    assert error.reason is Unavailable.NO_DATA
    assert 'instance="nobody:1"' in str(error)


def test_samples_that_are_too_old_are_no_data(targets: list[str], server: Prometheus) -> None:
    read = source(server.url, targets[0], lookback_s=1e-3)
    found: list[str] = []

    def old() -> bool:
        try:
            read.read()
        except TelemetryUnavailableError as error:
            found.append(str(error))
        return bool(found)

    poll(old, what="samples older than a millisecond")
    assert "more than 0.001 s" in found[0]


@pytest.mark.parametrize(
    ("behaviour", "reason", "words"),
    [
        (Behaviour.DOWN, Unavailable.UNREACHABLE, "refused"),
        (Behaviour.HANG, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.SLOW, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.DRIP, Unavailable.TIMEOUT, "0.5 s"),
        (Behaviour.UNAVAILABLE, Unavailable.REFUSED, "503"),
        (Behaviour.GARBAGE, Unavailable.MALFORMED, "no answer of Prometheus"),
    ],
)
def test_a_prometheus_that_fails_is_asked_once_and_named_in_time(
    targets: list[str], proxy: Proxy, behaviour: Behaviour, reason: Unavailable, words: str
) -> None:
    proxy.behave(behaviour)
    error = refused(source(proxy.url, targets[0], timeout_s=DEADLINE_S), DEADLINE_S)
    assert error.reason is reason
    assert words in str(error)
    assert proxy.requests == (0 if behaviour is Behaviour.DOWN else 1)
    proxy.behave(Behaviour.NORMAL)
    assert source(proxy.url, targets[0]).read().values


def test_nan_for_everything_is_refused(
    pages: list[EnginePage], targets: list[str], proxy: Proxy
) -> None:
    proxy.behave(Behaviour.NAN)
    with pytest.raises(TelemetryUnavailableError, match="nan"):
        Assembler(pages[0].plan).take(source(proxy.url, targets[0]).read())


def test_an_engine_that_is_down_is_no_data_and_then_prometheus_is(tmp_path: Path) -> None:
    with over_http([EnginePage()]) as (target,), Proxy(f"http://{target}") as engine:
        instance = engine.url.removeprefix("http://")
        with prometheus(tmp_path, [instance], "500ms") as started:
            read = source(started.url, instance)
            poll(lambda: bool(started.query("trimtab_steps_total")), what="the first scrape")
            assert read.read().values
            engine.behave(Behaviour.DOWN)
            poll(lambda: not started.query("trimtab_steps_total"), what="a failed scrape")
            assert refused(read).reason is Unavailable.NO_DATA
        assert refused(read).reason is Unavailable.UNREACHABLE


def test_a_token_is_shown_and_kept_secret(targets: list[str], server: Prometheus) -> None:
    shown = []

    class Listening(Proxy):
        def _answer(self, handler: object) -> None:
            shown.append(handler.headers.get("authorization"))  # type: ignore[attr-defined]
            super()._answer(handler)  # type: ignore[arg-type]

    with Listening(server.url) as made:
        read = source(made.url, targets[0], token="hush")
        read.read()
    assert shown == ["Bearer hush"]
    assert "hush" not in read.place + str(refused(read))


@pytest.mark.parametrize(
    "match", [{"engine": "1"}, {"a-b": "c"}, {"__name__": "x"}, {"tier": "T0"}]
)
def test_what_is_no_label_of_a_target_is_refused(match: dict[str, str]) -> None:
    with pytest.raises(SourceError, match="label of the target"):
        PrometheusSource("http://127.0.0.1:9090", match=match)


def test_the_values_of_labels_are_quoted() -> None:
    read = PrometheusSource("http://127.0.0.1:1", match={"instance": 'a"} or {b="c\\'}, timeout_s=1)
    assert r'instance="a\"} or {b=\"c\\"' in read.place

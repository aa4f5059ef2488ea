"""Trimtab's metrics in the server's own `/metrics`, by tier."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")
import httpx

from tests.end_to_end.load import InBackground, Wish
from tests.vllm_server import Server
from tests.waiting import poll

pytestmark = pytest.mark.slow
SAMPLE = re.compile(r"(trimtab_\w+)\{([^}]*)\} (\S+)")


def samples(server: Server) -> dict[tuple[str, str], float]:
    """Values by name and labels, as they are written."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert "vllm:num_requests_running" in text
    return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text)}


def total(found: dict[tuple[str, str], float], name: str, *labels: str) -> float:
    return sum(
        value
        for (metric, text), value in found.items()
        if metric == name and all(label in text for label in labels)
    )


def test_requests_are_counted_by_tier_and_outcome(server: Server) -> None:
    before = samples(server)
    asked = [Wish("acme", "bako " * 30, 40)] * 3 + [Wish("crowd", "lamu " * 30, 40)] * 5
    asked += [Wish("crowd", "lamu " * 30, 50_000, leaves_after=2)]
    with InBackground(server, asked) as load:
        assert load.answers() == [40] * 8 + [None]

    def grew(name: str, *labels: str) -> float:
        return total(samples(server), name, *labels) - total(before, name, *labels)

    def requests(tier: str, outcome: str) -> float:
        return grew("trimtab_requests_total", f'tier="{tier}"', f'outcome="{outcome}"')

    poll(lambda: requests("T3", "cancelled") == 1, what="a cancelled request")
    assert requests("T0", "finished") == 3
    assert requests("T3", "finished") == 5
    assert requests("T1", "finished") == requests("T2", "finished") == 0
    for histogram in ("ttft", "tpot", "e2e", "queue_wait"):
        assert grew(f"trimtab_{histogram}_seconds_count", 'tier="T0"') == 3
    # These come with the telemetry interval; an engine with nothing to do closes it.
    poll(lambda: grew("trimtab_finished_total", 'tier="T3"') == 5, what="the interval's end")
    assert grew("trimtab_decode_tokens_total", 'tier="T0"') == 120
    assert grew("trimtab_steps_total") > 40


def test_label_sets_are_closed_and_name_no_tenant(server: Server) -> None:
    found = samples(server)
    for _, labels in found:
        assert 'engine="0"' in labels
        assert "tenant=" not in labels
    text = "".join(labels for _, labels in found)
    assert not any(name in text for name in ("acme", "bolt", "crowd", "sk-"))
    assert set(re.findall(r'tier="(\w+)"', text)) == {"T0", "T1", "T2", "T3"}
    assert total(found, "trimtab_plan_info", 'plan="default"') == 1

"""The likely cause: a known one, put into traffic, is named; none is invented."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.profile import incidents
from tests.training.profile.senders import STEADY, Sender, log
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog
from trimtab.training.profile.cause import Cause, Kind
from trimtab.training.profile.figures import compare
from trimtab.training.profile.profile import make_profile

SINCE_UNIX_S = incidents.ORIGIN_UNIX_S + incidents.BEGINS_S


@pytest.fixture(scope="module")
def real(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Twelve minutes of real traffic, composed."""
    return incidents.composed(shared_dir, tmp_path_factory.mktemp("trace") / "real.parquet")


def cause_of(trace: Trace, folder: Path) -> Cause:
    incidents.write_log(trace, folder)
    found = make_profile(folder, since_unix_s=SINCE_UNIX_S, window_s=120.0, before_s=600.0)
    return found.cause


def test_a_burst_of_one_tenant_is_named(real: Trace, tmp_path: Path) -> None:
    tenant = incidents.heaviest(real, "T0", rank=2)
    cause = cause_of(incidents.with_burst(real, tenant, times=20), tmp_path)
    assert (cause.kind, cause.tenant, cause.tier) == (Kind.MORE_REQUESTS, tenant, "T0")
    assert cause.share is not None
    assert cause.share > 0.7
    assert f"more requests of tenant {tenant} in T0" in cause.sentence


def test_long_prompts_of_one_tenant_are_named(real: Trace, tmp_path: Path) -> None:
    tenant = incidents.heaviest(real, "T0", rank=1)
    cause = cause_of(incidents.with_long_prompts(real, tenant, times=12), tmp_path)
    assert (cause.kind, cause.tenant) == (Kind.LONGER_PROMPTS, tenant)
    assert f"longer prompts of tenant {tenant} in T0" in cause.sentence


def test_lost_reuse_of_prefixes_is_named(real: Trace, tmp_path: Path) -> None:
    cause = cause_of(incidents.with_fresh_prefixes(real, "T1"), tmp_path)
    assert (cause.kind, cause.tier) == (Kind.LESS_REUSE, "T1")
    assert "the prompts themselves repeat less" in cause.sentence


def test_traffic_as_it_was_is_not_blamed(real: Trace, tmp_path: Path) -> None:
    cause = cause_of(real, tmp_path)
    assert cause.kind is Kind.NOT_THE_TRAFFIC
    assert cause.tenant is None
    assert "Look at the engine" in cause.sentence


def found(folder: Path, *, begins_s: float = 600.0, **options: Any) -> Cause:
    since = incidents.ORIGIN_UNIX_S + begins_s
    usual: dict[str, Any] = {"since_unix_s": since, "window_s": 120.0, "before_s": 600.0}
    return make_profile(folder, **(usual | options)).cause


@pytest.mark.parametrize(
    ("sender", "kind", "words"),
    [
        (Sender("loud", per_s=(0.5, 9.0)), Kind.MORE_REQUESTS, "9.00 a second against 0.500"),
        (Sender("new", per_s=(0.0, 5.0)), Kind.MORE_REQUESTS, "5.00 a second against none"),
        (
            Sender("new", per_s=(0.0, 0.5), prompt=(1, 32_000)),
            Kind.MORE_REQUESTS,
            "with prompts of 32,000 tokens in the mean",
        ),
        (Sender("long", prompt=(1600, 16_000)), Kind.LONGER_PROMPTS, "16,000 tokens in the mean"),
        (Sender("chatty", output=(100, 3000)), Kind.LONGER_ANSWERS, "3,000 tokens in the mean"),
        (
            Sender("fresh", prompt=(16_000, 16_000), cached=(0.9, 0.0), shared=(0.9, 0.0)),
            Kind.LESS_REUSE,
            "the prompts themselves repeat less (0 % against 90 %)",
        ),
        (
            Sender("evicted", prompt=(16_000, 16_000), cached=(0.9, 0.0), shared=(0.9, 0.9)),
            Kind.LESS_REUSE,
            "the cache no longer keeps them",
        ),
    ],
    ids=lambda value: value.tenant if isinstance(value, Sender) else None,
)
def test_one_tenants_change_is_named(
    tmp_path: Path, sender: Sender, kind: Kind, words: str
) -> None:
    log(tmp_path, [*STEADY, sender])
    cause = found(tmp_path)
    assert (cause.kind, cause.tenant, cause.tier) == (kind, sender.tenant, "T0")
    assert words in cause.sentence
    assert cause.share == pytest.approx(1.0, abs=0.01)


def test_what_all_do_is_nobodys(tmp_path: Path) -> None:
    log(tmp_path, [replace(sender, per_s=(1.0, 2.0)) for sender in STEADY])
    cause = found(tmp_path)
    assert (cause.kind, cause.tenant, cause.tier) == (Kind.MORE_REQUESTS, None, None)
    assert cause.growth == pytest.approx(2.0, abs=0.05)


def test_what_a_tier_does_is_the_tiers(tmp_path: Path) -> None:
    crowd = [Sender(f"free-{n}", "T3", per_s=(0.5, 3.0)) for n in range(6)]
    log(tmp_path, [*STEADY, *crowd])
    cause = found(tmp_path)
    assert (cause.kind, cause.tenant, cause.tier) == (Kind.MORE_REQUESTS, None, "T3")


def test_one_tenant_in_two_tiers_is_two_senders(tmp_path: Path) -> None:
    twice = [Sender("acme", "T0"), Sender("acme", "T2", per_s=(1.0, 12.0))]
    log(tmp_path, [*STEADY, *twice])
    cause = found(tmp_path)
    assert (cause.tenant, cause.tier) == ("acme", "T2")


def test_seconds_of_requests_are_a_burst_though_the_mean_hardly_grows(tmp_path: Path) -> None:
    log(tmp_path, [replace(sender, per_s=(4.0, 4.0)) for sender in STEADY])
    out = TrafficLog(
        tmp_path, engine="x", plan_digest="y", origin_unix_s=incidents.ORIGIN_UNIX_S + 660.0
    )
    for n in range(90):
        out.add(
            arrival_s=n * 0.05, tenant="cron", tier="T1", prompt_tokens=1600, output_tokens=100,
            ttft_s=1.0, e2e_s=2.0,
        )  # fmt: skip
    out.close()
    cause = found(tmp_path)
    assert (cause.kind, cause.tenant, cause.tier) == (Kind.BURST, "cron", "T1")
    assert "90 requests within 10 seconds against 0" in cause.sentence


def test_what_is_not_in_the_log_yet_does_not_clear_the_traffic(tmp_path: Path) -> None:
    log(tmp_path, STEADY)
    few = found(tmp_path, alert={"waiting": {"T0": 2}, "running": {"T0": 3}})
    many = found(tmp_path, alert={"waiting": {"T0": 400}, "running": {"T0": 3}})
    assert "The traffic does not explain it" in few.sentence
    assert "403 requests had not ended" in many.sentence


def test_without_a_before_nothing_is_compared(tmp_path: Path) -> None:
    log(tmp_path, [*STEADY, Sender("big", "T1", per_s=(9.0, 9.0))], begins_s=10.0)
    cause = found(tmp_path, begins_s=10.0)
    assert (cause.kind, cause.tenant) == (Kind.UNKNOWN, "big")
    assert "does not reach back" in cause.sentence


def test_the_parts_add_up_to_what_was_added(tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    senders = [
        Sender(
            f"s{n}",
            per_s=tuple(draw.uniform(0.2, 2.0, 2)),  # type: ignore[arg-type]
            prompt=tuple(int(x) for x in draw.integers(100, 4000, 2)),  # type: ignore[arg-type]
            output=tuple(int(x) for x in draw.integers(10, 900, 2)),  # type: ignore[arg-type]
            cached=tuple(draw.uniform(0.0, 0.9, 2)),  # type: ignore[arg-type]
        )
        for n in range(6)
    ]
    log(tmp_path, senders)
    from trimtab.training.profile import cause
    from trimtab.training.profile.logged import read_logged

    since = incidents.ORIGIN_UNIX_S + 600.0
    compared = compare(read_logged(tmp_path, since_unix_s=since, window_s=120.0, before_s=600.0))
    assert compared.before is not None
    parts = sum(cause.taken_apart(compared).values())
    np.testing.assert_allclose(parts, compared.now.demand - compared.before.demand)


def test_the_cause_is_in_the_json(tmp_path: Path) -> None:
    log(tmp_path, [*STEADY, Sender("loud", per_s=(0.5, 9.0))])
    since = incidents.ORIGIN_UNIX_S + 600.0
    made = make_profile(tmp_path, since_unix_s=since, window_s=120.0, before_s=600.0)
    content = json.loads(json.dumps(made.content))
    assert content["cause"]["kind"] == "more_requests"
    assert content["cause"]["tenant"] == "loud"

"""Long prompts in slices on a fleet: one engine as in the what-if, each engine what it has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trimtab.agents.registry import make_policy
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.training.fleet.run import FleetReplay, FleetRun
from trimtab.training.fleet.settings import fleet_from
from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.run import drive

ENGINE = "h100:llama-3.1-8b-tp1"
SPEC = get_engine_spec(ENGINE)
SLICE = 4096
PLAN = with_values(load_plan(), {f"tiers.{tier}.slice_tokens": SLICE for tier in ("T1", "T2")})
IDS = 20_000 // 16


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Five minutes of all tiers with long prompts, sessions included."""
    return generate(hours=0.08, seed=3, preset="poison", load=0.8, spec=SPEC)


def replay(trace: Trace, engines: dict[str, Any], policy: str = "static", **more: Any) -> FleetRun:
    one = fleet_from({"name": "test", "engines": engines, **more}, where="fleet.yaml")
    specs = dict.fromkeys(one.engines, SPEC)
    return FleetReplay(trace, one, PLAN, specs, lambda: make_policy(policy)).run()


def waits_s(run: FleetRun) -> npt.NDArray[np.float64]:
    """Time to first token of each request."""
    first_s, arrival_s = (run.requests[name] for name in ("first_token_s", "arrival_s"))
    return np.asarray(first_s, np.float64) - np.asarray(arrival_s, np.float64)


def asked_twice(at_s: float, *, tenant: int = 0) -> Trace:
    """The same prompt of 20,000 tokens at the start and again at that time."""
    ids = np.arange(IDS)
    return Trace.build(
        arrival_s=[0.0, at_s], prompt_tokens=20_000, output_tokens=5, tier=0, tier_names=("T1",),
        tenant=[0, tenant], tenant_names=("one", "two"),
        prefix_ids=np.concatenate((ids, ids)).astype(np.int32),
        prefix_offsets=np.array([0, IDS, 2 * IDS]), prefix_block_tokens=np.full(2, 16, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["static", "stock-fcfs"])
def test_a_fleet_of_one_is_the_engine_itself_with_slices_too(trace: Trace, policy: str) -> None:
    alone = drive(trace, make_policy(policy), PLAN, SPEC, seed=0, drain_s=600.0)
    one = replay(trace, {"a": {"engine": ENGINE}}, policy)
    for name, column in alone.requests.items():
        np.testing.assert_array_equal(one.requests[name], column, err_msg=name)
    assert one.busy_s["a"] == pytest.approx(alone.engine_busy_s, abs=1e-9)
    whole = drive(trace, make_policy(policy), load_plan(), SPEC, seed=0, drain_s=600.0)
    assert not np.array_equal(whole.requests["first_token_s"], alone.requests["first_token_s"])


def test_figures_are_about_the_requests_of_the_trace(trace: Trace) -> None:
    run = replay(trace, {name: {"engine": ENGINE} for name in "ab"})
    assert len(run.requests["outcome"]) == len(trace)
    np.testing.assert_array_equal(run.requests["prompt_tokens"], trace.prompt_tokens)
    assert set(run.requests["outcome"].tolist()) <= {score.FINISHED, score.SHED, score.CANCELLED}
    assert set(run.requests["engine"].tolist()) == {0, 1}


def test_an_engine_gets_no_slices_of_what_it_has_read_another_one_does() -> None:
    engines: dict[str, Any] = {"a": {"engine": ENGINE}, "b": {"engine": ENGINE}}
    here = replay(asked_twice(30.0), {"a": engines["a"]})
    read_s = waits_s(here)
    assert here.requests["cached_tokens"].tolist() == [0, 19_984]
    assert read_s[1] < 0.1 * read_s[0]
    # Two tenants of one engine each: what one engine has read the other has not.
    apart = {
        name: {**engines[name], "tenants": [who]}
        for name, who in zip("ab", ("one", "two"), strict=True)
    }
    elsewhere = replay(asked_twice(30.0, tenant=1), apart)
    assert elsewhere.requests["engine"].tolist() == [0, 1]
    assert elsewhere.requests["cached_tokens"].tolist() == [0, 0]
    assert np.diff(elsewhere.requests["first_token_s"]) == pytest.approx(30.0)


def test_a_request_whose_engine_ends_gets_slices_of_its_own_on_the_next() -> None:
    long = asked_twice(30.0).head(1)
    engines = {"a": {"engine": ENGINE}, "b": {"engine": ENGINE, "reserve": True}}
    alone = replay(long, {"a": {"engine": ENGINE}})
    read_s = float(alone.requests["first_token_s"][0])
    failing = replay(
        long, engines, reserve_tiers=["T1"], failures=[{"engine": "a", "at_s": 0.5 * read_s}]
    )
    assert failing.retried == 1
    assert failing.requests["engine"].tolist() == [1]
    assert failing.requests["outcome"].tolist() == [score.FINISHED]
    assert failing.requests["cached_tokens"].tolist() == [0]
    # As long as on the first engine, slices and all.
    assert failing.requests["first_token_s"][0] - 0.5 * read_s == pytest.approx(read_s, rel=1e-3)


def test_an_engine_that_has_ended_is_believed_to_know_until_an_answer_tells() -> None:
    """The gateway's own marks outlive the engine: the second request goes whole, the third not."""
    ids = np.arange(IDS)
    trace = Trace.build(
        arrival_s=[0.0, 300.0, 400.0, 500.0], prompt_tokens=20_000, output_tokens=5, tier=0,
        tier_names=("T1",), prefix_ids=np.tile(ids, 4).astype(np.int32),
        prefix_offsets=np.arange(5) * IDS, prefix_block_tokens=np.full(4, 16, np.int32),
    )  # fmt: skip
    engine = {"engine": ENGINE, "start_s": 1.0}
    failures = [{"engine": "a", "at_s": at_s} for at_s in (200.0, 350.0)]
    run = replay(trace, {"a": engine}, failures=failures)
    read_s = waits_s(run).tolist()
    whole = replay(trace.head(1), {"a": engine})
    sliced_s = float(whole.requests["first_token_s"][0])
    assert read_s[0] == pytest.approx(sliced_s, rel=1e-6)
    # Whole, so sooner than with slices; then in slices again; then cached.
    assert read_s[1] < 0.99 * sliced_s
    assert read_s[2] == pytest.approx(sliced_s, rel=1e-3)
    assert read_s[3] < 0.1 * sliced_s


def test_the_command_takes_a_plan_with_slices(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, recorded, plan = (tmp_path / name for name in ("one.yaml", "t.parquet", "plan.json"))
    fleet.write_text(f"name: one\nengines:\n  a: {{engine: '{ENGINE}'}}")
    plan.write_text(PLAN.model_dump_json())
    write_trace(trace.head(200), recorded)
    words = ["fleet", "--trace", str(recorded), "--fleet", str(fleet), "--plan", str(plan)]
    assert main(words) == 0, capsys.readouterr().err
    assert "one" in capsys.readouterr().out

"""The learned policy: zeros are the static plan in a replay, and only what fits a plan acts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.agents.bundles import random_bundle, zero_bundle
from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.bundle import write_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.learned import LearnedPolicy, forward
from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import BundleError
from trimtab.engine_bridge.plan import with_values
from trimtab.envs.observation import Observer
from trimtab.training.report.verdict import verdict
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.run import Contender, Study, drive, run_study

STATIC = Allocation.static(PLAN)


def test_a_zero_network_is_static_bit_for_bit_through_the_bundle(tmp_path: Path) -> None:
    write_bundle(zero_bundle(PLAN), tmp_path)
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    trace = generate(hours=0.05, seed=2, preset="steady", load=1.0, spec=spec)
    digests = {
        drive(trace, make_policy(name), PLAN, spec, seed=0, drain_s=60.0).digest()
        for name in ("static", f"bundle:{tmp_path}")
    }
    assert len(digests) == 1


def test_a_what_if_tells_what_the_guard_did(tmp_path: Path) -> None:
    write_bundle(zero_bundle(PLAN), tmp_path)
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    trace = generate(hours=0.02, seed=2, preset="steady", load=0.5, spec=spec)
    names = ("static", f"bundle:{tmp_path}")
    study = Study(
        trace=trace,
        plan=PLAN,
        contenders=tuple(Contender(label=name, policy=name, plan=PLAN) for name in names),
        spec=spec,
        drain_s=60.0,
    )
    result = run_study(study, processes=2).result
    static, learned = result.results
    assert static.guard is None
    assert learned.guard is not None
    assert learned.guard.intervals >= trace.duration_s // PLAN.controller.interval_s
    # A zero network asks for the static plan, which there is no reason to hold back.
    assert learned.guard.reasons == {}
    assert json.loads(result.to_json())["results"][1]["guard"]["trips"] == 0
    (sentence,) = verdict(result).guards
    assert "0.0 % of the control intervals" in sentence


def test_a_zero_network_alone_returns_to_static_from_anywhere() -> None:
    policy = LearnedPolicy(zero_bundle(PLAN))
    policy.reset(PLAN, 0)
    moved = replace(STATIC, prefill_budget_tokens=300, weights=(1.0, 1.0, 1.0, 1.0))
    assert policy.act(telemetry(PLAN, applied=moved)) == STATIC


def test_the_forward_pass_is_layers_with_a_tanh_between_them() -> None:
    layers = random_bundle(PLAN, 3).layers
    rng = np.random.default_rng(0)
    seen = rng.uniform(-1, 1, layers[0][0].shape[0]).astype(np.float32)
    (w0, b0), (w1, b1) = ((w.astype(float), b.astype(float)) for w, b in layers)
    expected = np.clip(np.tanh(seen @ w0 + b0) @ w1 + b1, -1, 1)
    action = forward(layers, seen)
    assert action.dtype == np.float32
    assert np.abs(action).max() == 1.0
    assert action == pytest.approx(expected, abs=1e-5)


def test_it_moves_with_what_it_sees() -> None:
    policy = LearnedPolicy(random_bundle(PLAN, 3, scale=0.2))
    policy.reset(PLAN, 0)
    calm = policy.act(telemetry(PLAN))
    policy.reset(PLAN, 0)
    busy = [tier_telemetry(arrivals=50, queue_length=30, running=40) for _ in PLAN.tiers]
    assert policy.act(telemetry(PLAN, busy)) != calm


def test_it_says_how_much_of_what_it_sees_is_outside_of_training() -> None:
    bundle = zero_bundle(PLAN)
    seen = Observer(PLAN).observe(telemetry(PLAN))
    inside = replace(bundle, envelope_low=seen - 0.01, envelope_high=seen + np.float32(0.01))
    policy = LearnedPolicy(inside)
    policy.reset(PLAN, 0)
    policy.act(telemetry(PLAN))
    assert policy.outside_fraction == 0.0
    busy = [tier_telemetry(arrivals=500, queue_length=500, running=500) for _ in PLAN.tiers]
    policy.act(telemetry(PLAN, busy, time_s=4.0, busy_fraction=1.0))
    assert 0.1 < policy.outside_fraction < 1.0


def test_a_plan_with_other_tiers_is_refused_with_both_lists() -> None:
    bundle = replace(zero_bundle(PLAN), tier_names=("T0", "T1", "T2", "X3"))
    with pytest.raises(BundleError, match=r"T0, T1, T2, X3.*T0, T1, T2, T3"):
        LearnedPolicy(bundle).reset(PLAN, 0)


def test_a_plan_with_other_pools_is_refused_with_both_lists() -> None:
    bundle = replace(zero_bundle(PLAN), pool_names=("all",))
    with pytest.raises(BundleError, match=r'"all".*interactive, batch, free'):
        LearnedPolicy(bundle).reset(PLAN, 0)


def test_other_observations_are_refused_with_both_digests() -> None:
    bundle = replace(zero_bundle(PLAN), observation_digest="ab" * 32)
    own = Observer(PLAN).schema.digest
    with pytest.raises(BundleError, match=f"observation.digest.*{'ab' * 32}.*{own}"):
        LearnedPolicy(bundle).reset(PLAN, 0)


def test_a_plan_that_closes_a_knob_is_refused_with_both_digests() -> None:
    bundle = zero_bundle(PLAN)
    closed = with_values(PLAN, {"controller.bounds.shed_at": None})
    # Observations tell of open knobs too: they are what differs first.
    with pytest.raises(BundleError, match="digest"):
        LearnedPolicy(bundle).reset(closed, 0)
    known = replace(bundle, observation_digest=Observer(closed).schema.digest)
    with pytest.raises(BundleError, match=f"action.digest.*{bundle.action_schema.digest}"):
        LearnedPolicy(known).reset(closed, 0)


def test_another_plan_with_the_same_tiers_and_knobs_may_use_it() -> None:
    heavier = with_values(PLAN, {"tiers.T1.weight": 200})
    LearnedPolicy(zero_bundle(PLAN)).reset(heavier, 0)


def test_the_registry_puts_a_guard_around_a_bundle(tmp_path: Path) -> None:
    write_bundle(zero_bundle(PLAN), tmp_path)
    policy = make_policy(f"bundle:{tmp_path}")
    assert isinstance(policy, Guard)
    assert isinstance(policy.policy, LearnedPolicy)
    assert policy.name == "learned"


def test_policies_run_without_the_learning_stack() -> None:
    code = (
        "import pkgutil, importlib, sys, trimtab.agents as agents\n"
        "for found in pkgutil.iter_modules(agents.__path__):\n"
        "    importlib.import_module(f'trimtab.agents.{found.name}')\n"
        "heavy = {'torch', 'stable_baselines3', 'mlflow', 'pandas', 'trimtab.training'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print('trimtab.envs.allocation_env' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]

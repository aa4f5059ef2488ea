"""The allocation store: what holds is always lawful, and silence ends in the static plan."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.limits import LimitReason, project
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.vllm.control_errors import (
    HeldError,
    ProposalError,
    StaleVersionError,
)
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.control_values import KNOBS, allocation_by_names, allocation_from

PLAN = load_plan()
STATIC = Allocation.static(PLAN)
LEASE_S = PLAN.controller.lease_s
CAPACITY = 64


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> AllocationStore:
    return AllocationStore(PLAN, capacity_max_num_seqs=CAPACITY, clock=clock)


def unversioned(allocation: Allocation) -> Allocation:
    return replace(allocation, version=0)


def test_the_static_plan_holds_at_first_and_is_no_news(store: AllocationStore) -> None:
    assert store.allocation == STATIC
    assert store.take(100.0) is None
    state = store.describe()
    assert (state.version, state.leased, state.holder) == (0, False, None)
    assert state.lease_left_s == math.inf


def test_a_partial_proposal_changes_only_what_it_names(store: AllocationStore) -> None:
    applied = store.propose({"weights": {"T1": 150}, "prefill_budget_tokens": 5000}, holder="a")
    assert applied.changed
    assert applied.limited == ()
    assert applied.allocation == replace(
        STATIC, weights=(8800.0, 150.0, 5.0, 1.0), prefill_budget_tokens=5000, version=1
    )


def test_the_scheduler_gets_a_change_once_and_as_one_object(store: AllocationStore) -> None:
    applied = store.propose({"weights": [8000, 120, 6, 2]}, holder="a")
    taken = store.take(100.0)
    assert taken is applied.allocation
    assert store.take(100.0) is None
    assert store.describe().taken_version == 1


def test_of_two_changes_between_steps_only_the_last_is_taken(store: AllocationStore) -> None:
    store.propose({"max_num_seqs": 32}, holder="a")
    store.propose({"max_num_seqs": 16}, holder="a")
    taken = store.take(100.0)
    assert taken is not None
    assert (taken.version, taken.max_num_seqs) == (2, 16)


def test_the_same_again_renews_the_lease_without_a_new_version(
    store: AllocationStore, clock: Clock
) -> None:
    store.propose({"max_num_seqs": 16}, holder="a")
    store.take(clock.now_s)
    clock.now_s += LEASE_S - 1
    assert not store.propose({"max_num_seqs": 16}, holder="a").changed
    clock.now_s += LEASE_S - 1
    assert store.take(clock.now_s) is None
    assert store.describe().version == 1
    assert store.describe().lease_left_s == pytest.approx(1.0)


def test_an_empty_proposal_renews_the_lease(store: AllocationStore, clock: Clock) -> None:
    store.propose({"max_num_seqs": 16}, holder="a")
    clock.now_s += LEASE_S - 1
    store.propose({}, holder="a")
    clock.now_s += LEASE_S - 1
    assert store.describe().allocation.max_num_seqs == 16


def test_silence_brings_the_static_plan_back_as_a_version_of_its_own(
    store: AllocationStore, clock: Clock
) -> None:
    store.propose({"max_num_seqs": 16}, holder="a", ttl_s=3.0)
    store.take(clock.now_s)
    assert store.take(clock.now_s + 2.999) is None
    back = store.take(clock.now_s + 3.0)
    assert back == replace(STATIC, version=2)
    assert store.take(clock.now_s + 60.0) is None


def test_an_idle_engine_sees_the_end_of_the_lease_too(store: AllocationStore, clock: Clock) -> None:
    store.propose({"max_num_seqs": 16}, holder="a")
    clock.now_s += LEASE_S
    state = store.describe()
    assert not state.leased
    assert unversioned(state.allocation) == STATIC
    assert state.version == 2


def test_a_lease_on_the_static_values_ends_without_a_new_version(
    store: AllocationStore, clock: Clock
) -> None:
    store.propose({}, holder="a")
    clock.now_s += LEASE_S
    assert store.take(clock.now_s) is None
    assert store.describe().version == 0


def test_while_a_lease_is_alive_another_holder_is_refused_by_name(
    store: AllocationStore, clock: Clock
) -> None:
    store.propose({"max_num_seqs": 16}, holder="first")
    clock.now_s += 4
    with pytest.raises(HeldError, match=r"first holds the lease for another 6\.0 s"):
        store.propose({"max_num_seqs": 8}, holder="second")
    assert store.describe().allocation.max_num_seqs == 16
    clock.now_s += 6
    assert store.propose({"max_num_seqs": 8}, holder="second").version == 3


def test_release_ends_the_lease_for_its_holder_only(store: AllocationStore, clock: Clock) -> None:
    store.propose({"max_num_seqs": 16}, holder="first")
    with pytest.raises(HeldError):
        store.release("second")
    released = store.release("first")
    assert released.changed
    assert unversioned(released.allocation) == STATIC
    assert not store.release("second").changed
    assert store.propose({"max_num_seqs": 8}, holder="second").changed


def test_an_outdated_version_is_refused(store: AllocationStore) -> None:
    store.propose({"max_num_seqs": 16}, holder="a", expected_version=0)
    with pytest.raises(StaleVersionError, match="must be the version that holds, 1"):
        store.propose({"max_num_seqs": 8}, holder="a", expected_version=0)


def test_beyond_the_start_up_capacity_the_old_cap_is_kept(store: AllocationStore) -> None:
    store.propose({"max_num_seqs": 16}, holder="a")
    assert store.propose({"max_num_seqs": 64}, holder="a").allocation.max_num_seqs == 64
    applied = store.propose({"max_num_seqs": 128}, holder="a")
    assert applied.allocation.max_num_seqs == 64
    assert not applied.changed
    assert [(entry.knob, entry.reason) for entry in applied.limited] == [
        ("max_num_seqs", LimitReason.CAPACITY)
    ]


def test_what_was_clipped_and_why_is_told(store: AllocationStore) -> None:
    applied = store.propose({"weights": {"T0": 1e9}, "draft_tokens": {"T0": 4}}, holder="a")
    assert {(entry.knob, entry.reason) for entry in applied.limited} == {
        ("weights", LimitReason.CEILING),
        ("draft_tokens", LimitReason.CLOSED),
    }
    assert store.describe().limited == applied.limited


def test_no_cap_is_written_as_none(store: AllocationStore) -> None:
    store.propose({"max_running": {"T3": 4}}, holder="a")
    assert store.describe().by_names["max_running"] == {"T0": None, "T1": None, "T2": None, "T3": 4}
    applied = store.propose({"max_running": {"T3": None}}, holder="a")
    assert applied.allocation.max_running == (UNLIMITED,) * 4


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"wieghts": {}}, 'did you mean "weights"?'),
        ({"kv_fractions": {"bacth": 1}}, 'did you mean "batch"?'),
        ({"weights": {"T0": math.nan}}, "weights.T0: nan, must be a finite number"),
        ({"weights": {"T0": "8"}}, 'weights.T0: "8", must be a finite number'),
        ({"weights": {"T0": True}}, "weights.T0: true, must be a finite number"),
        ({"weights": {"T0": None}}, "weights.T0: null, must be a finite number"),
        ({"prefill_budget_tokens": 10**400}, "must be a finite number"),
        ({"slack_fraction": math.inf}, "must be a finite number"),
        ({"weights": [1, 2, 3]}, "or a list of 4"),
        ({"weights": 3}, "or a list of 4"),
        ({"slack_fraction": [0.5]}, "must be a finite number"),
        ([], "must be a mapping of knobs"),
        (None, "must be a mapping of knobs"),
    ],
)
def test_a_bad_proposal_is_refused_logged_and_leaves_everything_as_it_was(
    store: AllocationStore,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    values: Any,
    told: str,
) -> None:
    store.propose({"max_num_seqs": 16}, holder="a", ttl_s=5.0)
    before = store.describe()
    with pytest.raises(ProposalError) as refused:
        store.propose(values, holder="a")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    after = store.describe()
    assert after == replace(before, refused=1)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert told in caplog.text


@pytest.mark.parametrize("ttl_s", [0.0, -1, math.nan, math.inf, "9", True, 1e9])
def test_a_lease_has_a_sensible_length(store: AllocationStore, ttl_s: Any) -> None:
    with pytest.raises(ProposalError, match="ttl_s"):
        store.propose({}, holder="a", ttl_s=ttl_s)


@pytest.mark.parametrize("holder", ["", "x" * 65, "a\nb", None, 7])
def test_a_holder_has_a_printable_name(store: AllocationStore, holder: Any) -> None:
    with pytest.raises(ProposalError, match="holder"):
        store.propose({}, holder=holder)


def test_a_flood_of_nonsense_writes_few_lines(
    store: AllocationStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        with pytest.raises(ProposalError):
            store.propose({"x": 1}, holder="a")
        clock.now_s += 0.002
    assert len(caplog.records) <= 3
    assert "more since the last line" in caplog.records[-1].getMessage()


def test_names_and_values_come_back_as_they_were() -> None:
    named = allocation_by_names(STATIC, PLAN)
    assert tuple(named) == KNOBS
    assert allocation_from(named, STATIC, PLAN) == STATIC


def test_a_step_never_sees_half_of_a_change_nor_an_old_version() -> None:
    store = AllocationStore(PLAN, capacity_max_num_seqs=CAPACITY)
    done = threading.Event()

    def propose() -> None:
        for n in range(500):
            cap = 16 + n % 2
            store.propose({"max_num_seqs": cap, "max_running": {"T3": cap}}, holder="a")
        done.set()

    thread = threading.Thread(target=propose)
    thread.start()
    seen = []
    while not done.is_set():
        taken = store.take(time.monotonic())
        if taken is not None:
            assert taken.max_num_seqs == taken.max_running[3]
            seen.append(taken.version)
    thread.join()
    last = store.take(time.monotonic())
    seen += [] if last is None else [last.version]
    assert seen == sorted(set(seen))
    assert seen[-1] == 500


number = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**12), 10**12),
    st.sampled_from([0, 1, 0.5, 16, 64, 128, 10**400]),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), number, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(["T0", "T3", "batch", "free", "T2-reused", "x"]), inner),
    ),
    max_leaves=6,
)
knob_values = st.dictionaries(
    st.sampled_from([*KNOBS, "weight", ""]),
    st.one_of(
        anything,
        st.lists(st.floats(0, 1e4), min_size=4, max_size=4),
        st.dictionaries(st.sampled_from(PLAN.tier_names), st.floats(0, 2e4), max_size=4),
        st.fixed_dictionaries({name: st.floats(0, 1) for name in PLAN.pool_names}),
    ),
    max_size=4,
)
move = st.one_of(
    st.tuples(
        st.just("propose"),
        st.one_of(knob_values, anything),
        st.sampled_from(["a", "b", ""]),
        st.one_of(st.none(), st.floats(0.1, 30), number),
    ),
    st.tuples(st.just("wait"), st.floats(0, 15)),
    st.tuples(st.just("take")),
    st.tuples(st.just("release"), st.sampled_from(["a", "b"])),
)


def lawful(allocation: Allocation, plan: Plan) -> None:
    """It passes the limits untouched, seen from itself."""
    if unversioned(allocation) == STATIC:
        return
    bounds = plan.controller.bounds
    assert all(bounds.weights.floor <= w <= bounds.weights.ceiling for w in allocation.weights)
    assert math.isclose(sum(allocation.kv_fractions), 1.0, abs_tol=1e-6)
    assert math.isclose(sum(allocation.prefill_shares), 1.0, abs_tol=1e-6)
    assert allocation.draft_tokens == STATIC.draft_tokens
    assert allocation.max_num_seqs == UNLIMITED or allocation.max_num_seqs <= CAPACITY
    projected = project(allocation, allocation, plan, capacity_max_num_seqs=CAPACITY)
    assert projected.limited == ()


@settings(max_examples=150, deadline=None)
@given(st.lists(move, max_size=25))
def test_any_sequence_leaves_a_lawful_allocation_and_silence_the_static_plan(
    moves: list[Any],
) -> None:
    clock = Clock()
    store = AllocationStore(PLAN, capacity_max_num_seqs=CAPACITY, clock=clock)
    taken, version = store.allocation, 0
    for name, *args in moves:
        before = store.allocation
        try:
            if name == "propose":
                store.propose(args[0], holder=args[1], ttl_s=args[2])
            elif name == "release":
                store.release(args[0])
        except ProposalError:
            # Only the end of a lease may have changed anything.
            assert store.allocation is before or unversioned(store.allocation) == STATIC
        if name == "wait":
            clock.now_s += args[0]
        if name == "take":
            taken = store.take(clock.now_s) or taken
            assert taken is store.allocation
        lawful(store.allocation, PLAN)
        assert version <= store.allocation.version <= version + 2
        version = store.allocation.version
    clock.now_s += 86_401.0
    taken = store.take(clock.now_s) or taken
    assert unversioned(taken) == STATIC
    assert not store.describe().leased

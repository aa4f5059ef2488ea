"""Where requests go, as properties over many fleets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.gateway.routing import Affinity, EngineFacts, Pool, Routes, choose

TIERS = ("T0", "T1", "T2", "T3")
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)
KEYS = st.binary(min_size=16, max_size=16)


def engine(name: str, **facts: object) -> EngineFacts:
    values: dict[str, object] = {"models": frozenset({"m"}), **facts}
    return EngineFacts(name=name, **values)  # type: ignore[arg-type]


@st.composite
def fleets(draw: st.DrawFn) -> list[EngineFacts]:
    names = draw(NAMES)
    some = st.sampled_from((None, None, frozenset({"T0"}), frozenset({"T0", "T1"})))
    return [
        engine(
            name,
            models=draw(st.sampled_from((frozenset({"m"}), frozenset({"n"}), frozenset("mn")))),
            tiers=draw(some),
            tenants=draw(
                st.sampled_from((None, None, frozenset({"strict"}), frozenset({"other"})))
            ),
            draft=draw(st.sampled_from((None, "code", "chat"))),
            reserve=draw(st.booleans()),
            capacity=draw(st.sampled_from((0.5, 1.0, 4.0))),
        )
        for name in names
    ]


def routes(fleet: list[EngineFacts]) -> Routes:
    return Routes(fleet, drafts={"T2": "code"}, reserve_tiers={"T0"})


def go(
    pool: Pool,
    key: bytes = b"k" * 16,
    *,
    out: frozenset[str] = frozenset(),
    loads: dict[str, int] | None = None,
    affinity: Affinity | None = None,
    tried: tuple[str, ...] = (),
) -> str | None:
    loads = loads or {}
    return choose(
        pool,
        key,
        usable=lambda name: name not in out,
        in_flight=lambda name: loads.get(name, 0),
        affinity=affinity or Affinity(),
        tried=tried,
    )


@given(fleets(), st.sampled_from(TIERS), st.sampled_from(("m", "n")), KEYS, st.data())
def test_an_engine_is_found_exactly_where_one_may_serve(
    fleet: list[EngineFacts], tier: str, model: str, key: bytes, data: st.DataObject
) -> None:
    tenant = data.draw(st.sampled_from(("strict", "other", "anyone")))
    out = frozenset(data.draw(st.sets(st.sampled_from([one.name for one in fleet]))))
    chosen = go(routes(fleet).pool(model, tenant, tier), key, out=out)
    named = {one for each in fleet for one in each.tenants or ()}
    may = {
        one.name
        for one in fleet
        if model in one.models
        and (one.tiers is None or tier in one.tiers)
        and (tenant in one.tenants if one.tenants is not None else tenant not in named)
        and (not one.reserve or tier == "T0")
    }
    assert (chosen is not None) == bool(may - out)
    assert chosen is None or chosen in may - out


@given(fleets(), st.sampled_from(TIERS), KEYS)
def test_strict_tenants_never_share(fleet: list[EngineFacts], tier: str, key: bytes) -> None:
    by_name = {one.name: one for one in fleet}
    all_routes = routes(fleet)
    strict = any("strict" in (one.tenants or ()) for one in fleet)
    for model in all_routes.models:
        for name in all_routes.pool(model, "strict", tier).names:
            assert not strict or "strict" in (by_name[name].tenants or ())
        for name in all_routes.pool(model, "anyone", tier).names:
            assert by_name[name].tenants is None


@given(NAMES, KEYS, st.data())
def test_equal_keys_keep_to_one_engine_while_it_is_there_and_in_bounds(
    names: list[str], key: bytes, data: st.DataObject
) -> None:
    pool = routes([engine(name) for name in names]).pool("m", "t", "T0")
    home = go(pool, key)
    loads = {name: data.draw(st.integers(0, 100)) for name in names}
    affinity = Affinity(most_over_mean=1.25, slack_requests=4)
    bound = 1.25 * sum(loads.values()) / len(names) + 4
    chosen = go(pool, key, loads=loads, affinity=affinity)
    assert chosen is not None
    assert loads[chosen] <= bound
    if home is not None and loads[home] <= bound:
        assert chosen == home


@given(NAMES, st.lists(KEYS, min_size=1, max_size=50))
def test_without_one_engine_only_its_own_keys_move(names: list[str], keys: list[bytes]) -> None:
    pool = routes([engine(name) for name in names]).pool("m", "t", "T0")
    for gone in names:
        for key in keys:
            home = go(pool, key)
            if home != gone:
                assert go(pool, key, out=frozenset({gone})) == home


def test_keys_spread_by_capacity() -> None:
    fleet = [engine("a", capacity=1.0), engine("b", capacity=1.0), engine("c", capacity=2.0)]
    pool = routes(fleet).pool("m", "t", "T0")
    counts = Counter(go(pool, number.to_bytes(16, "big")) for number in range(4000))
    assert abs(counts["a"] - 1000) < 150
    assert abs(counts["c"] - 2000) < 200


def test_the_top_tier_takes_the_reserve_only_when_all_others_are_out() -> None:
    fleet = [engine("a"), engine("b"), engine("spare", reserve=True)]
    pool = routes(fleet).pool("m", "t", "T0")
    heavy = {"a": 1000, "b": 1000}
    for number in range(50):
        key = number.to_bytes(16, "big")
        assert go(pool, key, loads=heavy) in ("a", "b")
        assert go(pool, key, out=frozenset({"a"})) == "b"
        assert go(pool, key, out=frozenset({"a", "b"})) == "spare"
        assert go(pool, key, tried=("a", "b")) == "spare"
    assert go(routes(fleet).pool("m", "t", "T1"), out=frozenset({"a", "b"})) is None


def test_a_tier_with_a_draft_goes_to_its_engine_while_that_is_there() -> None:
    fleet = [engine("a"), engine("coder", draft="code"), engine("b")]
    pool = routes(fleet).pool("m", "t", "T2")
    for number in range(50):
        key = number.to_bytes(16, "big")
        assert go(pool, key) == "coder"
        assert go(pool, key, out=frozenset({"coder"})) in ("a", "b")
    assert {go(routes(fleet).pool("m", "t", "T0"), bytes([n]) * 16) for n in range(50)} == set(
        ("a", "b", "coder")
    )


@settings(max_examples=50)
@given(NAMES, st.lists(KEYS, min_size=1, max_size=3), st.integers(0, 2**32))
def test_nobody_is_overrun_when_one_key_is_asked_for_by_all(
    names: list[str], keys: list[bytes], seed: int
) -> None:
    pool = routes([engine(name) for name in names]).pool("m", "t", "T0")
    affinity = Affinity(most_over_mean=1.25, slack_requests=4)
    loads = dict.fromkeys(names, 0)
    for number in range(400):
        chosen = go(pool, keys[(seed + number) % len(keys)], loads=loads, affinity=affinity)
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= 1.25 * 400 / len(names) + 4 + 1

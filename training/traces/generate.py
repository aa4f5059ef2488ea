"""Synthetic traffic of four tiers that is not stationary, for tests, training and the demo.

The lengths and pauses resemble the public traces (docs/traces.md says which); the rates and events
are made up. It imitates no recorded trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import FlagError, TraceError, did_you_mean
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.arrivals import day_curve, markov_bursts, pulse, regimes, renewals
from trimtab.training.traces.lengths import Lognormal
from trimtab.training.traces.media_mix import AGENT_MEDIA, CHAT_MEDIA
from trimtab.training.traces.merge import merge, units_of
from trimtab.training.traces.traffic import (
    Brought,
    SessionKind,
    SingleKind,
    sessions,
    single_requests,
)

FloatArray = npt.NDArray[np.float64]

DEFAULT_ENGINE: Final = "h100:llama-3.1-8b-tp1"
DEMO_LOAD: Final = 0.87
MOST_HOURS: Final = 72.0
_LEAD_S: Final[Mapping[str, float]] = {"T0": 600.0, "T1": 3000.0}
"""Sessions begin this long before the trace, so that its first second finds them under way."""
_AIM = 0.005
_ROUNDS = 16
_MOST_MISS = 0.1
_LEAST_SCALE, _MOST_SCALE = 1e-4, 1e4
_MOST_ROWS = 20e6

CHATS: Final = SessionKind(
    tenants=12,
    system=Lognormal(median=600, sigma=0.5, low=100, high=2500),
    first=Lognormal(median=180, sigma=1.1, low=8, high=12_000),
    later=Lognormal(median=70, sigma=1.1, low=4, high=6000),
    output=Lognormal(median=170, sigma=0.8, low=4, high=1600),
    turns_mean=4.0,
    most_turns=30,
    human_pause=Lognormal(median=28, sigma=0.9, low=2, high=600),
    tool_pause=Lognormal(median=28, sigma=0.9, low=2, high=600),
    tool_fraction=0.0,
    max_context_tokens=32_768,
)
AGENTS: Final = SessionKind(
    tenants=6,
    system=Lognormal(median=14_000, sigma=0.15, low=8000, high=20_000),
    first=Lognormal(median=1500, sigma=1.0, low=50, high=20_000),
    later=Lognormal(median=330, sigma=1.9, low=10, high=24_000),
    output=Lognormal(median=210, sigma=1.1, low=10, high=6000),
    turns_mean=28.0,
    most_turns=120,
    human_pause=Lognormal(median=63, sigma=1.0, low=5, high=600),
    tool_pause=Lognormal(median=8, sigma=0.9, low=0.5, high=300),
    tool_fraction=0.92,
    max_context_tokens=65_536,
)
BATCH: Final = SingleKind(
    tenants=4,
    prompt=Lognormal(median=2000, sigma=0.7, low=64, high=16_000),
    output=Lognormal(median=160, sigma=0.7, low=1, high=1500),
)
FREE: Final = SingleKind(
    tenants=40,
    prompt=Lognormal(median=160, sigma=1.6, low=4, high=32_000),
    output=Lognormal(median=70, sigma=1.1, low=1, high=2000),
)
POISON: Final = SingleKind(
    tenants=2,
    prompt=Lognormal(median=140_000, sigma=0.3, low=90_000, high=200_000),
    output=Lognormal(median=300, sigma=0.5, low=50, high=1000),
)

RATES_PER_S: Final[Mapping[str, float]] = {"T0": 1.4, "T1": 0.0115, "T2": 1.45, "T3": 2.8}
"""Starts of chats and agents, requests of batch and free, at scale 1: of the order of 0.85 of
`DEFAULT_ENGINE`."""
WAVE_REQUESTS: Final = 900.0
"""Requests of one wave of batch at scale 1."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What happens in a trace."""

    description: str
    day_amplitude: float = 0.0
    burst_factor: float = 1.0
    """Rate in a burst over the rate in a calm; 1 = no bursts."""
    cv: float = 1.0
    """Of the inter-arrivals of single requests."""
    waves_per_hour: float = 0.0
    crowds_per_hour: float = 0.0
    poisons_per_hour: float = 0.0
    shift_s: float = 0.0
    """Mean length of a regime of the mix, seconds; 0 = the mix does not shift."""
    fixed: bool = False
    """Events of the demo at set times instead of drawn ones."""


PRESETS: Final[Mapping[str, Preset]] = {
    "steady": Preset(description="Poisson arrivals, nothing happens"),
    "diurnal": Preset(description="a day curve of 24 hours", day_amplitude=0.6, cv=1.2),
    "bursty": Preset(description="Gamma and MMPP bursts", burst_factor=5.0, cv=2.5),
    "waves": Preset(description="waves of batch", waves_per_hour=4.0, cv=1.2),
    "mixshift": Preset(description="regimes of chats, agents and batch", shift_s=600.0, cv=1.2),
    "poison": Preset(description="prompts of up to 200,000 tokens", poisons_per_hour=8.0),
    "crowd": Preset(description="crowds of free users", crowds_per_hour=3.0, cv=1.5),
    "incidents": Preset(
        description="all of it at drawn times",
        day_amplitude=0.3,
        burst_factor=3.0,
        cv=1.5,
        waves_per_hour=2.0,
        crowds_per_hour=1.0,
        poisons_per_hour=2.0,
        shift_s=1200.0,
    ),
    "demo": Preset(
        description="a wave of batch, a poison prompt and a crowd at set times",
        burst_factor=2.0,
        cv=1.3,
        fixed=True,
    ),
}
"""Preset by name."""


@dataclass(frozen=True)
class _Events:
    """Start of every event, seconds."""

    waves_s: FloatArray
    crowds_s: FloatArray
    poisons_s: FloatArray


_WAVE_S, _CROWD_S, _CROWD_FACTOR = 45.0, 300.0, 7.0
_DEMO_WAVES, _DEMO_POISONS, _DEMO_CROWDS = (0.22, 0.80), (0.42, 0.85), (0.58,)
_MIXES = ((1.0, 1.0, 1.0), (1.6, 0.3, 0.5), (0.4, 2.2, 0.6), (0.6, 0.6, 2.6))


def demo_trace(seed: int) -> Trace:
    """The built-in hour of `trimtab demo`: about 87 % of the 8B engine, with three incidents.

    Args:
        seed: Equal seeds give equal traces.
    """
    spec = get_engine_spec(DEFAULT_ENGINE)
    return generate(hours=1.0, seed=seed, preset="demo", load=DEMO_LOAD, spec=spec)


def generate(
    *,
    hours: float,
    seed: int,
    preset: str = "demo",
    load: float | None = None,
    spec: EngineSpec | None = None,
    media_share: float = 0.0,
) -> Trace:
    """Make a trace of T0 chats, T1 agents, T2 batch and T3 free requests.

    Args:
        hours: Length.
        seed: Equal arguments give equal traces.
        preset: One of `PRESETS`.
        load: Mean offered load as a share of the engine's capacity; None = rates as they are.
        spec: The engine, where there is a load.
        media_share: Part of the chats' and agents' turns that brings images or audio.

    Raises:
        FlagError: a value is out of bounds, or the preset is not known.
        TraceError: no rate gives the load.
    """
    if not 0.01 <= hours <= MOST_HOURS:
        raise FlagError("--hours", value=hours, bound=f"from 0.01 to {MOST_HOURS:g}")
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS)
        raise FlagError("--preset", value=preset, bound=f"one of {', '.join(PRESETS)}", remedy=hint)
    if not 0 <= media_share <= 1:
        raise FlagError("--media-share", value=media_share, bound="from 0 to 1")
    make = _Maker(hours * 3600.0, PRESETS[preset], seed, media_share)
    what = f"preset {preset} ({PRESETS[preset].description}), {hours:g} h, seed {seed}"
    notes = [f"Synthetic: {what}."]
    if media_share:
        notes.append(
            f"{100 * media_share:.3g} % of the chats' and agents' turns bring images or audio."
        )
    if load is None or spec is None:
        return replace(make.source(1.0).take(1.0), notes=tuple(notes))
    trace, reached = _at_load(make, load, spec)
    notes.append(f"Offered load {reached:.3f} of {spec.name}.")
    return replace(trace, notes=tuple(notes))


@dataclass(frozen=True)
class _Maker:
    """What a trace is made of, at any scale of its rates."""

    span_s: float
    preset: Preset
    seed: int
    media_share: float

    def source(self, scale: float) -> _Source:
        return _Source(self, scale)


class _Source:
    """Synthetic traffic, drawn at one scale of its rates and thinned below it.

    Thinning keeps what it leaves, so that a little more is the same traffic and a little more;
    drawn anew it would be another one. Poison prompts are never thinned.
    """

    def __init__(self, make: _Maker, scale: float) -> None:
        seed = make.seed
        self._crowd, self._poison = _draw(make, scale, np.random.default_rng([seed, 0x7717]))
        self._unit = units_of(self._crowd)
        units = int(self._unit.max(initial=-1)) + 1
        self._mark = np.random.default_rng([seed, 0x7A11]).random(units)

    def take(self, fraction: float) -> Trace:
        """About `fraction` of the sessions and single requests, and every poison prompt."""
        rows = np.flatnonzero((self._mark < fraction)[self._unit])
        pieces = [self._crowd.take(rows), self._poison]
        return merge([piece for piece in pieces if len(piece)] or pieces[:1], "generated trace")


def _at_load(make: _Maker, load: float, spec: EngineSpec) -> tuple[Trace, float]:
    """Draw somewhat more than `load` asks for, then thin to it by bracketed steps."""
    if not 0 < load <= 10:
        raise FlagError("--load", value=load, bound="above 0, at most 10")
    source = _ample(make, load, spec)
    fraction, low, high = 0.7, 0.0, 1.0
    best: tuple[float, Trace, float] = (np.inf, source.take(0.0), 0.0)
    for _ in range(_ROUNDS):
        trace = source.take(fraction)
        reached = _offered(trace, spec)
        if abs(reached / load - 1.0) < best[0]:
            best = (abs(reached / load - 1.0), trace, reached)
        if best[0] < _AIM:
            break
        low, high = (fraction, high) if reached < load else (low, fraction)
        step = fraction * (load / max(reached, 1e-6)) ** 0.7
        fraction = step if low < step < high else (low + high) / 2
    if best[0] > _MOST_MISS:
        raise TraceError(
            "generated trace",
            key="load",
            value=round(best[2], 4),
            bound=f"within {_MOST_MISS:.0%} of {load:g}",
            remedy="choose a longer trace, another preset, --load or --seed",
        )
    return best[1], best[2]


def _ample(make: _Maker, load: float, spec: EngineSpec) -> _Source:
    """Traffic that offers more than `load`, but not so much that thinning would calm its bursts."""
    scale = 1.0
    for _ in range(_ROUNDS):
        source = make.source(scale)
        ratio = _offered(source.take(1.0), spec) / load
        if 1.0 <= ratio <= 2.5:
            break
        scale *= min(max(1.3 / max(ratio, 1e-6), 0.2), 5.0)
        if not _LEAST_SCALE < scale < _MOST_SCALE:
            break
    return source


def _offered(trace: Trace, spec: EngineSpec) -> float:
    return offered_load(trace, spec) if trace.duration_s > 0 else 0.0


def _draw(make: _Maker, scale: float, rng: np.random.Generator) -> tuple[Trace, Trace]:
    """Everything but the poison prompts, and those."""
    span_s, preset, share = make.span_s, make.preset, make.media_share
    if span_s * scale * sum(RATES_PER_S.values()) * 3 > _MOST_ROWS:
        raise TraceError(
            "generated trace",
            value=f"{span_s * scale * 3 * sum(RATES_PER_S.values()):.2g} requests",
            bound=f"at most {_MOST_ROWS:g}",
            remedy="take fewer --hours or a lower --load",
        )
    # One generator a purpose: a change of one tier's rate leaves the others' draws alone.
    of_events, of_rates, *of_tiers = rng.spawn(7)
    of_media = rng.spawn(2)
    events = _events(span_s, preset, of_events)
    rates = _rates(span_s, preset, scale, of_rates)
    pieces = []
    talks = (("T0", CHATS, CHAT_MEDIA), ("T1", AGENTS, AGENT_MEDIA))
    for (tier, kind, mix), source, of_shown in zip(talks, of_tiers[:2], of_media, strict=True):
        lead_s = _LEAD_S[tier]
        starts = renewals(_with_lead(rates[tier], lead_s), source) - lead_s
        shown = Brought(mix=mix, share=share, rng=of_shown) if share else None
        pieces.append(sessions(tier, starts, kind, source, span_s=span_s, media=shown))
    batch = rates["T2"] + _wave_rate(span_s, events.waves_s, WAVE_REQUESTS * scale)
    free = rates["T3"]
    for start in events.crowds_s:
        free = free * pulse(span_s, float(start), _CROWD_S, _CROWD_FACTOR)
    singles = (("T2", batch, BATCH, of_tiers[2]), ("T3", free, FREE, of_tiers[3]))
    for name, rate, single, source in singles:
        arrival = renewals(rate, source, cv=preset.cv)
        pieces.append(single_requests(name, arrival[arrival < span_s], single, source))
    poison = single_requests("T2", events.poisons_s, POISON, of_tiers[4])
    return merge(pieces, "generated trace"), poison


def _events(span_s: float, preset: Preset, rng: np.random.Generator) -> _Events:
    if preset.fixed:
        times = (_DEMO_WAVES, _DEMO_CROWDS, _DEMO_POISONS)
        return _Events(*(np.array(fractions) * span_s for fractions in times))
    counts = (preset.waves_per_hour, preset.crowds_per_hour, preset.poisons_per_hour)
    drawn = []
    for per_hour in counts:
        expected = per_hour * span_s / 3600.0
        # At least one of what a preset is named for, however short the trace.
        number = max(int(rng.poisson(expected)), 1) if per_hour else 0
        drawn.append(np.sort(rng.uniform(0.0, 0.95 * span_s, number)))
    return _Events(*drawn)


def _rates(
    span_s: float, preset: Preset, scale: float, rng: np.random.Generator
) -> dict[str, FloatArray]:
    """Rate of each tier in each second, before events."""
    day = day_curve(span_s, preset.day_amplitude, max(span_s, 1.0) if preset.fixed else 86_400.0)
    if preset.shift_s:
        chosen = regimes(span_s, rng, levels=range(len(_MIXES)), mean_s=preset.shift_s)
        mix = np.array(_MIXES)[chosen.astype(np.int64)]
    else:
        mix = np.ones((len(day), len(_MIXES[0])))
    rates = {}
    for number, (tier, rate) in enumerate(RATES_PER_S.items()):
        bursts = np.ones(len(day))
        if preset.burst_factor > 1:
            bursts = markov_bursts(
                span_s, rng, factor=preset.burst_factor, calm_s=90.0, burst_s=25.0
            )
        shift = mix[:, number] if number < mix.shape[1] else 1.0
        rates[tier] = rate * scale * day * bursts * shift
    return rates


def _with_lead(rate_per_s: FloatArray, lead_s: float) -> FloatArray:
    return np.r_[np.full(int(lead_s), rate_per_s[0]), rate_per_s]


def _wave_rate(span_s: float, starts_s: FloatArray, requests: float) -> FloatArray:
    rate = np.zeros(len(np.arange(0.0, span_s, 1.0)))
    for start in starts_s:
        rate[int(start) : int(start + _WAVE_S)] += requests / _WAVE_S
    return rate

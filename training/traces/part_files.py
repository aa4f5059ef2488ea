"""Read the parts of a composed trace from files, as the command line names them: `T0=FILE`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.compose import check_duration
from trimtab.training.traces.formats import check_format, detect_format, read_trace
from trimtab.training.traces.options import TIER_NAME, Label, ReadOptions
from trimtab.training.traces.part import Part
from trimtab.training.traces.servegen import draw_clients, load_clients
from trimtab.training.traces.supply import Redraw

Value = TypeVar("Value")

MOST_TENANTS: Final = 100_000
LONGEST_WINDOW_S: Final = 14 * 86_400.0
_MOST_TIERS = 8
_LOWEST_RATE_PER_S = 1e-4


@dataclass(frozen=True, kw_only=True)
class PartChoices:
    """What a user may choose for each tier."""

    formats: Mapping[str, str] = field(default_factory=dict)
    offsets_s: Mapping[str, float] = field(default_factory=dict)
    tenants: Mapping[str, int] = field(default_factory=dict)


def assignments(
    flag: str, words: Sequence[str], convert: Callable[[str, str], Value]
) -> dict[str, Value]:
    """Parse words of the form `TIER=VALUE`, at most one a tier.

    Args:
        flag: Name of the flag, for errors.
        words: What the user wrote.
        convert: (flag, text) to the value.

    Raises:
        FlagError: a word has another form, or a tier is named twice.
    """
    values: dict[str, Value] = {}
    for tier, text in split_assignments(flag, words):
        if tier in values:
            raise FlagError(flag, value=tier, remedy="the tier is named twice; name it once")
        values[tier] = convert(flag, text)
    return values


def split_assignments(flag: str, words: Sequence[str]) -> list[tuple[str, str]]:
    """Split words of the form `TIER=VALUE`.

    Raises:
        FlagError: a word has no `=`, no value, or a name that no tier can have.
    """
    pairs = []
    for word in words:
        tier, equals, text = word.partition("=")
        if not equals or not text or not TIER_NAME.fullmatch(tier):
            raise FlagError(
                flag,
                value=word,
                bound="of the form TIER=VALUE",
                remedy=f"for instance {flag} T0=...",
            )
        pairs.append((tier, text))
    return pairs


def number(flag: str, text: str) -> float:
    """A finite number.

    Raises:
        FlagError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FlagError(flag, value=text, bound="a number")
    return value


def tenant_count(flag: str, text: str) -> int:
    """A number of tenants.

    Raises:
        FlagError: it is not a whole number from 1 to `MOST_TENANTS`.
    """
    value = number(flag, text)
    if value != int(value) or not 1 <= value <= MOST_TENANTS:
        raise FlagError(flag, value=text, bound=f"a whole number from 1 to {MOST_TENANTS:,}")
    return int(value)


def read_parts(
    words: Sequence[str],
    choices: PartChoices,
    *,
    rng: np.random.Generator,
    options: ReadOptions,
    duration_s: float | None = None,
) -> list[Part]:
    """Read every `TIER=FILE`.

    Args:
        words: At least one word; a tier may be named several times.
        choices: Format, offset and tenants by tier.
        rng: Draws what the formats leave open.
        options: Choices that some formats need.
        duration_s: Span to be composed, for formats that are drawn; None = not yet known.

    Raises:
        FlagError: a word, tier or format is not known.
        TraceError: a file is not what its format says.
    """
    if duration_s is not None:
        check_duration(duration_s)
    pairs = split_assignments("--tier", words)
    tiers = list(dict.fromkeys(tier for tier, _ in pairs))
    if not pairs:
        raise FlagError("--tier", remedy="name at least one, for instance --tier T0=azure.csv")
    if len(tiers) > _MOST_TIERS:
        raise FlagError("--tier", value=f"{len(tiers)} tiers", bound=f"at most {_MOST_TIERS}")
    for flag, named in (
        ("--format", choices.formats),
        ("--offset", choices.offsets_s),
        ("--tenants", choices.tenants),
    ):
        for tier in named:
            if tier not in tiers:
                raise FlagError(flag, value=tier, bound=f"a tier with a file: {', '.join(tiers)}")
    return [_part(tier, Path(text), choices, rng, options, duration_s) for tier, text in pairs]


def _part(
    tier: str,
    path: Path,
    choices: PartChoices,
    rng: np.random.Generator,
    options: ReadOptions,
    duration_s: float | None,
) -> Part:
    chosen = choices.formats.get(tier)
    format = check_format(chosen) if chosen is not None else detect_format(path)
    if duration_s is not None:
        options = replace(options, window_s=max(duration_s, 1.0))
    redraw: Redraw | None = None
    if format == "servegen":
        trace, redraw = _clients(path, tier, rng, options)
    else:
        trace = read_trace(path, format=format, rng=rng, tier=tier, options=options)
    return Part(
        name=path.name,
        tier=tier,
        trace=trace,
        offset_s=choices.offsets_s.get(tier, 0.0),
        tenants=choices.tenants.get(tier),
        drawn_starts=format == "kv-cache-tester",
        redraw=redraw,
    )


def _clients(
    path: Path, tier: str, rng: np.random.Generator, options: ReadOptions
) -> tuple[Trace, Redraw]:
    """Read clients once; they are drawn again for every rate, with the same seed."""
    clients = load_clients(path)
    seed = int(rng.integers(2**62))
    label = Label(tier=tier)
    trace = draw_clients(path.name, clients, np.random.default_rng(seed), label, options)
    rate = len(trace) / options.window_s

    def redraw(factor: float, window_s: float) -> Trace:
        wanted = max(rate * factor, _LOWEST_RATE_PER_S)
        chosen = replace(options, rate_per_s=wanted, window_s=min(window_s, LONGEST_WINDOW_S))
        return draw_clients(path.name, clients, np.random.default_rng(seed), label, chosen)

    return trace, redraw

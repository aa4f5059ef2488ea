"""One source of traffic in a composed trace. It knows no files and no loads."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.supply import DrawnSessions, Redraw, Redrawn, ShiftedCopies, Supply


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of traffic and what it is to become."""

    name: str
    tier: str
    trace: Trace
    offset_s: float = 0.0
    """When it begins in the composed trace, seconds."""
    tenants: int | None = None
    """Spread it over so many tenants; None keeps its own, or makes 8 where it has only one."""
    drawn_starts: bool = False
    """Its sessions carry no absolute time: their starts are drawn anew."""
    redraw: Redraw | None = None
    """Draws it anew at another rate, where it comes from distributions."""

    @property
    def span_s(self) -> float:
        """From its first to its last open-loop arrival; 0 for a batch and for what is drawn."""
        if self.drawn_starts or self.redraw is not None:
            return 0.0
        first = self.trace.arrival_s[self.trace.turn == 0]
        return float(first[-1] - first[0]) if len(first) else 0.0


def supply_of(part: Part, span_s: float, seed: int) -> Supply:
    """The part at any rate, inside a composed span of `span_s` seconds."""
    if part.redraw is not None:
        return Redrawn(part.name, part.redraw, duration_s=span_s, offset_s=part.offset_s, seed=seed)
    kind = DrawnSessions if part.drawn_starts else ShiftedCopies
    return kind(part.name, part.trace, duration_s=span_s, offset_s=part.offset_s, seed=seed)

"""What a caller may choose when a trace file is read. It reads nothing itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from trimtab.engine_bridge.errors import FlagError

TIER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Choices that some formats need; the others pass them over."""

    max_context_tokens: int = 131_072
    """Agent sessions: a session ends before its first request of which prompt and answer together
    are longer, tokens (the context window of the model that will serve it)."""
    max_idle_s: float = 900.0
    """Agent sessions: longer pauses between turns are cut to this, seconds."""
    session_window_s: float = 3600.0
    """Agent sessions: starts are drawn uniformly from [0, this), seconds."""
    window_start_s: float | None = None
    """ServeGen: start of the part of the 14 days that is drawn, seconds; None = one of
    average load."""
    window_s: float = 3600.0
    """ServeGen: length of the part that is drawn, seconds."""
    tokens_per_image: int = 255
    """Azure's traces with images: tokens of each, which the release does not tell. 255 is what
    GPT-4o's published rule (85, and 170 a tile of 512 pixels) gives an image of one tile. Where a
    prompt is too short for that, its images share it evenly, less one token of text."""
    rate_per_s: float | None = None
    """ServeGen: mean rate of all clients together, requests per second; None = as recorded, but at
    most 10 (the recorded rates are those of a fleet)."""

    def __post_init__(self) -> None:
        """Refuse values that no reader can use.

        Raises:
            FlagError: with the option, its value and bound.
        """
        bounds: tuple[tuple[str, float | None, float, float], ...] = (
            ("max_context_tokens", self.max_context_tokens, 1, 10_000_000),
            ("max_idle_s", self.max_idle_s, 0, 1e9),
            ("session_window_s", self.session_window_s, 0, 1e9),
            ("window_start_s", self.window_start_s, 0, 1e9),
            ("window_s", self.window_s, 1, 1e8),
            ("tokens_per_image", self.tokens_per_image, 1, 1_000_000),
            ("rate_per_s", self.rate_per_s, 1e-6, 1e5),
        )
        for name, value, low, high in bounds:
            if value is not None and not low <= value <= high:
                flag = f"--{name.replace('_', '-')}"
                raise FlagError(flag, value=value, bound=f"from {low:g} to {high:g}")


@dataclass(frozen=True, kw_only=True)
class Label:
    """The tier and tenant that rows get when their format names none."""

    tier: str = "T0"
    tenant: str = "default"

    def __post_init__(self) -> None:
        """Refuse names that no file can carry.

        Raises:
            FlagError: with the name and its bound.
        """
        if not TIER_NAME.fullmatch(self.tier):
            raise FlagError("--tier", value=self.tier, bound="1 to 32 letters, digits, _ . or -")
        if not self.tenant.strip() or not self.tenant.isprintable():
            raise FlagError("--tenant", value=self.tenant, bound="a name of printable characters")

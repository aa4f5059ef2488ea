"""What an engine's draft model is to the replay: how far it drafts, at what cost, and how well.

It holds facts and reads them from a file; rule 9 (`rules.draft_lengths`) decides what to do with
them. It knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_DRAFT_TOKENS = 64


class DraftFile(BaseModel):
    """The `draft` section of an engine file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    label: str = Field(default="draft", min_length=1, max_length=200)
    """What it drafts for, for people and for the gateway's routing: chat, code."""
    tokens: int = Field(ge=1, le=MOST_DRAFT_TOKENS)
    """Most draft tokens of a request in one step, as vLLM's `num_speculative_tokens`."""
    us_per_token: float = Field(default=0.0, ge=0, le=1e6)
    """Microseconds that each draft token costs; 0 for a look-up of n-grams."""
    pass_ms: float = Field(default=0.0, ge=0, le=1e4)
    """Milliseconds of one forward pass of the draft model: drafts of length k take k of them."""
    acceptance: dict[str, float] = Field(default_factory=dict)
    """By tier name, how often the first draft of a step is accepted, and each later one if the one
    before it was. A tier that is not named has what its requests have in the trace."""
    kept: float = Field(default=1.0, gt=0, le=1)
    """Part of the acceptance that is left at each next place of a draft."""

    @field_validator("acceptance")
    @classmethod
    def _shares(cls, value: dict[str, float]) -> dict[str, float]:
        for name, share in value.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"has {name} = {share!r}, must be from 0 to 1")
        return value


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """The same as a plain value."""

    label: str = "draft"
    tokens: int
    us_per_token: float = 0.0
    pass_ms: float = 0.0
    acceptance: tuple[tuple[str, float], ...] = ()
    """Pairs of a tier's name and its acceptance."""
    kept: float = 1.0

    @classmethod
    def of(cls, file: DraftFile) -> DraftSpec:
        """The facts of a checked section."""
        values = file.model_dump()
        return cls(**{**values, "acceptance": tuple(file.acceptance.items())})

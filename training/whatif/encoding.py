"""An encoder for a what-if: onto an engine whose file has none, and what a run encoded.

It checks what the flags say; when an item is encoded is the replay's business.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif.schema import TierMedia

_MOST_US = 1e6


def with_encoder(
    spec: EngineSpec, *, image_us: float | None, audio_us: float | None, video_us: float | None
) -> EngineSpec:
    """The engine with the encode times of the flags; None leaves what the engine's file says.

    An engine without an encoder gets one, with vLLM's own limits (`EncoderSpec.limits`).

    Raises:
        FlagError: a flag is out of bounds.
    """
    given = (image_us, audio_us, video_us)
    for kind, us in zip(MEDIA_KINDS, given, strict=True):
        if us is not None and not 0 <= us <= _MOST_US:
            raise FlagError(f"--{kind}-us", value=us, bound=f"from 0 to {_MOST_US:,.0f}")
    if all(us is None for us in given):
        return spec
    encoder = spec.encoder or EncoderSpec()
    kinds = tuple(
        (once, us_of_file if us is None else us, pair_ns)
        for (once, us_of_file, pair_ns), us in zip(encoder.kinds, given, strict=True)
    )
    return replace(spec, encoder=replace(encoder, kinds=kinds))


def encoder_notes(trace: Trace, spec: EngineSpec) -> tuple[str, ...]:
    """What must be known of a result where an engine encodes media in no time."""
    if not len(trace.media) or spec.encoder is not None:
        return ()
    return (
        f"The trace shows {len(trace.media):,} images, clips of audio and videos, and engine "
        f"{spec.name} has no encoder section: they cost it nothing beyond their prompt tokens. "
        "Give an engine file with one, or --image-us, --audio-us and --video-us.",
    )


def measure_media(result: ReplayResult, trace: Trace, plan: Plan) -> dict[str, TierMedia] | None:
    """What each tier of the plan showed and what encoding it took; None without media."""
    if not len(trace.media):
        return None
    tier = result.requests["tier"].astype(np.int64)
    tokens = np.zeros(len(plan.tiers), np.int64)
    np.add.at(tokens, tier[trace.media.request], trace.media.tokens)
    encode_ms = np.bincount(tier, weights=result.encode_ms, minlength=len(plan.tiers))
    return {
        name: TierMedia(
            media_tokens=int(tokens[number]),
            encode_ms=float(encode_ms[number]),
        )
        for number, name in enumerate(plan.tiers)
    }

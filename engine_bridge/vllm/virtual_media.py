"""Media of a trace for `virtual_time`: as vLLM's features, with vLLM's own encoder cache.

A development tool: there are no pixels, no sound and no encoder.
"""

from __future__ import annotations

from typing import Final

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.trace import Trace

_UNBOUNDED: Final = 1 << 40


def features_of(trace: Trace, row: int) -> list[MultiModalFeatureSpec]:
    """The media of a request; equal contents have one identifier, as hashed ones would."""
    media = trace.media
    return [
        MultiModalFeatureSpec(
            data=None,
            modality=MEDIA_KINDS[media.kind[at]],
            identifier=f"content-{media.content[at]}",
            mm_position=PlaceholderRange(
                offset=int(media.start_tokens[at]), length=int(media.tokens[at])
            ),
        )
        for at in range(media.offsets[row], media.offsets[row + 1])
    ]


def give_encoder(scheduler: Scheduler, encoder: EncoderSpec | None, trace: Trace) -> None:
    """Let a scheduler of a model without encoders have the engine's: its budget and its cache.

    Args:
        scheduler: Before its first request.
        encoder: The engine's facts; None: nothing limits what a step encodes.
        trace: The traffic; its largest item raises both limits, as a model's would.
    """
    budget = cache = _UNBOUNDED
    if encoder is not None:
        budget, cache = encoder.limits(
            scheduler.scheduler_config.max_num_batched_tokens,
            int(trace.media.tokens.max(initial=0)),
        )
    scheduler.max_num_encoder_input_tokens = budget
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=cache)

"""Images, audio and video of vLLM's requests, as the rules count them.

It reads vLLM's `mm_features` and knows what an item is and costs; it encodes nothing and decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.media import IMAGE, MEDIA_KINDS
from trimtab.engine_bridge.vllm.traffic_log import Item


def kind_of(feature: Any) -> int:
    """The kind of an item, an index into `MEDIA_KINDS`; what a plug-in invents counts as an image.

    Args:
        feature: vLLM's `MultiModalFeatureSpec`.
    """
    modality = feature.modality
    return MEDIA_KINDS.index(modality) if modality in MEDIA_KINDS else IMAGE


def features_ms(encoder: EncoderSpec | None, features: Iterable[Any]) -> float:
    """Milliseconds of encoding these items; 0 where the engine's file has no encoder."""
    if encoder is None:
        return 0.0
    return sum(encoder.item_ms(kind_of(f), f.mm_position.length) for f in features)


def encoded_features(scheduled: Mapping[str, list[int]], requests: Mapping[str, Any]) -> list[Any]:
    """The items that a step encodes.

    Args:
        scheduled: `SchedulerOutput.scheduled_encoder_inputs`: numbers of items by request id.
        requests: Whatever holds the `mm_features` of these requests, by request id.
    """
    return [requests[name].mm_features[at] for name, numbers in scheduled.items() for at in numbers]


def encoded_counts(features: Iterable[Any]) -> tuple[int, ...]:
    """Items and their tokens by kind, as `step_log.ENCODED` names them."""
    counts = [0] * (2 * len(MEDIA_KINDS))
    for feature in features:
        at = 2 * kind_of(feature)
        counts[at] += 1
        counts[at + 1] += feature.mm_position.length
    return tuple(counts)


def logged_items(features: Iterable[Any]) -> list[Item]:
    """The items of a request for the traffic log."""
    return [
        Item(MEDIA_KINDS[kind_of(f)], f.mm_position.offset, f.mm_position.length, f.identifier)
        for f in features
    ]

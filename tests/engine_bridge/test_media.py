"""Media items: columns beside the requests, checked against their prompts."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine_bridge.encoder_spec import EncoderFile, EncoderKindFile, EncoderSpec
from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.media import AUDIO, IMAGE, MediaItems
from trimtab.engine_bridge.trace import Trace

KINDS = [IMAGE, AUDIO, IMAGE]


def items(starts: list[int], tokens: list[int]) -> MediaItems:
    """Two items of request 0, none of request 1, one of request 2."""
    return MediaItems(
        offsets=np.array([0, 2, 2, 3]),
        kind=np.array(KINDS, np.int32),
        start_tokens=np.array(starts, np.int32),
        tokens=np.array(tokens, np.int32),
        content=np.array([0, 1, 0], np.int32),
    )


def trace(media: MediaItems) -> Trace:
    return Trace.build(
        arrival_s=[0.0, 1.0, 2.0], prompt_tokens=[100, 50, 80], output_tokens=1, media=media
    )


def test_items_follow_their_requests() -> None:
    whole = trace(items([0, 60, 5], [60, 40, 75]))
    assert whole.image_tokens.tolist() == [60, 0, 75]
    assert whole.media.tokens_of(AUDIO).tolist() == [40, 0, 0]
    turned = whole.take(np.array([2, 0]))
    assert turned.media.offsets.tolist() == [0, 1, 3]
    assert turned.media.start_tokens.tolist() == [5, 0, 60]
    assert turned.media.content.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("starts", "tokens", "says"),
    [
        ([0, 60, 5], [60, 41, 75], "end inside the prompt"),
        ([0, 59, 5], [60, 40, 75], "none over another"),
        ([0, 60, 5], [0, 40, 75], "at least 1 token"),
        ([-1, 60, 5], [9, 40, 75], "a start inside the prompt"),
    ],
)
def test_items_that_do_not_fit_are_refused(starts: list[int], tokens: list[int], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        trace(items(starts, tokens))


def test_a_trace_without_media_keeps_its_digest() -> None:
    plain = trace(MediaItems.none(3))
    assert plain.digest() == "22e957f150b9acf62f1afd6f2c55512a09b65b93c0e0db4abfbfc2074aa66377"
    assert trace(items([0, 60, 5], [60, 40, 75])).digest() != plain.digest()


def test_image_tokens_alone_are_one_image_at_the_head() -> None:
    media = MediaItems.one_image_each(np.array([0, 30, 20], np.int32))
    assert media.request.tolist() == [1, 2]
    assert media.start_tokens.tolist() == [0, 0]
    assert media.content.tolist() == [0, 1]


def test_cost_and_limits_of_an_encoder() -> None:
    spec = EncoderSpec.of(
        EncoderFile(
            cache_tokens=500, image=EncoderKindFile(item_ms=1.0, us_per_token=10.0, pair_ns=100.0)
        )
    )
    assert spec.item_ms(IMAGE, 1000) == pytest.approx(1.0 + 10.0 + 100.0)
    assert spec.item_ms(AUDIO, 1000) == 0.0
    costs = spec.items_ms(items([0, 60, 5], [60, 40, 75]))
    assert costs.tolist() == [
        spec.item_ms(kind, n) for kind, n in zip(KINDS, [60, 40, 75], strict=True)
    ]
    assert spec.limits(2048, 800) == (2048, 800)


def test_the_times_of_items_add_up_exactly_in_any_order() -> None:
    rng = np.random.default_rng(3)
    encoder = EncoderSpec(kinds=((1.7, 13.3, 0.7), (0.1, 7.7, 0.0), (0.0, 0.3, 1.9)))
    items = [(int(rng.integers(0, 3)), int(rng.integers(1, 5000))) for _ in range(200)]
    times = [encoder.item_ms(*item) for item in items]
    assert sum(times) == sum(reversed(times)) == sum(sorted(times))
    # A nanosecond is nothing to an encoder.
    assert encoder.item_ms(0, 1000) == pytest.approx(1.7 + 13.3 + 0.7, abs=1e-6)


def test_an_encoder_goes_through_its_file() -> None:
    encoder = EncoderSpec(
        budget_tokens=700, cache_tokens=900, kinds=((1.0, 2.0, 0.5), (0.0, 3.0, 0.0), (0.0,) * 3)
    )
    assert EncoderSpec.of(encoder.as_file()) == encoder

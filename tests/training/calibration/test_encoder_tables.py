"""Encode times composed of kernels: the lines through them, and what the shipped file holds."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.media import AUDIO, IMAGE, VIDEO
from trimtab.training.calibration.encoder_tables import SHAPES, fitted_costs, main

MULTIMODAL = "h100:qwen2.5-vl-7b-tp1"


def test_the_fit_finds_the_costs_that_times_were_made_of() -> None:
    tokens = np.geomspace(64, 16_384, 40)
    found = fitted_costs(tokens, 2.5 + 0.009 * tokens + 1.2e-6 * tokens**2)
    assert found == pytest.approx((2.5, 9.0, 1.2))


def test_no_cost_is_below_nothing() -> None:
    tokens = np.geomspace(64, 16_384, 40)
    # Times that grow slower than the tokens: a plain fit would give the pairs a negative cost.
    item_ms, us_per_token, pair_ns = fitted_costs(tokens, 0.5 * np.sqrt(tokens))
    assert item_ms > 0
    assert us_per_token > 0
    assert pair_ns == 0


def test_the_shipped_encoder_against_its_kernels() -> None:
    """The tables' own times, as `encoder_tables` prints them under `examples_ms`."""
    encoder = get_engine_spec(MULTIMODAL).encoder
    assert encoder is not None
    for tokens, kernels_ms in ((576, 7.83), (1024, 13.37), (2691, 37.08), (16_384, 362.51)):
        assert encoder.item_ms(IMAGE, tokens) == pytest.approx(kernels_ms, rel=0.12)
    # Twice as long a video costs twice the time: frames attend over themselves alone.
    once = encoder.item_ms(VIDEO, 0)
    assert encoder.item_ms(VIDEO, 8000) - once == pytest.approx(
        2 * (encoder.item_ms(VIDEO, 4000) - once)
    )
    assert encoder.item_ms(AUDIO, 500) == 0
    # As vLLM: room for the longest image that the model's processor makes.
    assert encoder.limits(8192, 100) == (16_384, 16_384)


@pytest.mark.parametrize(
    ("model", "says"), [("Qwen2.5-VL-7", "Qwen2.5-VL-7B"), (SHAPES[0].name, "aiconfigurator")]
)
def test_what_it_cannot_do_it_says(
    model: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model]) == 2
    assert says in capsys.readouterr().err

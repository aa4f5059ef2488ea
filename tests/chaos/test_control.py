"""The control socket fails in every way: the lease runs out, and the engine is static by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import SLACK_S, Rig, trial
from tests.faulty_links import Behaviour

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour.DOWN, "refuses connections"),
        (Behaviour.HANG, "hangs"),
        (Behaviour.GARBAGE, "answers nonsense"),
        (Behaviour.DRIP, "answers a byte at a time"),
    ],
)
def test_the_socket_fails(rig: Rig, behaviour: Behaviour, words: str) -> None:
    rig.usual_daemon()
    with trial(rig, f"control socket {words}") as tried:
        rig.control_link.behave(behaviour)
        try:
            tried.falls_back(rig.lease_s + rig.interval_s + SLACK_S)
            assert tried.look()["contact"] == "no_control"
            tried.stays_static(2 * rig.interval_s)
            assert not rig.watcher.now.leased
        finally:
            rig.control_link.behave(Behaviour.NORMAL)
        tried.healed()

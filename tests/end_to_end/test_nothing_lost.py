"""A server under a storm: clients that leave, a controller that never rests, and nonsense.

`tests/engine_bridge/vllm/test_scheduler.py` does the same inside one process, with more requests
and a check after every step.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.end_to_end.load import SHED, InBackground, Wish, garbage
from tests.end_to_end.test_metrics import samples, total
from tests.vllm_server import Server, running
from tests.waiting import poll
from trimtab.engine_bridge.vllm.control_client import ControlClient

pytestmark = pytest.mark.slow
REQUESTS, AT_ONCE = 1500, 96
CHANGE_S = 0.05
# Little memory, so that requests must give way.
SMALL = ("--num-gpu-blocks-override", "400", "--max-model-len", "2048", "--max-num-seqs", "48")


def wishes() -> list[Wish]:
    rng = np.random.default_rng(7)
    asked = []
    for number in range(REQUESTS):
        tenant = ("acme", "bolt", "crowd")[rng.integers(3)]
        shared = f"lamu {rng.integers(4)} " * int(rng.integers(0, 60))
        tokens = int(rng.integers(1, 100))
        leaves = int(rng.integers(0, 5)) if rng.random() < 0.15 else None
        own = f"{number} " * int(rng.integers(1, 30))
        asked.append(Wish(tenant, shared + own, tokens if leaves is None else 1000, leaves))
    return asked


class Controller(threading.Thread):
    """Sets another allocation every 50 ms."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._path = server.folder / "control.sock"
        self._ended = threading.Event()
        self.changes = 0

    def run(self) -> None:
        rng = np.random.default_rng(11)
        with ControlClient(self._path, timeout_s=10) as control:
            while not self._ended.wait(CHANGE_S):
                values = {
                    "weights": {f"T{n}": float(rng.uniform(1, 400)) for n in range(4)},
                    "prefill_budget_tokens": int(rng.integers(16, 4000)),
                    "max_num_seqs": int(rng.integers(1, 48)),
                    "kv_fractions": [
                        float(f) for f in rng.dirichlet(np.ones(self._pools(control)))
                    ],
                }
                answer = control.set(values, holder="storm", ttl_s=float(rng.choice((0.02, 5.0))))
                self.changes += bool(answer["changed"])
            control.release("storm")

    def _pools(self, control: ControlClient) -> int:
        return len(control.get()["allocation"]["kv_fractions"])

    def end(self) -> None:
        self._ended.set()
        self.join(30)


def test_every_request_ends_once_and_no_block_is_lost(tmp_path: Path) -> None:
    asked = wishes()
    with running(tmp_path, *SMALL, time_scale="0") as server:
        with ControlClient(server.folder / "control.sock") as control:
            before = control.health()["engine"]
            assert before["free_blocks"] == before["blocks"] > 0
            controller = Controller(server)
            start_s = time.monotonic()
            with garbage(server.folder / "control.sock"):
                controller.start()
                with InBackground(server, asked, AT_ONCE) as load:
                    answers = load.answers()
                controller.end()
            took_s = time.monotonic() - start_s
            print(f"{REQUESTS} requests, {controller.changes} changes, {took_s:.0f} s")
            left = answers.count(None)
            shed = answers.count(SHED)
            # Whoever left may have been given up before, or have read all in few large events when
            # the server was quicker; nobody else ends without all tokens.
            wrong = [
                (answer, wish)
                for answer, wish in zip(answers, asked, strict=True)
                if answer not in (SHED, wish.tokens)
                and not (answer is None and wish.leaves_after is not None)
            ]
            assert not wrong, wrong[:5]

            def idle() -> bool:
                engine = control.health()["engine"]
                return engine["running"] == engine["waiting"] == 0

            poll(idle, what="an idle engine")
            after = control.health()["engine"]
        assert after["free_blocks"] == after["blocks"] == before["blocks"]
        found = samples(server)
    assert controller.changes > 100
    assert total(found, "trimtab_requests_total") == REQUESTS
    finished = total(found, "trimtab_requests_total", 'outcome="finished"')
    # Some of those who left had all their tokens before the server saw them go.
    assert REQUESTS - left - shed <= finished <= REQUESTS - shed
    cancelled = total(found, "trimtab_requests_total", 'outcome="cancelled"')
    assert finished + cancelled + shed == REQUESTS
    assert total(found, "trimtab_requests_total", 'outcome="shed"') == shed
    assert finished > REQUESTS / 2
    assert total(found, "trimtab_preemptions_total") > 0

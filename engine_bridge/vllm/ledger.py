"""The scheduler's books inside vLLM: the replay's memory, filled by a real engine.

It is the same state and the same compiled decisions as the replay's, with `engine.external` set:
blocks, output lengths and time come from outside. It knows requests by their ids and rows, and
nothing of vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay import live
from trimtab.engine_bridge.replay.build import build_state
from trimtab.engine_bridge.replay.handle import handle_of
from trimtab.engine_bridge.replay.layout import NONE, State
from trimtab.engine_bridge.replay.loop import close_interval
from trimtab.engine_bridge.replay.plan_fair import (
    ADMIT,
    DONE,
    GROW,
    LOOK_UP,
    PREEMPT,
    defer_candidate,
    next_op,
)
from trimtab.engine_bridge.replay.records import REQUEST, records
from trimtab.engine_bridge.replay.report import TelemetryLog
from trimtab.engine_bridge.replay.settings import close_accounts, put_allocation
from trimtab.engine_bridge.replay.summary import COLUMNS, HEADS
from trimtab.engine_bridge.replay.timers import next_event_s
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.blank import blank_request, blank_trace

__all__ = ["ADMIT", "DONE", "GROW", "LOOK_UP", "PREEMPT", "Ledger"]

ACCOUNTS_A_TIER: Final = 512
"""Tenants of a tier that have accounts of their own at a time; idle ones make room for others."""
_UNKNOWN_OUTPUT: Final = 2**31 - 1
_SETTLED_MS: Final = 1e-6


class Ledger:
    """Accounts, queues and the plan of the step for one engine."""

    def __init__(
        self,
        plan: Plan,
        spec: EngineSpec,
        *,
        blocks: int,
        max_num_seqs: int,
        accounts: int = ACCOUNTS_A_TIER,
    ) -> None:
        """Empty books on the static plan.

        Args:
            plan: Tiers, pools, limits and rule switches.
            spec: The engine; its limits are those that vLLM was started with.
            blocks: KV blocks that requests can hold.
            max_num_seqs: Batch size that the engine was started with.
            accounts: Tenants of a tier that have accounts of their own at a time.
        """
        self._plan = plan
        self._accounts = accounts
        self._capacity = max_num_seqs
        self._row_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._tenant_of: dict[int, str] = {}
        self._ended: list[int] = []
        self._account_of: list[OrderedDict[str, int]] = [OrderedDict() for _ in plan.tiers]
        self._users = np.zeros(len(plan.tiers) * accounts, np.int64)
        # What it drafts is the engine's to say (`draft_books`): for every request.
        spec = replace(spec, draft=None)
        state = build_state(
            blank_trace(plan, accounts), plan, spec, rules="fair", collapse=False, speed=1.0
        )
        state.req.acceptance[:] = 0.0
        e = state.engine[0]
        e.external = 1
        e.left = _UNKNOWN_OUTPUT
        e.total_blocks = e.empty_blocks = blocks
        e.max_seqs = max_num_seqs
        self._take_state(state._replace(open_rows=np.zeros(0, np.int64)))
        self._free_rows = list(range(len(state.req) - 1, -1, -1))
        self.allocation = Allocation.static(plan)
        put_allocation(self._state, self.allocation, capacity=max_num_seqs)
        self._facts = np.zeros(6)
        self._interval_busy_ms = 0.0

    def _take_state(self, state: State) -> None:
        """Make this the memory, with views of the fields that are read and written often."""
        self._state = state
        self.handle = handle_of(state)
        engine = state.engine
        self._now_s, self._op_row = engine["now_s"], engine["op_row"]
        self._op_tokens, self._step = engine["op_tokens"], engine["step"]
        self._prefilling, self._grown_step = engine["prefilling"], engine["grown_step"]
        self._empty_blocks, self._cached_blocks = engine["empty_blocks"], engine["cached_blocks"]
        self._pool_held = state.pools["held"]
        self._class_blocks = state.classes["blocks"]
        self._class_woken, self._class_lost = state.classes["woken"], state.classes["lost"]
        self._found_blocks, self._found_idle = state.req["found_blocks"], state.req["found_idle"]
        self._grant, self._target = state.req["grant"], state.req["target"]
        self._tier_of, self._preemptions = state.req["tier"], state.req["preemptions"]
        self._weights = state.tiers["weight"]

    def replace_arrays(self, **arrays: Any) -> None:
        """Put larger arrays in the place of the state's, for `media_books`."""
        self._take_state(self._state._replace(**arrays))

    # Facts about the plan and the state.

    @property
    def state(self) -> State:
        """The memory itself, for the other books; it is another one when rows were added."""
        return self._state

    @property
    def guaranteed_blocks(self) -> list[int]:
        """Blocks that each pool is guaranteed."""
        return [int(n) for n in self._state.pools["guaranteed"]]

    @property
    def now_s(self) -> float:
        """The time that the books stand at."""
        return float(self._now_s[0])

    @property
    def step(self) -> int:
        """Steps that are booked."""
        return int(self._step[0])

    @property
    def scale(self) -> float:
        """True step time over the model's, as believed (rule 13's refit)."""
        return float(self._state.engine[0].scale)

    def set_now(self, now_s: float) -> None:
        """It is that late."""
        self._now_s[0] = now_s

    def row(self, request_id: str) -> int | None:
        """The row of a request that has not ended."""
        return self._row_of.get(request_id)

    def request_id(self, row: int) -> str:
        """The request of a row."""
        return self._id_of[row]

    def tier(self, row: int) -> int:
        """Tier number of a row."""
        return int(self._tier_of[row])

    def preemptions(self, row: int) -> int:
        """How often a row has given way."""
        return int(self._preemptions[row])

    def facts(self, row: int) -> Any:
        """The record of a row, to read."""
        return self._state.req[row]

    @property
    def growing_blocks(self) -> list[int]:
        """By pool, blocks that the decodes of the step being planned are about to take."""
        if self._grown_step[0] != self._step[0]:
            return [0] * len(self._pool_held)
        grow = self._state.grow
        return list(grow[:, self._step[0] % grow.shape[1]].tolist())

    @property
    def growth_weight(self) -> float:
        """Least weight of the tiers whose decodes take blocks in this step."""
        # In plain Python: of a few numbers, numpy's selections would cost several times as much.
        table = self._state.tier_grow
        grows = table[:, self._step[0] % table.shape[1]].tolist()
        return min(
            (w for w, n in zip(self._weights.tolist(), grows, strict=True) if n), default=np.inf
        )

    def tenant(self, row: int) -> str:
        """Whose a row is."""
        return self._tenant_of[row]

    def tenant_service_ms(self) -> dict[tuple[int, str], float]:
        """Engine time by tier number and tenant, since the account was opened or last asked for."""
        service = self._state.tenants.service_ms
        told = {
            (tier, tenant): float(service[account])
            for tier, known in enumerate(self._account_of)
            for tenant, account in known.items()
            if service[account] > 0.0
        }
        service[:] = 0.0
        return told

    # What happens to requests.

    def arrive(
        self,
        request_id: str,
        *,
        tenant: str,
        tier: int,
        prompt_tokens: int,
        arrived_s: float,
        found_blocks: int,
        media: tuple[int, int] = (0, 0),
        is_slice: bool = False,
    ) -> int:
        """A new request waits; returns its row.

        Args:
            request_id: vLLM's id.
            tenant: Whose it is.
            tier: Tier number.
            prompt_tokens: Prompt length.
            arrived_s: On the scheduler's clock, not after now.
            found_blocks: Blocks of its prompt that are cached now.
            media: Where its items begin in the state's columns, and how many it has.
            is_slice: Whether it only reads the beginning of a prompt.
        """
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        account = self._account(tenant, tier)
        r = self._state.req[row]
        r.tier, r.tenant = tier, account
        r.prompt, r.output = prompt_tokens, _UNKNOWN_OUTPUT
        r.found_blocks = found_blocks
        r.media_first, r.media_count = media
        r.slice = row if is_slice else NONE
        self._users[account] += 1
        self._row_of[request_id] = row
        self._id_of[row] = request_id
        self._tenant_of[row] = tenant
        live.arrive_live(self.handle, row, arrived_s)
        return row

    def end(self, request_id: str, outcome: int, generated_tokens: int) -> None:
        """A request is over; `outcome` as in `replay.layout`."""
        row = self._row_of.pop(request_id)
        live.end_live(self.handle, row, outcome, generated_tokens)
        # The places of its items are another request's now.
        self._state.req[row].media_count = 0
        del self._id_of[row], self._tenant_of[row]
        self._users[int(self._state.req[row].tenant)] -= 1
        self._ended.append(row)

    def preempt(self, row: int) -> None:
        """A running request has given way."""
        live.preempt_live(self.handle, row)

    def admit(self, row: int) -> None:
        """A waiting request has joined the batch with the blocks that were found."""
        live.admit_live(self.handle, row)

    def withdraw_admission(self, row: int) -> None:
        """It has not joined after all: it waits again, and nothing is held against it."""
        live.withdraw_live(self.handle, row)

    def defer(self, until_s: float) -> None:
        """The request that was to be looked up cannot join before that time."""
        defer_candidate(self.handle, until_s)

    def found(self, row: int, *, target_tokens: int, blocks: int, idle_blocks: int) -> None:
        """Answer to LOOK_UP: what it must compute in all, and what is cached of it."""
        self._target[row] = target_tokens
        self._found_blocks[row] = blocks
        self._found_idle[row] = idle_blocks

    # Planning a step.

    def enter(self, now_s: float) -> int:
        """A step begins: deliver what is due. Returns a row to shed, or `NONE`."""
        return int(live.enter(self.handle, now_s))

    def next_shed(self) -> int:
        """The next row that rule 15 gives up, or `NONE`."""
        return int(live.next_shed(self.handle))

    def next_event_s(self) -> float:
        """When a back-off runs out or a request becomes too late next."""
        return float(next_event_s(self.handle))

    def begin(self) -> int:
        """Begin the plan of a step; returns its first operation."""
        return int(live.begin(self.handle))

    def next_op(self) -> int:
        """The next operation of the plan; its row is `op_row`."""
        return int(next_op(self.handle))

    def grow(self) -> None:
        """Answer to GROW: the decodes get their blocks; `growing_blocks` tells how many."""
        live.grow(self.handle)

    @property
    def op_row(self) -> int:
        """Whom the operation is about."""
        return int(self._op_row[0])

    @property
    def op_tokens(self) -> int:
        """Of ADMIT: the first chunk."""
        return int(self._op_tokens[0])

    def set_blocks(self, free: int, held: list[int]) -> None:
        """What is free and what each pool holds, this step's growth included."""
        self._empty_blocks[0] = free
        self._cached_blocks[0] = 0
        self._pool_held[:] = held

    def set_classes(self, blocks: list[int], woken: list[float], lost: list[float]) -> None:
        """What each retention class caches, and how its content came back."""
        self._class_blocks[:] = blocks
        self._class_woken[:] = woken
        self._class_lost[:] = lost

    @property
    def prefills(self) -> bool:
        """Whether anybody's prompt is being computed."""
        return bool(self._prefilling[0])

    def grants(self) -> dict[int, int]:
        """Prefill tokens of the planned step by row."""
        rows = self._state.prefilling[: self._prefilling[0]].tolist()
        # One by one: most often there are a few, and numpy's gathering would cost more.
        return {row: int(self._grant[row]) for row in rows}

    def set_grant(self, row: int, tokens: int) -> None:
        """What the engine really gave a prefill in this step."""
        self._grant[row] = tokens

    # After a step.

    def step_facts(self) -> tuple[float, list[float]]:
        """Of the planned step: the step-time model's milliseconds, and what it carries.

        That is decodes, the KV tokens that they read, prefill chunks, their tokens, their
        query-key pairs, and the milliseconds of the media items that are encoded.
        """
        model_ms = float(live.step_facts(self.handle, self._facts))
        return model_ms, self._facts.tolist()

    def book(self, speed: float, draft_ms: float = 0.0, *, learns: bool = True) -> None:
        """The planned step has run, `speed` times as long as the model says.

        The model's step was `draft_ms` longer than that of `step_facts`, for drafts. Without
        `learns` it says nothing of the engine's drift (rule 13's refit).
        """
        scale = self.scale
        live.book(self.handle, speed, draft_ms)
        if not learns:
            self._state.engine[0].scale = scale

    def believe(self, speed: float) -> None:
        """A step that was booked as believed has really taken `speed` times the model's time."""
        live.believe(self.handle, speed)

    def apply(self, allocation: Allocation) -> None:
        """An allocation holds from the next step on."""
        close_accounts(self.handle)
        put_allocation(self._state, allocation, capacity=self._capacity)
        self.allocation = allocation

    def close_interval(self, now_s: float, start_s: float) -> Telemetry:
        """Sum the interval up that began with the last call, at `start_s`; ended rows are free."""
        self._now_s[0] = now_s
        tables, heads = (
            np.empty((1, len(self._plan.tiers), len(COLUMNS))),
            np.empty((1, len(HEADS))),
        )
        close_interval(self.handle, start_s, self._interval_busy_ms, tables[0], heads[0])
        self._interval_busy_ms = float(self._state.engine[0].busy_ms)
        log = TelemetryLog()
        log.add(tables, heads, self.allocation)
        blank = blank_request()
        for row in self._ended:
            # Step events of the request that ended may still be queued: the version tells.
            blank.version = self._state.req[row].version
            self._state.req[row] = blank
        self._free_rows += reversed(self._ended)
        self._ended.clear()
        return log[0]

    # Memory.

    def _add_rows(self) -> None:
        """Twice as many rows for requests."""
        s = self._state
        count = len(s.req)
        req = records(2 * count, REQUEST)
        req[:count] = s.req
        req[count:] = blank_request()
        grown = {
            name: np.concatenate((getattr(s, name), np.zeros(count, np.int64)))
            for name in ("first_log", "done_log")
        }
        times = records(2 * len(s.times), s.times.dtype)
        times[: len(s.times)] = s.times
        self._take_state(s._replace(req=req, times=times, **grown))
        self._free_rows = list(range(2 * count - 1, count - 1, -1))

    def _account(self, tenant: str, tier: int) -> int:
        """The tenant's account in a tier; of many tenants, one that has been idle makes room."""
        known = self._account_of[tier]
        if tenant in known:
            known.move_to_end(tenant)
            return known[tenant]
        if len(known) < self._accounts:
            account = tier * self._accounts + len(known)
        else:
            oldest = next((n for n, at in known.items() if self._users[at] == 0), None)
            if oldest is None:
                # More busy tenants than accounts: the newest share the one used least lately.
                account = next(iter(known.values()))
                known[tenant] = account
                return account
            account = known.pop(oldest)
        live.open_account(
            self.handle,
            account,
            self._plan.tenant_share(tenant),
            self._plan.tenant_bonus(tenant, tier),
            float(self._plan.prediction.initial_output_tokens),
        )
        known[tenant] = account
        return account

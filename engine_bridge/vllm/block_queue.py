"""vLLM's free blocks, kept by retention class: rule 7 on vLLM's own KV cache.

It stands in for the block pool's `FreeKVCacheBlockQueue`. Blocks that hold nothing go first; then
the cached ones in rule 7's order: one list a class, each in the order in which its blocks fell
idle. It also knows what each pool's running requests hold (rule 5), because every block that is
taken or falls idle passes here. It decides nothing but whose cached block goes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.build import EVICTION, class_order
from trimtab.engine_bridge.rules import retention

HELD: Final = 255
_EMPTY: Final = 254

_PRIOR: Final = 0.01
_GHOSTS: Final = 4
_COMES_BACK: Final = 0.25
_MEMORY: Final = 2.0

# Plain Python: called for one block at a time, a compiled function would cost more than it does.
_reuse_rate = getattr(retention.reuse_rate, "py_func", retention.reuse_rate)
_scaled_age = getattr(retention.scaled_age, "py_func", retention.scaled_age)
_goes_before = getattr(retention.goes_before, "py_func", retention.goes_before)
_faded = getattr(retention.faded, "py_func", retention.faded)


class RetentionQueue:
    """Free blocks in rule 7's order. The caller sets who acts before blocks move.

    Attributes:
        num_free_blocks: Blocks that no running request holds.
        pool: Pool of the request that takes blocks next.
        weight: Weight of its tier.
        shows_reuse: Whether it finds cached blocks as a new request.
        kinds: Retention classes that blocks fall idle in: never hit again, hit again.
        now_s: The scheduler's time.
        held: Blocks that each pool's running requests hold, shared ones once.
        guaranteed: Blocks that each pool is guaranteed.
        woken: By class, idle blocks that were asked for again, fading.
        lost: By class, idle blocks that were evicted and not asked for since, fading.
    """

    def __init__(
        self,
        block_pool: Any,
        *,
        factors: list[float],
        class_tier: list[int],
        class_rank: list[int],
        tier_pool: list[int],
        tier_weight: list[float],
        kinds_of_tier: list[tuple[int, int]],
        pools: int,
        eviction: int,
        learn_reuse: bool,
    ) -> None:
        """Take over a block pool's free blocks.

        Args:
            block_pool: vLLM's `BlockPool`, before its first request.
            factors: Retention factor by class; the caller keeps it up to date.
            class_tier: Tier of each class.
            class_rank: Place of each class in a strict order of tiers.
            tier_pool: Pool of each tier.
            tier_weight: Weight of each tier; the caller keeps it up to date.
            kinds_of_tier: Class of a tier's blocks: never hit again, hit again.
            pools: Number of pools.
            eviction: `rules.retention`'s number of the order.
            learn_reuse: Whether factors are multiplied by the learned reuse.
        """
        self._pool = block_pool
        free = block_pool.free_block_queue.get_all_free_blocks()
        count = len(block_pool.blocks)
        self._empty = FreeKVCacheBlockQueue(free)
        self._lists = [FreeKVCacheBlockQueue([]) for _ in factors]
        self.num_free_blocks = len(free)
        # A byte a block: a list of numbers would cost a cache miss each time.
        self._kind = bytearray([_EMPTY]) * count
        self._charge = bytearray(count)
        self._idle_s = [0.0] * count
        self._sequence = [0] * count
        self._reused = bytearray(count)
        self._foreign: dict[int, dict[int, int]] = {}
        self._ghosts: dict[Any, tuple[int, int]] = {}
        self._next_sequence = 0
        self._evicted_blocks = 0
        self._total = len(free)
        self._factors, self._class_tier, self._class_rank = factors, class_tier, class_rank
        self._tier_pool, self._tier_weight = tier_pool, tier_weight
        self._kinds_of_tier = kinds_of_tier
        self._eviction, self._learns = eviction, learn_reuse
        self.pool, self.weight, self.now_s = 0, float("inf"), 0.0
        self.kinds = (0, 0)
        self.shows_reuse = True
        self.held = [0] * pools
        self.growing = (0,) * pools
        self.guaranteed = [self._total] * pools
        self.woken = [0.0] * len(factors)
        self.lost = [0.0] * len(factors)
        block_pool.free_block_queue = self

    @property
    def growing(self) -> tuple[int, ...]:
        """Blocks of each pool that this step's decodes are about to take, `growing_blocks` in all.

        Others leave them as many empty ones.
        """
        return self._growing

    @growing.setter
    def growing(self, blocks: Iterable[int]) -> None:
        self._growing = tuple(blocks)
        self.growing_blocks = sum(self._growing)

    @property
    def empty_blocks(self) -> int:
        """Free blocks that hold nothing."""
        return int(self._empty.num_free_blocks)

    @property
    def shared_between_pools(self) -> int:
        """Blocks that requests of several pools hold."""
        return len(self._foreign)

    def cached_blocks(self, kind: int) -> int:
        """Idle blocks of a class."""
        return int(self._lists[kind].num_free_blocks)

    # What vLLM's block pool calls.

    def popleft(self) -> KVCacheBlock:
        """Take one block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take `n` blocks for the pool and weight that were set; the caller knows they are free."""
        if n == 0:
            return []
        if self._empty.num_free_blocks < n + self.growing_blocks:
            self.make_empty(n + self.growing_blocks)
        blocks: list[KVCacheBlock] = self._empty.popleft_n(n)
        pool, kind, charge = self.pool, self._kind, self._charge
        for block in blocks:
            number = block.block_id
            kind[number] = HELD
            charge[number] = pool
        self.held[pool] += n
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """An idle block was asked for again: the pool that was set holds it from now on."""
        number = block.block_id
        kind = self._kind[number]
        if kind == _EMPTY:
            self._empty.remove(block)
        else:
            self._lists[kind].remove(block)
            self._learn(kind, 1, 0)
        self._kind[number] = HELD
        self._charge[number] = self.pool
        self._reused[number] |= self.shows_reuse
        self.held[self.pool] += 1
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """One block with content falls idle."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks with content fall idle, the first to be reused first."""
        now_s, sequence = self.now_s, self._next_sequence
        for block in blocks:
            number = block.block_id
            kind = self.kinds[self._reused[number]]
            self.held[self._charge[number]] -= 1
            self._kind[number] = kind
            self._idle_s[number] = now_s
            self._sequence[number] = sequence
            sequence += 1
            self._lists[kind].append(block)
        self._next_sequence = sequence
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks without content are free again."""
        for block in blocks:
            number = block.block_id
            self.held[self._charge[number]] -= 1
            self._kind[number] = _EMPTY
            self._reused[number] = 0
        self._empty.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks: the empty ones, then class by class."""
        blocks: list[KVCacheBlock] = self._empty.get_all_free_blocks()
        for at in self._lists:
            blocks += at.get_all_free_blocks()
        return blocks

    # What the scheduler calls.

    def set_allocation(self, allocation: Allocation) -> None:
        """Weights and retention factors that hold from now on."""
        self._tier_weight[:] = allocation.weights
        self._factors[:] = allocation.retention

    def takes(self, tier: int, found: Sequence[KVCacheBlock], returns: bool) -> None:
        """A request of a tier is about to take blocks, these cached ones among them.

        One that `returns` after a preemption does not show that others come back for them.
        """
        self.shows_reuse = not returns
        self.pool, self.weight = self._tier_pool[tier], self._tier_weight[tier]
        self._share(found, self.pool)

    def leaves(self, tier: int, blocks: Sequence[KVCacheBlock], now_s: float) -> None:
        """A request of a tier is about to let these blocks go."""
        self.now_s = now_s
        self.kinds = self._kinds_of_tier[tier]
        self._unshare(blocks, self._tier_pool[tier])

    def classes(self) -> tuple[list[int], list[float], list[float]]:
        """By class: idle blocks, and those that were woken and lost of late."""
        return [at.num_free_blocks for at in self._lists], self.woken, self.lost

    def make_empty(self, n: int) -> None:
        """Empty cached blocks in rule 7's order until `n` blocks hold nothing."""
        short = n - self._empty.num_free_blocks
        if short > 0:
            self._evict(short)

    def _share(self, blocks: Iterable[KVCacheBlock], pool: int) -> None:
        """A request of `pool` is about to hold these blocks too; call it before it does."""
        for block in blocks:
            number = block.block_id
            if block.ref_cnt == 0:
                continue
            self._reused[number] |= self.shows_reuse
            if self._charge[number] != pool:
                refs = self._foreign.setdefault(number, {})
                refs[pool] = refs.get(pool, 0) + 1

    def _unshare(self, blocks: Iterable[KVCacheBlock], pool: int) -> None:
        """A request of `pool` is about to let go of these blocks; call it before it does.

        A shared block is charged to a pool that still holds it. Any may be shared: of content that
        exists twice, the first copy is found, and that can be another request's block by block.
        """
        if not self._foreign:
            return
        for block in blocks:
            if block.ref_cnt <= 1:
                continue
            number = block.block_id
            refs = self._foreign.get(number)
            if refs is None:
                continue
            if pool in refs and self._charge[number] != pool:
                refs[pool] -= 1
                if refs[pool] == 0:
                    del refs[pool]
            elif block.ref_cnt - 1 == sum(refs.values()):
                to = min(refs)
                self.held[self._charge[number]] -= 1
                self.held[to] += 1
                self._charge[number] = to
                del refs[to]
            if not refs:
                del self._foreign[number]

    def note_misses(self, hashes: Iterable[Any]) -> None:
        """Learn from what a request would have found, had it not been evicted of late."""
        if not self._ghosts:
            return
        for key in hashes:
            ghost = self._ghosts.pop(key, None)
            if ghost is not None and self._evicted_blocks - ghost[1] <= _GHOSTS * self._total:
                self._learn(ghost[0], 1, -1)

    def reuse(self, kind: int) -> float:
        """Share of a class's idle blocks that come back, as far as it is known."""
        return float(_reuse_rate(self.woken[kind], self.lost[kind], _PRIOR * self._total))

    def _learn(self, kind: int, woken: int, lost: int) -> None:
        self.woken[kind] += woken
        self.lost[kind] = max(0.0, self.lost[kind] + lost)
        by = _faded(self.woken[kind], self.lost[kind], _MEMORY * self._total)
        if by != 1.0:
            self.woken[kind] *= by
            self.lost[kind] *= by

    def _spared(self, kind: int) -> bool:
        """Whether the tier that takes blocks leaves a class alone while there is other content."""
        tier = self._class_tier[kind]
        if not self._learns or self._tier_weight[tier] <= self.weight:
            return False
        pool = self._tier_pool[tier]
        inside = self.held[pool] + self.growing[pool] <= self.guaranteed[pool]
        return inside and self.reuse(kind) >= _COMES_BACK

    def _over_quota(self, kind: int) -> float:
        if self._eviction != retention.FIXED_QUOTA:
            return 0.0
        pool = self._tier_pool[self._class_tier[kind]]
        kept = self.held[pool] + self.growing[pool]
        for other, at in enumerate(self._lists):
            if self._tier_pool[self._class_tier[other]] == pool:
                kept += at.num_free_blocks
        return float(max(0, kept - self.guaranteed[pool]))

    def _key(self, kind: int) -> tuple[float, int, int, float]:
        """What `goes_before` compares of a class's oldest block."""
        number = self._lists[kind].fake_free_list_head.next_free_block.block_id
        factor = self._factors[kind]
        if self._learns:
            factor *= self.reuse(kind)
        age = _scaled_age(self.now_s, self._idle_s[number], factor)
        return age, self._sequence[number], self._class_rank[kind], self._over_quota(kind)

    def _next_kind(self, sparing: bool) -> int:
        best, best_key = HELD, (0.0, 0, 0, 0.0)
        for kind, at in enumerate(self._lists):
            if at.num_free_blocks == 0 or (sparing and self._spared(kind)):
                continue
            key = self._key(kind)
            if best == HELD or _goes_before(self._eviction, *key, *best_key):
                best, best_key = kind, key
        return best

    def unname(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks in use, whose content will not be computed, cannot be found any more."""
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)

    def _evict(self, n: int) -> None:
        pool = self._pool
        gone: list[KVCacheBlock] = []
        for _ in range(n):
            kind = self._next_kind(True)
            if kind == HELD:
                kind = self._next_kind(False)
            block = self._lists[kind].popleft()
            key = block.block_hash
            pool._maybe_evict_cached_block(block)
            self._evicted_blocks += 1
            self._learn(kind, 0, 1)
            if (
                self._learns
                and key is not None
                and pool.cached_block_hash_to_block.get_one_block(key) is None
            ):
                self._remember(key, kind)
            self._kind[block.block_id] = _EMPTY
            self._reused[block.block_id] = 0
            gone.append(block)
        self._empty.prepend_n(gone)

    def _remember(self, key: Any, kind: int) -> None:
        """Keep the name of what was evicted, and forget names that are too old to teach."""
        self._ghosts.pop(key, None)
        self._ghosts[key] = (kind, self._evicted_blocks)
        oldest = next(iter(self._ghosts))
        if self._evicted_blocks - self._ghosts[oldest][1] > _GHOSTS * self._total:
            del self._ghosts[oldest]


def retention_queue(block_pool: Any, plan: Plan, allocation: Allocation) -> RetentionQueue:
    """Put a block pool's free blocks under the plan's retention classes."""
    class_tier, class_rank = class_order(plan)
    return RetentionQueue(
        block_pool,
        factors=list(allocation.retention),
        class_tier=class_tier,
        class_rank=class_rank,
        tier_pool=list(plan.pool_of_tier),
        tier_weight=list(allocation.weights),
        kinds_of_tier=[
            (plan.retention_class(tier, "", False), plan.retention_class(tier, "", True))
            for tier in range(len(plan.tiers))
        ],
        pools=len(plan.pools),
        eviction=EVICTION[plan.retention.eviction],
        learn_reuse=plan.retention.learn_reuse,
    )

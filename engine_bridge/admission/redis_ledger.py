"""Counts quotas in a Redis that several processes share, and in this process while it is away.

`limits` opens the storage, so its URLs work (Sentinel, Cluster, Valkey, TLS). Its strategies are
not used: they keep an entry for each token, or let twice the quota through around the turn of a
minute, and give nothing back. Here all charges of a request are one script.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from trimtab.engine_bridge.admission.limiter import (
    BUCKETS,
    MICROS,
    PLACES,
    Charge,
    Limiter,
    Places,
    Short,
    Taken,
)
from trimtab.engine_bridge.admission.memory_ledger import HOME as MEMORY_HOME
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.settings import AdmissionSettingsError
from trimtab.engine_bridge.admission.steady_clock import SteadyClock

HOME: Final = "redis"
LEFT_ALONE_S: Final = 5.0
"""A storage that has failed is not asked again for so long."""
_PREFIX: Final = "trimtab:admission"
_NO_PLACES: Final = -1
_LOG: Final = logging.getLogger(__name__)

# The server's clock is the one that all gateways share. Where it is set back the script goes on
# from where it was, so no quota opens again.
_NOW: Final = f"""
local BUCKETS = {BUCKETS}
local book, seats = KEYS[1], KEYS[2]
local function now_us()
  local time = redis.call('TIME')
  local known = redis.call('HMGET', book, 'latest', 'ahead')
  local latest, ahead = tonumber(known[1]) or 0, tonumber(known[2]) or 0
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2]) + ahead
  if now < latest then
    redis.call('HSET', book, 'ahead', string.format('%.0f', ahead + latest - now))
    now = latest
  end
  return now
end
local function forget(name, piece)
  local known = redis.call('HMGET', book, name .. ':total', name .. ':oldest')
  local total, oldest = tonumber(known[1]) or 0, tonumber(known[2]) or piece
  local first = math.min(piece - BUCKETS, oldest + BUCKETS + 1)
  for old = oldest, first - 1 do
    local field = name .. ':' .. string.format('%.0f', old)
    local amount = redis.call('HGET', book, field)
    if amount then
      total = total - tonumber(amount)
      redis.call('HDEL', book, field)
    end
  end
  if piece - BUCKETS > oldest then
    oldest = piece - BUCKETS
  end
  return total, oldest
end
local function whole(number)
  return string.format('%.0f', number)
end
local function live(seconds)
  if redis.call('TTL', book) < tonumber(seconds) then
    redis.call('EXPIRE', book, seconds)
  end
end
"""
# ARGV: ticket, places' limit (-1: none), count, lease us, life of the keys in s, 1 to take or 0 to
# look, then name, limit, piece us, amount of each charge.
# Returns 1 and the pieces, or 0, whether places are short, number of the charge, wait in us.
_TAKE: Final = (
    _NOW
    + """
local ticket, limit, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_us()
local latest, slowest, pieces, totals, oldests = 0, 0, {}, {}, {}
for at = 7, #ARGV, 4 do
  local name, most = ARGV[at], tonumber(ARGV[at + 1])
  local width, amount = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local piece, number = math.floor(now / width), (at - 3) / 4
  local total, oldest = forget(name, piece)
  pieces[number], totals[number], oldests[number] = piece, total, oldest
  local over = total + amount - most
  local old = oldest
  while over > 0 and old <= piece do
    over = over - (tonumber(redis.call('HGET', book, name .. ':' .. whole(old))) or 0)
    if over <= 0 and (old + BUCKETS + 1) * width > latest then
      latest, slowest = (old + BUCKETS + 1) * width, number
    end
    old = old + 1
  end
  redis.call('HSET', book, name .. ':total', whole(total), name .. ':oldest', whole(oldest))
end
redis.call('HSET', book, 'latest', whole(now))
live(ARGV[5])
local full = 0
if limit >= 0 then
  redis.call('ZREMRANGEBYSCORE', seats, '-inf', whole(now))
  if redis.call('ZCARD', seats) + count > limit then
    full = 1
  end
end
if latest > 0 or full == 1 or ARGV[6] == '0' then
  return {0, full, slowest, math.max(0, latest - now)}
end
local answer = {1}
for at = 7, #ARGV, 4 do
  local name, amount, number = ARGV[at], ARGV[at + 3], (at - 3) / 4
  redis.call('HINCRBY', book, name .. ':' .. whole(pieces[number]), amount)
  redis.call('HINCRBY', book, name .. ':total', amount)
  answer[number + 1] = pieces[number]
end
if limit >= 0 then
  for seat = 1, count do
    redis.call('ZADD', seats, whole(now + tonumber(ARGV[4])), ticket .. ':' .. seat)
  end
  redis.call('PEXPIRE', seats, math.ceil(tonumber(ARGV[4]) / 1000) + 1000)
end
return answer
"""
)
# ARGV: ticket, count of places, life of the keys in s, then name, piece us, piece, what is more.
_SETTLE: Final = (
    _NOW
    + """
for seat = 1, tonumber(ARGV[2]) do
  redis.call('ZREM', seats, ARGV[1] .. ':' .. seat)
end
local now = now_us()
for at = 4, #ARGV, 4 do
  local name, width = ARGV[at], tonumber(ARGV[at + 1])
  local piece, more = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local newest = math.floor(now / width)
  local total, oldest = forget(name, newest)
  if more > 0 then
    redis.call('HINCRBY', book, name .. ':' .. whole(newest), whole(more))
    total = total + more
  elseif piece >= oldest then
    local field = name .. ':' .. whole(piece)
    local back = math.min(-more, tonumber(redis.call('HGET', book, field)) or 0)
    redis.call('HINCRBY', book, field, whole(-back))
    total = total - back
  end
  redis.call('HSET', book, name .. ':total', whole(total), name .. ':oldest', whole(oldest))
end
redis.call('HSET', book, 'latest', whole(now))
live(ARGV[3])
return 1
"""
)
# ARGV: then for each ticket its name, count of places and lease us.
_RENEW: Final = (
    _NOW
    + """
local now, longest = now_us(), 0
for at = 1, #ARGV, 3 do
  local lease = tonumber(ARGV[at + 2])
  for seat = 1, tonumber(ARGV[at + 1]) do
    redis.call('ZADD', seats, 'XX', whole(now + lease), ARGV[at] .. ':' .. seat)
  end
  longest = math.max(longest, lease)
end
redis.call('PEXPIRE', seats, math.ceil(longest / 1000) + 1000)
return 1
"""
)


class RedisLedger:
    """A `Limiter` that several processes share."""

    is_instant: Final = False

    def __init__(self, url: str, *, time_out_s: float, monotonic_s: Callable[[], float]) -> None:
        """Say where the storage is; nothing is opened yet.

        Args:
            url: As `limits` writes it, for instance `redis://host:6379/0`.
            time_out_s: Longest wait for an answer, seconds.
            monotonic_s: A clock, for the time that a failed storage is left alone.

        Raises:
            AdmissionSettingsError: the libraries are missing, or the URL is not understood.
        """
        client, self._errors = _open(url, time_out_s)
        self._client = client
        self._take = client.register_script(_TAKE)
        self._settle = client.register_script(_SETTLE)
        self._renew = client.register_script(_RENEW)
        self._now_s = SteadyClock(monotonic_s).now_s
        self._local = MemoryLedger(monotonic_s)
        self._away_until_s = float("-inf")
        self._undoing: set[asyncio.Task[None]] = set()
        self.failures = 0
        """How often the storage has not answered."""

    async def take(
        self, tenant: str, ticket: str, charges: Sequence[Charge], places: Places | None
    ) -> Taken | Short:
        """Take all or nothing; in this process alone while the storage is away.

        Whoever is cancelled meanwhile has taken nothing: what the storage gives after that goes
        back at once.
        """
        taking = asyncio.create_task(self._take_there(tenant, ticket, charges, places))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._give_back(taking))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def wait_s(self, tenant: str, charges: Sequence[Charge]) -> float:
        """Time until these would fit if nothing else comes, seconds."""
        answer = await self._ask(tenant, "", charges, None, take=False)
        if answer is None:
            return await self._local.wait_s(tenant, charges)
        return float(answer[3]) / MICROS

    async def settle(self, taken: Taken, spent: Mapping[str, int]) -> None:
        """Replace what was taken by what was spent; if the storage is away, it stands."""
        if taken.home == MEMORY_HOME:
            await self._local.settle(taken, spent)
            return
        count = 0 if taken.places is None else taken.places.count
        words: list[object] = [taken.ticket, count, _life_s(taken.charges)]
        for charge, piece in zip(taken.charges, taken.pieces, strict=True):
            more = spent.get(charge.quota.name, charge.amount) - charge.amount
            if more:
                words += [charge.quota.name, charge.quota.piece_us, piece, more]
        await self._run(self._settle, taken.tenant, words)

    async def renew(self, taken: Sequence[Taken]) -> None:
        """Keep the places of requests that still run."""
        await self._local.renew([one for one in taken if one.home == MEMORY_HOME])
        by_tenant: dict[str, list[object]] = {}
        for one in taken:
            if one.home == HOME and one.places is not None:
                lease_us = round(one.places.lease_s * MICROS)
                by_tenant.setdefault(one.tenant, []).extend(
                    (one.ticket, one.places.count, lease_us)
                )
        for tenant, words in by_tenant.items():
            await self._run(self._renew, tenant, words)

    async def close(self) -> None:
        """Close the connections, once what nobody waits for any more is back."""
        while self._undoing:
            await asyncio.wait(self._undoing)
        await self._client.aclose()

    async def _take_there(
        self, tenant: str, ticket: str, charges: Sequence[Charge], places: Places | None
    ) -> Taken | Short:
        answer = await self._ask(tenant, ticket, charges, places, take=True)
        if answer is None:
            return await self._local.take(tenant, ticket, charges, places)
        if answer[0] == 0:
            return _short(answer, charges)
        pieces = tuple(int(piece) for piece in answer[1:])
        return Taken(tenant, ticket, tuple(charges), pieces, places, HOME)

    async def _give_back(self, taking: asyncio.Task[Taken | Short]) -> None:
        taken = await taking
        if isinstance(taken, Taken):
            await self.settle(taken, {charge.quota.name: 0 for charge in taken.charges})

    async def _ask(
        self,
        tenant: str,
        ticket: str,
        charges: Sequence[Charge],
        places: Places | None,
        *,
        take: bool,
    ) -> Any:
        words: list[object] = [ticket]
        if places is None:
            words += [_NO_PLACES, 0, 0]
        else:
            words += [places.limit, places.count, round(places.lease_s * MICROS)]
        words += [_life_s(charges), int(take)]
        for charge in charges:
            quota = charge.quota
            words += [quota.name, quota.limit, quota.piece_us, charge.amount]
        return await self._run(self._take, tenant, words)

    async def _run(self, script: Any, tenant: str, words: Sequence[object]) -> Any:
        """The script's answer; None if the storage is away."""
        if self._now_s() < self._away_until_s:
            return None
        # One hash slot a tenant in a cluster; no tenant's name in the storage.
        tag = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        keys = [f"{_PREFIX}:{{{tag}}}:{name}" for name in ("book", "seats")]
        try:
            return await script(keys=keys, args=words)
        except self._errors as error:
            self.failures += 1
            self._away_until_s = self._now_s() + LEFT_ALONE_S
            _LOG.warning(
                "admission: the storage does not answer (%s): counting in this process for %g s",
                type(error).__name__,
                LEFT_ALONE_S,
            )
            return None


def open_limiter(url: str, *, time_out_s: float, monotonic_s: Callable[[], float]) -> Limiter:
    """The limiter of a storage's URL.

    Raises:
        AdmissionSettingsError: the libraries are missing, or the URL is not understood.
    """
    if url.startswith("memory://"):
        return MemoryLedger(monotonic_s)
    return RedisLedger(url, time_out_s=time_out_s, monotonic_s=monotonic_s)


def _open(url: str, time_out_s: float) -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import redis.asyncio
        from limits.storage import storage_from_string
    except ImportError as error:
        raise AdmissionSettingsError(
            "storage",
            bound="memory:// without the libraries for a shared one",
            remedy=f"{error.name} is missing: pip install 'trimtab[gateway]'",
        ) from None
    from limits.errors import ConfigurationError

    options: dict[str, Any] = {
        "implementation": "redispy",
        "socket_timeout": time_out_s,
        "socket_connect_timeout": time_out_s,
    }
    if "+cluster" not in url:
        # One more try: a kept connection may be dead.
        options["retry"] = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 1)
    try:
        storage: Any = storage_from_string(f"async+{url}", **options)
        client = storage.bridge.get_connection()
    except (ConfigurationError, ValueError, redis.RedisError) as error:
        raise AdmissionSettingsError("storage", bound="a URL of Redis", remedy=str(error)) from None
    return client, (redis.RedisError, OSError, TimeoutError)


def _short(answer: Any, charges: Sequence[Charge]) -> Short:
    _, full, slowest, wait_us = answer
    name = charges[int(slowest) - 1].quota.name if slowest else PLACES
    assert full or slowest
    return Short(name, float(wait_us) / MICROS)


def _life_s(charges: Sequence[Charge]) -> int:
    """How long the tenant's book must be kept: the longest window and a piece of it, seconds."""
    return max((c.quota.window_s * (BUCKETS + 1) // BUCKETS + 1 for c in charges), default=60)

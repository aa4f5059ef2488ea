"""Puts the parts of one engine's loop together, as the settings say.

It starts nothing and asks no engine anything.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Final

from trimtab.controller.daemon.audit_log import Audit, AuditLog, NoAudit
from trimtab.controller.daemon.bundle_watch import Terms
from trimtab.controller.daemon.pace import awake_clock_s
from trimtab.controller.daemon.profile_watch import ProfileWatch, flush_traffic_log
from trimtab.controller.daemon.settings import DaemonSettings, PrometheusSettings, SettingsError
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.prometheus import PrometheusSource
from trimtab.engine_bridge.live.scrape import ScrapeSource
from trimtab.engine_bridge.live.snapshot import MetricSource
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_client import ControlClient

READ_FRACTION: Final = 0.5
"""Part of an interval that the figures are waited for."""
CONTROL_FRACTION: Final = 0.5
"""Part of an interval that each answer of the control socket is waited for."""
POLICY_FRACTION: Final = 0.25
"""Part of an interval that the policy is waited for."""
LONGEST_WAIT_S: Final = 1.0
"""But none of them is waited for longer than this, seconds."""
_MOST_HOST: Final = 32


def holder_name() -> str:
    """A name to take leases under that no other process has."""
    host = "".join(c for c in socket.gethostname() if c.isprintable())[:_MOST_HOST]
    return f"trimtab@{host}:{os.getpid()}-{secrets.token_hex(2)}"


def terms(plan: Plan, seed: int) -> Terms:
    """Under what a loop asks its policy."""
    return Terms(plan=plan, seed=seed, deadline_s=_bounded_s(plan, POLICY_FRACTION))


def live_engine(name: str, settings: DaemonSettings, plan: Plan, holder: str) -> LiveEngine:
    """The engine of a name; nothing is opened yet.

    Raises:
        ControlSocketError: its control address is none, or there is no token for TCP.
        SettingsError: a token file cannot be read.
    """
    own = settings.engines[name]
    return LiveEngine(
        plan,
        _source(name, settings, plan),
        ControlClient(own.control, timeout_s=_bounded_s(plan, CONTROL_FRACTION)),
        holder=holder,
        read_deadline_s=_bounded_s(plan, READ_FRACTION),
        monotonic_s=awake_clock_s,
    )


def audit_log(name: str, settings: DaemonSettings) -> Audit:
    """Where an engine's decisions are recorded."""
    wanted = settings.audit
    if not wanted.enabled:
        return NoAudit()
    return AuditLog(
        settings.state_dir / "audit",
        engine=name,
        most_bytes=wanted.most_mib << 20,
        most_files=wanted.most_files,
    )


def profile_watch(name: str, settings: DaemonSettings, plan: Plan) -> ProfileWatch | None:
    """What looks for a reason to profile an engine's traffic; None where that is not wanted."""
    own = settings.engines[name]
    if not settings.profile.enabled or own.traffic_log is None:
        return None
    return ProfileWatch(
        plan,
        settings.profile,
        engine=name,
        traffic_log=own.traffic_log,
        out=settings.state_dir / "profiles",
        flush=lambda: flush_traffic_log(own.control),
        monotonic_s=awake_clock_s,
    )


def _source(name: str, settings: DaemonSettings, plan: Plan) -> MetricSource:
    own, rank = settings.engines[name], str(settings.engines[name].rank)
    prometheus = settings.prometheus_of(name)
    if prometheus is None:
        assert own.metrics is not None
        return ScrapeSource(own.metrics, rank=rank, timeout_s=_bounded_s(plan, READ_FRACTION))
    return PrometheusSource(
        prometheus.url,
        match=prometheus.match,
        rank=rank,
        timeout_s=prometheus.timeout_s,
        token=_token(prometheus),
        lookback_s=prometheus.lookback_s,
    )


def _token(prometheus: PrometheusSettings) -> str | None:
    path: Path | None = prometheus.token_file
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not in ASCII characters"
        raise SettingsError(str(path), bound="a readable token", remedy=reason) from None


def _bounded_s(plan: Plan, fraction: float) -> float:
    return min(LONGEST_WAIT_S, fraction * float(plan.controller.interval_s))

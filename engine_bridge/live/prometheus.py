"""An engine's metrics out of Prometheus: one query a look, with the time of the samples.

prometheus-api-client asks; under it lies `http_get`, because requests repeats nothing here, follows
nobody and waits no longer than it is told.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.adapters import BaseAdapter

from trimtab.engine_bridge.live import http_get
from trimtab.engine_bridge.live.series import (
    HISTOGRAM_ENDS,
    OWN_LABELS,
    PREFIX,
    RANK,
    WANTED,
)
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable

_NAME: Final = "__name__"
_SAMPLED: Final = "trimtab_sampled"
"""Label that marks the time of the samples among them. `or` tells series apart by their labels."""
_ANCHOR: Final = "engine_time_seconds"
"""The series whose sample time counts: all series of a scrape have the same one."""
_LABEL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_NAMED: Final = 3

Labels = tuple[tuple[str, str], ...]


class PrometheusSource:
    """One engine's series in a Prometheus."""

    def __init__(
        self,
        url: str,
        *,
        match: Mapping[str, str],
        rank: str = "0",
        timeout_s: float = 1.0,
        token: str | None = None,
        lookback_s: float = 60.0,
    ) -> None:
        """Say where Prometheus is, and which target of its is the engine.

        Args:
            url: For instance `http://127.0.0.1:9090`.
            match: Labels of the target, for instance `{"job": "vllm", "instance": "a:8000"}`.
            rank: Data-parallel rank of the engine: its label `engine`.
            timeout_s: For a whole read, seconds.
            token: Bearer token; None: none.
            lookback_s: Samples that are older count as none, seconds.

        Raises:
            SourceError: it is no URL, or a label has no label's name.
        """
        self._url = http_get.check_url(url).rstrip("/")
        for label in match:
            if not _LABEL.fullmatch(label) or label in (_NAME, RANK, *OWN_LABELS):
                raise http_get.SourceError(
                    "metrics", key=f"match.{label}", bound="a label of the target"
                )
        self._selector = _selector(match, rank)
        self._lookback_s = lookback_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        session = requests.Session()
        session.trust_env = False
        self._client = PrometheusConnect(self._url, headers=headers, session=session)
        # In place of the adapter that the client has put there, which waits and repeats.
        session.mount(self._url, _Adapter(timeout_s))
        self._query = _query(self._selector)

    @property
    def place(self) -> str:
        """The URL and the selector."""
        return f"{http_get.place(self._url)} {self._selector}"

    def read(self) -> Snapshot:
        """The newest samples.

        Raises:
            TelemetryUnavailableError: Prometheus has none, or several targets match.
        """
        try:
            found = self._client.custom_query(self._query)
            return _snapshot(found, self._lookback_s)
        except TelemetryUnavailableError as error:
            raise TelemetryUnavailableError(error.reason, f"{self.place}: {error}") from None
        except PrometheusApiClientException as error:
            text = f"{self.place}: {str(error)[:200]}"
            raise TelemetryUnavailableError(Unavailable.REFUSED, text) from error
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            text = f"{self.place}: no answer of Prometheus: {type(error).__name__} {error}"[:300]
            raise TelemetryUnavailableError(Unavailable.MALFORMED, text) from error

    def close(self) -> None:
        """Nothing is open between two reads."""


class _Adapter(BaseAdapter):  # type: ignore[misc]  # its package is not followed
    """What requests sends with: `http_get`, under one deadline for all of it."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        """Send a prepared GET; what requests says about time-outs, proxies and TLS is not used."""
        url = str(request.url)
        headers = {str(name): str(value) for name, value in request.headers.items()}
        headers["Accept-Encoding"] = "identity"
        headers.pop("Connection", None)
        status, reason, body = http_get.get(url, headers=headers, timeout_s=self._timeout_s)
        answer = requests.Response()
        answer.status_code, answer.reason, answer.url = status, reason, url
        answer._content = body
        answer.request = request
        return answer

    def close(self) -> None:
        """Nothing is open between two requests."""


def _selector(match: Mapping[str, str], rank: str) -> str:
    labels = {**match, RANK: rank}
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def _query(selector: str) -> str:
    """All series but histograms, and beside them when they were sampled, under a label of its own.

    An instant query tells the time of the query, not that of a sample; a range tells it, at the
    price of every sample in the range.
    """
    labels = selector.strip("{}")
    ends = "|".join(HISTOGRAM_ENDS)
    every = f'{{__name__=~"{PREFIX}.+",__name__!~".+({ends})",{labels}}}'
    sampled = f"timestamp({PREFIX}{_ANCHOR}{selector})"
    return f'{every} or label_replace({sampled},"{_SAMPLED}","yes","","")'


def _snapshot(found: list[dict[str, Any]], lookback_s: float) -> Snapshot:
    values: dict[str, dict[str, float]] = {}
    names: set[str] = set()
    targets: set[Labels] = set()
    sampled_s = asked_s = math.nan
    for series in found:
        labels: dict[str, str] = dict(series["metric"])
        at_s, value = series["value"]
        if _SAMPLED in labels:
            sampled_s, asked_s = float(value), float(at_s)
            continue
        name = labels.pop(_NAME).removeprefix(PREFIX)
        names.add(name)
        if name not in WANTED:
            continue
        own = next((labels.pop(label) for label in OWN_LABELS if label in labels), "")
        targets.add(tuple(sorted(labels.items())))
        values.setdefault(name, {})[own] = float(value)
    if len(targets) > 1:
        raise TelemetryUnavailableError(Unavailable.MALFORMED, _several(targets))
    if not values:
        text = "no series; is the target up, is it scraped, and are these its labels?"
        raise TelemetryUnavailableError(Unavailable.NO_DATA, text)
    delay_s = asked_s - sampled_s
    if delay_s > lookback_s:
        text = f"the newest samples are {delay_s:.0f} s old, more than {lookback_s:g} s"
        raise TelemetryUnavailableError(Unavailable.NO_DATA, text)
    known = math.isfinite(delay_s)
    return Snapshot(
        values=values, delay_s=max(0.0, delay_s) if known else 0.0, names=frozenset(names)
    )


def _several(targets: set[Labels]) -> str:
    """What sets the targets apart that all match."""
    all_of = set.intersection(*map(set, targets))
    apart = sorted(
        ",".join(f'{name}="{value}"' for name, value in labels if (name, value) not in all_of)
        for labels in targets
    )
    shown = " and ".join(f"{{{labels}}}" for labels in apart[:_MOST_NAMED])
    more = f" and {len(apart) - _MOST_NAMED} more" if len(apart) > _MOST_NAMED else ""
    return f"{len(apart)} targets match: {shown}{more}; name one in `match`"

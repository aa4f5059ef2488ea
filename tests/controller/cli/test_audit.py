"""`trimtab audit`: what a person on call reads of the decisions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.policy_conformance import PLAN, telemetry
from tests.controller.daemon.audit_samples import STATIC, SampleLoop
from trimtab.agents.audit_entry import (
    command_entry,
    decision_entry,
    interrupted_entry,
    lost_entry,
    swap_entry,
)
from trimtab.agents.audit_read import read_audit
from trimtab.agents.verdict import GuardMode, GuardReason, Verdict
from trimtab.controller.cli.app import main
from trimtab.controller.cli.audit import followed
from trimtab.controller.cli.audit_rows import compared, line
from trimtab.controller.daemon.audit_log import AuditLog

MOVED = replace(STATIC, weights=(8800.0, 50.0, 15.0, 1.0), prefill_budget_tokens=5760)
Shown = Callable[..., list[str]]


class Writer:
    """A log whose decisions the test words."""

    def __init__(self, folder: Path, engine: str = "a", begin_s: float = 1.8e9) -> None:
        self.log = AuditLog(folder, engine=engine, threaded=False, unix_s=lambda: begin_s)
        self.number, self.begin_s = 0, begin_s
        self.loop = SampleLoop(audit=self.log, engine=engine)

    def decide(self, *reasons: GuardReason, **changes: object) -> None:
        self.number += 1
        facts = {
            "mode": GuardMode.ACTIVE, "reasons": reasons, "apply": STATIC, "proposed": STATIC,
            "exposure": 0.5, "fell_back": False,
        }  # fmt: skip
        told = {"contact": "controlling", "applied": STATIC, "policy_error": ""}
        for name in told:
            told[name] = changes.pop(name, told[name])
        self.log.append(
            decision_entry(
                number=self.number,
                unix_s=self.begin_s + 2 * self.number,
                static=STATIC,
                telemetry=telemetry(PLAN, age_s=changes.pop("age_s", 0.4)),
                fresh=True,
                verdict=Verdict(**{**facts, **changes}),
                **told,
            )
        )


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "audit")


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The rows that the command prints, without the header."""

    def show(*words: object) -> list[str]:
        assert main(["audit", str(tmp_path / "audit"), *map(str, words)]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    return show


def test_a_row_says_when_how_what_and_why(writer: Writer, shown: Shown) -> None:
    writer.decide(GuardReason.SLEW, apply=MOVED, applied=MOVED, exposure=0.25)
    row = shown()[-1]
    assert row.startswith("2027-01-15 08:00:02       1 active  25 %   0.4 s  ")
    assert "weight T2 x3, weight T1 -50 %, prefill budget -10 %" in row
    assert row.endswith("greater change than one interval allows")


def test_equal_ticks_are_one_row(writer: Writer, shown: Shown) -> None:
    for _ in range(30):
        writer.decide()
    writer.decide(GuardReason.STALE, age_s=9.0)
    rows = shown()
    assert len(rows) == 3
    assert "static (30 ticks, to 08:01:00)" in rows[1]
    assert "too old to act on" in rows[2]


def test_trouble_is_said_in_words(writer: Writer, shown: Shown) -> None:
    writer.decide(GuardReason.POLICY_FAILED, policy_error="no answer within 1 s")
    writer.decide(contact="no_control", applied=None)
    writer.decide(applied=MOVED)
    writer.decide(contact="unheard_of")
    rows = shown()[1:]
    assert "the policy gave no answer that can be used; no answer within 1 s" in rows[0]
    assert "the control socket does not answer; the engine did not answer" in rows[1]
    assert "the engine applied otherwise: weight T2 x3" in rows[2]
    assert "unheard_of" in rows[3]


def test_what_was_said_to_the_loop_is_shown(writer: Writer, shown: Shown) -> None:
    log = writer.log
    log.append(command_entry(unix_s=1.8e9, command="mode:active", by="ann over HTTP"))
    log.append(swap_entry(unix_s=1.8e9, policy="bundle:live", bundle_digest="ab" * 32))
    log.append(interrupted_entry(unix_s=1.8e9, reason="the lease had run out"))
    log.append(lost_entry(unix_s=1.8e9, entries=1200, reason="disk full"))
    text = "\n".join(shown())
    for words in (
        "the daemon began: reactive, mode active, plan default",
        "mode:active by ann over HTTP",
        "another policy: bundle:live abababababab",
        "gone back to static: the lease had run out",
        "1,200 entries are missing here: disk full",
    ):
        assert words in text


def test_rows_are_chosen_by_reason_time_and_number(writer: Writer, shown: Shown) -> None:
    for number in range(1, 21):
        writer.decide(*([GuardReason.STALE] if number % 5 == 0 else []), exposure=number / 100)
    assert len(shown("--reasons", "stale")) == 4
    assert len(shown("--reasons", "slew,stale")) == 4
    assert len(shown("--reasons", "any")) == 4
    assert shown("--reasons", "slew") == []
    assert [row.split()[2] for row in shown("--last", 3)] == ["18", "19", "20"]
    assert len(shown("--since", "2027-01-15T08:00:31")) == 5
    assert len(shown("--last", 0)) == 21


def test_engines_are_told_apart(tmp_path: Path, shown: Shown) -> None:
    for place, name in enumerate(("a", "b")):
        other = Writer(tmp_path / "audit", name, 1.8e9 + place)
        other.decide()
        other.decide(GuardReason.STALE)
    rows = shown()
    assert [row.split()[2] for row in rows if "*" not in row] == ["a", "b", "a", "b"]
    assert len(shown("--engine", "b")) == 3


def test_the_newest_rows_come_from_many_files(tmp_path: Path, shown: Shown) -> None:
    log = AuditLog(tmp_path / "audit", engine="a", threaded=False, most_bytes=30_000)
    SampleLoop(audit=log).tick(100)
    log.close()
    assert len(list((tmp_path / "audit").iterdir())) > 4
    rows = shown()
    assert "the daemon began" in rows[0]
    assert len(rows) == 5
    assert "(97 ticks, to 08:01:40)" in rows[-1]
    assert shown("--last", 1) == rows[-1:]


def test_everything_is_written_for_machines(writer: Writer, shown: Shown, tmp_path: Path) -> None:
    writer.decide(GuardReason.SLEW, apply=MOVED)
    result = tmp_path / "rows.json"
    shown("--json", result)
    begun, entry = json.loads(result.read_text())["entries"]
    assert (begun["kind"], begun["policy"]) == ("start", "reactive")
    assert (entry["number"], entry["reasons"], entry["asked"]["weights.T2"]) == (1, ["slew"], 15.0)
    assert entry["attainment"]["T0"] is None


def test_a_damaged_line_is_a_row_and_not_the_end(writer: Writer, shown: Shown) -> None:
    for _ in range(3):
        writer.decide()
    (path,) = writer.log._file._folder.iterdir()
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"telemetry":{"engine":[2.0', '"telemetry":{"engine":[3.0')
    path.write_text("".join(lines))
    rows = shown()
    assert len(rows) == 4
    assert "line 3: digest" in rows[2]


def test_what_is_written_next_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    log = AuditLog(folder, engine="a", threaded=False, most_bytes=10_000)
    loop = SampleLoop(audit=log)
    loop.tick(3)
    looks = 0

    def wait(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt
        loop.tick(5)

    seen: list[str] = []
    rows = followed([folder], read_audit([folder]), engine=None, wait=wait)
    with pytest.raises(KeyboardInterrupt):
        seen.extend(line(row, with_engine=False) for row in rows)
    ticks = []
    rows = followed([folder], [], engine=None, wait=lambda seconds: None)
    for row in rows:
        ticks.append(row.number)
        if row.number == 13:
            break
    assert [number for number in ticks if number] == list(range(1, 14))
    assert len(list(folder.iterdir())) > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reasons", "stael"], 'did you mean "stale"?'),
        (["--since", "yesterday"], "--since"),
        (["--last", "-1"], "--last: -1, must be at least 0"),
        (["--follow", "--json", "x.json"], "left out with --follow"),
        (["--engine", "b"], "--engine"),
    ],
)
def test_wrong_usage_is_said(
    writer: Writer, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["audit", str(tmp_path / "audit"), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "no audit files" in capsys.readouterr().err


def test_changes_are_words_about_static() -> None:
    assert compared(STATIC, STATIC, PLAN) == "static"
    draft = replace(STATIC, draft_tokens=(3, 0, 0, 0), max_running=(7, *STATIC.max_running[1:]))
    assert compared(draft, STATIC, PLAN) == "draft T0 3, running T0 7"
    assert compared(STATIC, draft, PLAN).endswith("running T0 without a cap")
    all_of_it = replace(MOVED, slack_fraction=0.9, prefill_shares=(0.1, 0.2, 0.3, 0.4))
    assert compared(all_of_it, STATIC, PLAN).endswith(", 4 more")

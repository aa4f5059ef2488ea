"""Recorded decisions decided again: by which policy, what differs, what another one wished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents.bundles import random_bundle
from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.audit_entry import (
    AuditError,
    decision_entry,
    encode_verdict,
    start_entry,
    swap_entry,
    text_of,
)
from trimtab.agents.audit_read import read_audit
from trimtab.agents.bundle import write_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.memory import remember
from trimtab.agents.registry import SHIPPED_BUNDLE
from trimtab.agents.verdict import GuardMode
from trimtab.controller.cli.app import main
from trimtab.controller.daemon.audit_log import AuditLog
from trimtab.engine_bridge.allocation import Allocation
from trimtab.training.whatif.audit_policies import RecordedPolicies, bare_policy
from trimtab.training.whatif.audit_replay import RunReplay, replay

STATIC = Allocation.static(PLAN)
SETTINGS = GuardSettings(probation_s=4.0, ramp_s=4.0, novel_fraction=1.0)


@dataclass(kw_only=True)
class Recorder:
    """Records a guard over a policy that is named as the daemon would name it."""

    folder: Path
    policy: str
    number: int = 0
    applied: Allocation = STATIC
    guard: Guard = field(init=False)
    log: AuditLog = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(bare_policy(self.policy), SETTINGS)
        self.guard.reset(PLAN, 0)
        self.log = AuditLog(self.folder, engine="a", threaded=False)
        self.log.begin(self.head)

    @property
    def digest(self) -> str | None:
        policy = self.guard.policy
        return policy.bundle.digest if isinstance(policy, LearnedPolicy) else None

    def head(self) -> Mapping[str, object]:
        return start_entry(
            unix_s=1.8e9,
            engine="a",
            plan=PLAN,
            policy=self.policy,
            bundle_digest=self.digest,
            settings=SETTINGS,
            mode=GuardMode.ACTIVE,
            seed=0,
            memory=remember(self.guard),
        )

    def swap(self, policy: str) -> None:
        self.policy = policy
        self.guard.policy = bare_policy(policy)
        self.guard.policy.reset(PLAN, 0)
        self.guard.interrupted()
        self.log.append(swap_entry(unix_s=1.8e9, policy=policy, bundle_digest=self.digest))

    def ticks(self, times: int) -> Recorder:
        for _ in range(times):
            self.number += 1
            tiers = [
                tier_telemetry(arrivals=40, attainment=0.9, attainment_samples=40, running=place)
                for place in range(len(PLAN.tiers))
            ]
            seen = telemetry(PLAN, tiers, time_s=2.0 * self.number, applied=self.applied)
            verdict = self.guard.decide(seen)
            self.applied = verdict.apply
            self.log.append(
                decision_entry(
                    number=self.number,
                    unix_s=1.8e9 + self.number,
                    static=STATIC,
                    telemetry=seen,
                    fresh=True,
                    verdict=verdict,
                    applied=verdict.apply,
                    contact="controlling",
                )
            )
        return self

    def close(self) -> Path:
        self.log.close()
        return self.folder


def replayed(folder: Path, *given: str) -> RunReplay:
    (run,) = read_audit([folder])
    known = RecordedPolicies(given)
    return replay(run, known, known.given)


def edit(folder: Path, number: int, **changes: object) -> None:
    """Change the entry of one decision."""
    (path,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for entry in lines:
        if entry.get("number") == number:
            entry.update(changes)
    path.write_text("".join(text_of(entry) + "\n" for entry in lines))


@pytest.fixture
def bundles(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with bundles."""
    folders = tmp_path / "one", tmp_path / "two"
    for seed, folder in enumerate(folders):
        write_bundle(random_bundle(PLAN, seed, 0.3), folder)
    return folders


@pytest.mark.parametrize("policy", ["static", "reactive", "learned"])
def test_policies_by_name_decide_the_same_again(tmp_path: Path, policy: str) -> None:
    found = replayed(Recorder(folder=tmp_path / "audit", policy=policy).ticks(20).close())
    assert (found.replayed, found.equal, found.difference) == (20, 20, None)


def test_bundles_are_found_by_digest_through_a_swap(
    tmp_path: Path, bundles: tuple[Path, Path]
) -> None:
    one, two = bundles
    recorder = Recorder(folder=tmp_path / "audit", policy=f"bundle:{one}").ticks(10)
    recorder.swap(f"bundle:{two}")
    found = replayed(recorder.ticks(10).close())
    assert (found.replayed, found.equal) == (20, 20)
    assert recorder.applied != STATIC, "the bundle never acted"


def test_a_bundle_that_was_pulled_over_is_found_among_its_versions(
    tmp_path: Path, bundles: tuple[Path, Path]
) -> None:
    one, two = bundles
    link, versions = tmp_path / "live" / "policy", tmp_path / "live" / "policy.versions"
    versions.mkdir(parents=True)
    shutil.copytree(one, versions / "aaaa")
    link.symlink_to("policy.versions/aaaa")
    folder = Recorder(folder=tmp_path / "audit", policy=f"bundle:{link}").ticks(10).close()
    shutil.copytree(two, versions / "bbbb")
    link.unlink()
    link.symlink_to("policy.versions/bbbb")
    shutil.rmtree(one)
    assert replayed(folder).equal == 10


def test_a_bundle_that_is_gone_can_be_given(tmp_path: Path, bundles: tuple[Path, Path]) -> None:
    place = tmp_path / "deep" / "inside"
    shutil.copytree(bundles[0], place)
    folder = Recorder(folder=tmp_path / "audit", policy=f"bundle:{place}").ticks(10).close()
    kept = tmp_path / "elsewhere" / "kept"
    kept.parent.mkdir()
    place.rename(kept)
    with pytest.raises(AuditError) as caught:
        replayed(folder)
    assert "bundle_digest" in str(caught.value)
    assert "--policy bundle:FOLDER" in str(caught.value)
    assert replayed(folder, f"bundle:{kept}").equal == 10


def test_before_a_first_bundle_the_static_plan_was_the_policy(tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path / "audit", policy="static")
    recorder.log.close()
    shutil.rmtree(recorder.folder)
    recorder.policy = f"bundle:{tmp_path / 'nothing-yet'}"
    recorder.log = AuditLog(recorder.folder, engine="a", threaded=False)
    recorder.log.begin(recorder.head)
    assert replayed(recorder.ticks(5).close()).equal == 5


def test_the_first_difference_is_named_with_both_values(tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path / "audit", policy="reactive").ticks(20)
    later = recorder.guard.decide(telemetry(PLAN, time_s=42.0, applied=recorder.applied))
    folder = recorder.close()
    wrong = replace(later, apply=replace(later.apply, weights=(8800.0, 99.0, 4.0, 1.0)))
    edit(folder, 19, verdict=encode_verdict(wrong, STATIC))
    edit(folder, 20, verdict=encode_verdict(wrong, STATIC))
    result = replayed(folder)
    found = result.difference
    assert found is not None
    assert (found.number, found.knob, found.recorded) == (19, "apply.weights.T1", 99.0)
    assert found.replayed not in (99.0, None)
    assert found.where.endswith("line 20")
    assert (result.replayed, result.equal) == (20, 18)


def test_lines_that_were_taken_out_are_not_decided_again(tmp_path: Path) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="reactive").ticks(20).close()
    (path,) = folder.iterdir()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:8] + lines[9:]))
    found = replayed(folder)
    assert (found.replayed, found.equal, found.skipped) == (7, 7, 12)


def test_another_policy_is_asked_in_open_loop(tmp_path: Path) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="static").ticks(20).close()
    (other,) = replayed(folder, "reactive").others
    assert (other.policy, other.decisions, other.failed) == ("reactive", 20, 0)
    assert other.elsewhere > 0
    assert other.asked_distance_mean == 0 < other.distance_mean
    weight = other.knobs["weights.T3"]
    assert weight.asked == weight.static > weight.wished


def test_a_policy_that_gives_nothing_is_counted(tmp_path: Path) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="static").ticks(5).close()
    (run,) = read_audit([folder])

    class Broken(type(bare_policy("static"))):  # type: ignore[misc]
        def _act(self, seen: Any, plan: Any) -> Any:
            raise ValueError("no such number")

    (other,) = replay(run, RecordedPolicies(), {"broken": Broken()}).others
    assert (other.decisions, other.failed, other.elsewhere) == (5, 5, 0)


def test_the_command_says_that_all_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="learned").ticks(20).close()
    result = tmp_path / "result.json"
    assert main(["whatif", "--audit", str(folder), "--json", str(result)]) == 0
    out = capsys.readouterr().out
    assert "20 decisions replayed, 20 equal bit for bit" in out
    content = json.loads(result.read_text())
    assert (content["replayed"], content["equal"]) == (20, 20)
    assert content["runs"][0]["difference"] is None


def test_the_command_fails_at_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(folder=tmp_path / "audit", policy="reactive").ticks(20)
    folder = recorder.close()
    (path,) = folder.iterdir()
    text = path.read_text()
    changed = text.replace('"exposure":1.0', '"exposure":0.5', 1)
    assert changed != text
    path.write_text(changed)
    result = tmp_path / "result.json"
    assert main(["whatif", "--audit", str(folder), "--json", str(result)]) == 1
    captured = capsys.readouterr()
    assert "exposure: 0.5 was recorded, 1.0 is decided now; 1 of 20 differ" in captured.err
    assert json.loads(result.read_text())["runs"][0]["difference"]["knob"] == "exposure"


def test_the_command_tells_what_another_policy_wished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="static").ticks(20).close()
    assert main(["whatif", "--audit", str(folder), "--policy", "reactive"]) == 0
    out = capsys.readouterr().out
    assert "reactive instead would have asked for something else" in out
    assert "weights.T3" in out
    assert "the telemetry would have been another one" in out


def test_a_bundle_given_to_find_the_recorded_one_is_no_other_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="learned").ticks(5).close()
    assert main(["whatif", "--audit", str(folder), "--policy", f"bundle:{SHIPPED_BUNDLE}"]) == 0
    assert "instead would have" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--audit", "{audit}", "--seeds", "2"], "--seeds: must be left out beside --audit"),
        (["--audit", "{audit}", "--trace", "x"], "--trace: must be left out beside --audit"),
        (["--audit", "{audit}", "--policy", "recative"], 'did you mean "reactive"?'),
        (["--audit", "nowhere"], "nowhere: "),
        ([], "--trace: must be given"),
    ],
)
def test_wrong_usage_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    folder = Recorder(folder=tmp_path / "audit", policy="static").ticks(1).close()
    words = [word.format(audit=folder) for word in arguments]
    assert main(["whatif", *words]) == 2
    assert said in capsys.readouterr().err

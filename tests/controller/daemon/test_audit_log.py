"""The audit log on disks that are full, gone, forbidden or shared, and in killed processes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.policy_conformance import PLAN, telemetry
from tests.controller.daemon.audit_samples import SampleLoop
from trimtab.agents.audit_entry import lost_entry
from trimtab.agents.audit_read import read_audit
from trimtab.controller.daemon.audit_file import Line
from trimtab.controller.daemon.audit_log import AuditLog, NoAudit
from trimtab.engine_bridge.plan import Plan
from trimtab.training.whatif.audit_policies import RecordedPolicies
from trimtab.training.whatif.audit_replay import RunReplay, replay

ROOT = Path(__file__).resolve().parents[3]


def new_log(folder: Path, **options: Any) -> AuditLog:
    return AuditLog(folder, engine="a", **{"threaded": False, **options})


def kinds(folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for run in read_audit([folder]):
        found.update(entry["kind"] for _, entry in run.entries())
    return found


def numbers(folder: Path) -> list[int]:
    return [
        entry["number"]
        for run in read_audit([folder])
        for _, entry in run.entries()
        if entry["kind"] == "decision"
    ]


def replays(folder: Path) -> list[RunReplay]:
    found = [replay(run, RecordedPolicies()) for run in read_audit([folder])]
    for one in found:
        assert one.difference is None, one.difference
    return found


def child_command(body: str, folder: Path) -> list[str]:
    """The command that runs lines in a process of their own, with `folder` at hand."""
    head = """
        import os, resource, sys
        from pathlib import Path
        from tests.controller.daemon.audit_samples import SampleLoop
        from trimtab.agents.audit_entry import own_versions
        from trimtab.controller.daemon.audit_log import AuditLog
        folder = Path(sys.argv[1])
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body), str(folder)]


def in_child(body: str, folder: Path) -> str:
    """What the lines print."""
    done = subprocess.run(
        child_command(body, folder), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_written_is_read_and_decided_again(tmp_path: Path) -> None:
    log = new_log(tmp_path / "audit")
    SampleLoop(audit=log).tick(30)
    log.close()
    (found,) = replays(tmp_path / "audit")
    assert (found.replayed, found.equal, log.lost, log.failure) == (30, 30, 0, "")


def test_nobody_else_can_read_it(tmp_path: Path, open_umask: None) -> None:
    folder = tmp_path / "state" / "audit"
    log = new_log(folder, most_bytes=1)
    SampleLoop(audit=log).tick(3)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}


def test_it_holds_no_tenant(tmp_path: Path) -> None:
    plan = Plan.model_validate(
        {**PLAN.model_dump(), "tenants": {"sk-live-4711": {"tier": "T0", "share": 2}}}
    )
    log = new_log(tmp_path)
    SampleLoop(audit=log, plan=plan).tick(2)
    log.close()
    (path,) = tmp_path.iterdir()
    assert "4711" not in path.read_text()
    assert f'"plan_digest":"{plan.digest}"' in path.read_text()
    assert replays(tmp_path)[0].equal == 2


def test_files_turn_over_and_the_oldest_go(tmp_path: Path) -> None:
    log = new_log(tmp_path, most_bytes=30_000, most_files=4)
    SampleLoop(audit=log).tick(200)
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert names[-1] >= "a-00000008.jsonl"
    assert all(path.stat().st_size < 35_000 for path in tmp_path.iterdir())
    found = numbers(tmp_path)
    assert found == list(range(found[0], 201))
    (one,) = replays(tmp_path)
    assert one.replayed == one.equal == len(found)


def test_a_restart_goes_on_in_the_newest_file(tmp_path: Path) -> None:
    for start in range(3):
        log = new_log(tmp_path, unix_s=lambda start=start: 1.8e9 + start)
        SampleLoop(audit=log).tick(5)
        log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a-00000001.jsonl"]
    assert [one.equal for one in replays(tmp_path)] == [5, 5, 5]


def test_two_daemons_at_once_write_files_of_their_own(tmp_path: Path) -> None:
    one = new_log(tmp_path, unix_s=lambda: 1.0)
    first = SampleLoop(audit=one)
    first.tick(5)
    other = new_log(tmp_path, unix_s=lambda: 2.0)
    second = SampleLoop(audit=other)
    for _ in range(5):
        first.tick()
        second.tick()
    one.close()
    other.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [found.equal for found in replays(tmp_path)] == [10, 5]


def test_engines_share_a_folder(tmp_path: Path) -> None:
    names = ("a", "a-00000001", "ä/../b")
    logs = [AuditLog(tmp_path, engine=name, threaded=False, most_files=1) for name in names]
    for name, log in zip(names, logs, strict=True):
        SampleLoop(audit=log, engine=name).tick(3)
        log.close()
    assert {run.engine for run in read_audit([tmp_path])} == set(names)
    assert {path.parent for path in tmp_path.rglob("*.jsonl")} == {tmp_path}


FULL = """
    log = AuditLog(folder, engine="a", threaded=False, most_waiting={waiting})
    loop = SampleLoop(audit=log)
    loop.tick(5)
    size = sum(path.stat().st_size for path in folder.iterdir())
    # Room for two and a half entries more: the third is cut in the middle by the kernel.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3000, resource.RLIM_INFINITY))
    loop.tick(20)
    assert log.failure, "nothing failed"
    print(log.failure)
    print(log.waiting, log.lost)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    loop.tick(5)
    assert not log.failure, log.failure
    log.close()
    print(log.lost)
"""


def test_a_full_disk_costs_nothing_if_it_is_mended_in_time(tmp_path: Path) -> None:
    said = in_child(FULL.format(waiting=1000), tmp_path).splitlines()
    assert "a-00000001.jsonl: File too large" in said[0] or "No space left" in said[0]
    assert said[-1] == "0"
    assert numbers(tmp_path) == list(range(1, 31))
    assert replays(tmp_path)[0].equal == 30


def test_what_a_full_disk_costs_is_counted_and_the_rest_decided_again(tmp_path: Path) -> None:
    said = in_child(FULL.format(waiting=10), tmp_path).splitlines()
    lost = int(said[-1])
    assert 0 < lost < 20
    found = numbers(tmp_path)
    assert len(found) == 30 - lost
    (entry,) = (
        entry
        for run in read_audit([tmp_path])
        for _, entry in run.entries()
        if entry["kind"] == "lost"
    )
    assert entry["entries"] == lost
    (one,) = replays(tmp_path)
    # The first decision after the gap has no memory before it; it is written before that memory.
    assert one.skipped == 1
    assert one.equal == one.replayed == 30 - lost - 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_without_space_left(small_disk: Path) -> None:
    folder = small_disk / "audit"
    log = new_log(folder)
    loop = SampleLoop(audit=log)
    loop.tick(3)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(1 << 20))
    loop.tick(20)
    assert "No space left" in log.failure
    filler.unlink()
    loop.tick(3)
    assert (log.failure, log.lost) == ("", 0)
    log.close()
    assert numbers(folder) == list(range(1, 27))


def test_a_full_disk_at_a_new_file_costs_no_old_one(small_disk: Path) -> None:
    """A new file for each attempt would push out all that was kept."""
    folder = small_disk / "audit"
    log = new_log(folder, most_bytes=20_000, most_files=100)
    loop = SampleLoop(audit=log)
    # Until the next decision ends its file, and still inside of the last page that the file has.
    before, size = 0, 0
    while not 20_000 <= 2 * size - before <= 20_400:
        before = size
        loop.tick()
        size = log._file.size
        assert loop.number < 300, "no decision ended a file inside of its last page"
    kept = len(list(folder.iterdir()))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(1 << 20))
    loop.tick(30)
    assert "No space left" in log.failure
    assert log.waiting == 30
    assert len(list(folder.iterdir())) == kept + 1


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    log = new_log(folder)
    loop = SampleLoop(audit=log)
    loop.tick(5)
    shutil.rmtree(folder)
    loop.tick(5)
    log.close()
    assert log.lost == 0
    assert numbers(folder) == [6, 7, 8, 9, 10]
    (found,) = replays(folder)
    # The first one after it was written before what was remembered.
    assert (found.skipped, found.equal) == (1, 4)


def test_a_file_that_was_moved_away_is_followed_by_another(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    loop = SampleLoop(audit=log)
    loop.tick(3)
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "kept.old")
    loop.tick(3)
    log.close()
    assert numbers(tmp_path) == [4, 5, 6]


FORBIDDEN = """
    if os.getuid() == 0:
        # Root may do everything. What is imported late must come before.
        own_versions()
        os.setuid(65534)
    log = AuditLog(folder / "audit", engine="a", threaded=False, most_bytes=10_000)
    loop = SampleLoop(audit=log)
    loop.tick(2)
    (folder / "audit").chmod(0)
    loop.tick(40)
    print(log.failure)
    (folder / "audit").chmod(0o700)
    loop.tick(2)
    assert not log.failure, log.failure
    log.close()
    print(log.lost)
"""


def test_lost_permissions_are_waited_out() -> None:
    # Not under tmp_path, whose parents are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        said = in_child(FORBIDDEN, folder).splitlines()
        assert "Permission denied" in said[0]
        assert said[1] == "0"
        assert numbers(folder / "audit") == list(range(1, 45))
        assert replays(folder / "audit")[0].equal == 44


def test_a_failure_is_said_once_and_its_end_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "audit"
    blocked.write_text("a file where the folder should be")
    log = new_log(blocked)
    loop = SampleLoop(audit=log)
    with caplog.at_level(logging.WARNING, "trimtab.audit"):
        loop.tick(5)
        blocked.unlink()
        loop.tick(5)
    assert len(caplog.messages) == 2
    assert "written again" in caplog.messages[1]
    assert numbers(blocked) == list(range(1, 11))


def test_a_fault_that_is_none_of_the_disks_is_waited_out_too(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    write, faults = log._file.write, iter(range(3))

    def write_or_fail(line: Line) -> None:
        if next(faults, None) is not None:
            raise ValueError("I/O operation on closed file")
        write(line)

    log._file.write = write_or_fail  # type: ignore[method-assign]
    loop = SampleLoop(audit=log)
    assert "ValueError: I/O operation on closed file" in log.failure
    loop.tick(5)
    assert (log.failure, log.lost) == ("", 0)
    assert numbers(tmp_path) == list(range(1, 6))


KILLED = """
    log = AuditLog(folder, engine="a")
    loop = SampleLoop(audit=log)
    while True:
        loop.tick()
        if loop.number == 300:
            print("writing", flush=True)
        while log.waiting > 3:
            os.sched_yield()
"""


def test_a_kill_in_the_middle_costs_half_a_line_at_most(tmp_path: Path) -> None:
    with subprocess.Popen(
        child_command(KILLED, tmp_path), cwd=ROOT, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        os.kill(child.pid, signal.SIGKILL)
    found = numbers(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 290
    log = new_log(tmp_path)
    SampleLoop(audit=log).tick(3)
    log.close()
    assert [one.equal for one in replays(tmp_path)] == [len(found), 3]


def test_half_a_line_is_noted_and_cut_off_by_the_next_start(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    SampleLoop(audit=log).tick(3)
    log.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"decision","number":4,"uni')
    (run,) = read_audit([tmp_path])
    assert run.torn == (str(path),)
    assert numbers(tmp_path) == [1, 2, 3]
    log = new_log(tmp_path)
    SampleLoop(audit=log).tick(1)
    log.close()
    assert path.read_bytes().startswith(whole + b'{"kind":"start"')


def test_a_hung_disk_costs_the_loop_nothing(tmp_path: Path) -> None:
    """The write itself hangs, as on a network disk that went away."""
    log = AuditLog(tmp_path, engine="a", most_waiting=20)
    mended, write = threading.Event(), log._file.write
    log._file.write = lambda line: (mended.wait(60), write(line))[1]  # type: ignore[method-assign]
    loop = SampleLoop(audit=log)
    loop.tick(100)
    assert log.lost > 0
    mended.set()
    log.close(60)
    assert log.lost == 100 - len(numbers(tmp_path))


def test_the_thread_writes_everything_before_it_ends(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, engine="a", most_bytes=50_000)
    loop = SampleLoop(audit=log)
    for _ in range(20):
        loop.tick(10)
        while log.waiting:
            os.sched_yield()
    log.close()
    assert numbers(tmp_path) == list(range(1, 201))
    assert len(list(tmp_path.iterdir())) >= 4
    assert replays(tmp_path)[0].equal == 200


def test_an_entry_without_a_json_form_is_lost_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = new_log(tmp_path)
    loop = SampleLoop(audit=log)
    loop.tick(2)
    log.append({"kind": "command", "unix_s": 1.0, "command": object(), "by": ""})
    loop.tick(3)
    log.close()
    assert log.lost == 1
    assert "no JSON form" in caplog.text
    assert kinds(tmp_path)["lost"] == 1
    assert replays(tmp_path)[0].equal == 4


def test_after_a_call_that_was_not_recorded_it_goes_on_from_what_is_remembered(
    tmp_path: Path,
) -> None:
    log = new_log(tmp_path)
    loop = SampleLoop(audit=log)
    loop.tick(3)
    loop.guard.decide(telemetry(PLAN, time_s=7.0))
    log.append(lost_entry(unix_s=1.8e9, entries=1, reason="a fault of Trimtab"))
    loop.tick(3)
    log.close()
    (found,) = replays(tmp_path)
    assert (found.replayed, found.equal, found.skipped) == (5, 5, 1)


def test_what_could_not_be_written_by_the_end_is_lost(tmp_path: Path) -> None:
    blocked = tmp_path / "audit"
    blocked.write_text("")
    log = new_log(blocked)
    SampleLoop(audit=log).tick(4)
    log.close()
    assert log.lost == 5


def test_no_audit_keeps_nothing() -> None:
    audit = NoAudit()
    SampleLoop(audit=audit).tick(2)
    audit.close()
    assert (audit.lost, audit.failure) == (0, "")


def test_lines_are_plain_json(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    SampleLoop(audit=log).tick(2)
    log.close()
    (path,) = tmp_path.iterdir()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    for text in path.read_text().splitlines():
        assert isinstance(json.loads(text, parse_constant=refuse), dict)

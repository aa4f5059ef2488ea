from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trimtab.controller.web.token import (
    SHORTEST,
    TokenError,
    check_token,
    own_token,
    read_token,
)


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    token = own_token(folder, {})
    assert len(token) >= SHORTEST
    assert own_token(folder, {}) == token
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert own_token(tmp_path / "other", {}) != token


def test_the_environment_comes_first_and_leaves_no_file(tmp_path: Path) -> None:
    given = {"TRIMTAB_DAEMON_TOKEN": "from-the-environment"}
    assert own_token(tmp_path, given) == "from-the-environment"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "short", "with spaces in it all over", "x" * 20 + "\x00"])
def test_a_token_that_can_be_guessed_or_broken_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenError, match="openssl"):
        own_token(tmp_path, {"TRIMTAB_DAEMON_TOKEN": text})


def test_a_token_that_others_can_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 32)
    path.chmod(0o640)
    with pytest.raises(TokenError, match=r"mode 0640.*chmod 600"):
        read_token(path)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"No such file.*TRIMTAB_DAEMON_TOKEN"):
        read_token(tmp_path / "none")
    path = tmp_path / "token"
    path.write_bytes(b"\xff" * 32)
    path.chmod(0o600)
    with pytest.raises(TokenError, match="ASCII"):
        read_token(path)


def test_a_check_makes_nothing_and_says_what_a_start_would_meet(tmp_path: Path) -> None:
    check_token(tmp_path / "state" / "deeper", {})
    assert not list(tmp_path.iterdir())
    with pytest.raises(TokenError, match="openssl"):
        check_token(tmp_path, {"TRIMTAB_DAEMON_TOKEN": "short"})
    (tmp_path / "file").write_text("")
    with pytest.raises(TokenError, match=r"folder that can be written to.*TRIMTAB_DAEMON_TOKEN"):
        check_token(tmp_path / "file" / "state", {})
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(TokenError, match="chmod 600"):
        check_token(tmp_path, {})
    (tmp_path / "token").chmod(0o600)
    check_token(tmp_path, {})

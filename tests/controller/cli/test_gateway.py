"""`trimtab gateway` before it serves: what it says of its settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trimtab.controller.cli.app import main

ONE_ENGINE = 'engines: {a: {url: "http://127.0.0.1:9", models: [m]}}\n'


def test_check_reads_everything_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(ONE_ENGINE)
    assert main(["gateway", "--config", str(config), "--check"]) == 0
    assert "1 engine(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("engine: {}\n", ["line 1", "engines"]),
        (ONE_ENGINE + "admission: none.yaml\n", ["none.yaml"]),
        ("- no mapping\n", ["mapping", "gateway.md"]),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]
) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(content)
    assert main(["gateway", "--config", str(config), "--check"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for word in words:
        assert word in line


def test_an_address_that_is_taken_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvloop")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = tmp_path / "gateway.yaml"
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"listen: {listen}\n{ONE_ENGINE}")
        assert main(["gateway", "--config", str(config)]) == 2
    assert listen in capsys.readouterr().err

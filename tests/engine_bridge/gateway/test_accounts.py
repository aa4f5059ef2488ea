"""What requests took, from the gateway to `trimtab usage`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.engine_bridge.gateway.gateway_parts import run, running_gateway, start_engine
from tests.engine_bridge.gateway.test_proxy import bearer, keys_file
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.gateway.account_sums import AccountsError, sum_accounts
from trimtab.engine_bridge.gateway.accounts import gpu_cost
from trimtab.training.tuning.plan_text import plan_text

SPEC = "h100:llama-3.1-8b-tp1"


def serve_some(folder: Path) -> Path:
    usage = folder / "usage"

    async def test() -> None:
        engine = await start_engine("a")
        keys = keys_file(folder, acme=("sk-acme", "T0"), crowd=("sk-crowd", "T3"))
        engines = {"a": {"url": engine.url, "step_times": SPEC}}
        async with running_gateway(folder, engines, keys=keys, usage_dir=str(usage)) as gateway:
            for tokens in (3, 4):
                prompt = f"one two three tokens={tokens}"
                answer = await gateway.ask(prompt, headers=bearer("sk-acme"))
                assert answer.status_code == 200
            messages = [{"role": "user", "content": "tokens=5"}]
            body = {"model": "m", "messages": messages, "stream": True}
            async with gateway.client.stream(
                "POST", "/v1/chat/completions", json=body, headers=bearer("sk-crowd")
            ) as stream:
                await stream.aread()
            refused = await gateway.ask("x", headers=bearer("sk-crowd"), model="no")
            assert refused.status_code == 404
            await gateway.ask("nobody's")
        await engine.kill()

    run(test())
    return usage


def test_accounts_say_what_each_request_took(tmp_path: Path) -> None:
    before_s = time.time()
    (path,) = serve_some(tmp_path).glob("accounts-*.parquet")
    assert path.stat().st_mode & 0o777 == 0o600
    rows = pq.read_table(path).to_pylist()
    assert [row["tenant"] for row in rows] == ["acme", "acme", "crowd", "crowd"]
    first, _, streamed, refused = rows
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (4, 2, 3)
    assert streamed["output_tokens"] == 5
    assert first["outcome"] == "finished"
    assert (refused["outcome"], refused["code"]) == ("refused", "model_not_found")
    assert (refused["status"], refused["prompt_tokens"]) == (404, None)
    for row in rows:
        assert before_s - 1 < row["time_s"] < time.time()
    assert first["gpu_ms"] == pytest.approx(gpu_cost(get_engine_spec(SPEC))(4, 2, 3))
    assert refused["gpu_ms"] is None
    assert 0 < first["first_token_s"] <= first["request_s"]


def test_sums_add_up_by_every_grouping(tmp_path: Path) -> None:
    folder = serve_some(tmp_path)
    by_tenant = sum_accounts(folder, by="tenant")
    assert list(by_tenant) == ["acme", "crowd"]
    assert (by_tenant["acme"].requests, by_tenant["acme"].output_tokens) == (2, 7)
    assert (by_tenant["crowd"].finished, by_tenant["crowd"].refused) == (1, 1)
    for grouping in ("tier", "model", "engine", "day"):
        sums = sum_accounts(folder, by=grouping).values()
        assert sum(one.output_tokens for one in sums) == 12
        assert sum(one.gpu_ms for one in sums) == pytest.approx(
            sum(one.gpu_ms for one in by_tenant.values())
        )
    assert sum_accounts(folder, by="tenant", since_s=time.time() + 60) == {}
    assert sum_accounts(folder, by="tenant", until_s=time.time() - 3600) == {}


def test_the_command_prints_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = serve_some(tmp_path)
    out = tmp_path / "sums.json"
    assert main(["usage", str(folder), "--by", "tier", "--since", "1h", "--json", str(out)]) == 0
    assert "T0" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["by"] == "tier"
    assert found["sums"]["T0"]["output_tokens"] == 7
    for wrong in (["--by", "tenat"], ["--since", "yesterday"]):
        assert main(["usage", str(folder), *wrong]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_gpu_time_is_priced_by_the_plan_and_the_engines_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = serve_some(tmp_path), tmp_path / "sums.json"
    plan = tmp_path / "priced.yaml"
    plan.write_text(plan_text("default") + "\nengine: {cost_per_hour: 16}\n")
    engine = "h100:llama-3.1-70b-tp8"
    words = ["usage", str(folder), "--json", str(out), "--cost"]
    assert main([*words, "--plan", str(plan), "--engine", engine]) == 0
    assert "Compute at 2 USD an hour of one GPU" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["usd_per_gpu_hour"] == 2.0
    for one in found["sums"].values():
        assert one["compute_usd"] == pytest.approx(one["gpu_ms"] / 3.6e6 * 2.0)
    assert found["sums"]["acme"]["compute_usd"] > 0
    # Without a price in the plan it is the engine's own.
    assert main(words) == 0
    assert json.loads(out.read_text())["usd_per_gpu_hour"] == get_engine_spec(SPEC).cost_per_hour
    assert main(["usage", str(folder), "--plan", str(plan)]) == 2
    assert "--cost" in capsys.readouterr().err


def test_folders_without_accounts_say_so(tmp_path: Path) -> None:
    with pytest.raises(AccountsError, match="exists"):
        sum_accounts(tmp_path / "no", by="tenant")
    with pytest.raises(AccountsError, match="usage_dir"):
        sum_accounts(tmp_path, by="tenant")
    (tmp_path / "accounts-1.parquet").write_bytes(b"no parquet")
    with pytest.raises(AccountsError, match="readable"):
        sum_accounts(tmp_path, by="tenant")


def test_gpu_time_grows_with_what_is_asked_and_falls_with_what_is_cached() -> None:
    small, large = (
        gpu_cost(get_engine_spec(SPEC)),
        gpu_cost(get_engine_spec("h100:llama-3.1-70b-tp8")),
    )
    assert small(1000, 0, 10) < small(2000, 0, 10) < small(2000, 0, 100)
    assert small(2000, 1900, 10) < small(2000, 0, 10)
    assert large(1000, 0, 10) > 5 * small(1000, 0, 10)
    # 8B on one H100: a thousand tokens take some tens of milliseconds.
    assert 10 < small(1000, 0, 0) < 60


def test_no_clients_text_can_lose_the_accounts_of_others(tmp_path: Path) -> None:
    usage = tmp_path / "usage"

    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}, usage_dir=str(usage)) as gateway:
            assert (await gateway.ask()).status_code == 200
            for model in (r"half a pair \ud800", "x" * 100_000):
                raw = b'{"prompt":"x","model":"%b"}' % model.encode()
                answer = await gateway.client.post("/v1/completions", content=raw)
                assert answer.status_code == 404
        await engine.kill()

    run(test())
    (path,) = usage.glob("accounts-*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert [row["model"] for row in rows] == ["m", "half a pair ?", "x" * 256]

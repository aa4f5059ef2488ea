"""The page in a real browser, against the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.controller.web.browser import CHROMIUM, Browser
from tests.controller.web.states import (
    NOW_S,
    PLAN,
    TOKEN,
    FakeDaemon,
    decision,
    fresh_state,
    state,
)
from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.command import CommandKind
from trimtab.controller.daemon.state import Contact
from trimtab.controller.web.app import make_app
from trimtab.controller.web.serve import WebServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>&amp;"
PHONE = (360, 740)
DESK = (1280, 900)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon(state("a"), state("b"))


@pytest.fixture
def server(daemon: FakeDaemon) -> Iterator[WebServer]:
    running = WebServer(make_app(daemon, TOKEN), "127.0.0.1:0")
    running.start()
    yield running
    running.stop()


def look(
    browser: Browser, server: WebServer, size: tuple[int, int] = DESK, place: str = "/"
) -> None:
    browser.view(*size)
    browser.open(server.url + place)
    browser.wait_for("document.querySelectorAll('#about dd').length > 0")


def click(browser: Browser, selector: str) -> None:
    browser.js(f"document.querySelector({json.dumps(selector)}).click()")


def put(browser: Browser, selector: str, text: str) -> None:
    browser.js(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")


def test_the_first_sentence_says_how_it_stands(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    daemon.by_engine["a"] = state(last={"exposure": 0.6})
    look(browser, server)
    headline = browser.text("#headline").replace("\u00a0", " ")
    assert headline.startswith("✓ Controlling; learned policy at 60 % of its residual; data ")
    assert browser.js("document.title").startswith("✓ a")
    assert browser.errors == []


@pytest.mark.parametrize(
    ("stands", "glyph", "sentence"),
    [
        ({"contact": Contact.NO_TELEMETRY, "age_s": 14.0,
          "last": {"fell_back": True, "reasons": (GuardReason.STALE,)}},
         "✕", "Fell back to the static plan: the telemetry is too old to act on; data 15 s old"),
        ({"mode": GuardMode.HOLD}, "i", "Held by an operator: the last allocation stays"),
        ({"contact": Contact.STANDBY, "holder": "ops"}, "i",
         "Standing by: ops holds the engine's lease"),
        ({"contact": Contact.NO_CONTROL, "last": {"applied": None}}, "✕",
         "The engine's control socket does not answer"),
    ],
)  # fmt: skip
def test_trouble_is_said_in_words_and_by_a_sign(
    browser: Browser,
    server: WebServer,
    daemon: FakeDaemon,
    stands: dict[str, Any],
    glyph: str,
    sentence: str,
) -> None:
    daemon.by_engine["a"] = state(**stands)
    look(browser, server)
    assert browser.text("#headline").replace("\u00a0", " ").startswith(f"{glyph} {sentence}")
    assert browser.errors == []


def test_before_the_first_tick_nothing_is_known_and_nothing_fails(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    daemon.by_engine["a"] = fresh_state()
    look(browser, server)
    assert "Starting: the engine has not answered yet; no data" in browser.text("#headline")
    assert "No request judged lately" in browser.text("#tiers")
    assert browser.errors == []


def test_tiers_show_promise_attainment_and_allocation_beside_the_plan(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    low = (0.5, 1.0, 1.0, 1.0)
    daemon.by_engine["a"] = replace(
        state(), history=tuple(decision(n, attainment=low) for n in range(1, 101))
    )
    look(browser, server)
    first, second = (browser.text(f".card:nth-child({n})").replace("\u00a0", " ") for n in (1, 2))
    assert "Misses its target" in first
    assert "50 % within targets, target 99.5 %; 1,000 requests in 5 min" in first
    assert "500 ms of 800 ms" in first
    assert "▲ 9,900, plan 8,800" in first
    assert "▼ 66 %, plan 70 %" in first
    assert "Keeps its target" in second
    missed = browser.text("#missed").replace("\u00a0", " ")
    assert missed == "✕ T0 misses its target: 50 % within targets in 5 min, promised 99.5 %"


def test_decisions_are_told_as_a_story_with_reasons(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    lost = {"fell_back": True, "exposure": 0.0, "reasons": (GuardReason.SLO_REGRESSION,)}
    every_other = [
        decision(n, reasons=(GuardReason.SLEW,) if n % 2 else ()) for n in range(41, 101)
    ]
    daemon.by_engine["a"] = replace(
        state(),
        history=(
            *(decision(n, exposure=n / 10) for n in range(1, 10)),
            *(decision(n, **lost) for n in range(10, 41)),
            *every_other,
        ),
    )
    look(browser, server)
    entries = browser.js(
        "[...document.querySelectorAll('#decisions > li')].map((e) => e.innerText)"
    )
    newest, fallen, oldest = (entry.replace("\u00a0", " ") for entry in entries)
    assert "60 decisions" in newest
    assert "The policy acts at 100 % of its residual" in newest
    assert "greater change than one interval allows in 30 of them slew" in newest
    assert "31 decisions" in fallen
    assert "Promises were kept worse than under the static plan slo_regression" in fallen
    assert "from 10 % to 90 % of its residual" in oldest


def test_charts_show_the_allocation_and_the_plan(browser: Browser, server: WebServer) -> None:
    look(browser, server)
    words = browser.js(
        "[...document.querySelectorAll('figure > svg')].map((e) => e.getAttribute('aria-label'))"
    )
    weights = next(each for each in words if each.startswith("Weight against the plan"))
    assert "T0 \u00d7\u00a01.13, plan \u00d7\u00a01" in weights
    pools = next(each for each in words if each.startswith("KV blocks guaranteed"))
    assert "interactive 66\u00a0%, plan 70\u00a0%" in pools
    drawn = browser.js(
        "[...document.querySelectorAll('figure > svg')].every((e) => e.querySelector('path[d^=M]'))"
    )
    assert drawn


def test_charts_are_read_with_the_keyboard(browser: Browser, server: WebServer) -> None:
    look(browser, server)
    browser.js("document.querySelector('figure > svg').focus()")
    browser.press("ArrowLeft")
    label = "document.querySelector('figure > svg').getAttribute('aria-label')"
    assert "; at " in browser.js(label)
    assert browser.js("document.querySelectorAll('.cursor').length") == len(
        browser.js("[...document.querySelectorAll('figure > svg')].map(() => 1)")
    )
    browser.js("document.activeElement.blur()")
    assert "newest values" in browser.js(label)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(
    browser: Browser, server: WebServer, daemon: FakeDaemon, scheme: str
) -> None:
    daemon.by_engine = {
        name: state(name, policy="bundle:" + "x" * 90, detail="y" * 200)
        for name in ("a", *(f"a-rather-long-name-of-engine-{n}" for n in range(6)))
    }
    look(browser, server, PHONE)
    browser.view(*PHONE, scheme=scheme)
    assert browser.js("document.documentElement.scrollWidth") <= PHONE[0]
    click(browser, "#mode")
    assert browser.js("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.js("document.querySelector('#order').getBoundingClientRect().right") <= PHONE[0]
    assert browser.js(
        "[...document.querySelectorAll('main *')].filter((e) => e.offsetParent !== null"
        f" && e.getBoundingClientRect().right > {PHONE[0]} + 0.5).map((e) => e.outerHTML)"
    ) == []  # fmt: skip


def test_dark_and_light_follow_the_reader(browser: Browser, server: WebServer) -> None:
    look(browser, server)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.js(paper)
    browser.view(*DESK, scheme="dark")
    assert browser.js(paper) != light == "rgb(255, 255, 255)"


def order(browser: Browser, button: str, token: str) -> None:
    click(browser, button)
    put(browser, "#order-token", token)
    put(browser, "#order-by", "anna")
    click(browser, "#order-go")


def test_a_hold_with_a_wrong_token_is_refused_in_words(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    order(browser, "#hold", "not-the-right-token")
    browser.wait_for("document.querySelector('#order-error').textContent !== ''")
    assert browser.text("#order-error") == "Refused: this is not the daemon's token."
    assert browser.js("document.querySelector('#order').open")
    assert not daemon.orders
    # The right one after it, in the same dialog.
    put(browser, "#order-token", TOKEN)
    click(browser, "#order-go")
    browser.wait_for("!document.querySelector('#order').open")
    assert daemon.orders


def test_a_hold_with_the_token_holds_the_engine_that_is_shown(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server, place="/#engine=b")
    order(browser, "#hold", TOKEN)
    browser.wait_for("document.querySelector('#headline').textContent.includes('Held')")
    ((engine, command),) = daemon.orders
    assert (engine, command.kind) == ("b", CommandKind.HOLD)
    assert command.by.startswith("anna over HTTP")
    assert not browser.js("document.querySelector('#order').open")
    assert browser.text("#ordered") == "Hold ordered for b; it takes effect at the next tick."
    assert browser.errors == []


def test_a_mode_for_all_engines(browser: Browser, server: WebServer, daemon: FakeDaemon) -> None:
    look(browser, server)
    click(browser, "#mode")
    put(browser, "#order-mode", "shadow")
    click(browser, "input[name=scope][value=all]")
    put(browser, "#order-token", TOKEN)
    click(browser, "#order-go")
    browser.wait_for("document.querySelector('#headline').textContent.includes('shadow')")
    assert [(engine, order.mode) for engine, order in daemon.orders] == [(None, GuardMode.SHADOW)]


def test_the_dialog_is_left_with_escape_and_nothing_is_ordered(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    browser.js("document.querySelector('#release').focus()")
    click(browser, "#release")
    assert browser.js("document.activeElement.id") == "order-token"
    browser.press("Escape")
    browser.wait_for("!document.querySelector('#order').open")
    assert browser.js("document.activeElement.id") == "release"
    assert not daemon.orders


def test_an_order_that_nobody_answers_is_said_to_be_none(
    browser: Browser, server: WebServer
) -> None:
    look(browser, server)
    server.stop()
    order(browser, "#hold", TOKEN)
    browser.wait_for("document.querySelector('#order-error').textContent !== ''")
    assert "does not answer" in browser.text("#order-error")


def test_the_page_says_when_the_daemon_is_gone_and_when_it_is_back(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    assert browser.js("document.querySelector('#stale').hidden")
    server.stop()
    browser.wait_for("!document.querySelector('#stale').hidden", 20)
    words = browser.text("#stale")
    assert "The daemon does not answer this page." in words
    assert "what is below was true at" in words
    assert browser.js("document.title").startswith("✕ no answer")
    again = WebServer(make_app(daemon, TOKEN), server.url.removeprefix("http://"))
    again.start()
    try:
        browser.wait_for("document.querySelector('#stale').hidden", 20)
    finally:
        again.stop()


def test_the_age_grows_while_no_answer_comes(browser: Browser, server: WebServer) -> None:
    look(browser, server)
    server.stop()
    age = "parseFloat(document.querySelector('#headline .age').textContent.replace(/[^0-9.]/g, ''))"
    first = browser.js(age)
    browser.wait_for(f"{age} > {first} + 1.5", 10)


def test_markup_in_names_is_shown_as_text(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    tiers = {
        name: tier.model_copy(update={"description": MARKUP}) for name, tier in PLAN.tiers.items()
    }
    plan = PLAN.model_copy(update={"tiers": tiers, "description": MARKUP, "name": MARKUP})
    daemon.by_engine = {
        MARKUP: state(
            MARKUP,
            plan=plan,
            policy=MARKUP,
            holder=MARKUP,
            detail=MARKUP,
            bundle_error=MARKUP,
            bundle_digest=MARKUP,
            profile=MARKUP,
        ),
        "b": state("b"),
    }
    look(browser, server)
    click(browser, "#hold")
    assert browser.js("document.querySelectorAll('img, main b b, h3 b').length") == 0
    for selector in ("#engines", "#headline", "#trouble", ".card", "#about", "#facts", "#order"):
        assert MARKUP in browser.text(selector), selector
    assert browser.errors == []


def test_engines_are_switched_by_links_that_can_be_kept(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    daemon.by_engine["b"] = state("b", contact=Contact.WRONG_PLAN)
    look(browser, server)
    chips = browser.js("[...document.querySelectorAll('#engines a')].map((e) => e.textContent)")
    assert chips == ["✓ a, all well", "✕ b, trouble"]
    assert "1 of 2 in trouble" in browser.text("#engines")
    click(browser, "#engines a:nth-of-type(2)")
    browser.wait_for("document.querySelector('#headline').textContent.includes('another plan')")
    look(browser, server, place="/#engine=b")
    assert "another plan" in browser.text("#headline")
    assert browser.js("document.querySelector('#engines [aria-current]').textContent").startswith(
        "✕ b"
    )


def test_a_daemon_that_began_anew_is_shown_from_its_beginning(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    young = tuple(decision(n, unix_s=NOW_S - 9 + n, exposure=0.0) for n in (1, 2, 3))
    daemon.by_engine["a"] = replace(state(), history=young, ticks=3)
    browser.wait_for("document.querySelector('#decisions').textContent.includes('3 decisions')")
    assert browser.js("document.querySelectorAll('#decisions > li').length") == 1


def test_it_asks_nobody_but_its_own_server(browser: Browser, server: WebServer) -> None:
    look(browser, server)
    browser.js("new Promise((done) => setTimeout(done, 2500))")
    assert len([url for url in browser.requests if "/api/state" in url]) >= 2
    hosts = {urlsplit(url).netloc for url in browser.requests}
    assert hosts == {urlsplit(server.url).netloc}
    assert browser.errors == []


def test_what_is_focused_or_read_stays_when_figures_change(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    browser.js("window.card = document.querySelector('.card'); void 0")
    browser.js("document.querySelector('#engines a').focus()")
    daemon.by_engine["a"] = state(last={"exposure": 0.3})
    browser.wait_for("document.querySelector('#headline').textContent.includes('30')")
    assert browser.js("document.querySelector('.card') === window.card")
    assert browser.js("document.activeElement === document.querySelector('#engines a')")


def test_a_screen_reader_hears_a_change_and_not_every_second(
    browser: Browser, server: WebServer, daemon: FakeDaemon
) -> None:
    look(browser, server)
    browser.js(
        "window.heard = []; new MutationObserver(() => heard.push("
        "document.querySelector('#spoken').textContent)).observe("
        "document.querySelector('#spoken'), {childList: true, characterData: true, subtree: true});"
        "new Promise((done) => setTimeout(done, 2500))"
    )
    assert browser.js("heard") == []
    daemon.by_engine["a"] = state(mode=GuardMode.HOLD)
    browser.wait_for("heard.length > 0")
    assert browser.js("heard") == ["a: Held by an operator: the last allocation stays"]


def test_every_control_has_a_name(browser: Browser, server: WebServer, tmp_path: Path) -> None:
    look(browser, server)
    click(browser, "#mode")
    browser.command("Accessibility.enable")
    nodes = browser.command("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "textbox", "combobox", "radio", "image", "img"}
    unnamed = [
        node
        for node in nodes
        if not node["ignored"]
        and node.get("role", {}).get("value") in roles
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []

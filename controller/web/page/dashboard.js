// The page's engine: asks the daemon, shows how one engine stands, and says so when nobody answers.

import { drawCurves, listenForSpan } from "./curves.js";
import { decisionEntries } from "./decisions.js";
import { ageWords, byId, clock, el, fact, number, percent, say, seconds, show } from "./elements.js";
import { allowOrders, listenForOrders } from "./orders.js";
import { engineLine, missedEntries, tierCards } from "./tiers.js";

const MOST_DECISIONS = 900;
const PATIENCE_MS = 5000;
const GLYPHS = { good: "✓", note: "i", bad: "✕" };
const LEVELS = { good: "all well", note: "note", bad: "trouble" };

let state = null;
let decisions = [];
let answeredMs = null;
let timer = 0;
const startedMs = performance.now();

const chosen = () => decodeURIComponent(location.hash.replace(/^#engine=|^#.*/, ""));

/** Ask for everything about the chosen engine, then again after an interval. */
async function ask() {
  clearTimeout(timer);
  const answered = await refresh().then(() => true, () => false);
  clearTimeout(timer);
  timer = setTimeout(ask, 1000 * Math.min(5, Math.max(1, state?.detail?.interval_s ?? 2)));
  if (answered) {
    answeredMs = performance.now();
    render();
  }
  staleness();
}

async function refresh() {
  let name = chosen() || state?.detail?.engine;
  if (!name || (state && !state.engines.some(({ engine }) => engine === name))) {
    const { engines } = await fetchState("api/state");
    if (engines.length === 0) throw new Error("no engines");
    name = engines.some(({ engine }) => engine === name) ? name : engines[0].engine;
  }
  const same = state?.detail?.engine === name;
  const last = same && decisions.length ? decisions[decisions.length - 1].number : 0;
  const fresh = await fetchState(`api/state?engine=${encodeURIComponent(name)}&since=${last}`);
  const anew = !same || fresh.detail.ticks < last; // another engine, or the daemon began anew
  decisions = [...(anew ? [] : decisions), ...fresh.detail.decisions].slice(-MOST_DECISIONS);
  state = fresh;
}

async function fetchState(url) {
  const answer = await fetch(url, { signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

function render() {
  const { detail, engines, words, now_unix_s: nowS } = state;
  document.title = `${GLYPHS[detail.level]} ${detail.engine} – Trimtab`;
  renderEngines(engines, detail.engine);
  renderStanding(detail);
  say(byId("tiers-note"), engineLine(detail, ageNow(detail)));
  show(byId("tiers"), tierCards(detail));
  drawCurves(detail, decisions, nowS);
  const entries = decisionEntries(decisions, words);
  show(byId("decisions"), entries.length ? entries : [el("li", {}, "None yet.")]);
  show(byId("about"), about(detail));
  allowOrders(true);
}

function renderEngines(engines, shown) {
  const nav = byId("engines");
  nav.hidden = engines.length < 2;
  const bad = engines.filter(({ level }) => level === "bad").length;
  const summary = bad ? `${bad} of ${engines.length} in trouble` : `${engines.length} engines`;
  show(nav, [el("span", { class: "soft" }, summary), ...engines.map(({ engine, level }) =>
    el("a", { href: `#engine=${encodeURIComponent(engine)}`, class: `chip ${level}`,
              "aria-current": engine === shown ? "true" : null },
      el("span", { class: "glyph", "aria-hidden": "true" }, GLYPHS[level]), ` ${engine}`,
      el("span", { class: "unseen" }, `, ${LEVELS[level]}`)))]);
}

function renderStanding(detail) {
  byId("standing").className = `standing ${detail.level}`;
  show(byId("headline"), [
    el("span", { class: "glyph", "aria-hidden": "true" }, GLYPHS[detail.level]),
    ` ${detail.headline}; `, el("span", { class: "age" }, ageWords(ageNow(detail)))]);
  const spoken = `${detail.engine}: ${detail.headline}`;
  if (byId("spoken").textContent !== spoken) byId("spoken").textContent = spoken;
  show(byId("missed"), missedEntries(detail));
  say(byId("hint"), detail.hint);
  say(byId("trouble"), [detail.detail, detail.bundle_error && `Newest bundle not taken: ${detail.bundle_error}`]
    .filter(Boolean).join(" · "));
  const acts = detail.contact === "controlling" ? percent(detail.exposure) : "nothing now";
  show(byId("facts"), [
    fact("Engine", detail.engine), fact("Mode", detail.mode), fact("Policy", detail.policy),
    fact("Policy acts at", acts), fact("Plan", detail.plan.name),
    fact("Lease", detail.lease_left_s > 0 ? `${seconds(detail.lease_left_s)} left` : "none"),
    ...(detail.tally.trips ? [fact("Trips", number(detail.tally.trips))] : []),
  ]);
}

function about(detail) {
  const { tally } = detail;
  const reasons = Object.entries(tally.reasons).filter(([, count]) => count > 0)
    .map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
  return [
    fact("Plan", `${detail.plan.name}: ${detail.plan.description} `, el("code", {}, detail.plan.digest.slice(0, 16))),
    fact("Policy", detail.policy, detail.bundle_digest ? el("code", {}, ` ${detail.bundle_digest.slice(0, 16)}`) : null),
    fact("Lease held by", detail.holder ?? "nobody"),
    fact("Control interval", seconds(detail.interval_s)),
    fact("Ticks", `${number(detail.ticks)}, ${number(detail.late_ticks)} late or left out`),
    fact("Guard", `${number(tally.intervals)} verdicts, ${number(tally.fell_back)} fell back, ${number(tally.trips)} trips`),
    fact("Reasons so far", reasons || "none"),
    fact("Audit entries lost", number(detail.audit_lost)),
    ...(detail.faults ? [fact("Ticks lost to faults of Trimtab", number(detail.faults))] : []),
    ...(detail.profile ? [fact("Last traffic profile", detail.profile)] : []),
    fact("Daemon", `trimtab ${state.version}`),
  ];
}

/** The age of an engine's data by now: it grows while no answer comes, too. */
function ageNow(detail) {
  if (detail.age_s === null) return null;
  return detail.age_s + (answeredMs === null ? 0 : (performance.now() - answeredMs) / 1000);
}

/** Say it when the daemon does not answer the page any more; called every second. */
function staleness() {
  const silentS = (performance.now() - (answeredMs ?? startedMs)) / 1000;
  const stale = silentS > Math.max(6, 3 * (state?.detail?.interval_s ?? 2));
  byId("stale").hidden = !stale;
  document.body.classList.toggle("is-stale", stale);
  if (!stale) return;
  document.title = "✕ no answer – Trimtab";
  const alert = "The daemon does not answer this page.";
  if (byId("stale-alert").textContent !== alert) byId("stale-alert").textContent = alert;
  byId("stale-more").textContent = state
    ? `For ${seconds(silentS)} now; what is below was true at ${clock(state.now_unix_s)}. An engine ` +
      "returns to its static plan by itself when no daemon renews its lease."
    : `For ${seconds(silentS)} now. See whether trimtab run is up, and whether the way to it is open.`;
  if (!state) byId("headline").textContent = "Nothing known yet";
}

function everySecond() {
  const age = document.querySelector("#headline .age");
  if (age && state) age.textContent = ageWords(ageNow(state.detail));
  if (state) byId("asof").textContent = `as of ${clock(state.now_unix_s)}`;
  staleness();
}

listenForSpan(() => state && drawCurves(state.detail, decisions, state.now_unix_s));
listenForOrders(
  () => ({ engine: state.detail.engine, mode: state.detail.mode, count: state.engines.length,
           modes: state.words.modes }),
  ask);
addEventListener("hashchange", () => {
  byId("ordered").textContent = "";
  ask();
});
document.addEventListener("visibilitychange", () => document.hidden || ask());
setInterval(everySecond, 1000);
ask();

// Which lines are drawn from the decisions: what each tier attains and is given, over time.

import { Chart, isRead } from "./charts.js";
import { byId, keptPercent, number, percent, seconds, short } from "./elements.js";

const ROLLING_S = 60;
let spanS = 900;
let charts = null;
let shownFor = "";

const times = (value) => `×\u00a0${short(value)}`;

const CHARTS = [
  { title: "Within targets, over the last minute", against: "target", format: keptPercent, high: 1,
    series: attainment },
  { title: "Requests waiting", format: (v) => number(v), low: 0, high: 4, series: waiting },
  { title: "Weight against the plan", format: times, log: true, low: 0.5, high: 2, steps: true,
    series: weights },
  { title: "KV blocks guaranteed, by pool", format: percent, low: 0, steps: true,
    series: (detail, decisions) =>
      knobs(detail, decisions, "kv_fractions", detail.pools, detail.static.kv_fractions) },
  { title: "Share of the prefill budget", format: percent, low: 0, steps: true,
    series: (detail, decisions) =>
      knobs(detail, decisions, "prefill_shares", tierNames(detail), detail.static.prefill_shares) },
  { title: "Prefill budget, tokens a step", format: (v) => number(v), low: 0, steps: true,
    series: (detail, decisions) => knob(detail, decisions, "prefill_budget_tokens", "budget") },
  { title: "Given up at this part of the target", format: times, low: 0, steps: true,
    series: (detail, decisions) =>
      knobs(detail, decisions, "shed_at", tierNames(detail), detail.static.shed_at) },
  { title: "Low tiers' part of the prefill, and slack spent", format: percent, low: 0, steps: true,
    series: (detail, decisions) => [
      ...knob(detail, decisions, "low_tier_chunk_share", "low tiers"),
      ...knob(detail, decisions, "slack_fraction", "slack", 1)] },
  { title: "How much of the policy acts", format: percent, low: 0, high: 1, steps: true,
    series: (detail, decisions) => [line("residual", 0, decisions, (d) => d.exposure)] },
  { title: "Age of the data", format: seconds, low: 0, steps: true,
    series: (detail, decisions) => [line("age", 0, decisions, (d) => d.age_s)] },
];

/** Draw all charts of one engine. */
export function drawCurves(detail, decisions, nowS) {
  if (shownFor !== detail.engine) {
    charts = CHARTS.map((style) => new Chart(style));
    byId("curves").replaceChildren(...charts.map((chart) => chart.element));
    shownFor = detail.engine;
  }
  if (isRead()) return;
  const lastS = decisions.length ? decisions[decisions.length - 1].unix_s : nowS;
  const firstS = decisions.length ? decisions[0].unix_s : nowS;
  const toS = Math.max(lastS, nowS);
  const fromS = Math.max(toS - spanS, Math.min(firstS, toS - 60));
  const seen = decisions.filter((d) => d.unix_s >= fromS);
  const bands = fallenBack(seen, detail.interval_s);
  charts.forEach((chart, i) => {
    chart.draw({ fromS, toS, bands, series: CHARTS[i].series(detail, seen) });
  });
}

/** Let the reader choose how much time is shown; `changed` is called then. */
export function listenForSpan(changed) {
  byId("span").addEventListener("change", (event) => {
    spanS = Number(event.target.value);
    changed();
  });
}

function line(name, mark, decisions, value, plan = null) {
  return { name, mark, plan, times: decisions.map((d) => d.unix_s),
           values: decisions.map((d) => value(d) ?? null) };
}

const tierNames = (detail) => detail.tiers.map(({ tier }) => tier);

function knobs(detail, decisions, knob, names, plans) {
  return names.map((name, i) =>
    line(name, i, decisions, (d) => d.applied?.[knob][i], plans[name]));
}

function knob(detail, decisions, name, words, mark = 0) {
  return [line(words, mark, decisions, (d) => d.applied?.[name], detail.static[name])];
}

function weights(detail, decisions) {
  return tierNames(detail).map((name, i) => {
    const plan = detail.static.weights[name];
    return line(name, i, decisions, (d) => (d.applied ? d.applied.weights[i] / plan : null), 1);
  });
}

function waiting(detail, decisions) {
  return tierNames(detail).map((name, i) => line(name, i, decisions, (d) => d.queue_length[i]));
}

/** Per tier, what of the requests judged in the minute before each decision met their targets. */
function attainment(detail, decisions) {
  return detail.tiers.map(({ tier, targets }, i) => {
    let met = 0;
    let judged = 0;
    let first = 0;
    const shares = new Map();
    decisions.forEach((decision) => {
      met += decision.met?.[i] ?? 0;
      judged += decision.judged?.[i] ?? 0;
      for (; decisions[first].unix_s <= decision.unix_s - ROLLING_S; first++) {
        met -= decisions[first].met?.[i] ?? 0;
        judged -= decisions[first].judged?.[i] ?? 0;
      }
      shares.set(decision, judged > 0 ? met / judged : null);
    });
    return line(tier, i, decisions, (d) => shares.get(d), targets.attainment);
  });
}

function fallenBack(decisions, intervalS) {
  const bands = [];
  for (const { fell_back: fell, unix_s: atS } of decisions) {
    const open = bands[bands.length - 1];
    if (!fell) continue;
    if (open && atS - open[1] < intervalS / 2) open[1] = atS + intervalS;
    else bands.push([atS, atS + intervalS]);
  }
  return bands;
}

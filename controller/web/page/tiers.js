// What each tier is promised, what it gets, and what it is given: one card a tier.

import { el, fact, keptPercent, milliseconds, number, percent, seconds, short } from "./elements.js";

/** The cards of an engine's tiers. */
export function tierCards(detail) {
  return detail.tiers.map((tier, i) => card(detail, tier, i));
}

/** The promises that are not kept, an entry each. */
export function missedEntries(detail) {
  const missed = detail.tiers.filter((tier) => kept(tier).level === "bad");
  return missed.map(({ tier, met, judged, targets, recent_s: spanS }) =>
    el("li", {}, `✕ ${tier} misses its target: ${keptPercent(met / judged)} within targets in ` +
      `${seconds(spanS)}, promised ${keptPercent(targets.attainment)}`));
}

/** One line about the engine under all tiers, and about figures that are not of now. */
export function engineLine(detail, ageS) {
  const figures = detail.engine_figures;
  if (!figures) return "No telemetry yet.";
  const old = ageS > 2.5 * detail.interval_s ? `These figures are ${seconds(ageS)} old. ` : "";
  return `${old}The engine computes ${percent(figures.busy_fraction)} of the time; ` +
    `${percent(figures.kv_use_fraction)} of its KV blocks are in use; ` +
    `${short(figures.batch_mean)} requests a step, ${milliseconds(figures.step_ms_mean)} each step.`;
}

function card(detail, tier, i) {
  const verdict = kept(tier);
  return el("article", { class: "card", "aria-label": `Tier ${tier.tier}` },
    el("h3", {}, el("span", { class: `swatch f${i}`, "aria-hidden": "true" }), tier.tier,
      el("small", {}, ` ${tier.description}`)),
    el("p", { class: `verdict ${verdict.level}` },
      el("span", { class: "glyph", "aria-hidden": "true" }, verdict.glyph), ` ${verdict.words}`),
    el("p", { class: "soft" }, attained(tier)),
    el("dl", { class: "figures" }, ...promised(tier), ...gets(tier), ...given(detail, tier)));
}

/** Whether a tier's promise is kept, in words. */
function kept({ met, judged, targets, best_effort: wish }) {
  if (judged === 0) return { level: "note", glyph: "–", words: "No request judged lately" };
  if (met / judged >= targets.attainment) {
    return { level: "good", glyph: "✓", words: wish ? "Gets what it wishes" : "Keeps its target" };
  }
  // One miss among so few that none is allowed says little.
  if (judged - met === 1) return { level: "note", glyph: "!", words: "One request missed it" };
  return wish ? { level: "note", glyph: "!", words: "Below its wish (best effort)" }
    : { level: "bad", glyph: "✕", words: "Misses its target" };
}

function attained({ met, judged, targets, recent_s: spanS }) {
  const target = `target ${keptPercent(targets.attainment)}`;
  if (judged === 0) return target;
  return `${keptPercent(met / judged)} within targets, ${target}; ` +
    `${number(judged)} requests in ${seconds(spanS)}`;
}

function promised({ targets, now }) {
  const rows = [];
  if (targets.ttft_ms !== null) {
    rows.push(latency("First token p99", now?.ttft_ms_p99, targets.ttft_ms));
  }
  if (targets.tpot_ms !== null) {
    rows.push(latency("Per token p99", now?.tpot_ms_p99, targets.tpot_ms));
  }
  if (targets.e2e_ms !== null) {
    rows.push(fact("Whole answer", `target ${milliseconds(targets.e2e_ms)}`));
  }
  return rows;
}

function latency(words, value, target) {
  const late = value !== null && value !== undefined && value > target;
  return fact(words, el("b", { class: late ? "late" : null }, milliseconds(value ?? null)),
    late ? " over " : " of ", milliseconds(target));
}

function gets({ now }) {
  if (!now) return [];
  const oldest = now.queue_length > 0 ? `, oldest ${seconds(now.oldest_wait_s)}` : "";
  const lost = [
    now.preemptions > 0 ? `${number(now.preemptions)} preempted` : "",
    now.refused > 0 ? `${number(now.refused)} refused` : "",
  ].filter(Boolean).join(", ");
  return [
    fact("Running", el("b", {}, number(now.running))),
    fact("Waiting", el("b", {}, number(now.queue_length)), oldest),
    fact("Arrivals", el("b", {}, short(now.arrivals_per_s)), " a second"),
    fact("Engine time", el("b", {}, percent(now.service_fraction))),
    fact("Tokens/s", el("b", {}, number(now.decode_tokens_per_s)), " out, ",
      el("b", {}, number(now.prefill_tokens_per_s)), " prompt"),
    ...(lost ? [fact("Last interval", lost)] : []),
  ];
}

function given(detail, tier) {
  const { applied, static: plan } = detail;
  const { tier: name, pool, now } = tier;
  if (!applied) return [fact("Weight", `plan ${short(plan.weights[name])}`)];
  return [
    fact("Weight", ...besidePlan(applied.weights[name], plan.weights[name], short)),
    fact("Prefill share", ...besidePlan(applied.prefill_shares[name], plan.prefill_shares[name], share)),
    fact(`KV, pool ${pool}`,
      ...besidePlan(applied.kv_fractions[pool], plan.kv_fractions[pool], share)),
    ...(now ? [fact("KV blocks held",
      `${number(now.kv_blocks_used)} of ${number(now.kv_blocks_guaranteed)}`)] : []),
  ];
}

const share = (value) => percent(value, 1);

/** A knob's value, and the plan's where it is another one. */
function besidePlan(value, plan, format) {
  if (format(value) === format(plan)) return [el("b", {}, format(value)), " as planned"];
  return [el("b", {}, `${value > plan ? "▲" : "▼"} ${format(value)}`), `, plan ${format(plan)}`];
}

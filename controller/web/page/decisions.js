// The last decisions as a short story: what was applied, why, and for how long.

import { clock, el, number, percent, seconds } from "./elements.js";

const MOST_ENTRIES = 40;
// Everyday reasons come and go from tick to tick: they do not begin a new entry.
const EVERYDAY = new Set(["floors_and_totals", "slew"]);

/** Entries for the list, newest first. */
export function decisionEntries(decisions, words) {
  return grouped(decisions).slice(-MOST_ENTRIES).reverse().map((group) => entry(group, words));
}

function grouped(decisions) {
  const groups = [];
  let lastKey = null;
  for (const decision of decisions) {
    const key = JSON.stringify([decision.contact, decision.mode, decision.fell_back,
      part(decision), decision.reasons.filter((reason) => !EVERYDAY.has(reason))]);
    if (key === lastKey) {
      groups[groups.length - 1].push(decision);
    } else {
      groups.push([decision]);
      lastKey = key;
    }
  }
  return groups;
}

/** Which part of a policy's way a decision belongs to. */
function part({ exposure, mode }) {
  if (exposure <= 0) return "none";
  return exposure < 1 && mode === "active" ? "some" : "all";
}

function entry(group, words) {
  const first = group[0];
  const last = group[group.length - 1];
  const until = group.length > 1 ? `–${clock(last.unix_s)}` : "";
  const count = group.length > 1 ? `${number(group.length)} decisions` : "1 decision";
  const { level, text } = what(group, words);
  const reasons = why(group, words);
  return el("li", { class: level },
    el("p", { class: "when soft" },
      el("time", { datetime: new Date(first.unix_s * 1000).toISOString() }, clock(first.unix_s)),
      until, ` · ${count}`),
    el("p", { class: "what" }, el("span", { class: "glyph", "aria-hidden": "true" },
      { good: "✓", note: "i", bad: "✕" }[level]), ` ${text}`),
    ...(reasons.length ? [el("ul", { class: "why" }, ...reasons)] : []));
}

function what(group, words) {
  const last = group[group.length - 1];
  const contact = words.contacts[last.contact] ?? last.contact;
  if (last.fell_back) return { level: "bad", text: `Fell back to the static plan${without(last, contact)}` };
  if (last.contact !== "controlling") {
    return { level: last.contact === "standby" || last.contact === "starting" ? "note" : "bad",
             text: sentence(contact) };
  }
  if (last.mode === "hold") return { level: "note", text: "Held: the last allocation stays" };
  if (last.mode === "static") return { level: "note", text: "Static plan, as ordered" };
  if (last.mode === "shadow") {
    return { level: "note", text: "Static plan, as ordered; the policy is watched (shadow)" };
  }
  return { level: "good", text: acting(group, last) };
}

function acting(group, last) {
  const mode = last.mode === "canary" ? " (canary)" : "";
  if (last.exposure <= 0) return `Static plan, the policy is on probation${mode}`;
  const [from, to] = [group[0].exposure, last.exposure];
  if (Math.abs(from - to) < 0.01) return `The policy acts at ${percent(to)} of its residual${mode}`;
  return `The policy acts, from ${percent(from)} to ${percent(to)} of its residual${mode}`;
}

const without = ({ contact }, words) => (contact === "controlling" ? "" : `; ${words}`);

function why(group, words) {
  const last = group[group.length - 1];
  const counts = new Map();
  for (const { reasons } of group) {
    for (const reason of reasons) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  }
  const oldest = Math.max(...group.map(({ age_s: ageS }) => ageS ?? 0));
  return [...counts].map(([reason, count]) => {
    const often = count < group.length ? ` in ${number(count)} of them` : "";
    const age = reason === "stale" && last.contact !== "controlling" ? `, up to ${seconds(oldest)}` : "";
    return el("li", {}, `${sentence(words.reasons[reason] ?? reason)}${age}${often} `,
      el("code", {}, reason));
  });
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

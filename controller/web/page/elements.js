// Building blocks of the page: elements, their update in place, numbers and times in words.
// Text from the daemon only ever becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; attributes that are null are left out, children may be texts. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Show a text in an element, and hide the element if there is none. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = text === "";
}

/** Make an element's children like the given ones, touching only what differs: focus, selection
 * and a screen reader's place survive. */
export function show(element, children) {
  const now = [...element.childNodes];
  children.forEach((child, i) => {
    if (i >= now.length) element.append(child);
    else patch(now[i], child);
  });
  now.slice(children.length).forEach((node) => node.remove());
}

function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  return show(old, [...fresh.childNodes]);
}

/** A term and its meaning for a list of facts. */
export const fact = (term, ...meaning) =>
  el("div", {}, el("dt", {}, term), el("dd", {}, ...meaning));

/** A space that keeps a number and its unit on one line. */
const NBSP = "\u00a0";

const known = (value) => value !== null && value !== undefined;

/** A number in at most three figures after the point, with thousands set apart. */
export function number(value, digits = 0) {
  if (!known(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** A number in about three figures, however large or small. */
export function short(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  return number(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4);
}

/** A fraction as per cent. */
export function percent(fraction, digits = 0) {
  return known(fraction) ? `${number(100 * fraction, digits)}${NBSP}%` : "–";
}

/** A share of kept promises as per cent: to a tenth close to the whole, and never rounded up to it. */
export function keptPercent(share) {
  if (!known(share)) return "–";
  if (share <= 0.9 || share >= 1) return percent(share);
  return `${number(Math.min(100 * share, 99.9), 1)}${NBSP}%`;
}

/** Milliseconds as a time. */
export function milliseconds(ms) {
  if (!known(ms)) return "–";
  return ms < 1000 ? `${short(ms)}${NBSP}ms` : seconds(ms / 1000);
}

/** Seconds as a time, in two or three figures. */
export function seconds(s) {
  if (!known(s)) return "–";
  if (s < 10) return `${s.toFixed(1)}${NBSP}s`;
  if (s < 120) return `${s.toFixed(0)}${NBSP}s`;
  return s < 7200 ? `${(s / 60).toFixed(0)}${NBSP}min` : `${(s / 3600).toFixed(0)}${NBSP}h`;
}

/** A moment as the reader's own clock would show it. */
export function clock(unixS, withSeconds = true) {
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) parts.second = "2-digit";
  return new Date(unixS * 1000).toLocaleTimeString("en-GB", parts);
}

/** The age of data, for the end of a sentence. */
export const ageWords = (ageS) => (known(ageS) ? `data ${seconds(ageS)} old` : "no data");

// One kind of chart: lines over time, each with its plan or target as a dashed line. Drawn as SVG
// at the size that it has on the screen. What the lines mean is `curves`' business.

import { clock, el, show, svg } from "./elements.js";

const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 10;
const LETTER = 7;
const MOST_LABEL = 84;
const LINE = 13;
const TOP = 8;
const BOTTOM = 22;
const charts = new Set();
let cursorS = null;

/** A chart that `draw` is called on with new data; all charts share one moment to read. */
export class Chart {
  /** @param {{title: string, format: (value: number) => string, log?: boolean, steps?: boolean,
   *   low?: number, high?: number}} style how it looks; low and high are always in view. */
  constructor(style) {
    this.style = style;
    this.svg = svg("svg", { tabindex: "0", role: "img" });
    this.legend = el("ul", { class: "legend" });
    this.element = el("figure", {}, el("figcaption", {}, style.title), this.svg, this.legend);
    this.data = null;
    this.svg.addEventListener("pointermove", (event) => read(this.timeAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => read(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    this.svg.addEventListener("blur", () => read(null));
    new ResizeObserver(() => this.redraw()).observe(this.element);
    charts.add(this);
  }

  /** Draw new data.
   * @param {{fromS: number, toS: number, bands: [number, number][], series: {name: string,
   *   mark: number, times: number[], values: (number|null)[], plan: number|null}[]}} data */
  draw(data) {
    this.data = data;
    this.redraw();
  }

  redraw() {
    const width = this.element.clientWidth;
    if (!this.data || width === 0) return;
    this.width = width;
    const named = this.named() ? Math.max(...this.data.series.map(({ name }) => name.length)) : 0;
    this.right = width - RIGHT - Math.min(MOST_LABEL, named * LETTER);
    const scale = this.scale();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.setAttribute("aria-label", this.words());
    show(this.svg, [...this.frame(scale), ...this.lines(scale), ...this.labels(scale),
                    ...this.crosshair()]);
    show(this.legend, this.data.series.map((series) => this.key(series)));
  }

  x(timeS) {
    const { fromS, toS } = this.data;
    return LEFT + ((timeS - fromS) / (toS - fromS)) * (this.right - LEFT);
  }

  timeAt(x) {
    if (!this.data) return null;
    const { fromS, toS } = this.data;
    const part = (x - LEFT) / (this.right - LEFT);
    return fromS + Math.min(1, Math.max(0, part)) * (toS - fromS);
  }

  /** How values become heights, and which of them are marked. */
  scale() {
    const { log } = this.style;
    let low = this.style.low ?? Infinity;
    let high = this.style.high ?? -Infinity;
    for (const { values, plan } of this.data.series) {
      for (const value of [...values, plan]) {
        if (value === null || value === undefined) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (!(low < high)) [low, high] = low === high ? [low, low + 1] : [0, 1];
    const ticks = log ? logTicks(low, high) : linearTicks(low, high);
    low = Math.min(low, ticks[0]);
    high = Math.max(high, ticks[ticks.length - 1]);
    const to = log ? Math.log : (value) => value;
    const y = (value) =>
      TOP + (1 - (to(value) - to(low)) / (to(high) - to(low))) * (HEIGHT - TOP - BOTTOM);
    return { y, ticks };
  }

  frame({ y, ticks }) {
    const { right } = this;
    const { fromS, toS, bands } = this.data;
    const shaded = bands.map(([beginS, endS]) => {
      const left = this.x(Math.max(beginS, fromS));
      const wide = Math.max(1, this.x(Math.min(endS, toS)) - left);
      return svg("rect", { class: "band", x: fix(left), y: TOP, width: fix(wide),
                           height: HEIGHT - TOP - BOTTOM });
    });
    const rows = ticks.flatMap((tick) => [
      svg("line", { class: "grid", x1: LEFT, x2: right, y1: fix(y(tick)), y2: fix(y(tick)) }),
      svg("text", { class: "tick", x: LEFT - 6, y: fix(y(tick) + 4), "text-anchor": "end" },
          this.style.format(tick)),
    ]);
    const times = timeTicks(fromS, toS, Math.max(2, Math.floor(this.width / 110)));
    const columns = times.map((tick) => {
      const x = Math.min(this.x(tick), this.width - 18);
      return svg("text", { class: "tick", x: fix(x), y: HEIGHT - 5, "text-anchor": "middle" },
                 clock(tick, false));
    });
    return [...shaded, ...rows, ...columns];
  }

  lines({ y }) {
    const plans = this.data.series
      .filter(({ plan }) => plan !== null)
      .map(({ plan, mark }) =>
        svg("line", { class: `plan s${mark}`, x1: LEFT, x2: this.right,
                      y1: fix(y(plan)), y2: fix(y(plan)) }));
    const drawn = this.data.series.map(({ times, values, mark }) =>
      svg("path", { class: `line s${mark}`, d: this.path(times, values, y) }));
    return [...plans, ...drawn];
  }

  /** Whether lines bear their names: colours alone would not tell them apart for everybody. */
  named() {
    return this.data.series.length > 1;
  }

  /** The names at the lines' ends, moved apart where lines end close to each other. */
  labels({ y }) {
    if (!this.named()) return [];
    const ends = this.data.series
      .map((series) => ({ ...series, last: series.values[series.values.length - 1] ?? series.plan }))
      .filter(({ last }) => last !== null)
      .map(({ name, mark, last }) => ({ name, mark, at: y(last) }))
      .sort((one, other) => one.at - other.at);
    ends.forEach((end, i) => {
      if (i > 0) end.at = Math.max(end.at, ends[i - 1].at + LINE);
    });
    let lowest = HEIGHT - BOTTOM;
    for (const end of ends.reverse()) {
      end.at = Math.min(end.at, lowest);
      lowest = end.at - LINE;
    }
    const most = Math.floor(MOST_LABEL / LETTER);
    return ends.map(({ name, mark, at }) =>
      svg("text", { class: `name l${mark}`, x: fix(this.right + 4), y: fix(at + 4) },
          name.length > most ? `${name.slice(0, most - 1)}…` : name));
  }

  /** A line with gaps where there is no value; steps where a value holds until the next. */
  path(times, values, y) {
    let path = "";
    let pen = false;
    let lastX = -1;
    times.forEach((timeS, i) => {
      if (values[i] === null) {
        pen = false;
        return;
      }
      const x = this.x(timeS);
      // Several points on one pixel say nothing more, but a step's end must not be lost.
      if (pen && x - lastX < 0.7 && i < times.length - 1 && values[i + 1] !== null) return;
      const move = !pen ? "M" : this.style.steps ? `H${fix(x)}V` : "L";
      path += move.endsWith("V") ? `${move}${fix(y(values[i]))}` : `${move}${fix(x)} ${fix(y(values[i]))}`;
      pen = true;
      lastX = x;
    });
    return path;
  }

  crosshair() {
    if (cursorS === null) return [];
    const x = fix(this.x(cursorS));
    const right = this.x(cursorS) > this.width / 2;
    return [
      svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      svg("text", { class: "moment", x: fix(this.x(cursorS) + (right ? -5 : 5)), y: TOP + 10,
                    "text-anchor": right ? "end" : "start" }, clock(cursorS)),
    ];
  }

  /** A line's name with its value at the moment that is read, else its newest one. */
  key(series) {
    const value = valueAt(series, cursorS);
    const plan = series.plan === null || this.style.log ? "" :
      ` (${this.style.against ?? "plan"} ${this.style.format(series.plan)})`;
    const shown = value === null ? "no data" : this.style.format(value);
    const sample = svg("svg", { class: "key", viewBox: "0 0 26 12", "aria-hidden": "true" },
      svg("line", { class: `line s${series.mark}`, x1: 1, x2: 25, y1: 6, y2: 6 }));
    return el("li", {}, sample, ` ${series.name} `, el("b", {}, shown),
              el("span", { class: "soft" }, plan));
  }

  words() {
    const { fromS, toS, series } = this.data;
    const parts = series.map((one) => {
      const value = valueAt(one, cursorS);
      const plan = one.plan === null ? "" : `, ${this.style.against ?? "plan"} ${this.style.format(one.plan)}`;
      return `${one.name} ${value === null ? "no data" : this.style.format(value)}${plan}`;
    });
    const when = cursorS === null ? `${clock(fromS, false)} to ${clock(toS, false)}, newest values`
      : `at ${clock(cursorS)}`;
    return `${this.style.title}; ${when}: ${parts.join("; ")}`;
  }

  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way === undefined || !this.data) return;
    event.preventDefault();
    const { fromS, toS } = this.data;
    const at = (cursorS ?? toS) + (way * (toS - fromS)) / 60;
    read(Math.min(toS, Math.max(fromS, at)));
  }
}

/** Whether somebody reads a moment in the charts now. */
export const isRead = () => cursorS !== null;

function read(timeS) {
  if (timeS === cursorS) return;
  cursorS = timeS;
  charts.forEach((chart) => chart.redraw());
}

/** The newest value at or before a moment; the newest of all without one. */
function valueAt({ times, values }, timeS) {
  for (let i = times.length - 1; i >= 0; i--) {
    if (timeS === null || times[i] <= timeS) return values[i];
  }
  return null;
}

const fix = (value) => value.toFixed(1);

function linearTicks(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step < high + step * 0.999; i++) {
    ticks.push(i * step);
  }
  return ticks;
}

function logTicks(low, high) {
  const power = Math.max(1, Math.ceil(Math.log2(high / low) / 5));
  const ticks = [];
  const first = Math.floor(Math.log2(low) / power + 1e-9);
  const last = Math.ceil(Math.log2(high) / power - 1e-9);
  for (let i = first; i <= last; i++) ticks.push(2 ** (i * power));
  return ticks;
}

function timeTicks(fromS, toS, most) {
  const steps = [60, 120, 300, 600, 900, 1800, 3600];
  const step = steps.find((each) => (toS - fromS) / each <= most) ?? 7200;
  const ticks = [];
  for (let at = Math.ceil(fromS / step) * step; at <= toS; at += step) ticks.push(at);
  return ticks;
}

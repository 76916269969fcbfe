"use strict";
// Elements, numbers as people read them, and one kind of chart. Texts go in as text alone, never as markup.

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function digits(value) {
  return (value >= 99.5 || value === 0 ? Math.round(value).toString() : value >= 9.95 ? value.toFixed(1) : value.toPrecision(2)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

function amount(value) {
  if (value === null || value === undefined) return "\u2013";
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) if (value >= size) return digits(value / (unit === " k" ? 1e3 : size)) + unit;
  return Number.isInteger(value) || value >= 100 ? Math.round(value).toLocaleString("en") : digits(value);
}

function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${digits(value)} s`;
  return value >= 0.001 || value === 0 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} \u00b5s`;
}

function bytes(value) {
  if (value === null || value === undefined) return "\u2013";
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${digits(value / size)} ${unit}`;
  return `${Math.round(value)} B`;
}

function percent(share) {
  return share === null || share === undefined ? "\u2013" : `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)} %`;
}

function span(s) {
  const parts = [[Math.floor(s / 86400), "d"], [Math.floor(s / 3600) % 24, "h"], [Math.floor(s / 60) % 60, "min"], [Math.floor(s) % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

function clock(at) {
  return new Date(at * 1e3).toLocaleTimeString("en-GB");
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.9999);
}

// The last minutes that are drawn: as few as hold what there is.
function windowOf(times, now) {
  const age = times.length ? now - times[0] : 0;
  return [60, 120, 300, 600].find((width) => age <= width + 5) || 600;
}

// Runs of places that have a value and are close: a time without requests is a gap, a short one apart.
const CLOSE = 3;
function runs(values) {
  const found = [];
  values.forEach((value, place) => {
    if (value === null || value === undefined) return;
    const run = found[found.length - 1];
    if (run && place - run[run.length - 1] <= CLOSE) run.push(place);
    else found.push([place]);
  });
  return found;
}

// A chart of curves over time. `stacked`: areas on top of each other; else lines, the first two with a band between.
class Chart {
  constructor(title, curves, format, { stacked = false, least = 0, most = null } = {}) {
    Object.assign(this, { title, curves, format, stacked, least, most, data: null, now: 0, pointer: null });
    this.values = curves.map(() => el("b", {}, "\u2013"));
    this.when = el("span", { class: "soft" });
    const shape = (place) => (stacked ? "" : place ? "stroke upper" : "stroke");
    const keys = curves.map((curve, place) => el("li", { class: `key ${shape(place)} tone-${curve.tone}` }, `${curve.name} `, this.values[place]));
    this.plot = svg("svg", { role: "img" });
    this.node = el("figure", {}, el("figcaption", {}, el("h3", {}, title), this.when, el("ul", { class: "legend" }, ...keys)), this.plot);
    this.plot.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.draw(); });
    this.plot.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
  }

  update(data, now) {
    this.data = data;
    this.now = now;
    this.draw();
  }

  draw() {
    const [width, height, left, top, bottom] = [this.plot.clientWidth || 320, 118, 44, 8, 18];
    const times = this.data.at || [];
    const wide = windowOf(times, this.now);
    const shown = times.map((at) => this.now - at <= wide + 5);
    const series = this.curves.map((curve) => (this.data[curve.key] || []).map((value, place) => (shown[place] ? value : null)));
    const heights = this.stacked ? stack(series) : series;
    const top_ = this.most || roundUp(Math.max(this.least, ...heights.flat().filter((value) => value !== null)) || 1);
    const x = (place) => left + (width - left) * Math.min(1, Math.max(0, 1 - (this.now - times[place]) / wide));
    const y = (value) => top + (height - top - bottom) * (1 - Math.min(1, value / top_));
    const parts = [0, 0.5, 1].map((share) => svg("line", { class: "grid", x1: left, x2: width, y1: y(share * top_), y2: y(share * top_) }));
    for (const share of [0.5, 1]) parts.push(label(left - 6, y(share * top_) + 4, this.format(share * top_), "end"));
    parts.push(label(left, height - 3, wide === 60 ? "1 min ago" : `${wide / 60} min ago`, "start"), label(width, height - 3, "now", "end"));
    parts.push(...(this.stacked ? areas(this.curves, heights, x, y) : lines(this.curves, heights, x, y)));
    if (!series.some((values) => values.some((value) => value !== null && value > 0))) parts.push(label((left + width) / 2, height / 2, "nothing in this time", "middle"));
    this.tell(series, times, x, (at) => parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: height - bottom })));
    this.plot.replaceChildren(svg("title", {}, `${this.title}: ${this.curves.map((curve, place) => `${curve.name} ${this.values[place].textContent}`).join(", ")}`), ...parts);
  }

  // The legend has the newest values, or those under the pointer.
  tell(series, times, x, mark) {
    let place = times.length - 1;
    this.when.textContent = "";
    if (this.pointer !== null && times.length) {
      place = times.reduce((best, _, at) => (Math.abs(x(at) - this.pointer) < Math.abs(x(best) - this.pointer) ? at : best), 0);
      this.when.textContent = clock(times[place]);
      mark(x(place));
    }
    series.forEach((values, curve) => { this.values[curve].textContent = this.format(values[place]); });
  }
}

// A curve without axes, of the last minutes.
function sparkline(times, values, now) {
  const [width, height, wide] = [96, 22, windowOf(times, now)];
  const most = Math.max(1, ...values);
  const x = (place) => width * Math.min(1, Math.max(0, 1 - (now - times[place]) / wide));
  const y = (value) => height - 2 - (height - 4) * (value / most);
  const shown = values.map((value, place) => (now - times[place] <= wide + 5 ? value : null));
  const paths = runs(shown).map((run) => svg("path", { class: "line tone-kv", d: path(run, x, (place) => y(shown[place])) }));
  return svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...paths);
}

function label(x, y, text, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, text);
}

function stack(series) {
  const sum = new Array(series[0].length).fill(0);
  return series.map((values) => values.map((value, place) => (value === null || value === undefined ? null : (sum[place] += value))));
}

function path(places, x, y) {
  return places.map((place, order) => `${order ? "L" : "M"}${x(place).toFixed(1)} ${y(place).toFixed(1)}`).join("");
}

function areas(curves, heights, x, y) {
  const parts = [];
  heights.forEach((values, curve) => {
    const below = (place) => (curve ? heights[curve - 1][place] : 0);
    for (const run of runs(values)) {
      const back = path([...run].reverse(), x, (place) => y(below(place))).replace("M", "L");
      parts.push(svg("path", { class: `area tone-${curves[curve].tone}`, d: `${path(run, x, (place) => y(values[place]))}${back}Z` }));
    }
  });
  return parts;
}

function lines(curves, heights, x, y) {
  const parts = [];
  if (heights.length === 2) {
    for (const run of runs(heights[1])) {
      const back = path([...run].reverse(), x, (place) => y(heights[0][place])).replace("M", "L");
      parts.push(svg("path", { class: `area thin tone-${curves[1].tone}`, d: `${path(run, x, (place) => y(heights[1][place]))}${back}Z` }));
    }
  }
  heights.forEach((values, curve) => {
    for (const run of runs(values)) {
      const tone = `tone-${curves[curve].tone}`;
      parts.push(svg("path", { class: `line ${curve ? "upper" : ""} ${tone}`, d: path(run, x, (place) => y(values[place])) }));
      if (run.length === 1) parts.push(svg("circle", { class: `dot ${tone}`, r: 2.2, cx: x(run[0]), cy: y(values[run[0]]) }));
    }
  });
  return parts;
}

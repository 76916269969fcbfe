// Asks status.json every two seconds and shows it.

const EVERY_MS = 2000;
const PATIENCE_MS = 8000;
const STATES = { serving: "good", loading: "busy", starting: "busy", draining: "busy", unloading: "busy", failed: "bad", "not serving": "bad" };
const MILD = new Set(["CANCELLED", "NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION", "ALREADY_EXISTS"]);

const spot = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const last = (values) => (values && values.length ? values[values.length - 1] : null);
const latencies = (key, tone) => [{ key: `${key}_p50`, name: "p50", tone }, { key: `${key}_p95`, name: "p95", tone }];

// -- one model ----------------------------------------------------------------------------------

// So many models are shown whole; of more, each is a line until somebody opens it.
const MOST_OPEN = 3;
const chosen = new Map();

class ModelCard {
  constructor(model, open) {
    const chips = (model.capabilities || []).map((each) => el("li", {}, each.toLowerCase().replace("_", " ")));
    this.pill = el("p", { class: "pill" });
    this.failure = el("p", { class: "failure" });
    this.load = el("div", { class: "scroll" });
    this.cache = el("div");
    this.glance = el("p", { class: "glance soft" });
    this.charts = model.load ? chartsOf(model) : [];
    const head = [el("h2", {}, model.name), this.pill, el("p", { class: "soft facts" }, factsOf(model)), el("ul", { class: "chips", "aria-label": "can" }, ...chips)];
    this.node = el(
      model.load ? "details" : "article", { class: "card model" },
      model.load ? el("summary", {}, ...head, this.glance) : el("header", {}, ...head),
      this.failure,
      model.load ? el("div", { class: model.load.kv_blocks ? "now" : "now whole" }, this.load, this.cache) : null,
      model.load ? el("div", { class: "charts" }, ...this.charts.map((chart) => chart.node)) : null,
    );
    if (!model.load) return;
    this.node.open = chosen.has(model.name) ? chosen.get(model.name) : open;
    this.node.firstChild.addEventListener("click", () => chosen.set(model.name, !this.node.open));
    this.node.addEventListener("toggle", () => this.draw());
  }

  update(model, now) {
    this.pill.className = `pill ${STATES[model.state] || ""}`;
    this.pill.textContent = model.state;
    this.failure.textContent = model.failure;
    if (!model.load) return;
    [this.curves, this.now] = [model.curves, now];
    this.glance.replaceChildren(...glanceOf(model, now));
    this.load.replaceChildren(loadTable(model));
    this.cache.replaceChildren(...cacheView(model));
    this.draw();
  }

  draw() {
    if (this.curves && this.node.open) for (const chart of this.charts) chart.update(this.curves, this.now);
  }
}

// What a line says of a model: its tokens a second, as a number and over time, and who runs and waits.
function glanceOf(model, now) {
  const tokens = (model.curves.at || []).map((_, place) => sum(model.tasks.map((task) => model.curves[`${task}_tokens`][place] || 0)));
  const load = Object.values(model.load.tasks);
  const words = [`${amount(last(tokens) || 0)} tokens/s`, `${amount(sum(load.map((task) => task.running)))} running`, `${amount(sum(load.map((task) => task.waiting)))} waiting`];
  return [sparkline(model.curves.at || [], tokens, now), ...words.map((word) => el("span", {}, word))];
}

function factsOf(model) {
  if (!model.architecture) return "";
  const kept = model.quantization === "none" ? model.dtype : `${model.quantization} and ${model.dtype}`;
  return [model.architecture, kept, model.device, `context ${model.context_length.toLocaleString("en")}`, `weights ${bytes(model.weights_bytes)}`].join(" \u00b7 ");
}

function chartsOf(model) {
  const tokens = model.tasks.map((task) => ({ key: `${task}_tokens`, name: task, tone: task }));
  const charts = [new Chart("Tokens a second", tokens, amount, { stacked: true, least: 1 })];
  if (model.tasks.includes("generate")) {
    charts.push(new Chart("Time to first token", latencies("first_token", "generate"), seconds, { least: 0.001 }));
    charts.push(new Chart("Between tokens", latencies("token_gap", "generate"), seconds, { least: 0.001 }));
  }
  for (const task of model.tasks.filter((each) => each !== "generate")) {
    charts.push(new Chart(`${task[0].toUpperCase()}${task.slice(1)} latency`, latencies(task, task), seconds, { least: 0.001 }));
  }
  if (model.load.kv_blocks) {
    const kept = [{ key: "kv_used", name: "used", tone: "kv" }, { key: "kv_cached", name: "cached", tone: "kv-cached" }];
    charts.push(new Chart("Key/value cache", kept, percent, { stacked: true, most: 1 }));
  }
  return charts;
}

function loadTable(model) {
  const head = ["task", "running", "waiting", "tokens/s", "tokens", "requests"].map((name, place) => el("th", { scope: "col", class: place ? "number" : "" }, name));
  const rows = Object.entries(model.load.tasks).map(([task, load]) => {
    const numbers = [load.running, load.waiting, last(model.curves[`${task}_tokens`]), load.tokens, load.requests];
    return el("tr", {}, el("th", { scope: "row", class: `key tone-${task}` }, task), ...numbers.map((value) => el("td", { class: "number" }, amount(value))));
  });
  return el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
}

function cacheView(model) {
  const load = model.load;
  const age = load.step_age_s > 1 ? `, the present one for ${seconds(load.step_age_s)}` : "";
  const mixed = model.tasks.length > 1 ? `, ${percent(load.steps ? load.mixed_steps / load.steps : 0)} of them with several tasks` : "";
  const parts = [];
  if (load.kv_blocks) {
    const shares = [["kv", "used", load.kv_used], ["kv-cached", "cached", load.kv_cached], ["empty", "free", load.kv_blocks - load.kv_used - load.kv_cached]];
    const bar = el("div", { class: "bar", role: "img", "aria-label": `cache blocks used: ${percent(load.kv_used / load.kv_blocks)}` });
    for (const [tone, , count] of shares.slice(0, 2)) {
      const piece = el("span", { class: `tone-${tone}` });
      piece.style.width = `${(100 * count) / load.kv_blocks}%`;
      bar.append(piece);
    }
    const keys = shares.map(([tone, name, count]) => el("li", { class: `key tone-${tone}` }, `${name} ${amount(count)}`));
    parts.push(el("h3", {}, "Key/value cache ", el("small", {}, `${amount(load.kv_blocks)} blocks, ${bytes(model.cache_bytes)}`)), bar, el("ul", { class: "legend" }, ...keys));
    const hits = load.prompt_tokens ? percent(load.hit_tokens / load.prompt_tokens) : "\u2013";
    parts.push(el("p", { class: "soft" }, `${hits} of prompt tokens found cached \u00b7 ${load.paused} paused`));
  }
  parts.push(el("p", { class: "soft" }, `${amount(load.steps)} steps${mixed}${age}`));
  return parts;
}

// -- the whole ----------------------------------------------------------------------------------

const cards = new Map();
// Totals at the last polls: rates are over some seconds, so that they do not flicker.
const RATE_S = 10;
const marks = [];

function showModels(report) {
  for (const model of report.models) {
    const key = JSON.stringify([model.state, model.tasks, Boolean(model.load)]);
    const there = cards.get(model.name);
    if (there && there.key === key) continue;
    const card = new ModelCard(model, report.models.length <= MOST_OPEN);
    if (there) there.card.node.replaceWith(card.node);
    cards.set(model.name, { key, card });
  }
  spot("none").hidden = report.models.length > 0;
  const names = new Set(report.models.map((model) => model.name));
  for (const [name, { card }] of cards) {
    if (names.has(name)) continue;
    card.node.remove();
    cards.delete(name);
  }
  report.models.forEach((model, place) => {
    const { card } = cards.get(model.name);
    if (spot("models").children[place] !== card.node) spot("models").insertBefore(card.node, spot("models").children[place] || null);
    card.update(model, report.now);
  });
}

function methodOf({ method }) {
  return method === "_OTHER" ? "methods that are not here" : method.replace(/^pyruntime\.v1\./, "");
}

// Probes and reflection say nothing about the work.
function own(report) {
  return report.calls.filter((call) => !call.method.startsWith("grpc."));
}

function totals(report) {
  const calls = own(report);
  const counted = calls.map((call) => sum(Object.values(call.codes)));
  const good = calls.map((call) => call.codes.OK || 0);
  const given_up = calls.map((call) => call.codes.CANCELLED || 0);
  return { at: report.now, all: sum(counted), failed: sum(counted) - sum(good) - sum(given_up), cpu: report.process.cpu_s };
}

function showTiles(report) {
  const now = totals(report);
  const before = marks[0];
  const passed = before && now.at > before.at && now.all >= before.all ? now.at - before.at : null;
  const serving = report.models.filter((model) => model.load);
  const tokens = serving.flatMap((model) => model.tasks.map((task) => last(model.curves[`${task}_tokens`]) || 0));
  const waiting = sum(serving.flatMap((model) => Object.values(model.load.tasks).map((task) => task.waiting)));
  const tiles = [
    ["Calls", amount(now.all), passed > 1 ? `${amount((now.all - before.all) / passed)}/s` : ""],
    ["Running calls", amount(sum(own(report).map((call) => call.running))), `${amount(waiting)} waiting`],
    ["Tokens a second", amount(sum(tokens)), ""],
    ["Errors", now.all ? percent(now.failed / now.all) : "\u2013", `${amount(now.failed)} calls`],
    ["Memory", bytes(report.process.memory_bytes), ""],
    ["CPU", passed && now.cpu !== null ? digits((now.cpu - before.cpu) / passed) : "\u2013", "cores"],
  ];
  if (before && now.all < before.all) marks.length = 0; // the server began anew
  marks.push(now);
  while (marks.length > 1 && now.at - marks[0].at > RATE_S) marks.shift();
  spot("tiles").replaceChildren(...tiles.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, more)))));
}

function showCalls(report) {
  const head = ["method", "running", "OK", "other codes"].map((name, place) => el("th", { scope: "col", class: place === 1 || place === 2 ? "number" : "" }, name));
  const rows = report.calls.map((call) => {
    const others = Object.entries(call.codes).filter(([code]) => code !== "OK").map(([code, count]) => el("span", {}, `${code} ${amount(count)}`));
    return el(
      "tr", {}, el("th", { scope: "row" }, methodOf(call)),
      el("td", { class: "number" }, amount(call.running)), el("td", { class: "number" }, amount(call.codes.OK || 0)), el("td", { class: "code mild wrap" }, ...(others.length ? others : ["\u2013"])),
    );
  });
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  spot("calls").replaceChildren(rows.length ? table : el("p", { class: "soft" }, "none yet"));
}

function showFailures(report) {
  const head = ["last at", "times", "method", "code and reason"].map((name, place) => el("th", { scope: "col", class: place === 1 ? "number" : "" }, name));
  const rows = report.failures.map((each) => el(
    "tr", {}, el("td", {}, clock(each.at)), el("td", { class: "number" }, amount(each.times)), el("td", {}, methodOf(each)),
    el("td", {}, el("span", { class: `code ${MILD.has(each.code) ? "mild" : ""}` }, each.code), each.reason && each.reason !== each.code ? el("small", { class: "reason" }, each.reason) : null),
  ));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows));
  spot("failures").replaceChildren(rows.length ? table : el("p", { class: "soft" }, "none"));
}

function show(report) {
  spot("state").className = `pill ${STATES[report.state] || ""}`;
  if (spot("state").textContent !== report.state) spot("state").textContent = report.state;
  spot("facts").textContent = `up ${span(report.uptime_s)} \u00b7 version ${report.version} \u00b7 ${report.process.threads} threads \u00b7 event loop ${seconds(report.process.loop_lag_s)}`;
  document.title = `pyruntime: ${report.state}`;
  showTiles(report);
  showModels(report);
  showCalls(report);
  showFailures(report);
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    spot("stale").hidden = true;
  } catch (error) {
    spot("stale").textContent = `No answer from the server (${error.message}). What is shown is old; it is asked again every ${EVERY_MS / 1000} s.`;
    spot("stale").hidden = false;
    spot("state").className = "pill bad";
    spot("state").textContent = "no answer";
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

addEventListener("resize", () => cards.forEach(({ card }) => card.draw()));
document.addEventListener("visibilitychange", () => document.hidden || refresh());
run();

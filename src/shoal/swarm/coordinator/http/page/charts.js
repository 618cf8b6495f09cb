// Curves: one large chart of the reward and small ones of everything else. All share one range of versions and one cursor.
// Drag on a chart to zoom. `runs` has one run on the page, and several in a comparison.
"use strict";

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function canvas(id, height) {
  const svg = typeof id === "string" ? byId(id) : id;
  const width = Math.max(200, svg.getBoundingClientRect().width || 900);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  return [svg, width];
}

function smooth(values) {
  const reach = Math.max(1, Math.round(values.length / 40));
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - reach), index + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function ticks(low, high, count = 4) {
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * unit).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(8)));
  return found;
}

// Short enough for an axis: 0.25, 1.2k, 3e-5.
function brief(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return size && size < 1e-3 ? value.toExponential(1).replace(".0", "") : String(Number(value.toPrecision(3)));
}

// -- what is drawn --------------------------------------------------------------------------------------------

// [title, unit, [[name, class, (run) => values]], note]. With several runs, a chart of several lines becomes one chart for each.
const CHARTS = [
  ["Answer length", "tokens", [["trained on", "c0", (run) => run.curve.answer_tokens]]],
  ["Entropy", "nats", [["entropy", "c0", (run) => run.curve.entropy]]],
  ["Gradient norm", "", [["before clipping", "c0", (run) => run.curve.grad_norm]]],
  ["Clip share", "of tokens", [["clipped", "c0", (run) => run.curve.clip_fraction]]],
  ["KL to version 0", "nats", [["KL", "c0", (run) => (run.curve.kl.some(Boolean) ? run.curve.kl : [])]]],
  ["Lag", "versions", [["mean", "c0", (run) => run.curve.lag], ["largest", "c3", (run) => run.curve.lag_max]]],
  ["Groups without signal", "share", [["all rewards equal", "c0", (run) => run.curve.dropped_share]]],
  ["Trainer's speed", "tokens/s", [["tokens/s", "c0", (run) => run.curve.tokens_per_s]]],
  ["Step time", "s", [["train", "c2", (run) => run.curve.train_s], ["wait", "c3", (run) => run.curve.wait_s], ["publish", "c1", (run) => run.curve.publish_s]]],
  ["One submission", "s", [["generate", "c0", (run) => run.curve.generate_s], ["check", "c4", (run) => run.curve.check_s]]],
];

const view = { range: null, cursor: null, fine: null, asked: 0 };
const shown = []; // charts on the page: { svg, x, versions, left, right, width, height, top, bottom }

function runsOf(all) {
  if (all.compare) return all.compare;
  return [{ label: all.terms.run, curve: view.fine || all.curve, evaluations: all.evaluations }];
}

function byTask(evaluations) {
  const found = new Map();
  for (const one of evaluations) found.set(one.task || "", [...(found.get(one.task || "") || []), one]);
  return [...found];
}

function lastVersion(runs) {
  return Math.max(1, ...runs.map((run) => Math.max(run.curve.version[run.curve.version.length - 1] || 0, ...run.evaluations.map((one) => one.version))));
}

function rangeOf(runs) {
  return view.range || [0, lastVersion(runs)];
}

// The points of a column inside the range, without gaps: a task may have no rollouts in a step.
function pointsOf(run, values, [first, last]) {
  const found = [];
  run.curve.version.forEach((version, index) => {
    const value = values[index];
    if (value !== null && value !== undefined && version >= first && version <= last) found.push([version, value]);
  });
  return found;
}

// -- one chart ------------------------------------------------------------------------------------------------

// Lines: { points, look, raw }. Dots: { version, value, look, title }.
function drawChart(svg, { lines, dots = [], range, tall, zero }) {
  const height = tall ? (innerWidth < 520 ? 220 : 300) : 150;
  const width = canvas(svg, height)[1];
  const [left, right, top, bottom] = [tall ? 38 : 40, 10, 10, 22];
  const values = [...lines.flatMap((line) => line.points.map((point) => point[1])), ...dots.map((dot) => dot.value)];
  let low = Math.min(...(zero || !values.length ? [0] : []), ...values);
  let high = Math.max(...(values.length ? [] : [1]), ...values);
  if (high === low) [low, high] = low > 0 ? [0, high * 1.25] : [low, low + 1];
  if (!zero && low > 0 && low < high * 0.6) low = 0;
  const margin = (high - low) * 0.05;
  [low, high] = [low < 0 || low > 0 ? low - margin : low, high + margin];
  const [first, last] = range;
  const x = (version) => left + ((version - first) / Math.max(1, last - first)) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  for (const at of ticks(low, high, tall ? 4 : 3)) {
    svg.append(el("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }),
      el("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, brief(at)));
  }
  for (const at of ticks(first, Math.max(last, first + 1), width < 400 ? 3 : 6).filter(Number.isInteger)) {
    const where = x(at) > width - right - 12 ? "end" : x(at) < left + 8 ? "start" : "middle";
    svg.append(el("text", { x: x(at), y: height - 4, "text-anchor": where }, tall && at === 0 && width > 520 ? "version 0" : at));
  }
  for (const { points, look, raw } of lines) {
    const shift = points.map(([version, value]) => [x(version), y(value)]);
    const calm = smooth(points.map((point) => point[1])).map((value, index) => [x(points[index][0]), y(value)]);
    if (raw && calm.length > 1) {
      svg.append(el("path", { class: `wash ${look}`, d: `${path(calm)}L${calm[calm.length - 1][0]} ${y(Math.max(low, 0))}L${calm[0][0]} ${y(Math.max(low, 0))}Z` }));
    }
    if (calm.length > 1) svg.append(el("path", { class: `raw ${look}`, d: path(shift) }));
    if (calm.length) svg.append(el("path", { class: `smooth ${look}`, d: path(calm.length > 1 ? calm : [calm[0], calm[0]]), "data-points": calm.length }));
  }
  for (const { dots: group, look } of groupDots(dots)) {
    if (group.length > 1) svg.append(el("path", { class: `held-line ${look}`, d: path(group.map((dot) => [x(dot.version), y(dot.value)])) }));
  }
  for (const dot of dots) {
    svg.append(el("circle", { class: `held-dot ${dot.look}${dot.part ? " part" : ""}`, cx: x(dot.version), cy: y(dot.value), r: tall ? 5 : 3.5 }, el("title", {}, dot.title)));
  }
  const cross = el("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  const band = el("rect", { class: "band", y: top, height: height - top - bottom, width: 0 });
  svg.append(band, cross);
  shown.push({ svg, cross, band, x, version: (pixel) => first + ((pixel - left) / (width - left - right)) * (last - first) });
}

function groupDots(dots) {
  const found = new Map();
  for (const dot of dots) found.set(dot.look, [...(found.get(dot.look) || []), dot]);
  return [...found].map(([look, group]) => ({ look, dots: group }));
}

// -- all charts -----------------------------------------------------------------------------------------------

function drawCurves(all) {
  shown.length = 0;
  const runs = runsOf(all), range = rangeOf(runs), many = runs.length > 1;
  const inside = (one) => one.version >= range[0] && one.version <= range[1];
  const dots = runs.flatMap((run, place) => byTask(run.evaluations).flatMap(([task, group], number) => group.filter(inside).map((one) => ({
    version: one.version, value: one.reward_mean, part: !one.complete, look: many ? `c${place}` : `h${number}`,
    title: `${many ? `${run.label}: ` : ""}held-out reward${task && task !== run.task ? ` of ${task}` : ""} at version ${one.version}: ${one.reward_mean.toFixed(3)} over ${one.rollouts} rollouts`,
  }))));
  drawChart(byId("curve"), {
    tall: true, zero: true, range, dots,
    lines: runs.map((run, place) => ({ points: pointsOf(run, run.curve.reward, range), look: `c${place}`, raw: !many })),
  });
  byId("curve").setAttribute("aria-label", `Reward against policy version, ${plural(runs[0].curve.version.length, "point")}`);
  drawLegend(runs, many);
  drawSmall(runs, range, many);
  byId("zoom-out").hidden = !view.range;
  say(byId("zoom-words"), view.range ? `versions ${whole(range[0])} to ${whole(range[1])}` : "");
  moveCursor(view.cursor);
}

function drawLegend(runs, many) {
  const items = many ? runs.map((run, place) => [run.label, `c${place}`]) : [["training, smoothed", "c0"]];
  const tasks = byTask(runs[0].evaluations);
  if (many) items.push(["dots: held-out", "plain"]);
  else if (tasks.length < 2) items.push(["held-out", "h0 round"]);
  else tasks.forEach(([task], number) => items.push([`held-out, ${task}`, `h${number} round`]));
  keep(byId("curve-legend"), items, ([name]) => name, () => el("span"), (node, [name, look]) => {
    node.className = `k ${look}`;
    say(node, name);
  });
}

function chartsFor(runs, many) {
  const tasks = Object.keys(runs[0].curve.tasks || {});
  const pass = ["Pass rate by task", "mean reward", tasks.slice(0, 6).map((task, place) => [task, `c${place}`, (run) => ((run.curve.tasks || {})[task] || {}).accepted_reward || []])];
  const long = ["Answer length by task", "tokens", tasks.slice(0, 6).map((task, place) => [task, `c${place}`, (run) => ((run.curve.tasks || {})[task] || {}).answer_tokens || []])];
  const found = [...(tasks.length > 1 ? [pass, long] : []), ...CHARTS];
  if (!many) return found;
  return found.flatMap(([title, unit, parts]) => (parts.length < 2 ? [[title, unit, parts]] : parts.map((part) => [`${title}: ${part[0]}`, unit, [part]])));
}

function drawSmall(runs, range, many) {
  const charts = chartsFor(runs, many).map(([title, unit, parts]) => ({
    title, unit, parts,
    lines: parts.flatMap(([, look, values]) => runs.map((run, place) => ({ points: pointsOf(run, values(run) || [], range), look: many ? `c${place}` : look }))),
  })).filter((chart) => chart.lines.some((line) => line.points.length));
  const make = () => el("figure", { class: "small" }, el("figcaption", {}, el("span"), el("span", { class: "legend" })), el("svg", { class: "plot", role: "img" }));
  keep(byId("charts"), charts, (chart) => chart.title, make, (box, { title, unit, parts }) => {
    const head = box.firstChild.children;
    say(head[0], unit ? `${title}, ${unit}` : title);
    keep(head[1], !many && parts.length > 1 ? parts : [], ([name]) => name, () => el("span"), (node, [name, look]) => {
      node.className = `k ${look}`;
      say(node, name);
    });
  });
  byId("charts-box").hidden = !charts.length;
  charts.forEach((chart, index) => {
    const svg = byId("charts").children[index].lastChild;
    drawChart(svg, { lines: chart.lines, range });
    svg.setAttribute("aria-label", chartWords(chart));
  });
}

function chartWords({ title, unit, lines, parts }) {
  const words = lines.filter((line) => line.points.length).map((line, index) => {
    const [first, last] = [line.points[0], line.points[line.points.length - 1]];
    return `${parts.length > 1 ? `${parts[index % parts.length][0]} ` : ""}${brief(first[1])} at version ${first[0]}, ${brief(last[1])} at version ${last[0]}`;
  });
  return `${title}${unit ? ` in ${unit}` : ""}: ${words.join("; ")}`;
}

// -- cursor and zoom ------------------------------------------------------------------------------------------

function moveCursor(version) {
  const runs = state.now || state.compare ? runsOf(state) : [];
  const known = runs.length ? runs[0].curve.version : [];
  view.cursor = version === null || !known.length ? null : known.reduce((best, one) => (Math.abs(one - version) < Math.abs(best - version) ? one : best));
  for (const { cross, x } of shown) {
    const at = view.cursor === null ? 0 : x(view.cursor);
    cross.setAttribute("visibility", view.cursor === null ? "hidden" : "visible");
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
  }
  say(byId("curve-words"), curveWords(runs));
}

function curveWords(runs) {
  if (!runs.length || !runs[0].curve.version.length) return "No step has been trained yet.";
  if (view.cursor === null) return "Point at a curve, or use the arrow keys, to read a step. Drag to zoom.";
  return runs.map((run) => {
    const at = run.curve.version.indexOf(view.cursor);
    if (at < 0) return "";
    const held = run.evaluations.find((one) => one.version === view.cursor);
    const curve = run.curve;
    return `${runs.length > 1 ? run.label : "Version"} ${runs.length > 1 ? `at ${view.cursor}` : view.cursor}: reward ${curve.reward[at].toFixed(3)}, ${Math.round(curve.answer_tokens[at])} tokens an answer, lag ${curve.lag[at]}, waited ${seconds(curve.wait_s[at])}, trained ${seconds(curve.train_s[at])}` +
      (held ? `, held-out ${held.reward_mean.toFixed(3)}` : "") + (curve.steps_per_point > 1 ? ` (mean of ${curve.steps_per_point} steps)` : "");
  }).filter(Boolean).join(". ");
}

async function zoomTo(range) {
  const runs = runsOf(state);
  view.fine = null;
  view.range = range && [Math.max(0, Math.floor(range[0])), Math.min(lastVersion(runs), Math.ceil(range[1]))];
  if (view.range && view.range[1] - view.range[0] < 1) view.range = null;
  drawCurves(state);
  // The whole run is averaged to some hundred points; a part of it may have more.
  if (!view.range || inlined || state.curve.steps_per_point < 2) return;
  const number = (view.asked += 1);
  try {
    const answer = await fetch(`v1/curve?first=${view.range[0]}&last=${view.range[1]}`);
    if (!answer.ok || number !== view.asked || !view.range) return;
    view.fine = await answer.json();
    drawCurves(state);
  } catch {
    // the coarse curve stays
  }
}

function chartAt(event) {
  const svg = event.target.closest && event.target.closest("svg.plot");
  return svg && shown.find((chart) => chart.svg === svg);
}

let drag = null;

function listenToCharts(box) {
  box.addEventListener("pointermove", (event) => {
    const chart = drag ? drag.chart : chartAt(event);
    if (!chart) return;
    const pixel = event.clientX - chart.svg.getBoundingClientRect().left;
    moveCursor(chart.version(pixel));
    if (!drag) return;
    drag.end = pixel;
    chart.band.setAttribute("x", Math.min(drag.start, drag.end));
    chart.band.setAttribute("width", Math.abs(drag.end - drag.start));
  });
  box.addEventListener("pointerdown", (event) => {
    const chart = event.pointerType !== "touch" && event.button === 0 && chartAt(event);
    if (!chart) return;
    const start = event.clientX - chart.svg.getBoundingClientRect().left;
    drag = { chart, start, end: start };
  });
  addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (!done) return;
    done.chart.band.setAttribute("width", 0);
    if (Math.abs(done.end - done.start) > 8) zoomTo([done.start, done.end].map(done.chart.version).sort((a, b) => a - b));
  });
  box.addEventListener("pointerleave", () => !drag && moveCursor(null));
  box.addEventListener("dblclick", (event) => chartAt(event) && zoomTo(null));
  byId("zoom-out").addEventListener("click", () => zoomTo(null));
  byId("curve").addEventListener("keydown", (event) => {
    const runs = state.now || state.compare ? runsOf(state) : [];
    const known = runs.length ? runs[0].curve.version.filter((one) => one >= rangeOf(runs)[0] && one <= rangeOf(runs)[1]) : [];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!known.length || !(step || "+=-".includes(event.key) || event.key === "Escape")) return;
    event.preventDefault();
    if (step) {
      const at = view.cursor === null ? known.length : known.indexOf(view.cursor);
      return moveCursor(known[Math.min(known.length - 1, Math.max(0, at + step))]);
    }
    const [first, last] = rangeOf(runs), middle = view.cursor === null ? (first + last) / 2 : view.cursor;
    if (event.key === "Escape" || (event.key === "-" && !view.range)) return zoomTo(null);
    const reach = ((last - first) / 2) * (event.key === "-" ? 2 : 0.5);
    zoomTo(reach * 2 >= lastVersion(runs) ? null : [middle - reach, middle + reach]);
  });
}

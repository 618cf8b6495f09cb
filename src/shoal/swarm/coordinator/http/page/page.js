// Draws a run from sections of JSON: live from v1/events, or from data that `shoal report` wrote into the file.
// All content of the sections is inserted as text, never as markup: it may come from untrusted nodes.
"use strict";

const byId = (id) => document.getElementById(id);
const state = {};
const inlined = byId("data") && JSON.parse(byId("data").textContent);
const SILENT_MS = 45000; // longer than the longest period between snapshots, 30 s

// -- elements -------------------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "g", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes one child of `parent` for each item. Children are reused by key, so that an element with the focus keeps it.
function keep(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    let child = old.get(key(item));
    if (!child) {
      child = make(item);
      child.dataset.key = key(item);
    }
    old.delete(key(item));
    update(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
  });
  for (const child of old.values()) child.remove();
}

// Columns: [title, class, (row) => text or {text, class, href}].
function table(node, columns, rows, key) {
  if (!node.tHead) {
    node.append(el("thead", {}, el("tr", {}, ...columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))), el("tbody"));
  }
  const make = () => el("tr", {}, ...columns.map(([title, kind]) => el("td", { class: kind, "data-title": title }, el("span"))));
  const update = (line, row) => columns.forEach(([, kind, value], index) => {
    const told = value(row);
    const { text, href, look } = typeof told === "object" ? told : { text: told };
    const cell = line.children[index];
    let inner = cell.firstChild;
    if (href && inner.tagName !== "A") cell.replaceChildren((inner = el("a", { href })));
    inner.className = look || "";
    say(inner, text);
  });
  keep(node.tBodies[0], rows, key, make, update);
}

function figures(node, items) {
  const make = () => el("div", {}, el("dt"), el("dd"), el("dd"));
  keep(node, items, ([title]) => title, make, (box, [title, value, note, share]) => {
    say(box.children[0], title);
    say(box.children[1], value);
    if (share === undefined) return say(box.children[2], note);
    if (!box.querySelector("progress")) box.children[2].replaceChildren(el("progress", { max: 1, value: 0, "aria-label": title }));
    box.querySelector("progress").value = share;
  });
}

function facts(node, pairs) {
  node.replaceChildren(...pairs.flatMap(([name, value, kind]) => [el("dt", {}, name), el("dd", { class: kind || "" }, value)]));
}

// -- words ----------------------------------------------------------------------------------------------------

const whole = (number) => Math.round(number).toLocaleString("en");
const short = (id) => id.slice(0, 8);
const plural = (count, one, many) => `${whole(count)} ${count === 1 ? one : many || one + "s"}`;

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (count >= 1000 && step < units.length - 1) [count, step] = [count / 1000, step + 1];
  return `${step && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[step]}`;
}

function seconds(count) {
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 120) return `${Math.round(count)} s`;
  if (count < 7200) return `${Math.round(count / 60)} min`;
  return count < 172800 ? `${(count / 3600).toFixed(1)} h` : `${(count / 86400).toFixed(1)} days`;
}

function when(time) {
  return time === null ? "" : new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ");
}

const family = (code) => (!code || code === "accepted" ? "" : code.startsWith("reject.") ? "reject" : "void");

// -- sections -------------------------------------------------------------------------------------------------

const draw = {
  terms({ terms }) {
    document.title = `${terms.run} · Shoal`;
    say(byId("run"), terms.run);
    const options = Object.entries(terms.options).map(([name, value]) => `${name} ${value}`).join(", ");
    say(byId("task"), `learning ${terms.task}${options ? ` (${options})` : ""}`);
    say(byId("software"), terms.software);
  },

  now(all) {
    const { now, terms, curve, evaluations, workers } = all;
    say(byId("sentence"), sentence(all));
    const last = curve.version.length - 1;
    const held = evaluations.filter((one) => one.complete);
    const version = now.newest_version === null ? "–" : String(now.newest_version);
    const first = held.length > 1 ? `from ${held[0].reward_mean.toFixed(3)} at version ${held[0].version}` : "on problems that are never trained on";
    figures(byId("figures"), [
      ["Policy version", `${version} / ${terms.last_version}`, "", (now.newest_version || 0) / terms.last_version],
      ["Reward", last < 0 ? "–" : curve.reward[last].toFixed(3), last < 0 ? "no step yet" : "mean of the last step"],
      ["Held-out reward", held.length ? held[held.length - 1].reward_mean.toFixed(3) : "–", first],
      ["Tokens per second", whole(now.generation_tokens_per_s), "accepted work of all workers"],
      ["Lag", last < 0 ? "–" : curve.lag[last].toFixed(1), last < 0 ? "versions behind" : `versions behind, at most ${curve.lag_max[last]}`],
      ["Workers", String(now.live_workers), `live of ${plural(workers.length, "enrolled", "enrolled")}`],
    ]);
    link(now.finished ? "done" : inlined ? "done" : "live");
  },

  curve: (all) => drawCurve(all),
  evaluations: (all) => drawCurve(all),

  workers({ workers }) {
    table(byId("workers"), [
      ["Worker", "id", (row) => ({ text: short(row.node), href: `#node/${row.node}` })],
      ["Trust", "", (row) => ({ text: row.trust === "banned" ? "ejected" : row.trust, look: `trust ${row.trust}` })],
      ["State", "", (row) => (row.phase ? `${row.liveness}, ${row.phase}` : row.liveness)],
      ["Version", "num", (row) => (row.policy_version === null ? "–" : String(row.policy_version))],
      ["Tokens/s", "num", (row) => whole(row.verified_tokens_per_s)],
      ["Accepted", "num", (row) => whole(row.accepted)],
      ["Refused", "num", (row) => whole(row.rejected)],
      ["Credit", "num", (row) => whole(row.credit)],
      ["Last verdict", "wide", (row) => ({ text: row.words, look: family(row.last_code) })],
    ], workers, (row) => row.node);
    say(byId("workers-words"), workers.length ? "tokens/s: accepted work of the last minute" : "no worker has joined yet");
    if (location.hash.startsWith("#node/")) openNode();
  },

  verdicts({ verdicts }) {
    const most = Math.max(1, ...verdicts.map((one) => one.count));
    const make = () => el("li", {}, el("span"), el("span", { class: "count" }), el("span", { class: "code" }), el("progress", { max: 1, value: 0 }));
    keep(byId("verdicts"), verdicts, (one) => one.code, make, (item, one) => {
      item.className = { reject: "refused", void: "none" }[family(one.code)] || "";
      say(item.children[0], one.words);
      say(item.children[1], whole(one.count));
      say(item.children[2], one.code);
      item.children[3].value = one.count / most;
      item.children[3].setAttribute("aria-label", `${one.words}: ${one.count}`);
    });
  },

  timeline: (all) => drawTimeline(all),
  releases: (all) => drawReleases(all),

  relays(all) {
    table(byId("relays"), [
      ["Relay", "id", (row) => row.url.replace(/^https?:\/\//, "")],
      ["State", "", (row) => row.liveness],
      ["Holds", "num", (row) => (row.versions.length ? `${Math.min(...row.versions)} – ${Math.max(...row.versions)}` : "nothing")],
      ["Sent", "num", (row) => bytes(row.bytes_sent)],
    ], all.relays, (row) => row.url);
  },

  samples: ({ samples }) => drawSamples(byId("samples"), samples),

  head({ head, terms }) {
    if (!head) return;
    facts(byId("ledger"), [
      ["Events", `${whole(head.seq)}, the last ${head.type} at ${when(head.time_s)} UTC`],
      ["Head", head.hash, "mono"],
      ["Run key", terms.run_key, "mono"],
      ["Verify it", inlined ? "shoal ledger verify URL, with the URL of this run's coordinator" : `shoal ledger verify ${location.href.split("#")[0].replace(/\/$/, "")}`, "mono"],
    ]);
  },
};

const uses = { terms: ["now", "head"], curve: ["now"], evaluations: ["now"], workers: ["now", "timeline"] };

function sentence({ now, terms }) {
  const taken = terms.started_at_s === null ? "" : seconds(now.server_time_s - terms.started_at_s);
  if (now.finished) return `Finished at version ${now.newest_version}: ${plural(now.trained_groups, "group")} trained on in ${plural(now.batches, "step")}.`;
  if (now.newest_version === null) return `Waiting for ${now.waiting_for}.`;
  return `Running for ${taken}. Waiting for ${now.waiting_for}.`;
}

function drawSamples(node, samples) {
  const make = (one) => el("figure", { class: "sample" },
    el("pre", { class: "prompt" }, one.prompt), el("pre", { class: "answer" }, one.answer),
    el("figcaption", {}, el("span", {}, "version ", one.policy_version, ", ", el("a", { href: `#node/${one.node}` }, short(one.node))),
      el("span", { class: "score" }, "reward ", Number(one.reward.toFixed(3)))));
  keep(node, samples, (one) => one.lease_id, make, () => {});
  if (!samples.length && !node.textContent) node.append(el("p", { class: "note", "data-key": "none" }, "No answer has been checked yet."));
}

// -- plots ----------------------------------------------------------------------------------------------------

function canvas(id, height) {
  const svg = byId(id);
  const width = Math.max(240, svg.getBoundingClientRect().width || 900);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  return [svg, width];
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function smooth(values) {
  const reach = Math.max(1, Math.round(values.length / 40));
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - reach), index + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * unit).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9; at += step) found.push(Math.round(at * 1e6) / 1e6);
  return found;
}

let cursor = null; // the version under the pointer

function drawCurve({ curve, evaluations, terms }) {
  const [svg, width] = canvas("curve", innerWidth < 520 ? 220 : 300);
  const height = Number(svg.getAttribute("height"));
  const [left, right, top, bottom] = [38, 12, 10, 26];
  const values = [...curve.reward, ...evaluations.map((one) => one.reward_mean)];
  const low = Math.min(0, ...values), high = Math.max(values.length ? 0 : 1, ...values) * 1.04 || 1;
  const last = Math.max(1, curve.version[curve.version.length - 1] || 0, ...evaluations.map((one) => one.version));
  const x = (version) => left + (version / last) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  for (const at of ticks(low, high)) {
    svg.append(el("line", { class: "grid", x1: left, x2: width - right, y1: y(at), y2: y(at) }),
      el("text", { x: left - 8, y: y(at) + 4, "text-anchor": "end" }, at));
  }
  for (const at of ticks(0, last).filter(Number.isInteger)) {
    svg.append(el("text", { x: x(at), y: height - 6, "text-anchor": at ? (at > last * 0.97 ? "end" : "middle") : "start" }, at ? at : width < 520 ? "0" : "version 0"));
  }
  const raw = curve.version.map((version, index) => [x(version), y(curve.reward[index])]);
  const calm = smooth(curve.reward).map((value, index) => [x(curve.version[index]), y(value)]);
  if (calm.length > 1) {
    svg.append(el("path", { class: "wash", d: `${path(calm)}L${calm[calm.length - 1][0]} ${y(low)}L${calm[0][0]} ${y(low)}Z` }),
      el("path", { class: "raw", d: path(raw) }));
  }
  if (calm.length) svg.append(el("path", { class: "smooth", d: path(calm.length > 1 ? calm : [calm[0], calm[0]]), "data-points": calm.length }));
  const held = evaluations.map((one) => [x(one.version), y(one.reward_mean)]);
  if (held.length > 1) svg.append(el("path", { class: "held-line", d: path(held) }));
  evaluations.forEach((one, index) => svg.append(el("circle", { class: one.complete ? "held-dot" : "held-dot part", cx: held[index][0], cy: held[index][1], r: 5 },
    el("title", {}, `held-out reward of version ${one.version}: ${one.reward_mean.toFixed(3)} over ${one.rollouts} rollouts`))));
  if (cursor !== null) svg.append(el("line", { class: "cross", x1: x(cursor), x2: x(cursor), y1: top, y2: height - bottom }));
  svg.setAttribute("aria-label", `Reward against policy version, ${plural(curve.version.length, "point")}`);
  say(byId("curve-words"), curveWords({ curve, evaluations, terms }));
  svg.readVersion = (pixel) => ((pixel - left) / (width - left - right)) * last;
}

function curveWords({ curve, evaluations }) {
  if (!curve.version.length) return "No step has been trained yet.";
  if (cursor === null) return "Point at the curve, or use the arrow keys, to read a step.";
  const at = curve.version.indexOf(cursor);
  if (at < 0) return "";
  const held = evaluations.find((one) => one.version === cursor);
  return `Version ${cursor}: reward ${curve.reward[at].toFixed(3)}, lag ${curve.lag[at]}, waited ${seconds(curve.wait_s[at])}, trained ${seconds(curve.train_s[at])}` +
    (held ? `, held-out ${held.reward_mean.toFixed(3)}` : "") + (curve.steps_per_point > 1 ? ` (mean of ${curve.steps_per_point} steps)` : "");
}

function pointAt(version) {
  const known = state.curve.version;
  if (!known.length) return;
  cursor = version === null ? null : known.reduce((best, one) => (Math.abs(one - version) < Math.abs(best - version) ? one : best));
  drawCurve(state);
}

byId("curve").addEventListener("pointermove", (event) => {
  const svg = event.currentTarget;
  if (svg.readVersion) pointAt(svg.readVersion(event.clientX - svg.getBoundingClientRect().left));
});
byId("curve").addEventListener("pointerleave", () => state.curve && pointAt(null));
byId("curve").addEventListener("keydown", (event) => {
  const known = state.curve ? state.curve.version : [];
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!known.length || !step) return;
  event.preventDefault();
  const at = cursor === null ? known.length : known.indexOf(cursor);
  pointAt(known[Math.min(known.length - 1, Math.max(0, at + step))]);
});

function drawTimeline({ timeline, workers }) {
  const lanes = timelineLanes(timeline, workers);
  const [bar, gap] = [11, 12];
  const height = lanes.reduce((sum, lane) => sum + lane.rows.length * (bar + 2) + gap, 0) + 22;
  const [svg, width] = canvas("timeline", Math.max(60, height));
  const left = 84;
  const x = (at) => left + (1 + at / timeline.span_s) * (width - left - 4);
  for (const at of ticks(-timeline.span_s, 0)) {
    svg.append(el("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }),
      el("text", { x: x(at), y: height - 4, "text-anchor": at ? "middle" : "end" }, at ? `${seconds(-at)} ago` : state.now.finished ? "the end" : "now"));
  }
  let y = 6;
  for (const lane of lanes) {
    svg.append(el("text", { x: 0, y: y + 10 }, lane.label));
    for (const row of lane.rows) {
      for (const span of row) svg.append(spanBar(span, x, y, bar));
      y += bar + 2;
    }
    y += gap;
  }
  svg.setAttribute("aria-label", timelineWords(timeline));
  say(byId("timeline-words"), timelineWords(timeline));
}

function timelineLanes({ spans }, workers) {
  const names = [...new Set(spans.map((span) => span.lane))];
  const rank = (name) => (name === "trainer" ? -2 : name === "validator" ? -1 : workers.findIndex((one) => one.node === name));
  return names.sort((a, b) => rank(a) - rank(b)).map((name) => {
    const rows = [];
    // Overlapping bars go into up to four rows below each other; further bars are drawn over the fourth row.
    for (const span of spans.filter((one) => one.lane === name).sort((a, b) => a.start_s - b.start_s)) {
      const row = rows.find((one) => one[one.length - 1].end_s <= span.start_s + 0.011) || (rows.length < 4 ? null : rows[3]);
      if (row) row.push(span);
      else rows.push([span]);
    }
    return { label: name.length > 16 ? short(name) : name, rows };
  });
}

function spanBar(span, x, y, height) {
  const refused = family(span.code) === "reject" ? " refused" : "";
  const begins = x(span.start_s);
  const what = span.version === null ? span.stage : `${span.stage}, version ${span.version}`;
  const verdict = span.code ? `, ${span.code}` : "";
  return el("rect", { class: `bar ${span.stage}${span.purpose === "eval" ? " eval" : ""}${refused}`, x: begins, y, height, width: Math.max(1.5, x(span.end_s) - begins - 0.5) },
    el("title", {}, `${what}${span.purpose === "eval" ? ", held-out" : ""}${verdict}: ${seconds(span.end_s - span.start_s)}`));
}

function timelineWords({ spans, span_s }) {
  if (!spans.length) return "Nothing has been worked on yet.";
  const total = {};
  for (const span of spans) total[span.stage] = (total[span.stage] || 0) + span.end_s - span.start_s;
  const words = ["generate", "upload", "check", "train", "broadcast"].filter((stage) => total[stage]).map((stage) => `${stage} ${seconds(total[stage])}`);
  return `Sum of all bars in the last ${seconds(span_s)}: ${words.join(", ")}. Pale bars are held-out work.`;
}

function drawReleases({ releases, now }) {
  const [svg, width] = canvas("releases", 70);
  const most = Math.max(1, ...releases.map((one) => one.num_bytes));
  const step = Math.min(24, width / Math.max(1, releases.length));
  releases.forEach((one, index) => {
    const height = Math.max(2, (one.num_bytes / most) * 50);
    svg.append(el("rect", { class: "bar release", x: index * step, width: Math.max(1, step - 2), y: 52 - height, height },
      el("title", {}, `version ${one.version}: ${bytes(one.num_bytes)}`)));
  });
  if (releases.length) {
    svg.append(el("text", { x: 0, y: 68 }, `version ${releases[0].version}`));
    if (releases.length * step > 160) svg.append(el("text", { x: releases.length * step - 2, y: 68, "text-anchor": "end" }, releases[releases.length - 1].version));
  }
  const newest = releases[releases.length - 1];
  const text = newest ? `Version ${newest.version} has ${bytes(newest.num_bytes)}, the largest one shown ${bytes(most)}; all ${plural((now.newest_version || 0) + 1, "version")} together ${bytes(now.bytes_published)}.` : "No version has been published yet.";
  svg.setAttribute("aria-label", text);
  say(byId("cast-words"), text);
}

// -- a node's own page ----------------------------------------------------------------------------------------

let shownNode = null;

async function openNode() {
  const id = location.hash.slice("#node/".length);
  const worker = state.workers && state.workers.find((one) => one.node === id);
  const mark = worker ? `${id} ${worker.accepted} ${worker.rejected} ${worker.void} ${worker.phase}` : id;
  if (mark === shownNode) return;
  shownNode = mark;
  let page = null;
  if (inlined) page = inlined.nodes[id] || null;
  else if (/^[0-9a-f]{64}$/.test(id)) {
    try {
      const answer = await fetch(`v1/nodes/${id}/page`);
      page = answer.ok ? await answer.json() : null;
    } catch {
      shownNode = null; // retry when the coordinator answers again
      return;
    }
  }
  if (location.hash.slice("#node/".length) === id) drawNode(id, page);
}

function drawNode(id, page) {
  say(byId("node-title"), page ? page.node.node : id);
  if (!page) {
    say(byId("node-words"), "This run has no node with this id.");
    figures(byId("node-figures"), []);
    return;
  }
  const node = page.node;
  const trust = node.trust === "banned" ? "ejected" : node.trust;
  say(byId("node-words"), `${trust}: ${page.trust_reason}. ${page.software}, enrolled ${when(page.enrolled_at_s)} UTC, last seen ${when(page.last_seen_s) || "never"}.`);
  figures(byId("node-figures"), [
    ["State", node.liveness, node.phase || " "], ["Credit", whole(node.credit), "verified tokens"],
    ["Speed", whole(node.verified_tokens_per_s), "verified tokens per second"], ["Accepted", whole(node.accepted), "submissions"],
    ["Refused", whole(node.rejected), "submissions"], ["Void", whole(node.void), "leases, without blame"],
  ]);
  table(byId("work"), [
    ["Lease", "id", (row) => short(row.lease_id)], ["Issued (UTC)", "", (row) => when(row.issued_at_s)],
    ["For", "", (row) => (row.purpose === "eval" ? "held-out" : "training")],
    ["Version", "num", (row) => (row.policy_version === null ? "–" : String(row.policy_version))],
    ["Took", "num", (row) => (row.received_at_s === null ? "–" : seconds(row.received_at_s - row.issued_at_s))],
    ["Size", "num", (row) => (row.num_bytes === null ? "–" : bytes(row.num_bytes))],
    ["Credit", "num", (row) => whole(row.credit)],
    ["Verdict", "wide", (row) => ({ text: row.code ? `${row.words}${row.detail ? ` (${row.detail})` : ""}` : row.state, look: family(row.code) })],
  ], page.work, (row) => row.lease_id);
  byId("node-answers").hidden = !page.samples.length;
  drawSamples(byId("node-samples"), page.samples);
}

function route() {
  const atNode = location.hash.startsWith("#node/");
  const changed = byId("node").hidden === atNode;
  byId("node").hidden = !atNode;
  byId("overview").hidden = atNode || !state.now;
  if (atNode) openNode();
  else {
    shownNode = null;
    if (state.now) redraw();
  }
  if (changed) {
    scrollTo(0, 0);
    (atNode ? byId("node-title") : byId("main")).focus({ preventScroll: true });
  }
}

// -- data -----------------------------------------------------------------------------------------------------

function link(kind) {
  byId("link").dataset.state = kind;
  say(byId("link"), inlined ? (state.now && state.now.finished ? "finished run" : "saved state") : { wait: "connecting", live: "live", done: "finished", lost: "not connected" }[kind]);
}

function take(sections) {
  const first = !state.now;
  Object.assign(state, sections);
  if (!state.now) return;
  if (first) return route();
  const due = new Set(Object.keys(sections).flatMap((name) => [name, ...(uses[name] || [])]));
  for (const name of due) if (draw[name] && (!byId("overview").hidden || ["terms", "now", "workers"].includes(name))) draw[name](state);
}

function redraw() {
  for (const paint of Object.values(draw)) paint(state);
}

let heard = Date.now(), lostAt = null, wait = 1000, source = null;

function connect() {
  source = new EventSource("v1/events");
  source.onopen = () => (heard = Date.now());
  source.onmessage = (event) => {
    heard = Date.now();
    wait = 1000;
    lostAt = null;
    byId("lost").hidden = true;
    take(JSON.parse(event.data));
    if (location.hash.startsWith("#node/")) openNode();
  };
  source.onerror = lost;
}

// An EventSource reconnects by itself only after a lost connection, not after an HTTP error. So we close it and reconnect.
function lost() {
  source.close();
  lostAt = lostAt || Date.now();
  link("lost");
  byId("lost").hidden = false;
  say(byId("lost"), `The coordinator has not answered since ${new Date(lostAt).toLocaleTimeString()}. ${state.now ? "The page shows older data. " : ""}Reconnecting automatically.`);
  setTimeout(connect, wait);
  wait = Math.min(10000, wait * 1.5);
}

addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash selects the page, so it must not change
  byId("main").focus();
});
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => !byId("overview").hidden && redraw());
});

if (inlined) {
  take(inlined.snapshot);
  for (const anchor of document.querySelectorAll("body > footer nav")) anchor.remove();
} else {
  connect();
  setInterval(() => {
    if (source.readyState !== EventSource.CLOSED && Date.now() - heard > SILENT_MS) lost();
  }, 5000);
}

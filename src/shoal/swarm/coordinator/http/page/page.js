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

// A text that may be long enough to scroll can be reached by keyboard.
function textBox(kind, text) {
  return el("pre", text.length > 300 || text.split("\n").length > 8 ? { class: kind, tabindex: 0 } : { class: kind }, text);
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
const nameOf = (worker) => (worker.name ? `${worker.name} (${short(worker.node)})` : short(worker.node));
// The name of a worker that `shoal run` started, without its lie, or the first digits of its id.
const briefName = (id) => (((state.workers || []).find((one) => one.node === id) || {}).name || short(id)).split(",")[0];
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
    say(byId("run"), terms.run);
    say(byId("task"), taskWords(terms));
    say(byId("software"), terms.software);
    title();
  },

  now(all) {
    const { now, terms, curve, evaluations, workers } = all;
    say(byId("sentence"), sentence(all));
    const last = curve.version.length - 1;
    const kinds = byTask(evaluations.filter((one) => one.complete));
    const held = kinds.length ? kinds[0][1] : [];
    const version = now.newest_version === null ? "–" : String(now.newest_version);
    const first = kinds.length > 1 ? kinds.map(([task, group]) => `${task} ${group[group.length - 1].reward_mean.toFixed(3)}`).join(", ")
      : held.length > 1 ? `from ${held[0].reward_mean.toFixed(3)} at version ${held[0].version}` : "on problems that are never trained on";
    figures(byId("figures"), [
      ["Policy version", `${version} / ${terms.last_version}`, "", terms.last_version ? (now.newest_version || 0) / terms.last_version : 1],
      ["Reward", last < 0 ? "–" : curve.reward[last].toFixed(3), last < 0 ? "no step yet" : rewardNote(curve, last)],
      ["Held-out reward", held.length ? held[held.length - 1].reward_mean.toFixed(3) : "–", first],
      ["Tokens per second", whole(now.generation_tokens_per_s), "accepted work of all workers"],
      ["Lag", last < 0 ? "–" : curve.lag[last].toFixed(1), last < 0 ? "versions behind" : `versions behind, at most ${curve.lag_max[last]}`],
      ["Workers", String(now.live_workers), `live of ${plural(workers.length, "enrolled", "enrolled")}`],
    ]);
    say(byId("tokens-words"), tokensWords(now));
    link(now.finished ? "done" : inlined ? "done" : "live");
  },

  warnings({ warnings }) {
    byId("warnings-box").hidden = !warnings.length;
    say(byId("warnings-words"), warnings.length > 5 ? `the newest 5 of ${warnings.length}` : "");
    const make = () => el("li", {}, el("span", { class: "note" }), el("span"));
    keep(byId("warnings"), warnings.slice(-5).reverse(), (one) => `${one.time_s} ${one.text}`, make, (item, one) => {
      say(item.children[0], `${one.source}${one.version === null ? "" : `, version ${one.version}`}`);
      say(item.children[1], one.text);
    });
  },

  curve: (all) => drawCurves(all),
  evaluations: (all) => drawCurves(all),

  workers({ workers, now }) {
    table(byId("workers"), [
      ["Worker", "", (row) => ({ text: nameOf(row), href: `#node/${row.node}` })],
      ["Trust", "", (row) => ({ text: row.trust === "banned" ? "ejected" : row.trust, look: `trust ${row.trust}` })],
      ["State", "wide", (row) => stateWords(row, now)],
      ["Version", "num", (row) => (row.policy_version === null ? "–" : String(row.policy_version))],
      ["Tokens/s", "num", (row) => whole(row.verified_tokens_per_s)],
      ["Accepted", "num", (row) => whole(row.accepted)],
      ["Refused", "num", (row) => whole(row.rejected)],
      ["Credit", "num", (row) => whole(row.credit)],
      ["Last verdict", "wide", (row) => ({ text: row.words || "none yet", look: family(row.last_code) })],
    ], workers, (row) => row.node);
    say(byId("workers-words"), workers.length ? "tokens/s: accepted work of the last minute" : "No worker has joined yet.");
    if (location.hash.startsWith("#node/")) openNode();
  },

  verdicts({ verdicts }) {
    const most = Math.max(1, ...verdicts.map((one) => one.count));
    say(byId("verdicts-words"), verdicts.length ? "" : "No submission has been checked yet.");
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
    byId("relays").hidden = !all.relays.length;
  },

  samples: ({ samples }) => drawSamples(byId("samples"), samples),

  head({ head, terms }) {
    if (!head) return;
    facts(byId("ledger"), [
      ["Events", `${whole(head.seq)}, the last at ${when(head.time_s)} UTC`],
      ["Head", head.hash, "mono"],
      ["Run key", terms.run_key, "mono"],
      ["Verify it", inlined ? "shoal ledger verify RUN, with this run's folder or the URL of its coordinator" : `shoal ledger verify ${location.href.split("#")[0].replace(/\/$/, "")}`, "mono"],
    ]);
  },
};

const uses = { terms: ["now", "head"], curve: ["now"], evaluations: ["now"], workers: ["now", "timeline"] };

// The task and its file. Digests are of no use to a reader: the ledger has them.
function taskWords(terms) {
  const tasks = terms.tasks || [];
  const differ = new Set(tasks.map((one) => one.temperature)).size > 1;
  const titles = tasks.map((one) => differ ? `${one.label} at temperature ${one.temperature}` : one.label);
  const name = titles.length > 1 ? titles.join(", ") : terms.task;
  const files = [...new Set(Object.values(terms.files || {}))];
  const options = Object.entries(terms.options).filter(([, value]) => !/^sha256:|[/\\]/.test(String(value)) && String(value).length <= 40).map(([option, value]) => `${option.replaceAll("_", " ")} ${value}`);
  const shown = titles.length > 1 ? [] : [...files, ...options.slice(0, 4)];
  return `learning ${name}${shown.length ? `, ${shown.join(", ")}` : ""}`;
}

function stateWords(row, now) {
  if (row.trust === "banned") return "gets no more work";
  if (now && now.finished) return "run finished";
  return row.phase ? `${row.liveness}, ${row.phase}` : row.liveness;
}

function title() {
  const id = location.hash.startsWith("#node/") ? location.hash.slice("#node/".length) : "";
  const worker = id && (state.workers || []).find((one) => one.node === id);
  const where = id ? `${worker ? nameOf(worker) : `worker ${short(id)}`} · ` : location.hash.startsWith("#rollouts") ? "Rollouts · " : "";
  document.title = `${where}${state.terms ? `${state.terms.run} · ` : state.compare ? "Comparison · " : ""}Shoal`;
}

function sentence({ now, terms }) {
  const taken = terms.started_at_s === null ? "" : seconds(now.server_time_s - terms.started_at_s);
  if (now.finished) return `Finished at version ${now.newest_version}: ${plural(now.trained_groups, "group")} trained on in ${plural(now.batches, "step")}.`;
  if (now.newest_version === null) return `Waiting for ${now.waiting_for}.`;
  return `Running for ${taken}. Waiting for ${now.waiting_for}.`;
}

function rewardNote(curve, last) {
  const count = curve.accepted_rollouts[last];
  return count ? `last step's batch; all ${whole(count)} accepted: ${curve.accepted_reward[last].toFixed(3)}` : "last step's batch";
}

function drawSamples(node, samples) {
  const make = (one) => el("figure", { class: "sample" },
    el("figcaption", {}, el("span", { class: `pill ${one.reward >= 0.999 ? "good" : one.reward > 0 ? "some" : ""}` }, `reward ${Number(one.reward.toFixed(3))}`),
      el("span", {}, `version ${one.policy_version}, `, el("a", { href: `#node/${one.node}` }, briefName(one.node)))),
    textBox("prompt", one.prompt), textBox("answer", one.answer || "(empty)"),
    ...(one.expected ? [el("p", { class: "expected" }, el("span", {}, "expected "), el("code", {}, one.expected))] : []));
  keep(node, samples, (one) => one.lease_id, make, () => {});
  if (!samples.length && !node.textContent) node.append(el("p", { class: "note", "data-key": "none" }, "No answer has been checked yet."));
}

// -- timeline and broadcast ------------------------------------------------------------------------------------

function drawTimeline({ timeline, workers }) {
  const lanes = timelineLanes(timeline, workers);
  const [bar, gap] = [11, 12];
  const height = lanes.reduce((sum, lane) => sum + lane.rows.length * (bar + 2) + gap, 0) + 22;
  const [svg, width] = canvas("timeline", Math.max(60, height));
  const left = 84;
  const x = (at) => left + (1 + at / timeline.span_s) * (width - left - 4);
  const marks = ticks(-timeline.span_s, 0).reverse();
  const worded = marks.length > 1 && x(marks[0]) - x(marks[1]) < 80 ? 2 : 1; // on a phone the words of all marks would collide
  marks.forEach((at, place) => {
    svg.append(el("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }));
    if (place % worded) return;
    svg.append(el("text", { x: x(at), y: height - 4, "text-anchor": at ? "middle" : "end" }, at ? `${seconds(-at)} ago` : state.now.finished ? "the end" : "now"));
  });
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
    return { label: name.length > 16 ? briefName(name) : name, rows };
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

function tokensWords({ tokens, train_passes: passes }) {
  if (!tokens || !tokens.trained) return "";
  const ratio = (tokens.generated + tokens.checked) / (passes * tokens.trained);
  return `Output tokens of accepted work: ${whole(tokens.generated)} generated (${whole(tokens.held_out)} held out), ${whole(tokens.checked)} checked, ${whole(tokens.trained)} trained on, ${whole(tokens.dropped)} dropped, ${whole(tokens.unused)} unused. ` +
    `FLOPs of training : inference = 1 : ${ratio.toFixed(2)} (a trained token is ${passes} forward passes, a generated and a checked one 1 each).`;
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
  const disk = now.trainer_disk_bytes ? ` The trainer's folder takes ${bytes(now.trainer_disk_bytes)} of its disk.` : "";
  const text = newest ? `Version ${newest.version} has ${bytes(newest.num_bytes)}, the largest one shown ${bytes(most)}; all ${plural((now.newest_version || 0) + 1, "version")} together ${bytes(now.bytes_published)}.${disk}` : "No version has been published yet.";
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
  say(byId("node-title"), page && page.node.name ? `${page.node.name}, ${page.node.node}` : id);
  byId("node-rollouts").href = `#rollouts?node=${id}`;
  title();
  if (!inlined && byId("link").dataset.state === "wait") link("live");
  if (!page) {
    say(byId("node-words"), "This run has no node with this id.");
    figures(byId("node-figures"), []);
    return;
  }
  const node = page.node;
  const trust = node.trust === "banned" ? "ejected" : node.trust;
  const ended = state.now && state.now.finished;
  say(byId("node-words"), `${trust}: ${page.trust_reason}. ${page.software}, enrolled ${when(page.enrolled_at_s)} UTC, last seen ${when(page.last_seen_s) || "never"}.`);
  figures(byId("node-figures"), [
    ["State", trust === "ejected" ? trust : ended ? "done" : node.liveness, ended || trust === "ejected" ? stateWords(node, state.now) : node.phase || " "], ["Credit", whole(node.credit), "verified tokens"],
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

const VIEWS = { overview: "main", rollouts: "rollouts-title", node: "node-title" };

function route() {
  const name = location.hash.startsWith("#node/") ? "node" : location.hash.startsWith("#rollouts") ? "rollouts" : "overview";
  const changed = byId(name).hidden && Object.keys(VIEWS).some((one) => !byId(one).hidden);
  for (const one of Object.keys(VIEWS)) byId(one).hidden = one !== name || (one === "overview" && !state.now && !state.compare);
  byId("waiting").hidden = name !== "overview" || Boolean(state.now || state.compare);
  for (const anchor of byId("views").children) {
    if (anchor.dataset.view === name) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  if (name !== "node") shownNode = null;
  if (name === "node") openNode();
  else if (name === "rollouts") openRollouts();
  else if (state.now) redraw();
  title();
  if (changed) {
    scrollTo(0, 0);
    byId(VIEWS[name]).focus({ preventScroll: true });
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
  if (first) return draw.terms(state), draw.now(state), route();
  if (!byId("rollouts").hidden) fillFilters();
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
  const finished = state.now && state.now.finished; // `shoal run` ends its coordinator with the run
  link(finished ? "done" : "lost");
  byId("lost").hidden = false;
  say(byId("lost"), finished ? "The run is finished, and its coordinator no longer answers. The page shows the last state." : `The coordinator has not answered since ${new Date(lostAt).toLocaleTimeString()}. ${state.now ? "The page shows older data. " : ""}Reconnecting automatically.`);
  setTimeout(connect, wait);
  wait = Math.min(10000, wait * 1.5);
}

// A comparison has the curves of several runs and a table; the other parts of the page are left out.
function showComparison() {
  const runs = state.compare;
  say(byId("run"), runs.map((run) => run.label).join(" and "));
  say(byId("task"), "comparison");
  say(byId("link"), "saved state");
  for (const part of [...byId("overview").children, byId("views"), ...document.querySelectorAll("body > footer nav")]) {
    if (part.id !== "curves" && part.id !== "figures") part.remove();
  }
  byId("figures").remove();
  byId("overview").append(el("section", { "aria-labelledby": "h-table" }, el("div", { class: "head" }, el("h2", { id: "h-table" }, "Summary")), comparisonTable(inlined.table, runs)));
  byId("waiting").hidden = true;
  byId("overview").hidden = false;
  title();
  drawCurves(state);
}

function comparisonTable(rows, runs) {
  const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Figure"), ...runs.map((run, place) => el("th", { scope: "col", class: "num" }, el("span", { class: `k c${place}` }, run.label)))));
  const body = rows.map(([name, ...values]) => el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", { class: "num" }, value))));
  return el("table", { class: "compared" }, head, el("tbody", {}, ...body));
}

addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash selects the page, so it must not change
  byId("main").focus();
});
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => !byId("overview").hidden && (state.compare ? drawCurves(state) : redraw()));
});

listenToCharts(byId("curves"));
listenToRollouts();
if (inlined && inlined.compare) {
  state.compare = inlined.compare;
  showComparison();
} else if (inlined) {
  take(inlined.snapshot);
  for (const anchor of document.querySelectorAll("body > footer nav")) anchor.remove();
} else {
  connect();
  if (location.hash) route();
  setInterval(() => {
    if (source.readyState !== EventSource.CLOSED && Date.now() - heard > SILENT_MS) lost();
  }, 5000);
}

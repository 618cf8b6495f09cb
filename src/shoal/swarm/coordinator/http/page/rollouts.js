// The rollout viewer: groups of answers side by side, tokens coloured by probability, and why the verdict was given.
// Live from v1/rollouts, or from the groups that `shoal report` wrote into the file.
"use strict";

const FILTERS = ["version", "reward", "task", "node", "search", "held_out"];
const SHOWN_SAMPLES = 8;
const search = { asked: 0, next: null, groups: [], mark: null, withheld: "" };

const chance = (logprob) => Math.exp(Math.min(0, logprob));

// Classes t0 (likely) to t4 (unlikely) of a token.
function tokenLook(logprob) {
  const p = chance(logprob);
  return p >= 0.9 ? "" : p >= 0.5 ? "t1" : p >= 0.2 ? "t2" : p >= 0.05 ? "t3" : "t4";
}

const percent = (p) => (p >= 0.1 ? `${Math.round(p * 100)} %` : p >= 0.001 ? `${(p * 100).toFixed(1)} %` : "below 0.1 %");

// Neighbouring tokens that are likely need no element of their own.
function answerText(sample) {
  const box = textBox("answer", sample.pieces.join(""));
  box.textContent = "";
  let plain = "";
  const flush = () => {
    if (plain) box.append(plain);
    plain = "";
  };
  sample.pieces.forEach((piece, index) => {
    if (sample.cut_at && index === sample.cut_at) {
      flush();
      box.append(el("span", { class: "gap" }, ` … ${plural(sample.num_tokens - sample.pieces.length, "token")} not shown … `));
    }
    const look = tokenLook(sample.logprobs[index]);
    if (!look || !piece) return (plain += piece);
    flush();
    box.append(el("span", { class: look, title: `probability ${percent(chance(sample.logprobs[index]))}` }, piece));
  });
  flush();
  if (!box.textContent) box.append(el("span", { class: "gap" }, "(empty)"));
  return box;
}

function sampleBox(sample) {
  const look = sample.outcome === "right" || sample.reward >= 0.999 ? "good" : sample.reward > 0 ? "some" : "";
  const length = `${plural(sample.num_tokens, "token")}${sample.ended ? "" : ", cut off"}`;
  return el("figure", { class: "sample" },
    el("figcaption", {}, el("span", { class: `pill ${look}` }, `reward ${Number(sample.reward.toFixed(3))}`), el("span", {}, sample.outcome === "unparseable" ? `no answer found, ${length}` : length)),
    answerText(sample),
    ...(sample.judgement ? [el("p", { class: "expected" }, `Judge: ${sample.judgement}`)] : []));
}

// -- one group ------------------------------------------------------------------------------------------------

const FATES = {
  ready: "waits for a step", held: "held until its worker's next full check", dropped: "not trained on: all rewards are equal",
  stale: "not trained on: too old", withdrawn: "not trained on: its worker was caught",
};
const EVIDENCE = {
  segments: "proof segments", exponent_mismatches_max: "exponent mismatches, worst segment", exponent_mismatches_mean: "exponent mismatches, mean",
  mantissa_mean_max: "mantissa difference, worst mean", mantissa_median_max: "mantissa difference, worst median", sign_mismatches: "sign mismatches",
  control_hits_max: "control points hit", draw_misses: "draws outside the tolerance", far_draws: "draws far outside", draw_distance_max: "largest distance of a draw",
  surprise_z: "z of the surprise", logprob_gap_max: "largest log-prob gap", right: "right answers", unparseable: "answers without a result", grade_s: "seconds to grade",
};

function fate(group) {
  if (group.held_out) return "held-out, never trained on";
  return group.state === "batched" ? `trained on in the step from version ${group.trained_version}` : FATES[group.state] || group.state;
}

function why(group) {
  const scores = Object.entries(group.evidence).filter(([name, value]) => name.startsWith("z_") && typeof value === "number");
  const worst = scores.length ? Math.max(...scores.map(([, value]) => value)) : null;
  const parts = [group.checks === "full" ? "every check passed" : "graded, proofs not drawn for a check"];
  if (typeof group.evidence.exponent_mismatches_max === "number") parts.push(group.evidence.exponent_mismatches_max ? `at most ${plural(group.evidence.exponent_mismatches_max, "proof mismatch", "proof mismatches")} in a segment` : "no proof mismatch");
  if (worst !== null) parts.push(`largest z ${worst.toFixed(1)}`);
  return parts.join(", ");
}

function evidenceTable(group) {
  const names = Object.keys(group.evidence).sort((a, b) => b.startsWith("z_") - a.startsWith("z_"));
  const body = names.map((name) => {
    const value = group.evidence[name];
    return el("tr", {}, el("th", { scope: "row" }, EVIDENCE[name] || (name.startsWith("z_") ? `z of ${name.slice(2).replaceAll("_", " ")}` : name)),
      el("td", { class: "num" }, typeof value === "number" ? String(Number(value.toPrecision(4))) : value));
  });
  return el("table", { class: "evidence" }, el("tbody", {}, ...body));
}

function groupBox(group) {
  const worker = (state.workers || []).find((one) => one.node === group.node);
  const mean = group.samples.reduce((sum, one) => sum + one.reward, 0) / group.samples.length;
  const brief = group.samples.every((one) => one.pieces.join("").length <= 60);
  const samples = el("div", { class: brief ? "samples brief" : "samples" }, ...group.samples.slice(0, SHOWN_SAMPLES).map(sampleBox));
  const box = el("article", { class: "group", "aria-label": `Answers of version ${group.policy_version}, mean reward ${mean.toFixed(2)}` },
    el("div", { class: "head" },
      el("h3", {}, `Version ${group.policy_version}`, el("span", { class: "pill" }, `mean reward ${mean.toFixed(2)}`)),
      el("p", { class: "note" }, `${group.task}, by `, el("a", { href: `#node/${group.node}` }, nameOf(worker || { node: group.node })), `, ${when(group.given_at_s)} UTC, ${fate(group)}`)),
    textBox("prompt", group.prompt));
  if (group.expected) box.append(el("p", { class: "expected" }, el("span", {}, "expected "), el("code", {}, group.expected)));
  box.append(samples);
  if (group.samples.length > SHOWN_SAMPLES) {
    const more = el("button", { type: "button" }, `Show all ${group.samples.length} answers`);
    more.addEventListener("click", () => {
      samples.append(...group.samples.slice(SHOWN_SAMPLES).map(sampleBox));
      more.remove();
    });
    box.append(more);
  }
  box.append(el("details", {}, el("summary", {}, `Verdict: ${group.code}, ${why(group)}`), el("p", { class: "note" }, group.detail), evidenceTable(group)));
  return box;
}

// -- filters --------------------------------------------------------------------------------------------------

function wanted() {
  const query = new URLSearchParams(location.hash.split("?")[1] || "");
  return Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));
}

function writeFilters(form) {
  const query = new URLSearchParams();
  for (const name of FILTERS) if (form.elements[name] && form.elements[name].value) query.set(name, form.elements[name].value.trim());
  const text = String(query);
  location.hash = text ? `rollouts?${text}` : "rollouts";
}

function options(select, items) {
  const chosen = select.value;
  keep(select, items, ([value]) => value, ([value]) => el("option", { value }), (option, [, text]) => say(option, text));
  select.value = items.some(([value]) => value === chosen) ? chosen : "";
}

function fillFilters() {
  const form = byId("filters"), query = wanted();
  const tasks = [...new Set([...Object.keys((state.curve || {}).tasks || {}), ...(state.evaluations || []).map((one) => one.task || ""), ...((inlined || {}).rollouts || []).map((one) => one.task)])].filter(Boolean);
  options(form.elements.task, [["", "all tasks"], ...tasks.map((task) => [task, task])]);
  options(form.elements.node, [["", "all workers"], ...(state.workers || []).map((one) => [one.node, nameOf(one)])]);
  byId("task-filter").hidden = tasks.length < 2;
  for (const name of FILTERS) {
    const field = form.elements[name];
    if (document.activeElement === field) continue;
    if (name === "node" && query.node && ![...field.options].some((one) => one.value === query.node)) field.append(el("option", { value: query.node, "data-key": query.node }, short(query.node)));
    field.value = query[name];
  }
}

function matches(group, query) {
  if (group.held_out !== (query.held_out === "1")) return false;
  if (query.version && group.policy_version !== Number(query.version)) return false;
  if ((query.task && group.task !== query.task) || (query.node && group.node !== query.node)) return false;
  if (query.reward && !group.samples.some((one) => Math.abs(one.reward - Number(query.reward)) < 1e-6)) return false;
  const text = query.search.toLowerCase();
  return !text || [group.prompt, ...group.samples.map((one) => one.pieces.join(""))].some((one) => one.toLowerCase().includes(text));
}

async function askRollouts(query, before) {
  if (inlined) return { groups: before ? [] : (inlined.rollouts || []).filter((group) => matches(group, query)), next: null, withheld: "" };
  const address = new URLSearchParams({ limit: 6, ...Object.fromEntries(Object.entries(query).filter(([, value]) => value)) });
  if (before) address.set("before", before);
  const answer = await fetch(`v1/rollouts?${address}`);
  const page = await answer.json();
  return answer.ok ? page : { groups: [], next: null, withheld: page.detail || "The coordinator refused the request." };
}

// Follows `next` until something matches: one request looks at a bounded number of submissions only.
async function loadRollouts(more) {
  const query = wanted(), number = (search.asked += 1);
  if (!more) Object.assign(search, { next: null, groups: [], withheld: "" });
  say(byId("rollouts-words"), "Searching …");
  const before = search.groups.length;
  let next = search.next;
  try {
    for (let tries = 0; tries < 12; tries += 1) {
      const page = await askRollouts(query, next);
      if (number !== search.asked) return;
      next = page.next;
      Object.assign(search, { next, withheld: page.withheld });
      search.groups.push(...page.groups);
      if (search.groups.length > before || next === null) break;
    }
  } catch {
    if (number === search.asked) say(byId("rollouts-words"), "The coordinator does not answer. Try again.");
    return;
  }
  drawRollouts();
}

function drawRollouts() {
  keep(byId("groups"), search.groups, (group) => group.group_id, groupBox, () => {});
  byId("older").hidden = search.next === null;
  const filtered = Object.values(wanted()).some(Boolean);
  const none = filtered ? "No rollout matches these filters. Older versions may no longer be kept." : "No rollout has been accepted yet.";
  say(byId("rollouts-words"), search.withheld || (search.groups.length ? `${plural(search.groups.length, "group")}, newest first${search.next === null ? "" : "; there are older ones"}` : none));
}

function openRollouts() {
  fillFilters();
  const mark = location.hash;
  if (mark === search.mark) return;
  search.mark = mark;
  loadRollouts(false);
}

function listenToRollouts() {
  const form = byId("filters");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    search.mark = null;
    writeFilters(form);
    openRollouts();
  });
  form.addEventListener("change", () => writeFilters(form));
  byId("older").addEventListener("click", () => loadRollouts(true));
}

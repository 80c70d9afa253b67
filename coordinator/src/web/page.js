// Asks for the state every two seconds and shows it. All text that comes from the server is set as text, never as markup.
"use strict";

const POLL_MS = 2000;
const BARS = 60;
const SVG = "http://www.w3.org/2000/svg";
const STAGES = {
  kv_reuse: "KV reuse", collective: "collective", p2d: "prefill→decode",
  weights: "weights", background: "background",
};

const at = (id) => document.getElementById(id);

/** An element with text and children. */
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : printable(String(child)))));
  return element;
}

function put(id, ...children) { at(id).replaceChildren(...children); }

/** Control and direction characters made visible: a name must not rearrange what is beside it. */
function printable(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function bytes(count) {
  if (count < 1000) return count + " B";
  let value = count;
  for (const unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    value /= 1024;
    if (value < 1000 || unit === "PiB") {
      return value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " " + unit;
    }
  }
}

function span(ns) {
  const sign = ns < 0 ? "−" : "";
  const ms = Math.abs(ns) / 1e6;
  if (ms < 1) return sign + ms.toFixed(2) + " ms";
  if (ms < 1000) return sign + ms.toFixed(ms < 10 ? 1 : 0) + " ms";
  const s = ms / 1000;
  if (s < 120) return sign + s.toFixed(s < 10 ? 1 : 0) + " s";
  if (s < 7200) return sign + Math.round(s / 60) + " min";
  if (s < 172800) return sign + Math.round(s / 3600) + " h";
  return sign + Math.round(s / 86400) + " days";
}

const until = (ns) => (ns === null ? "none" : ns < 0 ? span(-ns) + " ago" : "in " + span(ns));
const count = (n, one, many) => n.toLocaleString("en") + " " + (n === 1 ? one : many || one + "s");
const percent = (part, whole) => (whole === 0 ? "–" : (100 * part / whole).toFixed(part === whole ? 0 : 1) + " %");

/** What to show, kept in the address so that it can be shared: ?find=WORDS&tenant=NAME&TABLE=COLUMN. */
const view = new URLSearchParams(location.search);

function look(key, value) {
  if (value) view.set(key, value); else view.delete(key);
  history.replaceState(null, "", (view.size ? "?" + view : location.pathname) + location.hash);
  if (last) show(last);
}

/** Whether a row is of the tenant and has all words that are looked for. */
function passes(tenant, ...texts) {
  const said = texts.join("\n").toLowerCase(), of = view.get("tenant");
  const words = (view.get("find") || "").toLowerCase().split(/\s+/);
  return (!of || of === tenant) && words.every((word) => said.includes(word));
}

/** A link to the same page with a filter. */
const only = (key, value) => make("a", { href: "?" + new URLSearchParams({ [key]: value }) + "#hosts-title" }, value);

/** Rows by the column that was clicked on, or as the coordinator has them. */
function sorted(id, columns, rows) {
  const wanted = view.get(id) || "", down = wanted.startsWith("-");
  const column = columns.find(([name, , , key]) => key && name === wanted.slice(down));
  if (!column) return rows;
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
  return [...rows].sort((a, b) => compare(column[3](a), column[3](b)));
}

function heading(id, [name, , number, key]) {
  const now = view.get(id), orders = number ? ["-" + name, name, null] : [name, "-" + name, null];
  const sort = key && now === name ? "ascending" : key && now === "-" + name ? "descending" : null;
  const cell = make("th", { scope: "col", class: number ? "number" : null, "aria-sort": sort }, key ? "" : name);
  if (key) {
    const button = make("button", { type: "button", "data-sort": id + " " + name }, name);
    button.addEventListener("click", () => look(id, orders[(orders.indexOf(now) + 1) % 3]));
    cell.append(button);
  }
  return cell;
}

/** A table that small screens show as cards. Columns: [heading, cell(row), is a number, sorting key(row)]. */
function table(caption, columns, rows, id) {
  const head = make("tr", {}, ...columns.map((column) => heading(id, column)));
  const cells = (row) => columns.map(([name, cell, number]) => {
    const content = cell(row);
    const empty = content === "" || content === null;
    const kind = [number ? "number" : "", empty ? "empty" : ""].join(" ").trim();
    return make("td", { "data-label": name, class: kind || null }, make("span", {}, empty ? "" : content));
  });
  const made = make("table", {},
    make("thead", {}, head), make("tbody", {}, ...sorted(id, columns, rows).map((row) => make("tr", {}, ...cells(row)))));
  if (caption) made.prepend(make("caption", {}, caption));
  return made;
}

function totals(state) {
  const { totals: sums, attainment } = state;
  const ended = attainment.in_time + attainment.late;
  const item = (name, value, note) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, note ? make("small", {}, note) : ""));
  const gone = sums.hosts - sums.connected;
  put("totals",
    item("Hosts", sums.connected.toLocaleString("en"),
      [gone ? gone + " not connected" : "", sums.drained ? sums.drained + " drained" : ""].filter(Boolean).join(", ")),
    item("Batches", sums.batches.toLocaleString("en")),
    item("Requests", sums.requests.toLocaleString("en"), sums.pruned ? sums.pruned + " pruned" : ""),
    item("Waiting", bytes(state.queues.bytes)),
    item("In time", percent(attainment.in_time, ended), ended ? "of " + ended.toLocaleString("en") : "none ended yet"));
}

let period = 1;

function chart(state) {
  const { buckets, bucket_s: bucket } = state.attainment;
  // Whole bars from the newest bucket backwards.
  const bars = [];
  for (let end = buckets.length; end > 0 && bars.length < BARS; end -= period) {
    const part = buckets.slice(Math.max(0, end - period), end);
    bars.push(part.reduce(([a, b], [c, d]) => [a + c, b + d], [0, 0]));
  }
  const width = Math.max(280, at("chart").clientWidth || 600), height = 144, left = 36, bottom = 18, top = 6;
  const svg = document.createElementNS(SVG, "svg");
  const draw = (name, attributes, text) => {
    const shape = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    if (text !== undefined) shape.textContent = text;
    svg.append(shape);
    return shape;
  };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  const plot = height - bottom - top;
  for (const share of [0, 0.5, 1]) {
    const y = top + plot * (1 - share);
    draw("line", { x1: left, x2: width, y1: y, y2: y });
    draw("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, 100 * share + "%");
  }
  const step = (width - left) / BARS;
  let ended = 0, inTime = 0;
  bars.forEach(([good, late], index) => {
    const all = good + late;
    if (all === 0) return;
    ended += all;
    inTime += good;
    const x = width - (index + 1) * step, tall = plot * good / all;
    const bar = (kind, y, h) => {
      const shape = draw("rect", { class: kind, x: x + step * 0.1, y, width: step * 0.8, height: h });
      const title = document.createElementNS(SVG, "title");
      const ago = span(index * period * bucket * 1e9);
      title.textContent = `${good} of ${all} in time` + (index ? `, ${ago} ago` : ", now");
      shape.append(title);
    };
    if (late > 0) bar("late", top, plot - tall);
    if (good > 0) bar("in-time", top + plot - tall, tall);
  });
  const reach = BARS * period * bucket;
  draw("text", { x: left, y: height - 4 }, `${reach / 60} min ago`);
  draw("text", { x: width, y: height - 4, "text-anchor": "end" }, "now");
  const said = `${percent(inTime, ended)} of ${count(ended, "request")} with a deadline that ended in the last ${reach / 60} minutes were in time.`;
  svg.setAttribute("aria-label", said);
  put("chart", svg);
  const { late_pruned: pruned, undated } = state.attainment;
  const more = [pruned ? `${pruned} of those late had been pruned since the start` : "", undated ? `${undated} had no deadline` : ""];
  put("attainment", ended ? said : "No request with a deadline has ended in this period.",
    make("span", { class: "faint" }, more.some(Boolean) ? " " + more.filter(Boolean).join("; ") + "." : ""));
}

function bars(id, queues, names) {
  const most = Math.max(1, ...queues.map((queue) => queue.bytes));
  put(id, ...queues.map((queue) => {
    const name = names[queue.name] || queue.name;
    return make("li", {}, make("span", {}, name),
      make("progress", { max: most, value: queue.bytes, "aria-label": name }), make("span", {}, bytes(queue.bytes)));
  }));
}

function queues(state) {
  const { by_level: levels, by_stage: stages, bytes: waiting } = state.queues;
  const silent = levels.length === 0 && stages.length === 0;
  put("queues", `${bytes(waiting)} at the egresses of all hosts.`,
    silent ? " No daemon tells its queues by level or stage; the load of each port is with its host." : "");
  bars("levels", levels, {});
  bars("stages", stages, STAGES);
}

function link(batch) {
  const query = new URLSearchParams({ batch: batch.batch });
  if (batch.tenant) query.set("tenant", batch.tenant);
  return make("a", { href: "#" + query }, batch.batch);
}

function verdict(batch) {
  const words = [];
  if (!batch.feasible) words.push(make("span", { class: "bad" }, "late"));
  if (batch.pruned) words.push(make("span", { class: "warn" }, batch.pruned + " pruned"));
  if (words.length === 0) words.push(make("span", { class: "good" }, "in time"));
  return make("span", {}, ...words.flatMap((word, index) => (index ? [", ", word] : [word])));
}

function progress(batch) {
  if (!batch.started) return "waits";
  return batch.layers ? `layer ${batch.layer} of ${batch.layers}` : "computes";
}

const never = (ns) => (ns === null ? Infinity : ns);
const BATCH = [
  ["Place", (batch) => (batch.rank === null ? "–" : batch.rank), true, (batch) => never(batch.rank)],
  ["Batch", link, false, (batch) => batch.batch.padStart(20)],
  ["Owner", (batch) => only("find", batch.owner), false, (batch) => batch.owner],
  ["Hosts", (batch) => batch.hosts.length, true, (batch) => batch.hosts.length],
  ["Requests", (batch) => batch.requests, true, (batch) => batch.requests],
  ["State", progress],
  ["Due (RED)", (batch) => until(batch.red_remaining_ns), false, (batch) => never(batch.red_remaining_ns)],
  ["Ends (estimate)", (batch) => (batch.finish_remaining_ns < 0 ? "by now" : until(batch.finish_remaining_ns)),
    false, (batch) => never(batch.finish_remaining_ns)],
  ["Should be", verdict, false, (batch) => (batch.feasible ? 0 : 1e6) + batch.pruned],
];

/** The column of tenants, where there are several. */
const tenantsToo = (state, columns) => (state.tenants.length < 2 ? columns
  : columns.toSpliced(2, 0, ["Tenant", (row) => (row.tenant ? only("tenant", row.tenant) : ""), false, (row) => row.tenant]));

function listed(id, state, columns, rows, shown, caption, none) {
  const hidden = rows.length - shown.length;
  const note = hidden ? make("p", { class: "faint" }, `The filter hides ${hidden} of the ${rows.length} here.`) : "";
  const empty = hidden ? "" : make("p", { class: "faint" }, none);
  put(id, shown.length ? table(caption, tenantsToo(state, columns), shown, id) : empty, note);
}

function batches(state) {
  const show = (id, rows, caption, none) => listed(id, state, BATCH, rows,
    rows.filter((batch) => passes(batch.tenant, batch.batch, ...batch.hosts)), caption, none);
  const { batches: all } = state.totals;
  show("order", state.batches,
    state.batches.length < all ? `The first ${state.batches.length} of ${all.toLocaleString("en")}.` : "", "No batch is active.");
  show("trouble", state.trouble, "", "None: every batch should be in time, and nobody is pruned.");
}

function tenants(state) {
  const names = state.tenants.map((tenant) => tenant.tenant);
  const picked = view.get("tenant") || "", choices = ["", ...names];
  if (!choices.includes(picked)) choices.push(picked);
  if (choices.join("\n") !== [...at("tenant").options].map((option) => option.value).join("\n")) {
    put("tenant", ...choices.map((name) => make("option", { value: name }, name || "all")));
  }
  at("tenant").value = picked;
  put("filtered", picked || view.get("find") ? make("a", { href: location.pathname }, "Show all") : "");
  put("tenants", table("", [
    ["Tenant", (tenant) => only("tenant", tenant.tenant), false, (tenant) => tenant.tenant],
    ["Hosts", (tenant) => tenant.hosts, true, (tenant) => tenant.hosts],
    ["Batches", (tenant) => tenant.batches, true, (tenant) => tenant.batches],
    ["Requests", (tenant) => tenant.requests, true, (tenant) => tenant.requests],
    ["Pruned", (tenant) => tenant.pruned, true, (tenant) => tenant.pruned],
    ["Drop budget", (tenant) => (tenant.drop_budget === null ? "shared" : tenant.drop_budget), true,
      (tenant) => never(tenant.drop_budget)],
  ], state.tenants, "tenants"));
}

function ports(host) {
  if (host.ports.length === 0) return "";
  const busiest = host.ports.reduce((a, b) => (b.load_permille > a.load_permille ? b : a));
  const split = (queues, names) => queues.filter((queue) => queue.bytes > 0)
    .map((queue) => (names[queue.name] || queue.name) + " " + bytes(queue.bytes)).join(", ");
  const shown = table("", [
    ["Port", (port) => `${port.port} ${port.direction}`],
    ["Rate", (port) => bytes(port.rate_bytes_per_s) + "/s", true],
    ["Others send", (port) => (port.foreign_bytes_per_s ? bytes(port.foreign_bytes_per_s) + "/s" : "–"), true],
    ["Load", (port) => (port.load_permille / 10).toFixed(0) + " %", true],
    ["Waiting", (port) => bytes(port.queued_bytes), true],
    ["By level", (port) => split(port.queued_by_level, {})],
    ["By stage", (port) => split(port.queued_by_stage, STAGES)],
  ], host.ports);
  const summary = `${count(host.ports.length, "port")}, busiest ${busiest.port} ${busiest.direction} ${(busiest.load_permille / 10).toFixed(0)} %`;
  const details = make("details", { "data-host": host.host }, make("summary", {}, summary), shown);
  details.open = opened.has(host.host);
  details.addEventListener("toggle", () => {
    if (details.open) opened.add(host.host); else opened.delete(host.host);
  });
  return details;
}

const opened = new Set();

function standing(host) {
  if (host.drained) {
    const { drain } = host, by = drain && drain.author ? " by " + drain.author : "";
    const said = drain ? ` ${span(drain.age_ns)} ago${by}` + (drain.comment ? `: “${drain.comment}”` : "") : "";
    return make("span", {}, make("span", { class: "warn" }, "drained"), said);
  }
  return host.connected ? make("span", { class: "good" }, "connected") : make("span", { class: "bad" }, "not connected");
}

const queued = (host) => host.ports.reduce((sum, port) => sum + port.queued_bytes, 0);
const lateness = (host) => (host.completed_flows ? host.missed_flows / host.completed_flows : -1);
const HOST = [
  ["Host", (host) => only("find", host.host), false, (host) => host.host],
  ["State", standing, false, (host) => 2 * host.drained + !host.connected],
  ["Waiting", (host) => bytes(queued(host)), true, queued],
  ["Batches", (host) => host.batches, true, (host) => host.batches],
  ["Requests", (host) => host.requests, true, (host) => host.requests],
  ["Fetches", (host) => host.fetches || ""],
  ["Flows late", (host) => (host.completed_flows ? percent(host.missed_flows, host.completed_flows) : ""), true, lateness],
  ["Refused", (host) => (host.refused_events ? host.refused_events + " events" : ""), true, (host) => host.refused_events],
  ["Heard", (host) => (host.silent_ns === null ? "never" : span(host.silent_ns) + " ago"), false, (host) => never(host.silent_ns)],
  ["Ports", ports],
];

function hosts(state) {
  const all = state.totals.hosts;
  const caption = state.hosts.length < all
    ? `${state.hosts.length} of ${all.toLocaleString("en")}: those in trouble first, then those where most waits. laxity cluster hosts lists all.` : "";
  const names = (host) => [host.host, ...host.ports.map((port) => port.port)];
  listed("hosts", state, HOST, state.hosts, state.hosts.filter((host) => passes(host.tenant, ...names(host))), caption,
    "No daemon has come yet. Name this coordinator in the daemons' configuration.");
}

function settings({ policy: said }) {
  return [
    ["policy", said.policy], ["drop_budget", said.drop_budget], ["debounce", span(said.debounce_ns)],
    ["rank_margin", span(said.rank_margin_ns)], ["correction_permille", said.correction_permille],
  ];
}

/** What a revision changed, if the one before is known. */
function changes(one, before) {
  if (!before) return one.revision === 1 ? "what the configuration says" : "–";
  const old = new Map(settings(before));
  const changed = settings(one).filter(([name, value]) => old.get(name) !== value);
  return changed.map(([name, value]) => `${name}: ${old.get(name)} → ${value}`).join(", ") || "nothing";
}

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function policy(state) {
  if (!state.policy) return;
  put("policy", make("p", {}, settings(state.policy).map(([name, value]) => `${name} = ${value}`).join(" · ")));
  const revisions = [state.policy, ...state.history].map((one, index, all) => ({ ...one, changed: changes(one, all[index + 1]) }));
  put("history", table(revisions.at(-1).revision > 1 ? `The last ${revisions.length}. laxity cluster policy history --limit N lists more.` : "", [
    ["Revision", (one) => one.revision, true],
    ["When", (one) => `${clock.format(Date.now() - one.age_ns / 1e6)} (${span(one.age_ns)} ago)`],
    ["Who", (one) => one.author],
    ["Changed", (one) => one.changed],
    ["Why", (one) => one.comment],
  ], revisions));
}

function explanation(told) {
  const facts = make("ul", {}, ...told.text.map((line) => make("li", {}, line)));
  const parts = [facts];
  const order = [
    ...told.before.map((other) => [other, ""]),
    [{ batch: told.status.batch, red_remaining_ns: told.status.red_remaining_ns }, "this one"],
    ...told.after.map((other) => [other, ""]),
  ];
  parts.push(make("h3", {}, "Around it in the order"), table("", [
    ["Batch", ([other, note]) => (note ? other.batch : link(other))],
    ["Due (RED)", ([other]) => until(other.red_remaining_ns)],
    ["", ([, note]) => note],
  ], order));
  if (told.pruned.length) {
    parts.push(make("h3", {}, "Pruned requests"), table("", [
      ["Request", (pruned) => pruned.request],
      ["For batch", (pruned) => pruned.for_batch],
      ["At", (pruned) => (pruned.port
        ? make("span", {}, `${pruned.port.port} ${pruned.port.direction} of `, only("find", pruned.port.host)) : "computing alone")],
      ["Left there", (pruned) => bytes(pruned.bytes), true],
      ["Due", (pruned) => until(pruned.remaining_ns)],
    ], told.pruned));
  }
  return parts;
}

let explained = "";

/** Shows the batch that the address names: #batch=ID&tenant=NAME. */
async function explain() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const batch = wanted.get("batch");
  at("explain").hidden = !batch;
  if (!batch) { explained = ""; return; }
  put("explain-title", `Why is batch ${printable(batch)} where it is?`);
  let parts;
  try {
    const answer = await fetch("api/explain?" + wanted, { cache: "no-store" });
    const told = await answer.json();
    parts = answer.ok ? explanation(told) : [make("p", { class: "notice" }, told.error)];
  } catch (error) {
    parts = [make("p", { class: "notice" }, "The coordinator does not answer: " + error.message)];
  }
  put("explanation", ...parts);
  if (explained !== batch) at("explain").scrollIntoView({ block: "start" });
  explained = batch;
}

let last = null;

function show(state) {
  last = state;
  const headline = at("headline");
  headline.className = "";
  headline.textContent = `laxity-coordinator ${state.version}, ${state.leading ? "leading" : "standing by"}, up ${span(state.up_ns)}, `
    + `term ${state.term}, ${count(state.runs, "run")} of admission`;
  keepingFocus(() => {
    for (const part of [totals, chart, queues, tenants, batches, hosts, policy]) part(state);
  });
}

/** What has the focus is made anew: it goes to its successor. */
function keepingFocus(work) {
  const before = document.activeElement;
  const section = before && before.closest("section");
  const key = (element) => element.getAttribute("href")
    || element.getAttribute("data-sort")
    || (element.tagName === "SUMMARY" ? element.parentElement.getAttribute("data-host") : null);
  const known = section && key(before);
  work();
  if (!known || before.isConnected) return;
  const heir = [...section.querySelectorAll("a, summary, button")].find((element) => key(element) === known);
  if (heir) heir.focus({ preventScroll: true });
}

async function poll() {
  try {
    const answer = await fetch("api/state", { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    show(await answer.json());
    if (explained) await explain();
  } catch (error) {
    const headline = at("headline");
    headline.className = "stale";
    headline.textContent = `No answer from the coordinator (${error.message})` + (last ? "; what is below is old." : ".");
  }
  // Nobody looks: nothing is asked.
  if (document.hidden) {
    document.addEventListener("visibilitychange", () => poll(), { once: true });
  } else {
    setTimeout(poll, POLL_MS);
  }
}

function choose(buckets, chosen, other) {
  period = buckets;
  at(chosen).setAttribute("aria-pressed", "true");
  at(other).setAttribute("aria-pressed", "false");
  if (last) chart(last);
}

at("short").addEventListener("click", () => choose(1, "short", "long"));
at("long").addEventListener("click", () => choose(6, "long", "short"));
at("find").value = view.get("find") || "";
at("find").addEventListener("input", () => look("find", at("find").value.trim()));
at("tenant").addEventListener("change", () => look("tenant", at("tenant").value));
addEventListener("hashchange", explain);
addEventListener("resize", () => { if (last) chart(last); });
explain();
poll();

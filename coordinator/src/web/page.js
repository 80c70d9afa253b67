// The coordinator's page. kit.js, which is loaded before, has what it shares with the daemon's.
"use strict";

function totals(state) {
  const { totals: sums, attainment } = state;
  const ended = attainment.in_time + attainment.late;
  const gone = sums.hosts - sums.connected;
  put("totals",
    total("Hosts", sums.connected.toLocaleString("en"),
      [gone ? gone + " not connected" : "", sums.drained ? sums.drained + " drained" : ""].filter(Boolean).join(", ")),
    total("Batches", sums.batches.toLocaleString("en")),
    total("Requests", sums.requests.toLocaleString("en"), sums.pruned ? sums.pruned + " pruned" : ""),
    total("Waiting", bytes(state.queues.bytes)),
    total("In time", percent(attainment.in_time, ended), ended ? "of " + ended.toLocaleString("en") : "none ended yet"));
}

/** Text, in which what stands between backticks is a command or a key. */
const commands = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

/** A link to the leader's page. It is where this page is, if this one is asked for by the address that is advertised. */
function leaderPage({ leader, advertise }) {
  const [theirs, ours] = [leader, advertise].map((address) => address.slice(0, address.lastIndexOf(":")));
  if (!theirs || theirs === ours || ours !== location.hostname) return "";
  return make("a", { href: `${location.protocol}//${theirs}${location.port && ":" + location.port}/` }, "the leader's page");
}

const SEVERITY = { error: "bad", warn: "warn", info: "" };

/** What an operator should know, the worst first, each with what to do. */
function findings(state) {
  const items = state.findings.map(({ id, severity, found, why, action }) => make("li", {},
    make("span", { class: SEVERITY[severity] }, found), make("div", { class: "faint" }, "Why: ", why),
    make("div", {}, "Do: ", ...commands(action), " ", id === "leader" ? leaderPage(state) : "")));
  put("findings", items.length ? make("ul", {}, ...items) : make("p", { class: "faint" }, "Nothing that the coordinator sees."));
}

function attainment(state) {
  const { buckets, bucket_s: bucket, late_pruned: pruned, undated } = state.attainment;
  let ended = 0, inTime = 0;
  const bars = grouped(buckets).map(([good, late], index) => {
    const all = good + late;
    if (all === 0) return null;
    ended += all;
    inTime += good;
    const ago = span(index * period * bucket * 1e9);
    return { parts: [["in-time", good / all], ["late", late / all]], title: `${good} of ${all} in time` + (index ? `, ${ago} ago` : ", now") };
  });
  const minutes = BARS * period * bucket / 60;
  const said = `${percent(inTime, ended)} of ${count(ended, "request")} with a deadline that ended in the last ${minutes} minutes were in time.`;
  chart(bars, [0, 0.5, 1].map((share) => [share, 100 * share + "%"]), minutes, said);
  const more = [pruned ? `${pruned} of those late had been pruned since the start` : "", undated ? `${undated} had no deadline` : ""];
  put("attainment", ended ? said : "No request with a deadline has ended in this period.",
    make("span", { class: "faint" }, more.some(Boolean) ? " " + more.filter(Boolean).join("; ") + "." : ""));
}

function queues(state) {
  const { by_level: levels, by_stage: stages, bytes: waiting } = state.queues;
  const silent = levels.length === 0 && stages.length === 0;
  put("queues", `${bytes(waiting)} at the egresses of all hosts.`,
    silent ? " No daemon reports its queues by level or stage. The load of each port is shown with its host." : "");
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

function batches(state) {
  const show = (id, rows, caption, none) => listed(id, tenantsToo(state, BATCH), rows,
    rows.filter((batch) => passes("tenant", batch.tenant, batch.batch, ...batch.hosts)), caption, none);
  const { batches: all } = state.totals;
  show("order", state.batches,
    state.batches.length < all ? `The first ${state.batches.length} of ${all.toLocaleString("en")}.` : "", "No batch is active.");
  show("trouble", state.trouble, "", "None: every batch should be in time, and nobody is pruned.");
}

function tenants(state) {
  choices("tenant", state.tenants.map((tenant) => tenant.tenant));
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
  return folded(host.host, summary, shown);
}

function standing(host) {
  if (host.drained) {
    const { drain } = host, by = drain && drain.author ? " by " + drain.author : "";
    const said = drain ? ` ${span(drain.age_ns)} ago${by}` + (drain.comment ? `: “${drain.comment}”` : "") : "";
    return make("span", {}, make("span", { class: "warn" }, "drained"), said);
  }
  if (host.left) return make("span", { class: "faint" }, "stopped");
  return host.connected ? make("span", { class: "good" }, "connected") : make("span", { class: "bad" }, "not connected");
}

const queued = (host) => host.ports.reduce((sum, port) => sum + port.queued_bytes, 0);
const lateness = (host) => (host.completed_flows ? host.missed_flows / host.completed_flows : -1);
const HOST = [
  ["Host", (host) => only("find", host.host), false, (host) => host.host],
  ["State", standing, false, (host) => 4 * host.drained + 2 * (!host.connected && !host.left) + host.left],
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
  listed("hosts", tenantsToo(state, HOST), state.hosts, state.hosts.filter((host) => passes("tenant", host.tenant, ...names(host))), caption,
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
    const answer = await ask("api/explain?" + wanted);
    const told = await answer.json();
    parts = answer.ok ? explanation(told) : [make("p", { class: "notice" }, told.error)];
  } catch (error) {
    parts = [make("p", { class: "notice" }, "The coordinator does not answer: " + error.message)];
  }
  put("explanation", ...parts);
  if (explained !== batch) at("explain").scrollIntoView({ block: "start" });
  explained = batch;
}

function draw(state) {
  at("headline").textContent = `laxity-coordinator ${state.version}, ${state.leading ? "leading" : "standing by"}, up ${span(state.up_ns)}, `
    + `term ${state.term}, ${count(state.runs, "run")} of admission`;
  for (const part of [totals, findings, attainment, queues, tenants, batches, hosts, policy]) part(state);
}

addEventListener("hashchange", explain);
explain();
begin("the coordinator", "tenant", async () => { if (explained) await explain(); });

// The daemon's page. kit.js, which is loaded before, has what it shares with the coordinator's.
"use strict";

const sum = (rows, key) => rows.reduce((all, row) => all + key(row), 0);
const rate = (bytesPerS) => (bytesPerS ? bytes(bytesPerS) + "/s" : "–");
const ago = (ms) => span(ms * 1e6) + " ago";
const code = (text) => make("code", {}, text);

/** Bytes by stage of one bucket, without what went unscheduled and the misses. */
const permitted = (bucket) => sum(bucket.slice(0, -2), (part) => part);

function totals({ status, buckets, bucket_s: bucket }) {
  const { totals: all, ports } = status;
  // The last bucket is not complete.
  const latest = buckets.length > 1 ? permitted(buckets.at(-2)) / bucket : 0;
  put("totals",
    total("Clients", status.clients.length.toLocaleString("en"), all.refusals ? all.refusals + " refused" : ""),
    total("Waiting", bytes(sum(ports, (port) => port.waiting_bytes)),
      make("a", { href: "#waiting" }, count(sum(ports, (port) => port.waiting_flows), "flow"))),
    total("Permitted", rate(Math.round(latest)), bytes(all.permitted_bytes) + " in all" + (all.observed_bytes ? ", " + bytes(all.observed_bytes) + " only observed" : "")),
    total("Deadlines missed", all.deadline_misses.toLocaleString("en"), "of " + count(all.flows, "flow")),
    total("Unscheduled", bytes(all.bypassed_bytes)),
    total("Pruned now", count(all.pruned_requests, "request")));
}

/** What an operator should know, each with what to do. */
function problems({ status }) {
  const found = [];
  const say = (kind, what, ...remedy) => found.push(make("li", {}, make("span", { class: kind }, what), " ", ...remedy));
  const { totals: all, cluster } = status;
  if (status.bypass) say("bad", "Bypass is on: nothing is scheduled.", code("laxity bypass off"), " ends it.");
  if (status.mode !== "enforce") {
    say("warn", `The mode is ${status.mode}: nothing is delayed.`, code("laxity enforce on"), " makes bytes wait for permits.");
  }
  for (const one of status.refused || []) {
    say("warn", `User ${one.uid} was refused ${count(one.count, "time")}, last ${ago(one.last_ms)}: ${one.why}`,
      ...(one.setting ? [code(one.setting), " admits it."] : []));
  }
  for (const one of status.distrusted) {
    say("bad", `User ${one.uid} lost permitted bytes: its new clients go unscheduled for ${span(one.for_ms * 1e6)}.`, one.cgroup);
  }
  for (const problem of status.problems || []) say("bad", `The daemon: ${problem}.`, "");
  for (const client of status.clients) {
    const name = `${client.name} (process ${client.pid})`;
    if (client.held) say("bad", `${name} is held until it completes ${bytes(client.owed_bytes)}.`, "Look whether it hangs.");
    if (client.quarantined_lanes) {
      say("bad", `${name} wrote invalid records: ${count(client.quarantined_lanes, "lane")} are no longer read.`,
        "Restart it, and report this with ", code("laxity support-bundle"), ".");
    }
    if (client.unknown_nic_flows) {
      say("warn", `${name} sent ${count(client.unknown_nic_flows, "flow")} by NICs that the daemon does not have, unscheduled.`,
        code("laxity doctor"), " names them.");
    }
    if (client.library_is_older) say("warn", `${name} has an older library, ${client.library}.`, "Restart it with this release.");
  }
  for (const port of status.ports) {
    if (port.absent && port.direction === "egress") {
      say("warn", `The host has no ${port.name} now.`, "Its flows go unscheduled until it returns.");
    }
    if (port.rate_assumed && port.direction === "egress") {
      say("warn", `The kernel knows no rate of ${port.name}: ${rate(port.rate_bytes_per_s)} is assumed.`,
        "Set ", code("rate"), " in its ", code("[[nic]]"), ".");
    }
    if (port.counters_stale) {
      say("warn", `The counters of ${port.name} ${port.direction} stand still.`, "Traffic of others is not seen there.");
    }
  }
  if (all.written_off_bytes) {
    say("warn", `${bytes(all.written_off_bytes)} were permitted and never completed.`, "A client died or lost completions.");
  }
  if (cluster && !cluster.connected) {
    say("bad", `No stream to the coordinator ${cluster.endpoint}: this host orders by itself.`, cluster.problem);
  }
  return found;
}

function trouble(state) {
  const found = problems(state);
  put("trouble", found.length ? make("ul", {}, ...found) : make("p", { class: "faint" }, "None that the daemon sees."));
}

function permits({ buckets, bucket_s: bucket }) {
  const sums = grouped(buckets), seconds = period * bucket;
  const sent = (one) => permitted(one) + one.at(-2);
  const most = Math.max(1, ...sums.map(sent));
  const bars = sums.map((one, index) => {
    if (sent(one) === 0) return null;
    const parts = one.slice(0, -2).map((part, stage) => ["stage-" + stage, part / most]);
    const missed = one.at(-1) ? `, ${count(one.at(-1), "deadline")} missed` : "";
    const when = index ? ", " + span(index * seconds * 1e9) + " ago" : ", now";
    return { parts: [...parts, ["late", one.at(-2) / most]], title: rate(Math.round(sent(one) / seconds)) + missed + when };
  });
  const minutes = BARS * seconds / 60;
  const [all, unscheduled, misses] = [sum(sums, permitted), sum(sums, (one) => one.at(-2)), sum(sums, (one) => one.at(-1))];
  const said = `${bytes(all)} were permitted in the last ${minutes} minutes, ${bytes(unscheduled)} went unscheduled, `
    + `and ${count(misses, "deadline")} were missed.`;
  chart(bars, [0, 0.5, 1].map((share) => [share, share ? rate(Math.round(share * most / seconds)) : "0"]), minutes, said);
  put("history", said);
}

/** Sums of the ports' queues by name, in the ports' order. */
function queued(ports, rows, name) {
  const sums = new Map();
  for (const port of ports) {
    for (const row of port[rows]) sums.set(row[name], (sums.get(row[name]) || 0) + row.waiting_bytes);
  }
  return [...sums].map(([name, bytes]) => ({ name, bytes }));
}

function queues({ status }) {
  bars("levels", queued(status.ports, "levels", "level"), {});
  bars("stages", queued(status.ports, "stages", "stage"), STAGES);
}

function portDetails(port) {
  const levels = table("", [
    ["Level", (row) => row.level],
    ["DSCP", (row) => row.dscp, true],
    ["Waiting", (row) => bytes(row.waiting_bytes), true],
    ["Flows", (row) => row.waiting_flows || "", true],
    ["Permitted", (row) => bytes(row.permitted_bytes), true],
  ], port.levels);
  const stages = table("", [
    ["Stage", (row) => STAGES[row.stage] || row.stage],
    ["Waiting", (row) => bytes(row.waiting_bytes), true],
    ["Permitted", (row) => bytes(row.permitted_bytes), true],
    ["Missed", (row) => row.deadline_misses || "", true],
    ["Wait, median", (row) => (row.wait.flows ? span(row.wait.p50_ns) : ""), true],
    ["99 %", (row) => (row.wait.flows ? span(row.wait.p99_ns) : ""), true],
  ], port.stages);
  return folded(`${port.name} ${port.direction}`, "by level and stage", make("div", {}, levels, stages));
}

const PORT = [
  ["Port", (port) => `${port.name} ${port.direction}`, false, (port) => `${port.name} ${port.direction}`],
  ["Rate", (port) => rate(port.rate_in_force_bytes_per_s || port.rate_bytes_per_s), true, (port) => port.rate_bytes_per_s],
  ["Foreign", (port) => (port.counters ? rate(port.foreign_bytes_per_s) : "not measured"), true, (port) => port.foreign_bytes_per_s],
  ["Load", (port) => (100 * port.load).toFixed(0) + " %", true, (port) => port.load],
  ["In flight", (port) => `${bytes(port.in_flight_bytes)}, window ${bytes(port.window_bytes)}`, true, (port) => port.in_flight_bytes],
  ["Waiting", (port) => bytes(port.waiting_bytes), true, (port) => port.waiting_bytes],
  ["Flows", (port) => port.waiting_flows || "", true, (port) => port.waiting_flows],
  ["Promoted", (port) => port.promotions || "", true, (port) => port.promotions],
  ["More", portDetails],
];

function ports({ status }) {
  const words = (view.get("find") || "").toLowerCase().split(/\s+/);
  const named = status.ports.filter((port) => words.every((word) => `${port.name} ${port.direction}`.toLowerCase().includes(word)));
  // Words that name no port are those of a client.
  listed("ports", PORT, status.ports, named.length ? named : status.ports, "", "The daemon has no NIC.");
}

const pod = ({ pod: at }) => (at ? (at.name ? `${at.namespace}/${at.name}/${at.container}` : at.uid) : "");

function condition(client, bypass) {
  const words = [];
  const say = (kind, word) => words.push(make("span", { class: kind }, word));
  if (bypass) say("bad", "bypassed");
  if (client.distrusted) say("bad", "distrusted");
  if (client.held) say("bad", "held");
  if (client.limited) say("warn", "limited");
  if (client.mode !== "enforce") say("warn", client.mode);
  if (words.length === 0) say("good", "scheduled");
  return make("span", {}, ...words.flatMap((word, index) => (index ? [", ", word] : [word])));
}

const CLIENT = [
  ["Job", (client) => client.name, false, (client) => client.name],
  ["Process", (client) => make("a", { href: "#pid=" + client.pid, title: "Explain its flows" }, client.pid), true, (client) => client.pid],
  ["User", (client) => only("user", client.uid, "clients-title"), true, (client) => client.uid],
  ["Pod", pod, false, pod],
  ["State", (client) => condition(client, last.status.bypass)],
  ["Waiting", (client) => count(client.waiting_flows, "flow"), true, (client) => client.waiting_flows],
  ["Submitted", (client) => bytes(client.submitted_bytes), true, (client) => client.submitted_bytes],
  ["Permitted", (client) => bytes(client.permitted_bytes), true, (client) => client.permitted_bytes],
  ["Observed", (client) => (client.observed_bytes ? bytes(client.observed_bytes) : ""), true, (client) => client.observed_bytes],
  ["Unscheduled", (client) => (client.bypassed_bytes ? bytes(client.bypassed_bytes) : ""), true, (client) => client.bypassed_bytes],
  ["Library", (client) => client.library],
  ["Attached", (client) => ago(client.attached_ms), true, (client) => client.attached_ms],
];

function clients({ status }) {
  const shown = status.clients.filter((client) => passes("user", client.uid, client.name, String(client.pid), pod(client)));
  listed("clients", CLIENT, status.clients, shown, "", "No client is attached. laxity run -- COMMAND starts a job under this daemon.");
}

function users({ status }) {
  const byUser = Map.groupBy(status.clients, (client) => client.uid);
  choices("user", [...byUser.keys()].map(String));
  const rows = [...byUser].map(([uid, all]) => ({
    uid, clients: all.length, flows: sum(all, (one) => one.flows), waiting: sum(all, (one) => one.waiting_flows),
    permitted: sum(all, (one) => one.permitted_bytes), owed: sum(all, (one) => one.owed_bytes), limited: all.some((one) => one.limited),
  }));
  put("users", rows.length ? table("", [
    ["User", (user) => only("user", user.uid, "clients-title"), true, (user) => user.uid],
    ["Clients", (user) => user.clients, true, (user) => user.clients],
    ["Flows", (user) => user.flows, true, (user) => user.flows],
    ["Waiting", (user) => user.waiting, true, (user) => user.waiting],
    ["Permitted", (user) => bytes(user.permitted), true, (user) => user.permitted],
    ["Owed", (user) => (user.owed ? bytes(user.owed) : ""), true, (user) => user.owed],
    ["", (user) => (user.limited ? make("span", { class: "warn" }, "has its whole part of a port") : "")],
  ], rows, "users") : make("p", { class: "faint" }, "No user has a client."));
}

function cluster({ status: { cluster: seen } }) {
  if (!seen) return put("cluster", make("p", { class: "faint" }, "This daemon has no coordinator, so it orders by itself."));
  const facts = [
    ["Coordinator", `${seen.endpoint}${seen.coordinator ? ", " + seen.coordinator : ""}`],
    ["Stream", seen.connected ? make("span", { class: "good" }, "connected") : make("span", { class: "bad" }, seen.problem || "not connected")],
    ["This host", seen.host + (seen.drained ? ", drained" : "")],
    ["Order in force", seen.order === "cluster" ? `the cluster's, confirmed ${ago(seen.age_ms || 0)}` : "the daemon's own"],
    ["Orders", `${seen.orders} applied, ${seen.stale_orders} stale, ${seen.broken_orders} broken`],
    ["Events refused", seen.refused_events],
  ];
  put("cluster", make("dl", { class: "glossary" },
    ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}

function changes({ status }) {
  const rows = status.changes || [];
  put("changes", rows.length ? table("", [
    ["When", (change) => ago(change.ago_ms)],
    ["User", (change) => (change.uid === null ? "a signal" : change.uid)],
    ["Change", (change) => change.what],
  ], rows) : make("p", { class: "faint" }, "None since this daemon started."));
}

function draw(state) {
  const { status } = state;
  at("headline").textContent = `laxityd ${status.version} (process ${status.pid}), up ${span(status.uptime_ms * 1e6)}, `
    + `policy ${status.policy}, ${status.mode}${status.bypass ? ", bypassed" : ""}`;
  for (const part of [totals, trouble, permits, queues, users, ports, clients, cluster, changes]) part(state);
}

/** One flow in sentences, and the numbers by which `laxity explain` takes it. */
function flow(told) {
  return make("li", {}, make("a", { href: "#flow=" + told.flow }, "Flow " + told.flow), ": ", ...told.text.flatMap((text) => [text, " "]));
}

let explained = "";

/** Shows the flows that the address names: #waiting, or #flow=NUMBER, #request=ID, #batch=ID, #pid=PID. */
async function explain() {
  const wanted = location.hash.slice(1);
  const conditions = /^(flow|request|batch|pid)=/.test(wanted) ? wanted : "";
  at("explain").hidden = !conditions && wanted !== "waiting";
  if (at("explain").hidden) { explained = ""; return; }
  put("explain-title", conditions ? `Flows of ${printable(conditions)}` : "Why do flows wait?");
  let parts;
  try {
    const answer = await ask("api/explain?" + conditions);
    if (!answer.ok) throw new Error(await answer.text());
    const { flows, count: all } = await answer.json();
    if (location.hash.slice(1) !== wanted) return;
    const none = conditions ? "No such flow is under way: it has ended, it went out unscheduled, or another host has it."
      : "No flow waits for a permit.";
    parts = [flows.length ? make("ul", {}, ...flows.map(flow)) : make("p", { class: "faint" }, none)];
    if (all > flows.length) parts.push(make("p", { class: "faint" }, `${count(all - flows.length, "more flow")} are meant.`));
  } catch (error) {
    parts = [make("p", { class: "notice" }, "laxityd does not answer: " + error.message)];
  }
  put("explanation", ...parts);
  if (explained !== wanted) at("explain").scrollIntoView({ block: "start" });
  explained = wanted;
}

addEventListener("hashchange", explain);
explain();
begin("laxityd", "user", async () => { if (explained) await explain(); });

// What Laxity's pages share: elements, units, tables, a chart, and the loop that asks for the state every two seconds.
// All text that comes from the server is set as text, never as markup. A page defines `draw(state)` and calls `begin`.
"use strict";

const POLL_MS = 2000;
/** After this wait a server counts as hung: a stopped process accepts connections and never answers. */
const ANSWER_MS = 5000;
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
  if (last) redraw(last);
}

/** Whether a row has all words that are looked for, and the value of `key` that is picked. */
function passes(key, value, ...texts) {
  const said = texts.join("\n").toLowerCase(), of = view.get(key);
  const words = (view.get("find") || "").toLowerCase().split(/\s+/);
  return (!of || of === String(value)) && words.every((word) => said.includes(word));
}

/** A link to the same page with a filter. */
const only = (key, value, place = "hosts-title") =>
  make("a", { href: "?" + new URLSearchParams({ [key]: value }) + "#" + place }, value);

/** The choices of the filter `key`. What is picked stays a choice, though it may be gone. */
function choices(key, names) {
  const picked = view.get(key) || "", all = ["", ...names];
  if (!all.includes(picked)) all.push(picked);
  if (all.join("\n") !== [...at(key).options].map((option) => option.value).join("\n")) {
    put(key, ...all.map((name) => make("option", { value: name }, name || "all")));
  }
  at(key).value = picked;
  put("filtered", picked || view.get("find") ? make("a", { href: location.pathname }, "Show all") : "");
}

/** Rows by the column that was clicked on, or in the order of the state. */
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

/** The table of the rows that pass the filter, and how many it hides. */
function listed(id, columns, rows, shown, caption, none) {
  const hidden = rows.length - shown.length;
  const note = hidden ? make("p", { class: "faint" }, `The filter hides ${hidden} of the ${rows.length} here.`) : "";
  const empty = hidden ? "" : make("p", { class: "faint" }, none);
  put(id, shown.length ? table(caption, columns, shown, id) : empty, note);
}

const total = (name, value, note) =>
  make("div", {}, make("dt", {}, name), make("dd", {}, value, note ? make("small", {}, note) : ""));

/** Buckets of each bar of the chart. */
let period = 1;

/** Sums of whole bars, from the newest bucket backwards. */
function grouped(buckets) {
  const bars = [];
  for (let end = buckets.length; end > 0 && bars.length < BARS; end -= period) {
    const part = buckets.slice(Math.max(0, end - period), end);
    bars.push(part.reduce((sums, bucket) => sums.map((sum, index) => sum + bucket[index])));
  }
  return bars;
}

/**
 * Draws stacked bars, the newest at the right. A bar is { parts: [[class, share of the height]], title }, from the bottom
 * up, or null. Ticks are [share of the height, text].
 */
function chart(bars, ticks, minutes, said) {
  const left = 10 + 6.5 * Math.max(...ticks.map(([, text]) => text.length));
  const width = Math.max(280, at("chart").clientWidth || 600), height = 144, bottom = 18, top = 10;
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
  svg.setAttribute("aria-label", said);
  const plot = height - bottom - top;
  for (const [share, text] of ticks) {
    const y = top + plot * (1 - share);
    draw("line", { x1: left, x2: width, y1: y, y2: y });
    draw("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, text);
  }
  const step = (width - left) / BARS;
  bars.forEach((bar, index) => {
    const x = width - (index + 1) * step;
    let y = top + plot;
    for (const [kind, share] of bar ? bar.parts : []) {
      if (!(share > 0)) continue;
      y -= plot * share;
      const shape = draw("rect", { class: kind, x: x + step * 0.1, y, width: step * 0.8, height: plot * share });
      const title = document.createElementNS(SVG, "title");
      title.textContent = bar.title;
      shape.append(title);
    }
  });
  draw("text", { x: left, y: height - 4 }, `${minutes} min ago`);
  draw("text", { x: width, y: height - 4, "text-anchor": "end" }, "now");
  put("chart", svg);
}

function bars(id, queues, names) {
  const most = Math.max(1, ...queues.map((queue) => queue.bytes));
  put(id, ...queues.map((queue) => {
    const name = names[queue.name] || queue.name;
    return make("li", {}, make("span", {}, name),
      make("progress", { max: most, value: queue.bytes, "aria-label": name }), make("span", {}, bytes(queue.bytes)));
  }));
}

const never = (ns) => (ns === null ? Infinity : ns);

/** The folded parts of rows that are open, by name. */
const opened = new Set();

function folded(name, summary, shown) {
  const details = make("details", { "data-row": name }, make("summary", {}, summary), shown);
  details.open = opened.has(name);
  details.addEventListener("toggle", () => {
    if (details.open) opened.add(name); else opened.delete(name);
  });
  return details;
}

let last = null;

function redraw(state) {
  const { className, textContent } = at("headline"), isNews = state !== last;
  last = state;
  keepingFocus(() => draw(state));
  // That nobody answers is said until somebody does.
  if (isNews) at("headline").className = "";
  else if (className) at("headline").textContent = textContent;
}

/** What has the focus is made anew: it goes to its successor. */
function keepingFocus(work) {
  const before = document.activeElement;
  const section = before && before.closest("section");
  const key = (element) => element.getAttribute("href")
    || element.getAttribute("data-sort")
    || (element.tagName === "SUMMARY" ? element.parentElement.getAttribute("data-row") : null);
  const known = section && key(before);
  work();
  if (!known || before.isConnected) return;
  const heir = [...section.querySelectorAll("a, summary, button")].find((element) => key(element) === known);
  if (heir) heir.focus({ preventScroll: true });
}

const ask = (path) => fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });

/** Shows the state of `who`, and again every two seconds. `after` runs after each time. */
async function poll(who, after) {
  try {
    const answer = await ask("api/state");
    if (!answer.ok) throw new Error((await answer.text()).trim());
    redraw(await answer.json());
    await after();
  } catch (error) {
    const headline = at("headline");
    headline.className = "stale";
    headline.textContent = `No answer from ${who} (${error.message})` + (last ? "; what is below is old." : ".");
  }
  const again = () => poll(who, after);
  // Nobody looks: nothing is asked.
  if (document.hidden) {
    document.addEventListener("visibilitychange", again, { once: true });
  } else {
    setTimeout(again, POLL_MS);
  }
}

/** Connects the filter, with its choice of `key`, and the chart's switch, and begins to show the state of `who`. */
function begin(who, key, after = async () => {}) {
  const choose = (buckets, chosen, other) => {
    period = buckets;
    at(chosen).setAttribute("aria-pressed", "true");
    at(other).setAttribute("aria-pressed", "false");
    if (last) redraw(last);
  };
  at("short").addEventListener("click", () => choose(1, "short", "long"));
  at("long").addEventListener("click", () => choose(6, "long", "short"));
  at("find").value = view.get("find") || "";
  at("find").addEventListener("input", () => look("find", at("find").value.trim()));
  at(key).addEventListener("change", () => look(key, at(key).value));
  addEventListener("resize", () => { if (last) redraw(last); });
  poll(who, after);
}

/** Parts that screens share: links, words for a state, bars, tables, lists of problems and events. */

import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { age, bytes, clock } from "./format.js";

const PAGES = { Node: "macs", ModelDeployment: "models", Replica: "replicas", ShardGroup: "groups", GitSource: "git" };
const MOST_WHOLE_ROWS = 200;
const NEAR_PX = 400; // rows so far out of sight are in the document, too
const USUAL_ROW_PX = 40;
const MOST_PROBLEMS = 50;
const TONES = ["bad", "warning"]; // what people chose, such as a pause, stands after what refuses clients
const LAST_PAUSE_MS = 10_000;
const SLOW_MS = 20_000;
const ANNOUNCE_MS = 5_000;
const COMMAND = /^(fleetctl|fleet-[a-z]+|sudo|make|ssh|curl) /;
const NAME = /(\w+(?:[.-]+\w+)*-\w+)/;
let announcedAt = Number.NEGATIVE_INFINITY; // of all regions of the page
const KINDS = { Node: "node", ModelDeployment: "md", Replica: "replica", ShardGroup: "sg", ModelRoute: "route", GitSource: "gs" };

/** Return the path of an object's page; "" if its kind has none. */
export const pathOf = (kind, name) => (PAGES[kind] ? `/${PAGES[kind]}/${encodeURIComponent(name)}` : "");

export const logPath = (source) => `/activity?tab=logs&of=${encodeURIComponent(source).replace("%2F", "/")}`;

/** The path of the editor with an object, and with other values of its numbers. */
export const tryPath = (kind, name, numbers = {}) => `/try?${new URLSearchParams(Object.entries({ kind, name, ...numbers }).filter(([, value]) => value))}`;

/** Return an object's name as fleetctl takes it, such as md/qwen. */
const reference = (kind, name) => `${KINDS[kind] ?? kind.toLowerCase()}/${name}`;

export function useStore(store) {
  const [, redraw] = useReducer((number) => number + 1, 0);
  // An effect would run a frame later, and miss what changes in between.
  useLayoutEffect(() => store.subscribe(redraw), [store]);
}

/** The name of an object, with a link if its kind has a page. It stays on one line, unless it is longer than its place. */
export function ObjectLink({ kind, name }) {
  const path = pathOf(kind, name);
  return path ? html`<a class="name" href=${path}>${name}</a>` : html`<span class="name">${reference(kind, name)}</span>`;
}

/** Names of objects of a kind, or of what has no kind. */
export function Names({ kind, names, empty = "-" }) {
  if (!names.length) return empty;
  return names.map((name, at) => html`${at ? ", " : ""}${kind ? html`<${ObjectLink} kind=${kind} name=${name} />` : html`<span class="name">${name}</span>`}`);
}

/** A state as a shape and a word, never as a colour alone. */
export function Badge({ tone, children }) {
  const shape = { good: "●", warning: "▲", bad: "■", idle: "○" }[tone];
  return html`<span class="badge ${tone}"><span aria-hidden="true">${shape}</span> ${children}</span>`;
}

export function MacState({ mac }) {
  if (mac.state === "offline") return html`<${Badge} tone="bad">offline<//>`;
  if (mac.state === "asleep") return html`<${Badge} tone="idle">asleep<//>`;
  if (mac.isDraining) return html`<${Badge} tone="warning">draining<//>`;
  if (mac.isCordoned) return html`<${Badge} tone="warning">cordoned<//>`;
  return html`<${Badge} tone=${mac.state === "online" ? "good" : "warning"}>${mac.state}<//>`;
}

export function ModelState({ model }) {
  const text = `${model.ready} of ${model.desired} ready`;
  if (model.desired === 0) return html`<${Badge} tone="idle">scaled to 0<//>`;
  if (model.ready >= model.desired) return html`<${Badge} tone="good">${text}<//>`;
  return html`<${Badge} tone=${model.isAvailable ? "warning" : "bad"}>${text}<//>`;
}

/** The memory of a Mac: weights, KV caches and the rest that is promised to models, free for models, and the machine's own. */
export function MemoryBar({ mac }) {
  const { memoryBytes: total, allocatableBytes: room, promisedBytes: used } = mac;
  if (!total) return html`<span class="quiet">unknown</span>`;
  const isOffline = mac.state === "offline";
  const free = isOffline ? 0 : Math.max(0, (room ?? 0) - used);
  const [weights, kv] = [mac.weightsBytes ?? 0, mac.kvBytes ?? 0];
  const label = `${bytes(used)} reserved for models (${bytes(weights)} of weights, ${bytes(kv)} of KV caches), ${bytes(free)} free for models, of ${bytes(total)}`;
  const width = (part) => ({ width: `${(100 * part) / total}%` });
  return html`<span class="memory" title=${label}>
    <span class="bar" role="img" aria-label=${label}>
      <span class="weights" style=${width(weights)}></span>
      <span class="kv" style=${width(kv)}></span>
      <span class="process" style=${width(Math.max(0, Math.min(used, total) - weights - kv))}></span>
      <span class="free" style=${width(Math.min(free, total - Math.min(used, total)))}></span>
    </span>
    <span class="figure">${isOffline ? bytes(total) : `${bytes(free)} free`}</span>
  </span>`;
}

/** A moment with the whole of it behind it. */
const When = ({ at, text }) => html`<time datetime=${at} title=${at}>${text}</time>`;

const CLASSES = ["number", "wide", "figure"];
const classOf = ([, , as]) => (as === Text ? "wide" : typeof as === "function" ? "number" : CLASSES.includes(as) ? as : "");

/**
 * What is in a cell of a column [title, value, as]. `value`: a field of the row, or a function of it. `as`: a kind, to which the
 * names in it lead; "names" of what has no page; a time as "ago" or by the "clock"; Text; a format of numbers; or a class.
 */
function cellOf([, value, as], row) {
  const content = typeof value === "function" ? value(row) : row[value];
  if (as === "names" || PAGES[as]) return html`<${Names} kind=${PAGES[as] && as} names=${[content ?? []].flat()} />`;
  if (as === "ago") return html`<${When} at=${content} text=${`${age(content)} ago`} />`;
  if (as === "clock") return html`<${When} at=${content} text=${clock(content)} />`;
  if (as === Text) return html`<${Text} text=${content} />`;
  return typeof as === "function" ? as(content) : content ?? "-";
}

/** A table that becomes cards on a phone. Of a long one only the rows in sight are in the document. `rows` have unique names. */
export function Table({ caption, columns, rows, empty }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  if (rows.length > MOST_WHOLE_ROWS) return html`<${LongTable} caption=${caption} columns=${columns} rows=${rows} />`;
  return html`<table>
    <caption class="hidden">${caption}</caption>
    <${Titles} columns=${columns} />
    <tbody>${rows.map((row) => html`<tr key=${row.name}><${Cells} columns=${columns} row=${row} /></tr>`)}</tbody>
  </table>`;
}

export const reasonColumn = (rows) => (rows.some((row) => row.reason) ? [["Reason", "reason", Text]] : []);

const Titles = ({ columns }) => html`<thead><tr>${columns.map((one) => html`<th scope="col" key=${one[0]} class=${classOf(one)}>${one[0]}</th>`)}</tr></thead>`;
const Cells = ({ columns, row }) => columns.map((one) => html`<td key=${one[0]} data-title=${one[0]} class=${classOf(one)}>${cellOf(one, row)}</td>`);

/** A table with the rows in sight and the focused one; gaps stand for the others, as high as those were or may be. */
function LongTable({ caption, columns, rows }) {
  const body = useRef(null);
  const [sight, setSight] = useState({ top: 0, bottom: 2 * innerHeight });
  const [, redraw] = useReducer((number) => number + 1, 0); // the neighbours of the focused row are in the document
  const heights = useRef(new Map()); // of the rows that have been in the document
  const active = body.current?.contains(document.activeElement) ? document.activeElement : null;
  useLayoutEffect(() => {
    // A row whose place among the others changed was taken out for a moment.
    if (active?.isConnected && document.activeElement !== active) active.focus({ preventScroll: true });
    if (heights.current.size > 2 * rows.length) heights.current.clear();
    for (const row of body.current.querySelectorAll("tr[data-name]")) heights.current.set(row.dataset.name, row.offsetHeight);
    look();
  });
  const look = () => {
    const { top } = body.current.getBoundingClientRect();
    const isNear = Math.abs(sight.top + top) < NEAR_PX / 2 && Math.abs(sight.bottom - innerHeight + top) < NEAR_PX / 2;
    if (!isNear) setSight({ top: -top, bottom: innerHeight - top });
  };
  useListener("scroll", look);
  useListener("resize", look);
  const parts = partsInSight(rows, heights.current, sight, active?.closest("tr").dataset.name);
  return html`<table class="long" aria-rowcount=${rows.length + 1}>
    <caption class="hidden">${caption}</caption>
    <${Titles} columns=${columns} />
    <tbody ref=${body} onFocusIn=${redraw}>
      ${parts.map(({ at, gap }) => at === undefined
        ? html`<tr key=${`gap before ${gap.end}`} class="gap" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${gap.px}px` }}></td></tr>`
        : html`<tr key=${rows[at].name} data-name=${rows[at].name} aria-rowindex=${at + 2}><${Cells} columns=${columns} row=${rows[at]} /></tr>`)}
    </tbody>
  </table>`;
}

/** Return the rows to draw by their place, and the gaps between them: `{at}` or `{gap: {end, px}}`. Pure. */
function partsInSight(rows, heights, { top, bottom }, focused) {
  const known = [...heights.values()];
  const usual = known.length ? known.reduce((sum, px) => sum + px, 0) / known.length : USUAL_ROW_PX;
  const focusedAt = rows.findIndex((row) => row.name === focused);
  const parts = [];
  let y = 0;
  rows.forEach((row, at) => {
    const px = heights.get(row.name) ?? usual;
    const gap = parts.at(-1)?.gap;
    const isShown = (y + px > top - NEAR_PX && y < bottom + NEAR_PX) || (focusedAt >= 0 && Math.abs(at - focusedAt) <= 1);
    if (isShown) parts.push({ at });
    else if (gap) Object.assign(gap, { end: at + 1, px: gap.px + px });
    else parts.push({ gap: { end: at + 1, px } });
    y += px;
  });
  return parts;
}

export function problemsOf(store, model) {
  const about = `ModelDeployment/${model}`;
  return store.rows("problems").filter((row) => `${row.kind}/${row.object}` === about || row.affected.includes(about));
}

/** Problems, one card for each cause: what is affected, since when, one remedy, and what it explains. The worst stand first. */
export function Problems({ problems }) {
  if (!problems.length) return null;
  const worst = [...problems].sort((a, b) => TONES.indexOf(a.tone) - TONES.indexOf(b.tone) || ((a.since ?? "") < (b.since ?? "") ? 1 : -1));
  return html`<ul class="problems">
    ${worst.slice(0, MOST_PROBLEMS).map(
      (one) => html`<li key=${one.name} class=${one.tone} data-tone=${one.tone}>
        <p><strong>${pathOf(one.kind, one.object) ? html`<a href=${pathOf(one.kind, one.object)}><${Text} text=${one.title} /></a>` : html`<${Text} text=${one.title} />`}</strong>${one.since && html`<span class="quiet"> since ${age(one.since)}</span>`}</p>
        ${one.cause && html`<p><${Text} text=${one.cause} /></p>`}
        ${one.remedy && html`<p class="cure"><${Text} text=${one.remedy} /></p>`}
        ${!one.remedy.includes(`\`${one.command}\``) && html`<${Command} text=${one.command} />`}
        ${one.conditions.length + one.affected.length > 1 && html`<details><summary>What follows from it</summary><p class="quiet">${[...one.affected, ...one.conditions].map((name) => html`<code key=${name}>${name}</code> `)}</p></details>`}
      </li>`,
    )}
  </ul>
  ${worst.length > MOST_PROBLEMS && html`<p class="quiet">and ${worst.length - MOST_PROBLEMS} more</p>`}`;
}

const EVENTS = [
  ["Last seen", "lastSeen", "clock"],
  ["Type", (one) => html`<${Badge} tone=${one.type === "Warning" ? "warning" : "idle"}>${one.type}<//>`],
  ["Object", (one) => html`<${ObjectLink} kind=${one.kind} name=${one.object} />`],
  ["Reason", (one) => `${one.reason}${one.count > 1 ? ` (${one.count} times)` : ""}`], ["Message", "message", Text],
];

export function Events({ events, empty = "Nothing happened within the last hour." }) {
  const newest = [...events].sort((a, b) => (a.lastSeen < b.lastSeen ? 1 : -1));
  return html`<${Table} caption="Events, the newest first" columns=${EVENTS} rows=${newest} empty=${empty} />`;
}

/** The command that shows or does the same, to copy. */
export const Command = ({ text }) => html`<p class="command"><code>${text}</code> <${CopyButton} text=${text} /></p>`;

function CopyButton({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () => {
    copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2_000);
  };
  return html`<button type="button" class="copy" onClick=${copy} aria-label=${`Copy: ${text}`}>${isCopied ? "Copied" : "Copy"}</button>`;
}

/** A text of the fleet: names stay on one line, what stands in backticks is code, and a command among it can be copied. */
export function Text({ text }) {
  const parts = (text ?? "").split("`");
  const words = (part) => part.split(NAME).map((word, at) => (at % 2 ? html`<span class="name">${word}</span>` : word));
  if (parts.length % 2 === 0) return words(text); // a lone backtick begins no code
  return parts.map((part, at) => {
    if (at % 2 === 0) return words(at ? part.replace(/^[.,;:]/, "") : part);
    const [mark = ""] = parts[at + 1].match(/^[.,;:]/) ?? []; // before the button, not after it
    return html`<code key=${at}>${part}</code>${mark}${COMMAND.test(part) && html` <${CopyButton} text=${part} />`}`;
  });
}

/** Views of one place, each with its address. `tabs`: [`tab` in the address, title, role, component]; the component gets the other properties. */
export function Tabs({ path, tabs, tab, store, ...props }) {
  const [shown, title, role, Shown] = tabs.find(([value]) => value === tab) ?? tabs[0];
  return html`<nav class="tabs" aria-label="Views">${tabs.filter(([, , needed]) => store.may(needed)).map(([value, name]) => html`<a key=${value} href=${value ? `${path}?tab=${value}` : path} aria-current=${value === shown ? "page" : undefined}>${name}</a>`)}</nav>
    ${store.may(role)
      ? html`<${Shown} key=${shown} store=${store} ...${props} />`
      : html`<p class="problem" role="alert">${title} needs the role ${role}; your key ${store.me.name} has the role ${store.me.role}.</p>`}`;
}

/** Copy a text. Where the browser has or allows no clipboard, as over plain HTTP, a text area does it. */
export function copyText(text) {
  const byArea = () => {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  return navigator.clipboard ? navigator.clipboard.writeText(text).catch(byArea) : byArea();
}

export function download(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A text for assistive technology alone: the newest, and at most one of the page in five seconds. */
export function Announced({ text }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    let timer = 0;
    const say = () => {
      const waitMs = announcedAt + ANNOUNCE_MS - performance.now();
      if (text && waitMs > 0) return void (timer = setTimeout(say, Math.ceil(waitMs)));
      if (text) announcedAt = performance.now();
      setSaid(text);
    };
    if (text !== said) say();
    return () => clearTimeout(timer);
  }, [text]);
  return html`<div class="hidden" role="status" data-announced>${said}</div>`;
}

export function Diff({ text }) {
  const kind = (line) => (/^(---|\+\+\+|@@)/.test(line) ? "head" : line[0] === "+" ? "added" : line[0] === "-" ? "removed" : "");
  return html`<pre class="diff" tabindex="0">${text.split("\n").map((line, at) => html`<span key=${at} class=${kind(line)}>${line || " "}</span>`)}</pre>`;
}

export function ManifestErrors({ errors, onPick }) {
  return html`<div role="alert"><ul class="problems">
    ${errors.map(
      (one, at) => html`<li key=${at}>
        <p>${onPick && one.line > 0
            ? html`<button type="button" class="small" onClick=${() => onPick(one)}>line ${one.line}</button>`
            : html`<strong>line ${one.line || "?"}</strong>`} ${[one.about, one.path].filter(Boolean).join(" ")}</p>
        <p>${one.message}</p>
        ${one.hint && html`<p class="cure">${one.hint}</p>`}
      </li>`,
    )}
  </ul></div>`;
}

/** Return a component of a module that is loaded when it is first shown, and asked for again until it arrives. */
export function lazy(load, name) {
  let Found = null;
  return function Lazy(props) {
    const [failed, setFailed] = useState(0);
    const [isSlow, setSlow] = useState(false);
    const [, redraw] = useReducer((count) => count + 1, 0);
    useEffect(() => {
      if (Found) return undefined;
      const ask = () => load().then((module) => ((Found = module[name]), redraw()), () => setFailed(failed + 1));
      const pauseMs = failed ? Math.min(LAST_PAUSE_MS, 500 * 2 ** failed) * (0.5 + Math.random() / 2) : 0;
      const timers = [setTimeout(ask, pauseMs), setTimeout(() => setSlow(true), SLOW_MS)];
      return () => timers.forEach(clearTimeout);
    }, [failed]);
    if (Found) return html`<${Found} ...${props} />`;
    if (!failed && !isSlow) return html`<p class="quiet">Loading…</p>`;
    return html`<p class="problem" role="alert">A part of the page has not arrived${failed ? `, asked ${failed} times, and is asked for again` : " yet"}.
      <button type="button" class="small" onClick=${() => location.reload()}>Load the page again</button></p>`;
  };
}

/** A text field that narrows a list; `/` focuses it. */
export function Filter({ value, onInput, label }) {
  return html`<label class="filter"><span class="hidden">${label}</span>
    <input type="search" value=${value} placeholder=${`${label}  ( / )`} data-filter onInput=${(event) => onInput(event.target.value)} /></label>`;
}

/** A choice of one. `choices`: values, or [value, title]. */
export function Select({ label, name, value, choices, onChange }) {
  return html`<label>${label} <select name=${name} value=${value} onChange=${onChange && ((event) => onChange(event.target.value))}>
    ${choices.map((choice) => [choice].flat()).map(([one, title = one]) => html`<option key=${one} value=${one}>${title}</option>`)}</select></label>`;
}

export function Segments({ label, value, choices, onChange }) {
  return html`<span class="segments" role="group" aria-label=${label}>${choices.map((choice) => [choice].flat()).map(([one, title = one]) =>
    html`<button type="button" class="small" key=${title} aria-pressed=${one === value} onClick=${() => onChange(one)}>${title}</button>`)}</span>`;
}

/** A part of a screen that costs nothing until it is opened. */
export function Details({ summary, isOpenFirst = false, children, ...more }) {
  const [isOpen, setOpen] = useState(isOpenFirst);
  const toggle = (event) => setOpen(event.target.open);
  return html`<details open=${isOpen} onToggle=${toggle} ...${more}><summary>${summary}</summary>${isOpen && children}</details>`;
}

/** Return the rows that have the text in any column. */
export function matching(rows, text) {
  const wanted = text.trim().toLowerCase();
  return wanted ? rows.filter((row) => JSON.stringify(row).toLowerCase().includes(wanted)) : rows;
}

/** Return the newest result of `read` and its problem. It is called for each value of `keys`, and again every `everyMs` while the page is shown. */
export function useRead(read, keys = [], everyMs = 0) {
  const [result, setResult] = useState([null, ""]);
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    const poll = async () => {
      try {
        const answer = document.hidden && everyMs ? undefined : await read();
        if (!isOver && answer !== undefined) setResult([answer, ""]);
      } catch (error) {
        if (!isOver) setResult(([before]) => [before, error.message]);
      }
      if (everyMs && !isOver) timer = setTimeout(poll, everyMs);
    };
    void poll();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, keys);
  return result;
}

/** Return a value once it has rested for so long: the text of a person who types. */
export function useRested(value, ms) {
  const [rested, setRested] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setRested(value), ms);
    return () => clearTimeout(timer);
  }, [JSON.stringify(value)]);
  return rested;
}

/** Call the newest `listener` for each event of a target. */
export function useListener(type, listener, target = globalThis) {
  const newest = useRef(listener);
  newest.current = listener;
  useEffect(() => {
    const call = (event) => newest.current(event);
    target.addEventListener(type, call);
    return () => target.removeEventListener(type, call);
  }, [target]);
}

/** Draw again every so often; returns how often that was, since `keys` changed last. */
export function useTicks(ms, keys = []) {
  const [ticks, setTicks] = useState(0);
  useEffect(() => {
    setTicks(0);
    const timer = setInterval(() => setTicks((count) => count + 1), ms);
    return () => clearInterval(timer);
  }, keys);
  return ticks;
}

export function Figure({ title, value, unit, note, href, children }) {
  const body = html`<span class="title">${title}</span>
    <span class="value"><strong>${value}</strong> <span class="unit">${unit}</span></span>
    ${note && html`<span class="note">${note}</span>`}${children}`;
  return href ? html`<a class="figure-card" href=${href}>${body}</a>` : html`<div class="figure-card">${body}</div>`;
}

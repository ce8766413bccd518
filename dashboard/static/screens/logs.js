/** Logs of agents, engines, gateways, reconcilers and dashboards as they are written: several at once, filtered, paused, cleared, saved. */

import { html, useEffect, useReducer, useRef, useState } from "../vendor/htm-preact.js";
import { clock } from "../format.js";
import { refusalText } from "../fleet_store.js";
import { Command } from "../parts.js";

const MOST_LINES = 2_000;
const MOST_LOGS = 3; // browsers open six connections to a host at most
const DRAW_MS = 100;
const AGES = [["", "the last 200 lines"], ["1m", "1 minute"], ["5m", "5 minutes"], ["1h", "1 hour"], ["6h", "6 hours"]];
const LEVELS = ["debug", "info", "notice", "warning", "error", "critical"];

export function Logs({ store, query }) {
  const [chosen, setChosen] = useState(() => query.getAll("of"));
  const [grep, setGrep] = useState(query.get("grep") ?? "");
  const [level, setLevel] = useState("debug");
  const [since, setSince] = useState("");
  const [isFollowing, setFollowing] = useState(true);
  const logs = useLogs(chosen, isFollowing, since);
  const sources = [
    ...store.rows("macs").map((one) => `node/${one.name}`),
    ...store.rows("replicas").map((one) => `replica/${one.name}`),
    ...store.rows("gateways").map((one) => `gateway/${one.name}`),
    ...["reconciler", "dashboard"].flatMap((kind) => store.rows(`${kind}s`).map((one) => `${kind}/${one.name}`)),
  ];
  const wanted = grep.toLowerCase();
  const shown = logs.lines.filter((one) => LEVELS.indexOf(one.level) >= LEVELS.indexOf(level) && (!wanted || one.text.toLowerCase().includes(wanted)));
  const add = (name) => name && !chosen.includes(name) && setChosen([...chosen, name].slice(-MOST_LOGS));
  return html`
    <h1>Logs</h1>
    <div class="row toolbar">
      <label>Log <select value="" onChange=${(event) => add(event.target.value)}>
        <option value="">choose a log…</option>
        ${sources.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select></label>
      <label>Only lines with <input type="search" data-filter value=${grep} onInput=${(event) => setGrep(event.target.value)} /></label>
      <label>Since <select value=${since} onChange=${(event) => (logs.clear(), setSince(event.target.value))}>
        ${AGES.map(([one, title]) => html`<option key=${one} value=${one}>${title}</option>`)}
      </select></label>
      <label>From level <select value=${level} onChange=${(event) => setLevel(event.target.value)}>
        ${LEVELS.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select></label>
      <button type="button" onClick=${() => setFollowing(!isFollowing)}>${isFollowing ? "Pause" : "Follow"}</button>
      <button type="button" onClick=${logs.clear}>Clear</button>
      <button type="button" onClick=${() => save(shown)} disabled=${!shown.length}>Save</button>
    </div>
    <ul class="chips">${chosen.map((one) => html`<li key=${one}>${one} ${logs.problems[one] && html`<span class="problem">${logs.problems[one]}</span>`}
      <button type="button" class="small" aria-label=${`Close ${one}`} onClick=${() => setChosen(chosen.filter((other) => other !== one))}>×</button></li>`)}</ul>
    ${!chosen.length && html`<p class="quiet">Choose up to ${MOST_LOGS} logs. etcd writes its own on its machine.</p>`}
    ${chosen.length > 0 && html`<${Lines} lines=${shown} isFollowing=${isFollowing} hasSource=${chosen.length > 1} />
      <p class="quiet">${shown.length} of ${logs.lines.length} lines${logs.dropped ? `; ${logs.dropped} older ones were dropped` : ""}</p>`}
    <${Command} text=${`fleetctl logs -f ${chosen[0] ?? "replica/NAME"}`} />
  `;
}

/** The lines; the newest stays in sight until the reader scrolls away from it. */
function Lines({ lines, isFollowing, hasSource }) {
  const area = useRef(null);
  const isAtEnd = useRef(true);
  useEffect(() => {
    if (isFollowing && isAtEnd.current) area.current.scrollTop = area.current.scrollHeight;
  });
  const onScroll = ({ target }) => (isAtEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 40);
  return html`<div class="log" ref=${area} tabindex="0" role="log" aria-live="off" aria-label="Lines" onScroll=${onScroll}>
    ${lines.length === 0 && html`<p class="quiet nothing">No line yet.</p>`}
    ${lines.slice(-500).map((one) => html`<details key=${one.id} class=${`line ${one.level}`}>
      <summary>${one.time && html`<time title=${one.time}>${clock(one.time)}</time>`} <b>${one.level}</b>
        ${hasSource && html` <i>${one.source}</i>`} ${one.message}</summary>
      <pre>${one.fields}</pre>
    </details>`)}
  </div>`;
}

/** Read the chosen logs; lines of all of them in the order in which they arrive. */
function useLogs(chosen, isFollowing, since) {
  const [problems, setProblems] = useState({});
  const [, redraw] = useReducer((count) => count + 1, 0);
  const held = useRef({ lines: [], dropped: 0, number: 0, timer: 0 });
  const draw = () => {
    held.current.timer ||= setTimeout(() => {
      held.current.timer = 0;
      redraw();
    }, DRAW_MS);
  };
  const add = (source, line) => {
    const { lines } = held.current;
    lines.push(parse(source, line, ++held.current.number));
    if (lines.length > MOST_LINES) held.current.dropped += lines.splice(0, lines.length - MOST_LINES).length;
  };
  useEffect(() => {
    if (!isFollowing) return undefined;
    const abort = new AbortController();
    for (const source of chosen) {
      const isKnown = held.current.lines.some((one) => one.source === source);
      const begin = isKnown ? { tail: 0 } : since ? { tail: MOST_LINES, since } : { tail: 200 };
      read(source, begin, abort.signal, (line) => (add(source, line), draw())).then(
        () => setProblems((now) => ({ ...now, [source]: "ended" })),
        (error) => error.name !== "AbortError" && setProblems((now) => ({ ...now, [source]: error.message })),
      );
    }
    setProblems({});
    return () => abort.abort();
  }, [chosen.join(" "), isFollowing, since]);
  const clear = () => {
    held.current.lines = [];
    held.current.dropped = 0;
    redraw();
  };
  return { lines: held.current.lines, dropped: held.current.dropped, problems, clear };
}

async function read(source, begin, signal, onLine) {
  const answer = await fetch(`/api/v1/logs?${new URLSearchParams({ of: source, ...begin, follow: "true" })}`, { signal });
  if (!answer.ok) throw new Error(await refusalText(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) onLine(line);
  }
}

/** A line as its time, level and message, with its other fields for those who open it. */
function parse(source, text, id) {
  try {
    const { time, level, message, ...fields } = JSON.parse(text);
    const word = String(level ?? "info").toLowerCase();
    return { id, source, text, time, level: LEVELS.includes(word) ? word : "info", message: String(message ?? text), fields: JSON.stringify(fields, null, 2) };
  } catch {
    return { id, source, text, time: "", level: "info", message: text, fields: "" };
  }
}

function save(lines) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines.map((one) => `${one.text}\n`), { type: "text/plain" }));
  link.download = "fleet.log";
  link.click();
  URL.revokeObjectURL(link.href);
}

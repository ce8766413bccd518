/** Lines of logs as they are written, and the last ones of a model's replica. */

import { html, useEffect, useReducer, useRef, useState } from "./vendor/htm-preact.js";
import { refusalText } from "./fleet_store.js";
import { clock } from "./format.js";

export const LEVELS = ["debug", "info", "notice", "warning", "error", "critical"];
const MOST_LINES = 2_000;
const DRAW_MS = 100;
const TAIL_LINES = 20;

/** The log of one replica's engine: its last lines, and what comes. It holds a connection, so it is opened when it is asked for. */
export function LogTail({ replicas }) {
  const [wanted, setWanted] = useState(() => replicas.find((one) => !one.isReady)?.name);
  const chosen = replicas.some((one) => one.name === wanted) ? wanted : replicas[0]?.name;
  const source = `replica/${chosen}`;
  if (!chosen) return html`<p class="quiet">No replica is placed.</p>`;
  return html`
    <p class="row toolbar"><label>Replica <select value=${chosen} onChange=${(event) => setWanted(event.target.value)}>
      ${replicas.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select></label>
      <a href=${`/activity?tab=logs&of=${encodeURIComponent(source)}`}>All of it</a></p>
    <${Tail} key=${source} source=${source} />`;
}

function Tail({ source }) {
  const { lines, problems } = useLogs([source], { isFollowing: true, since: "", tail: TAIL_LINES });
  return html`${problems[source] && html`<p class="problem" role="status">${problems[source]}</p>`}
    <${Lines} lines=${lines.slice(-TAIL_LINES)} isFollowing=${true} hasSource=${false} />`;
}

/** The lines; the newest stays in sight until the reader scrolls away from it. */
export function Lines({ lines, isFollowing, hasSource }) {
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

/** Read the chosen logs; lines of all of them in the order in which they arrive. `tail`: lines of before, without `since`. */
export function useLogs(chosen, { isFollowing, since, tail }) {
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
      const begin = isKnown ? { tail: 0 } : since ? { tail: MOST_LINES, since } : { tail };
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

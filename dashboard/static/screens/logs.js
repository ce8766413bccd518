/** Logs of agents, engines, gateways, reconcilers and dashboards as they are written: several at once, filtered, paused, cleared, saved. */

import { html, useEffect, useReducer, useRef, useState } from "../vendor/htm-preact.js";
import { ask, linesOf, parsed } from "../fleet_store.js";
import { clock } from "../format.js";
import { Command, download, logPath, Select } from "../parts.js";
import { note } from "../router.js";

const MOST_LOGS = 3; // browsers open six connections to a host at most
const FIRST_LINES = 200;
const TAIL_LINES = 20;
const MOST_LINES = 2_000;
const DRAW_MS = 100;
const LEVELS = ["debug", "info", "notice", "warning", "error", "critical"];
const AGES = [["", `the last ${FIRST_LINES} lines`], ["1m", "1 minute"], ["5m", "5 minutes"], ["1h", "1 hour"], ["6h", "6 hours"]];

export function Logs({ store, query }) {
  const [chosen, setChosen] = useState(() => query.getAll("of"));
  const [grep, setGrep] = useState(query.get("grep") ?? "");
  const [level, setLevel] = useState("debug");
  const [since, setSince] = useState("");
  const [isFollowing, setFollowing] = useState(true);
  useEffect(() => note({ of: chosen, grep }), [chosen, grep]);
  const logs = useLogs(chosen, { isFollowing, since, tail: FIRST_LINES });
  const sources = [
    ...store.rows("macs").map((one) => `node/${one.name}`),
    ...store.rows("replicas").map((one) => `replica/${one.name}`),
    ...store.rows("gateways").map((one) => `gateway/${one.name}`),
    ...["reconciler", "dashboard"].flatMap((kind) => store.rows(`${kind}s`).map((one) => `${kind}/${one.name}`)),
  ];
  const wanted = grep.toLowerCase();
  const shown = logs.lines.filter((one) => LEVELS.indexOf(one.level) >= LEVELS.indexOf(level) && (!wanted || one.text.toLowerCase().includes(wanted)));
  const save = () => download(new Blob(shown.map((one) => `${one.text}\n`), { type: "text/plain" }), "fleet.log");
  const add = (name) => name && !chosen.includes(name) && setChosen([...chosen, name].slice(-MOST_LOGS));
  return html`
    <div class="row toolbar">
      <${Select} label="Log" value="" choices=${[["", "choose a log…"], ...sources]} onChange=${add} />
      <label>Contains <input type="search" data-filter value=${grep} onInput=${(event) => setGrep(event.target.value)} /></label>
      <${Select} label="Since" value=${since} choices=${AGES} onChange=${(age) => (logs.clear(), setSince(age))} />
      <${Select} label="Minimum level" value=${level} choices=${LEVELS} onChange=${setLevel} />
      <button type="button" onClick=${() => setFollowing(!isFollowing)}>${isFollowing ? "Pause" : "Follow"}</button>
      <button type="button" onClick=${logs.clear}>Clear</button>
      <button type="button" onClick=${save} disabled=${!shown.length}>Download</button>
    </div>
    <ul class="chips">${chosen.map((one) => html`<li key=${one}>${one} ${logs.problems[one] && html`<span class="problem">${logs.problems[one]}</span>`}
      <button type="button" class="small" aria-label=${`Close ${one}`} onClick=${() => setChosen(chosen.filter((other) => other !== one))}>×</button></li>`)}</ul>
    ${!chosen.length && html`<p class="quiet">Choose up to ${MOST_LOGS} logs. etcd writes its own on its machine.</p>`}
    ${chosen.length > 0 && html`<${Lines} lines=${shown} isFollowing=${isFollowing} hasSource=${chosen.length > 1} />
      <p class="quiet">${shown.length} of ${logs.lines.length} lines${logs.dropped ? `; ${logs.dropped} older lines dropped` : ""}</p>`}
    <${Command} text=${`fleetctl logs -f ${chosen[0] ?? "replica/NAME"}`} />
  `;
}

/** The log of one replica's engine: its last lines, and what comes. It holds a connection, so it is opened when it is asked for. */
export function LogTail({ replicas }) {
  const [wanted, setWanted] = useState(() => replicas.find((one) => !one.isReady)?.name);
  const chosen = replicas.some((one) => one.name === wanted) ? wanted : replicas[0]?.name;
  const source = `replica/${chosen}`;
  const { lines, problems } = useLogs(chosen ? [source] : [], { tail: TAIL_LINES });
  if (!chosen) return html`<p class="quiet">No replica is placed.</p>`;
  return html`<p class="row toolbar"><${Select} label="Replica" value=${chosen} choices=${replicas.map((one) => one.name)} onChange=${setWanted} />
      <a href=${logPath(source)}>All of it</a></p>
    ${problems[source] && html`<p class="problem" role="status">${problems[source]}</p>`}
    <${Lines} lines=${lines.filter((one) => one.source === source).slice(-TAIL_LINES)} />`;
}

/** The lines; the newest stays in sight until the reader scrolls away from it. */
function Lines({ lines, isFollowing = true, hasSource = false }) {
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
function useLogs(chosen, { isFollowing = true, since = "", tail }) {
  const [problems, setProblems] = useState({});
  const [, redraw] = useReducer((count) => count + 1, 0);
  const { current: held } = useRef({ lines: [], dropped: 0, number: 0, timer: 0 });
  const say = (source, problem) => setProblems((now) => ({ ...now, [source]: problem }));
  const add = (source, line) => {
    held.lines.push(parse(source, line, ++held.number));
    if (held.lines.length > MOST_LINES) held.dropped += held.lines.splice(0, held.lines.length - MOST_LINES).length;
    held.timer ||= setTimeout(() => ((held.timer = 0), redraw()), DRAW_MS);
  };
  useEffect(() => {
    if (!isFollowing) return undefined;
    const abort = new AbortController();
    for (const source of chosen) {
      const isKnown = held.lines.some((one) => one.source === source);
      const begin = isKnown ? { tail: 0 } : since ? { tail: MOST_LINES, since } : { tail };
      const take = async (answer) => {
        for await (const line of linesOf(answer)) add(source, line);
      };
      ask(`/api/v1/logs?${new URLSearchParams({ of: source, ...begin, follow: "true" })}`, { signal: abort.signal }, take).then(
        () => say(source, "ended"),
        (error) => error.name !== "AbortError" && say(source, error.message),
      );
    }
    setProblems({});
    return () => abort.abort();
  }, [chosen.join(" "), isFollowing, since]);
  const clear = () => (Object.assign(held, { lines: [], dropped: 0 }), redraw());
  return { ...held, problems, clear };
}

/** A line as its time, level and message, with its other fields for those who open it. */
function parse(source, text, id) {
  const { time = "", level = "info", message = text, ...fields } = parsed(text) ?? {};
  const word = String(level).toLowerCase();
  return { id, source, text, time, level: LEVELS.includes(word) ? word : "info", message: String(message), fields: JSON.stringify(fields, null, 2) };
}

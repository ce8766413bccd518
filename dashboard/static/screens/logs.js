/** Logs of agents, engines, gateways, reconcilers and dashboards as they are written: several at once, filtered, paused, cleared, saved. */

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { LEVELS, Lines, useLogs } from "../log_lines.js";
import { Command } from "../parts.js";
import { note } from "../router.js";

const MOST_LOGS = 3; // browsers open six connections to a host at most
const FIRST_LINES = 200;
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
  const add = (name) => name && !chosen.includes(name) && setChosen([...chosen, name].slice(-MOST_LOGS));
  return html`
    <div class="row toolbar">
      <label>Log <select value="" onChange=${(event) => add(event.target.value)}>
        <option value="">choose a log…</option>
        ${sources.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select></label>
      <label>Contains <input type="search" data-filter value=${grep} onInput=${(event) => setGrep(event.target.value)} /></label>
      <label>Since <select value=${since} onChange=${(event) => (logs.clear(), setSince(event.target.value))}>
        ${AGES.map(([one, title]) => html`<option key=${one} value=${one}>${title}</option>`)}
      </select></label>
      <label>Minimum level <select value=${level} onChange=${(event) => setLevel(event.target.value)}>
        ${LEVELS.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select></label>
      <button type="button" onClick=${() => setFollowing(!isFollowing)}>${isFollowing ? "Pause" : "Follow"}</button>
      <button type="button" onClick=${logs.clear}>Clear</button>
      <button type="button" onClick=${() => save(shown)} disabled=${!shown.length}>Download</button>
    </div>
    <ul class="chips">${chosen.map((one) => html`<li key=${one}>${one} ${logs.problems[one] && html`<span class="problem">${logs.problems[one]}</span>`}
      <button type="button" class="small" aria-label=${`Close ${one}`} onClick=${() => setChosen(chosen.filter((other) => other !== one))}>×</button></li>`)}</ul>
    ${!chosen.length && html`<p class="quiet">Choose up to ${MOST_LOGS} logs. etcd writes its own on its machine.</p>`}
    ${chosen.length > 0 && html`<${Lines} lines=${shown} isFollowing=${isFollowing} hasSource=${chosen.length > 1} />
      <p class="quiet">${shown.length} of ${logs.lines.length} lines${logs.dropped ? `; ${logs.dropped} older lines dropped` : ""}</p>`}
    <${Command} text=${`fleetctl logs -f ${chosen[0] ?? "replica/NAME"}`} />
  `;
}

function save(lines) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(lines.map((one) => `${one.text}\n`), { type: "text/plain" }));
  link.download = "fleet.log";
  link.click();
  URL.revokeObjectURL(link.href);
}

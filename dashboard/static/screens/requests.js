/** Requests at all gateways: those under way, those that ended with a waterfall of each, and the figures of the last hour. */

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { Sparkline } from "../charts.js";
import { clock, count, short, span } from "../format.js";
import { getJson, postJson } from "../fleet_store.js";
import { SubjectCharts } from "../measured.js";
import { Badge, Command, Figure, Select, Table, Tabs, useRead, useRested, useTicks } from "../parts.js";
import { note } from "../router.js";
import { Prefill, Waterfall } from "../request_trace.js";
import { brokenText } from "./overview.js";

const AGE_MS = 1_000;
const ENDED_MS = 3_000;
const TYPING_MS = 150;
const MOST_ENDED = 200;
const TABS = [
  ["", "Live", "viewer", Live],
  ["ended", "Ended", "viewer", Ended],
  ["metrics", "Metrics", "viewer", ({ store }) => html`<${SubjectCharts} subject="fleet" at=${store.at} />`],
];
const BUSY_QUEUE = 0.5;
const FULL_QUEUE = 0.8;

export function Requests(props) {
  const { store } = props;
  const now = store.row("traffic", "fleet");
  return html`
    <h1>Requests</h1>
    ${now && html`<div class="cards figures-row">
      <${Figure} title="In flight" value=${now.active} unit="requests" note=${`${now.queueDepth} waiting`} />
      <${Figure} title="Output, last minute" value=${short(now.tokensPerSecond)} unit="tokens/s" note="of requests that ended" />
      <${Figure} title="Time to first token" value=${span(now.avgFirstTokenMs)} unit="" note="mean of the last minute" />
      <${Figure} title="Requests" value=${short(now.requests24h)} unit="in 24 h" note=${`${short(now.errors24h)} failed${brokenText(now)}`} />
      <${Figure} title="Tokens" value=${short(now.outputTokens24h)} unit="out in 24 h" note=${`${short(now.promptTokens24h)} in`} />
    </div>`}
    ${now && html`<${Flow} now=${now} limit=${store.rows("models").reduce((sum, one) => sum + (one.queueLimit ?? 0), 0)} />`}
    <${Tabs} path="/requests" tabs=${TABS} ...${props} />
    <${Command} text="fleetctl routes --last 100" />
  `;
}

/** How full the queue is, where models limit it, and the speed of the last answers. */
function Flow({ now, limit }) {
  const speeds = now.lastGenerationsTokensPerSecond;
  if (!limit && !speeds.length) return null;
  return html`<div class="flow">
    ${limit > 0 && html`<label><span class="title">Queue</span>
      <meter max=${limit} value=${now.queueDepth} low=${BUSY_QUEUE * limit} high=${FULL_QUEUE * limit} optimum="0"></meter>
      <span class="note">${now.queueDepth} of ${limit} waiting</span></label>`}
    ${speeds.length > 0 && html`<div><span class="title">Speed of the last responses</span>
      <${Sparkline} values=${speeds} label=${`Tokens per second of the last ${count(speeds.length, "response")}, at most ${short(Math.max(...speeds))}`} />
      <span class="note">${short(speeds.at(-1))} tokens/s</span></div>`}
  </div>`;
}

function Live({ store }) {
  const waiting = store.row("traffic", "fleet")?.waitingByModel ?? {};
  const [problem, setProblem] = useState("");
  useTicks(AGE_MS);
  if (store.at) return html`<p class="quiet">Requests in flight are not recorded; ended requests are.</p>`;
  const running = store.rows("inFlight").map((one) => ({ ...one, seconds: Math.max(0, (Date.now() - Date.parse(one.since)) / 1000) })).sort((a, b) => b.seconds - a.seconds);
  const cancel = (one) =>
    postJson(`/api/v1/requests/${encodeURIComponent(one.gateway)}/${encodeURIComponent(one.id)}/cancel`).then(
      () => setProblem(""),
      (error) => setProblem(error.message),
    );
  const queued = Object.entries(waiting).filter(([, count]) => count > 0);
  return html`<section aria-label="In flight">
    ${queued.length > 0 && html`<ul class="chips" aria-label="Waiting by model">${queued.map(([model, count]) => html`<li key=${model}>${model} <b>${count}</b> waiting</li>`)}</ul>`}
    <${Table} caption="Requests in flight" columns=${runningColumns(store.may("operator") ? cancel : null)} rows=${running} empty="No requests in flight." />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </section>`;
}

const PHASES = { queued: "idle", prefill: "good", generating: "good" };

function runningColumns(cancel) {
  const columns = [
    ["Model", "model", "names"], ["Key", "apiKey"], ["Mac", "worker", "Node"],
    ["Phase", (one) => html`<${Badge} tone=${PHASES[one.phase] ?? "idle"}>${one.phase}<//> <${Prefill} request=${one} />`],
    ["Tokens", "tokens", "number"], ["Tokens/s", (one) => (one.tokens && one.seconds ? (one.tokens / one.seconds).toFixed(1) : "-"), "number"],
    ["Age", (one) => `${one.seconds.toFixed(1)} s`, "number"],
    ["Request", (one) => html`<code>${one.id}</code>${one.resumptions ? ` resumed ${one.resumptions} times` : ""}`],
  ];
  if (cancel) columns.push(["", (one) => html`<button type="button" class="small" aria-label=${`Cancel ${one.id}`} onClick=${() => cancel(one)}>Cancel</button>`]);
  return columns;
}

/** Requests that ended: the newest from the stream, or those that the server chooses, again every few seconds; one of them is opened as a waterfall. */
function Ended({ store, query: address }) {
  const [wanted, setWanted] = useState({ model: "", node: "", key: "", status: "", slower: "" });
  const [opened, setOpened] = useState(address.get("request") ?? "");
  useEffect(() => note({ request: opened }), [opened]);
  const filters = Object.entries({ ...wanted, to: store.at }).filter(([, value]) => value);
  const query = useRested(new URLSearchParams(filters).toString(), TYPING_MS);
  const read = async () => query && (await getJson(`/api/v1/requests?limit=${MOST_ENDED}&${query}`)).requests;
  const [chosen, problem] = useRead(read, [query], query && !store.at ? ENDED_MS : 0);
  const rows = query
    ? chosen && chosen.map((one) => ({ ...one, name: `${one.gateway}/${one.id}/${one.time}` }))
    : store.rows("ended").sort((a, b) => endOf(b) - endOf(a));
  const field = (name, label, more = {}) => html`<label>${label}
    <input value=${wanted[name]} ...${more} onInput=${(event) => setWanted((now) => ({ ...now, [name]: event.target.value.trim() }))} /></label>`;
  const row = rows && rows.find((one) => one.name === opened);
  const columns = [
    ["Ended", (one) => html`<button type="button" class="link" aria-expanded=${one.name === opened} onClick=${() => setOpened(one.name === opened ? "" : one.name)}>${clock(endOf(one))}</button>`],
    ["Model", "model", "names"], ["Mac", "worker", "Node"],
    ["Outcome", (one) => html`<${Badge} tone=${one.status === "ok" ? "good" : "bad"}>${one.status === "ok" ? "success" : one.status}<//>`],
    ["First token", "firstTokenMs", span], ["Duration", "latencyMs", span],
    ["Tokens", (one) => `${one.tokens.prompt} → ${one.tokens.output}`, "number"],
    ["Key", "apiKey"], ["Request", (one) => html`<code>${one.id}</code>`],
  ];
  return html`<section aria-label="Ended">
    <form class="row toolbar" role="search" onSubmit=${(event) => event.preventDefault()}>
      ${field("model", "Model", { "data-filter": true })}${field("node", "Mac")}${field("key", "Key")}
      <${Select} label="Outcome" value=${wanted.status} choices=${[["", "any"], "success", "error", "cancelled"]}
        onChange=${(status) => setWanted((now) => ({ ...now, status }))} />
      ${field("slower", "Slower than, ms", { type: "number", min: 0 })}
    </form>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    ${row && html`<${Waterfall} store=${store} request=${row} onClose=${() => setOpened("")} />`}
    <div data-ended><${Table} caption="Requests that ended, the newest first" columns=${columns} rows=${rows || []}
      empty=${!rows ? "Loading…" : query ? "No request matches." : "No request has ended yet."} /></div>
  </section>`;
}

const endOf = (one) => Date.parse(one.time) + one.latencyMs;

/** The first screen: the fleet's health in a sentence, its figures, what is wrong, its Macs, its models, what happened. */

import { html } from "../vendor/htm-preact.js";
import { Sparkline } from "../charts.js";
import { getJson } from "../fleet_store.js";
import { bytes, count, duration, short, span } from "../format.js";
import { Announced, Badge, Events, Figure, MacState, MemoryBar, ModelState, Problems, usePolled } from "../parts.js";

const MAX_MACS = 24;
const MAX_EVENTS = 20;
const SERIES_MS = 15_000;
const BUSY_QUEUE = 0.5;
const FULL_QUEUE = 0.8;
const METRICS = [
  ...["macs_online", "output_tokens_per_second", "prompt_tokens_per_second", "requests_per_second"],
  ...["first_token_p50", "first_token_p95", "error_ratio"],
];

export function Fleet({ store }) {
  const { summary } = store;
  if (!summary) return html`<p class="loading">Loading the fleet…</p>`;
  const problems = store.rows("problems");
  const macs = store.rows("macs");
  const models = store.rows("models");
  const tone = problems.some((one) => one.tone === "bad") ? "bad" : problems.length ? "warning" : "good";
  return html`
    <h1 class="hidden">Fleet</h1>
    <p class="sentence"><span class=${`dot ${tone}`} aria-hidden="true"></span><span data-sentence>${summary.sentence}</span></p>
    <${Figures} store=${store} macs=${macs} />
    <section aria-labelledby="problems">
      <h2 id="problems">Problems</h2>
      <${Announced} text=${problems.length ? `${count(problems.length, "problem")}. ${problems.slice(0, 3).map((one) => one.title).join(". ")}` : "No problem is known"} />
      <${Problems} problems=${problems} />
      ${!problems.length && html`<p><${Badge} tone="good">No problem is known<//></p>`}
    </section>
    <section aria-labelledby="macs">
      <div class="section-head"><h2 id="macs">Macs</h2>${macs.length > 0 && html`<a href="/map">Map</a>`}</div>
      <ul class="map">
        ${macs.slice(0, MAX_MACS).map((mac) => html`<${MacCard} key=${mac.name} mac=${mac} />`)}
      </ul>
      ${macs.length > MAX_MACS && html`<p><a href="/macs">All ${macs.length} Macs</a></p>`}
      ${!macs.length && html`<p class="empty">No Mac has joined. <a href="/add">Add a Mac</a>.</p>`}
    </section>
    <section aria-labelledby="models">
      <h2 id="models">Models</h2>
      <ul class="map">
        ${models.map(
          (model) => html`<li key=${model.name} class="card">
            <h3><a href=${`/models/${encodeURIComponent(model.name)}`}>${model.name}</a></h3>
            <p><${ModelState} model=${model} /></p>
            <p class="quiet">${model.source}</p>
            <p class="quiet">on ${model.macs.join(", ") || "no Mac"}</p>
          </li>`,
        )}
      </ul>
      ${!models.length && html`<p class="empty">Nothing is deployed. <a href="/try">Try a ModelDeployment</a>, or: <code>fleetctl run MODEL</code></p>`}
    </section>
    <section aria-labelledby="events">
      <div class="section-head"><h2 id="events">Events</h2><a href="/events">All</a></div>
      <${Events} events=${newest(store.rows("events"), MAX_EVENTS)} />
    </section>
  `;
}

/** Cards of the fleet's figures, each with a line of the last hour where a history is kept. */
function Figures({ store, macs }) {
  const { summary } = store;
  const now = store.row("traffic", "fleet");
  const [hour] = usePolled(() => getJson(`/api/v1/series?subject=fleet&metric=${METRICS.join(",")}&from=1h&step=60s`), SERIES_MS);
  const series = (name) => hour?.metrics[name].mean ?? [];
  const last = (name) => series(name).findLast((value) => value !== null) ?? null;
  const line = (name, what) => series(name).some((value) => value !== null) && html`<${Sparkline} values=${series(name)} label=${`${what}, the last hour`} />`;
  const watts = [...store.views.figures.values()].map((one) => one.watts).filter((one) => one !== null);
  const { degraded, offline } = summary.macs;
  const others = [degraded && `${degraded} degraded`, offline && `${offline} offline`].filter(Boolean).join(", ");
  const isLive = !store.at && now;
  return html`<div class="cards four">
      <${Figure} title="Macs" value=${`${summary.macs.online} of ${summary.macs.total}`} unit="online" note=${others || "all well"} href="/macs">${line("macs_online", "Macs online")}<//>
      <${Figure} title="Models" value=${`${summary.models.available} of ${summary.models.total}`} unit="available" note=${`${summary.replicas.ready} of ${summary.replicas.desired} replicas ready`} href="/models" />
      ${isLive && html`
        <${Figure} title="Output" value=${short(now.tokensPerSecond)} unit="tokens/s" note=${last("prompt_tokens_per_second") === null ? "" : `${short(last("prompt_tokens_per_second"))} tokens/s in`} href="/requests">${line("output_tokens_per_second", "Output tokens")}<//>
        <${Figure} title="Requests" value=${now.active} unit="in flight" note=${`${now.queueDepth} waiting, ${short(now.requests24h)} in 24 h`} href="/requests">${line("requests_per_second", "Requests")}<//>
        <${Figure} title="Time to first token" value=${span(last("first_token_p50") ?? now.avgFirstTokenMs)} unit=${last("first_token_p50") === null ? "" : "p50"} note=${last("first_token_p95") === null ? "" : `p95 ${span(last("first_token_p95"))}`} href="/requests">${line("first_token_p95", "First token, p95")}<//>
        <${Figure} title="Errors" value=${last("error_ratio") === null ? "-" : `${short(100 * last("error_ratio"))} %`} unit="" note=${`${short(now.errors24h)} in 24 h`} href="/requests">${line("error_ratio", "Errors")}<//>`}
      <${Figure} title="Memory for models" value=${freeMemory(macs)} unit="free" note=${`of ${bytes(online(macs).reduce((sum, mac) => sum + mac.allocatableBytes, 0))}`} href="/map" />
      ${watts.length > 0 && html`<${Figure} title="Power" value=${short(watts.reduce((sum, one) => sum + one, 0))} unit="W" note=${`of ${count(watts.length, "Mac")}`} href="/map" />`}
    </div>
    ${isLive && html`<${Flow} now=${now} limit=${queueLimit(store.rows("models"))} />`}
    <p class="facts">
      ${count(summary.gateways, "gateway")}, ${summary.leader ? html`leader <code>${summary.leader}</code>` : "no reconciler leads"}
      ${isLive && html`${" · "}dashboard up ${duration((Date.now() - Date.parse(now.startedAt)) / 1000)}${" · "}${short(now.outputTokens24h)} tokens out, ${short(now.promptTokens24h)} in within 24 h`}
    </p>`;
}

/** How full the queue is, where models limit it, and the speed of the last answers. */
function Flow({ now, limit }) {
  const share = limit ? Math.min(1, now.queueDepth / limit) : 0;
  const tone = share >= FULL_QUEUE ? "bad" : share >= BUSY_QUEUE ? "warning" : "good";
  const speeds = now.lastGenerationsTokensPerSecond;
  const top = Math.max(...speeds, 1);
  if (!limit && !speeds.length) return null;
  return html`<div class="flow">
    ${limit > 0 && html`<div><span class="title">Queue</span>
      <span class="queue" role="meter" aria-label="Queue" aria-valuemin="0" aria-valuemax=${limit} aria-valuenow=${Math.min(limit, now.queueDepth)} aria-valuetext=${`${now.queueDepth} of ${limit} waiting`}><span class=${tone} style=${{ width: `${100 * share}%` }}></span></span>
      <span class="note">${now.queueDepth} of ${limit}</span></div>`}
    ${speeds.length > 0 && html`<div><span class="title">Last responses</span>
      <span class="speeds" role="img" aria-label=${`Tokens per second of the last ${count(speeds.length, "response")}: ${short(speeds.at(-1))} now, at most ${short(top)}`}>${speeds.map((one, at) => html`<span key=${at} style=${{ height: `${Math.max(6, (100 * one) / top)}%` }}></span>`)}</span>
      <span class="note">${short(speeds.at(-1))} tokens/s</span></div>`}
  </div>`;
}

/** The number of requests that may wait, of all models that limit it. */
function queueLimit(models) {
  return models.reduce((sum, one) => sum + (one.queueLimit ?? 0), 0);
}

function MacCard({ mac }) {
  return html`<li class="card">
    <h3><a href=${`/macs/${encodeURIComponent(mac.name)}`}>${mac.name}</a></h3>
    <p><${MacState} mac=${mac} /> <span class="quiet">${mac.chip ?? ""}</span></p>
    <p><${MemoryBar} mac=${mac} /></p>
    <p class="quiet">${mac.models.join(", ") || "no model"}</p>
  </li>`;
}

const online = (macs) => macs.filter((mac) => mac.state !== "offline" && mac.allocatableBytes);

function freeMemory(macs) {
  return bytes(online(macs).reduce((sum, mac) => sum + Math.max(0, mac.allocatableBytes - mac.promisedBytes), 0));
}

function newest(events, number) {
  return [...events].sort((a, b) => (a.lastSeen < b.lastSeen ? 1 : -1)).slice(0, number);
}

/** The title of the browser's tab. */
export function fleetTitle(store) {
  const problems = store.summary?.problems ?? 0;
  return problems ? `(${count(problems, "problem")}) mlx-fleet` : "mlx-fleet";
}

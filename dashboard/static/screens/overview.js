/** The first screen: whether all is well in one sentence, what is wrong, what flows, the Macs, and the last changes. */

import { html } from "../vendor/htm-preact.js";
import { Sparkline } from "../charts.js";
import { getJson } from "../fleet_store.js";
import { age, bytes, clock, count, short, span } from "../format.js";
import { Announced, Command, Figure, lazy, ModelState, ObjectLink, Problems, Text, useRead } from "../parts.js";

const FleetPicture = lazy(() => import("../picture.js"), "FleetPicture");
const MAX_MODELS = 12;
const MAX_CHANGES = 3;
const SERIES_MS = 15_000;
const METRICS = ["output_tokens_per_second", "requests_per_second", "first_token_p95", "error_ratio"];

export function Overview({ store }) {
  const { summary } = store;
  if (!summary) return html`<p class="loading">Loading the fleet…</p>`;
  const problems = store.rows("problems");
  const macs = store.rows("macs");
  const models = store.rows("models");
  const isCut = models.length > 0 && noGateway(summary) !== "";
  const tone = isCut || problems.some((one) => one.tone === "bad") ? "bad" : problems.length || Object.keys(summary.gatewaysSilent).length ? "warning" : "good";
  return html`
    <h1 class="sentence"><span class=${`dot ${tone}`} aria-hidden="true"></span><span data-sentence><${Text} text=${summary.sentence} /></span></h1>
    <${Announced} text=${problems.length ? `${count(problems.length, "problem")}. ${problems.slice(0, 3).map((one) => one.title).join(". ")}` : "No problem is known"} />
    <${Problems} problems=${problems} />
    ${(!macs.length || !models.length) && !store.at && html`<${FirstSteps} macs=${macs} models=${models} />`}
    ${models.length > 0 && html`<${Figures} store=${store} macs=${macs} />`}
    ${macs.length > 0 && html`<section aria-labelledby="macs">
      <div class="section-head"><h2 id="macs">Macs</h2><a href="/macs">All</a></div>
      <${FleetPicture} store=${store} />
    </section>`}
    ${models.length > 0 && html`<section aria-labelledby="models">
      <div class="section-head"><h2 id="models">Models</h2><a href="/models">All</a></div>
      <ul class="chips">${models.slice(0, MAX_MODELS).map((one) => html`<li key=${one.name}><${ObjectLink} kind="ModelDeployment" name=${one.name} /> <${ModelState} model=${one} />${one.placed < one.desired && html` <a href=${`/models/${encodeURIComponent(one.name)}?why`}>Why pending?</a>`}</li>`)}</ul>
    </section>`}
    ${models.length > 0 && !store.at && html`<${LastChanges} store=${store} />`}
  `;
}

function FirstSteps({ macs, models }) {
  return html`<div class="first-steps">
    ${!models.length && html`<section class="panel" aria-labelledby="run"><h2 id="run">Run a model</h2>
      <p>${macs.length ? "Nothing is deployed." : "Nothing is deployed; a model waits until a Mac has joined."} Choose what fits your Macs, or write a manifest.</p>
      <p class="actions"><a href="/run">Choose a model</a> <a href="/try">Write a manifest</a></p>
      <${Command} text="fleetctl run MODEL" /></section>`}
    ${macs.length < 2 && html`<section class="panel" aria-labelledby="add"><h2 id="add">Add a Mac</h2>
      <p>${macs.length ? "One Mac has joined." : "No Mac has joined."} Two commands: one here, one on the Mac.</p>
      <p class="actions"><a href="/macs?tab=add">Show the commands</a></p>
      <${Command} text="fleetctl token create" /></section>`}
  </div>`;
}

/** One row of figures, each with the time over which it was measured, and why if there is none. */
function Figures({ store, macs }) {
  const now = store.row("traffic", "fleet");
  const [hour] = useRead(() => getJson(`/api/v1/series?subject=fleet&metric=${METRICS.join(",")}&from=1h&step=60s`), [], SERIES_MS);
  if (store.at) return html`<p class="quiet">Requests of that time are under <a href="/requests?tab=ended">Requests</a>.</p>`;
  if (!now) return null;
  const silent = Object.keys(store.summary.gatewaysSilent).length;
  const cut = noGateway(store.summary);
  const partly = silent && !cut ? `, without ${count(silent, "gateway")}` : "";
  const first = lastOf(hour, "first_token_p95");
  const watts = [...store.views.figures.values()].map((one) => one.watts).filter((value) => value !== null);
  const ready = macs.filter((mac) => mac.state !== "offline" && mac.allocatableBytes);
  const free = ready.reduce((sum, mac) => sum + Math.max(0, mac.allocatableBytes - mac.promisedBytes), 0);
  const room = ready.reduce((sum, mac) => sum + mac.allocatableBytes, 0);
  return html`<div class="cards figures-row">
    <${Figure} title="Requests now" value=${cut ? "-" : now.active} unit=${cut ? "" : "in flight"} note=${cut || `${now.queueDepth} waiting${partly}`} href="/requests"><${Line} hour=${hour} metric="requests_per_second" what="Requests" /><//>
    <${Figure} title="Output, last minute" value=${cut ? "-" : short(now.tokensPerSecond)} unit=${cut ? "" : "tokens/s"} note=${cut || `of requests that ended${partly}`} href="/requests?tab=metrics"><${Line} hour=${hour} metric="output_tokens_per_second" what="Output tokens" /><//>
    <${Figure} title="First token, p95" value=${span(first?.value)} unit="" note=${first ? `of the minute at ${clock(first.at)}` : "no stream within the hour"} href="/requests?tab=metrics"><${Line} hour=${hour} metric="first_token_p95" what="First token, p95" /><//>
    <${Figure} title="Failed, 24 h" value=${now.requests24h ? `${short((100 * now.errors24h) / now.requests24h)} %` : "-"} unit="" note=${now.requests24h ? `${short(now.errors24h)} of ${short(now.requests24h)} requests${brokenText(now)}` : `no request within 24 h${brokenText(now)}`} href="/requests?tab=ended"><${Line} hour=${hour} metric="error_ratio" what="Failed requests" /><//>
    <${Figure} title="Free memory now" value=${ready.length ? bytes(free) : "-"} unit="" note=${ready.length ? `of ${bytes(room)} for models` : "no Mac is online"} href="/macs" />
    ${watts.length > 0 && html`<${Figure} title="Power now" value=${short(watts.reduce((sum, value) => sum + value, 0))} unit="W" note=${`of ${count(watts.length, "Mac")}`} href="/macs" />`}
  </div>`;
}

/** Why no gateway answers clients; "" if one does. */
const noGateway = ({ gateways, gatewaysSilent }) => (gateways === 0 ? "no gateway runs" : Object.keys(gatewaysSilent).length >= gateways ? "no gateway answers" : "");

/** Requests that no gateway can report any more. */
export const brokenText = ({ broken24h }) => (broken24h ? `, and ${broken24h} broken with a gateway` : "");

/** The newest value of a metric and its time; undefined if there is none. */
function lastOf(hour, metric) {
  const values = hour?.metrics[metric].mean ?? [];
  const at = values.findLastIndex((value) => value !== null);
  return at < 0 ? undefined : { value: values[at], at: new Date(Date.parse(hour.from) + 1000 * hour.stepSeconds * at).toISOString() };
}

/** A line since the first value within the hour: of a young fleet it spans what there is. */
function Line({ hour, metric, what }) {
  const values = hour?.metrics[metric].mean ?? [];
  const begin = values.findIndex((value) => value !== null);
  if (values.filter((value) => value !== null).length < 2) return null;
  const shown = values.slice(begin);
  return html`<${Sparkline} values=${shown} label=${`${what}, the last ${count(Math.round((shown.length * hour.stepSeconds) / 60), "minute")}`} />`;
}

function LastChanges({ store }) {
  const newest = store.rows("changes").sort((a, b) => b.revision - a.revision).slice(0, MAX_CHANGES);
  return html`<section aria-labelledby="changes">
    <div class="section-head"><h2 id="changes">Last changes</h2><a href="/activity?tab=changes">All</a></div>
    ${newest.length ? html`<ul class="last-changes">${newest.map((one) => html`<li key=${one.id}><b>${one.user}</b> ${one.objects.slice(0, 3).map((object, at) => html`${at ? ", " : ""}${object.verb} <${ObjectLink} kind=${object.kind} name=${object.name} />`)}${one.objects.length > 3 ? ` and ${one.objects.length - 3} more` : ""}
      <time class="quiet" datetime=${one.time} title=${one.time}> ${age(one.time)} ago</time>${one.reason && html`<span class="quiet"> “${one.reason}”</span>`}</li>`)}</ul>`
      : html`<p class="quiet">Nothing was changed in the last 30 days.</p>`}
  </section>`;
}

export function overviewTitle(store) {
  const problems = store.summary?.problems ?? 0;
  return problems ? `(${count(problems, "problem")}) mlx-fleet` : "mlx-fleet";
}

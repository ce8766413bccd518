/** The models, and one model: why it has fewer replicas than wanted, its replicas, conditions and events. */

import { html, useState } from "../vendor/htm-preact.js";
import { age, bytes } from "../format.js";
import { Badge, Command, Details, Filter, lazy, matching, ModelState, Names, Problems, problemsOf, reasonColumn, Table, tryPath } from "../parts.js";
import { ObjectPage } from "./object.js";

const Actions = lazy(() => import("../actions.js"), "Actions");
const LogTail = lazy(() => import("./logs.js"), "LogTail");
const Energy = lazy(() => import("../measured.js"), "Energy");
const Objectives = lazy(() => import("../measured.js"), "Objectives");
const RolloutTree = lazy(() => import("../revisions.js"), "RolloutTree");
const SubjectCharts = lazy(() => import("../measured.js"), "SubjectCharts");
const Usage = lazy(() => import("../measured.js"), "Usage");
const VersionTraffic = lazy(() => import("../revisions.js"), "VersionTraffic");
const WhyPending = lazy(() => import("../placement.js"), "WhyPending");

export function Models({ store }) {
  const [text, setText] = useState("");
  const rows = matching(store.rows("models"), text);
  const columns = [
    ["Model", "name", "ModelDeployment"],
    ["State", (model) => html`<${ModelState} model=${model} /><${RolloutState} model=${model} />`],
    ["Served as", "servedNames", "names"], ["Source", "source"], ["Macs", "macs", "Node"],
    ["Context", "contextLength", "number"], ["Revision", "revision", "number"],
    ...reasonColumn(rows),
  ];
  return html`
    <div class="section-head"><h1>Models</h1><a href="/run">Run a model</a></div>
    <${Filter} value=${text} onInput=${setText} label="Filter models" />
    <${Table} caption="Models" columns=${columns} rows=${rows} empty=${text ? "No model matches." : html`Nothing is deployed. <a href="/run">Run a model</a>`} />
    ${!store.at && html`<${Usage} what="models" />`}
    <${Command} text="fleetctl get modeldeployments" />
  `;
}

export function Model({ store, name, row: model, query }) {
  const [isWhyOpen, setWhyOpen] = useState(query.has("why"));
  const problems = problemsOf(store, name);
  const replicas = store.rows("replicas").filter((one) => one.deployment === name);
  const names = new Set(replicas.map((one) => one.name));
  const events = store.rows("events").filter(
    (one) => (one.kind === "ModelDeployment" && one.object === name) || (one.kind === "Replica" && names.has(one.object)),
  );
  const commands = [`fleetctl explain placement ${name}`, `fleetctl rollout history ${name}`];
  return html`<${ObjectPage} store=${store} kind="ModelDeployment" name=${name}
    trail=${html`<a href="/models">Models</a>`} events=${events} commands=${commands}>
    <p><${ModelState} model=${model} /><${RolloutState} model=${model} /></p>
    <p class="actions">
      ${!problems.some((one) => one.tone === "bad") && html`<a href=${`/chat?model=${encodeURIComponent(model.servedNames[0] ?? name)}`}>Chat with it</a>`}
      <a href=${tryPath("ModelDeployment", name)}>Try a change</a>
      <button type="button" class="small" aria-expanded=${isWhyOpen} onClick=${() => setWhyOpen(!isWhyOpen)}>${model.placed < model.desired ? "Why pending?" : "Why here?"}</button>
      <${Actions} store=${store} view="models" object=${model} />
    </p>
    ${isWhyOpen && html`<section class="panel" aria-label="Placement"><${WhyPending} name=${name} revision=${`${model.placed} ${model.desired} ${model.ready}`} /></section>`}
    ${model.canary && html`<${Canary} canary=${model.canary} />`}
    ${problems.length > 0 && html`<section aria-labelledby="why"><h2 id="why">Problems</h2><${Problems} problems=${problems} /></section>`}
    <dl>
      <dt>Served as</dt><dd><${Names} names=${model.servedNames} /></dd>
      <dt>Source</dt><dd>${model.source}</dd>
      <dt>Replicas</dt>
      <dd>${model.desired} wanted, ${model.placed} placed, ${model.ready} ready, ${model.updated} of revision ${model.revision}${model.isPaused ? "; the rollout is paused" : ""}</dd>
      ${model.scaling && html`<dt>Autoscaled</dt><dd>${model.scaling}</dd>`}
      <dt>Context</dt><dd>${model.contextLength ?? "-"} tokens, ${model.concurrency ?? "-"} concurrent ${model.concurrency === 1 ? "request" : "requests"}</dd>
      <dt>Memory</dt><dd>${bytes(replicas.reduce((sum, one) => sum + one.memoryBytes, 0))} in all</dd>
      ${!store.at && html`<dt>Energy</dt><dd><${Energy} subject=${`model/${name}`} /></dd>`}
    </dl>
    <${RolloutTree} store=${store} model=${model} replicas=${replicas} />
    ${!store.at && html`<${Objectives} name=${name} />`}
    ${!store.at && new Set(replicas.map((one) => one.template)).size > 1 && html`<${VersionTraffic} name=${name} servedNames=${model.servedNames} replicas=${replicas} />`}
    <${SubjectCharts} subject=${`model/${name}`} at=${store.at} />
    ${!store.at && html`<${Details} summary="Log of a replica"><${LogTail} replicas=${replicas} /><//>`}<//>`;
}

function RolloutState({ model }) {
  const isFirst = model.revision <= 1; // then those that are ready say it all
  if (!model.desired || ((model.updated >= model.desired || isFirst) && !model.isPaused)) return null;
  const text = `${model.updated} of ${model.desired} ${model.desired === 1 ? "runs" : "run"} revision ${model.revision}`;
  return html`<span data-rollout>
    ${model.updated < model.desired && html`${" "}<progress max=${model.desired} value=${model.updated} aria-label=${text}></progress> ${text}`}
    ${model.isPaused && html`${" "}<${Badge} tone="warning">rollout paused<//>`}</span>`;
}

/** The trial of a new version as a line of steps: its share of the requests, and what was measured. */
function Canary({ canary }) {
  const { weights, step, outcome, message, since } = canary;
  const tone = { Running: "warning", Passed: "good", Failed: "bad" }[outcome];
  const state = (at) => (at < step || outcome === "Passed" ? "done" : at === step ? "now" : "later");
  return html`<section class="panel" aria-labelledby="canary">
    <h2 id="canary">Canary <${Badge} tone=${tone}>${outcome.toLowerCase()}<//> <span class="quiet">this step for ${age(since)}</span></h2>
    <ol class="rollout">${[...weights, 100].map((weight, at) => html`<li key=${at} class=${state(at)} aria-current=${state(at) === "now" ? "step" : undefined}>${at === weights.length ? "all" : `${weight} %`}</li>`)}</ol>
    ${message && html`<p>${message}</p>`}
  </section>`;
}

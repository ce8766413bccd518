/** The first screen: the fleet's health in a sentence, what is wrong, its Macs and its models. */

import { html } from "../vendor/htm-preact.js";
import { Badge, Events, MemoryBar, MacState, ModelState, Problems } from "../parts.js";
import { bytes, count } from "../format.js";
import { Traffic } from "./requests.js";

const MAX_MACS = 24;

export function Fleet({ store }) {
  const { summary } = store;
  if (!summary) return html`<p class="loading">Loading the fleet…</p>`;
  const problems = store.rows("conditions").filter((one) => one.isProblem);
  const macs = store.rows("macs");
  const models = store.rows("models");
  const short = models.filter((one) => one.ready < one.desired);
  return html`
    <h1>Fleet</h1>
    <p class="sentence" data-sentence>${summary.sentence}</p>
    <div class="cards">
      <${Figure} title="Macs" value=${`${summary.macs.online} of ${summary.macs.total}`} unit="online" href="/macs" />
      <${Figure} title="Models" value=${`${summary.models.available} of ${summary.models.total}`} unit="available" href="/models" />
      <${Figure} title="Replicas" value=${`${summary.replicas.ready} of ${summary.replicas.desired}`} unit="ready" href="/models" />
      <${Figure} title="Memory for models" value=${freeMemory(macs)} unit="free" href="/macs" />
      <${Figure} title="Gateways" value=${summary.gateways} unit="registered" />
      <${Figure} title="Reconciler" value=${summary.leader ? "leads" : "none leads"} unit=${summary.leader ?? ""} />
    </div>
    ${!store.at && html`<${Traffic} />`}
    <section aria-labelledby="problems">
      <h2 id="problems">Problems</h2>
      <div aria-live="polite">
        <${Short} models=${short} summary=${summary} />
        <${Problems} conditions=${problems} />
        ${!problems.length && !short.length && summary.leader && html`<p><${Badge} tone="good">No problem is known<//></p>`}
      </div>
    </section>
    <section aria-labelledby="macs">
      <h2 id="macs">Macs</h2>
      <ul class="map">
        ${macs.slice(0, MAX_MACS).map((mac) => html`<${MacCard} key=${mac.name} mac=${mac} />`)}
      </ul>
      ${macs.length > MAX_MACS && html`<p><a href="/macs">All ${macs.length} Macs</a></p>`}
      ${!macs.length && html`<p class="quiet">No Mac has joined. <a href="/add">Add a Mac</a>.</p>`}
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
      ${!models.length && html`<p class="quiet">Nothing is deployed. Apply a ModelDeployment: <code>fleetctl apply -f model.yaml</code></p>`}
    </section>
    <section aria-labelledby="events">
      <h2 id="events">Events</h2>
      <${Events} events=${newest(store.rows("events"), 10)} />
    </section>
  `;
}

/** Models that are short of replicas, and a fleet that nobody leads. */
function Short({ models, summary }) {
  if (!models.length && summary.leader) return null;
  return html`<ul class="problems">
    ${!summary.leader && html`<li><p><strong>No reconciler leads.</strong> Nothing is placed or replaced; what runs goes on.</p>
      <p class="cure">Start one: <code>fleet-reconciler</code>, or <code>fleetctl up</code></p></li>`}
    ${models.map((one) => html`<li key=${one.name}><p><strong><a href=${`/models/${encodeURIComponent(one.name)}`}>${one.name}</a></strong>${" "}
      ${one.ready} of ${one.desired} replicas ready. ${one.placed < one.desired ? html`<a href=${`/models/${encodeURIComponent(one.name)}?why`}>Why pending?</a>` : one.reason}</p></li>`)}
  </ul>`;
}

function Figure({ title, value, unit, href }) {
  const body = html`<span class="title">${title}</span><strong>${value}</strong><span class="quiet">${unit}</span>`;
  return href ? html`<a class="figure-card" href=${href}>${body}</a>` : html`<div class="figure-card">${body}</div>`;
}

function MacCard({ mac }) {
  return html`<li class="card">
    <h3><a href=${`/macs/${encodeURIComponent(mac.name)}`}>${mac.name}</a></h3>
    <p><${MacState} mac=${mac} /> <span class="quiet">${mac.chip ?? ""}</span></p>
    <p><${MemoryBar} mac=${mac} /></p>
    <p class="quiet">${mac.models.join(", ") || "no model"}</p>
  </li>`;
}

function freeMemory(macs) {
  const online = macs.filter((mac) => mac.state !== "offline" && mac.allocatableBytes);
  return bytes(online.reduce((sum, mac) => sum + Math.max(0, mac.allocatableBytes - mac.promisedBytes), 0));
}

function newest(events, number) {
  return [...events].sort((a, b) => (a.lastSeen < b.lastSeen ? 1 : -1)).slice(0, number);
}

/** The title of the browser's tab. */
export function fleetTitle(store) {
  const problems = store.summary?.problems ?? 0;
  return problems ? `(${count(problems, "problem")}) mlx-fleet` : "mlx-fleet";
}

/** Git sources: the commit that is applied, the newest one, what stands in the way, and drift. */

import { html } from "../vendor/htm-preact.js";
import { age } from "../format.js";
import { Actions } from "../actions.js";
import { Badge, Command, pathOf, tryPath } from "../parts.js";
import { Conditions } from "./object.js";

export function Git({ store }) {
  const sources = store.rows("gitSources");
  if (sources.length) return sources.map((source) => html`<${Source} key=${source.name} store=${store} source=${source} />`);
  return html`<p class="quiet">There is no GitSource. A fleet can follow a repository: write a manifest of the kind GitSource, and apply it.</p>
    <${Command} text="fleetctl explain gitsource" />`;
}

export function GitSource({ store, row: source }) {
  return html`<p class="trail"><a href="/activity?tab=git">Git</a></p><h1>Git source</h1><${Source} store=${store} source=${source} />`;
}

function Source({ store, source }) {
  const isBehind = source.observedRevision !== source.appliedRevision;
  return html`<section class="panel" aria-label=${source.name}>
    <h2>${source.name} ${source.isSuspended
      ? html`<${Badge} tone="idle">suspended<//>`
      : html`<${Badge} tone=${source.isReady ? "good" : source.reason ? "bad" : "idle"}>${source.isReady ? "in sync" : source.reason || "not fetched yet"}<//>`}</h2>
    <dl>
      <dt>Repository</dt><dd>${source.repository} ${source.path}</dd>
      <dt>Applied</dt><dd><code>${short(source.appliedRevision)}</code> ${source.appliedSubject} <span class="quiet">${source.appliedAt && `${age(source.appliedAt)} ago`}</span></dd>
      ${isBehind && html`<dt>Newest</dt><dd><code>${short(source.observedRevision)}</code> ${source.observedSubject}</dd>`}
      <dt>Objects</dt><dd>${source.objects.length ? source.objects.map((one, at) => html`${at ? ", " : ""}<${Named} name=${one} />`) : "none"}</dd>
    </dl>
    ${source.drift.length > 0 && html`<h3>Drift</h3><ul>${source.drift.map((one) => html`<li key=${one.kind + one.name}>
      ${one.kind}/${one.name}: ${driftText(one)} <span class="quiet">${one.managers.join(", ")}</span></li>`)}</ul>`}
    <${Conditions} conditions=${store.about("conditions", "GitSource", source.name)} />
    <p class="actions"><a href=${tryPath("GitSource", source.name)}>Try a change</a> <${Actions} store=${store} view="gitSources" object=${source} /></p>
    <${Command} text=${`fleetctl describe gs/${source.name}`} />
  </section>`;
}

/** The fields that differ, with the value of the repository and the one in the fleet; a release before had the names alone. */
function driftText({ fields, values }) {
  if (!fields.length) return "deleted in the fleet";
  const others = fields.slice(values.length);
  return html`${values.map((field) => html`<code class="field" key=${field.path}>${field.path}: <del>${field.wanted}</del> <ins>${field.actual}</ins></code>`)} ${others.join(", ")}`;
}

function Named({ name }) {
  const [kind, object] = name.split("/");
  const path = pathOf(kind, object);
  return path ? html`<a href=${path}>${name}</a>` : name;
}

const short = (revision) => (revision ? revision.replace(/([0-9a-f]{8})[0-9a-f]{32}/, "$1") : "-");

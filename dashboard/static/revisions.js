/** What an object was: its recorded changes; of a model its revisions as a tree with their replicas and Macs, and how they share the requests. */

import { html, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { age, bytes, clock, count, span } from "./format.js";
import { Badge, Details, Diff, logPath, MacState, ObjectLink, Select, Table, useRead } from "./parts.js";
import { replicaState } from "./screens/object.js";

const MOST_FIELDS = 5;
const CHANGES = [["When", "at", "clock"], ["Part", "part"], ["Changed", fieldsText, "wide"]];

export function ObjectHistory({ kind, name }) {
  const path = `/api/v1/objects/${kind}/${encodeURIComponent(name)}`;
  const [found, problem] = useRead(() => getJson(`${path}/changes`), [path]);
  const changes = found?.changes;
  if (!changes) return html`<p class=${problem ? "problem" : "quiet"} role="status">${problem || "Loading…"}</p>`;
  const rows = changes.map((one) => ({ ...one, name: `${one.revision} ${one.part}` }));
  const choices = [["now", "now"], ...[...new Set(changes.map((one) => one.at))].map((at) => [at, clock(at)])];
  return html`<${Table} caption="Recorded changes, the newest first" columns=${CHANGES} rows=${rows} empty="Nothing changed within 24 hours." />
    ${changes.length > 0 && html`<${Comparison} choices=${choices} first=${choices.at(-1)[0]} last="now"
      read=${(from, to) => getJson(`${path}/diff?${new URLSearchParams({ from, to })}`)} />`}`;
}

/** Two of several versions, and their difference. `choices`: [value, title]. */
function Comparison({ choices, first, last, read }) {
  const [from, setFrom] = useState(first);
  const [to, setTo] = useState(last);
  const [answer, problem] = useRead(() => read(from, to), [from, to, first, last]);
  const diff = answer?.diff;
  return html`<div class="row toolbar"><${Select} label="Difference from" value=${from} choices=${choices} onChange=${setFrom} />
      <${Select} label="to" value=${to} choices=${choices} onChange=${setTo} /></div>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    ${diff === "" ? html`<p class="quiet">They are the same.</p>` : diff && html`<div data-difference><${Diff} text=${diff} /></div>`}`;
}

function fieldsText(one) {
  if (one.isDeletion) return "deleted";
  if (one.isFirst) return "the first that is recorded";
  const shown = one.fields.slice(0, MOST_FIELDS).map((field) => html`<code class="field" key=${field.path}>${field.path}: <del>${text(field.old)}</del> <ins>${text(field.new)}</ins></code>`);
  const more = one.fields.length - shown.length + one.moreFields;
  return html`${shown}${more > 0 && html`<span class="quiet">and ${more} more</span>`}`;
}

const text = (value) => (value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

/** The revisions are read again when the one that the fleet runs moves. */
export function RolloutTree({ store, model, replicas }) {
  const { name, revision } = model;
  // Null until it is read, and in the past: the record is that of now.
  const read = async () => (store.at ? null : getJson(`/api/v1/revisions/${encodeURIComponent(name)}`));
  const [recorded, problem] = useRead(read, [name, revision, model.updated, model.ready, model.isPaused, store.at]);
  const revisions = recorded?.revisions ?? [];
  const branches = branchesOf(revisions, replicas);
  const live = branches.filter((branch) => branch.isCurrent || branch.replicas.length);
  const earlier = branches.filter((branch) => !live.includes(branch));
  const missing = model.desired - model.placed;
  const draw = (branch) => html`<${Branch} key=${branch.template} store=${store} name=${name} branch=${branch} isRecorded=${recorded !== null} missing=${branch.isCurrent ? missing : 0} />`;
  return html`<section aria-labelledby="rollout"><h2 id="rollout">Rollout</h2>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    ${recorded?.progress && html`<p>${recorded.progress}</p>`}
    <ul class="tree" aria-label=${`Revisions of ${name} with their replicas`}>${live.map(draw)}</ul>
    ${!live.length && html`<p class="quiet">No replica is placed.</p>`}
    ${earlier.length > 0 && html`<${Details} summary=${count(earlier.length, "earlier revision")}><ul class="tree">${earlier.map(draw)}</ul><//>`}
    ${revisions.length > 1 && html`<${Details} summary="Compare two revisions"><${Comparison} key=${revisions[0].name} first=${revisions.at(-1).name} last=${revisions[0].name}
        choices=${revisions.map((one) => [one.name, `revision ${one.revision}`])}
        read=${(from, to) => getJson(`/api/v1/revisions/${encodeURIComponent(name)}/diff?${new URLSearchParams({ from, to })}`)} /><//>`}
  </section>`;
}

/** Return the revisions, the newest first, each with its replicas; replicas of none of them are of a version without a record. Pure. */
function branchesOf(revisions, replicas) {
  const known = new Set(revisions.map((revision) => revision.template));
  const others = [...new Set(replicas.map((replica) => replica.template))].filter((template) => !known.has(template));
  return [...revisions, ...others.map((template) => ({ template }))].map((branch) => ({
    ...branch,
    replicas: replicas.filter((replica) => replica.template === branch.template),
  }));
}

function Branch({ store, name, branch, isRecorded, missing }) {
  const { revision, created, cause, isCurrent, diff, replicas } = branch;
  const ready = replicas.filter((replica) => replica.isReady).length;
  return html`<li data-revision=${revision ?? branch.template}>
    <p><strong>${revision ? `Revision ${revision}` : isRecorded ? "A version without a record" : "One version"}</strong>
      ${isCurrent && html`${" "}<${Badge} tone="good">wanted<//>`}${isRecorded && !isCurrent && replicas.length > 0 && html`${" "}<${Badge} tone="warning">leaves<//>`}
      ${replicas.length > 0 && html`${" "}${ready} of ${count(replicas.length, "replica")} ready`}
      <span class="quiet">${created ? ` ${age(created)} old` : ""}${cause ? `: ${cause}` : ""}</span></p>
    ${diff && html`<${Details} summary="Difference from the one before"><${Diff} text=${diff} /><//>`}
    ${revision && !isCurrent && store.mayWrite("operator") && html`<p class="actions"><a href=${`/models/${encodeURIComponent(name)}?do=undo&revision=${revision}`}>Return to revision ${revision}</a></p>`}
    <ul>
      ${replicas.map((replica) => html`<${ReplicaBranch} key=${replica.name} store=${store} replica=${replica} />`)}
      ${missing > 0 && html`<li><${Badge} tone="bad">${count(missing, "replica")} without a place<//> <a href=${`/models/${encodeURIComponent(name)}?why`}>Why pending?</a></li>`}
    </ul>
  </li>`;
}

function ReplicaBranch({ store, replica }) {
  const why = [replica.message, ...replica.fetches].filter(Boolean).join("; ");
  return html`<li data-replica=${replica.name}>
    <p><${ObjectLink} kind="Replica" name=${replica.name} />
      ${" "}<${Badge} tone=${replica.isReady ? "good" : "warning"}>${replicaState(replica)}<//>
      <span class="quiet"> ${bytes(replica.memoryBytes)}${replica.restarts ? `, ${count(replica.restarts, "restart")}` : ""}</span>
      ${" "}<a href=${logPath(`replica/${replica.name}`)} aria-label=${`Log of ${replica.name}`}>log</a>
      ${!replica.isReady && why && html`<span class="quiet"> ${why}</span>`}</p>
    <ul>${replica.macs.map((mac) => html`<li key=${mac}><${ObjectLink} kind="Node" name=${mac} /> ${store.row("macs", mac) && html`<${MacState} mac=${store.row("macs", mac)} />`}</li>`)}</ul>
  </li>`;
}

const READ_MS = 5_000;
const MOST_NAMES = 8;
const MOST_REQUESTS = 200;

export function VersionTraffic({ name, servedNames, replicas }) {
  const read = () => Promise.all([
    getJson(`/api/v1/revisions/${encodeURIComponent(name)}`),
    ...servedNames.slice(0, MOST_NAMES).map((one) => getJson(`/api/v1/requests?${new URLSearchParams({ from: "10m", limit: MOST_REQUESTS, model: one })}`)),
  ]);
  const [found, problem] = useRead(read, [], READ_MS);
  if (!found) return problem ? html`<p class="quiet" role="status">${problem}</p>` : null;
  const [{ revisions }, ...answers] = found;
  const requests = answers.flatMap((one) => one.requests).filter((one) => one.deployment === name);
  const rows = versionsOf(replicas, requests).map((one) => ({ ...one, name: one.template, title: titleOf(one.template, revisions) }));
  const of = rows.reduce((sum, one) => sum + one.requests.length, 0);
  const columns = [
    ["Version", "title"],
    ["Replicas", (one) => `${one.ready} of ${one.replicas} ready`, "number"],
    ["Requests", (one) => (of ? `${one.requests.length} (${Math.round((100 * one.requests.length) / of)} %)` : "0"), "number"],
    ["Failed", (one) => one.requests.filter((request) => request.status === "error").length, "number"],
    ["First token", (one) => span(mean(one.requests.map((request) => request.firstTokenMs).filter((ms) => ms !== null))), "number"],
  ];
  return html`<section aria-labelledby="versions" data-versions><h2 id="versions">Traffic by version</h2>
    <${Table} caption="Traffic by version" columns=${columns} rows=${rows} empty="" />
    <p class="quiet">The last ${MOST_REQUESTS} requests for each name it is served as, within ten minutes, by replicas that are there.</p>
  </section>`;
}

/** A replica's name may have been that of another version: requests of before its creation are not its own. */
function versionsOf(replicas, requests) {
  const found = new Map();
  for (const one of replicas) {
    const version = found.get(one.template) ?? { template: one.template, replicas: 0, ready: 0, requests: [] };
    const since = one.created ? Date.parse(one.created) : 0;
    version.replicas += 1;
    version.ready += one.isReady ? 1 : 0;
    version.requests.push(...requests.filter((request) => request.replica === one.name && Date.parse(request.time) >= since));
    found.set(one.template, version);
  }
  return [...found.values()];
}

function titleOf(template, revisions) {
  const known = revisions.find((one) => one.template === template);
  return known ? `revision ${known.revision}${known.isCurrent ? ", the newest" : ""}` : template;
}

const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

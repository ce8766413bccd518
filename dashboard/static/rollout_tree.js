/** A model as a tree: its revisions, their replicas, and the Macs of these; and how two revisions differ. */

import { html, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { age, bytes, count } from "./format.js";
import { Comparison } from "./object_history.js";
import { Badge, Diff, MacState, ObjectLink, useRead } from "./parts.js";

/** The revisions are read again when the one that the fleet runs moves. */
export function RolloutTree({ store, model, replicas }) {
  const { name, revision } = model;
  const [isCompared, setCompared] = useState(false);
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
    ${earlier.length > 0 && html`<details><summary>${count(earlier.length, "earlier revision")}</summary><ul class="tree">${earlier.map(draw)}</ul></details>`}
    ${revisions.length > 1 && html`<details onToggle=${(event) => setCompared(event.target.open)}><summary>Compare two revisions</summary>
      ${isCompared && html`<${Comparison} key=${revisions[0].name} choices=${revisions.map((one) => [one.name, `revision ${one.revision}`])} first=${revisions.at(-1).name} last=${revisions[0].name}
        read=${(from, to) => getJson(`/api/v1/revisions/${encodeURIComponent(name)}/diff?${new URLSearchParams({ from, to })}`)} />`}</details>`}
  </section>`;
}

/** Return the revisions, the newest first, each with its replicas; replicas of none of them are of a version without a record. Pure. */
export function branchesOf(revisions, replicas) {
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
    ${diff && html`<details><summary>Difference from the one before</summary><${Diff} text=${diff} /></details>`}
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
      ${" "}<${Badge} tone=${replica.isReady ? "good" : "warning"}>${replica.isReady ? "ready" : replica.reason || "pending"}<//>
      <span class="quiet"> ${bytes(replica.memoryBytes)}${replica.restarts ? `, ${count(replica.restarts, "restart")}` : ""}</span>
      ${" "}<a href=${`/activity?tab=logs&of=replica/${encodeURIComponent(replica.name)}`} aria-label=${`Log of ${replica.name}`}>log</a>
      ${!replica.isReady && why && html`<span class="quiet"> ${why}</span>`}</p>
    <ul>${replica.macs.map((mac) => html`<li key=${mac}><${ObjectLink} kind="Node" name=${mac} /> ${store.row("macs", mac) && html`<${MacState} mac=${store.row("macs", mac)} />`}</li>`)}</ul>
  </li>`;
}

/** What the pages of all objects have, and the page of a replica. */

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { age, bytes } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Badge, Command, Details, Events, lazy, logPath, Names, ObjectLink, Table, Text, tryPath, useRead } from "../parts.js";

const ObjectHistory = lazy(() => import("../revisions.js"), "ObjectHistory");

/**
 * The page of an object: where it belongs, its name, its `children`, then its conditions, its events, its document, its
 * recorded changes, and commands. `events`: others than its own.
 */
export function ObjectPage({ store, kind, name, trail, events = store.about("events", kind, name), commands, children }) {
  const isYamlAsked = new URLSearchParams(location.search).has("yaml");
  return html`<p class="trail">${trail}</p>
    <h1>${name}</h1>
    ${children}
    <h2>Conditions</h2>
    <${Conditions} conditions=${store.about("conditions", kind, name)} />
    <h2>Events</h2>
    <${Events} events=${events} />
    <${Details} summary="YAML" isOpenFirst=${isYamlAsked}><${Yaml} kind=${kind} name=${name} isAsked=${isYamlAsked} /><//>
    <${Details} summary="Recorded changes"><${ObjectHistory} kind=${kind} name=${name} /><//>
    ${commands.map((text) => html`<${Command} key=${text} text=${text} />`)}`;
}

const CONDITIONS = [
  ["Condition", "type"],
  ["Status", (one) => html`<${Badge} tone=${one.isProblem ? "bad" : one.status === "Unknown" ? "idle" : "good"}>${one.status}<//>`],
  ["Reason", "reason"], ["Since", (one) => age(one.since)], ["Message", "message", Text],
];

export function Conditions({ conditions }) {
  return html`<${Table} caption="Conditions" columns=${CONDITIONS} rows=${conditions} empty="Nothing is reported yet." />`;
}

/** The whole object, read when it is opened, or when the address asks for it. */
function Yaml({ kind, name, isAsked }) {
  const [object, problem] = useRead(() => getJson(`/api/v1/objects/${kind}/${encodeURIComponent(name)}`), [kind, name]);
  const text = useRef(null);
  useEffect(() => isAsked && text.current.scrollIntoView({ block: "center" }), [object]);
  return html`${kind !== "Replica" && html`<p><a href=${tryPath(kind, name)}>Try a change</a></p>`}
    <pre ref=${text} tabindex="0">${object?.yaml ?? (problem || "Loading…")}</pre>`;
}

/** The state of a replica, with its reason while it does not serve. */
export const replicaState = (replica) => (replica.isReady ? "ready" : replica.reason || "pending");

export function Replica({ store, name, row: replica }) {
  return html`<${ObjectPage} store=${store} kind="Replica" name=${name}
    trail=${html`<${ObjectLink} kind="ModelDeployment" name=${replica.deployment} />`} commands=${[`fleetctl logs replica/${name}`]}>
    <p><${Badge} tone=${replica.isReady ? "good" : "warning"}>${replicaState(replica)}<//> <${Text} text=${replica.message} /></p>
    <p class="actions"><a href=${logPath(`replica/${name}`)}>Log</a></p>
    ${replica.fetches.length > 0 && html`<ul>${replica.fetches.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}
    <dl>
      <dt>Macs</dt><dd><${Names} kind="Node" names=${replica.macs} /></dd>
      <dt>Memory</dt><dd>${bytes(replica.memoryBytes)}</dd>
      <dt>Restarts</dt><dd>${replica.restarts}</dd>
      ${replica.group && html`<dt>Group</dt><dd><${ObjectLink} kind="ShardGroup" name=${replica.group} />, epoch ${replica.epoch}</dd>`}
    </dl><//>`;
}

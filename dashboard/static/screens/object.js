/** Parts of an object's page: its conditions, its document, and its absence. The page of a replica. */

import { html, useState } from "../vendor/htm-preact.js";
import { age, bytes } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Badge, Command, Events, lazy, Names, ObjectLink, Table, Text, tryPath } from "../parts.js";

const ObjectHistory = lazy(() => import("../object_history.js"), "ObjectHistory");

export function Conditions({ conditions }) {
  const columns = [
    ["Condition", (one) => one.type],
    ["Status", (one) => html`<${Badge} tone=${one.isProblem ? "bad" : one.status === "Unknown" ? "idle" : "good"}>${one.status}<//>`],
    ["Reason", (one) => one.reason],
    ["Since", (one) => age(one.since)],
    ["Message", (one) => html`<${Text} text=${one.message} />`, "wide"],
  ];
  return html`<${Table} caption="Conditions" columns=${columns} rows=${conditions} empty="Nothing is reported yet." />`;
}

/** The whole object as YAML and its recorded changes, each read when it is opened. */
export function Source({ kind, name }) {
  return html`<${Yaml} kind=${kind} name=${name} /><${Recorded} kind=${kind} name=${name} />`;
}

function Recorded({ kind, name }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Recorded changes</summary>
    ${isOpen && html`<${ObjectHistory} kind=${kind} name=${name} />`}
  </details>`;
}

function Yaml({ kind, name }) {
  const [text, setText] = useState("");
  const open = async (event) => {
    if (!event.target.open || text) return;
    try {
      const path = `/api/v1/objects/${kind}/${encodeURIComponent(name)}`;
      setText((await getJson(path)).yaml);
    } catch (error) {
      setText(error.message);
    }
  };
  const isAsked = new URLSearchParams(location.search).has("yaml");
  return html`<details onToggle=${open} open=${isAsked} ref=${(details) => isAsked && !text && details?.scrollIntoView({ block: "center" })}>
    <summary>YAML</summary>
    ${kind !== "Replica" && html`<p><a href=${tryPath(kind, name)}>Try a change</a></p>`}
    <pre tabindex="0">${text || "Loading…"}</pre>
  </details>`;
}

export function NotFound({ what, name, command }) {
  return html`<h1>${name}</h1>
    <p>There is no ${what} of this name, or not any more.</p>
    <${Command} text=${command} />`;
}

export function Replica({ store, name }) {
  const replica = store.row("replicas", name);
  if (!replica) return html`<${NotFound} what="replica" name=${name} command="fleetctl get replicas" />`;
  const isAbout = (one) => one.kind === "Replica" && one.object === name;
  return html`
    <p class="trail"><${ObjectLink} kind="ModelDeployment" name=${replica.deployment} /></p>
    <h1>${name}</h1>
    <p><${Badge} tone=${replica.isReady ? "good" : "warning"}>${replica.isReady ? "ready" : replica.reason || "pending"}<//> <${Text} text=${replica.message} /></p>
    <p class="actions"><a href=${`/activity?tab=logs&of=replica/${encodeURIComponent(name)}`}>Log</a></p>
    ${replica.fetches.length > 0 && html`<ul>${replica.fetches.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}
    <dl>
      <dt>Macs</dt><dd><${Names} kind="Node" names=${replica.macs} /></dd>
      <dt>Memory</dt><dd>${bytes(replica.memoryBytes)}</dd>
      <dt>Restarts</dt><dd>${replica.restarts}</dd>
      ${replica.group && html`<dt>Group</dt><dd><${ObjectLink} kind="ShardGroup" name=${replica.group} />, epoch ${replica.epoch}</dd>`}
    </dl>
    <h2>Conditions</h2>
    <${Conditions} conditions=${store.rows("conditions").filter(isAbout)} />
    <h2>Events</h2>
    <${Events} events=${store.rows("events").filter(isAbout)} />
    <${Source} kind="Replica" name=${name} />
    <${Command} text=${`fleetctl logs replica/${name}`} />
  `;
}

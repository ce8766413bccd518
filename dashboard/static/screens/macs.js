/** The Macs, and one Mac: its hardware, its memory by replica, its conditions and events. */

import { html, useState } from "../vendor/htm-preact.js";
import { age, bytes, figureText, taintText } from "../format.js";
import { Badge, Command, Filter, lazy, logPath, MacState, matching, MemoryBar, reasonColumn, Table, Tabs, Text } from "../parts.js";
import { ObjectPage, replicaState } from "./object.js";

const FleetPicture = lazy(() => import("../picture.js"), "FleetPicture");
const Actions = lazy(() => import("../actions.js"), "Actions");
const Energy = lazy(() => import("../measured.js"), "Energy");
const Usage = lazy(() => import("../measured.js"), "Usage");
const SubjectCharts = lazy(() => import("../measured.js"), "SubjectCharts");

const TABS = [
  ["", "Table", "viewer", MacTable],
  ["picture", "Picture", "viewer", FleetPicture],
  ["groups", "Groups", "viewer", lazy(() => import("./groups.js"), "Groups")],
  ["add", "Add a Mac", "viewer", AddMac],
];

export const Macs = (props) => html`<h1>Macs</h1><${Tabs} path="/macs" tabs=${TABS} ...${props} />`;

function MacTable({ store }) {
  const [text, setText] = useState("");
  const rows = matching(store.rows("macs"), text);
  const isMeasured = [...store.views.figures.values()].some((one) => one.gpuPercent !== null || one.active > 0);
  const columns = [
    ["Mac", "name", "Node"],
    ["State", (mac) => html`<${MacState} mac=${mac} />`],
    ["Chip", (mac) => html`${mac.chip ?? "-"}, <span class="figure">${bytes(mac.memoryBytes)}</span>`],
    ["For models", (mac) => html`<${MemoryBar} mac=${mac} />`],
    ["Models", "models", "ModelDeployment"],
    ...(isMeasured ? [["GPU, requests", (mac) => loadText(store.row("figures", mac.name)), "number"]] : []),
    ...(rows.some((mac) => mac.site) ? [["Site", "site"]] : []),
    ...(new Set(rows.map((mac) => mac.agentVersion)).size > 1 ? [["Release", "agentVersion"]] : []),
    ...reasonColumn(rows),
  ];
  return html`
    <${Filter} value=${text} onInput=${setText} label="Filter Macs" />
    <${Table} caption="Macs" columns=${columns} rows=${rows} empty=${text ? "No Mac matches." : "No Mac has joined."} />
    ${!store.at && html`<${Usage} what="nodes" />`}
    <${Command} text="fleetctl get nodes" />
  `;
}

export function Mac({ store, name, row: mac }) {
  const replicas = store.rows("replicas").filter((one) => one.macs.includes(name));
  const figures = store.row("figures", name);
  const version = (column, of = "") => html`<${Version} of=${of} mac=${mac} column=${column} usual=${store.summary?.versions} />`;
  return html`<${ObjectPage} store=${store} kind="Node" name=${name}
    trail=${html`<a href="/macs">Macs</a>`} commands=${[`fleetctl describe node ${name}`, `fleetctl drain ${name} --dry-run`]}>
    <p><${MacState} mac=${mac} /> <${Text} text=${mac.reason} /></p>
    <p class="actions">
      <a href=${`/try?lost=${encodeURIComponent(name)}`}>Try without it</a>
      <a href=${logPath(`node/${name}`)}>Log</a>
      <${Actions} store=${store} view="macs" object=${mac} />
    </p>
    <p><${MemoryBar} mac=${mac} /></p>
    <dl>
      <dt>Chip</dt><dd>${mac.chip ?? "-"}, ${mac.cpuCores ?? "-"} CPU cores, ${mac.gpuCores ?? "-"} GPU cores</dd>
      <dt>Memory</dt><dd>${bytes(mac.memoryBytes)}, of which ${bytes(mac.allocatableBytes)} for models</dd>
      <dt>Reserved</dt><dd>${bytes(mac.promisedBytes)} by the memory proofs of its replicas</dd>
      <dt>Disk</dt><dd>${mac.diskFreeBytes === null ? "-" : `${bytes(mac.diskFreeBytes)} free`}</dd>
      <dt>Deployed models</dt><dd>${mac.modelsOnDisk.length ? html`<ul data-disk>${mac.modelsOnDisk.map((one) => html`<li key=${one.path}><code>${one.path}</code> ${diskText(one)}</li>`)}</ul>` : "none is looked for yet"}</dd>
      <dt>Pools</dt><dd>${mac.pools.join(", ") || "none"}</dd>
      <dt>Last heartbeat</dt><dd data-word>${wordText(mac, store.at)}</dd>
      <dt>System</dt><dd>${version("osVersion")}, ${version("mlxVersion", "mlx")}, ${version("agentVersion", "agent")}</dd>
      ${mac.taints.length > 0 && html`<dt>Taints</dt><dd>${mac.taints.map((one) => html`<code key=${one.key + one.effect}>${taintText(one)}</code> `)}</dd>`}
      ${mac.site && html`<dt>Site</dt><dd>${mac.site}</dd>`}
      ${figureText(figures) && html`<dt>Now</dt><dd>${figureText(figures)}</dd>`}
      ${!store.at && html`<dt>Energy</dt><dd><${Energy} subject=${`node/${name}`} /></dd>`}
      <dt>Address</dt><dd>${mac.address ?? "-"} (${mac.hostname ?? "-"})</dd>
    </dl>
    <${SubjectCharts} subject=${`node/${name}`} at=${store.at} />
    <h2>Replicas</h2>
    <${Table} caption="Replicas" columns=${REPLICAS} rows=${replicas} empty="No replica is placed here." /><//>`;
}

function diskText({ bytes: size, missingBytes, problem }) {
  if (missingBytes > 0) return `${bytes(missingBytes)} to fetch${problem ? `: ${problem}` : ""}`;
  return problem ? `not usable: ${problem}` : `on its disk, ${bytes(size)} of weights`;
}

/** How old the last sign of life of the Mac's agent is. */
function wordText(mac, at) {
  if (!["offline", "asleep"].includes(mac.state)) return "within seconds: its agent renews its lease";
  if (!mac.silentSince) return "its lease has ended; since when is not noted";
  return html`<time datetime=${mac.silentSince} title=${mac.silentSince}>${age(mac.silentSince, at ? Date.parse(at) : Date.now())} ago</time>`;
}

const loadText = (found) => (found ? `${found.gpuPercent === null ? "-" : `${found.gpuPercent} %`}, ${found.active}` : "-");

/** A release, marked where most Macs have another. */
function Version({ of, mac, column, usual }) {
  const text = [of, mac[column] ?? "-"].filter(Boolean).join(" ");
  const most = usual?.[column];
  if (!mac[column] || !most || most === mac[column]) return text;
  return html`<${Badge} tone="warning">${text}<//> <span class="quiet">(most have ${most})</span>`;
}

const REPLICAS = [
  ["Replica", "name", "Replica"], ["Model", "deployment", "ModelDeployment"], ["State", replicaState], ["Macs", "macs", "Node"],
  ["Memory", "memoryBytes", bytes], ["Restarts", "restarts", "number"],
  ["Log", (one) => html`<a href=${logPath(`replica/${one.name}`)} aria-label=${`Log of ${one.name}`}>log</a>`],
  ["Reason", (one) => [one.message, ...one.fetches].filter(Boolean).join("; "), Text],
];

const WAITING = [
  ["Mac", "node", "names"], ["Chip", (one) => one.chip || "-"], ["Memory", (one) => one.memoryBytes || null, bytes],
  ["From", "source"], ["Age", (one) => age(one.created)],
  ["Approve", (one) => (one.isApproved ? "approved" : html`<${Command} text=${`fleetctl approve ${one.node}`} />`), "wide"],
];

/** How another Mac joins, and those that wait for it. */
function AddMac({ store }) {
  return html`
    <h2>Add a Mac</h2>
    <ol class="guide">
      <li>On this machine, print a token (it works once, for an hour):<${Command} text="fleetctl token create" /></li>
      <li>On the new Mac, install mlx-fleet and join with the command that was printed:
        <${Command} text="sudo fleetctl join --service TOKEN HOST:4002" />
      </li>
      <li>It appears in <a href="/macs">the table</a> as soon as its agent has reported:<${Command} text="fleetctl get nodes -w" /></li>
    </ol>
    <p class="quiet">A fleet that runs on this machine alone accepts other Macs after <code>fleetctl up --join ADDRESS</code>.
      One that ran <code>fleetctl join HOST:4002</code> without a token waits for <code>fleetctl approve NAME</code>.</p>
    <h3>Waiting for approval</h3>
    <${Table} caption="Waiting for approval" columns=${WAITING} rows=${store.rows("joinRequests")} empty="No machine asks to join without a token." />
  `;
}

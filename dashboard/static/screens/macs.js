/** The Macs, and one Mac: its hardware, its memory by replica, its conditions and events. */

import { html, useState } from "../vendor/htm-preact.js";
import { age, bytes, figureText, taintText } from "../format.js";
import { Badge, Command, Events, Filter, lazy, MacState, matching, MemoryBar, Names, ObjectLink, reasonColumn, Table, Tabs, Text } from "../parts.js";
import { Conditions, NotFound, Source } from "./object.js";

const FleetPicture = lazy(() => import("../picture.js"), "FleetPicture");
const Actions = lazy(() => import("../actions.js"), "Actions");
const Energy = lazy(() => import("../service_levels.js"), "Energy");
const Usage = lazy(() => import("../usage.js"), "Usage");
const MacCharts = lazy(() => import("../subject_charts.js"), "MacCharts");

const TABS = [
  ["", "Table", "viewer", MacTable],
  ["picture", "Picture", "viewer", FleetPicture],
  ["groups", "Groups", "viewer", lazy(() => import("./groups.js"), "Groups")],
  ["add", "Add a Mac", "viewer", lazy(() => import("./add.js"), "AddMac")],
];

export function Macs(props) {
  return html`<h1>Macs</h1><${Tabs} path="/macs" tabs=${TABS} ...${props} />`;
}

function MacTable({ store }) {
  const [text, setText] = useState("");
  const rows = matching(store.rows("macs"), text);
  const isMeasured = [...store.views.figures.values()].some((one) => one.gpuPercent !== null || one.active > 0);
  const columns = [
    ["Mac", (mac) => html`<${ObjectLink} kind="Node" name=${mac.name} />`],
    ["State", (mac) => html`<${MacState} mac=${mac} />`],
    ["Chip", (mac) => `${mac.chip ?? "-"}, ${bytes(mac.memoryBytes)}`],
    ["For models", (mac) => html`<${MemoryBar} mac=${mac} />`],
    ["Models", (mac) => html`<${Names} kind="ModelDeployment" names=${mac.models} />`],
    ...(isMeasured ? [["GPU, requests", (mac) => loadText(store.row("figures", mac.name)), "number"]] : []),
    ...(rows.some((mac) => mac.site) ? [["Site", (mac) => mac.site ?? "-"]] : []),
    ...(new Set(rows.map((mac) => mac.agentVersion)).size > 1 ? [["Release", (mac) => mac.agentVersion ?? "-"]] : []),
    ...reasonColumn(rows),
  ];
  return html`
    <${Filter} value=${text} onInput=${setText} label="Filter Macs" />
    <${Table} caption="Macs" columns=${columns} rows=${rows} empty=${text ? "No Mac matches." : "No Mac has joined."} />
    ${!store.at && html`<${Usage} what="nodes" />`}
    <${Command} text="fleetctl get nodes" />
  `;
}

export function Mac({ store, name }) {
  const mac = store.row("macs", name);
  if (!mac) return html`<${NotFound} what="Mac" name=${name} command="fleetctl get nodes" />`;
  const replicas = store.rows("replicas").filter((one) => one.macs.includes(name));
  const events = store.rows("events").filter((one) => one.kind === "Node" && one.object === name);
  const figures = store.row("figures", name);
  return html`
    <p class="trail"><a href="/macs">Macs</a></p>
    <h1>${name}</h1>
    <p><${MacState} mac=${mac} /> <${Text} text=${mac.reason} /></p>
    <p class="actions">
      <a href=${`/try?lost=${encodeURIComponent(name)}`}>Try without it</a>
      <a href=${`/activity?tab=logs&of=node/${encodeURIComponent(name)}`}>Log</a>
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
      <dt>System</dt><dd><${Version} name="" mac=${mac} column="osVersion" usual=${store.summary?.versions} />, <${Version} name="mlx" mac=${mac} column="mlxVersion" usual=${store.summary?.versions} />,${" "}
        <${Version} name="agent" mac=${mac} column="agentVersion" usual=${store.summary?.versions} /></dd>
      ${mac.taints.length > 0 && html`<dt>Taints</dt><dd>${mac.taints.map((one) => html`<code key=${one.key + one.effect}>${taintText(one)}</code> `)}</dd>`}
      ${mac.site && html`<dt>Site</dt><dd>${mac.site}</dd>`}
      ${figureText(figures) && html`<dt>Now</dt><dd>${figureText(figures)}</dd>`}
      ${!store.at && html`<dt>Energy</dt><dd><${Energy} subject=${`node/${name}`} /></dd>`}
      <dt>Address</dt><dd>${mac.address ?? "-"} (${mac.hostname ?? "-"})</dd>
    </dl>
    <${MacCharts} name=${name} at=${store.at} />
    <h2>Replicas</h2>
    <${Replicas} replicas=${replicas} empty="No replica is placed here." />
    <h2>Conditions</h2>
    <${Conditions} conditions=${store.rows("conditions").filter((one) => one.kind === "Node" && one.object === name)} />
    <h2>Events</h2>
    <${Events} events=${events} />
    <${Source} kind="Node" name=${name} />
    <${Command} text=${`fleetctl describe node ${name}`} />
    <${Command} text=${`fleetctl drain ${name} --dry-run`} />
  `;
}

/** Whether a model is on the Mac's disk, and what is missing. */
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
function Version({ name, mac, column, usual }) {
  const text = [name, mac[column] ?? "-"].filter(Boolean).join(" ");
  const most = usual?.[column];
  if (!mac[column] || !most || most === mac[column]) return text;
  return html`<${Badge} tone="warning">${text}<//> <span class="quiet">(most have ${most})</span>`;
}

/** Replicas with their state and why. */
export function Replicas({ replicas, empty }) {
  const columns = [
    ["Replica", (one) => html`<${ObjectLink} kind="Replica" name=${one.name} />`],
    ["Model", (one) => html`<${ObjectLink} kind="ModelDeployment" name=${one.deployment} />`],
    ["State", (one) => (one.isReady ? "ready" : one.reason || "pending")],
    ["Macs", (one) => html`<${Names} kind="Node" names=${one.macs} />`],
    ["Memory", (one) => bytes(one.memoryBytes), "number"],
    ["Restarts", (one) => one.restarts, "number"],
    ["Log", (one) => html`<a href=${`/activity?tab=logs&of=replica/${encodeURIComponent(one.name)}`} aria-label=${`Log of ${one.name}`}>log</a>`],
    ["Reason", (one) => html`<${Text} text=${[one.message, ...one.fetches].filter(Boolean).join("; ")} />`, "wide"],
  ];
  return html`<${Table} caption="Replicas" columns=${columns} rows=${replicas} empty=${empty} />`;
}

/** Why a replica is pending: each Mac with its reason, what it needs and has, and what would help. */

import { html } from "../vendor/htm-preact.js";
import { bytes } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Legend, partsOf, proofText, StackedBar } from "../placement.js";
import { Badge, Command, ObjectLink, Table, Text, useRead } from "../parts.js";

// Reasons whose amounts are not bytes, as fleetctl prints them.
const COUNTS = ["TooFewGpuCores", "ContextTooLong", "ReplicaLimit"];

export function WhyPending({ name, revision }) {
  const [report, problem] = useRead(() => getJson(`/api/v1/explain/deployment/${encodeURIComponent(name)}`), [name, revision]);
  if (problem) return html`<p class="problem" role="alert">${problem}</p>`;
  if (!report) return html`<p class="quiet">Asking the planner…</p>`;
  const rows = report.nodes.map((one) => ({ ...one, name: one.node, memory: one.memory ?? report.proofs[one.node] }));
  const scale = Math.max(1, ...rows.map((one) => Math.max(one.roomBytes, one.memory?.totalBytes ?? 0)));
  return html`
    <p data-why>${report.placed} of ${report.desired} replicas are placed; for one more, ${report.summary}</p>
    ${report.remedies.length > 0 && html`<h3>What would help</h3>
      <ul class="remedies">${report.remedies.map((one) => html`<li key=${one.text}>
        <a href=${tryPath(name, one.patch)}><${Text} text=${one.text} /></a>
        ${one.memory && html`<span class="quiet"> ${bytes(one.memory.totalBytes)}: ${proofText(one.memory)}</span>`}
      </li>`)}</ul>`}
    <h3>Each Mac</h3>
    <${Legend} />
    <${Table} caption="Macs, and why each does or does not fit" columns=${columns(scale)} rows=${rows} empty="There is no Mac." />
    <details><summary>As fleetctl prints it</summary><pre tabindex="0" data-report>${report.text}</pre></details>
    <${Command} text=${`fleetctl explain placement ${name}`} />
  `;
}

const isBytes = (one) => one.refusal && one.refusal.need > 0 && !COUNTS.includes(one.refusal.reason);

function columns(scale) {
  return [
    ["Mac", (one) => html`<${ObjectLink} kind="Node" name=${one.node} />`],
    ["Fits", (one) => html`<${Badge} tone=${one.fits ? "good" : "bad"}>${one.fits ? `score ${one.score.toFixed(1)}` : one.refusal.reason}<//>`],
    ["Need", (one) => amount(one, "need"), "number"],
    ["Has", (one) => amount(one, "have"), "number"],
    ["Memory", (one) => html`<${Proof} one=${one} scale=${scale} />`, "wide"],
    ["Reason", (one) => (one.fits ? scores(one) : one.refusal.message), "wide"],
  ];
}

function amount(one, side) {
  if (one.fits) return bytes(side === "need" ? one.memory?.totalBytes : Math.max(0, one.roomBytes));
  const value = one.refusal[side];
  if (!one.refusal.need && !one.refusal.have) return "-";
  return isBytes(one) ? bytes(Math.max(0, value)) : String(value);
}

function scores(one) {
  return one.parts.map((part) => `${part.name} ${Math.round(part.score)}×${part.weight}`).join(", ");
}

/** What a replica needs, drawn against the room that a Mac has. */
function Proof({ one, scale }) {
  const room = Math.max(0, one.roomBytes);
  if (!one.memory) return html`<span class="quiet">${bytes(room)} free</span>`;
  const label = `needs ${bytes(one.memory.totalBytes)} (${proofText(one.memory)}), has ${bytes(room)}`;
  return html`<${StackedBar} segments=${partsOf(one.memory)} room=${room} scale=${scale} label=${label} />`;
}

/** The address of the editor with a remedy filled in. */
function tryPath(name, patch) {
  const query = new URLSearchParams({ kind: "ModelDeployment", name });
  if (patch.kvCache) query.set("kvBits", patch.kvCache.bits);
  if (patch.concurrency) query.set("concurrency", patch.concurrency);
  if (patch.contextLength) query.set("contextLength", patch.contextLength);
  return `/try?${query}`;
}

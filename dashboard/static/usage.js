/** Usage of nodes or models now, as `fleetctl top` shows it: two samples of every agent, engine and gateway. */

import { html, useState } from "./vendor/htm-preact.js";
import { bytes, short, span } from "./format.js";
import { getJson } from "./fleet_store.js";
import { Command, ObjectLink, Table, useRead } from "./parts.js";

const EVERY_MS = 5_000;
const COLUMNS = {
  nodes: [
    ["Node", (one) => html`<${ObjectLink} kind="Node" name=${one.name} />`],
    ["Memory used", (one) => of(one, "usedBytes", bytes, "totalBytes"), "number"],
    ["Models", (one) => of(one, "modelsBytes", bytes, "allocatableBytes"), "number"],
    ["Engines", (one) => of(one, "engines", short), "number"],
  ],
  models: [
    ["Model", (one) => html`<${ObjectLink} kind="ModelDeployment" name=${one.name} />`],
    ["Ready", (one) => `${one.ready}/${one.wanted}`, "number"],
    ["Memory", (one) => of(one, "memoryBytes", bytes), "number"],
    ["Requests/s", (one) => of(one, "requestsPerSecond", short), "number"],
    ["First token", (one) => of(one, "firstTokenS", (seconds) => span(1000 * seconds)), "number"],
  ],
};
const SHARED = [
  ["In flight", (one) => of(one, "inFlight", short), "number"],
  ["Queue", (one) => of(one, "queue", short), "number"],
  ["Tokens/s", (one) => of(one, "tokensPerSecond", short), "number"],
];

/** A part of a screen that costs nothing until it is opened. `what`: nodes or models. */
export function Usage({ what }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)} data-usage>
    <summary>Current usage</summary>
    ${isOpen && html`<${Sampled} what=${what} />`}
  </details>`;
}

function Sampled({ what }) {
  const [found, problem] = useRead(() => getJson(`/api/v1/top/${what}`), [], EVERY_MS);
  if (!found) return html`<p class=${problem ? "problem" : "quiet"}>${problem || "Sampling…"}</p>`;
  return html`<${Table} caption=${`Usage of ${what}`} columns=${[...COLUMNS[what], ...SHARED]} rows=${found.items} empty=${`There are no ${what}.`} />
    ${problem && html`<p class="problem">${problem}</p>`}
    ${found.reasons.map((reason) => html`<p class="quiet" key=${reason}>unknown values: ${reason}</p>`)}
    <${Command} text=${`fleetctl top ${what}`} />`;
}

/** A value, `?` if no process reported it, and with a plus if some processes did not. */
function of(row, name, format, total) {
  if (row[name] === null) return "?";
  const value = `${format(row[name])}${row.partial.includes(name) ? "+" : ""}`;
  return total && row[total] !== null ? `${value} of ${format(row[total])}` : value;
}

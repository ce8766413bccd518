/** What was promised of a model and what was measured, and the energy of a model or a Mac over 24 hours. */

import { html } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { number, short } from "./format.js";
import { Badge, Table, Text, useRead } from "./parts.js";

const EVERY_MS = 30_000;
const TITLES = {
  firstTokenP95Ms: ["Time to first token, p95", "ms"],
  tokensPerSecond: ["Tokens/s of a request", "tokens/s"],
  availabilityPercent: ["Availability", "%"],
};
const OBJECTIVES = [
  ["Objective", (one) => TITLES[one.objective]?.[0] ?? one.objective],
  ["Window", (one) => one.window],
  ["Target", (one) => withUnit(one.target, one), "number"],
  ["Measured", (one) => withUnit(one.measured, one), "number"],
  ["Burn rate", burnRate, "number"],
  ["Requests", (one) => number(one.requests), "number"],
];

/** The objectives of a deployment; nothing if it declares none. */
export function Objectives({ name }) {
  const [found] = useRead(() => getJson("/api/v1/objectives"), [], EVERY_MS);
  const rows = (found?.objectives ?? []).filter((one) => one.deployment === name);
  if (!rows.length) return null;
  return html`<section aria-labelledby="objectives" data-objectives>
    <h2 id="objectives">Objectives</h2>
    <${Table} caption="Objectives" columns=${OBJECTIVES} rows=${rows.map((one) => ({ ...one, name: `${one.objective} ${one.window}` }))} empty="" />
  </section>`;
}

/** Joules of a Mac or a model, for a request and for 1,000 tokens; the reason where the power is not known. */
export function Energy({ subject }) {
  const [found] = useRead(() => getJson(`/api/v1/energy?subject=${encodeURIComponent(subject)}&from=24h`), [], EVERY_MS);
  const energy = found?.energy[0];
  if (!energy) return html`<span class="quiet">-</span>`;
  if (energy.joules === null) return html`<span class="quiet"><${Text} text=${energy.reason} /></span>`;
  const parts = [
    `${short(energy.joules / 3600)} Wh in 24 h`,
    energy.joulesPerRequest !== null && `${short(energy.joulesPerRequest)} J per request`,
    energy.joulesPer1000Tokens !== null && `${short(energy.joulesPer1000Tokens)} J per 1,000 tokens`,
  ];
  return html`<span data-energy>${parts.filter(Boolean).join(", ")}${energy.reason && html` <span class="quiet">${energy.reason}</span>`}</span>`;
}

function withUnit(value, { objective }) {
  return value === null ? html`<span class="quiet">too few requests</span>` : `${short(value)} ${TITLES[objective]?.[1] ?? ""}`;
}

/** A burn rate of 1 uses exactly the error budget. */
function burnRate({ burnRate: value }) {
  if (value === null) return "-";
  return html`<${Badge} tone=${value > 1 ? "bad" : "good"}>${short(value)}<//>`;
}

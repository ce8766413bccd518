/** Settings: API keys of people and programs, and what the fleet runs. */

import { html } from "../vendor/htm-preact.js";
import { count, duration, short } from "../format.js";
import { Badge, Command, Table, Tabs } from "../parts.js";
import { Keys } from "./keys.js";

const TABS = [
  ["", "Keys and people", "user", Keys],
  ["fleet", "Versions and processes", "viewer", Processes],
];

export function Settings(props) {
  return html`<h1>Settings</h1><${Tabs} path="/settings" tabs=${TABS} ...${props} />`;
}

const COLUMNS = [
  ["Process", (one) => html`<code>${one.name}</code>`],
  ["State", (one) => html`<${Badge} tone=${one.problem ? "bad" : "good"}>${one.problem ? "does not answer" : one.word}<//> ${one.problem}`],
  ["Address", (one) => one.url],
  ["Release", (one) => one.version ?? "-"],
  ["Log", (one) => html`<a href=${`/activity?tab=logs&of=${one.name}`} aria-label=${`Log of ${one.name}`}>log</a>`],
];

/** The processes that serve the fleet, and the releases that most Macs have. */
function Processes({ store }) {
  const { summary } = store;
  if (!summary) return html`<p class="quiet">Loading…</p>`;
  const now = store.row("traffic", "fleet");
  const silent = summary.gatewaysSilent ?? {};
  const rows = [
    ...store.rows("gateways").map((one) => ({ ...one, name: `gateway/${one.name}`, word: "serves", problem: silent[one.name] ?? "" })),
    ...store.rows("reconcilers").map((one) => ({ ...one, name: `reconciler/${one.name}`, word: one.identity === summary.leader ? "leads" : "stands by" })),
    ...store.rows("dashboards").map((one) => ({ ...one, name: `dashboard/${one.name}`, word: "records" })),
  ];
  return html`
    <h2>Processes</h2>
    <${Table} caption="Processes" columns=${COLUMNS} rows=${rows} empty="No process is registered." />
    ${now && html`<p class="quiet">This dashboard has run for ${duration((Date.now() - Date.parse(now.startedAt)) / 1000)}. Within 24 h: ${short(now.requests24h)} requests, ${short(now.promptTokens24h)} tokens in, ${short(now.outputTokens24h)} out.</p>`}
    <h2>Releases</h2>
    <p>Most of the ${count(summary.macs.total, "Mac")} have agent ${summary.versions.agentVersion ?? "-"}, mlx ${summary.versions.mlxVersion ?? "-"}, ${summary.versions.osVersion ?? "-"}. Others are marked on their pages.</p>
    <${Command} text="fleetctl version" />
  `;
}

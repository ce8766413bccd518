/** Settings: API keys with their rights, limits and use, and what the fleet runs. */

import { html } from "../vendor/htm-preact.js";
import { Rights } from "../account.js";
import { age, count, number, short } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Badge, Command, logPath, Table, Tabs, useRead } from "../parts.js";

const TABS = [
  ["", "Keys and people", "user", Keys],
  ["fleet", "Versions and processes", "viewer", Processes],
];

export const Settings = (props) => html`<h1>Settings</h1><${Tabs} path="/settings" tabs=${TABS} ...${props} />`;

const PROCESSES = [
  ["Process", (one) => html`<code>${one.name}</code>`],
  ["State", (one) => html`<${Badge} tone=${one.problem ? "bad" : "good"}>${one.problem ? "does not answer" : one.word}<//> ${one.problem}`],
  ["Address", "url"], ["Release", "version"],
  ["Log", (one) => html`<a href=${logPath(one.name)} aria-label=${`Log of ${one.name}`}>log</a>`],
];

function Processes({ store }) {
  const { summary } = store;
  if (!summary) return html`<p class="quiet">Loading…</p>`;
  const now = store.row("traffic", "fleet");
  const silent = summary.gatewaysSilent;
  const rows = [
    ...store.rows("gateways").map((one) => ({ ...one, name: `gateway/${one.name}`, word: "serves", problem: silent[one.name] ?? "" })),
    ...store.rows("reconcilers").map((one) => ({ ...one, name: `reconciler/${one.name}`, word: one.identity === summary.leader ? "leads" : "stands by" })),
    ...store.rows("dashboards").map((one) => ({ ...one, name: `dashboard/${one.name}`, word: "records" })),
  ];
  return html`
    <h2>Processes</h2>
    <${Table} caption="Processes" columns=${PROCESSES} rows=${rows} empty="No process is registered." />
    ${now && html`<p class="quiet">This dashboard has run for ${age(now.startedAt)}. Within 24 h: ${short(now.requests24h)} requests, ${short(now.promptTokens24h)} tokens in, ${short(now.outputTokens24h)} out.</p>`}
    <h2>Releases</h2>
    <p>Most of the ${count(summary.macs.total, "Mac")} have agent ${summary.versions.agentVersion ?? "-"}, mlx ${summary.versions.mlxVersion ?? "-"}, ${summary.versions.osVersion ?? "-"}. Others are marked on their pages.</p>
    <${Command} text="fleetctl version" />
  `;
}

/** The keys; without the role admin, one's own alone. */
function Keys({ store }) {
  const [found, problem] = useRead(() => getJson("/api/v1/keys"));
  const sum = (field) => (key) => number(key.use.reduce((total, one) => total + one[field], 0));
  const columns = [
    ["Key", "name", "names"],
    ["Role", (key) => html`<${Badge} tone="idle">${key.role}<//>`],
    ["Age", (key) => age(key.created)], ["Expires", (key) => key.expires?.slice(0, 10) ?? "never"],
    ["Models", (key) => (key.models.length ? key.models : "all"), "names"], ["Limits", limits],
    ["Requests, 24 h", sum("requests"), "number"], ["Tokens in", sum("promptTokens"), "number"], ["Tokens out", sum("outputTokens"), "number"],
  ];
  const use = (found?.keys ?? []).flatMap((key) => key.use.map((one) => ({ ...one, key: key.name, name: `${key.name} ${one.model}` })));
  return html`
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${found?.isOwnOnly && html`<p class="quiet">Your role shows your own key. The role admin shows all.</p>`}
    ${found && html`<${Table} caption="API keys" columns=${columns} rows=${found.keys} empty="There is no API key." />
      <h2>Usage by model, 24 h</h2>
      <${Table} caption="Usage by key and model" columns=${USE} rows=${use} empty="No key was used, or this dashboard keeps no history." />`}
    <${Rights} store=${store} />
    <h2>Create, rotate, revoke</h2>
    <p class="quiet">The dashboard cannot write secrets. fleetctl prints a new key once:</p>
    <${Command} text="fleetctl create apikey NAME --role user" />
    <${Command} text="fleetctl rotate apikey NAME" />
    <${Command} text="fleetctl delete apikey NAME" />
  `;
}

const USE = [
  ["Key", "key", "names"], ["Model", "model", "names"],
  ["Requests", "requests", number], ["Tokens in", "promptTokens", number], ["Tokens out", "outputTokens", number],
];

function limits(key) {
  const parts = [
    key.requestsPerMinute && `${number(key.requestsPerMinute)} requests/min`,
    key.tokensPerMinute && `${number(key.tokensPerMinute)} tokens/min`,
    key.concurrency && `${key.concurrency} concurrent`,
  ];
  return parts.filter(Boolean).join(", ") || "-";
}

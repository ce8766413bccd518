/** API keys with their rights, limits and the use of 24 hours; without the role admin, one's own alone. */

import { html } from "../vendor/htm-preact.js";
import { Rights } from "../account.js";
import { age, number } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Badge, Command, Names, Table, useRead } from "../parts.js";

export function Keys({ store }) {
  const [found, problem] = useRead(() => getJson("/api/v1/keys"));
  const sum = (key, field) => number(key.use.reduce((total, one) => total + one[field], 0));
  const columns = [
    ["Key", (key) => html`<${Names} names=${[key.name]} />`],
    ["Role", (key) => html`<${Badge} tone="idle">${key.role}<//>`],
    ["Age", (key) => age(key.created)],
    ["Expires", (key) => key.expires?.slice(0, 10) ?? "never"],
    ["Models", (key) => html`<${Names} names=${key.models} empty="all" />`],
    ["Limits", limits],
    ["Requests, 24 h", (key) => sum(key, "requests"), "number"],
    ["Tokens in", (key) => sum(key, "promptTokens"), "number"],
    ["Tokens out", (key) => sum(key, "outputTokens"), "number"],
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
  ["Key", (one) => html`<${Names} names=${[one.key]} />`],
  ["Model", (one) => html`<${Names} names=${[one.model]} />`],
  ["Requests", (one) => number(one.requests), "number"],
  ["Tokens in", (one) => number(one.promptTokens), "number"],
  ["Tokens out", (one) => number(one.outputTokens), "number"],
];

function limits(key) {
  const parts = [
    key.requestsPerMinute && `${number(key.requestsPerMinute)} requests/min`,
    key.tokensPerMinute && `${number(key.tokensPerMinute)} tokens/min`,
    key.concurrency && `${key.concurrency} concurrent`,
  ];
  return parts.filter(Boolean).join(", ") || "-";
}

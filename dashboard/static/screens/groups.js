/** Shard groups, and one group: its Macs by rank, the cables between them, the split of models, checks and epochs. */

import { html } from "../vendor/htm-preact.js";
import { age, bytes } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Badge, Command, Details, MacState, ObjectLink, Table, Text, useRead } from "../parts.js";
import { ObjectPage } from "./object.js";

const READ_MS = 5_000;
const KINDS = ["weights", "kv", "prefill", "prefix", "adapter", "draft", "process"];

const GROUPS = [
  ["Group", "name", "ShardGroup"],
  ["Members", (one) => html`<${Badge} tone=${one.readyMembers >= one.members ? "good" : "warning"}>${one.readyMembers} of ${one.members} ready<//>`],
  ["Backend", "backend"], ["Split", "parallelism"],
  ["Cables", (one) => (one.lastCheck ? `${one.lastCheck}${one.gbPerSecond ? `, ${one.gbPerSecond} GB/s` : ""}` : "not checked")],
  ["Replicas", "replicas", "Replica"], ["Reason", "reason", Text],
];

export function Groups({ store }) {
  return html`<${Table} caption="Shard groups" columns=${GROUPS} rows=${store.rows("groups")} empty="There is no ShardGroup: Macs that are cabled into one larger machine." />
    <${Command} text="fleetctl get shardgroups" />`;
}

export function Group({ store, name, row: group }) {
  const [found, problem] = useRead(() => getJson(`/api/v1/groups/${encodeURIComponent(name)}`), [name], READ_MS);
  const members = found?.members.length ? found.members : group.listed;
  return html`<${ObjectPage} store=${store} kind="ShardGroup" name=${name}
    trail=${html`<a href="/macs?tab=groups">Groups</a>`} commands=${[`fleetctl fabric bench ${name}`]}>
    <p><${Badge} tone=${group.readyMembers >= group.members ? "good" : "warning"}>${group.readyMembers} of ${group.members} members ready<//> ${group.size} wanted, ${group.backend}, ${group.parallelism}</p>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    <h2>Members</h2>
    <ol class="ranks" start="0">
      ${members.map((mac, rank) => html`<li key=${mac} class="card"><span class="quiet">rank ${rank}</span> <strong><${ObjectLink} kind="Node" name=${mac} /></strong> ${store.row("macs", mac) && html`<${MacState} mac=${store.row("macs", mac)} />`}</li>`)}
    </ol>
    ${found && html`
      <${Links} members=${members} links=${found.links} least=${found.leastGbPerSecond} checks=${found.checks} />
      ${found.replicas.map((one) => html`<${Split} key=${one.name} replica=${one} />`)}
      <${Epochs} epochs=${found.epochs} />`}<//>`;
}

/** The cables from each Mac to each other, and what the last checks measured over all of them. */
function Links({ members, links, least, checks }) {
  const between = (a, b) => links.find((one) => (one.from === a && one.to === b) || (one.from === b && one.to === a));
  const last = checks[0];
  const columns = [
    ["From", "name", "Node"],
    ...members.map((to) => [to, (row) => (row.name === to ? "" : html`<${Link} link=${between(row.name, to)} />`)]),
  ];
  return html`<section aria-labelledby="links">
    <h2 id="links">Links</h2>
    <${Table} caption="Cables between the Macs of the group" columns=${columns} rows=${members.map((name) => ({ name }))} empty="No member is known." />
    <p class="quiet">${last
      ? html`Last check ${age(last.at)} ago: <${Badge} tone=${{ Healthy: "good", Unhealthy: "bad" }[last.outcome] ?? "idle"}>${last.outcome}<//> ${last.gbPerSecond === null ? "" : `${last.gbPerSecond.toFixed(2)} GB/s at the slowest rank (RDMA is faulty below ${least} GB/s)`}${last.usualGbPerSecond ? `; usually ${last.usualGbPerSecond.toFixed(2)} GB/s` : ""}${last.message && `; ${last.message}`}`
      : `No check yet: spec.fabric schedules them. RDMA is faulty below ${least} GB/s.`}</p>
    ${checks.length > 1 && html`<${Details} summary=${`${checks.length} checks`}><${Table} caption="Checks of the cables" columns=${CHECKS} rows=${checks} empty="" /><//>`}
  </section>`;
}

const speed = (gbPerSecond) => gbPerSecond?.toFixed(2) ?? "-";
const CHECKS = [
  ["When", "at", "ago"], ["Outcome", "outcome"],
  ["GB/s", "gbPerSecond", speed], ["Usual", "usualGbPerSecond", speed], ["Message", "message", Text],
];

function Link({ link }) {
  if (!link) return html`<span class="quiet">not reported</span>`;
  if (link.fault) return html`<${Badge} tone="bad">${link.fault}<//>`;
  if (!link.cables.length) return html`<span class="quiet">no cable</span>`;
  return html`<${Badge} tone="good">${link.cables.map((one) => `${one.device || "cable"}${one.gbitPerSecond ? ` ${one.gbitPerSecond} Gbit/s` : ""}`).join(", ")}<//>`;
}

/** One model over the Macs, each as wide as its part of the bytes. */
function Split({ replica }) {
  const all = replica.ranks.reduce((sum, one) => sum + one.totalBytes, 0) || 1;
  return html`<section aria-label=${`Split of ${replica.name}`}>
    <h2><${ObjectLink} kind="Replica" name=${replica.name} /> <span class="quiet">epoch ${replica.epoch}, ${replica.parallelism}, ${bytes(all)} in all</span></h2>
    <div class="stack split" role="img" aria-label=${replica.ranks.map((one, rank) => `rank ${rank} on ${one.node}: ${bytes(one.totalBytes)}${one.layers ? `, ${one.layers} layers` : ""}`).join("; ")}>
      ${replica.ranks.map((one, rank) => html`<span key=${rank} class=${`part ${KINDS[rank % KINDS.length]}`} style=${{ width: `${(100 * one.totalBytes) / all}%` }}></span>`)}
    </div>
    <ul class="legend">${replica.ranks.map((one, rank) => html`<li key=${rank}><span class=${`swatch ${KINDS[rank % KINDS.length]}`} aria-hidden="true"></span>rank ${rank}: ${one.node}, ${bytes(one.totalBytes)} (${bytes(one.weightsBytes)} of weights, ${bytes(one.kvBytes)} KV)${one.layers ? `, ${one.layers} layers` : ""}</li>`)}</ul>
  </section>`;
}

const EPOCHS = [
  ["Epoch", (one) => html`<strong>${one.epoch}</strong> ${one.endedAt === null && html`<${Badge} tone="good">now<//>`}`],
  ["Replica", "replica", "Replica"], ["Started", "formedAt", "ago"],
  ["Duration", (one) => (one.endedAt === null ? "running" : age(one.formedAt, Date.parse(one.endedAt)))],
  ["Macs", "macs", "Node"],
  ["End reason", (one) => [one.reason, one.message].filter(Boolean).join(": ") || (one.endedAt === null ? "" : "replaced"), "wide"],
];

function Epochs({ epochs }) {
  return html`<section aria-labelledby="epochs">
    <h2 id="epochs">Epochs <span class="quiet">of the last 24 hours</span></h2>
    ${epochs === null ? html`<p class="quiet">This dashboard keeps no history: it was started without --state-dir.</p>` : html`<${Table} caption="Epochs" columns=${EPOCHS} rows=${epochs} empty="No replica was formed on this group." />`}
  </section>`;
}

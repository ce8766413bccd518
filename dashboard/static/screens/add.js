/** How another Mac joins, and those that are there. */

import { html } from "../vendor/htm-preact.js";
import { age, bytes } from "../format.js";
import { Command, MacState, Names, ObjectLink, Table } from "../parts.js";

const COLUMNS = [
  ["Mac", (mac) => html`<${ObjectLink} kind="Node" name=${mac.name} />`],
  ["State", (mac) => html`<${MacState} mac=${mac} />`],
  ["Chip", (mac) => mac.chip ?? "its agent has not reported yet"],
  ["Memory", (mac) => bytes(mac.memoryBytes), "number"],
  ["Release", (mac) => mac.agentVersion ?? "-"],
];

const WAITING = [
  ["Mac", (one) => html`<${Names} names=${[one.node]} />`],
  ["Chip", (one) => one.chip || "-"],
  ["Memory", (one) => (one.memoryBytes ? bytes(one.memoryBytes) : "-"), "number"],
  ["From", (one) => one.source],
  ["Age", (one) => age(one.created)],
  ["Approve", (one) => (one.isApproved ? "approved" : html`<${Command} text=${`fleetctl approve ${one.node}`} />`), "wide"],
];

export function AddMac({ store }) {
  return html`
    <h2>Add a Mac</h2>
    <ol class="guide">
      <li>On this machine, print a token (it works once, for an hour):<${Command} text="fleetctl token create" /></li>
      <li>On the new Mac, install mlx-fleet and join with the command that was printed:
        <${Command} text="sudo fleetctl join --service TOKEN HOST:4002" />
      </li>
      <li>It appears below as soon as its agent has reported:<${Command} text="fleetctl get nodes -w" /></li>
    </ol>
    <p class="quiet">A fleet that runs on this machine alone accepts other Macs after <code>fleetctl up --join ADDRESS</code>.
      One that ran <code>fleetctl join HOST:4002</code> without a token waits for <code>fleetctl approve NAME</code>.</p>
    <h3>Waiting for approval</h3>
    <${Table} caption="Waiting for approval" columns=${WAITING} rows=${store.rows("joinRequests")} empty="No machine asks to join without a token." />
    <h3>Macs of this fleet</h3>
    <${Table} caption="Macs of this fleet" columns=${COLUMNS} rows=${store.rows("macs")} empty="No Mac has joined yet." />
  `;
}

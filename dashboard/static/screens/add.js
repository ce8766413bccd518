/** How another Mac joins. */

import { html } from "../vendor/htm-preact.js";
import { Command } from "../parts.js";

export function AddMac() {
  return html`
    <h1>Add a Mac</h1>
    <ol>
      <li>On this machine, print a token (it works once, for an hour):<${Command} text="fleetctl token create" /></li>
      <li>On the new Mac, install mlx-fleet and join with the command that was printed:
        <${Command} text="sudo fleetctl join --service TOKEN HOST:4002" />
      </li>
      <li>It appears here as soon as its agent has reported:<${Command} text="fleetctl get nodes -w" /></li>
    </ol>
    <p class="quiet">A fleet that runs on this machine alone accepts other Macs after <code>fleetctl up --join ADDRESS</code>.</p>
  `;
}

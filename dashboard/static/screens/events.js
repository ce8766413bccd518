/** All events of the last hour. */

import { html, useState } from "../vendor/htm-preact.js";
import { Command, Events, Filter, matching } from "../parts.js";

export function EventList({ store, query }) {
  const [text, setText] = useState(query.get("filter") ?? "");
  const [onlyWarnings, setOnlyWarnings] = useState(false);
  const shown = matching(store.rows("events"), text).filter((one) => !onlyWarnings || one.type === "Warning");
  return html`
    <h1>Events</h1>
    <${Filter} value=${text} onInput=${setText} label="Filter events" />
    <label class="check">
      <input type="checkbox" checked=${onlyWarnings} onChange=${(event) => setOnlyWarnings(event.target.checked)} />
      Warnings only
    </label>
    <${Events} events=${shown} empty=${text || onlyWarnings ? "No event matches." : undefined} />
    <${Command} text="fleetctl events -w" />
  `;
}

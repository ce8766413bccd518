/** What happened and what changed: events, changes, Git sources and logs. */

import { html, useState } from "../vendor/htm-preact.js";
import { Command, Events, Filter, lazy, matching, Tabs } from "../parts.js";

const TABS = [
  ["", "Events", "viewer", EventList],
  ["changes", "Changes", "viewer", lazy(() => import("./changes.js"), "Changes")],
  ["git", "Git", "viewer", lazy(() => import("./git.js"), "Git")],
  ["logs", "Logs", "operator", lazy(() => import("./logs.js"), "Logs")],
];

export function Activity(props) {
  return html`<h1>Activity</h1><${Tabs} path="/activity" tabs=${TABS} ...${props} />`;
}

/** All events of the last hour. */
function EventList({ store, query }) {
  const [text, setText] = useState(query.get("filter") ?? "");
  const [onlyWarnings, setOnlyWarnings] = useState(false);
  const shown = matching(store.rows("events"), text).filter((one) => !onlyWarnings || one.type === "Warning");
  return html`
    <p><${Filter} value=${text} onInput=${setText} label="Filter events" />
      <label class="check"><input type="checkbox" checked=${onlyWarnings} onChange=${(event) => setOnlyWarnings(event.target.checked)} /> Warnings only</label></p>
    <${Events} events=${shown} empty=${text || onlyWarnings ? "No event matches." : undefined} />
    <${Command} text="fleetctl events -w" />
  `;
}

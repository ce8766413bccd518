/** What happened and what changed: events, changes, Git sources and logs. */

import { html, useState } from "../vendor/htm-preact.js";
import { age } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Command, Events, Filter, lazy, matching, ObjectLink, Tabs, useRead } from "../parts.js";

const TABS = [
  ["", "Events", "viewer", EventList],
  ["changes", "Changes", "viewer", Changes],
  ["git", "Git", "viewer", lazy(() => import("./git.js"), "Git")],
  ["logs", "Logs", "operator", lazy(() => import("./logs.js"), "Logs")],
];

export const Activity = (props) => html`<h1>Activity</h1><${Tabs} path="/activity" tabs=${TABS} ...${props} />`;

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

const MOST = 200;

function Changes({ store, query: address }) {
  const about = ["kind", "object"].map((key) => [key, address.get(key)]).filter(([, value]) => value);
  const [text, setText] = useState("");
  const newest = store.rows("changes").sort((a, b) => b.revision - a.revision);
  // The changes of one object, or before a moment: the server chooses them, again with each new change.
  const query = new URLSearchParams([...about, ...(store.at ? [["to", store.at]] : [])]).toString();
  const [chosen, problem] = useRead(async () => query && (await getJson(`/api/v1/changes?limit=${MOST}&${query}`)).changes, [query, newest[0]?.name]);
  const changes = query ? chosen || null : newest;
  const shown = matching(changes ?? [], text);
  return html`
    ${about.length > 0
      ? html`<p>Only ${about.map(([, value]) => value).join(" ")}. <a href="/activity?tab=changes">All changes</a></p>`
      : html`<p class="quiet">Writes by users, Git sources and this page in the last 30 days.</p>`}
    <${Filter} value=${text} onInput=${setText} label="Filter changes" />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${changes && !shown.length && html`<p class="quiet">${text ? "No change matches." : "Nothing was changed yet."}</p>`}
    <ol class="timeline">${shown.map((one) => html`<li key=${one.id}>
      <p><strong>${one.user}</strong> ${one.command || one.manager} <time class="quiet" datetime=${one.time} title=${one.time}>${age(one.time)} ago</time></p>
      ${one.reason && html`<p>“${one.reason}”</p>`}
      <ul>${one.objects.map((object) => html`<li key=${object.kind + object.name}>${object.verb} <${ObjectLink} kind=${object.kind} name=${object.name} />
        ${object.fields.map((field) => html`<code class="field" key=${field.path}>${field.path}: <del>${field.old ?? "none"}</del> <ins>${field.new ?? "none"}</ins></code>`)}
        ${object.kind === "ModelDeployment" && object.verb === "update" && object.fields.length > 0 && store.may("operator") && html`${" "}<a href=${`/models/${encodeURIComponent(object.name)}?do=undo&before=${encodeURIComponent(one.id)}`}>put back</a>`}
        ${object.moreFields > 0 && html`<span class="quiet"> and ${object.moreFields} more</span>`}
      </li>`)}</ul>
    </li>`)}</ol>
    <${Command} text="fleetctl changes" />
  `;
}

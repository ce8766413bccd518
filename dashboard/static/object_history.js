/** The recorded changes of an object within 24 hours, and how it differs between any two of them. */

import { html, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { clock } from "./format.js";
import { Diff, Select, Table, useRead } from "./parts.js";

const MOST_FIELDS = 5;
const COLUMNS = [
  ["When", (one) => html`<time datetime=${one.at} title=${one.at}>${clock(one.at)}</time>`],
  ["Part", (one) => one.part],
  ["Changed", (one) => fieldsText(one), "wide"],
];

export function ObjectHistory({ kind, name }) {
  const path = `/api/v1/objects/${kind}/${encodeURIComponent(name)}`;
  const [found, problem] = useRead(() => getJson(`${path}/changes`), [path]);
  const changes = found?.changes;
  if (!changes) return html`<p class=${problem ? "problem" : "quiet"} role="status">${problem || "Loading…"}</p>`;
  const rows = changes.map((one) => ({ ...one, name: `${one.revision} ${one.part}` }));
  const choices = [["now", "now"], ...[...new Set(changes.map((one) => one.at))].map((at) => [at, clock(at)])];
  return html`<${Table} caption="Recorded changes, the newest first" columns=${COLUMNS} rows=${rows} empty="Nothing changed within 24 hours." />
    ${changes.length > 0 && html`<${Comparison} choices=${choices} first=${choices.at(-1)[0]} last="now"
      read=${(from, to) => getJson(`${path}/diff?${new URLSearchParams({ from, to })}`)} />`}`;
}

/** Two of several versions, and their difference. `choices`: [value, title]. */
export function Comparison({ choices, first, last, read }) {
  const [from, setFrom] = useState(first);
  const [to, setTo] = useState(last);
  const [answer, problem] = useRead(() => read(from, to), [from, to, first, last]);
  const diff = answer?.diff;
  return html`<div class="row toolbar"><${Select} label="Difference from" value=${from} choices=${choices} onChange=${setFrom} /><${Select} label="to" value=${to} choices=${choices} onChange=${setTo} /></div>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    ${diff === "" ? html`<p class="quiet">They are the same.</p>` : diff && html`<div data-difference><${Diff} text=${diff} /></div>`}`;
}

function fieldsText(one) {
  if (one.isDeletion) return "deleted";
  if (one.isFirst) return "the first that is recorded";
  const shown = one.fields.slice(0, MOST_FIELDS).map((field) => html`<code class="field" key=${field.path}>${field.path}: <del>${text(field.old)}</del> <ins>${text(field.new)}</ins></code>`);
  const more = one.fields.length - shown.length + one.moreFields;
  return html`${shown}${more > 0 && html`<span class="quiet">and ${more} more</span>`}`;
}

const text = (value) => (value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));

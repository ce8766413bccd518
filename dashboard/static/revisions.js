/** The revisions of a model, each with its difference from the one before. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { age } from "./format.js";
import { Comparison } from "./object_history.js";
import { Badge, Diff, Table } from "./parts.js";

const COLUMNS = [
  ["Revision", (one) => html`<strong>${one.revision}</strong> ${one.isCurrent && html`<${Badge} tone="good">now<//>`}`],
  ["Made", (one) => (one.created ? html`<time datetime=${one.created} title=${one.created}>${age(one.created)} ago</time>` : "-")],
  ["Cause", (one) => one.cause || "-"],
  ["Changed", (one) => (one.diff ? html`<details><summary>difference</summary><${Diff} text=${one.diff} /></details>` : "the first one"), "wide"],
];

/** `current` is the revision that the fleet runs: when it moves, the list is read again. */
export function Revisions({ name, current }) {
  const [rows, setRows] = useState(null);
  const [progress, setProgress] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => {
    getJson(`/api/v1/revisions/${encodeURIComponent(name)}`).then(
      (found) => (setRows(found.revisions), setProgress(found.progress), setProblem("")),
      (error) => setProblem(error.message),
    );
  }, [name, current]);
  return html`<section aria-labelledby="revisions"><h2 id="revisions">Revisions</h2>
    ${problem && html`<p class="problem" role="status">${problem}</p>`}
    ${progress && html`<p>${progress}</p>`}
    ${rows && html`<${Table} caption="Revisions, the newest first" columns=${COLUMNS} rows=${rows} empty="No revision is recorded yet." />`}
    ${rows?.length > 1 && html`<${Comparison} key=${rows[0].name} choices=${rows.map((one) => [one.name, `revision ${one.revision}`])} first=${rows.at(-1).name} last=${rows[0].name}
      read=${(from, to) => getJson(`/api/v1/revisions/${encodeURIComponent(name)}/diff?${new URLSearchParams({ from, to })}`)} />`}
  </section>`;
}

/** How the requests of a model are shared between its versions while replicas of more than one are there. */

import { html } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { span } from "./format.js";
import { Table, useRead } from "./parts.js";

const READ_MS = 5_000;
const MOST_NAMES = 8;
const MOST_REQUESTS = 200;

export function VersionTraffic({ name, servedNames, replicas }) {
  const read = () => Promise.all([
    getJson(`/api/v1/revisions/${encodeURIComponent(name)}`),
    ...servedNames.slice(0, MOST_NAMES).map((one) => getJson(`/api/v1/requests?${new URLSearchParams({ from: "10m", limit: MOST_REQUESTS, model: one })}`)),
  ]);
  const [found, problem] = useRead(read, [], READ_MS);
  if (!found) return problem ? html`<p class="quiet" role="status">${problem}</p>` : null;
  const [{ revisions }, ...answers] = found;
  const requests = answers.flatMap((one) => one.requests).filter((one) => one.deployment === name);
  const rows = versionsOf(replicas, requests).map((one) => ({ ...one, name: one.template, title: titleOf(one.template, revisions) }));
  const of = rows.reduce((sum, one) => sum + one.requests.length, 0);
  const columns = [
    ["Version", (one) => one.title],
    ["Replicas", (one) => `${one.ready} of ${one.replicas} ready`, "number"],
    ["Requests", (one) => (of ? `${one.requests.length} (${Math.round((100 * one.requests.length) / of)} %)` : "0"), "number"],
    ["Failed", (one) => one.requests.filter((request) => request.status === "error").length, "number"],
    ["First token", (one) => span(mean(one.requests.map((request) => request.firstTokenMs).filter((ms) => ms !== null))), "number"],
  ];
  return html`<section aria-labelledby="versions" data-versions><h2 id="versions">Traffic by version</h2>
    <${Table} caption="Traffic by version" columns=${columns} rows=${rows} empty="" />
    <p class="quiet">The last ${MOST_REQUESTS} requests for each name it is served as, within ten minutes, by replicas that are there.</p>
  </section>`;
}

/** A replica's name may have been that of another version: requests of before its creation are not its own. */
function versionsOf(replicas, requests) {
  const found = new Map();
  for (const one of replicas) {
    const version = found.get(one.template) ?? { template: one.template, replicas: 0, ready: 0, requests: [] };
    const since = one.created ? Date.parse(one.created) : 0;
    version.replicas += 1;
    version.ready += one.isReady ? 1 : 0;
    version.requests.push(...requests.filter((request) => request.replica === one.name && Date.parse(request.time) >= since));
    found.set(one.template, version);
  }
  return [...found.values()];
}

function titleOf(template, revisions) {
  const known = revisions.find((one) => one.template === template);
  return known ? `revision ${known.revision}${known.isCurrent ? ", the newest" : ""}` : template;
}

const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

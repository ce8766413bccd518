/** The engines that a request could get, with the parts of their scores: for the next request, and for one that ended. */

import { html, useState } from "./vendor/htm-preact.js";
import { ANSWER_MS, refusalText } from "./fleet_store.js";
import { clock } from "./format.js";
import { Badge, ObjectLink, Table } from "./parts.js";

const CHOICES = new Set(["endpoint chosen", "no endpoint is ready"]);

/** Candidates, best first. `chosen` is the name of the replica that got the request. */
export function CandidateTable({ rows, chosen = "", empty }) {
  const parts = [...new Set(rows.flatMap((one) => Object.keys(one.parts ?? one.scores ?? {})))];
  const columns = [
    ["Engine", (one) => html`${one.replica ?? one.name}${chosen && chosen === one.replica ? html`${" "}<${Badge} tone="good">chosen<//>` : ""}${one.ejected ? html`${" "}<${Badge} tone="warning">ejected<//>` : ""}${one.leased === false ? html`${" "}<${Badge} tone="idle">withdrawn: the last resort<//>` : ""}`],
    ...(rows.some((one) => one.worker) ? [["Mac", (one) => (one.worker ? html`<${ObjectLink} kind="Node" name=${one.worker} />` : "-")]] : []),
    ["Score", (one) => shown(one.score), "number"],
    ...parts.map((part) => [part, (one) => shown((one.parts ?? one.scores)?.[part]), "number"]),
    rows.some((one) => one.load !== undefined) ? ["Load", (one) => shown(one.load), "number"] : ["In flight", (one) => one.inFlight ?? one.running ?? "-", "number"],
  ];
  return html`<${Table} caption="Candidates" columns=${columns} rows=${rows.map((one, at) => ({ ...one, name: `${at}` }))} empty=${empty} />`;
}

const shown = (value) => (typeof value === "number" ? Number(value.toFixed(3)) : value ?? "-");

/** The choices of one request with their candidates, from the log of its gateway, read when they are asked for. */
export function RequestScores({ request }) {
  const [choices, setChoices] = useState(null);
  const [problem, setProblem] = useState("");
  const read = async () => {
    setProblem("");
    try {
      setChoices(await readChoices(request));
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<div data-scores>
    <p><button type="button" class="small" onClick=${read}>Show scores</button></p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${choices?.length === 0 && html`<p class="quiet" role="status">The log of this gateway has no scores of this request. A gateway that runs
      with <code>--log-level debug</code> writes the scores of each choice; the log keeps the last MiB.</p>`}
    ${choices?.map((one) => html`<section key=${one.time} aria-label="Choice">
      <p class="quiet">${clock(one.time)} ${one.message}${one.replica ? `: ${one.replica} on ${one.node}` : `: ${one.why ?? ""}`}${one.failed ? `; failed before: ${one.failed}` : ""}</p>
      <${CandidateTable} rows=${one.candidates ?? []} chosen=${one.replica} empty="No engine was known for this model." />
    </section>`)}
  </div>`;
}

async function readChoices(request) {
  const query = new URLSearchParams({ of: `gateway/${request.gateway}`, about: request.id, tail: "10000" });
  const answer = await fetch(`/api/v1/logs?${query}`, { credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS) });
  if (!answer.ok) throw new Error(await refusalText(answer));
  return (await answer.text()).split("\n").map(parsed).filter((line) => CHOICES.has(line?.message));
}

function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null; // a line in the form for people
  }
}

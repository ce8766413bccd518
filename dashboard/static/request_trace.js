/** One request: its wait, attempts, prefill and answer over time, and the engines that it could get, with their scores. */

import { html, useReducer } from "./vendor/htm-preact.js";
import { getText, parsed } from "./fleet_store.js";
import { clock, span } from "./format.js";
import { Badge, Command, logPath, ObjectLink, Table, useRead } from "./parts.js";

export function Waterfall({ store, request, onClose }) {
  const whole = Math.max(request.latencyMs, 1);
  const steps = stepsOf(request);
  return html`<section class="panel waterfall" aria-label=${`Request ${request.id}`} data-waterfall>
    <div class="section-head"><h2><code>${request.id}</code></h2><button type="button" class="small" onClick=${onClose}>Close</button></div>
    <p class="quiet">${request.model}${request.apiKey ? `, key ${request.apiKey}` : ""}, arrived ${clock(request.time)} at gateway ${request.gateway}${request.strategy ? `, chosen by ${request.strategy}` : ""}${request.resumptions ? `, resumed ${request.resumptions} times` : ""}</p>
    <ol class="steps">
      ${steps.map((one) => html`<li key=${one.name}>
        <span class="step-name">${one.name}${one.worker && html`${" "}<${ObjectLink} kind="Node" name=${one.worker} />`}</span>
        <span class="track"><span class=${`part ${one.kind}`} style=${{ marginLeft: `${(100 * one.from) / whole}%`, width: `${Math.max(0.5, (100 * one.ms) / whole)}%` }}></span></span>
        <span class="step-time">${span(one.ms)}</span>
        ${one.why && html`<span class="step-why"><${Badge} tone="bad">${one.outcome}<//> ${one.why}</span>`}
      </li>`)}
    </ol>
    <p>${span(request.latencyMs)} in all${request.firstTokenMs !== null ? `, first token after ${span(request.firstTokenMs)}` : ""}; ${request.tokens.prompt} tokens in (${request.tokens.cached} cached), ${request.tokens.output} out${rate(request)}</p>
    ${request.cacheMiss && html`<p>${request.cacheMiss}</p>`}
    ${store.may("operator")
      ? html`<${RequestScores} key=${request.id} request=${request} />`
      : html`<p class="quiet">The scores of the candidates are in the gateway's log, which needs the role operator.</p>`}
    <p><a href=${`${logPath(`gateway/${request.gateway}`)}${request.replica ? `&of=replica/${request.replica}` : ""}&grep=${encodeURIComponent(request.id)}`}>Logs of this request</a></p>
    <${Command} text=${`fleetctl routes --model ${request.model} --last 100`} />
  </section>`;
}

function rate(request) {
  const seconds = (request.latencyMs - (request.firstTokenMs ?? 0)) / 1000;
  return request.firstTokenMs !== null && request.tokens.output > 1 && seconds > 0 ? ` at ${(request.tokens.output / seconds).toFixed(1)} tokens/s` : "";
}

function stepsOf(request) {
  const steps = [];
  let at = 0;
  const add = (step) => {
    const ms = Math.max(0, Math.min(step.ms, request.latencyMs - at));
    steps.push({ ...step, from: at, ms });
    at += ms;
  };
  if (request.queueMs > 0) add({ name: "Queue", kind: "process", ms: request.queueMs });
  const [failed, last] = [request.attempts.slice(0, -1), request.attempts.at(-1)];
  failed.forEach((one, number) => add({ name: `Attempt ${number + 1}`, kind: "adapter", ms: one.ms, worker: one.worker, outcome: one.outcome, why: one.why ?? one.outcome }));
  const isFailed = last && last.outcome !== "ok" && request.status !== "ok";
  if (request.firstTokenMs !== null && request.firstTokenMs >= at) {
    add({ name: "Prefill", kind: "prefill", ms: request.firstTokenMs - at, worker: last?.worker });
    add({ name: "Decode", kind: "weights", ms: request.latencyMs - at });
  } else if (last) {
    add({ name: isFailed ? `Attempt ${request.attempts.length}` : "Engine", kind: isFailed ? "adapter" : "weights", ms: Math.max(last.ms, isFailed ? 0 : request.latencyMs - at), worker: last.worker, outcome: last.outcome, why: isFailed ? last.why ?? last.outcome : "" });
  }
  return steps;
}

/** How much of the prompt is read, while it is, and about how long the rest takes. */
export function Prefill({ request: { phase, promptTokens: all, prefilledTokens: done, seconds } }) {
  if (phase !== "prefill" || !all || done === null || done === undefined) return null;
  const percent = Math.round((100 * done) / all);
  const rest = done > 0 && done < all ? `, about ${span((1000 * seconds * (all - done)) / done)} left` : "";
  return html`<progress max="100" value=${percent} aria-label=${`${percent} % of the prompt read`}></progress> <span class="quiet">${percent} % of ${all} tokens read${rest}</span>`;
}

const CHOICES = new Set(["endpoint chosen", "no endpoint is ready"]);

/** Candidates, best first. `chosen` is the name of the replica that got the request. */
export function CandidateTable({ rows, chosen = "", empty }) {
  const parts = [...new Set(rows.flatMap((one) => Object.keys(one.parts ?? one.scores ?? {})))];
  const columns = [
    ["Engine", (one) => html`${one.replica ?? one.name}${chosen && chosen === one.replica ? html`${" "}<${Badge} tone="good">chosen<//>` : ""}${one.ejected ? html`${" "}<${Badge} tone="warning">ejected<//>` : ""}${one.leased === false ? html`${" "}<${Badge} tone="idle">withdrawn: the last resort<//>` : ""}`],
    ...(rows.some((one) => one.worker) ? [["Mac", "worker", "Node"]] : []),
    ["Score", "score", shown],
    ...parts.map((part) => [part, (one) => (one.parts ?? one.scores)?.[part], shown]),
    rows.some((one) => one.load !== undefined) ? ["Load", "load", shown] : ["In flight", (one) => one.inFlight ?? one.running, "number"],
  ];
  return html`<${Table} caption="Candidates" columns=${columns} rows=${rows.map((one, at) => ({ ...one, name: `${at}` }))} empty=${empty} />`;
}

const shown = (value) => (typeof value === "number" ? Number(value.toFixed(3)) : value ?? "-");

/** The choices of one request with their candidates, from the log of its gateway, read when they are asked for. */
function RequestScores({ request }) {
  const [asked, ask] = useReducer((count) => count + 1, 0);
  const [choices, problem] = useRead(async () => asked > 0 && readChoices(request), [asked]);
  return html`<div data-scores>
    <p><button type="button" class="small" onClick=${ask}>Show scores</button></p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${choices && !choices.length && html`<p class="quiet" role="status">The log of this gateway has no scores of this request. A gateway that runs
      with <code>--log-level debug</code> writes the scores of each choice; the log keeps the last MiB.</p>`}
    ${choices && choices.map((one) => html`<section key=${one.time} aria-label="Choice">
      <p class="quiet">${clock(one.time)} ${one.message}${one.replica ? `: ${one.replica} on ${one.node}` : `: ${one.why ?? ""}`}${one.failed ? `; failed before: ${one.failed}` : ""}</p>
      <${CandidateTable} rows=${one.candidates ?? []} chosen=${one.replica} empty="No engine was known for this model." />
    </section>`)}
  </div>`;
}

async function readChoices(request) {
  const query = new URLSearchParams({ of: `gateway/${request.gateway}`, about: request.id, tail: "10000" });
  return (await getText(`/api/v1/logs?${query}`)).split("\n").map(parsed).filter((line) => CHOICES.has(line?.message));
}

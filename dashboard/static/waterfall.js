/** One ended request over time: its wait, each attempt, the reading of the prompt, the answer. */

import { html } from "./vendor/htm-preact.js";
import { RequestScores } from "./candidates.js";
import { clock, span } from "./format.js";
import { Badge, Command, ObjectLink } from "./parts.js";

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
    <p class="row">
      <a href=${`/activity?tab=logs&of=gateway/${encodeURIComponent(request.gateway)}${request.replica ? `&of=replica/${encodeURIComponent(request.replica)}` : ""}&grep=${encodeURIComponent(request.id)}`}>Logs of this request</a>
    </p>
    <${Command} text=${`fleetctl routes --model ${request.model} --last 100`} />
  </section>`;
}

function rate(request) {
  const seconds = (request.latencyMs - (request.firstTokenMs ?? 0)) / 1000;
  return request.firstTokenMs !== null && request.tokens.output > 1 && seconds > 0 ? ` at ${(request.tokens.output / seconds).toFixed(1)} tokens/s` : "";
}

/** Return the steps in order, each with its begin and length in milliseconds. */
export function stepsOf(request) {
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

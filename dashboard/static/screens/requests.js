/** Requests at all gateways: those under way, the last that ended, and the figures of the last hour. */

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { clock } from "../format.js";
import { getJson, postJson } from "../fleet_store.js";
import { Badge, Command, Filter, matching, ObjectLink, Table } from "../parts.js";

const LIVE_MS = 1_000;
const SERIES_MS = 10_000;
const SERIES = [
  ["tokens_per_second", "Tokens"],
  ["rps", "Requests"],
  ["first_token", "First token"],
  ["latency", "Latency"],
  ["error_rate", "Errors"],
];

/** Rates and times of the last hour, as small charts. */
export function Traffic() {
  const [series] = usePolled(readSeries, SERIES_MS);
  return html`<section aria-labelledby="hour">
    <h2 id="hour">The last hour</h2>
    <ul class="cards charts">${SERIES.map(([metric, title], at) => html`<${Chart} key=${metric} series=${series?.[at] ?? { title, unit: "", points: [] }} />`)}</ul>
  </section>`;
}

export function Requests({ store }) {
  const [text, setText] = useState("");
  const [problem, setProblem] = useState("");
  const [live, liveProblem] = usePolled(readLive, LIVE_MS);
  if (!live) return html`<h1>Requests</h1><p class="loading">${liveProblem || "Loading the requests…"}</p>`;
  const { queue, ended, figures, under } = live;
  const running = under.requests.map((one) => ({ ...one, name: `${one.gateway}/${one.id}` }));
  const cancel = (one) =>
    postJson(`/api/v1/requests/${encodeURIComponent(one.gateway)}/${encodeURIComponent(one.id)}/cancel`).then(
      () => setProblem(""),
      (error) => setProblem(error.message),
    );
  const rows = ended.map((one, at) => ({ ...one, name: `${one.requestId} ${at}` }));
  return html`
    <h1>Requests</h1>
    ${liveProblem && html`<p class="problem" role="status">${liveProblem}</p>`}
    ${Object.entries({ ...under.gatewaysSilent, ...queue.gatewaysSilent }).map(
      ([id, why]) => html`<p key=${id} class="problem">gateway/${id} is silent, so its requests are missing: ${why}</p>`,
    )}
    <div class="cards">
      <${Figure} title="Under way" value=${queue.active} unit=${`${queue.queueDepth} waiting`} />
      <${Figure} title="Output, last minute" value=${short(figures.tokensPerSecond)} unit="tokens/s" />
      <${Figure} title="First token" value=${short(figures.avgFirstTokenMs)} unit="ms, mean of the last minute" />
      <${Figure} title="Requests" value=${figures.requests24h} unit=${`within 24 h, ${figures.errors24h} failed`} />
      <${Figure} title="Tokens" value=${figures.outputTokens24h} unit=${`out, ${figures.promptTokens24h} in, within 24 h`} />
    </div>
    <${Traffic} />
    <section aria-labelledby="live">
      <h2 id="live">Under way</h2>
      <${Table} caption="Requests under way" columns=${runningColumns(store.may("operator") ? cancel : null)} rows=${running} empty="No request is under way." />
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    </section>
    <section aria-labelledby="ended">
      <h2 id="ended">Ended</h2>
      <${Filter} value=${text} onInput=${setText} label="Filter requests" />
      <${Table} caption="Requests that ended, the newest first" columns=${ENDED} rows=${matching(rows, text)}
        empty=${text ? "No request matches." : "No request has ended yet."} />
    </section>
    <${Command} text="fleetctl routes --last 100" />
  `;
}

const PHASES = { queued: "idle", prefill: "warning", generating: "good" };

function runningColumns(cancel) {
  const columns = [
    ["Model", (one) => one.model],
    ["Key", (one) => one.apiKey ?? "-"],
    ["Mac", (one) => (one.worker ? html`<${ObjectLink} kind="Node" name=${one.worker} />` : "-")],
    ["Phase", (one) => html`<${Badge} tone=${PHASES[one.phase] ?? "idle"}>${one.phase}<//> <${Prefill} request=${one} />`],
    ["Tokens", (one) => one.tokens ?? "-", "number"],
    ["Tokens/s", (one) => (one.tokens && one.seconds ? (one.tokens / one.seconds).toFixed(1) : "-"), "number"],
    ["Age", (one) => `${one.seconds.toFixed(1)} s`, "number"],
    ["Request", (one) => html`<code>${one.id}</code>${one.resumptions ? ` resumed ${one.resumptions} times` : ""}`],
  ];
  if (cancel) columns.push(["", (one) => html`<button type="button" class="small" aria-label=${`Cancel ${one.id}`} onClick=${() => cancel(one)}>Cancel</button>`]);
  return columns;
}

/** How much of the prompt is read, while it is. */
function Prefill({ request }) {
  const { phase, promptTokens: all, prefilledTokens: done } = request;
  if (phase !== "prefill" || !all || done === null || done === undefined) return null;
  const percent = Math.round((100 * done) / all);
  return html`<progress max="100" value=${percent} aria-label=${`${percent} % of the prompt read`}></progress> <span class="quiet">${percent} % of ${all}</span>`;
}

const ENDED = [
  ["Ended", (one) => clock(one.timestamp)],
  ["Model", (one) => one.modelId],
  ["Mac", (one) => (one.workerId ? html`<${ObjectLink} kind="Node" name=${one.workerId} />` : "-")],
  ["Outcome", (one) => html`<${Badge} tone=${one.status === "success" ? "good" : "bad"}>${one.status}<//>`],
  ["Latency", (one) => `${Math.round(one.latencyMs)} ms`, "number"],
  ["Tokens", (one) => one.tokensGenerated, "number"],
  ["Request", (one) => one.requestId],
];

function Figure({ title, value, unit }) {
  return html`<div class="figure-card">
    <span class="title">${title}</span><strong>${value}</strong><span class="quiet">${unit}</span>
  </div>`;
}

/** A line over the last hour; gaps where nothing was measured. */
function Chart({ series }) {
  const { title, unit, points } = series;
  const known = points.map((one) => one.value).filter((value) => value !== null);
  const top = Math.max(...known, 0);
  const last = known.at(-1);
  const text = known.length ? `${short(last)} ${unit} now, at most ${short(top)}` : "nothing was measured";
  const path = linePath(points.map((one) => one.value), top || 1);
  return html`<li class="card">
    <h3>${title}</h3>
    <svg class="chart" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${`${title}: ${text}`}>
      <path d=${path} vector-effect="non-scaling-stroke" />
    </svg>
    <p class="quiet">${text}</p>
  </li>`;
}

/** Return an SVG path through the values, in a box of 100 x 30. */
export function linePath(values, top) {
  let isDrawing = false;
  return values
    .map((value, at) => {
      if (value === null) {
        isDrawing = false;
        return "";
      }
      const command = isDrawing ? "L" : "M";
      isDrawing = true;
      const x = values.length > 1 ? (100 * at) / (values.length - 1) : 0;
      const step = `${command}${x.toFixed(2)} ${(29 - (28 * value) / top).toFixed(2)}`;
      return command === "M" ? `${step}h0.2` : step; // a single value is a dot
    })
    .join("");
}

async function readLive() {
  const [queue, under, ended, figures] = await Promise.all([
    getJson("/queue"),
    getJson("/api/v1/in-flight"),
    getJson("/api/dashboard/requests?limit=100"),
    getJson("/metrics/snapshot"),
  ]);
  return { queue, under, ended, figures };
}

async function readSeries() {
  const read = async ([metric, title]) => ({
    title,
    ...(await getJson(`/api/dashboard/metrics/timeseries?metric=${metric}&duration=1h`)),
  });
  return Promise.all(SERIES.map(read));
}

/** Return the newest result of `read`, which is called again and again while the page is shown, and its problem. */
function usePolled(read, everyMs) {
  const [result, setResult] = useState([null, ""]);
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    const poll = async () => {
      if (!document.hidden) {
        try {
          const found = await read();
          if (!isOver) setResult([found, ""]);
        } catch (error) {
          if (!isOver) setResult(([before]) => [before, error.message]);
        }
      }
      if (!isOver) timer = setTimeout(poll, everyMs);
    };
    void poll();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, []);
  return result;
}

function short(value) {
  if (value === null || value === undefined) return "-";
  return value >= 100 ? Math.round(value) : Number(value.toFixed(1));
}

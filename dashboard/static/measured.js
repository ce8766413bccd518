/** What is measured of a Mac or a model: its charts, its objectives, its energy, and its usage as `fleetctl top` shows it. */

import { html, useState } from "./vendor/htm-preact.js";
import { Chart } from "./charts.js";
import { getJson } from "./fleet_store.js";
import { bytes, number, short, span } from "./format.js";
import { Badge, Command, Details, Segments, Table, Text, useRead } from "./parts.js";

const RANGES = ["1h", "6h", "24h"];
const READ_MS = 15_000;
const percent = (value) => `${Math.round(100 * value)} %`;
const rate = (value) => `${bytes(value)}/s`;
const plain = (unit) => (value) => `${value >= 10 ? Math.round(value) : Number(value.toFixed(1))}${unit}`;
const whole = plain("");
/** Distances between the marks of an axis: sizes have powers of two, counts no halves. */
const STEPS = new Map([
  ...[bytes, rate].map((format) => [format, Array.from({ length: 50 }, (_, power) => 2 ** power)]),
  [whole, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000]],
]);
/** Of each kind of subject: title, format, and the lines: metric, title and colour. A share has a fixed top. */
const TRAFFIC = [
  ["Tokens of ended requests", plain(" tok/s"), [["output_tokens_per_second", "out", "weights"], ["prompt_tokens_per_second", "in", "kv"]]],
  ["Requests", plain("/s"), [["requests_per_second", "Requests", "kv"]]],
  ["First token", span, [["first_token_p50", "p50", "weights"], ["first_token_p95", "p95", "prefill"]]],
  ["Request duration", span, [["latency_p50", "p50", "weights"], ["latency_p95", "p95", "prefill"]]],
  ["In flight", whole, [["active", "at engines", "weights"], ["waiting", "waiting", "prefill"]]],
  ["Errors", percent, [["error_ratio", "Errors", "adapter"]]],
];
const CHARTS = {
  fleet: TRAFFIC,
  model: [...TRAFFIC, ["Replicas", whole, [["desired", "wanted", "process"], ["ready", "ready", "weights"]]]],
  node: [
    ["Load", percent, [["gpu_ratio", "GPU", "weights"], ["cpu_ratio", "CPU", "kv"]]],
    ["Memory", bytes, [["memory_used_bytes", "used", "weights"], ["swap_used_bytes", "swap", "adapter"]]],
    ["Temperature", plain(" °C"), [["gpu_celsius", "GPU", "weights"], ["cpu_celsius", "CPU", "kv"]]],
    ["Power", plain(" W"), [["power_watts", "Power", "prefill"]]],
    ["Output of ended requests", plain(" tok/s"), [["output_tokens_per_second", "out", "weights"]]],
    ["Requests", plain("/s"), [["requests_per_second", "Requests", "kv"]]],
    ["Network", rate, [["network_received_bytes_per_second", "in", "weights"], ["network_sent_bytes_per_second", "out", "kv"]]],
    ["Disk", rate, [["disk_read_bytes_per_second", "read", "weights"], ["disk_written_bytes_per_second", "written", "kv"]]],
  ],
};
const MACMON = html`<a href="https://github.com/vladkens/macmon" rel="noreferrer" target="_blank">macmon</a> on the Mac measures temperature, power and the GPU.`;

/** The charts of a subject: fleet, node/NAME or model/NAME. */
export function SubjectCharts({ subject, at }) {
  const [range, setRange] = useState(RANGES[0]);
  const [kind] = subject.split("/");
  const charts = CHARTS[kind];
  const read = () => {
    const metric = charts.flatMap(([, , lines]) => lines.map(([name]) => name)).join(",");
    const from = at ? new Date(Date.parse(at) - Number.parseInt(range, 10) * 3_600_000).toISOString() : range;
    return getJson(`/api/v1/series?${new URLSearchParams({ subject, metric, from, to: at || "now" })}`);
  };
  const [found, problem] = useRead(read, [subject, range, at], READ_MS);
  const isMeasured = ([, , lines]) => lines.some(([metric]) => found.metrics[metric].mean.some((value) => value !== null));
  const measured = found ? charts.filter(isMeasured) : [];
  const missing = found ? charts.filter((chart) => !measured.includes(chart)).map(([title]) => title.toLowerCase()) : [];
  const count = Object.values(found?.metrics ?? {})[0]?.mean.length ?? 0;
  const begin = found ? Date.parse(found.from) / 1000 : 0;
  const times = Array.from({ length: count }, (_, step) => begin + step * found.stepSeconds);
  return html`<section aria-labelledby="figures">
    <div class="section-head"><h2 id="figures">Metrics</h2>
      <${Segments} label="Range" value=${range} choices=${RANGES} onChange=${setRange} />
    </div>
    ${problem && html`<p class="quiet">${problem}</p>`}
    <div class="charts">${measured.map(([title, format, lines]) => html`<${Chart} key=${`${title} ${range}`} title=${title} times=${times} format=${format}
      steps=${STEPS.get(format)} top=${title === "Load" ? 1 : undefined} group=${subject}
      lines=${lines.map(([metric, line, kind]) => ({ title: line, kind, values: found.metrics[metric].mean }))} />`)}</div>
    ${missing.length > 0 && html`<p class="quiet">Not measured: ${missing.join(", ")}. ${kind === "node" && MACMON}</p>`}
  </section>`;
}

const SLOW_MS = 30_000;
const TITLES = {
  firstTokenP95Ms: ["Time to first token, p95", "ms"],
  tokensPerSecond: ["Tokens/s of a request", "tokens/s"],
  availabilityPercent: ["Availability", "%"],
};
const OBJECTIVES = [
  ["Objective", (one) => TITLES[one.objective]?.[0] ?? one.objective],
  ["Window", "window"],
  ["Target", (one) => withUnit(one.target, one), "number"], ["Measured", (one) => withUnit(one.measured, one), "number"],
  ["Burn rate", burnRate, "number"], ["Requests", "requests", number],
];

export function Objectives({ name }) {
  const [found] = useRead(() => getJson("/api/v1/objectives"), [], SLOW_MS);
  const rows = (found?.objectives ?? []).filter((one) => one.deployment === name);
  if (!rows.length) return null;
  return html`<section aria-labelledby="objectives" data-objectives>
    <h2 id="objectives">Objectives</h2>
    <${Table} caption="Objectives" columns=${OBJECTIVES} rows=${rows.map((one) => ({ ...one, name: `${one.objective} ${one.window}` }))} empty="" />
  </section>`;
}

/** Joules of a Mac or a model, for a request and for 1,000 tokens; the reason where the power is not known. */
export function Energy({ subject }) {
  const [found] = useRead(() => getJson(`/api/v1/energy?subject=${encodeURIComponent(subject)}&from=24h`), [], SLOW_MS);
  const energy = found?.energy[0];
  if (!energy) return html`<span class="quiet">-</span>`;
  if (energy.joules === null) return html`<span class="quiet"><${Text} text=${energy.reason} /></span>`;
  const parts = [
    `${short(energy.joules / 3600)} Wh in 24 h`,
    energy.joulesPerRequest !== null && `${short(energy.joulesPerRequest)} J per request`,
    energy.joulesPer1000Tokens !== null && `${short(energy.joulesPer1000Tokens)} J per 1,000 tokens`,
  ];
  return html`<span data-energy>${parts.filter(Boolean).join(", ")}${energy.reason && html` <span class="quiet">${energy.reason}</span>`}</span>`;
}

function withUnit(value, { objective }) {
  return value === null ? html`<span class="quiet">too few requests</span>` : `${short(value)} ${TITLES[objective]?.[1] ?? ""}`;
}

/** A burn rate of 1 uses exactly the error budget. */
function burnRate({ burnRate: value }) {
  if (value === null) return "-";
  return html`<${Badge} tone=${value > 1 ? "bad" : "good"}>${short(value)}<//>`;
}

const USAGE_MS = 5_000;
/** A sampled value, `?` if no process reported it, and with a plus if some processes did not. */
function sampled(title, field, format, total) {
  const text = (row) => `${format(row[field])}${row.partial.includes(field) ? "+" : ""}${total && row[total] !== null ? ` of ${format(row[total])}` : ""}`;
  return [title, (row) => (row[field] === null ? "?" : text(row)), "number"];
}

const COLUMNS = {
  nodes: [
    ["Node", "name", "Node"],
    sampled("Memory used", "usedBytes", bytes, "totalBytes"), sampled("Models", "modelsBytes", bytes, "allocatableBytes"), sampled("Engines", "engines", short),
  ],
  models: [
    ["Model", "name", "ModelDeployment"], ["Ready", (one) => `${one.ready}/${one.wanted}`, "number"],
    sampled("Memory", "memoryBytes", bytes), sampled("Requests/s", "requestsPerSecond", short),
    sampled("First token", "firstTokenS", (seconds) => span(1000 * seconds)),
  ],
};
const SHARED = [sampled("In flight", "inFlight", short), sampled("Queue", "queue", short), sampled("Tokens/s", "tokensPerSecond", short)];

/** `what`: nodes or models. */
export const Usage = ({ what }) => html`<${Details} summary="Current usage" data-usage><${Sampled} what=${what} /><//>`;

function Sampled({ what }) {
  const [found, problem] = useRead(() => getJson(`/api/v1/top/${what}`), [], USAGE_MS);
  if (!found) return html`<p class=${problem ? "problem" : "quiet"}>${problem || "Sampling…"}</p>`;
  return html`<${Table} caption=${`Usage of ${what}`} columns=${[...COLUMNS[what], ...SHARED]} rows=${found.items} empty=${`There are no ${what}.`} />
    ${problem && html`<p class="problem">${problem}</p>`}
    ${found.reasons.map((reason) => html`<p class="quiet" key=${reason}>unknown values: ${reason}</p>`)}
    <${Command} text=${`fleetctl top ${what}`} />`;
}

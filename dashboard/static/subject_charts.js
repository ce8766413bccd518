/** Figures of a Mac or of a model over the last hour, six hours or day. */

import { html, useState } from "./vendor/htm-preact.js";
import { Chart } from "./charts.js";
import { getJson } from "./fleet_store.js";
import { bytes, span } from "./format.js";
import { useRead } from "./parts.js";

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
/** Title, format, fixed top, and the lines: metric, title and colour. */
const OF_MAC = [
  ["Load", percent, 1, [["gpu_ratio", "GPU", "weights"], ["cpu_ratio", "CPU", "kv"]]],
  ["Memory", bytes, undefined, [["memory_used_bytes", "used", "weights"], ["swap_used_bytes", "swap", "adapter"]]],
  ["Temperature", plain(" °C"), undefined, [["gpu_celsius", "GPU", "weights"], ["cpu_celsius", "CPU", "kv"]]],
  ["Power", plain(" W"), undefined, [["power_watts", "Power", "prefill"]]],
  ["Output", plain(" tok/s"), undefined, [["output_tokens_per_second", "Output", "weights"]]],
  ["Requests", plain("/s"), undefined, [["requests_per_second", "Requests", "kv"]]],
  ["Network", rate, undefined, [["network_received_bytes_per_second", "in", "weights"], ["network_sent_bytes_per_second", "out", "kv"]]],
  ["Disk", rate, undefined, [["disk_read_bytes_per_second", "read", "weights"], ["disk_written_bytes_per_second", "written", "kv"]]],
];

const OF_MODEL = [
  ["Output", plain(" tok/s"), undefined, [["output_tokens_per_second", "out", "weights"], ["prompt_tokens_per_second", "in", "kv"]]],
  ["Requests", plain("/s"), undefined, [["requests_per_second", "Requests", "kv"]]],
  ["First token", span, undefined, [["first_token_p50", "p50", "weights"], ["first_token_p95", "p95", "prefill"]]],
  ["Request duration", span, undefined, [["latency_p50", "p50", "weights"], ["latency_p95", "p95", "prefill"]]],
  ["In flight", whole, undefined, [["active", "at engines", "weights"], ["waiting", "waiting", "prefill"]]],
  ["Replicas", whole, undefined, [["desired", "wanted", "process"], ["ready", "ready", "weights"]]],
];
const MACMON = html`<a href="https://github.com/vladkens/macmon" rel="noreferrer" target="_blank">macmon</a> on the Mac measures temperature, power and the GPU.`;

export function MacCharts({ name, at }) {
  return html`<${SubjectCharts} subject=${`node/${name}`} charts=${OF_MAC} at=${at} hint=${MACMON} />`;
}

export function ModelCharts({ name, at }) {
  return html`<${SubjectCharts} subject=${`model/${name}`} charts=${OF_MODEL} at=${at} hint="" />`;
}

function SubjectCharts({ subject, charts, at, hint }) {
  const [range, setRange] = useState(RANGES[0]);
  const read = () => {
    const metrics = charts.flatMap(([, , , lines]) => lines.map(([metric]) => metric)).join(",");
    const hours = Number.parseInt(range, 10);
    const times = at ? `from=${new Date(Date.parse(at) - hours * 3_600_000).toISOString()}&to=${at}` : `from=${range}`;
    return getJson(`/api/v1/series?subject=${encodeURIComponent(subject)}&metric=${metrics}&${times}`);
  };
  const [found, problem] = useRead(read, [subject, range, at], READ_MS);
  const isMeasured = (lines) => lines.some(([metric]) => found.metrics[metric].mean.some((value) => value !== null));
  const missing = found ? charts.filter(([, , , lines]) => !isMeasured(lines)).map(([title]) => title.toLowerCase()) : [];
  const count = Object.values(found?.metrics ?? {})[0]?.mean.length ?? 0;
  const begin = found ? Date.parse(found.from) / 1000 : 0;
  const times = Array.from({ length: count }, (_, step) => begin + step * found.stepSeconds);
  return html`<section aria-labelledby="figures">
    <div class="section-head"><h2 id="figures">Metrics</h2>
      <div class="segments" role="group" aria-label="Range">${RANGES.map((one) => html`<button type="button" key=${one} class="small" aria-pressed=${one === range} onClick=${() => setRange(one)}>${one}</button>`)}</div>
    </div>
    ${problem && html`<p class="quiet">${problem}</p>`}
    ${found && html`<div class="charts">${charts.filter(([, , , lines]) => isMeasured(lines)).map(([title, format, top, lines]) => html`<${Chart} steps=${STEPS.get(format)} key=${`${title} ${range}`} title=${title} times=${times} format=${format} top=${top} group=${subject}
      lines=${lines.map(([metric, line, kind]) => ({ title: line, kind, values: found.metrics[metric].mean }))} />`)}</div>`}
    ${found && missing.length > 0 && html`<p class="quiet">Not measured: ${missing.join(", ")}. ${hint}</p>`}
  </section>`;
}

/** What a Mac has measured over the last hour, six hours or day. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { Chart } from "./charts.js";
import { getJson } from "./fleet_store.js";
import { bytes } from "./format.js";

const RANGES = ["1h", "6h", "24h"];
const READ_MS = 15_000;
const percent = (value) => `${Math.round(100 * value)} %`;
const rate = (value) => `${bytes(value)}/s`;
const plain = (unit) => (value) => `${value >= 10 ? Math.round(value) : Number(value.toFixed(1))}${unit}`;
/** Title, format, fixed top, and the lines: metric, title and colour. */
const CHARTS = [
  ["Load", percent, 1, [["gpu_ratio", "GPU", "weights"], ["cpu_ratio", "CPU", "kv"]]],
  ["Memory", bytes, undefined, [["memory_used_bytes", "used", "weights"], ["swap_used_bytes", "swap", "adapter"]]],
  ["Temperature", plain(" °C"), undefined, [["gpu_celsius", "GPU", "weights"], ["cpu_celsius", "CPU", "kv"]]],
  ["Power", plain(" W"), undefined, [["power_watts", "Power", "prefill"]]],
  ["Output", plain(" tok/s"), undefined, [["output_tokens_per_second", "Output", "weights"]]],
  ["Requests", plain("/s"), undefined, [["requests_per_second", "Requests", "kv"]]],
  ["Network", rate, undefined, [["network_received_bytes_per_second", "in", "weights"], ["network_sent_bytes_per_second", "out", "kv"]]],
  ["Disk", rate, undefined, [["disk_read_bytes_per_second", "read", "weights"], ["disk_written_bytes_per_second", "written", "kv"]]],
];

export function MacCharts({ name, at }) {
  const [range, setRange] = useState(RANGES[0]);
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isOver = false;
    const metrics = CHARTS.flatMap(([, , , lines]) => lines.map(([metric]) => metric)).join(",");
    const end = at ? Date.parse(at) : null;
    const read = () => {
      if (document.hidden) return;
      const hours = Number.parseInt(range, 10);
      const times = end ? `from=${new Date(end - hours * 3_600_000).toISOString()}&to=${at}` : `from=${range}`;
      getJson(`/api/v1/series?subject=node/${encodeURIComponent(name)}&metric=${metrics}&${times}`).then(
        (body) => isOver || (setFound(body), setProblem("")),
        (error) => isOver || setProblem(error.message),
      );
    };
    read();
    const timer = setInterval(read, READ_MS);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [name, range, at]);
  const isMeasured = (lines) => lines.some(([metric]) => found.metrics[metric].mean.some((value) => value !== null));
  const missing = found ? CHARTS.filter(([, , , lines]) => !isMeasured(lines)).map(([title]) => title.toLowerCase()) : [];
  const count = Object.values(found?.metrics ?? {})[0]?.mean.length ?? 0;
  const begin = found ? Date.parse(found.from) / 1000 : 0;
  const times = Array.from({ length: count }, (_, step) => begin + step * found.stepSeconds);
  return html`<section aria-labelledby="figures">
    <div class="section-head"><h2 id="figures">Figures</h2>
      <div class="segments" role="group" aria-label="Range">${RANGES.map((one) => html`<button type="button" key=${one} class="small" aria-pressed=${one === range} onClick=${() => setRange(one)}>${one}</button>`)}</div>
    </div>
    ${problem && html`<p class="quiet">${problem}</p>`}
    ${found && html`<div class="charts">${CHARTS.filter(([, , , lines]) => isMeasured(lines)).map(([title, format, top, lines]) => html`<${Chart} key=${`${title} ${range}`} title=${title} times=${times} format=${format} top=${top} group="mac"
      lines=${lines.map(([metric, line, kind]) => ({ title: line, kind, values: found.metrics[metric].mean }))} />`)}</div>`}
    ${found && missing.length > 0 && html`<p class="quiet">Not measured: ${missing.join(", ")}. <a href="https://github.com/vladkens/macmon" rel="noreferrer" target="_blank">macmon</a> on the Mac measures temperature, power and the GPU.</p>`}
  </section>`;
}

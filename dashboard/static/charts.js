/** Charts over time: small lines of our own for cards, and uPlot, which is loaded with the first large chart. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { clock } from "./format.js";
import { useListener } from "./parts.js";

const HEIGHT = 120;
const DARK = matchMedia("(prefers-color-scheme: dark)");
const STYLE = new URL("./vendor/uplot.css", import.meta.url).pathname;

/** A line of the last hour without axes, away from the text above it; gaps where nothing was measured. */
export function Sparkline({ values, label }) {
  const known = values.filter((value) => value !== null);
  const isFlat = known.every((value) => value === known[0]); // it is at half the height: at the top it would underline the text
  const top = (isFlat ? 2 : 1) * Math.max(...known, 0) || 1;
  return html`<svg class="sparkline" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${label}>
    <path d=${linePath(values, top)} vector-effect="non-scaling-stroke" />
  </svg>`;
}

function linePath(values, top) {
  const steps = values.map((value, at) => {
    if (value === null) return "";
    const place = `${((100 * at) / Math.max(1, values.length - 1)).toFixed(2)} ${(29 - (22 * value) / top).toFixed(2)}`;
    return at && values[at - 1] !== null ? `L${place}` : `M${place}h0.2`; // a single value is a dot
  });
  return steps.join("");
}

/**
 * A chart with axes and a cursor. `times`: seconds; `lines`: [{title, values, kind}], where `kind` names a colour of the
 * style sheet; `format` makes a text of a value. `steps`: allowed distances between marks, such as powers of two for bytes.
 * Charts of the same `group` share their cursor.
 */
export function Chart({ title, times, lines, format, group = "", top, steps }) {
  const host = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const [problem, setProblem] = useState("");
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  const shape = shown.map((line) => line.title).join("|");
  const isEmpty = shown.length === 0;
  useEffect(() => {
    if (isEmpty) return undefined;
    let isOver = false;
    let observer = null;
    loadStyle();
    import("./vendor/uplot.js").then(
      ({ default: UPlot }) => {
        if (isOver || !host.current) return;
        plot.current = new UPlot(optionsOf(host.current, shown, { format, group, top, steps, setAt }), [times, ...shown.map((line) => line.values)], host.current);
        observer = new ResizeObserver(() => plot.current?.setSize({ width: host.current.clientWidth, height: HEIGHT }));
        observer.observe(host.current);
      },
      () => setProblem("The chart did not arrive. Load the page again."),
    );
    return () => {
      isOver = true;
      observer?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape, isEmpty]);
  const redraw = () => plot.current?.redraw(false);
  useListener("change", redraw, DARK);
  useListener("themechange", redraw);
  useEffect(() => plot.current?.setData([times, ...shown.map((line) => line.values)]));
  const place = at ?? times.length - 1;
  const text = (line) => {
    const value = at === null ? line.values.findLast((one) => one !== null) : line.values[place];
    return value === null || value === undefined ? "-" : format(value);
  };
  const sentence = isEmpty ? `${title}: nothing was measured` : `${title}: ${shown.map((line) => `${line.title} ${text(line)}`).join(", ")}`;
  return html`<figure class="chart">
    <figcaption>${title}
      <span class="readings">${shown.map((line) => html`<span key=${line.title}><span class=${`swatch ${line.kind}`} aria-hidden="true"></span>${line.title !== title && line.title} <b>${text(line)}</b></span>`)}
        ${at !== null && html`<time>${minuteOf(times[place])}</time>`}</span>
    </figcaption>
    ${isEmpty ? html`<p class="quiet nothing">nothing was measured</p>` : html`<div class="plot" ref=${host} role="img" aria-label=${sentence}></div>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </figure>`;
}

const minuteOf = (seconds) => clock(seconds * 1000).slice(0, 5);

function loadStyle() {
  if (document.querySelector(`link[href="${STYLE}"]`)) return;
  document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href: STYLE }));
}

const colors = new Map();

/** @returns {string} a custom property of the style sheet as canvases and files take it, in the scheme that is shown or in another */
export function colorOf(name, scheme = "") {
  const key = `${document.documentElement.dataset.theme} ${DARK.matches} ${scheme} ${name}`;
  if (!colors.has(key)) {
    const probe = document.body.appendChild(document.createElement("span"));
    Object.assign(probe.style, { color: `var(--${name})`, colorScheme: scheme });
    colors.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(key);
}

/** The places of values without a neighbour: no line leads to them, so each is a point. */
const alone = ({ data }, line) => [...data[line].keys()].filter((at) => data[line][at] != null && data[line][at - 1] == null && data[line][at + 1] == null);

/** Return uPlot's options. Colours are read when it draws, so that a change of theme needs no new chart. */
function optionsOf(host, lines, { format, group, top, steps, setAt }) {
  const color = (name) => () => colorOf(name);
  const axis = { stroke: color("quiet"), font: "11px system-ui", grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
  return {
    width: Math.max(120, host.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 4, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, ...(group ? { sync: { key: group } } : {}) },
    scales: { y: { range: (_, __, most) => [0, (top ?? most * 1.1) || 1] } },
    axes: [
      { ...axis, size: 24, space: 70, values: (_, marks) => marks.map(minuteOf) },
      { ...axis, size: 76, space: 34, ...(steps ? { incrs: steps } : {}), values: (_, marks) => marks.map(format) },
    ],
    series: [{}, ...lines.map((line) => ({ label: line.title, stroke: color(line.kind), width: 1.5, spanGaps: false, points: { show: false, size: 5, fill: color(line.kind), filter: alone } }))],
    hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
  };
}

/** The picture of a fleet: Macs as blocks of memory, replicas as fills, groups with their cables, and what flows now. */

import { html, render, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { colorOf } from "./charts.js";
import { bytes, count } from "./format.js";
import { getJson } from "./fleet_store.js";
import { Details, download, MacState, Names, ObjectLink, Table, useRead } from "./parts.js";
import { fitText, freeBytes, layoutPicture, neighbour, textWidth, withoutNames } from "./picture_layout.js";

const HUES = 8;
const MOST_ASKED = 4; // models whose need is asked of the planner
const MOST_LEGEND = 16;
const GATEWAY_PX = 20; // of the bar from which requests fall
const SVG = "http://www.w3.org/2000/svg";
const FONT = "system-ui, -apple-system, sans-serif";
const LINE_PX = 1; // between two fills
const MARGIN = 8; // for outlines of groups and of what has the focus
const EXPORT_WIDTH = 1200;
const EXPORT_SCALE = 2;
const COLORS = ["surface", "page", "text", "quiet", "line", "accent", "good", "warning", "bad", "process", "on-hue", ...Array.from({ length: HUES }, (_, at) => `hue-${at + 1}`)];
const MOON = "M6 0A6 6 0 1 0 12 7A4.6 4.6 0 1 1 6 0Z";

/**
 * The state of a fleet as the picture takes it.
 * @returns {import("./picture_layout.js").Picture}
 */
function pictureOf(store, needs = new Map()) {
  const active = new Map();
  for (const { replica } of store.rows("inFlight")) if (replica) active.set(replica, (active.get(replica) ?? 0) + 1);
  const macs = store.rows("macs").map((mac) => macOf(mac, (mac.fills ?? []).map((fill) => ({ ...fill, active: active.get(fill.replica) ?? 0, limit: store.row("models", fill.model)?.concurrency }))));
  const known = new Map(macs.flatMap((mac) => mac.fills.map((fill) => [fill.model, fill.bytes])));
  const missing = store.rows("models").filter((model) => model.placed < model.desired);
  return {
    macs,
    groups: groupsOf(store),
    outside: missing.map(({ name, placed, desired }) => ({ model: name, count: desired - placed, bytes: needs.get(name) ?? known.get(name) ?? null })),
  };
}

/** The Macs after a forecast of the planner (`memory`, `steps` and `waiting` of its answer), as the picture takes them. */
export function pictureOfForecast({ memory, steps, waiting = [] }, store) {
  const macs = memory.map((mac) => macOf({ state: "online", ...store.row("macs", mac.name), ...mac }, mac.replicas.map((one) => ({
    ...one, model: one.deployment, weightsBytes: one.memory?.weightsBytes ?? 0, kvBytes: one.memory?.kvCacheBytes ?? 0, isReady: true, percent: null, active: 0,
  }))));
  const refused = [...steps, ...waiting].filter((step) => step.refusal);
  const models = [...new Set(refused.map((step) => step.deployment))];
  const outside = models.map((model) => {
    const of = refused.filter((step) => step.deployment === model);
    return { model, count: of.length, bytes: of[0].needBytes ?? null };
  });
  return { macs, groups: groupsOf(store), outside };
}

function macOf(mac, fills) {
  const { name, state, isCordoned = false, isDraining = false, site, chip, allocatableBytes } = mac;
  return { name, title: name, state, isCordoned: isCordoned || isDraining, site: site ?? "", chip: chip ?? "", roomBytes: allocatableBytes ?? 0, fills };
}

const groupsOf = (store) => store.rows("groups").filter((group) => group.listed.length > 1).map((group) => ({ name: group.name, members: group.listed, isMesh: group.backend === "jaccl", gbPerSecond: group.gbPerSecond }));

/** A number from 0 to 1 of a name, the same in every browser (FNV-1a). */
const fractionOf = (name) => [...name].reduce((hash, letter) => Math.imul(hash ^ letter.codePointAt(0), 0x01000193) >>> 0, 0x811c9dc5) / 2 ** 32;

/** The paint of each model by its name alone; of models of the same hue the first by name keeps it, others take one that is free, then a pattern. */
export function huesOf({ macs, outside }) {
  const models = [...new Set([...macs.flatMap((mac) => mac.fills.map((fill) => fill.model)), ...outside.map((item) => item.model)])].sort();
  const ofName = (model) => Math.floor(HUES * fractionOf(model));
  const owners = new Map(); // of paints: eight hues, the same with stripes, the same with dots
  for (const model of models) if (!owners.has(ofName(model))) owners.set(ofName(model), model);
  return new Map(models.map((model) => {
    const paints = models.map((_, at) => at - (at % HUES) + ((ofName(model) + at) % HUES));
    const paint = paints.find((one) => (owners.get(one) ?? model) === model);
    owners.set(paint, model);
    return [model, { color: `var(--hue-${(paint % HUES) + 1})`, pattern: Math.min(2, Math.floor(paint / HUES)) }];
  }));
}

/**
 * The picture with its legend, table and export. `picture`: another one than the fleet's, such as a forecast; then
 * nothing moves.
 */
export function FleetPicture({ store, picture = null, title = "mlx-fleet" }) {
  const needs = useNeeds(picture ? [] : store.rows("models"), store.at);
  const [frame, width] = useWidth();
  const shown = useSame(picture ?? pictureOf(store, needs));
  const isLive = !picture && !store.at;
  const moving = useSame(isLive ? store.rows("inFlight").map(({ name, replica }) => ({ name, replica })) : []);
  const hasGateway = isLive && store.summary?.gateways > 0;
  const hues = useMemo(() => huesOf(shown), [shown]);
  const layout = useMemo(() => (width ? layoutPicture(shown, width) : null), [shown, width]);
  const drawing = useMemo(() => layout && html`<${Drawing} layout=${layout} hues=${hues} id="fleet" moving=${moving} hasGateway=${hasGateway} label=${`${totals(shown)}. Arrow keys move between Macs.`} />`, [layout, moving, hasGateway]);
  if (!shown.macs.length) return null;
  return html`<figure class="picture" ref=${frame}>
    ${drawing}
    <figcaption>
      ${layout && html`<${PictureLegend} hues=${hues} layout=${layout} />`}
      <span class="quiet">${totals(shown)}${isLive && moving.length > 0 && `, ${count(moving.length, "request")} in flight`}</span>
      <${Export} picture=${shown} title=${title} at=${store.at} />
    </figcaption>
    <${PictureTable} picture=${shown} />
  </figure>`;
}

/** Return the value of the last call if this one is equal to it: what was drawn from it stays as it is. */
function useSame(value) {
  const last = useRef(["", value]);
  const text = JSON.stringify(value);
  if (text !== last.current[0]) last.current = [text, value];
  return last.current[1];
}

/** What replicas that fit nowhere need, of models of which none runs: asked once for each revision. A block of which it is not known has no size. */
function useNeeds(models, at) {
  const asked = models.filter((model) => model.placed < model.desired && !model.placed).slice(0, MOST_ASKED);
  const query = at ? `?at=${encodeURIComponent(at)}` : "";
  const read = async ({ name }) => [name, needOf(await getJson(`/api/v1/explain/deployment/${encodeURIComponent(name)}${query}`))];
  const readAll = async () => (await Promise.allSettled(asked.map(read))).flatMap(({ value }) => (value ? [value] : []));
  const [needs] = useRead(readAll, [at, ...asked.map((model) => `${model.name} ${model.revision}`)]);
  return new Map(needs);
}

/** The least that a replica needs on any Mac; null if no Mac knows its model. */
function needOf({ proofs }) {
  const sizes = Object.values(proofs).map((proof) => proof.totalBytes);
  return sizes.length ? Math.min(...sizes) : null;
}

function useWidth() {
  const [frame, setFrame] = useState(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (!frame) return undefined;
    const measure = () => setWidth(Math.max(0, Math.floor(frame.clientWidth) - 2 * MARGIN));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(frame);
    return () => observer.disconnect();
  }, [frame]);
  return [setFrame, width];
}

function totals({ macs }) {
  const online = macs.filter((mac) => mac.state !== "offline");
  const room = online.reduce((sum, mac) => sum + mac.roomBytes, 0);
  return `${count(macs.length, "Mac")}, ${bytes(online.reduce((sum, mac) => sum + freeBytes(mac), 0))} of ${bytes(room)} free for models`;
}

const isAway = (mac) => mac.state === "offline" || mac.state === "asleep";

function describe(mac, isShort = false) {
  const state = mac.state === "online" && mac.isCordoned ? "cordoned" : mac.state;
  const free = mac.roomBytes ? `${bytes(freeBytes(mac))} of ${bytes(mac.roomBytes)} free` : "its memory is not reported yet";
  const fills = mac.fills.map((fill) => `${fill.label ?? fill.replica} ${bytes(fill.bytes)}${isShort ? "" : ` (weights ${bytes(fill.weightsBytes)}, KV cache ${bytes(fill.kvBytes)})`}${fillNote(fill)}`);
  return `${mac.title}, ${state}: ${free}; ${fills.join(", ") || "no replica"}`;
}

function fillNote({ change, percent, isReady, active }) {
  if (change) return ` ${change}`;
  if (percent !== null && percent !== undefined) return `, ${percent} % downloaded`;
  if (!isReady) return ", not ready";
  return active ? `, ${count(active, "request")} in flight` : "";
}

/** The drawing alone, of attributes and custom properties only: an exported file needs no style sheet. */
function Drawing({ layout, hues, id, moving = [], hasGateway = false, frame = { width: "100%" }, label }) {
  const { width, height, cells, form } = layout;
  const [focus, setFocus] = useState("");
  const svg = useRef(null);
  const above = hasGateway && form !== "strip" ? GATEWAY_PX : 0;
  const drawn = useRef(new Map()); // the cell of each Mac, with what it was drawn from
  const cellOf = (cell) => {
    const { name } = cell.mac;
    const text = JSON.stringify([cell, form, name === current]);
    if (drawn.current.get(name)?.text !== text) drawn.current.set(name, { text, node: html`<${MacCell} key=${name} cell=${cell} form=${form} id=${id} isCurrent=${name === current} onFocus=${setFocus} />` });
    return drawn.current.get(name).node;
  };
  const current = cells.some(({ mac }) => mac.name === focus) ? focus : cells[0]?.mac.name;
  const onKey = (event) => {
    if (!/^(Arrow|Home|End)/.test(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = neighbour(cells, current, event.key);
    setFocus(next);
    [...svg.current.querySelectorAll("a")].find((link) => link.dataset.mac === next)?.focus();
  };
  const box = [-MARGIN, -MARGIN - above, width + 2 * MARGIN, height + 2 * MARGIN + above].join(" ");
  return html`<svg ref=${svg} class=${`drawing ${form}`} xmlns=${SVG} viewBox=${box} ...${frame} role=${label && "group"} aria-label=${label} font-family=${FONT} onKeyDown=${onKey}>
    <defs><${Patterns} id=${id} /></defs>
    ${above > 0 && html`<text y=${5 - above} font-size="11.5" fill="var(--quiet)">gateway</text><rect x="58" y=${-above} width=${width - 58} height="3" rx="1.5" fill="var(--accent)" opacity="0.5" />`}
    ${layout.heads.map((head) => html`<text key=${head.text} x=${head.x} y=${head.y} font-size="13" font-weight="600" fill=${head.isBad ? "var(--bad)" : "var(--quiet)"}>${head.text}</text>`)}
    ${batches(layout, hues, id).map(([key, { d, ...paint }]) => html`<path key=${key} d=${d} ...${paint} />`)}
    ${form !== "strip" && cells.flatMap((cell) => cell.fills.map((fill) => html`<${FillText} key=${cell.mac.name + fill.fill.replica} place=${fill} block=${cell.block} isAway=${isAway(cell.mac)} />`))}
    ${cells.map(cellOf)}
    ${layout.groups.map((shape) => html`<${GroupShape} key=${shape.group.name} shape=${shape} form=${form} />`)}
    ${layout.outside.map((place) => html`<${OutsideBlock} key=${place.item.model} place=${place} hue=${hues.get(place.item.model)} />`)}
    <g aria-hidden="true">${form !== "strip" && html`<${Dots} cells=${cells} moving=${moving} />`}</g>
  </svg>`;
}

/** Patterns over a hue, and the hatching of Macs that take nothing. */
function Patterns({ id }) {
  const stripes = (name, size, wide, color) => html`<pattern id=${`${id}-${name}`} width=${size} height=${size} patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width=${wide} height=${size} fill=${color} /></pattern>`;
  return html`${stripes("1", 8, 2.5, "var(--on-hue)")}${stripes("hatch", 7, 2, "var(--warning)")}
    <pattern id=${`${id}-2`} width="8" height="8" patternUnits="userSpaceOnUse"><circle cx="4" cy="4" r="1.6" fill="var(--on-hue)" /></pattern>`;
}

const OPACITY = { weights: 1, kv: 0.5, rest: 0.45 };

/** One path for all parts of the same paint: a thousand Macs are a few dozen elements. */
function batches({ cells }, hues, id) {
  const paths = new Map();
  const add = (key, paint, { x, width }, y, height) => {
    if (width < 0.2) return;
    const batch = paths.get(key) ?? { d: "", ...paint };
    batch.d += `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;
    paths.set(key, batch);
  };
  for (const { block } of cells) add("paper", { fill: "var(--surface)" }, block, block.y, block.height);
  for (const { mac, block, fills } of cells) {
    for (const { fill, x, width, parts } of fills) {
      const { color, pattern } = hues.get(fill.model);
      const faint = isAway(mac) || fill.change === "goes" ? 0.3 : fill.isReady ? 1 : 0.55;
      const isDown = fill.percent !== null && fill.percent !== undefined;
      for (const [part, place] of isDown ? [] : Object.entries(parts)) {
        const paint = part === "rest" ? "var(--process)" : color;
        add(`${paint} ${part} ${faint}`, { fill: paint, "fill-opacity": OPACITY[part] * faint }, place, block.y, block.height);
      }
      if (isDown) {
        add(`${color} line`, { fill: "none", stroke: color, "stroke-dasharray": "4 3" }, { x: x + 1, width: width - 2 }, block.y + 1, block.height - 2);
        add(`${color} down`, { fill: color, "fill-opacity": 0.35 }, { x, width: (width * fill.percent) / 100 }, block.y, block.height);
      }
      if (pattern) add(`pattern ${pattern}`, { fill: `url(#${id}-${pattern})`, "fill-opacity": 0.45 }, parts.weights, block.y, block.height);
      add("edge", { fill: "var(--surface)" }, { x: x + width - LINE_PX, width: LINE_PX }, block.y, block.height);
      if (fill.change === "comes") add("comes", { fill: "none", stroke: "var(--text)", "stroke-width": 2 }, { x: x + 1, width: width - 2 }, block.y + 1, block.height - 2);
      const load = Math.min(1, (fill.active ?? 0) / (fill.limit || 8));
      const deep = Math.max(2, Math.min(5, block.height / 8));
      if (load > 0) add("load", { fill: "var(--text)" }, { x, width: Math.max(3, (width - 1) * load) }, block.y + block.height - deep, deep);
    }
  }
  return [...paths];
}

function FillText({ place, block, isAway: isFaint }) {
  const { fill, parts } = place;
  const isDown = fill.percent !== null && fill.percent !== undefined;
  const space = isDown ? place.width - 10 : parts.weights.width - 10;
  const name = fitText(fill.label ?? fill.model, space);
  if (!name) return null;
  const color = isFaint || isDown || fill.change === "goes" || !fill.isReady ? "var(--text)" : "var(--on-hue)";
  const note = isDown ? `${fill.percent} %` : bytes(fill.bytes);
  return html`<g fill=${color} pointer-events="none" aria-hidden="true">
    <text x=${place.x + 7} y=${block.y + 18} font-size="12" font-weight="600">${name}</text>
    ${block.height > 40 && textWidth(note, 11) <= space && html`<text x=${place.x + 7} y=${block.y + 34} font-size="11">${note}</text>`}
  </g>`;
}

function MacCell({ cell, form, id, isCurrent, onFocus }) {
  const { mac, block } = cell;
  const isOffline = mac.state === "offline";
  const stroke = mac.state === "degraded" ? "var(--warning)" : isOffline ? "var(--bad)" : "var(--quiet)";
  const round = form === "strip" ? 2 : 3;
  return html`<a href=${`/macs/${encodeURIComponent(mac.name)}`} data-mac=${mac.name} tabindex=${isCurrent ? 0 : -1} aria-label=${describe(mac, form === "strip")} onFocus=${() => onFocus(mac.name)}>
    <title>${describe(mac)}</title>
    ${(mac.isCordoned || mac.state === "asleep") && html`<rect ...${block} rx=${round} fill=${mac.isCordoned ? `url(#${id}-hatch)` : "var(--page)"} fill-opacity="0.6" />`}
    <rect class="frame" ...${block} rx=${round} fill="transparent" stroke=${stroke} stroke-width=${mac.state === "degraded" ? 2 : 1} stroke-dasharray=${isOffline || !mac.roomBytes ? "5 3" : undefined} />
    ${mac.state === "asleep" && html`<path d=${MOON} transform=${`translate(${block.x + block.width - 16} ${block.y + (form === "strip" ? 2 : 6)})`} fill="var(--quiet)" />`}
    ${form !== "strip" && html`<${MacText} cell=${cell} form=${form} />`}
  </a>`;
}

function MacText({ cell, form }) {
  const { mac, x, y, width } = cell;
  const base = y + (form === "large" ? 15 : 13);
  const state = mac.isCordoned ? "cordoned" : mac.state === "degraded" ? mac.state : ""; // the rest stands for the free memory
  const space = width - textWidth(mac.title, 13) - 8;
  const free = isAway(mac) ? [mac.state] : mac.roomBytes ? [`${bytes(freeBytes(mac))} free`, bytes(freeBytes(mac))] : ["not reported", "?"];
  const [chip, room] = [mac.chip.replace(/^Apple /, ""), mac.roomBytes ? bytes(mac.roomBytes) : ""];
  const abouts = [[state, chip, room && `${room} for models`], [state, chip, room], [state || chip, room], [state || room]].map((parts) => parts.filter(Boolean).join(" · "));
  return html`
    <text x=${x} y=${base} font-size="13" font-weight="600" fill="var(--text)">${fitText(mac.title, width, 13)}</text>
    <text x=${x + width} y=${base} font-size="11.5" text-anchor="end" fill=${mac.state === "offline" ? "var(--bad)" : "var(--quiet)"}>${free.find((text) => textWidth(text, 11.5) <= space) ?? ""}</text>
    ${form === "large" && html`<text x=${x} y=${y + 32} font-size="11.5" fill=${state ? "var(--warning)" : "var(--quiet)"}>${abouts.find((text) => textWidth(text, 11.5) <= width) ?? ""}</text>`}`;
}

/** A group's outline around its Macs, and its cables: the thicker, the more bandwidth; dashed if it was not measured. */
function GroupShape({ shape, form }) {
  const { group, outlines, cables, thickness } = shape;
  const speed = group.gbPerSecond ? `${group.gbPerSecond} GB/s` : "bandwidth not measured";
  return html`<g fill="none" stroke="var(--accent)" pointer-events="none" aria-hidden="true">
    ${outlines.map((box, at) => html`<rect key=${at} ...${box} rx=${form === "strip" ? 3 : 10} stroke-width="1.5" />`)}
    ${cables.map((d, at) => html`<path key=${d + at} d=${d} stroke-width=${thickness} stroke-linecap="round" stroke-dasharray=${group.gbPerSecond ? undefined : "3 3"} />`)}
    <title>${`${group.name}: ${speed}`}</title>
  </g>`;
}

/** Replicas of a model that fit nowhere, dashed and true to scale; a cut mark where they are larger. */
function OutsideBlock({ place, hue }) {
  const { item, x, y, width, head, block, isCut } = place;
  const size = item.bytes === null ? "size unknown" : bytes(item.bytes);
  const [end, third] = [block.x + block.width, (block.height + 4) / 3];
  const text = `${item.label ?? item.model} ${item.count > 1 ? `× ${item.count}` : ""}`;
  return html`<a href=${`/models/${encodeURIComponent(item.model)}?why`} aria-label=${`${item.label ?? item.model}: ${count(item.count, "replica")} without a place, ${size} each`}>
    <text x=${x} y=${y + head - 6} font-size="13" font-weight="600" fill="var(--text)">${fitText(text, width, 13)}</text>
    <rect class="frame" ...${block} rx="3" fill=${hue.color} fill-opacity="0.12" stroke=${hue.color} stroke-width="1.5" stroke-dasharray="6 4" />
    <text x=${block.x + 8} y=${block.y + 17} font-size="12" fill="var(--text)">${fitText(size, width - 10)}</text>
    ${isCut && html`<path d=${`M${end - 16} ${block.y - 2}l6 ${third}l-8 0l6 ${2 * third}h7l-6 ${-2 * third}l8 0l-6 ${-third}z`} fill="var(--page)" stroke="var(--text)" />`}
  </a>`;
}

/** Requests under way: a new one falls onto the block of its replica, as the style sheet moves it. */
function Dots({ cells, moving }) {
  const places = new Map(cells.flatMap(({ block, fills }) => fills.map(({ fill, x, width }) => [fill.replica, { cx: x + width / 2, cy: block.y + block.height - 8 }])));
  return moving.filter(({ replica }) => places.has(replica)).map(({ name, replica }) => html`<circle key=${name} class="dot" ...${places.get(replica)} r="4"
    fill="var(--text)" style=${{ "--fall": `${-places.get(replica).cy - GATEWAY_PX}px` }} />`);
}

/** The colours of the models that can be seen, and which cannot: at this scale their replicas are thinner than a line. */
function PictureLegend({ hues, layout: { cells, outside } }) {
  const fills = cells.flatMap((cell) => cell.fills).filter(({ width }) => width > LINE_PX);
  const seen = new Set([...fills.map(({ fill }) => fill.model), ...outside.map(({ item }) => item.model)]);
  const [drawn, small] = [true, false].map((isSeen) => [...hues].filter(([model]) => seen.has(model) === isSeen));
  const models = drawn.slice(0, MOST_LEGEND);
  return html`<ul class="legend">
    ${models.map(([model, { color, pattern }]) => html`<li key=${model}><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" rx="3" fill=${color} />${pattern > 0 && html`<rect width="14" height="14" rx="3" fill=${`url(#fleet-${pattern})`} fill-opacity="0.45" />`}</svg> <${ObjectLink} kind="ModelDeployment" name=${model} /></li>`)}
    ${drawn.length > models.length && html`<li>${drawn.length - models.length} more models</li>`}
    ${small.length > 0 && html`<li>too small to see: <${Names} kind="ModelDeployment" names=${small.slice(0, MOST_LEGEND).map(([model]) => model)} /></li>`}
    <li>full colour: weights, lighter: KV caches, grey: other, blank: free</li>
  </ul>`;
}

const COLUMNS = [
  ["Mac", "name", "Node"],
  ["State", (mac) => html`<${MacState} mac=${mac} />`],
  ["For models", "roomBytes", bytes], ["Free", freeBytes, bytes],
  ["Replicas", (mac) => mac.fills.map((fill) => `${fill.replica} ${bytes(fill.bytes)}${fillNote(fill)}`).join(", ") || "-", "wide"],
];

function PictureTable({ picture: { macs, outside } }) {
  const need = (item) => `${item.model} (${count(item.count, "replica")}${item.bytes === null ? "" : `, ${bytes(item.bytes)} each`})`;
  return html`<${Details} summary="The picture as a table">
    <${Table} caption="Memory of the Macs" columns=${COLUMNS} rows=${macs} empty="No Mac has joined." />
    ${outside.length > 0 && html`<p>Without a place: ${outside.map(need).join(", ")}</p>`}<//>`;
}

/** Buttons that take the picture elsewhere; without names of Macs, sites and models unless they are asked for. */
function Export({ picture, title, at }) {
  const [hasNames, setNames] = useState(false);
  const [note, setNote] = useState("");
  const make = () => exported(hasNames ? picture : withoutNames(picture), { title, at });
  const act = (work, done) => async () => setNote(await work().then(() => done, (error) => error.message));
  const copy = async () => {
    const blob = pngOf(make());
    if (!globalThis.ClipboardItem || !navigator.clipboard?.write) throw new Error("This browser copies no pictures over plain HTTP: download it.");
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
  };
  const svg = async () => download(new Blob([textOf(make())], { type: "image/svg+xml" }), "fleet.svg");
  const png = async () => download(await pngOf(make()), "fleet.png");
  return html`<details class="export">
    <summary>Share</summary>
    <p class="actions"><button type="button" class="small" onClick=${act(copy, "Copied.")}>Copy picture</button>
      <button type="button" class="small" onClick=${act(svg, "")}>Download SVG</button>
      <button type="button" class="small" onClick=${act(png, "")}>Download PNG</button>
      <label class="check"><input type="checkbox" checked=${hasNames} onChange=${(event) => setNames(event.target.checked)} /> With names</label>
      <span class="quiet" role="status">${note}</span></p>
  </details>`;
}

/** Return an SVG element with title, time and totals, drawn anew at a fixed width. */
function exported(picture, { title, at }) {
  const layout = layoutPicture(picture, EXPORT_WIDTH);
  const [margin, top] = [24, 64];
  const [width, height] = [EXPORT_WIDTH + 2 * margin, layout.height + top + margin];
  const frame = { x: margin - MARGIN, y: top - MARGIN, width: EXPORT_WIDTH + 2 * MARGIN, height: layout.height + 2 * MARGIN };
  const moment = new Date(at || Date.now()).toISOString().slice(0, 16).replace("T", " ");
  const host = document.createElement("div");
  render(html`<svg xmlns=${SVG} viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img" aria-label=${totals(picture)} font-family=${FONT}>
    <rect width=${width} height=${height} rx="12" fill="var(--page)" />
    <text x=${margin} y="30" font-size="18" font-weight="700" fill="var(--text)">${title}</text>
    <text x=${margin} y="50" font-size="13" fill="var(--quiet)">${`${totals(picture)} · ${moment} UTC`}</text>
    <${Drawing} layout=${layout} hues=${huesOf(picture)} id="export" frame=${frame} />
  </svg>`, host);
  for (const link of host.querySelectorAll("a")) link.replaceWith(...link.childNodes);
  return host.firstElementChild;
}

/** The file: its colours follow the viewer's theme. */
function textOf(svg) {
  const [light, dark] = ["light", "dark"].map((scheme) => COLORS.map((name) => `--${name}:${colorOf(name, scheme)}`).join(";"));
  const style = Object.assign(document.createElementNS(SVG, "style"), { textContent: `svg{${light}}@media(prefers-color-scheme:dark){svg{${dark}}}` });
  svg.prepend(style);
  return new XMLSerializer().serializeToString(svg);
}

async function pngOf(svg) {
  const text = new XMLSerializer().serializeToString(svg).replace(/var\(--([\w-]+)\)/g, (_, name) => colorOf(name));
  const image = Object.assign(new Image(), { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}` });
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: EXPORT_SCALE * image.width, height: EXPORT_SCALE * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, fail) => canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error("The picture is too large for this browser."))), "image/png"));
}

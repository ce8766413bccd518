/** The Macs at a glance: cards for a few, tiles for many, cells for a thousand; by site, with the cables of groups. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { colorOf } from "../charts.js";
import { bytes, count, figureText } from "../format.js";
import { Badge, MacState, MemoryBar, ObjectLink } from "../parts.js";

const MOST_CARDS = 24;
const MOST_TILES = 200;
const CELL = 14;

export function FleetMap({ store }) {
  const macs = store.rows("macs");
  const groups = store.rows("groups").filter((one) => one.listed.length > 1);
  const Shown = macs.length <= MOST_CARDS ? Cards : macs.length <= MOST_TILES ? Tiles : Cells;
  return html`
    <h1>Map</h1>
    <p class="legend-line"><${Badge} tone="good">online<//> <${Badge} tone="warning">degraded, draining or cordoned<//> <${Badge} tone="bad">offline<//>
      <span><span class="swatch weights" aria-hidden="true"></span>weights</span> <span><span class="swatch kv" aria-hidden="true"></span>KV caches</span> <span><span class="swatch process" aria-hidden="true"></span>other</span> <span><span class="swatch free-memory" aria-hidden="true"></span>free for models</span>
      <a href="/macs">Show as a table</a></p>
    ${bySite(macs).map(([site, found]) => html`<section key=${site} aria-label=${site || "no site"}>
      <h2>${site || "Macs"} <span class="quiet">${siteText(found)}</span></h2>
      <${Shown} macs=${found} figures=${store.views.figures} />
    </section>`)}
    ${!macs.length && html`<p class="quiet">No Mac has joined. <a href="/add">Add a Mac</a>.</p>`}
    ${groups.length > 0 && html`<h2>Groups</h2><div class="map">${groups.map((one) => html`<${Ring} key=${one.name} group=${one} store=${store} />`)}</div>`}
  `;
}

function bySite(macs) {
  const found = new Map();
  for (const mac of macs) {
    const site = mac.site ?? "";
    if (!found.has(site)) found.set(site, []);
    found.get(site).push(mac);
  }
  return [...found].sort(([a], [b]) => (a < b ? -1 : 1));
}

function siteText(macs) {
  const online = macs.filter((mac) => mac.state !== "offline");
  const free = online.reduce((sum, mac) => sum + Math.max(0, (mac.allocatableBytes ?? 0) - mac.promisedBytes), 0);
  return `${count(macs.length, "Mac")}, ${online.length} online, ${bytes(free)} free for models`;
}

function Cards({ macs, figures }) {
  return html`<ul class="map">${macs.map((mac) => html`<li key=${mac.name} class="card">
    <h3><${ObjectLink} kind="Node" name=${mac.name} /></h3>
    <p><${MacState} mac=${mac} /> <span class="quiet">${mac.chip ?? ""}</span></p>
    <${MemoryBar} mac=${mac} />
    ${figureText(figures.get(mac.name)) && html`<p class="figures">${figureText(figures.get(mac.name))}</p>`}
    <p class=${mac.models.length ? "models" : "quiet"}>${mac.models.join(", ") || "no model"}</p>
  </li>`)}</ul>`;
}

const tone = (mac) => (mac.state === "offline" ? "bad" : mac.state === "online" && !mac.isCordoned && !mac.isDraining ? "good" : "warning");
const share = (mac) => (mac.allocatableBytes ? Math.min(1, mac.promisedBytes / mac.allocatableBytes) : 0);

function Tiles({ macs }) {
  return html`<ul class="tiles">${macs.map((mac) => html`<li key=${mac.name}>
    <a href=${`/macs/${encodeURIComponent(mac.name)}`} class=${`tile ${tone(mac)}`} title=${`${mac.name}: ${mac.state}, ${bytes(mac.promisedBytes)} reserved`}>
      <span class="fill" style=${{ height: `${100 * share(mac)}%` }}></span><span class="tile-name">${mac.name}</span></a>
  </li>`)}</ul>`;
}

/** A thousand Macs on a canvas; the table says the same. */
function Cells({ macs }) {
  const canvas = useRef(null);
  const [over, setOver] = useState(null);
  const columns = Math.max(1, Math.min(60, Math.floor((innerWidth - 40) / CELL)));
  const rows = Math.ceil(macs.length / columns);
  useEffect(() => draw(canvas.current, macs, columns, rows));
  const at = (event) => {
    const x = Math.floor(event.offsetX / CELL);
    return x < columns ? macs[Math.floor(event.offsetY / CELL) * columns + x] : undefined;
  };
  const open = (event) => {
    const mac = at(event);
    if (mac) history.pushState(null, "", `/macs/${encodeURIComponent(mac.name)}`), dispatchEvent(new PopStateEvent("popstate"));
  };
  return html`<div>
    <canvas ref=${canvas} class="cells" role="img" aria-label=${`${siteText(macs)}. The table of Macs has each of them.`}
      onMouseMove=${(event) => setOver(at(event))} onMouseLeave=${() => setOver(null)} onClick=${open}></canvas>
    <p class="quiet">${over ? `${over.name}: ${over.state}, ${bytes(over.promisedBytes)} of ${bytes(over.allocatableBytes)} reserved` : "Each cell is a Mac, filled as its memory is promised."}</p>
  </div>`;
}

function draw(canvas, macs, columns, rows) {
  const scale = devicePixelRatio || 1;
  canvas.width = columns * CELL * scale;
  canvas.height = rows * CELL * scale;
  canvas.style.width = `${columns * CELL}px`;
  canvas.style.height = `${rows * CELL}px`;
  const context = canvas.getContext("2d");
  const colors = Object.fromEntries(["good", "warning", "bad"].map((one) => [one, colorOf(canvas.parentElement, `--${one}`)]));
  context.scale(scale, scale);
  macs.forEach((mac, at) => {
    const x = (at % columns) * CELL;
    const y = Math.floor(at / columns) * CELL;
    const color = colors[tone(mac)];
    context.globalAlpha = 0.25;
    context.fillStyle = color;
    context.fillRect(x, y, CELL - 2, CELL - 2);
    context.globalAlpha = 1;
    const height = (CELL - 2) * share(mac);
    context.fillRect(x, y + CELL - 2 - height, CELL - 2, height);
    if (tone(mac) === "bad") context.fillRect(x, y + CELL / 2 - 2, CELL - 2, 2); // not by colour alone
  });
}

/** The Macs of a group on a circle by rank, with the cables between neighbours. */
function Ring({ group, store }) {
  const places = group.listed.map((name, rank) => {
    const angle = (2 * Math.PI * rank) / group.listed.length - Math.PI / 2;
    return { name, rank, x: 100 + 66 * Math.cos(angle), y: 100 + 66 * Math.sin(angle) };
  });
  const isMesh = /jaccl|mesh|rdma/i.test(group.backend ?? "");
  const pairs = places.flatMap((one, at) =>
    isMesh ? places.slice(at + 1).map((other) => [one, other]) : [[one, places[(at + 1) % places.length]]],
  );
  const speed = group.gbPerSecond ? `${group.gbPerSecond} GB/s` : "not measured";
  return html`<div class="card">
    <h3><${ObjectLink} kind="ShardGroup" name=${group.name} /></h3>
    <p>${group.backend}, ${group.parallelism} <${Badge} tone=${group.gbPerSecond ? "good" : "idle"}>${isMesh ? "RDMA " : ""}${speed}<//></p>
    <svg class="ring" viewBox="0 0 200 200" role="img" aria-label=${`${group.name}: ${group.listed.join(", ")} by rank, ${isMesh ? "mesh" : "ring"}, ${speed}`}>
      ${pairs.map(([a, b], at) => html`<line key=${at} x1=${a.x} y1=${a.y} x2=${b.x} y2=${b.y} />`)}
      ${places.map((one) => html`<g key=${one.name} class=${tone(store.row("macs", one.name) ?? { state: "offline" })}>
        <circle cx=${one.x} cy=${one.y} r="15" /><text x=${one.x} y=${one.y + 4}>${one.rank}</text></g>`)}
    </svg>
    <ol start="0">${group.listed.map((name) => html`<li key=${name}><${ObjectLink} kind="Node" name=${name} /></li>`)}</ol>
  </div>`;
}

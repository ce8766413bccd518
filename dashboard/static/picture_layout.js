/**
 * Layout of the picture of a fleet: a Mac is a block as wide as its memory for models, a replica a fill of it.
 *
 * Pure: sizes are in bytes, places in pixels. Now, a past moment and a forecast are laid out alike.
 */

/**
 * @typedef {{replica: string, model: string, bytes: number, weightsBytes: number, kvBytes: number, isReady: boolean, percent: number | null, change?: string, active?: number}} Fill
 * @typedef {{name: string, title: string, state: string, isCordoned: boolean, site: string, chip: string, roomBytes: number, fills: Fill[]}} PictureMac
 * @typedef {{name: string, members: string[], isMesh: boolean, gbPerSecond: number | null}} PictureGroup
 * @typedef {{model: string, count: number, bytes: number | null}} Outside  replicas that fit nowhere
 * @typedef {{macs: PictureMac[], groups: PictureGroup[], outside: Outside[]}} Picture
 */

/** Forms by the most Macs: heights of a block and of the text above it, gaps, the narrowest and the usual cell. */
const FORMS = [
  { name: "large", most: 2, height: 190, head: 42, gap: 20, least: 150, usual: 290 },
  { name: "large", most: 8, height: 128, head: 42, gap: 20, least: 150, usual: 290 },
  { name: "medium", most: 60, height: 56, head: 20, gap: 16, least: 112, usual: 228 },
  { name: "strip", most: 400, height: 18, head: 0, gap: 6, least: 14, usual: 60 },
  { name: "strip", most: Infinity, height: 12, head: 0, gap: 4, least: 8, usual: 42 },
];
const [NARROW_PX, LOW_PX] = [600, 72]; // on a phone blocks are lower
const SITE_HEAD = 30;
const [LEAST_OUTSIDE_PX, MOST_OUTSIDE_PX] = [110, 72]; // its least width with its name, and its most height
const [BESIDE, BESIDE_STRIPS] = [0.64, 0.8]; // of the width, for the Macs, if what fits nowhere stands beside them
const LEAST_BESIDE_PX = 700;
const CAP = 2; // times the largest Mac: what is larger has a cut mark
const SHRINK = 0.96;
const MOST_TRIES = 90;
const GIB = 2 ** 30;

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** @returns {number} bytes of all fills that stay or come */
export const usedBytes = (mac) => sum(mac.fills.filter((fill) => fill.change !== "goes").map((fill) => fill.bytes));
export const freeBytes = (mac) => Math.max(0, mac.roomBytes - usedBytes(mac));

/**
 * Return where everything is drawn.
 * @param {Picture} picture
 * @param {number} width
 */
export function layoutPicture({ macs, groups, outside }, width) {
  const usual = FORMS.find(({ most }) => macs.length <= most);
  const form = width < NARROW_PX ? { ...usual, height: Math.min(LOW_PX, usual.height) } : usual;
  const sites = bySite(macs, groups, form);
  const largest = Math.max(GIB, ...macs.map((mac) => mac.roomBytes));
  const items = outside.map((item) => ({ item, capped: Math.min(item.bytes ?? 0, CAP * largest) }));
  const narrow = Math.floor(width * (form.name === "strip" ? BESIDE_STRIPS : BESIDE));
  const left = narrow + 2 * form.gap;
  const below = arrange(sites, items, form, width, width, 0);
  const beside = outside.length && width >= LEAST_BESIDE_PX ? arrange(sites, items, form, width, narrow, left) : below;
  const isBeside = beside.height <= below.height && items.every(({ capped }) => capped * beside.scale <= width - left);
  const { cells, ...places } = isBeside ? beside : below;
  const byName = new Map(cells.map((cell) => [cell.mac.name, cell]));
  const shapes = groups.map((group) => groupShape(group, byName, form)).filter(({ outlines }) => outlines.length);
  return { form: form.name, width, cells, ...places, groups: shapes };
}

/** Place the Macs within `mainWidth`, and what fits nowhere right of `left`, or below them if it is 0. */
function arrange(sites, items, form, width, mainWidth, left) {
  const scale = scaleFor(sites, form, mainWidth);
  const cells = [];
  const heads = [];
  let y = 0;
  for (const { site, macs } of sites) {
    if (sites.length > 1) {
      heads.push({ x: 0, y: y + SITE_HEAD - 15, text: site || "no site" });
      y += SITE_HEAD;
    }
    y += placeRow(cells, macs, { form, scale, width: mainWidth, y });
  }
  const top = left ? 0 : y;
  if (items.length) heads.push({ x: left, y: top + SITE_HEAD - 15, text: "Fits nowhere", isBad: true });
  const outside = placeOutside(items, { form, scale, width, left, y: top });
  const height = Math.max(y - form.gap, ...outside.map(({ block }) => block.y + block.height)) + 4;
  return { cells, heads, outside, scale, height: Math.max(40, height) };
}

/** Macs by site; members of a group stand together by rank, others by name, and strips by free memory. */
function bySite(macs, groups, form) {
  const ranks = new Map(groups.flatMap((group) => group.members.map((name, rank) => [name, `${group.name} ${String(rank).padStart(3, "0")}`])));
  const sites = [...new Set(macs.map((mac) => mac.site))].sort();
  const place = (mac) => ranks.get(mac.name) ?? "~";
  const byFree = (a, b) => Math.round(freeBytes(b) / GIB) - Math.round(freeBytes(a) / GIB);
  const order = (a, b) => compare(place(a), place(b)) || (form.name === "strip" && byFree(a, b)) || a.name.localeCompare(b.name, "en", { numeric: true });
  return sites.map((site) => ({ site, macs: macs.filter((mac) => mac.site === site).sort(order) }));
}

const compare = (a, b) => (a < b ? -1 : Number(a > b));
const cellWidth = (mac, { least }, scale) => Math.max(least, mac.roomBytes * scale);

/** Pixels of a byte: the most with which the Macs need no more rows than if all were of the usual width. */
function scaleFor(sites, form, width) {
  const { gap, usual } = form;
  const perRow = Math.max(1, Math.floor((width + gap) / (usual + gap)));
  const rows = (scale) => sum(sites.map(({ macs }) => placeRow([], macs, { form, scale, width, y: 0 }) / rowHeight(form)));
  const rooms = sites.flatMap(({ macs }) => macs.map((mac) => mac.roomBytes));
  const wanted = Math.max(1, sum(sites.map(({ macs }) => Math.ceil(macs.length / perRow))));
  let scale = Math.min((wanted * width) / Math.max(GIB, sum(rooms)), width / Math.max(GIB, ...rooms));
  for (let tries = 0; tries < MOST_TRIES && rows(scale) > wanted; tries += 1) scale *= SHRINK;
  return scale;
}

const rowHeight = ({ head, height, gap }) => head + height + gap;

/** Add the cells of a site's Macs, in rows; returns their height. */
function placeRow(cells, macs, { form, scale, width, y }) {
  let [x, top] = [0, y];
  for (const mac of macs) {
    const wide = cellWidth(mac, form, scale);
    if (x > 0 && x + wide > width + 0.5) [x, top] = [0, top + rowHeight(form)];
    const block = { x, y: top + form.head, width: mac.roomBytes ? Math.max(4, mac.roomBytes * scale) : form.least, height: form.height };
    cells.push({ mac, x, y: top, width: wide, head: form.head, block, fills: fillsOf(mac, block, scale) });
    x += wide + form.gap;
  }
  return macs.length ? top + rowHeight(form) - y : 0;
}

/** Fills from the left, each with its parts; what exceeds the block is cut. */
function fillsOf(mac, block, scale) {
  const end = block.x + block.width;
  let x = block.x;
  const cut = (bytes) => {
    const part = { x, width: Math.max(0, Math.min(bytes * scale, end - x)) };
    x += part.width;
    return part;
  };
  return mac.fills.map((fill) => {
    const weights = Math.min(fill.bytes, fill.weightsBytes);
    const kv = Math.min(fill.bytes - weights, fill.kvBytes);
    const parts = { weights: cut(weights), kv: cut(kv), rest: cut(fill.bytes - weights - kv) };
    return { fill, x: parts.weights.x, width: x - parts.weights.x, parts };
  });
}

/** Replicas that fit nowhere, true to scale; those larger than CAP times the largest Mac, or than the picture, are cut. */
function placeOutside(items, { form, scale, width, left, y }) {
  const head = 20;
  const height = Math.max(24, Math.min(MOST_OUTSIDE_PX, form.height));
  let [x, top] = [left, y + SITE_HEAD];
  return items.map(({ item, capped }) => {
    const blockWidth = Math.min(width - left, item.bytes === null ? form.least : Math.max(4, capped * scale));
    const wide = Math.min(width - left, Math.max(form.least, LEAST_OUTSIDE_PX, blockWidth));
    if (x > left && x + wide > width + 0.5) [x, top] = [left, top + head + height + form.gap];
    const place = { item, x, y: top, width: wide, head, block: { x, y: top + head, width: blockWidth, height }, isCut: item.bytes !== null && item.bytes * scale > blockWidth + 1 };
    x += wide + form.gap;
    return place;
  });
}

/** Outlines around a group's Macs, one for each row, and its cables from edge to edge. */
function groupShape(group, byName, form) {
  const cells = group.members.map((name) => byName.get(name)).filter(Boolean);
  const rows = [...new Set(cells.map((cell) => cell.y))].map((y) => cells.filter((cell) => cell.y === y));
  const margin = Math.min(7, form.gap / 2 - 1);
  const outlines = rows.map((row) => {
    const left = Math.min(...row.map((cell) => cell.x));
    const right = Math.max(...row.map((cell) => cell.x + Math.max(cell.width, cell.block.width)));
    return { x: left - margin, y: row[0].y - margin, width: right - left + 2 * margin, height: row[0].head + row[0].block.height + 2 * margin };
  });
  return { group, outlines, cables: form.name === "strip" ? [] : pairsOf(cells, group.isMesh).map(([a, b]) => cable(a, b, form)).filter(Boolean), thickness: thicknessOf(group.gbPerSecond) };
}

function pairsOf(cells, isMesh) {
  if (isMesh) return cells.flatMap((cell, at) => cells.slice(at + 1).map((other) => [cell, other]));
  const ring = cells.slice(1).map((cell, at) => [cells[at], cell]);
  return cells.length > 2 ? [...ring, [cells.at(-1), cells[0]]] : ring;
}

/** An SVG path: straight between neighbours, an arc below others of the row; "" if a row is between. */
function cable({ block: a }, { block: b }, form) {
  const { gap, head } = form;
  const [left, right] = a.x <= b.x ? [a, b] : [b, a];
  const between = right.x - left.x - left.width;
  if (a.y === b.y && between >= 0 && between < 5 * gap) return `M${left.x + left.width} ${left.y + left.height / 2}H${right.x}`;
  if (a.y === b.y) return `M${left.x + 0.8 * left.width} ${left.y + left.height}Q${(left.x + right.x + right.width) / 2} ${left.y + left.height + gap} ${right.x + 0.2 * right.width} ${right.y + right.height}`;
  const [upper, lower] = a.y < b.y ? [a, b] : [b, a];
  if (lower.y - upper.y > rowHeight(form) + 1) return "";
  const [from, to] = [Math.max(a.x, b.x), Math.min(a.x + a.width, b.x + b.width)];
  const [start, end] = [upper.y + upper.height, lower.y - head];
  if (from < to) return `M${(from + to) / 2} ${start}V${end - 4}`;
  const inner = ({ x, width }) => (x < from ? x + width - 12 : x + 12); // near the other one
  return `M${inner(upper)} ${start}V${(start + end) / 2}H${inner(lower)}V${end}`;
}

/** Pixels of a cable: 1 if its bandwidth was not measured, else 1.5 to 8 by the logarithm of GB/s. */
const thicknessOf = (gbPerSecond) => (gbPerSecond ? Math.min(8, 1.5 + 1.5 * Math.log2(1 + gbPerSecond)) : 1);

/** Return the name of the Mac that an arrow key leads to; the same one at the edge. */
export function neighbour(cells, name, key) {
  const at = cells.findIndex(({ mac }) => mac.name === name);
  if (at < 0) return cells[0]?.mac.name;
  const step = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: cells.length - 1 }[key];
  if (step !== undefined) return cells[Math.max(0, Math.min(cells.length - 1, step))].mac.name;
  const from = cells[at];
  const way = key === "ArrowUp" ? -1 : 1;
  const beyond = cells.filter((cell) => way * (cell.y - from.y) > 1);
  const middle = (cell) => cell.block.x + cell.block.width / 2;
  const far = (cell) => 1e4 * Math.abs(cell.y - from.y) + Math.abs(middle(cell) - middle(from));
  return beyond.reduce((best, cell) => (far(cell) < far(best) ? cell : best), beyond[0] ?? from).mac.name;
}

/** Pixels of a text in a usual font, rather too many. */
export const textWidth = (text, size = 12) => text.length * size * 0.61;

/** Return a text that fits, cut if need be; "" if there is no space for three letters. */
export function fitText(text, px, size = 12) {
  const most = Math.floor(px / textWidth("x", size));
  if (text.length <= most) return text;
  return most >= 4 ? `${text.slice(0, most - 1)}…` : "";
}

/** Return the picture without names of Macs, sites and models, for others' eyes. */
export function withoutNames({ macs, groups, outside }) {
  const models = [...new Set([...macs.flatMap((mac) => mac.fills.map((fill) => fill.model)), ...outside.map((item) => item.model)])].sort();
  const sites = [...new Set(macs.map((mac) => mac.site))].sort();
  const model = (name) => `model ${models.indexOf(name) + 1}`;
  return {
    macs: macs.map((mac) => ({
      ...mac,
      title: mac.chip.replace(/^Apple /, "") || "Mac",
      site: mac.site && `site ${sites.indexOf(mac.site) + 1}`,
      fills: mac.fills.map((fill) => ({ ...fill, label: model(fill.model) })),
    })),
    groups: groups.map((group) => ({ ...group, name: "" })),
    outside: outside.map((item) => ({ ...item, label: model(item.model) })),
  };
}

/** Run a model: the catalogue against the fleet's Macs. What is chosen is previewed, and written, where changes are tried. */

import { html, useState } from "../vendor/htm-preact.js";
import { bytes, count, number } from "../format.js";
import { getJson } from "../fleet_store.js";
import { Command, Filter, Names, ObjectLink, Table, useRead } from "../parts.js";

const FIRST_ROWS = 20;
const REPOSITORY = String.raw`\s*[\w.\-]+\/[\w.\-]+\s*`;

export function RunModel({ store }) {
  const [catalogue, problem] = useRead(() => getJson("/api/v1/catalogue"));
  const rows = (catalogue?.models ?? []).map(rowOf).sort((a, b) => Number(canRun(b)) - Number(canRun(a)));
  return html`
    <h1>Run a model</h1>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${catalogue ? html`<${Catalogue} store=${store} rows=${rows} date=${catalogue.date} />`
      : !problem && html`<p class="quiet">Comparing the catalogue with your Macs…</p>`}
  `;
}

/** A model of the catalogue: what is equal on all Macs, and its variants: one repository each, with the Macs that hold it. */
function rowOf({ name, macs }) {
  const variants = new Map();
  for (const fit of macs.filter((one) => one.fits)) {
    const id = `${fit.repo} ${fit.bits}`;
    if (!variants.has(id)) variants.set(id, { ...fit, fits: [] });
    variants.get(id).fits.push(fit);
  }
  const best = [...variants.values()].sort((a, b) => Number(b.isPublished) - Number(a.isPublished) || b.bits - a.bits);
  const [about] = best.length ? best : macs;
  const words = [name, about.license, about.task, ...about.inputs, about.architecture, about.toolFormat && "tools", about.reasons && "reasoning"];
  return { name, about, variants: best, refusal: macs.map((one) => one.refusal).find(Boolean), text: words.filter(Boolean).join(" ").toLowerCase() };
}

/** Whether a repository that fits runs as it is. */
const canRun = (row) => row.variants.length > 0 && row.about.isPublished;

function Catalogue({ store, rows, date }) {
  const [text, setText] = useState("");
  const [isAll, setAll] = useState(false);
  const [isWhole, setWhole] = useState(false);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = rows.filter((row) => (isAll || row.variants.length > 0) && words.every((word) => row.text.includes(word)));
  const fitting = rows.filter((row) => row.variants.length > 0).length;
  if (!rows.length) return html`<p class="empty">No Mac has joined, so nothing can be compared. <a href="/macs?tab=add">Add a Mac</a></p>`;
  return html`
    <p class="quiet">${fitting} of ${count(rows.length, "model")} of the catalogue of <span class="name">${date}</span> fit beside what runs. Speeds are upper bounds for one request, by memory bandwidth.</p>
    <p><${Filter} value=${text} onInput=${setText} label="Words: qwen, tools, image, mit" />
      <label class="check"><input type="checkbox" checked=${isAll} onChange=${(event) => setAll(event.target.checked)} /> Also what does not fit</label></p>
    <${Table} caption="Models of the catalogue" columns=${columns(store)} rows=${isWhole ? shown : shown.slice(0, FIRST_ROWS)} empty="No model matches." />
    ${!isWhole && shown.length > FIRST_ROWS && html`<p><button type="button" class="small" onClick=${() => setWhole(true)}>Show all ${shown.length}</button></p>`}
    ${rows.some((row) => row.variants.length > 0 && !canRun(row)) && html`<p class="quiet">Quantize first: no repository that fits is known, and a Mac of the fleet can make one of the original. Convert first: the original has no safetensors.</p>`}
    <form class="row" action="/try">
      <label>Another repository <input class="long" name="repo" required pattern=${REPOSITORY} placeholder="ORGANISATION/NAME" /></label>
      <button>Preview</button>
    </form>
    <${Command} text="fleetctl models fit" />`;
}

const rate = ([low, high]) => (low === high ? `${number(low)} tokens/s` : `${number(low)} to ${number(high)} tokens/s`);
const speedText = (fit) => (fit.tokensPerSecond ? rate(fit.tokensPerSecond) : "not known");
const parametersText = ({ parameters, activeParameters }) => `${parameters < 1e9 ? `${Math.round(parameters / 1e6)} M` : `${(parameters / 1e9).toFixed(parameters < 1e10 ? 1 : 0)} B`}${activeParameters < 0.9 * parameters ? `, ${(activeParameters / 1e9).toFixed(1)} B active` : ""}`;
const qualityText = ({ bits, packedExperts }) => `${bits} bit${packedExperts ? `, experts ${packedExperts}` : ""}`;
const abilities = ({ inputs, toolFormat, reasons, task }) => [task === "Generate" ? "" : task.toLowerCase(), ...inputs.filter((one) => one !== "Text").map((one) => one.toLowerCase()), toolFormat && "tools", reasons && "reasoning"].filter(Boolean).join(", ") || "text";

function columns(store) {
  const deployed = new Map(store.rows("models").flatMap((model) => model.servedNames.map((name) => [name, model.name])));
  return [
    ["Model", (row) => html`<strong class="name">${row.name}</strong><br /><span class="quiet">${parametersText(row.about)}</span>`],
    ["Abilities", (row) => abilities(row.about)], ["Quality", (row) => qualityText(row.about)],
    ["Memory", (row) => html`${bytes(row.about.memoryBytes)}<br /><span class="quiet">${bytes(row.about.bytes)} on disk</span>`, "number"],
    ["Fits on", (row) => (row.variants.length ? html`<${Names} names=${row.about.fits.map((fit) => fit.mac)} />` : html`<span class="quiet">${row.refusal?.message ?? "no Mac"}</span>`), "wide"],
    ["Speed", (row) => (row.variants.length ? speedText(row.about) : "-"), "figure"],
    ["Licence", (row) => row.about.license, "names"],
    ["Run", (row) => html`<${RunLink} row=${row} deployed=${deployed} />`],
  ];
}

function RunLink({ row, deployed }) {
  const running = row.variants.map((one) => deployed.get(one.repo)).find(Boolean);
  if (running) return html`<${ObjectLink} kind="ModelDeployment" name=${running} />`;
  if (!row.variants.length) return "";
  if (!row.about.isPublished) return html`<span class="quiet">${row.about.bits < 16 ? "quantize" : "convert"} first</span>`;
  return html`<a href=${`/try?repo=${encodeURIComponent(row.about.repo)}`} aria-label=${`Run ${row.name}`}>Run</a>`;
}

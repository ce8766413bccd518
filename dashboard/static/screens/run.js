/** Run a model: the catalogue against the fleet's Macs, and a deployment that is previewed before it is written. */

import { html, useState } from "../vendor/htm-preact.js";
import { bytes, count, number } from "../format.js";
import { getJson, postJson } from "../fleet_store.js";
import { Command, Diff, Filter, ManifestErrors, Names, ObjectLink, Table, useRead } from "../parts.js";
import { usePreview, whyReadOnly } from "../placement.js";
import { FleetPicture, pictureOfForecast } from "../picture.js";

const FIRST_ROWS = 20;
const REPOSITORY = String.raw`\s*[\w.\-]+\/[\w.\-]+\s*`;

/** The catalogue, or the one model of it that the address names. */
export function RunModel({ store, query }) {
  const [catalogue, problem] = useRead(() => getJson("/api/v1/catalogue"));
  const repo = query.get("repo") ?? "";
  const rows = (catalogue?.models ?? []).map(rowOf).sort((a, b) => Number(canRun(b)) - Number(canRun(a)));
  return html`
    ${repo ? html`<p class="trail"><a href="/run">Run a model</a></p><h1>${repo}</h1>` : html`<h1>Run a model</h1>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${repo ? html`<${Preview} key=${repo} store=${store} repo=${repo} row=${rows.find((row) => row.variants.some((one) => one.repo === repo))} />`
      : !catalogue ? !problem && html`<p class="quiet">Comparing the catalogue with your Macs…</p>`
      : html`<${Catalogue} store=${store} rows=${rows} date=${catalogue.date} />`}
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

function show(path) {
  history.pushState(null, "", path);
  dispatchEvent(new PopStateEvent("popstate"));
}

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
    <${AnyRepository} />
    <${Command} text="fleetctl models fit" />`;
}

function AnyRepository() {
  const [repo, setRepo] = useState("");
  const preview = (event) => (event.preventDefault(), show(`/run?repo=${encodeURIComponent(repo.trim())}`));
  return html`<form class="row" onSubmit=${preview}>
    <label>Another repository <input class="long" required pattern=${REPOSITORY} placeholder="ORGANISATION/NAME" value=${repo} onInput=${(event) => setRepo(event.target.value)} /></label>
    <button>Preview</button>
  </form>`;
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
  return html`<a href=${`/run?repo=${encodeURIComponent(row.about.repo)}`} aria-label=${`Run ${row.name}`}>Run</a>`;
}

/** The name of a repository's deployment, as `fleetctl run` chooses it. */
const nameOf = (repo) => repo.split("/").at(-1).toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 100) || "model";
const manifestOf = (repo) => `apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: ${nameOf(repo)}
spec:
  model:
    hub:
      repo: ${repo}
`;

/** What the deployment of a repository would change, where it would run, and the button that writes it. */
function Preview({ store, repo, row }) {
  const manifests = manifestOf(repo);
  const name = nameOf(repo);
  const { answer, problem, waiting, write } = usePreview(() => postJson("/api/v1/whatif", { manifest: manifests }), [], 0);
  const apply = async () => {
    const isDone = await write(() => postJson("/api/v1/apply", { manifests, plan: answer.plan, reason: "run from the catalogue" }));
    if (isDone) show(`/models/${encodeURIComponent(name)}`);
  };
  const variant = row?.variants.find((one) => one.repo === repo);
  const change = answer?.changes.find((one) => one.result !== "unchanged");
  return html`
    ${variant && html`<p>${parametersText(variant)}, ${qualityText(variant)}, ${bytes(variant.bytes)} to download, ${bytes(variant.memoryBytes)} of memory, licence ${variant.license}. ${variant.tokensPerSecond && `At most ${speedText(variant)} on ${variant.fits[0].mac}.`}</p>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!answer && !problem && html`<p class="quiet">Asking the planner…</p>`}
    ${answer?.errors.length > 0 && html`<${ManifestErrors} errors=${answer.errors} />`}
    ${answer && !answer.errors.length && html`
      <p class="sentence" data-plan>${change ? placeText(answer, name) : html`<span>It is deployed as <${ObjectLink} kind="ModelDeployment" name=${name} />.</span>`}</p>
      ${change && html`<p class="actions">${store.mayWrite("admin")
        ? html`<button type="submit" disabled=${waiting} onClick=${apply}>${waiting ? "Writing…" : "Run it"}</button>`
        : html`<span class="quiet">${whyReadOnly(store)} The command does the same:</span>`}</p>`}
      <${Command} text=${`fleetctl run ${repo}`} />
      <h2>${change ? "The Macs then" : "The Macs"}</h2>
      <${FleetPicture} store=${store} picture=${pictureOfForecast(answer, store)} />
      ${change && html`<h2>What is written</h2><${Diff} text=${change.diff} />`}`}
  `;
}

function placeText({ steps, sentence }, deployment) {
  const own = steps.filter((step) => step.deployment === deployment);
  const refused = own.find((step) => step.refusal);
  if (refused) return `It has no place now: ${refused.refusal}`;
  const placed = own.find((step) => step.to.length);
  return placed ? `It would run on ${placed.to.join(", ")}${placed.displaces ? `, in the place of ${placed.displaces.join(", ")}` : ""}.` : sentence;
}

/** What if: other numbers of a model, manifests, Macs that are gone or join, and what the planner would do then. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { bytes, number } from "../format.js";
import { postJson } from "../fleet_store.js";
import { Legend, MacMemory, proofText } from "../memory_bars.js";
import { Announced, Badge, ManifestErrors, ObjectLink, Table } from "../parts.js";

const WAIT_MS = 250;
const MOST_SHOWN = 60;

export function WhatIf({ store, query }) {
  const models = store.rows("models");
  const [model, setModel] = useState(query.get("model") ?? models[0]?.name ?? "");
  const [numbers, setNumbers] = useState(() => given(query));
  const [lost, setLost] = useState(() => query.getAll("lost"));
  const [added, setAdded] = useState({ count: 0, chip: "Apple M4 Max", memory: "64Gi" });
  const [manifests, setManifests] = useState("");
  const [answer, problem, isAsking] = useAnswer({ model, numbers, lost, added, manifests });
  const now = store.row("models", model);
  const macs = store.rows("macs");
  const toggle = (name) => setLost(lost.includes(name) ? lost.filter((one) => one !== name) : [...lost, name]);
  return html`
    <h1>What if</h1>
    <p class="quiet">The fleet's planner simulates this. Nothing is changed.</p>
    <div class="columns">
      <section class="panel" aria-labelledby="numbers">
        <h2 id="numbers">Model settings</h2>
        <label>Model <select value=${model} onChange=${(event) => (setModel(event.target.value), setNumbers({}))}>
          <option value="">none</option>
          ${models.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}
        </select></label>
        ${now && html`<${Sliders} model=${now} numbers=${numbers} onChange=${setNumbers} />`}
      </section>
      <section class="panel" aria-labelledby="macs">
        <h2 id="macs">Macs</h2>
        <fieldset><legend>Removed</legend>
          <div class="checks">${macs.slice(0, MOST_SHOWN).map((mac) => html`<label key=${mac.name} class="check">
            <input type="checkbox" checked=${lost.includes(mac.name)} onChange=${() => toggle(mac.name)} /> ${mac.name}</label>`)}</div>
        </fieldset>
        <fieldset><legend>Added</legend>
          <div class="row">
            <label>Count <input type="number" min="0" max="100" value=${added.count} onInput=${(event) => setAdded({ ...added, count: Number(event.target.value) || 0 })} /></label>
            <label>Chip <input class="long" value=${added.chip} onInput=${(event) => setAdded({ ...added, chip: event.target.value.trim() })} /></label>
            <label>Memory <input value=${added.memory} onInput=${(event) => setAdded({ ...added, memory: event.target.value.trim() })} /></label>
          </div>
        </fieldset>
      </section>
    </div>
    <details><summary>Apply a manifest</summary>
      <label><span class="hidden">Manifest</span>
        <textarea class="code" rows="8" spellcheck=${false} value=${manifests} onInput=${(event) => setManifests(event.target.value)} placeholder="apiVersion: fleet/v1alpha1"></textarea>
      </label>
    </details>
    <section aria-labelledby="answer" aria-busy=${isAsking}>
      <h2 id="answer">Result</h2>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${answer?.errors.length > 0 && html`<${ManifestErrors} errors=${answer.errors} />`}
      ${answer && !answer.errors.length && html`<${Answer} answer=${answer} />`}
    </section>
  `;
}

function given(query) {
  const names = ["replicas", "contextLength", "concurrency", "kvBits"];
  return Object.fromEntries(names.filter((name) => query.has(name)).map((name) => [name, Number(query.get(name))]));
}

/** Sliders in steps that double, because memory grows with their product. */
function Sliders({ model, numbers, onChange }) {
  const set = (name) => (value) => onChange({ ...numbers, [name]: value });
  const context = numbers.contextLength ?? model.contextLength;
  const concurrency = numbers.concurrency ?? model.concurrency;
  const replicas = numbers.replicas ?? model.desired;
  const bits = numbers.kvBits ?? model.kvBits ?? 16;
  return html`
    <${Slider} label="Replicas" min=0 max=${Math.max(8, 2 * model.desired)} value=${replicas} text=${replicas} onInput=${set("replicas")} />
    <${Slider} label="Context" min=9 max=18 value=${Math.log2(context)} text=${`${number(context)} tokens`} onInput=${(value) => set("contextLength")(2 ** value)} />
    <${Slider} label="Concurrency" min=0 max=8 value=${Math.log2(concurrency)} text=${`${concurrency} requests`} onInput=${(value) => set("concurrency")(2 ** value)} />
    <${Slider} label="KV cache" min=2 max=4 value=${Math.log2(bits)} text=${`${bits} bits`} onInput=${(value) => set("kvBits")(2 ** value)} />
    ${Object.keys(numbers).length > 0 && html`<button type="button" class="small" onClick=${() => onChange({})}>Reset</button>`}
  `;
}

function Slider({ label, min, max, value, text, onInput }) {
  return html`<label class="slider">${label}
    <input type="range" min=${min} max=${max} step="1" value=${Math.round(value)} aria-valuetext=${text} onInput=${(event) => onInput(Number(event.target.value))} />
    <output>${text}</output>
  </label>`;
}

function Answer({ answer }) {
  const changed = answer.memory.filter((mac) => mac.replicas.some((one) => one.change));
  const rest = answer.memory.filter((mac) => !changed.includes(mac));
  const shown = [...changed, ...rest].slice(0, MOST_SHOWN);
  const used = (mac) => mac.replicas.filter((one) => one.change !== "goes").reduce((sum, one) => sum + one.bytes, 0);
  const scale = Math.max(1, ...shown.map((mac) => Math.max(mac.allocatableBytes, used(mac))));
  return html`
    <p class="sentence" data-answer>${answer.sentence}</p>
    <${Announced} text=${answer.sentence} />
    <${PlacementSteps} steps=${answer.steps} />
    <h3>Memory by Mac</h3>
    <${Legend} />
    <ul class="memories">${shown.map((mac) => html`<${MacMemory} key=${mac.name} mac=${mac} scale=${scale} />`)}</ul>
    ${answer.memory.length > shown.length && html`<p class="quiet">${answer.memory.length - shown.length} more Macs are unchanged.</p>`}
  `;
}

/** What the planner would do with each replica. */
export function PlacementSteps({ steps }) {
  const rows = steps.map((one) => ({ ...one, name: one.replica + one.change }));
  return html`<${Table} caption="What the planner would do" columns=${STEPS} rows=${rows} empty="No replica moves." />`;
}

const WORDS = { New: "new", Replaced: "replaced", ReplacedInPlace: "replaced in place", Kept: "unchanged", Ends: "ends" };
const macs = (names) => (names.length ? names.map((name, at) => html`${at ? ", " : ""}<${ObjectLink} kind="Node" name=${name} />`) : "-");
/** The word for a step, and why. */
export const stepWord = (one) => (one.refusal ? "unplaced" : WORDS[one.change]);
export const stepReason = (one) => [one.refusal, one.reason, one.waitsFor, one.displaces && `displaces ${one.displaces.join(", ")}`].filter(Boolean).join("; ");
const STEPS = [
  ["Replica", (one) => one.replica, "figure"],
  ["Change", (one) => html`<${Badge} tone=${one.refusal ? "bad" : one.change === "Ends" ? "idle" : "good"}>${stepWord(one)}<//>`],
  ["From", (one) => macs(one.from)],
  ["To", (one) => macs(one.to)],
  ["Memory", (one) => bytes(one.memory?.totalBytes), "number"],
  ["Proof", (one) => (one.memory ? proofText(one.memory) : "-"), "wide"],
  ["Reason", stepReason, "wide"],
];

/** Ask the planner after each change of the question, once it rests. */
function useAnswer({ model, numbers, lost, added, manifests }) {
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState("");
  const [isAsking, setAsking] = useState(true);
  const last = useRef(0);
  const body = {
    lose: lost,
    add: added.count ? [{ name: "new", ...added }] : [],
    manifest: manifests,
    patches: model && Object.keys(numbers).length ? [{ deployment: model, ...numbers }] : [],
  };
  useEffect(() => {
    const mine = ++last.current;
    setAsking(true);
    const timer = setTimeout(async () => {
      try {
        const found = await postJson("/api/v1/whatif", body);
        if (mine !== last.current) return;
        setAnswer(found);
        setProblem("");
      } catch (error) {
        if (mine === last.current) setProblem(error.message);
      }
      if (mine === last.current) setAsking(false);
    }, WAIT_MS);
    return () => clearTimeout(timer);
  }, [JSON.stringify(body)]);
  return [answer, problem, isAsking];
}

/** Try a change: one editor of an object, or of a fleet with other Macs; what the planner would do then; and the write of it. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { getJson, postJson } from "../fleet_store.js";
import { number } from "../format.js";
import { fieldOf, withField } from "../manifest_text.js";
import { Announced, Badge, Command, Diff, ManifestErrors, ObjectLink, Segments, Select } from "../parts.js";
import { FleetPicture, pictureOfForecast } from "../picture.js";
import { PlacementSteps, usePreview, whyReadOnly } from "../placement.js";
import { note } from "../router.js";

const WAIT_MS = 300;
const MOST_SHOWN = 60;
const MAX_CODE = 12_000; // characters of a text in the address
const manifestOf = (name, model) => `apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: ${name}
spec:
  model:
    ${model}
  replicas: 1
`;
const EXAMPLE = manifestOf("my-model", "path: my-model");
/** The name of a repository's deployment, as `fleetctl run` chooses it. */
const nameOf = (repo) => repo.split("/").at(-1).toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 100) || "model";
const manifestOfRepo = (repo) => manifestOf(nameOf(repo), `hub:\n      repo: ${repo}`);
const doubling = { of: Math.log2, value: (at) => 2 ** at };
const plain = { of: (value) => value, value: (at) => at };
/** Sliders: name in the address, title, path in the manifest, column of the view `models`, usual value, range, unit. */
const SLIDERS = [
  ["replicas", "Replicas", ["spec", "replicas"], "desired", 1, { min: 0, max: 8, ...plain }, ""],
  ["contextLength", "Context", ["spec", "contextLength"], "contextLength", 4096, { min: 9, max: 18, ...doubling }, "tokens"],
  ["concurrency", "Concurrency", ["spec", "concurrency"], "concurrency", 4, { min: 0, max: 8, ...doubling }, "requests"],
  ["kvBits", "KV cache", ["spec", "kvCache", "bits"], "kvBits", 16, { min: 2, max: 4, ...doubling }, "bits"],
];
const FULL_BITS = 16;

export function Try({ store, query }) {
  const [subject, setSubject] = useState({ kind: query.get("kind") ?? "", name: query.get("name") ?? "" });
  const [base, setBase] = useState(""); // the object as it is now
  const [text, setText] = useState("");
  const [fields, setFields] = useState(() => Object.fromEntries(SLIDERS.filter(([name]) => query.has(name)).map(([name]) => [name, Number(query.get(name))])));
  const [lost, setLost] = useState(() => query.getAll("lost"));
  const [added, setAdded] = useState({ count: Number(query.get("add")) || 0, chip: query.get("chip") ?? "Apple M4 Max", memory: query.get("memory") ?? "64Gi" });
  const [problem, setProblem] = useState("");
  const [done, setDone] = useState(null);
  const [reason, setReason] = useState("");
  const [isLoaded, setLoaded] = useState(false);
  const editor = useRef(null);
  const question = { manifest: text, lose: lost, add: added.count ? [{ name: "new", ...added }] : [] };
  const isAsked = isLoaded && (text.trim() || lost.length || added.count);
  const forecast = () => (isAsked ? postJson("/api/v1/whatif", question) : null);
  const { answer, problem: failure, ask, write } = usePreview(forecast, [JSON.stringify(question), isLoaded], WAIT_MS);
  const unfit = useAddress({ subject, fields, lost, added, text, isFree: text !== withFields(base, fields) }, isLoaded);

  useEffect(() => {
    let isOver = false;
    const repo = query.get("repo")?.trim();
    const own = isLoaded ? "" : new URLSearchParams(location.hash.slice(1)).get("yaml") || (repo && manifestOfRepo(repo));
    const path = `/api/v1/objects/${encodeURIComponent(subject.kind)}/${encodeURIComponent(subject.name)}?form=manifest`;
    const read = async () => (subject.name ? (await getJson(path)).yaml : "");
    const show = (yaml) => {
      setBase(yaml);
      if (own || yaml) setText(own || withFields(yaml, fields));
      setProblem("");
    };
    read().then((yaml) => isOver || show(yaml), (error) => isOver || setProblem(error.message)).then(() => isOver || setLoaded(true));
    return () => void (isOver = true);
  }, [subject]);

  const begin = (name) => {
    setDone(null);
    setFields({});
    setBase("");
    setText(name ? "" : EXAMPLE);
    setSubject(name ? { kind: "ModelDeployment", name } : { kind: "", name: "" });
  };
  const edit = (value) => (setText(value), setDone(null));
  const slide = (name, path, value) => {
    setFields((now) => ({ ...now, [name]: value }));
    edit(withField(text, path, name === "kvBits" && value === FULL_BITS ? null : value));
  };
  const apply = async () => {
    const outcome = await write(() => postJson("/api/v1/apply", { manifests: text, plan: answer.plan, reason }));
    if (!outcome) return;
    setDone(outcome);
    await ask();
  };
  return html`
    <h1>Try a change</h1>
    ${store.at && html`<p class="warning-text">The planner answers for the fleet as it is now, not as it was.</p>`}
    <div class="columns wide-columns">
      <section class="panel" aria-labelledby="change">
        <div class="section-head"><h2 id="change">Change</h2><${Subjects} models=${store.rows("models")} subject=${subject} onChoose=${begin} /></div>
        <${Sliders} text=${text} model=${store.row("models", fieldOf(text, ["metadata", "name"]))} onSlide=${slide} />
        <${Editor} editor=${editor} text=${text} errors=${answer?.errors ?? []} onInput=${edit} />
        ${unfit && html`<p class="quiet" role="status">${unfit}</p>`}
        <${Macs} macs=${store.rows("macs")} lost=${lost} onLost=${setLost} added=${added} onAdded=${setAdded} />
      </section>
      <section class="panel" aria-labelledby="outcome">
        <h2 id="outcome">What it would do</h2>
        ${(problem || failure) && html`<p class="problem" role="alert">${problem || failure}</p>`}
        ${done && html`<div class="done" role="status" data-done>${done.outcomes.map((one) => html`<p key=${one.kind + one.name}>
          <${Badge} tone="good">${one.result}<//> <${ObjectLink} kind=${one.kind} name=${one.name} /></p>`)}</div>`}
        ${!answer && !problem && !failure && html`<p class="quiet">Choose a model, write a manifest, or take Macs away. The planner answers as you type, and nothing is written before you say so.</p>`}
        ${answer?.errors.length > 0 && html`<${ManifestErrors} errors=${answer.errors} onPick=${(error) => select(editor.current, error)} />`}
        ${answer && !answer.errors.length && html`<${Outcome} store=${store} answer=${answer}>
          <${Write} store=${store} changes=${answer.changes} command=${commandOf(subject, fields, text, base)} reason=${reason} onReason=${setReason} onApply=${apply}
            isSupposed=${lost.length > 0 || added.count > 0} /><//>`}
      </section>
    </div>
  `;
}

function withFields(text, fields) {
  return SLIDERS.filter(([name]) => name in fields).reduce((now, [name, , path]) => withField(now, path, fields[name] === FULL_BITS && name === "kvBits" ? null : fields[name]) ?? now, text);
}

function commandOf({ name }, fields, text, base) {
  const repo = fieldOf(text, ["spec", "model", "hub", "repo"]);
  if (repo && text === manifestOfRepo(repo)) return `fleetctl run ${repo}`;
  const isScale = text === withFields(base, fields) && Object.keys(fields).join() === "replicas";
  return isScale ? `fleetctl scale md/${name} --replicas=${fields.replicas}` : "fleetctl apply -f manifest.yaml";
}

function Subjects({ models, subject, onChoose }) {
  const names = [...new Set([...models.map((model) => model.name), ...(subject.kind === "ModelDeployment" ? [subject.name] : [])])];
  const other = subject.name && subject.kind !== "ModelDeployment" ? [[subject.name, `${subject.kind} ${subject.name}`]] : [];
  return html`<${Select} label="Start from" value=${subject.name} choices=${[...other, ["", "a new model"], ...names]} onChange=${onChoose} />`;
}

/** Sliders of the numbers that decide the memory, in steps that double where memory grows with their product. */
function Sliders({ text, model, onSlide }) {
  if (fieldOf(text, ["kind"]) !== "ModelDeployment") return null;
  const isAutoscaled = /^\s+autoscaling:/m.test(text);
  return SLIDERS.map(([name, title, path, column, usual, { min, max, of, value: valueOf }, unit]) => {
    const written = Number(fieldOf(text, path) ?? Number.NaN);
    const value = Number.isFinite(written) ? written : model?.[column] ?? usual;
    const label = `${number(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}`.trim();
    const isOff = withField(text, path, value) === null || (name === "replicas" && isAutoscaled);
    return html`<label class="slider" key=${name}>${title}
      <input type="range" min=${min} max=${name === "replicas" ? Math.max(max, 2 * (model?.desired ?? 0), value) : max} step="1" disabled=${isOff} title=${isOff ? "Change it in the text" : ""}
        value=${Math.round(of(value))} aria-valuetext=${label} onInput=${(event) => onSlide(name, path, valueOf(Number(event.target.value)))} />
      <output>${label}</output></label>`;
  });
}

function Macs({ macs, lost, onLost, added, onAdded }) {
  const toggle = (name) => onLost(lost.includes(name) ? lost.filter((other) => other !== name) : [...lost, name]);
  const set = (part) => onAdded({ ...added, ...part });
  return html`<details open=${lost.length > 0 || added.count > 0}><summary>With other Macs</summary>
    <fieldset><legend>Gone</legend>
      <div class="checks">${macs.slice(0, MOST_SHOWN).map((mac) => html`<label key=${mac.name} class="check">
        <input type="checkbox" checked=${lost.includes(mac.name)} onChange=${() => toggle(mac.name)} /> ${mac.name}</label>`)}</div>
    </fieldset>
    <fieldset><legend>Added</legend>
      <div class="row">
        <label>Count <input type="number" min="0" max="100" value=${added.count} onInput=${(event) => set({ count: Number(event.target.value) || 0 })} /></label>
        <label>Chip <input class="long" value=${added.chip} onInput=${(event) => set({ chip: event.target.value.trim() })} /></label>
        <label>Memory <input value=${added.memory} onInput=${(event) => set({ memory: event.target.value.trim() })} /></label>
      </div>
    </fieldset>
  </details>`;
}

/** The sentence, the write, the differences, the planner's steps and the picture of the Macs, in this order. */
function Outcome({ store, answer, children }) {
  const [isBefore, setBefore] = useState(false);
  const changes = answer.changes.filter((change) => change.diff || change.keptByOthers.length);
  return html`
    <p class="sentence" data-plan>${answer.sentence}</p>
    <${Announced} text=${answer.sentence} />
    ${children}
    ${changes.map((change) => html`<div key=${change.kind + change.name}>
      <p><strong>${change.kind}/${change.name}</strong> <${Badge} tone="idle">${change.result}<//></p>
      ${change.keptByOthers.map((kept) => html`<p class="warning-text" key=${kept}>${kept}</p>`)}
      <${Diff} text=${change.diff} />
    </div>`)}
    <h3>What the planner would do</h3>
    <${PlacementSteps} steps=${answer.steps} />
    ${answer.steps.length > 0 && html`<div class="section-head"><h3>The Macs</h3>
        <${Segments} label="Moment" value=${isBefore} choices=${[[true, "before"], [false, "after"]]} onChange=${setBefore} /></div>
      <${FleetPicture} store=${store} picture=${pictureOfForecast(isBefore ? withoutChanges(answer) : answer, store)} title="Try a change" />`}
  `;
}

/** Return a forecast as if nothing changed; what waits for a place does so still. */
function withoutChanges({ memory, waiting = [] }) {
  const stay = (mac) => mac.replicas.filter((replica) => replica.change !== "comes").map((replica) => ({ ...replica, change: "" }));
  return { memory: memory.map((mac) => ({ ...mac, replicas: stay(mac) })), steps: [], waiting };
}

/** The button that applies the objects, or why there is none, and the command. */
function Write({ store, changes, command, reason, onReason, onApply, isSupposed }) {
  if (!changes.some((change) => change.diff)) return changes.length > 0 && html`<p><${Badge} tone="good">no object would change<//></p>`;
  return html`${store.mayWrite("admin")
      ? html`<p class="row"><label>Reason <input class="long" maxlength="500" value=${reason} placeholder="for the record" onInput=${(event) => onReason(event.target.value)} /></label>
        <button type="submit" onClick=${onApply}>Apply these changes</button>
        ${isSupposed && html`<span class="quiet">The objects are written; the Macs stay as they are.</span>`}</p>`
      : html`<p class="quiet">${whyReadOnly(store)} The command does the same:</p>`}
    <${Command} text=${command} />`;
}

/** A text area with line numbers; lines with errors are marked. */
function Editor({ editor, text, errors, onInput }) {
  const numbers = useRef(null);
  const wrong = new Set(errors.map((error) => error.line));
  const lines = text.split("\n").length;
  const onScroll = (event) => (numbers.current.scrollTop = event.target.scrollTop);
  const onKey = (event) => {
    if (event.key !== "Tab" || event.shiftKey || event.target.selectionStart === 0) return; // a way out for the keyboard
    event.preventDefault();
    event.target.setRangeText("  ", event.target.selectionStart, event.target.selectionEnd, "end");
    onInput(event.target.value);
  };
  return html`<div class="editor">
    <pre class="line-numbers" ref=${numbers} aria-hidden="true">${Array.from({ length: lines }, (_, at) => html`<span key=${at} class=${wrong.has(at + 1) ? "wrong" : ""}>${at + 1}</span>`)}</pre>
    <label><span class="hidden">Manifest, YAML</span>
      <textarea class="code" ref=${editor} rows="18" wrap="off" spellcheck=${false} autocapitalize="off" value=${text} aria-invalid=${errors.length > 0}
        onInput=${(event) => onInput(event.target.value)} onScroll=${onScroll} onKeyDown=${onKey}></textarea>
    </label>
  </div>`;
}

function select(area, { line, column }) {
  const before = area.value.split("\n").slice(0, line - 1);
  const at = before.reduce((sum, text) => sum + text.length + 1, 0) + Math.max(0, column - 1);
  area.focus();
  area.setSelectionRange(at, at);
}

/** Keep the change in the address, so that a link and a reload lead to it; returns what does not fit there. */
function useAddress({ subject, fields, lost, added, text, isFree }, isLoaded) {
  const { count, chip, memory } = added;
  const code = isFree && text.trim() ? `#${new URLSearchParams({ yaml: text })}` : "";
  const fits = code.length <= MAX_CODE;
  useEffect(() => {
    if (!isLoaded) return undefined;
    const numbers = Object.fromEntries(SLIDERS.map(([name]) => [name, isFree ? "" : String(fields[name] ?? "")]));
    const values = { ...subject, repo: "", lost, add: count, chip: count && chip, memory: count && memory, ...numbers };
    const timer = setTimeout(() => note(values, fits ? code : ""), WAIT_MS);
    return () => clearTimeout(timer);
  }, [JSON.stringify([subject, fields, lost, added, code]), isLoaded]);
  return fits ? "" : "The text is too long for the address: a link or a reload leads to this page without it.";
}

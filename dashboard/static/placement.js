/** Where replicas go: what the planner would do with each, the memory that one needs as a bar, and why a replica is pending. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { bytes } from "./format.js";
import { Badge, Command, Names, Table, Text, tryPath, useRead } from "./parts.js";

/** Parts of a memory proof: [field, word, class]. */
const PARTS = [
  ["weightsBytes", "weights", "weights"],
  ["kvCacheBytes", "KV cache", "kv"],
  ["activationBytes", "prefill", "prefill"],
  ["overheadBytes", "process", "process"],
  ["prefixCacheBytes", "prefix cache", "prefix"],
  ["adapterBytes", "adapter", "adapter"],
  ["draftBytes", "draft model", "draft"],
];

/** @returns {Array<[string, string, number]>} [word, class, bytes] of each part that is there */
function partsOf(proof) {
  if (proof.overrideBytes) return [["spec.resources.memory", "process", proof.overrideBytes]];
  return PARTS.map(([field, word, kind]) => [word, kind, proof[field] ?? 0]).filter(([, , size]) => size > 0);
}

const proofText = (proof) => partsOf(proof).map(([word, , size]) => `${word} ${bytes(size)}`).join(", ");

function Legend() {
  return html`<ul class="legend" aria-hidden="true">
    ${[...PARTS, ["", "free", "free"]].map(([, word, kind]) => html`<li key=${kind}><span class=${`swatch ${kind}`}></span>${word}</li>`)}
  </ul>`;
}

/**
 * One bar. `segments`: [label, class, bytes]; `room`: what the Mac has for models; `scale`: the longest bar.
 * What exceeds the room is drawn beyond its end.
 */
function StackedBar({ segments, room, scale, label }) {
  const used = segments.reduce((sum, [, , size]) => sum + size, 0);
  const width = (size) => ({ width: `${(100 * size) / scale}%` });
  return html`<div class="stack" role="img" aria-label=${label}>
    <span class="room" style=${width(room)}></span>
    ${segments.map(([word, kind, size], at) => html`<span key=${at} class=${`part ${kind}`} style=${width(size)} title=${`${word}: ${bytes(size)}`}></span>`)}
    ${room > used && html`<span class="part free" style=${width(room - used)} title=${`free: ${bytes(room - used)}`}></span>`}
    ${used > room && html`<span class="limit" style=${{ left: `${(100 * room) / scale}%` }}></span>`}
  </div>`;
}

/** Why this session applies no manifest. */
export function whyReadOnly(store) {
  if (store.at) return "The past does not change.";
  return store.may("admin") ? "This dashboard was started without --allow-writes." : `Your role is ${store.me.role}; this needs the role admin.`;
}

const PLANNER = "the planner's forecast";
const MOST_SHOWN = 40;
const WORDS = { New: "new", Replaced: "replaced", ReplacedInPlace: "replaced in place", Kept: "unchanged", Ends: "ends" };

export function PlacementSteps({ steps }) {
  if (!steps.length) return html`<p class="quiet">No replica moves.</p>`;
  return html`<ul class="plan-steps">
    ${steps.slice(0, MOST_SHOWN).map((step) => html`<li key=${step.replica + step.change} data-step=${step.replica}>
      <strong>${step.replica}</strong> <${Badge} tone=${step.refusal ? "bad" : step.change === "Ends" ? "idle" : "good"}>${step.refusal ? "unplaced" : WORDS[step.change]}<//>
      ${placesOf(step).map(([word, names]) => names.length > 0 && html`${" "}${word} <${Names} kind="Node" names=${names} />`)}
      ${step.memory && html`${" "}<span class="quiet" title=${proofText(step.memory)}>${bytes(step.memory.totalBytes)}</span>`}
      ${reasonOf(step) && html`<span class="quiet"> ${reasonOf(step)}</span>`}
    </li>`)}
    ${steps.length > MOST_SHOWN && html`<li class="quiet">and ${steps.length - MOST_SHOWN} more</li>`}
  </ul>`;
}

/** Words and Macs: where a replica moves, is or was. */
const placesOf = ({ from, to, refusal }) => (from.length && to.length && `${from}` !== `${to}` ? [["from", from], ["to", to]] : [[refusal ? "from" : "on", to.length ? to : from]]);
const reasonOf = (step) => [step.refusal, step.reason, step.waitsFor, step.displaces && `displaces ${step.displaces.join(", ")}`].filter(Boolean).join("; ");

/**
 * What a change would do. `read` asks for it, again after each change of `keys` once they rest. Returns the newest answer,
 * its problem, for what it waits, and two functions: `ask` asks anew; `write` carries a change out and returns its answer,
 * or asks anew if anything has changed since (409).
 */
export function usePreview(read, keys, restMs) {
  const [state, setState] = useState({ answer: null, problem: "", waiting: PLANNER });
  const last = useRef(0);
  const ask = async (why = "") => {
    const mine = ++last.current;
    setState((now) => ({ ...now, waiting: PLANNER }));
    const next = await Promise.resolve().then(read).then((answer) => ({ answer, problem: why }), (error) => ({ answer: null, problem: error.message }));
    if (mine === last.current) setState({ ...next, waiting: "" });
  };
  useEffect(() => {
    const timer = setTimeout(ask, last.current ? restMs : 0);
    return () => clearTimeout(timer);
  }, keys);
  const write = async (send) => {
    setState((now) => ({ ...now, problem: "", waiting: "the control plane to take it" }));
    try {
      return await send();
    } catch (error) {
      if (error.status === 409) await ask(error.message);
      else setState((now) => ({ ...now, problem: error.message, waiting: "" }));
      return null;
    }
  };
  return { ...state, ask, write };
}

// Reasons whose amounts are not bytes, as fleetctl prints them.
const COUNTS = ["TooFewGpuCores", "ContextTooLong", "ReplicaLimit"];

export function WhyPending({ name, revision }) {
  const [report, problem] = useRead(() => getJson(`/api/v1/explain/deployment/${encodeURIComponent(name)}`), [name, revision]);
  if (problem) return html`<p class="problem" role="alert">${problem}</p>`;
  if (!report) return html`<p class="quiet">Asking the planner…</p>`;
  const rows = report.nodes.map((one) => ({ ...one, name: one.node, memory: one.memory ?? report.proofs[one.node] }));
  const scale = Math.max(1, ...rows.map((one) => Math.max(one.roomBytes, one.memory?.totalBytes ?? 0)));
  return html`
    <p data-why>${report.placed} of ${report.desired} replicas are placed; for one more, ${report.summary}</p>
    ${report.remedies.length > 0 && html`<h3>What would help</h3>
      <ul class="remedies">${report.remedies.map((one) => html`<li key=${one.text}>
        <a href=${tryPath("ModelDeployment", name, { ...one.patch, kvCache: undefined, kvBits: one.patch.kvCache?.bits })}><${Text} text=${one.text} /></a>
        ${one.memory && html`<span class="quiet"> ${bytes(one.memory.totalBytes)}: ${proofText(one.memory)}</span>`}
      </li>`)}</ul>`}
    <h3>Each Mac</h3>
    <${Legend} />
    <${Table} caption="Macs, and why each does or does not fit" columns=${columns(scale)} rows=${rows} empty="There is no Mac." />
    <details><summary>As fleetctl prints it</summary><pre tabindex="0" data-report>${report.text}</pre></details>
    <${Command} text=${`fleetctl explain placement ${name}`} />
  `;
}

function columns(scale) {
  return [
    ["Mac", "node", "Node"],
    ["Fits", (one) => html`<${Badge} tone=${one.fits ? "good" : "bad"}>${one.fits ? `score ${one.score.toFixed(1)}` : one.refusal.reason}<//>`],
    ["Need", (one) => amount(one, "need"), "number"],
    ["Has", (one) => amount(one, "have"), "number"],
    ["Memory", (one) => html`<${Proof} one=${one} scale=${scale} />`, "wide"],
    ["Reason", (one) => (one.fits ? scores(one) : one.refusal.message), "wide"],
  ];
}

function amount({ fits, memory, roomBytes, refusal }, side) {
  if (fits) return bytes(side === "need" ? memory?.totalBytes : Math.max(0, roomBytes));
  if (!refusal.need && !refusal.have) return "-";
  return refusal.need > 0 && !COUNTS.includes(refusal.reason) ? bytes(Math.max(0, refusal[side])) : String(refusal[side]);
}

const scores = (one) => one.parts.map((part) => `${part.name} ${Math.round(part.score)}×${part.weight}`).join(", ");

/** What a replica needs, drawn against the room that a Mac has. */
function Proof({ one, scale }) {
  const room = Math.max(0, one.roomBytes);
  if (!one.memory) return html`<span class="quiet">${bytes(room)} free</span>`;
  const label = `needs ${bytes(one.memory.totalBytes)} (${proofText(one.memory)}), has ${bytes(room)}`;
  return html`<${StackedBar} segments=${partsOf(one.memory)} room=${room} scale=${scale} label=${label} />`;
}

/** Where replicas go: what the planner would do with each, and the memory that one needs, part by part, as a bar. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { bytes } from "./format.js";
import { Badge, Names } from "./parts.js";

/** Parts of a memory proof: [field, word, class]. */
export const PARTS = [
  ["weightsBytes", "weights", "weights"],
  ["kvCacheBytes", "KV cache", "kv"],
  ["activationBytes", "prefill", "prefill"],
  ["overheadBytes", "process", "process"],
  ["prefixCacheBytes", "prefix cache", "prefix"],
  ["adapterBytes", "adapter", "adapter"],
  ["draftBytes", "draft model", "draft"],
];

/** @returns {Array<[string, string, number]>} [word, class, bytes] of each part that is there */
export function partsOf(proof) {
  if (proof.overrideBytes) return [["spec.resources.memory", "process", proof.overrideBytes]];
  return PARTS.map(([field, word, kind]) => [word, kind, proof[field] ?? 0]).filter(([, , size]) => size > 0);
}

/** @returns {string} the proof as a sentence */
export function proofText(proof) {
  return partsOf(proof).map(([word, , size]) => `${word} ${bytes(size)}`).join(", ");
}

export function Legend({ extra = [] }) {
  const shown = [...PARTS.map(([, word, kind]) => [word, kind]), ...extra, ["free", "free"]];
  return html`<ul class="legend" aria-hidden="true">
    ${shown.map(([word, kind]) => html`<li key=${kind}><span class=${`swatch ${kind}`}></span>${word}</li>`)}
  </ul>`;
}

/**
 * One bar. `segments`: [label, class, bytes]; `room`: what the Mac has for models; `scale`: the longest bar.
 * What exceeds the room is drawn beyond its end.
 */
export function StackedBar({ segments, room, scale, label }) {
  const used = segments.reduce((sum, [, , size]) => sum + size, 0);
  const width = (size) => ({ width: `${(100 * size) / scale}%` });
  return html`<div class="stack" role="img" aria-label=${label}>
    <span class="room" style=${width(room)}></span>
    ${segments.map(
      ([word, kind, size], at) => html`<span key=${at} class=${`part ${kind}`} style=${width(size)} title=${`${word}: ${bytes(size)}`}></span>`,
    )}
    ${room > used && html`<span class="part free" style=${width(room - used)} title=${`free: ${bytes(room - used)}`}></span>`}
    ${used > room && html`<span class="limit" style=${{ left: `${(100 * room) / scale}%` }}></span>`}
  </div>`;
}

const PLANNER = "the planner's forecast";
const MOST_SHOWN = 40;
const WORDS = { New: "new", Replaced: "replaced", ReplacedInPlace: "replaced in place", Kept: "unchanged", Ends: "ends" };

export function PlacementSteps({ steps }) {
  if (!steps.length) return html`<p class="quiet">No replica moves.</p>`;
  return html`<ul class="plan-steps">
    ${steps.slice(0, MOST_SHOWN).map((step) => html`<li key=${step.replica + step.change} data-step=${step.replica}>
      <strong>${step.replica}</strong> <${Badge} tone=${step.refusal ? "bad" : step.change === "Ends" ? "idle" : "good"}>${step.refusal ? "unplaced" : WORDS[step.change]}<//>
      ${step.from.length > 0 && html`${" "}from <${Names} kind="Node" names=${step.from} />`}${step.to.length > 0 && html`${" "}on <${Names} kind="Node" names=${step.to} />`}
      ${step.memory && html`${" "}<span class="quiet" title=${proofText(step.memory)}>${bytes(step.memory.totalBytes)}</span>`}
      ${reasonOf(step) && html`<span class="quiet"> ${reasonOf(step)}</span>`}
    </li>`)}
    ${steps.length > MOST_SHOWN && html`<li class="quiet">and ${steps.length - MOST_SHOWN} more</li>`}
  </ul>`;
}

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

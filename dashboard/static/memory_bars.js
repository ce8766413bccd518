/** The memory of Macs as stacked bars: what each replica needs, part by part, against what the Mac has for models. */

import { html } from "./vendor/htm-preact.js";
import { bytes } from "./format.js";

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

/** The bar of time: any moment that is recorded, on every screen that shows objects. The moment is in the address. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";
import { moment } from "./format.js";
import { Segments, useListener, useRead, useRested } from "./parts.js";
import { note } from "./router.js";

const RANGES = [[900, "15 min"], [3600, "1 h"], [86_400, "24 h"]];
const STEPS = 900; // positions of the slider
const WAIT_MS = 200;

export function TimeBar({ store, onClose }) {
  const [base] = useState(() => Date.now());
  const [seconds, setSeconds] = useState(() => (store.at ? (Date.parse(store.at) - base) / 1000 : 0));
  const [range, setRange] = useState(() => (RANGES.find(([length]) => -seconds <= length) ?? RANGES[2])[0]);
  const [record, problem] = useRead(() => getJson("/api/v1/history?from=24h"));
  const known = record?.known ?? [];
  const begin = known.length ? (Date.parse(known[0][0]) - base) / 1000 : -86_400;
  const first = Math.max(-range, begin);
  const rested = useRested(seconds, WAIT_MS);
  useEffect(() => {
    const at = rested ? new Date(base + rested * 1000).toISOString() : "";
    if (at === store.at) return;
    note({ at });
    store.goTo(at);
  }, [rested]);
  const show = (wanted) => setSeconds(Math.max(begin, Math.min(0, wanted)));
  const step = range / STEPS;
  useListener("keydown", (event) => {
    const steps = { "[": -STEPS / 15, "]": STEPS / 15 }[event.key];
    if (steps && !event.target.closest("input:not([type=range]), textarea, select")) show(seconds + steps * step);
  });
  const text = seconds ? moment(new Date(base + seconds * 1000)) : "now";
  const place = (iso) => 100 * Math.max(0, Math.min(1, 1 - (base - Date.parse(iso)) / (-first * 1000)));
  return html`<section class="time-bar" aria-label="Time">
    <label><span class="hidden">Moment</span>
      <input type="range" min=${first} max="0" step=${step} value=${seconds} aria-valuetext=${text} onInput=${(event) => show(Number(event.target.value))} />
    </label>
    <div class="known" aria-hidden="true">${known.map(([from, to]) => html`<span key=${from} style=${{ left: `${place(from)}%`, width: `${Math.max(0.3, place(to) - place(from))}%` }}></span>`)}</div>
    <p><output data-moment>${text}</output>
      <${Segments} label="Range" value=${range} choices=${RANGES} onChange=${setRange} />
      ${problem && html`<span class="problem" role="status">${problem}</span>`}
      <span class="quiet">${seconds ? "Objects are as they were then; actions are off." : known.length ? `Recorded since ${moment(known[0][0])}. Drag, or press [ and ].` : "Drag, or press [ and ]."}</span>
      <button type="button" class="small" onClick=${() => setSeconds(0)} disabled=${!seconds}>Now</button>
      <button type="button" class="small" onClick=${onClose}>Close</button></p>
  </section>`;
}

/** The bar of time: any moment of the last 24 hours, on every screen that shows objects. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { getJson } from "./fleet_store.js";

const DAY_S = 24 * 3600;
const STEP_S = 5;
const KEY_S = 300;
const WAIT_MS = 200;

export function TimeBar({ store, onClose }) {
  const [seconds, setSeconds] = useState(0);
  const [known, setKnown] = useState([]);
  const [problem, setProblem] = useState("");
  const [base] = useState(() => Date.now());
  useEffect(() => {
    getJson("/api/v1/history?from=24h").then((found) => setKnown(found.known), (error) => setProblem(error.message));
    return () => store.goTo(null);
  }, []);
  useEffect(() => {
    const timer = setTimeout(() => store.goTo(seconds ? new Date(base + seconds * 1000).toISOString() : null), WAIT_MS);
    return () => clearTimeout(timer);
  }, [seconds]);
  const move = (event) => {
    const step = { "[": -KEY_S, "]": KEY_S }[event.key];
    if (!step || event.target.closest("input, textarea, select")) return;
    setSeconds((now) => Math.max(-DAY_S, Math.min(0, now + step)));
  };
  useEffect(() => {
    document.addEventListener("keydown", move);
    return () => document.removeEventListener("keydown", move);
  }, []);
  const moment = new Date(base + seconds * 1000);
  const text = seconds ? moment.toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "now";
  const place = (iso) => 100 * Math.max(0, Math.min(1, 1 - (base - Date.parse(iso)) / (DAY_S * 1000)));
  return html`<section class="time-bar" aria-label="Time">
    <label><span class="hidden">Moment</span>
      <input type="range" min=${-DAY_S} max="0" step=${STEP_S} value=${seconds} aria-valuetext=${text} onInput=${(event) => setSeconds(Number(event.target.value))} />
    </label>
    <div class="known" aria-hidden="true">${known.map(([from, to]) => html`<span key=${from} style=${{ left: `${place(from)}%`, width: `${Math.max(0.3, place(to) - place(from))}%` }}></span>`)}</div>
    <p><output title=${moment.toISOString()} data-moment>${text}</output>
      ${store.problem && store.at ? html`<span class="problem" role="status">${store.problem}</span>` : ""}
      ${problem && html`<span class="problem" role="status">${problem}</span>`}
      <span class="quiet">${seconds ? "Objects are as they were then; actions are off." : "Drag, or press [ and ]."}</span>
      <button type="button" class="small" onClick=${() => setSeconds(0)} disabled=${!seconds}>Now</button>
      <button type="button" class="small" onClick=${onClose}>Close</button></p>
  </section>`;
}

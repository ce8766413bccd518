/** The command line: any screen, any object, any action on one, found by a few of its letters. */

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact.js";
import { VERBS } from "./actions.js";
import { getJson } from "./fleet_store.js";

const MOST_SHOWN = 12;
const OBJECTS = [
  ["macs", "Mac", "isCordoned,isDraining,taints"],
  ["models", "model", "isAutoscaled,isPaused,hasCanary,canUndo,placed,desired"],
  ["groups", "group", "size"],
  ["replicas", "replica", "isReady"],
];
const QUERY = OBJECTS.map(([view, , columns]) => `view=${view}:${columns}`).join("&");

/** `actions`: functions of the page by their name. */
export function CommandLine({ store, screens, actions, go, onClose }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const [objects, setObjects] = useState([]);
  useEffect(() => {
    if (store.may("viewer")) getJson(`/api/v1/snapshot?${QUERY}`).then(({ views }) => setObjects(entriesOf(views, store)), () => {});
  }, []);
  const all = useMemo(() => [
    ...screens.map(([path, title]) => ({ text: title, note: "screen", path })),
    ...Object.entries(actions).map(([title, act]) => ({ text: title, note: "page", act })),
    ...objects,
  ], [objects]);
  const found = useMemo(() => search(all, text), [all, text]);
  const chosen = found[Math.min(at, found.length - 1)];
  const open = (entry) => {
    onClose();
    if (entry?.act) entry.act();
    else if (entry) go(entry.path);
  };
  const onKey = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) setAt((now) => (Math.min(now, found.length - 1) + step + found.length) % Math.max(1, found.length));
    else if (event.key === "Enter") open(chosen);
    else return;
    event.preventDefault();
  };
  const show = (dialog) => dialog && !dialog.open && dialog.showModal();
  return html`<dialog class="palette" ref=${show} onClose=${onClose} aria-label="Command line">
    <input role="combobox" aria-expanded="true" aria-controls="found" aria-activedescendant=${chosen ? `found-${found.indexOf(chosen)}` : undefined} aria-label="Command"
      placeholder="A screen, an object, or an action such as: drain mac-1" value=${text} autocomplete="off" spellcheck="false"
      onInput=${(event) => (setText(event.target.value), setAt(0))} onKeyDown=${onKey} />
    <ul id="found" role="listbox" aria-label="Found">
      ${found.map((one, number) => html`<li key=${`${one.text} ${one.path ?? ""}`} id=${`found-${number}`} role="option" aria-selected=${one === chosen} onClick=${() => open(one)}><span>${one.text}</span><span class="quiet">${one.note}</span></li>`)}
    </ul>
    ${!found.length && html`<p class="quiet" role="status">Nothing matches.</p>`}
  </dialog>`;
}

function entriesOf(views, store) {
  return OBJECTS.flatMap(([view, note]) =>
    views[view].flatMap((row) => {
      const path = `/${view}/${encodeURIComponent(row.name)}`;
      const verbs = store.may("operator") && !store.at ? (VERBS[view]?.(row) ?? []) : [];
      return [
        { text: row.name, note, path },
        ...(row.placed < row.desired ? [{ text: `why ${row.name}`, note: "why it is pending", path: `${path}?why` }] : []),
        ...verbs.filter((verb) => verb !== "delete" || store.may("admin")).map((verb) => ({ text: `${verb} ${row.name}`, note: "action", path: `${path}?do=${verb}` })),
      ];
    }),
  );
}

/** Return the entries that have all letters of a text in order, the closest first. */
export function search(entries, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return entries.slice(0, MOST_SHOWN);
  const scored = [];
  for (const entry of entries) {
    const score = distance(entry.text.toLowerCase(), wanted);
    if (score !== null) scored.push([score, entry]);
  }
  return scored.sort((a, b) => a[0] - b[0]).slice(0, MOST_SHOWN).map(([, entry]) => entry);
}

/** Return how far apart the wanted letters are in a text; null if it does not have them in this order. */
function distance(text, wanted) {
  const whole = text.indexOf(wanted);
  if (whole >= 0) return whole + (text.length - wanted.length) / 100;
  let at = -1;
  let gaps = 0;
  for (const letter of wanted) {
    const next = text.indexOf(letter, at + 1);
    if (next < 0) return null;
    gaps += next - at - 1;
    at = next;
  }
  return 100 + gaps;
}

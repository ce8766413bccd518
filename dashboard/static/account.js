/** The menu in the corner: who is logged in, the settings, the theme, and the way out. On a phone also what has no room at the bottom. */

import { html, useState } from "./vendor/htm-preact.js";

const THEMES = ["auto", "light", "dark"];
/** What each role may do besides what those before it may. */
const RIGHTS = {
  user: "chat with models, see its own key and its use",
  viewer: "see models, Macs, requests and changes, and try a change",
  operator: "read logs, cordon and drain Macs, scale and roll out models, cancel requests",
  admin: "apply manifests, delete models, see all keys",
};

/** What the key of this session may do and may not, and who can change that. */
export function Rights({ store }) {
  const { name, role } = store.me;
  const rights = (isHeld) => html`<ul>${Object.entries(RIGHTS).filter(([needed]) => store.may(needed) === isHeld).map(([needed, text]) => html`<li key=${needed}>${text}${!isHeld && html` <span class="quiet">(role ${needed})</span>`}</li>`)}</ul>`;
  return html`<section aria-labelledby="rights"><h2 id="rights">What you may do</h2>
    <dl>
      <dt>${name ? html`The key <b>${name}</b>` : "This session"}, role ${role}, may</dt><dd>${rights(true)}</dd>
      ${role !== "admin" && html`<dt>It may not</dt><dd>${rights(false)}</dd>`}
    </dl>
    ${role !== "admin" && html`<p class="quiet">A key keeps its role. An administrator makes another key: <code>fleetctl create apikey NAME --role viewer</code></p>`}
  </section>`;
}

export function AccountMenu({ store, places, onHelp, onSearch, onTime }) {
  const [theme, setShown] = useState(savedTheme);
  const close = () => document.getElementById("account")?.hidePopover();
  const then = (act) => () => (close(), act());
  const choose = (one) => (setTheme(one), setShown(one));
  const { name, role, needsLogin, canWrite } = store.me;
  return html`<div id="account" popover="auto" class="account" onClick=${(event) => event.target.closest("a") && close()}>
    <p><b>${name || "this machine"}</b> <span class="quiet">role ${role}${canWrite ? "" : ", looks only"}</span></p>
    <ul class="phone-only">${places.map(([path, title]) => html`<li key=${path}><a href=${path}>${title}</a></li>`)}</ul>
    <ul>
      <li class="phone-only"><button type="button" onClick=${then(onSearch)}>Find anything</button></li>
      ${store.may("viewer") && html`<li class="phone-only"><button type="button" onClick=${then(onTime)}>Time</button></li>`}
      ${store.may("viewer") && html`<li><a href="/try">Try a change</a></li>`}
      <li><a href="/settings">Keys and people</a></li>
      ${store.may("viewer") && html`<li><a href="/settings?tab=fleet">Versions and processes</a></li>`}
      <li><button type="button" onClick=${then(onHelp)}>Keyboard</button></li>
    </ul>
    <fieldset class="themes"><legend>Theme</legend>${THEMES.map((one) => html`<label key=${one}><input type="radio" name="theme" checked=${theme === one} onChange=${() => choose(one)} /> ${one}</label>`)}</fieldset>
    ${needsLogin && html`<button type="button" onClick=${then(() => store.logOut())}>Log out</button>`}
  </div>`;
}

export function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(savedTheme()) + 1) % THEMES.length]);
}

export function savedTheme() {
  return localStorage.getItem("theme") ?? "auto";
}

export function setTheme(theme) {
  localStorage.setItem("theme", theme);
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

/** Who is logged in: the login and why a session has ended, the menu in the corner, the theme, and what a role may do. */

import { html, useState } from "./vendor/htm-preact.js";
import { postJson } from "./fleet_store.js";

const LOGIN_LINK = /^#login=([\w.-]{1,300})$/;
let linkProblem = ""; // why the login link in the address did not work

export function Login({ store }) {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState(linkProblem || store.endReason);
  const send = async (event) => {
    event.preventDefault();
    try {
      await postJson("/login", { key });
      setKey("");
      store.connect();
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<main id="main" class="login">
    <h1>mlx-fleet</h1>
    <p>Log in with an API key.</p>
    <form onSubmit=${send}>
      <label>API key
        <input type="password" autocomplete="current-password" required value=${key} onInput=${(event) => setKey(event.target.value)} />
      </label>
      <button type="submit">Log in</button>
    </form>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="quiet">An administrator makes one: <code>fleetctl create apikey NAME --role viewer</code>, or opens this page
      logged in: <code>fleetctl dashboard</code></p>
  </main>`;
}

/** Log in by the link of `fleetctl dashboard`; returns whether the address is one. It works once, and leaves the address. */
export async function followLoginLink() {
  const link = LOGIN_LINK.exec(location.hash);
  if (!link) return false;
  history.replaceState(null, "", location.pathname + location.search);
  linkProblem = "";
  try {
    await postJson("/login", { ticket: link[1] });
  } catch (error) {
    linkProblem = error.message;
  }
  return true;
}

const THEMES = ["auto", "light", "dark"];
/** What each role may do besides what those before it may. */
const RIGHTS = {
  user: "chat with models, see its own key and its use",
  viewer: "see models, Macs, requests and changes, and try a change",
  operator: "read logs, cordon and drain Macs, scale and roll out models, cancel requests",
  admin: "apply manifests, delete models, see all keys",
};

export function Rights({ store }) {
  const { name, role } = store.me;
  const right = ([needed, text]) => html`<li key=${needed}>${text}${!store.may(needed) && html` <span class="quiet">(role ${needed})</span>`}</li>`;
  const rights = (isHeld) => html`<ul>${Object.entries(RIGHTS).filter(([needed]) => store.may(needed) === isHeld).map(right)}</ul>`;
  return html`<section aria-labelledby="rights"><h2 id="rights">What you may do</h2>
    <dl>
      <dt>${name ? html`The key <b>${name}</b>` : "This session"}, role ${role}, may</dt><dd>${rights(true)}</dd>
      ${role !== "admin" && html`<dt>It may not</dt><dd>${rights(false)}</dd>`}
    </dl>
    ${role !== "admin" && html`<p class="quiet">A key keeps its role. An administrator makes another key:
      <code>fleetctl create apikey NAME --role viewer</code></p>`}
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

export const savedTheme = () => localStorage.getItem("theme") ?? "auto";

export function setTheme(theme) {
  localStorage.setItem("theme", theme);
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

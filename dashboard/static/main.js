/** The page: which screen a path shows, the frame around it, the keyboard, and the login. */

import { html, render, useEffect, useErrorBoundary, useReducer, useState } from "./vendor/htm-preact.js";
import { FleetStore, postJson } from "./fleet_store.js";
import { hasSingleKeys, keyboard, KEYS, setSingleKeys } from "./keyboard.js";
import { Announced, lazy, useStore } from "./parts.js";
import { boot, selectionsOf } from "./selections.js";
import { AddMac } from "./screens/add.js";
import { EventList } from "./screens/events.js";
import { Fleet, fleetTitle } from "./screens/fleet.js";
import { Mac, Macs } from "./screens/macs.js";
import { Model, Models } from "./screens/models.js";
import { Replica } from "./screens/object.js";

const SCREENS = {
  "": Fleet,
  macs: Macs,
  models: Models,
  groups: lazy(() => import("./screens/groups.js"), "Groups"),
  requests: lazy(() => import("./screens/requests.js"), "Requests"),
  chat: lazy(() => import("./screens/chat.js"), "Chat"),
  events: EventList,
  add: AddMac,
  map: (props) => html`<${Macs} ...${props} isPicture />`,
  logs: lazy(() => import("./screens/logs.js"), "Logs"),
  keys: lazy(() => import("./screens/keys.js"), "Keys"),
  changes: lazy(() => import("./screens/changes.js"), "Changes"),
  git: lazy(() => import("./screens/git.js"), "Git"),
  try: lazy(() => import("./screens/try.js"), "Try"),
};
const DETAILS = { git: lazy(() => import("./screens/git.js"), "Git"), macs: Mac, models: Model, groups: lazy(() => import("./screens/groups.js"), "Group"), replicas: Replica };
/** Screens that show nothing without the state of the fleet. */
const NEEDS_STATE = new Set(["", "map", "macs", "models", "groups", "replicas", "events", "try", "git", "changes"]);
const CommandLine = lazy(() => import("./command_line.js"), "CommandLine");
const TimeBar = lazy(() => import("./time_bar.js"), "TimeBar");
/** Path, title, key after `g`, and the role that it needs. */
const MENU = [
  ["/", "Fleet", "f", "viewer"],
  ["/map", "Map", "p", "viewer"],
  ["/macs", "Macs", "m", "viewer"],
  ["/models", "Models", "d", "viewer"],
  ["/groups", "Groups", "r", "viewer"],
  ["/requests", "Requests", "q", "viewer"],
  ["/chat", "Chat", "c", "user"],
  ["/try", "Try a change", "a", "viewer"],
  ["/git", "Git", "i", "viewer"],
  ["/events", "Events", "e", "viewer"],
  ["/changes", "Changes", "h", "viewer"],
  ["/logs", "Logs", "l", "operator"],
  ["/keys", "Keys", "k", "user"],
];
const THEMES = ["auto", "light", "dark"];
const OLD_MS = 10_000;
const SILENT_S = 2;
/** Whether the page came over the network without encryption. */
const IS_OPEN_TEXT = location.protocol === "http:" && !/^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(location.hostname);
const LOGIN_LINK = /^#login=([\w.-]{1,300})$/;

const store = new FleetStore();
let visit = 0; // counts the screens that were shown: each begins anew
let linkProblem = ""; // why the login link in the address did not work

function App() {
  useStore(store);
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [isHelpOpen, setHelpOpen] = useState(false);
  const [isTimeOpen, setTimeOpen] = useState(false);
  const [isNoticeClosed, setNoticeClosed] = useState(false);
  const [isCommandOpen, setCommandOpen] = useState(false);
  useEffect(() => {
    const onBack = () => ((visit += 1), redraw());
    addEventListener("popstate", onBack);
    const timer = setInterval(redraw, 5_000); // ages grow
    const onClick = (event) => followLink(event, redraw);
    const actions = { "?": () => setHelpOpen(true), "[": () => setTimeOpen(true), ":": () => setCommandOpen(true), t: nextTheme };
    const onKey = keyboard({ menu: MENU, go: (path) => go(path, redraw), actions });
    document.addEventListener("click", onClick);
    document.addEventListener("keydown", onKey);
    return () => {
      removeEventListener("popstate", onBack);
      clearInterval(timer);
      document.removeEventListener("click", onClick);
      document.removeEventListener("keydown", onKey);
    };
  }, []);
  useEffect(() => document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" }), [location.pathname, store.me.role]);
  document.title = fleetTitle(store);
  if (store.state === "login") return html`<${Login} />`;
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <header>
      <a class="brand" href="/">mlx-fleet</a>
      <nav aria-label="Screens">
        ${MENU.filter((one) => store.may(one[3])).map(([path, title]) => html`<a key=${path} href=${path} aria-current=${isWithin(path) ? "page" : undefined}>${title}</a>`)}
      </nav>
      <${Connection} />
      <button type="button" class="small wide-only" title="Command line (: or Ctrl-K)" aria-label="Command line" onClick=${() => setCommandOpen(true)}><kbd>:</kbd></button>
      <button type="button" class="small" aria-pressed=${isTimeOpen} onClick=${() => setTimeOpen(!isTimeOpen)}>Time</button>
      <button type="button" class="small" onClick=${nextTheme}>Theme</button>
    </header>
    <${Announced} text=${stateText()} />
    <${ControlPlane} />
    ${store.isOldPage && html`<div class="banner" role="status">The dashboard was upgraded. <button type="button" class="small" onClick=${() => location.reload()}>Load the new page</button></div>`}
    ${!isNoticeClosed && IS_OPEN_TEXT && html`<div class="banner" role="status">This page came over plain HTTP: others on the way can read it, and the key of a login. Start fleet-dashboard with --tls-cert.
      <button type="button" class="small" onClick=${() => setNoticeClosed(true)}>Close</button></div>`}
    <main id="main" tabindex="-1" class=${isOld() ? "old" : ""}><${Screen} /></main>
    ${isTimeOpen && html`<${TimeBar} store=${store} onClose=${() => setTimeOpen(false)} />`}
    ${isCommandOpen && html`<${CommandLine} store=${store} screens=${MENU.filter((one) => store.may(one[3]))} go=${(path) => go(path, redraw)} onClose=${() => setCommandOpen(false)} />`}
    ${isHelpOpen && html`<${Help} onClose=${() => setHelpOpen(false)} />`}
  `;
}

function Screen() {
  const [first, second] = location.pathname.slice(1).split("/").map(decodeURIComponent);
  const query = new URLSearchParams(location.search);
  const home = first === "" && !store.may("viewer") ? "chat" : first;
  const shown = second === undefined ? SCREENS[home] : DETAILS[first];
  store.show(selectionsOf(home, second));
  if (!shown) return html`<h1>No such page</h1><p><a href="/">Back to the fleet</a></p>`;
  if (store.isLoading && NEEDS_STATE.has(home)) return html`<p class="loading">Loading…</p>`;
  return html`<${Guard} key=${`${location.pathname} ${visit}`}><${shown} store=${store} name=${second} query=${query} /><//>`;
}

/** One screen; an error in it leaves the frame, and the other screens, as they are. */
function Guard({ children }) {
  const [error, retry] = useErrorBoundary((found) => console.warn("a screen has failed", found));
  if (!error) return children;
  return html`<div role="alert"><h1>This screen has failed</h1>
    <p class="problem">${error.message}</p>
    <p>The page and the dashboard may be of different releases, or the page has a bug. The other screens go on.
      <button type="button" class="small" onClick=${retry}>Try again</button>
      <button type="button" class="small" onClick=${() => location.reload()}>Load the page again</button></p>
  </div>`;
}

/** Whether figures are older than they look. */
function isOld() {
  return !store.at && store.may("viewer") && store.heardAt > 0 && performance.now() - store.heardAt >= OLD_MS;
}

/** Whether what is shown is live, and how old it is if not. */
function Connection() {
  if (store.at) return html`<span class="past" role="status" data-state="past">as it was ${new Date(store.at).toLocaleTimeString()}</span>`;
  if (store.state === "live" && !store.may("viewer")) return html`<span class="quiet" data-state="live">${store.me.name}</span>`;
  const ageMs = store.heardAt ? performance.now() - store.heardAt : 0;
  if (store.state === "live" && ageMs < OLD_MS) return html`<span class="live" data-state="live">live</span>`;
  const old = store.heardAt ? `, ${Math.round(ageMs / 1000)} s old` : "";
  return html`<span class="lost" data-state=${store.state}>${store.problem || "connecting"}${old}</span>`;
}

/** What is said of the connection and of the control plane: without ages, which change each second. */
function stateText() {
  if (store.at) return "";
  if (store.state !== "live") return store.problem || "connecting";
  if (store.silentSeconds < SILENT_S) return "";
  return store.refusal ? `The control plane refuses this dashboard: ${store.refusal}` : "The control plane does not answer. Objects are shown as last known.";
}

/** What still works while the control plane does not. */
function ControlPlane() {
  if (store.at || store.silentSeconds < SILENT_S) return null;
  if (store.refusal) return html`<div class="banner" data-banner>The control plane refuses this dashboard: ${store.refusal}</div>`;
  return html`<div class="banner" data-banner>
    The control plane (etcd) has not answered for ${Math.round(store.silentSeconds)} s. Objects are shown as last known. Chat, metrics
    and running models continue; changes and logs are unavailable.
  </div>`;
}

function Login() {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState(linkProblem);
  const send = async (event) => {
    event.preventDefault();
    try {
      await logIn({ key });
      setKey("");
      store.connectLater();
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<main id="main" class="login">
    <h1>mlx-fleet</h1>
    <p>Log in with an API key of the role viewer, operator or admin.</p>
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

function logIn(secret) {
  return postJson("/login", secret);
}

/** Log in by the link of `fleetctl dashboard`; returns whether the address is one. It works once, and leaves the address. */
async function followLoginLink() {
  const found = LOGIN_LINK.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", location.pathname + location.search);
  linkProblem = "";
  try {
    await logIn({ ticket: found[1] });
  } catch (error) {
    linkProblem = error.message;
  }
  return true;
}

function Help({ onClose }) {
  const show = (dialog) => dialog && !dialog.open && dialog.showModal();
  return html`<dialog ref=${show} onClose=${onClose} aria-labelledby="help">
    <h2 id="help">Keyboard</h2>
    <dl class="keys">
      ${KEYS.map(([keys, what]) => html`<dt key=${keys}>${keys.split(" ").map((key) => html`<kbd key=${key}>${key}</kbd> `)}</dt><dd>${what}</dd>`)}
      ${MENU.map(([path, title, key]) => html`<dt key=${path}><kbd>g</kbd> <kbd>${key}</kbd></dt><dd>${title}</dd>`)}
    </dl>
    <p><label class="check"><input type="checkbox" defaultChecked=${hasSingleKeys()} onChange=${(event) => setSingleKeys(event.target.checked)} /> Keys without Ctrl</label></p>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

function isWithin(path) {
  return path === "/" ? location.pathname === "/" : location.pathname.startsWith(path);
}

function go(path, redraw) {
  visit += 1;
  history.pushState(null, "", path);
  redraw();
  scrollTo(0, 0);
  document.getElementById("main")?.focus({ preventScroll: true });
}

/** Follow a link to a screen without loading the page again. */
function followLink(event, redraw) {
  const link = event.target.closest?.("a[href^='/']");
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (!link || !isPlain || event.defaultPrevented) return;
  event.preventDefault();
  go(link.getAttribute("href"), redraw);
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(savedTheme()) + 1) % THEMES.length]);
}

function savedTheme() {
  return localStorage.getItem("theme") ?? "auto";
}

function setTheme(theme) {
  localStorage.setItem("theme", theme);
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

sessionStorage.removeItem("loads"); // of load_retry.js: every module has arrived
setTheme(savedTheme());
store.show(selectionsOf(...location.pathname.slice(1).split("/").map(decodeURIComponent)));
store.adopt(boot);
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
addEventListener("hashchange", async () => {
  if (await followLoginLink()) store.connectLater();
});
await followLoginLink();
store.start();

/** The page: which screen an address shows, the frame around it, and the keyboard. */

import { html, render, useErrorBoundary, useReducer, useState } from "./vendor/htm-preact.js";
import { AccountMenu, followLoginLink, Login, nextTheme, Rights, savedTheme, setTheme } from "./account.js";
import { FleetStore } from "./fleet_store.js";
import { moment } from "./format.js";
import { hasSingleKeys, keyboard, KEYS, setSingleKeys } from "./keyboard.js";
import { Announced, Command, lazy, useListener, useStore, useTicks } from "./parts.js";
import { boot, note, selectionsOf, shownNow, withQuery } from "./router.js";
import { Activity } from "./screens/activity.js";
import { Mac, Macs } from "./screens/macs.js";
import { Model, Models } from "./screens/models.js";
import { Replica } from "./screens/object.js";
import { Overview, overviewTitle } from "./screens/overview.js";

/** Screens by the first part of their path: the component, the role that it needs, its title, and its key after `g`. The first six are the places. */
const SCREENS = {
  "": [Overview, "viewer", "Overview", "o"],
  models: [Models, "viewer", "Models", "d"],
  macs: [Macs, "viewer", "Macs", "m"],
  requests: [lazy(() => import("./screens/requests.js"), "Requests"), "viewer", "Requests", "q"],
  chat: [lazy(() => import("./screens/chat.js"), "Chat"), "user", "Chat", "c"],
  activity: [Activity, "viewer", "Activity", "e"],
  run: [lazy(() => import("./screens/run.js"), "RunModel"), "viewer", "Run a model", "u"],
  try: [lazy(() => import("./screens/try.js"), "Try"), "viewer", "Try a change", "a"],
  settings: [lazy(() => import("./screens/settings.js"), "Settings"), "user", "Keys", "k"],
};
/** Pages of one object: the component, the view of its row, what it is, and the kind as fleetctl takes it. */
const DETAILS = {
  macs: [Mac, "macs", "Mac", "nodes"],
  models: [Model, "models", "model", "modeldeployments"],
  replicas: [Replica, "replicas", "replica", "replicas"],
  groups: [lazy(() => import("./screens/groups.js"), "Group"), "groups", "group", "shardgroups"],
  git: [lazy(() => import("./screens/git.js"), "GitSource"), "gitSources", "GitSource", "gitsources"],
};
const CommandLine = lazy(() => import("./command_line.js"), "CommandLine");
const TimeBar = lazy(() => import("./time_bar.js"), "TimeBar");
const ADDRESSES = Object.entries(SCREENS).map(([path, [, role, title, key]]) => [`/${path}`, title, key, role]);
const PLACES = ADDRESSES.slice(0, 6);
/** What else has an address: tabs of places, the settings, and the editor. */
const FURTHER = [
  ["/macs?tab=picture", "Picture of the Macs", "p", "viewer"],
  ["/macs?tab=groups", "Groups", "r", "viewer"],
  ["/macs?tab=add", "Add a Mac", "n", "viewer"],
  ["/activity?tab=changes", "Changes", "h", "viewer"],
  ["/activity?tab=git", "Git", "i", "viewer"],
  ["/activity?tab=logs", "Logs", "l", "operator"],
  ...ADDRESSES.slice(6),
  ["/settings?tab=fleet", "Versions and processes", "v", "viewer"],
];
const OLD_MS = 5_000; // the server sends something every 2 s
const SILENT_S = 2;
const IS_OPEN_TEXT = location.protocol === "http:" && !/^(localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(location.hostname);

const store = new FleetStore();
let visit = 0; // counts the screens that were shown: each begins anew

function App() {
  useStore(store);
  const [, redraw] = useReducer((number) => number + 1, 0);
  const [isHelpOpen, setHelpOpen] = useState(false);
  const [isTimeOpen, setTimeOpen] = useState(store.at !== "");
  const [isNoticeClosed, setNoticeClosed] = useState(false);
  const [isCommandOpen, setCommandOpen] = useState(false);
  const goTo = (path) => go(path, redraw);
  const actions = { "?": () => setHelpOpen(true), "[": () => setTimeOpen(true), ":": () => setCommandOpen(true), t: nextTheme };
  const [onKey] = useState(() => keyboard({ menu: [...PLACES, ...FURTHER], go: goTo, actions }));
  useTicks(5_000); // ages grow
  useListener("click", (event) => followLink(event, goTo), document);
  useListener("keydown", onKey, document);
  useListener("popstate", () => {
    visit += 1;
    const at = shownNow().query.get("at") ?? "";
    setTimeOpen(at !== "");
    store.goTo(at);
    redraw();
  });
  document.title = overviewTitle(store);
  if (store.state === "login") return html`<${Login} store=${store} />`;
  const [places, further] = [PLACES, FURTHER].map((addresses) => addresses.filter(([, , , role]) => store.may(role)));
  const isInSettings = isWithin("/settings");
  const commands = {
    "Look at an earlier time": actions["["],
    "Light or dark": nextTheme,
    Keyboard: actions["?"],
    ...(store.me.needsLogin ? { "Log out": () => store.logOut() } : {}),
  };
  return html`
    <a class="skip" href="#main">Skip to the content</a>
    <header>
      <a class="brand" href="/">mlx-fleet</a>
      <nav aria-label="Places">
        ${places.map(([path, title]) => html`<a key=${path} href=${path} aria-current=${isWithin(path) ? "page" : undefined}>${title}</a>`)}
        <button type="button" class="more" aria-current=${isWithin("/activity") || isInSettings ? "true" : undefined} popovertarget="account">More</button>
      </nav>
      <${Connection} />
      <button type="button" class="small wide-only" title="Find anything (: or Ctrl-K)" aria-label="Command line" onClick=${actions[":"]}><kbd>:</kbd></button>
      ${store.may("viewer") && html`<button type="button" class="small wide-only" aria-pressed=${isTimeOpen} onClick=${() => (isTimeOpen ? closeTime() : setTimeOpen(true))}>Time</button>`}
      <button type="button" class="small wide-only account-button" aria-current=${isInSettings ? "true" : undefined} popovertarget="account">${store.me.name || "Settings"}</button>
    </header>
    <${AccountMenu} store=${store} places=${places} onHelp=${actions["?"]} onSearch=${actions[":"]} onTime=${() => setTimeOpen(true)} />
    <${Announced} text=${stateText()} />
    <${Banners} />
    ${!isNoticeClosed && IS_OPEN_TEXT && html`<div class="banner" role="status">This page came over plain HTTP: others on the way can read it, and the key of a login. Start fleet-dashboard with --tls-cert.
      <button type="button" class="small" onClick=${() => setNoticeClosed(true)}>Close</button></div>`}
    <main id="main" tabindex="-1" class=${isOld() ? "old" : ""}><${Screen} /></main>
    ${isTimeOpen && html`<${TimeBar} store=${store} onClose=${closeTime} />`}
    ${isCommandOpen && html`<${CommandLine} store=${store} screens=${[...places, ...further]} actions=${commands} go=${goTo} onClose=${() => setCommandOpen(false)} />`}
    ${isHelpOpen && html`<${Help} onClose=${() => setHelpOpen(false)} />`}
  `;

  function closeTime() {
    setTimeOpen(false);
    note({ at: "" });
    store.goTo("");
  }
}

function Screen() {
  const shown = shownNow();
  const { screen, name, query } = shown;
  if (screen === "" && !store.may("viewer")) return html`<${Guard} key="chat"><${SCREENS.chat[0]} store=${store} query=${query} /><//>`;
  const [Page, view, what, kind] = (name !== undefined && DETAILS[screen]) || [];
  const [Shown, role] = name === undefined ? (SCREENS[screen] ?? []) : [Page, "viewer"];
  store.show(selectionsOf(shown));
  if (!Shown) return html`<h1>No such page</h1><p>Nothing has the address <code>${location.pathname}</code>. <a href="/">Back to the overview</a></p>`;
  if (!store.may(role)) return html`<${NoRight} role=${role} />`;
  if (store.at && store.problem) return html`<h1>Nothing is known of ${moment(store.at)}</h1><p class="problem" role="alert">${store.problem}</p>`;
  if (store.isLoading && role === "viewer") return html`<p class="loading">Loading…</p>`;
  const row = view && store.row(view, name);
  if (view && !row) return html`<h1>${name}</h1><p>There is no ${what} of this name, or not any more.</p><${Command} text=${`fleetctl get ${kind}`} />`;
  return html`<${Guard} key=${`${location.pathname} ${shown.tab} ${visit}`}><${Shown} store=${store} name=${name} row=${row} query=${query} tab=${shown.tab} /><//>`;
}

function NoRight({ role }) {
  return html`<h1>Your key may not see this</h1>
    <p>The key <b>${store.me.name}</b> has the role ${store.me.role}; this page needs the role ${role}.
      Log in with another key, or go to <a href="/chat">Chat</a>.</p>
    <${Rights} store=${store} />`;
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

const isOld = () => !store.at && store.may("viewer") && store.heardAt > 0 && performance.now() - store.heardAt >= OLD_MS;

function Connection() {
  useTicks(1_000); // its age is shown
  if (store.at) return html`<span class="status past" role="status" data-state="past">as it was ${moment(store.at)}</span>`;
  const ageMs = store.heardAt ? performance.now() - store.heardAt : 0;
  const isLive = store.state === "live" && (ageMs < OLD_MS || !store.may("viewer"));
  if (isLive && store.silentSeconds >= SILENT_S) return html`<span class="status past" data-state="stale">last known</span>`;
  if (isLive) return html`<span class="status live" data-state="live">live</span>`;
  const text = `${store.problem || "connecting"}${ageMs >= OLD_MS ? `, ${Math.round(ageMs / 1000)} s old` : ""}`;
  return html`<span class=${`status ${store.state === "lost" ? "lost" : "quiet"}`} data-state=${store.state === "lost" ? "lost" : "connecting"} title=${text}>${text}</span>`;
}

/** What is said of the connection and of the control plane: without ages, which change each second. */
function stateText() {
  if (store.at) return "";
  if (store.state !== "live") return store.problem || "connecting";
  if (store.silentSeconds < SILENT_S) return silentGateways().length ? "A gateway does not answer." : "";
  return store.refusal ? `The control plane refuses this dashboard: ${store.refusal}` : "The control plane does not answer. Objects are shown as last known.";
}

const silentGateways = () => Object.entries(store.summary?.gatewaysSilent ?? {});

/** What still works while a part of the fleet does not answer. */
function Banners() {
  const { isOldPage, at, silentSeconds, refusal } = store;
  const isSilent = !at && silentSeconds >= SILENT_S;
  return html`
    ${isSilent && html`<div class="banner" data-banner>${refusal
      ? `The control plane refuses this dashboard: ${refusal}`
      : `The control plane (etcd) has not answered for ${Math.round(silentSeconds)} s. Objects are shown as last known. Chat, metrics and running models continue; changes and logs are unavailable.`}</div>`}
    ${!at && silentGateways().map(([id, why]) => html`<div key=${id} class="banner" data-gateway-silent>Gateway <b>${id}</b>: ${why}. Its requests are missing here.</div>`)}
    ${isOldPage && html`<div class="banner" role="status">The dashboard was upgraded. <button type="button" class="small" onClick=${() => location.reload()}>Load the new page</button></div>`}`;
}

function Help({ onClose }) {
  const show = (dialog) => dialog && !dialog.open && dialog.showModal();
  return html`<dialog ref=${show} onClose=${onClose} aria-labelledby="help">
    <h2 id="help">Keyboard</h2>
    <dl class="keys">
      ${KEYS.map(([keys, what]) => html`<dt key=${keys}>${keys.split(" ").map((key) => html`<kbd key=${key}>${key}</kbd> `)}</dt><dd>${what}</dd>`)}
      ${[...PLACES, ...FURTHER].map(([path, title, key]) => html`<dt key=${path}><kbd>g</kbd> <kbd>${key}</kbd></dt><dd>${title}</dd>`)}
    </dl>
    <p><label class="check"><input type="checkbox" defaultChecked=${hasSingleKeys()} onChange=${(event) => setSingleKeys(event.target.checked)} /> Keys without Ctrl</label></p>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

const isWithin = (path) => (path === "/" ? location.pathname === "/" : location.pathname.startsWith(path));

/** Show another address; the moment that is shown stays. */
function go(path, redraw) {
  visit += 1;
  const url = new URL(path, location.href);
  if (store.at && !url.searchParams.has("at")) url.searchParams.set("at", store.at);
  history.pushState(null, "", withQuery(url.pathname, url.searchParams));
  redraw();
  scrollTo(0, 0);
  document.getElementById("main")?.focus({ preventScroll: true });
}

function followLink(event, goTo) {
  const link = event.target.closest?.("a[href^='/']");
  const isPlain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (!link || !isPlain || event.defaultPrevented) return;
  const [, screen, name] = link.getAttribute("href").split(/[?#]/)[0].split("/");
  if (!(name === undefined ? SCREENS : DETAILS)[screen]) return; // the server knows where an address of before has moved
  event.preventDefault();
  goTo(link.getAttribute("href"));
}

sessionStorage.removeItem("loads"); // of load_retry.js: every module has arrived
setTheme(savedTheme());
store.at = shownNow().query.get("at") ?? "";
store.show(selectionsOf(shownNow()));
store.adopt(boot);
const app = document.getElementById("app");
app.replaceChildren();
render(html`<${App} />`, app);
addEventListener("hashchange", async () => {
  if (await followLoginLink()) store.connect();
});
await followLoginLink();
store.start();

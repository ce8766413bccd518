/** Keys of the page: screens, rows of lists, and what can be done with the object that is shown or focused. */

const SWITCH = "single-keys";
const KINDS = { macs: "Node", models: "ModelDeployment", groups: "ShardGroup", replicas: "Replica" };
const LOGS = { macs: "node", replicas: "replica" };
/** Keys that lead from an object to another address. */
const PATHS = {
  y: ({ screen, name }) => `/${screen}/${encodeURIComponent(name)}?yaml`,
  d: ({ kind, name }) => `/activity?tab=changes&kind=${kind}&object=${encodeURIComponent(name)}`,
  e: ({ name }) => `/activity?filter=${encodeURIComponent(name)}`,
  l: ({ screen, name }) => LOGS[screen] && `/activity?tab=logs&of=${LOGS[screen]}/${encodeURIComponent(name)}`,
};
export const KEYS = [
  [": Ctrl-K", "Command line: any screen, object or action"],
  ["/", "Filter the list"],
  ["j k", "Next and previous row"],
  ["Enter", "Open the row"],
  ["Esc", "Leave a field or a dialog"],
  [".", "Actions of the object"],
  ["y", "YAML of the object"],
  ["d", "Its changes, with their differences"],
  ["l", "Its log"],
  ["e", "Its events"],
  ["[ ]", "Earlier, later"],
  ["t", "Light or dark"],
  ["?", "This help"],
];

/** Whether keys without a modifier do anything; people who dictate switch them off. */
export const hasSingleKeys = () => localStorage.getItem(SWITCH) !== "off";

export function setSingleKeys(isOn) {
  localStorage.setItem(SWITCH, isOn ? "on" : "off");
}

/**
 * Return the handler of keys. `menu`: [path, title, letter] after `g`; `go` shows a path; `actions`: functions by key.
 * Keys without a modifier do nothing in text fields and dialogs.
 */
export function keyboard({ menu, go, actions }) {
  let isGoing = false;
  return (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      actions[":"]();
      return;
    }
    if (event.metaKey || event.ctrlKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest?.("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!hasSingleKeys()) return;
    const target = isGoing && menu.find(([, , letter]) => letter === event.key);
    isGoing = event.key === "g";
    if (target) go(target[0]);
    else if (actions[event.key]) actions[event.key]();
    else if (!ofPage(event.key, go)) return;
    event.preventDefault();
  };
}

/** Do what a key means on the page that is shown; returns whether it means anything. */
function ofPage(key, go) {
  if (key === "j" || key === "k") return focusRow(key === "j" ? 1 : -1);
  if (key === "/") return focusOn("[data-filter]");
  if (key === ".") return focusOn(".actions button, .actions a");
  const shown = objectShown();
  const path = shown && PATHS[key]?.(shown);
  if (path) go(path);
  return Boolean(path);
}

/** Return the object of the focused row, else of the page: the first part of its path and its name. */
function objectShown() {
  const row = document.activeElement?.closest?.("tbody tr, .chips > li, .problems > li");
  const path = row?.querySelector("a[href]")?.getAttribute("href") ?? location.pathname;
  const [screen, name] = path.split("?")[0].slice(1).split("/").map(decodeURIComponent);
  return name && KINDS[screen] ? { screen, name, kind: KINDS[screen] } : null;
}

function focusOn(selector) {
  const found = document.querySelector(selector);
  found?.focus();
  return Boolean(found);
}

function focusRow(step) {
  const rows = [...document.querySelectorAll("main tbody tr, main .chips > li, main .problems > li")].filter((row) => row.querySelector("a, button"));
  if (!rows.length) return false;
  const at = rows.indexOf(document.activeElement?.closest?.("tbody tr, .chips > li, .problems > li"));
  const next = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + step));
  rows[next].querySelector("a, button").focus();
  rows[next].scrollIntoView({ block: "nearest" });
  return true;
}

/** Addresses of the page: what each of them shows, and what every screen has in its own. */

/**
 * What the page began with, from its own document: the table of what each screen shows, and the first state.
 * @type {{page: string, screens: {lists: Record<string, string[]>, details: Record<string, string[]>, frame: string[]}, me?: object, view?: string[], state?: object}}
 */
export const boot = JSON.parse(document.getElementById("boot").textContent);

/** @returns {{screen: string, name: string | undefined, tab: string, query: URLSearchParams}} what the address shows */
export function shownNow() {
  const [screen, name, ...rest] = location.pathname.slice(1).split("/").map(decoded);
  const query = new URLSearchParams(location.search);
  return { screen: rest.length ? location.pathname : screen, name, tab: query.get("tab") ?? "", query };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a person wrote a lone %
  }
}

/** @returns {string[]} the selections of a screen, as `GET /api/v1/stream?view=` takes them */
export function selectionsOf({ screen, name, tab }) {
  const { lists, details, frame } = boot.screens;
  if (name === undefined) return lists[`${screen}?${tab}`] ?? lists[screen] ?? frame;
  return (details[screen] ?? frame).map((one) => one.replaceAll("{name}", name));
}

/** Note in the address what the screen shows now, without showing it anew; an empty value leaves the address. */
export function note(values, hash = location.hash) {
  const query = new URLSearchParams(location.search);
  for (const [key, value] of Object.entries(values)) {
    query.delete(key);
    for (const one of [value].flat()) if (one) query.append(key, one);
  }
  history.replaceState(history.state, "", withQuery(location.pathname, query) + hash);
}

/** @returns {string} a path with a query that is read by people, too */
export function withQuery(path, query) {
  const text = query.toString().replaceAll("%2F", "/").replaceAll("%3A", ":");
  return text ? `${path}?${text}` : path;
}

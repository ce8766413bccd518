/** What the page began with, from its own document: the table of what each screen shows, and the first state. */

/** @type {{page: string, screens: {lists: Record<string, string[]>, details: Record<string, string[]>, frame: string[]}, me?: object, view?: string[], state?: object}} */
export const boot = JSON.parse(document.getElementById("boot").textContent);

/** @returns {string[]} the selections of a screen, as `GET /api/v1/stream?view=` takes them */
export function selectionsOf(screen, name) {
  const { lists, details, frame } = boot.screens;
  if (name === undefined) return lists[screen] ?? frame;
  return (details[screen] ?? frame).map((one) => one.replaceAll("{name}", name));
}

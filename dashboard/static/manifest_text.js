/** Edits of single fields in the text of a manifest, which keep its comments and its order. Pure. */

const FIRST_END = /^(---|\.\.\.)/;
const indentOf = (line) => line.length - line.trimStart().length;
const isEmpty = (line) => !line.trim() || line.trimStart().startsWith("#");

/** @returns {string | undefined} a field of the first object, as it is written; undefined if it is not there, or not in a block */
export function fieldOf(text, path) {
  const place = placeOf(text.split("\n"), path);
  return place?.missing.length === 0 && !place.isParent ? place.value : undefined;
}

/** @returns {string | null} the text with a field of the first object set; null where the text is not written in blocks */
export function withField(text, path, value) {
  const lines = text.split("\n");
  const place = placeOf(lines, path);
  if (!place || (!place.missing.length && place.isParent)) return null;
  const { at, indent, missing, comment } = place;
  if (!missing.length) lines[at] = `${" ".repeat(indent)}${path.at(-1)}: ${value}${comment}`;
  else lines.splice(at, 0, ...missing.map((key, depth) => `${" ".repeat(indent + 2 * depth)}${key}:${depth === missing.length - 1 ? ` ${value}` : ""}`));
  return lines.join("\n");
}

/** Return the line of a field, or the line before which its missing part belongs; null where a parent is not a block. */
function placeOf(lines, path) {
  let from = lines.findIndex((line) => !isEmpty(line) && !FIRST_END.test(line));
  if (from < 0) return null;
  let to = endOf(lines, from, (line) => FIRST_END.test(line));
  let indent = indentOf(lines[from]);
  for (const [depth, key] of path.entries()) {
    const start = `${" ".repeat(indent)}${key}:`;
    const at = lines.findIndex((line, number) => number >= from && number < to && (line === start || line.startsWith(`${start} `)));
    if (at < 0) return { at: lastOf(lines, from, to), indent, missing: path.slice(depth) };
    const [, value, comment] = /^(.*?)(\s+#.*)?$/.exec(lines[at].slice(start.length));
    const end = endOf(lines, at + 1, (line) => !isEmpty(line) && indentOf(line) <= indent);
    const child = lines.slice(at + 1, end).find((line) => !isEmpty(line));
    if (depth === path.length - 1) return { at, indent, missing: [], value: value.trim(), comment: comment ?? "", isParent: child !== undefined };
    if (value.trim()) return null;
    [from, to, indent] = [at + 1, end, child ? indentOf(child) : indent + 2];
  }
  return null;
}

const endOf = (lines, from, isEnd) => {
  const found = lines.findIndex((line, at) => at >= from && isEnd(line));
  return found < 0 ? lines.length : found;
};

/** Return the line after the last one that is not empty. */
function lastOf(lines, from, to) {
  let at = to;
  while (at > from && isEmpty(lines[at - 1])) at -= 1;
  return at;
}

/** Texts of figures, as fleetctl prints them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @returns {string} such as "23.5 GiB"; "-" for null */
export function bytes(count) {
  if (count === null || count === undefined) return "-";
  let at = 0;
  let value = count;
  while (value >= 1024 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${UNITS[at]}`;
}

/** @returns {string} the time since a moment, such as "4m"; "" for null */
export function age(moment, nowMs = Date.now()) {
  if (!moment) return "";
  const seconds = Math.max(0, (nowMs - Date.parse(moment)) / 1000);
  if (seconds < 60) return `${Math.round(seconds)}s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)}h`;
  return `${Math.floor(seconds / 86_400)}d`;
}

/** @returns {string} a moment in the viewer's time zone */
export function clock(moment) {
  return moment ? new Date(moment).toLocaleTimeString([], { hour12: false }) : "";
}

/** @returns {string} "1 Mac", "2 Macs" */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** @returns {string} a number with its thousands apart */
export function number(value) {
  return value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en");
}

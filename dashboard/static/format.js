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
export const clock = (time) => (time ? new Date(time).toLocaleTimeString("en-GB") : "");

/** @returns {string} a moment as a day and a time in the viewer's time zone, such as "Sat 07:02:49" */
export function moment(time) {
  const date = new Date(time);
  return Number.isNaN(date.getTime()) ? String(time) : `${date.toLocaleDateString("en-GB", { weekday: "short" })} ${clock(date)}`;
}

/** @returns {string} "1 Mac", "2 Macs" */
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** @returns {string} a number with its thousands apart */
export const number = (value) => (value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en"));

/** @returns {string} a rate or a time with three digits at most; "-" for null */
export function short(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 10_000) return `${(value / 1000).toLocaleString("en", { maximumFractionDigits: value >= 100_000 ? 0 : 1 })} k`;
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toFixed(1)));
}

/** @returns {string} milliseconds as a time that is read at a glance, such as "480 ms" or "2.4 s" */
export function span(ms) {
  if (ms === null || ms === undefined) return "-";
  if (ms < 1000) return `${ms < 10 ? Number(ms.toFixed(1)) : Math.round(ms)} ms`;
  return ms < 60_000 ? `${Number((ms / 1000).toFixed(1))} s` : `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

/** @returns {string} what an agent measures: percent of GPU and CPU, degrees, watts, requests; what nobody measures is left out */
export function figureText(found) {
  if (!found) return "";
  const known = (value) => value !== null && value !== undefined;
  return [
    known(found.gpuPercent) && `GPU ${found.gpuPercent} %`,
    known(found.cpuPercent) && `CPU ${found.cpuPercent} %`,
    known(found.celsius) && `${found.celsius} °C`,
    known(found.watts) && `${found.watts} W`,
    found.active > 0 && `${found.active} in flight`,
  ].filter(Boolean).join(" · ");
}

/** @returns {string} a taint as fleetctl takes it */
export const taintText = ({ key, value, effect }) => `${key}${value ? `=${value}` : ""}:${effect}`;

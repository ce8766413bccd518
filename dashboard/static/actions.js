/** Actions on one object: a dialog that previews what would change, and carries it out only if nothing changed since. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { getJson, postJson } from "./fleet_store.js";
import { age, moment, taintText } from "./format.js";
import { Badge, Command, Diff, Select, useRead, useTicks } from "./parts.js";
import { PlacementSteps, usePreview } from "./placement.js";
import { note } from "./router.js";

const WORDS = {
  cordon: ["Cordon", "No new replicas are placed on it. Running ones stay."],
  uncordon: ["Uncordon", "It takes replicas again."],
  taint: ["Taint", "Replicas that do not tolerate it stay away; NoExecute moves running ones, too."],
  untaint: ["Remove a taint", "Replicas may be placed on it again."],
  delete: ["Delete", "Its replicas end after their requests, then it is gone."],
  sync: ["Sync now", "Fetches the repository and applies what it has."],
  suspend: ["Suspend", "New commits are not applied."],
  unsuspend: ["Resume", "New commits are applied again."],
  drain: ["Drain", "Its replicas move to other Macs, as far as minAvailable allows, and no new ones come."],
  scale: ["Scale", "Sets the number of replicas."],
  pause: ["Pause the rollout", "Lost replicas are still replaced."],
  resume: ["Resume the rollout", ""],
  restart: ["Restart", "Its engines are restarted as spec.rollout allows, without dropping requests."],
  undo: ["Undo the rollout", "Returns to an earlier revision."],
  promote: ["Promote the canary", "The new version passes, and all replicas get it."],
  abort: ["Abort the canary", "The earlier version serves again."],
};

/** Return the actions that work in the state of an object, by the view of its row. */
export const VERBS = {
  macs: (mac) => [...(mac.isCordoned || mac.isDraining ? [] : ["cordon"]), ...(mac.isDraining ? [] : ["drain"]), ...(mac.isCordoned || mac.isDraining ? ["uncordon"] : []), "taint", ...(mac.taints.length ? ["untaint"] : [])],
  models: (model) => [...(model.isAutoscaled ? [] : ["scale"]), "restart", model.isPaused ? "resume" : "pause", ...(model.hasCanary ? ["promote", "abort"] : []), ...(model.canUndo ? ["undo"] : []), "delete"],
  gitSources: (source) => (source.isSuspended ? ["unsuspend"] : ["sync", "suspend"]),
};

const NO_ACTION = { verb: "", before: "", revision: null };

/** Return the action that the address asks for, and the change that it takes back or the revision that it returns to; they leave the address. */
function asked(verbs) {
  const query = new URLSearchParams(location.search);
  if (!query.has("do")) return NO_ACTION;
  note({ do: "", before: "", revision: "" });
  const verb = verbs.find((one) => one === query.get("do")) ?? "";
  return { verb, before: query.get("before") ?? "", revision: Number(query.get("revision")) || null };
}

const EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
const NO_FIELDS = { key: "", value: "", effect: EFFECTS[0], taint: 0, typed: "", reason: "" };
const TYPING_MS = 250;
const SLOW_S = 2;

/** Buttons of the actions that work on an object now; each opens a dialog. `view`: that of the row `object`. */
export function Actions({ store, view, object }) {
  const verbs = VERBS[view](object).filter((one) => one !== "delete" || store.may("admin"));
  const [{ verb, before, revision }, setAction] = useState(() => asked(verbs));
  const [done, setDone] = useState("");
  const show = (action, text = "") => (setAction({ ...NO_ACTION, ...action }), setDone(text));
  if (!store.may("operator")) return null;
  if (store.at) return html`<span class="quiet" data-past>Actions are off: this is ${moment(store.at)}.</span>`;
  const mark = store.me.canWrite ? "" : "$ ";
  return html`
    ${verbs.map((one) => html`<button type="button" class=${one === "delete" && !mark ? "small danger" : "small"} key=${one} title=${mark && "Shows the command: this dashboard was started without --allow-writes"} onClick=${() => show({ verb: one })}>${mark}${WORDS[one][0]}</button>`)}
    ${done && html`<span role="status" class="done" data-done>${done}</span>`}
    ${verb && html`<${ActionDialog} key=${verb} store=${store} verb=${verb} name=${object.name} replicas=${object.desired} taints=${object.taints ?? []} before=${before} at=${revision}
      onDone=${(text) => show({}, text)} onClose=${() => setAction(NO_ACTION)} />`}
  `;
}

/** `before`: a recorded change; an undo opens with the revision that was there before it, or with the revision `at`. */
function ActionDialog({ store, verb, name, replicas, taints, before, at, onDone, onClose }) {
  const [fields, setFields] = useState({ ...NO_FIELDS, replicas: replicas ?? 1, revision: at ?? "" });
  const [isSought, setSought] = useState(verb === "undo" && before !== "");
  const set = (part) => setFields((now) => ({ ...now, ...part }));
  const { key, value, effect, revision } = fields;
  const taint = { taint: { key: key.trim(), value: value.trim(), effect }, untaint: taints[fields.taint] }[verb];
  const numbers = verb === "scale" ? { replicas: Number(fields.replicas) } : revision && { revision: Number(revision) };
  const body = { name, ...numbers, ...(taint && { taint }) };
  const needsTaint = taint?.key === "";
  const needsName = verb === "delete" && fields.typed.trim() !== name;
  const path = `/api/v1/actions/${verb}`;
  const preview = () => (needsTaint || isSought ? null : postJson(path, { ...body, dryRun: true }));
  const { answer: seen, problem, waiting, write } = usePreview(preview, [JSON.stringify(body), isSought], TYPING_MS);
  const act = async (event) => {
    event.preventDefault();
    const isDone = await write(() => postJson(path, { ...body, version: seen.version, reason: fields.reason }));
    if (isDone) onDone(`${WORDS[verb][0]}: asked. ${seen.placement.sentence}`);
  };
  const dialog = useRef(null);
  useLayoutEffect(() => dialog.current.showModal(), []); // a ref is set before the page has the element
  return html`<dialog ref=${dialog} onClose=${onClose} class="action" aria-labelledby="action">
    <form onSubmit=${act} onInput=${(event) => set(Object.fromEntries(new FormData(event.currentTarget)))}>
      <h2 id="action">${WORDS[verb][0]}: ${name}</h2>
      <p>${WORDS[verb][1]}</p>
      ${!store.me.canWrite && html`<p>This dashboard was started without --allow-writes. Run the command:</p>${seen && html`<${Command} text=${seen.command} />`}`}
      ${verb === "scale" && html`<label>Replicas <input type="number" name="replicas" min="0" max="10000" value=${fields.replicas} /></label>`}
      ${verb === "undo" && html`<${Revisions} name=${name} before=${before} chosen=${Number(revision)} onFound=${(match) => (set({ revision: match ?? revision }), setSought(false))} />`}
      ${verb === "taint" && html`<div class="row">
        <label>Key <input name="key" value=${key} placeholder="owner" /></label>
        <label>Value <input name="value" value=${value} placeholder="anna" /></label>
        <${Select} label="Effect" name="effect" value=${effect} choices=${EFFECTS} /></div>`}
      ${verb === "untaint" && html`<${Select} label="Taint" name="taint" value=${fields.taint} choices=${taints.map((one, number) => [number, taintText(one)])} />`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${waiting && html`<${Waiting} store=${store} what=${waiting} />`}
      ${seen && html`
        ${!seen.isChanged && html`<p><${Badge} tone="idle">nothing would change<//></p>`}
        ${seen.isChanged && html`${seen.diff && html`<${Diff} text=${seen.diff} />`}<p data-plan>${seen.placement.sentence}</p>
          <${PlacementSteps} steps=${seen.placement.steps} />`}`}
      ${seen && store.me.canWrite && html`<${Command} text=${seen.command} />`}
      ${store.mayWrite("operator") && html`<label>Reason <input name="reason" maxlength="500" value=${fields.reason} placeholder="for the record of changes" /></label>`}
      ${verb === "delete" && store.mayWrite("admin") && html`<label>Type <b>${name}</b> to delete it <input name="typed" value=${fields.typed} autocomplete="off" spellcheck="false" /></label>`}
      <p class="row">
        ${store.mayWrite("operator") && html`<button type="submit" class=${verb === "delete" ? "danger" : ""} disabled=${!seen?.isChanged || needsTaint || needsName || waiting}>${WORDS[verb][0]}</button>`}
        <button type="button" onClick=${(event) => event.target.closest("dialog").close()}>${store.me.canWrite ? "Cancel" : "Close"}</button>
      </p>
    </form>
  </dialog>`;
}

function Waiting({ store, what }) {
  const seconds = useTicks(1_000, [what]);
  const silent = store.silentSeconds >= SLOW_S ? ` The control plane (etcd) has not answered for ${Math.round(store.silentSeconds)} s.` : "";
  return html`<p class="quiet" role="status" data-waiting>Waiting for ${what}${seconds >= SLOW_S ? `, for ${seconds} s` : ""}.${silent}</p>`;
}

function Revisions({ name, before, chosen, onFound }) {
  const query = before ? `?${new URLSearchParams({ before })}` : "";
  const [found, problem] = useRead(() => getJson(`/api/v1/revisions/${encodeURIComponent(name)}${query}`), [name]);
  useEffect(() => {
    if (found || problem) onFound(found?.before);
  }, [found, problem]);
  const rows = (found?.revisions ?? []).filter((one) => !one.isCurrent || one.revision === chosen);
  const title = (one) => `${one.revision}, ${age(one.created)} old${one.cause ? `: ${one.cause}` : ""}`;
  const text = found && found.before === null ? "No recorded revision is as the model was before that change. Choose one." : problem;
  return html`<${Select} label="Revision" name="revision" value=${chosen || ""} choices=${[["", "the one before"], ...rows.map((one) => [one.revision, title(one)])]} />
    ${before && text && html`<p class="quiet" role="status">${text}</p>`}`;
}

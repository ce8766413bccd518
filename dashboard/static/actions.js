/** Actions on one object: a dialog that previews what would change, and carries it out only if nothing changed since. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { getJson, postJson } from "./fleet_store.js";
import { age, moment, taintText } from "./format.js";
import { Badge, Command, Diff } from "./parts.js";
import { PlacementSteps } from "./placement_steps.js";
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

/** Return the action that the address asks for, and the change that it takes back or the revision that it returns to; they leave the address. */
function asked(verbs) {
  const query = new URLSearchParams(location.search);
  const found = query.get("do");
  if (found === null) return { verb: "", before: "" };
  note({ do: "", before: "", revision: "" });
  return { verb: verbs.includes(found) ? found : "", before: query.get("before") ?? "", revision: Number(query.get("revision")) || null };
}

const TYPING_MS = 250;
const SLOW_S = 2;

/** Buttons of the actions that work on an object now; each opens a dialog. `view`: that of the row `object`. */
export function Actions({ store, view, object }) {
  const verbs = VERBS[view](object).filter((one) => one !== "delete" || store.may("admin"));
  const [{ verb, before, revision }, setAction] = useState(() => asked(verbs));
  const [done, setDone] = useState("");
  const setVerb = (one) => (setDone(""), setAction({ verb: one, before: "" }));
  const end = (text) => (setAction({ verb: "", before: "" }), setDone(text));
  if (!store.may("operator")) return null;
  if (store.at) return html`<span class="quiet" data-past>Actions are off: this is ${moment(store.at)}.</span>`;
  const mark = store.me.canWrite ? "" : "$ ";
  return html`
    ${verbs.map((one) => html`<button type="button" class=${one === "delete" && !mark ? "small danger" : "small"} key=${one} title=${mark && "Shows the command: this dashboard was started without --allow-writes"} onClick=${() => setVerb(one)}>${mark}${WORDS[one][0]}</button>`)}
    ${done && html`<span role="status" class="done" data-done>${done}</span>`}
    ${verb && html`<${ActionDialog} key=${verb} store=${store} verb=${verb} name=${object.name} replicas=${object.desired} taints=${object.taints ?? []} before=${before} at=${revision ?? null} onDone=${end} onClose=${() => setAction({ verb: "", before: "" })} />`}
  `;
}

/** `before`: a recorded change; an undo opens with the revision that was there before it, or with the revision `at`. */
function ActionDialog({ store, verb, name, replicas, taints, before, at, onDone, onClose }) {
  const [wanted, setWanted] = useState(replicas ?? 1);
  const [revision, setRevision] = useState(at);
  const [taint, setTaint] = useState(verb === "untaint" ? (taints[0] ?? null) : null);
  const [typed, setTyped] = useState("");
  const [seen, setSeen] = useState(null);
  const [problem, setProblem] = useState("");
  const [waiting, setWaiting] = useState("the planner's forecast"); // for what; "" for nothing
  const [reason, setReason] = useState("");
  const [isSought, setSought] = useState(verb === "undo" && before !== "");
  const body = { name, ...(verb === "scale" ? { replicas: wanted } : {}), ...(revision ? { revision } : {}), ...(taint ? { taint } : {}) };
  const needsTaint = (verb === "taint" || verb === "untaint") && !taint?.key;
  const needsName = verb === "delete" && typed !== name;
  const preview = async (why = "") => {
    if (needsTaint || isSought) return setWaiting("");
    setWaiting("the planner's forecast");
    try {
      setSeen(await postJson(`/api/v1/actions/${verb}`, { ...body, dryRun: true }));
      setProblem(why);
    } catch (error) {
      setSeen(null);
      setProblem(error.message);
    }
    setWaiting("");
  };
  useEffect(() => {
    const timer = setTimeout(() => void preview(), seen ? TYPING_MS : 0);
    return () => clearTimeout(timer);
  }, [wanted, revision, taint, isSought]);
  const act = async (event) => {
    event.preventDefault();
    setWaiting("the control plane to take it");
    try {
      await postJson(`/api/v1/actions/${verb}`, { ...body, version: seen.version, reason });
      onDone(`${WORDS[verb][0]}: asked. ${seen.placement.sentence}`);
    } catch (error) {
      setWaiting("");
      setProblem(error.message);
      if (error.status === 409) await preview(error.message);
    }
  };
  const dialog = useRef(null);
  useLayoutEffect(() => dialog.current.showModal(), []); // a ref is set before the page has the element
  return html`<dialog ref=${dialog} onClose=${onClose} class="action" aria-labelledby="action">
    <form onSubmit=${act}>
      <h2 id="action">${WORDS[verb][0]}: ${name}</h2>
      <p>${WORDS[verb][1]}</p>
      ${!store.me.canWrite && html`<p>This dashboard was started without --allow-writes. Run the command:</p>${seen && html`<${Command} text=${seen.command} />`}`}
      ${verb === "scale" && html`<label>Replicas <input type="number" min="0" max="10000" value=${wanted} onInput=${(event) => setWanted(Number(event.target.value) || 0)} /></label>`}
      ${verb === "undo" && html`<${Revisions} name=${name} before=${before} chosen=${revision} onChoose=${setRevision} onFound=${() => setSought(false)} />`}
      ${verb === "taint" && html`<${TaintFields} onChange=${setTaint} />`}
      ${verb === "untaint" && html`<label>Taint <select onChange=${(event) => setTaint(taints[event.target.selectedIndex])}>
        ${taints.map((one) => html`<option key=${taintText(one)}>${taintText(one)}</option>`)}</select></label>`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${waiting && html`<${Waiting} store=${store} what=${waiting} />`}
      ${seen && html`
        ${!seen.isChanged && html`<p><${Badge} tone="idle">nothing would change<//></p>`}
        ${seen.isChanged && html`${seen.diff && html`<${Diff} text=${seen.diff} />`}<p data-plan>${seen.placement.sentence}</p>
          <${PlacementSteps} steps=${seen.placement.steps} />`}`}
      ${seen && store.me.canWrite && html`<${Command} text=${seen.command} />`}
      ${store.mayWrite("operator") && html`<label>Reason <input maxlength="500" value=${reason} placeholder="for the record of changes" onInput=${(event) => setReason(event.target.value)} /></label>`}
      ${verb === "delete" && store.mayWrite("admin") && html`<label>Type <b>${name}</b> to delete it <input value=${typed} autocomplete="off" spellcheck="false" onInput=${(event) => setTyped(event.target.value.trim())} /></label>`}
      <p class="row">
        ${store.mayWrite("operator") && html`<button type="submit" class=${verb === "delete" ? "danger" : ""} disabled=${!seen?.isChanged || needsTaint || needsName || waiting}>${WORDS[verb][0]}</button>`}
        <button type="button" onClick=${(event) => event.target.closest("dialog").close()}>${store.me.canWrite ? "Cancel" : "Close"}</button>
      </p>
    </form>
  </dialog>`;
}

/** For what a dialog waits, for how long, and whether the control plane is why. */
function Waiting({ store, what }) {
  const [seconds, setSeconds] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setSeconds((now) => now + 1), 1_000);
    return () => clearInterval(timer);
  }, [what]);
  const silent = store.silentSeconds >= SLOW_S ? ` The control plane (etcd) has not answered for ${Math.round(store.silentSeconds)} s.` : "";
  return html`<p class="quiet" role="status" data-waiting>Waiting for ${what}${seconds >= SLOW_S ? `, for ${seconds} s` : ""}.${silent}</p>`;
}

const EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

function TaintFields({ onChange }) {
  const [taint, setTaint] = useState({ key: "", value: "", effect: EFFECTS[0] });
  const change = (part) => {
    const next = { ...taint, ...part };
    setTaint(next);
    onChange(next.key ? next : null);
  };
  return html`<div class="row">
    <label>Key <input value=${taint.key} placeholder="owner" onInput=${(event) => change({ key: event.target.value.trim() })} /></label>
    <label>Value <input value=${taint.value} placeholder="anna" onInput=${(event) => change({ value: event.target.value.trim() })} /></label>
    <label>Effect <select onChange=${(event) => change({ effect: event.target.value })}>${EFFECTS.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>
  </div>`;
}

function Revisions({ name, before, chosen, onChoose, onFound }) {
  const [rows, setRows] = useState([]);
  const [note, setNote] = useState("");
  useEffect(() => {
    const query = before ? `?${new URLSearchParams({ before })}` : "";
    getJson(`/api/v1/revisions/${encodeURIComponent(name)}${query}`)
      .then((found) => {
        setRows(found.revisions);
        if (before && found.before === null) setNote("No recorded revision is as the model was before that change. Choose one.");
        if (found.before !== null) onChoose(found.before);
      }, (error) => before && setNote(error.message))
      .then(onFound);
  }, [name]);
  return html`<label>Revision <select value=${chosen ?? ""} onChange=${(event) => onChoose(Number(event.target.value) || null)}>
    <option value="">the one before</option>
    ${rows.filter((one) => !one.isCurrent || one.revision === chosen).map((one) => html`<option key=${one.revision} value=${one.revision}>${one.revision}, ${age(one.created)} old${one.cause ? `: ${one.cause}` : ""}</option>`)}
  </select></label>
  ${note && html`<p class="quiet" role="status">${note}</p>`}`;
}

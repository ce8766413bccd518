/** Actions on one object: a dialog that previews what would change, and carries it out only if nothing changed since. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { getJson, postJson } from "./fleet_store.js";
import { age, taintText } from "./format.js";
import { Badge, Command, Diff } from "./parts.js";
import { PlacementSteps } from "./placement_steps.js";

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

/** Return the action that the address asks for, as the command line does, and the change that it takes back; both leave the address. */
function asked(verbs) {
  const query = new URLSearchParams(location.search);
  const found = query.get("do");
  if (found === null) return { verb: "", before: "" };
  history.replaceState(null, "", location.pathname);
  return { verb: verbs.includes(found) ? found : "", before: query.get("before") ?? "" };
}

const TYPING_MS = 250;

/** Buttons of the actions that make sense; each opens a dialog. */
export function Actions({ store, verbs, name, replicas, taints = [] }) {
  const [{ verb, before }, setAction] = useState(() => asked(verbs));
  const setVerb = (one) => setAction({ verb: one, before: "" });
  if (!store.may("operator")) return null;
  const allowed = verbs.filter((one) => one !== "delete" || store.may("admin"));
  return html`
    ${allowed.map((one) => html`<button type="button" class=${one === "delete" ? "small danger" : "small"} key=${one} onClick=${() => setVerb(one)}>${WORDS[one][0]}</button>`)}
    ${verb && html`<${ActionDialog} key=${verb} store=${store} verb=${verb} name=${name} replicas=${replicas} taints=${taints} before=${before} onClose=${() => setVerb("")} />`}
  `;
}

/** `before`: a recorded change; an undo opens with the revision that was there before it. */
function ActionDialog({ store, verb, name, replicas, taints, before, onClose }) {
  const [wanted, setWanted] = useState(replicas ?? 1);
  const [revision, setRevision] = useState(null);
  const [taint, setTaint] = useState(verb === "untaint" ? (taints[0] ?? null) : null);
  const [typed, setTyped] = useState("");
  const [seen, setSeen] = useState(null);
  const [problem, setProblem] = useState("");
  const [isDone, setDone] = useState(false);
  const [reason, setReason] = useState("");
  const [isSought, setSought] = useState(verb === "undo" && before !== "");
  const body = { name, ...(verb === "scale" ? { replicas: wanted } : {}), ...(revision ? { revision } : {}), ...(taint ? { taint } : {}) };
  const needsTaint = (verb === "taint" || verb === "untaint") && !taint?.key;
  const needsName = verb === "delete" && typed !== name;
  const preview = async (why = "") => {
    if (needsTaint || isSought) return;
    try {
      setSeen(await postJson(`/api/v1/actions/${verb}`, { ...body, dryRun: true }));
      setProblem(why);
    } catch (error) {
      setSeen(null);
      setProblem(error.message);
    }
  };
  useEffect(() => {
    const timer = setTimeout(() => void preview(), seen ? TYPING_MS : 0);
    return () => clearTimeout(timer);
  }, [wanted, revision, taint, isSought]);
  const act = async (event) => {
    event.preventDefault();
    try {
      await postJson(`/api/v1/actions/${verb}`, { ...body, version: seen.version, reason });
      setDone(true);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
      if (error.status === 409) await preview(error.message);
    }
  };
  const show = (dialog) => dialog && !dialog.open && dialog.showModal();
  return html`<dialog ref=${show} onClose=${onClose} class="action" aria-labelledby="action">
    <form onSubmit=${act}>
      <h2 id="action">${WORDS[verb][0]}: ${name}</h2>
      <p>${WORDS[verb][1]}</p>
      ${verb === "scale" && html`<label>Replicas <input type="number" min="0" max="10000" value=${wanted} onInput=${(event) => setWanted(Number(event.target.value) || 0)} /></label>`}
      ${verb === "undo" && html`<${Revisions} name=${name} before=${before} chosen=${revision} onChoose=${setRevision} onFound=${() => setSought(false)} />`}
      ${verb === "taint" && html`<${TaintFields} onChange=${setTaint} />`}
      ${verb === "untaint" && html`<label>Taint <select onChange=${(event) => setTaint(taints[event.target.selectedIndex])}>
        ${taints.map((one) => html`<option key=${taintText(one)}>${taintText(one)}</option>`)}</select></label>`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${isDone && html`<p role="status" data-done><${Badge} tone="good">asked<//> The fleet carries it out; this page shows when it has.</p>`}
      ${seen && !isDone && html`
        ${!seen.isChanged && html`<p><${Badge} tone="idle">nothing would change<//></p>`}
        ${seen.isChanged && html`${seen.diff && html`<${Diff} text=${seen.diff} />`}<p data-plan>${seen.placement.sentence}</p>
          <${PlacementSteps} steps=${seen.placement.steps} />`}`}
      ${seen && html`<${Command} text=${seen.command} />`}
      ${!isDone && store.mayWrite("operator") && html`<label>Reason <input maxlength="500" value=${reason} placeholder="for the record of changes" onInput=${(event) => setReason(event.target.value)} /></label>`}
      ${verb === "delete" && !isDone && store.mayWrite("admin") && html`<label>Type <b>${name}</b> to delete it <input value=${typed} autocomplete="off" spellcheck="false" onInput=${(event) => setTyped(event.target.value.trim())} /></label>`}
      <p class="row">
        ${!isDone && store.mayWrite("operator") && html`<button type="submit" class=${verb === "delete" ? "danger" : ""} disabled=${!seen?.isChanged || needsTaint || needsName}>${WORDS[verb][0]}</button>`}
        <button type="button" onClick=${(event) => event.target.closest("dialog").close()}>${isDone ? "Close" : "Cancel"}</button>
        ${!store.me.canWrite && html`<span class="quiet">This dashboard was started without --allow-writes: use the command.</span>`}
      </p>
    </form>
  </dialog>`;
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

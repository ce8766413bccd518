/** Actions on one object: a dialog that previews what would change, and carries it out only if nothing changed since. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { getJson, postJson } from "./fleet_store.js";
import { age } from "./format.js";
import { Badge, Command, Diff } from "./parts.js";
import { stepReason, stepWord } from "./screens/whatif.js";

const WORDS = {
  cordon: ["Cordon", "No new replicas are placed on it. Running ones stay."],
  uncordon: ["Uncordon", "It takes replicas again."],
  drain: ["Drain", "Its replicas move to other Macs, as far as minAvailable allows, and no new ones come."],
  scale: ["Scale", "Sets the number of replicas."],
  pause: ["Pause the rollout", "Lost replicas are still replaced."],
  resume: ["Resume the rollout", ""],
  restart: ["Restart", "Its engines are restarted as spec.rollout allows, without dropping requests."],
  undo: ["Undo the rollout", "Returns to an earlier revision."],
  promote: ["Promote the canary", "The new version passes, and all replicas get it."],
  abort: ["Abort the canary", "The earlier version serves again."],
};

/** Buttons of the actions that make sense; each opens a dialog. */
export function Actions({ store, verbs, name, replicas }) {
  const [verb, setVerb] = useState("");
  if (!store.may("operator")) return null;
  return html`
    ${verbs.map((one) => html`<button type="button" class="small" key=${one} onClick=${() => setVerb(one)}>${WORDS[one][0]}</button>`)}
    ${verb && html`<${ActionDialog} key=${verb} store=${store} verb=${verb} name=${name} replicas=${replicas} onClose=${() => setVerb("")} />`}
  `;
}

function ActionDialog({ store, verb, name, replicas, onClose }) {
  const [wanted, setWanted] = useState(replicas ?? 1);
  const [revision, setRevision] = useState(null);
  const [seen, setSeen] = useState(null);
  const [problem, setProblem] = useState("");
  const [isDone, setDone] = useState(false);
  const [reason, setReason] = useState("");
  const body = { name, ...(verb === "scale" ? { replicas: wanted } : {}), ...(revision ? { revision } : {}) };
  const preview = async () => {
    try {
      setSeen(await postJson(`/api/v1/actions/${verb}`, { ...body, dryRun: true }));
      setProblem("");
    } catch (error) {
      setSeen(null);
      setProblem(error.message);
    }
  };
  useEffect(() => void preview(), [wanted, revision]);
  const act = async (event) => {
    event.preventDefault();
    try {
      await postJson(`/api/v1/actions/${verb}`, { ...body, version: seen.version, reason });
      setDone(true);
      setProblem("");
    } catch (error) {
      if (error.status === 409) await preview();
      setProblem(error.message);
    }
  };
  const show = (dialog) => dialog && !dialog.open && dialog.showModal();
  return html`<dialog ref=${show} onClose=${onClose} class="action" aria-labelledby="action">
    <form onSubmit=${act}>
      <h2 id="action">${WORDS[verb][0]}: ${name}</h2>
      <p>${WORDS[verb][1]}</p>
      ${verb === "scale" && html`<label>Replicas <input type="number" min="0" max="10000" value=${wanted} onInput=${(event) => setWanted(Number(event.target.value) || 0)} /></label>`}
      ${verb === "undo" && html`<${Revisions} name=${name} chosen=${revision} onChoose=${setRevision} />`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${isDone && html`<p role="status" data-done><${Badge} tone="good">asked<//> The fleet carries it out; this page shows when it has.</p>`}
      ${seen && !isDone && html`
        ${!seen.isChanged && html`<p><${Badge} tone="idle">nothing would change<//></p>`}
        ${seen.isChanged && html`<${Diff} text=${seen.diff} /><p data-plan>${seen.placement.sentence}</p>
          <ul>${seen.placement.steps.slice(0, 20).map((one) => html`<li key=${one.replica + one.change}>${one.replica}: ${stepWord(one)}
            ${one.from.length > 0 && ` from ${one.from.join(", ")}`}${one.to.length > 0 && ` to ${one.to.join(", ")}`} <span class="quiet">${stepReason(one)}</span></li>`)}</ul>`}`}
      ${seen && html`<${Command} text=${seen.command} />`}
      ${!isDone && store.mayWrite("operator") && html`<label>Reason <input maxlength="500" value=${reason} placeholder="for the record of changes" onInput=${(event) => setReason(event.target.value)} /></label>`}
      <p class="row">
        ${!isDone && store.mayWrite("operator") && html`<button type="submit" disabled=${!seen?.isChanged}>${WORDS[verb][0]}</button>`}
        <button type="button" onClick=${(event) => event.target.closest("dialog").close()}>${isDone ? "Close" : "Cancel"}</button>
        ${!store.me.canWrite && html`<span class="quiet">This dashboard was started without --allow-writes: use the command.</span>`}
      </p>
    </form>
  </dialog>`;
}

function Revisions({ name, chosen, onChoose }) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    getJson(`/api/v1/revisions/${encodeURIComponent(name)}`).then((found) => setRows(found.revisions), () => {});
  }, [name]);
  return html`<label>Revision <select value=${chosen ?? ""} onChange=${(event) => onChoose(Number(event.target.value) || null)}>
    <option value="">the one before</option>
    ${rows.filter((one) => !one.isCurrent).map((one) => html`<option key=${one.revision} value=${one.revision}>${one.revision}, ${age(one.created)} old${one.cause ? `: ${one.cause}` : ""}</option>`)}
  </select></label>`;
}

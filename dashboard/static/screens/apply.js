/** Apply: a manifest with its errors by line, the diff and the plan first, then the write of exactly that. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { getJson, postJson } from "../fleet_store.js";
import { Badge, Command, Diff, ManifestErrors, ObjectLink } from "../parts.js";
import { PlacementSteps } from "./whatif.js";

const WAIT_MS = 400;
const EXAMPLE = `apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: my-model
spec:
  model:
    path: my-model
  replicas: 1
`;

export function Apply({ store, query }) {
  const [text, setText] = useState("");
  const [checked, setChecked] = useState(null);
  const [problem, setProblem] = useState("");
  const [done, setDone] = useState(null);
  const [reason, setReason] = useState("");
  const editor = useRef(null);
  const last = useRef(0);

  useEffect(() => {
    const kind = query.get("kind");
    if (!kind) return;
    const path = `/api/v1/objects/${kind}/${encodeURIComponent(query.get("name") ?? "")}?form=manifest`;
    getJson(path).then((found) => setText(found.yaml), (error) => setProblem(error.message));
  }, []);

  /** Ask what the text would change; `why` is a refusal that stays until the next one. */
  const check = async (why = "") => {
    const mine = ++last.current;
    if (!text.trim()) {
      setChecked(null);
      return;
    }
    try {
      const found = await postJson("/api/v1/check", { manifests: text });
      if (mine !== last.current) return;
      setChecked(found);
      setProblem(why);
    } catch (error) {
      if (mine === last.current) setProblem(error.message);
    }
  };
  useEffect(() => {
    const timer = setTimeout(() => check(), WAIT_MS);
    return () => clearTimeout(timer);
  }, [text]);

  const apply = async () => {
    const plan = checked.plan;
    setProblem("");
    try {
      setDone(await postJson("/api/v1/apply", { manifests: text, plan, reason }));
      await check();
    } catch (error) {
      setProblem(error.message);
      if (error.status === 409) await check(error.message);
    }
  };

  const changes = (checked?.changes ?? []).filter((one) => one.result !== "unchanged");
  return html`
    <h1>Apply</h1>
    <div class="columns wide-columns">
      <section class="panel" aria-labelledby="manifest">
        <h2 id="manifest">Manifest</h2>
        <${Editor} editor=${editor} text=${text} errors=${checked?.errors ?? []} onInput=${(value) => (setText(value), setDone(null))} />
        ${!text && html`<p><button type="button" class="small" onClick=${() => setText(EXAMPLE)}>Begin with an example</button></p>`}
      </section>
      <section class="panel" aria-labelledby="preview">
        <h2 id="preview">What it would change</h2>
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
        ${done && html`<div class="done" role="status" data-done>${done.outcomes.map((one) => html`<p key=${one.kind + one.name}>
          <${Badge} tone="good">${one.result}<//> <${ObjectLink} kind=${one.kind} name=${one.name} /></p>`)}</div>`}
        ${!checked && !problem && html`<p class="quiet">Paste a manifest. It is checked as you type, and nothing is written before you say so.</p>`}
        ${checked?.errors.length > 0 && html`<${ManifestErrors} errors=${checked.errors} onPick=${(one) => select(editor.current, one)} />`}
        ${checked && !checked.errors.length && html`
          ${!changes.length && html`<p><${Badge} tone="good">nothing would change<//></p>`}
          ${changes.map((one) => html`<div key=${one.kind + one.name}>
            <p><strong>${one.kind}/${one.name}</strong> <${Badge} tone="idle">${one.result}<//></p>
            ${one.keptByOthers.map((kept) => html`<p class="warning-text" key=${kept}>${kept}</p>`)}
            <${Diff} text=${one.diff} />
          </div>`)}
          ${changes.length > 0 && html`
            <h3>What the planner would do</h3>
            <p data-plan>${checked.placement.sentence}</p>
            <${PlacementSteps} steps=${checked.placement.steps} />
            ${store.mayWrite("admin")
              ? html`<p class="row"><label>Reason <input maxlength="500" value=${reason} placeholder="for the record of changes" onInput=${(event) => setReason(event.target.value)} /></label>
                <button type="submit" onClick=${apply}>Apply these changes</button></p>`
              : html`<p class="quiet">${store.may("admin") ? "This dashboard was started without --allow-writes." : `Your role is ${store.me.role}; applying needs the role admin.`} The command does the same:</p>`}`}
          <${Command} text="fleetctl apply -f manifest.yaml" />`}
      </section>
    </div>
  `;
}

/** A text area with line numbers; lines with errors are marked. */
function Editor({ editor, text, errors, onInput }) {
  const numbers = useRef(null);
  const wrong = new Set(errors.map((one) => one.line));
  const lines = text.split("\n").length;
  const onScroll = (event) => (numbers.current.scrollTop = event.target.scrollTop);
  const onKey = (event) => {
    if (event.key !== "Tab" || event.shiftKey || event.target.selectionStart === 0) return; // a way out for the keyboard
    event.preventDefault();
    event.target.setRangeText("  ", event.target.selectionStart, event.target.selectionEnd, "end");
    onInput(event.target.value);
  };
  return html`<div class="editor">
    <pre class="line-numbers" ref=${numbers} aria-hidden="true">${Array.from({ length: lines }, (_, at) => html`<span key=${at} class=${wrong.has(at + 1) ? "wrong" : ""}>${at + 1}</span>`)}</pre>
    <label><span class="hidden">Manifest, YAML</span>
      <textarea class="code" ref=${editor} rows="24" wrap="off" spellcheck=${false} autocapitalize="off" value=${text} aria-invalid=${errors.length > 0}
        onInput=${(event) => onInput(event.target.value)} onScroll=${onScroll} onKeyDown=${onKey}></textarea>
    </label>
  </div>`;
}

/** Put the cursor at the place of a problem. */
function select(area, { line, column }) {
  const before = area.value.split("\n").slice(0, line - 1);
  const at = before.reduce((sum, one) => sum + one.length + 1, 0) + Math.max(0, column - 1);
  area.focus();
  area.setSelectionRange(at, at);
}

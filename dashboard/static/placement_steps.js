/** What the planner would do with each replica, for previews of any change. */

import { html } from "./vendor/htm-preact.js";
import { bytes } from "./format.js";
import { proofText } from "./memory_bars.js";
import { Badge, Names } from "./parts.js";

const MOST_SHOWN = 40;
const WORDS = { New: "new", Replaced: "replaced", ReplacedInPlace: "replaced in place", Kept: "unchanged", Ends: "ends" };

export function PlacementSteps({ steps }) {
  if (!steps.length) return html`<p class="quiet">No replica moves.</p>`;
  return html`<ul class="plan-steps">
    ${steps.slice(0, MOST_SHOWN).map((step) => html`<li key=${step.replica + step.change} data-step=${step.replica}>
      <strong>${step.replica}</strong> <${Badge} tone=${step.refusal ? "bad" : step.change === "Ends" ? "idle" : "good"}>${step.refusal ? "unplaced" : WORDS[step.change]}<//>
      ${step.from.length > 0 && html`${" "}from <${Names} kind="Node" names=${step.from} />`}${step.to.length > 0 && html`${" "}on <${Names} kind="Node" names=${step.to} />`}
      ${step.memory && html`${" "}<span class="quiet" title=${proofText(step.memory)}>${bytes(step.memory.totalBytes)}</span>`}
      ${reasonOf(step) && html`<span class="quiet"> ${reasonOf(step)}</span>`}
    </li>`)}
    ${steps.length > MOST_SHOWN && html`<li class="quiet">and ${steps.length - MOST_SHOWN} more</li>`}
  </ul>`;
}

const reasonOf = (step) => [step.refusal, step.reason, step.waitsFor, step.displaces && `displaces ${step.displaces.join(", ")}`].filter(Boolean).join("; ");

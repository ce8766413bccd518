/** Conversations with one model or two side by side, with the trace of each answer: Mac, replica, attempts, figures. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { messagesOf, stream } from "../conversation.js";
import { getJson } from "../fleet_store.js";
import { span } from "../format.js";
import { Markdown } from "../markdown.js";
import { CandidateTable } from "../candidates.js";
import { Announced, copyText, lazy } from "../parts.js";

const ClientCode = lazy(() => import("../client_code.js"), "ClientCode");
const Waterfall = lazy(() => import("../waterfall.js"), "Waterfall");
const DRAW_MS = 60;
const PROGRESS_MS = 500;
const UNAUTHORIZED = 401;
const PARAMETERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
];

export function Chat({ store, query }) {
  const [models, setModels] = useState([]);
  const [names, setNames] = useState([query.get("model") ?? "", ...(query.get("with") ? [query.get("with")] : [])]);
  const [system, setSystem] = useState("");
  const [parameters, setParameters] = useState({});
  const [key, setKey] = useState("");
  const [draft, setDraft] = useState("");
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(0);
  const [isDue, setDue] = useState(false); // sent, but the models to ask are not known yet
  const [isLoading, setLoading] = useState(true);
  const [isKeyAsked, setKeyAsked] = useState(false); // the field is shown: the gateway has refused the request without it
  const columns = useRef([]);
  const isAsking = columns.current.some((one) => one?.isBusy());

  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const load = async () => {
    setLoading(true);
    try {
      const found = (await getJson("/chat/v1/models", { headers })).data.map((one) => one.id);
      setModels(found);
      setNames(([first, ...more]) => [first || found[0] || "", ...more]);
      setProblem(found.length ? "" : "No model is served yet.");
    } catch (error) {
      setProblem(error.message);
      if (error.status === UNAUTHORIZED) setKeyAsked(true);
    }
    setLoading(false);
  };
  useEffect(() => void load(), []);
  useLayoutEffect(() => {
    if (!isDue || (isLoading && !names[0])) return;
    setDue(false);
    if (!names[0]) return; // the problem says why, and the question stays where it was typed
    for (const one of columns.current.slice(0, names.length)) one?.ask(draft);
    setDraft("");
  }, [isDue, isLoading, names[0]]);
  const rename = (at, name) => setNames((now) => now.map((one, place) => (place === at ? name : one)));
  const compare = () => {
    columns.current[1]?.stop();
    setNames(([first, ...more]) => (more.length ? [first] : [first, models.find((one) => one !== first) ?? first]));
  };
  const send = (event) => {
    event.preventDefault();
    if (!draft.trim() || isAsking || isDue) return;
    setDue(true);
    if (!names[0] && !isLoading) void load();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const given = Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
  const options = (name) => [...new Set([...(name ? [name] : []), ...models])].map((one) => html`<option key=${one} value=${one}>${one}</option>`);
  return html`
    <h1>Chat</h1>
    <div class="row chat-models">
      <label>Model <select value=${names[0]} onChange=${(event) => rename(0, event.target.value)}>${options(names[0])}</select></label>
      ${names.length > 1 && html`<label>Compared with <select value=${names[1]} onChange=${(event) => rename(1, event.target.value)}>${options(names[1])}</select></label>`}
      <button type="button" onClick=${compare} disabled=${!models.length}>${names.length > 1 ? "Close comparison" : "Compare two models"}</button>
    </div>
    <details class="chat-options" open=${isKeyAsked}><summary>Settings</summary>
      <div class="chat-settings">
        <label>System prompt <input value=${system} onInput=${(event) => setSystem(event.target.value)} /></label>
        ${PARAMETERS.map(([name, title, more]) => html`<label key=${name}>${title}
          <input type="number" ...${more} value=${parameters[name] ?? ""} onInput=${(event) => setParameters((now) => ({ ...now, [name]: event.target.value }))} /></label>`)}
        <label>API key, if the gateway requires one
          <input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} onChange=${load} />
        </label>
      </div>
    </details>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class=${names.length > 1 ? "conversations two" : "conversations"}>
      ${names.map((name, at) => html`<${Conversation} key=${at} store=${store} model=${name} isTitled=${names.length > 1} system=${system} parameters=${given} headers=${headers}
        register=${(one) => (columns.current[at] = one)} onBusy=${() => setBusy((number) => number + 1)} />`)}
    </div>
    <p class="quiet" role="status">${isDue && "The question is sent when the list of models has arrived."}</p>
    <form class="ask" onSubmit=${send} data-busy=${busy}>
      <label><span class="hidden">Message</span>
        <textarea rows="3" value=${draft} placeholder="Message (Enter sends, Shift-Enter begins a line)"
          onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKey}></textarea>
      </label>
      ${isAsking
        ? html`<button type="button" onClick=${() => columns.current.forEach((one) => one?.stop())}>Stop</button>`
        : html`<button type="submit" disabled=${isDue}>Send</button>`}
    </form>
    ${store.may("viewer") && html`<${Candidates} model=${names[0]} key=${names[0]} />`}
    <details>
      <summary>Use from code</summary>
      <${ClientCode} gateway=${[...store.views.gateways.values()][0]?.url} model=${names[0]} system=${system} />
    </details>
  `;
}

/** The turns with one model. The screen asks it by what it registers. */
function Conversation({ store, model, isTitled, system, parameters, headers, register, onBusy }) {
  const [turns, setTurns] = useState([]);
  const stopping = useRef(null);
  const replaceLast = (change) => setTurns((now) => [...now.slice(0, -1), { ...now.at(-1), ...change }]);
  const ask = async (question, before = turns) => {
    if (stopping.current || !model) return;
    setTurns([...before, { question, answer: "", reasoning: "", trace: null, figures: null, problem: "", isOver: false }]);
    const abort = (stopping.current = new AbortController());
    onBusy();
    const drawing = gather(replaceLast);
    let problem = "";
    try {
      await stream({ model, messages: messagesOf(system, before, question), ...parameters }, { headers, signal: abort.signal }, drawing.add);
    } catch (error) {
      problem = error.name === "AbortError" ? "stopped" : error.message;
    }
    drawing.end({ problem, isOver: true });
    stopping.current = null;
    onBusy();
  };
  register({ ask, stop: () => stopping.current?.abort(), isBusy: () => stopping.current !== null });
  useEffect(() => () => (register(null), stopping.current?.abort()), []);
  return html`<section aria-label=${model || "Conversation"}>
    ${isTitled && html`<h2>${model}</h2>`}
    <${Announced} text=${turnText(turns.at(-1))} />
    <ol class="turns">
      ${turns.map((turn, at) => html`<${Turn} key=${at} store=${store} turn=${turn} isLast=${at === turns.length - 1} onAgain=${() => ask(turn.question, turns.slice(0, at))} />`)}
    </ol>
  </section>`;
}

/** What is said of an answer: that it is under way, and the whole when it is over. */
function turnText(turn) {
  if (!turn) return "";
  return turn.isOver ? [turn.answer, turn.problem].filter(Boolean).join(". ") : "Generating";
}

/** Gather changes, and pass them on a few times a second: a long answer is laid out anew by each. */
function gather(pass) {
  let held = {};
  let timer = 0;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    pass(held);
    held = {};
  };
  return {
    add: (change) => {
      held = { ...held, ...change };
      timer ||= setTimeout(flush, DRAW_MS);
    },
    end: (change) => {
      held = { ...held, ...change };
      flush();
    },
  };
}

function Turn({ store, turn, isLast, onAgain }) {
  const { trace, figures } = turn;
  const [ended, setEnded] = useState(null);
  const isWaiting = !turn.isOver && !figures;
  const open = () => getJson(`/api/v1/requests?limit=1&id=${encodeURIComponent(turn.id)}`).then(({ requests }) => setEnded(requests[0] ?? null), () => {});
  return html`<li>
    <p class="question"><span class="hidden">You: </span>${turn.question}</p>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><pre class="text">${turn.reasoning}</pre></details>`}
    ${isWaiting && html`<${Progress} store=${store} id=${turn.id} />`}
    <div class="answer" data-answer>${turn.answer && html`<${Markdown} text=${turn.answer} />`}</div>
    ${turn.problem && html`<p class="problem">${turn.problem}</p>`}
    ${trace && html`<p class="trace quiet" data-trace>
      answered by ${trace.replica || "?"} on ${trace.node || "?"}${trace.attempts > 1 ? ` at attempt ${trace.attempts}` : ""}
      ${figures && ` · first token after ${span(figures.firstMs)}`}
      ${figures?.rate ? ` · ${figures.rate} tokens/s` : ""}
      ${figures?.output ? ` · ${figures.prompt} tokens in (${figures.cached} cached), ${figures.output} out` : ""}
    </p>`}
    ${turn.isOver && html`<p class="turn-buttons">${isLast && html`<button type="button" class="small" onClick=${onAgain}>Regenerate</button>`}
      <button type="button" class="small" onClick=${() => copyText(turn.answer)}>Copy answer</button>
      ${turn.id && store.may("viewer") && html`<button type="button" class="small" aria-expanded=${ended !== null} onClick=${() => (ended ? setEnded(null) : open())}>Trace</button>`}</p>`}
    ${ended && html`<${Waterfall} store=${store} request=${ended} onClose=${() => setEnded(null)} />`}
  </li>`;
}

/** What becomes of a request before its first token: its place, how much of the prompt is read, and about how long yet. */
function Progress({ store, id }) {
  const [seen, setSeen] = useState(null);
  useEffect(() => {
    if (!id || !store.may("viewer")) return undefined;
    const read = () => getJson("/api/v1/in-flight").then(({ requests }) => setSeen(requests.find((one) => one.id === id) ?? null), () => {});
    read();
    const timer = setInterval(read, PROGRESS_MS);
    return () => clearInterval(timer);
  }, [id]);
  const { phase, promptTokens: all, prefilledTokens: done, seconds, resumptions } = seen ?? {};
  if (phase !== "prefill" || !all || !done) return html`<p class="quiet">${phase === "queued" ? "waiting for an engine" : "…"}${resumptions ? `, resumed ${resumptions} times` : ""}</p>`;
  const left = done < all ? `, about ${span((1000 * seconds * (all - done)) / done)} left` : "";
  return html`<p class="quiet"><progress max=${all} value=${done} aria-label="Prompt read"></progress> ${Math.round((100 * done) / all)} % of ${all} tokens read${left}</p>`;
}

/** The engines that the next question could get, with the parts of their scores: why one of them is chosen. */
function Candidates({ model }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const open = (event) => {
    if (!event.target.open || !model) return;
    getJson(`/api/v1/explain/route?model=${encodeURIComponent(model)}`).then(setFound, (error) => setProblem(error.message));
  };
  const rows = (found?.backends ?? [{ candidates: found?.candidates ?? [] }]).flatMap((one) => one.candidates ?? []);
  return html`<details onToggle=${open}>
    <summary>Routing: which engine the next question gets, and why</summary>
    ${problem && html`<p class="problem">${problem}</p>`}
    ${found && html`<p class="quiet">gateway ${found.gateway}, best first. A session or a cached prompt may lead elsewhere.</p>
      <${CandidateTable} rows=${rows} empty="No engine answers for this model." />`}
  </details>`;
}

/** A conversation with a model through a gateway, with the trace of each answer: Mac, replica, attempts, figures. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { CHANGE_HEADERS, getJson, refusalText } from "../fleet_store.js";
import { copyText, ObjectLink, Table } from "../parts.js";

const MAX_TEXT = 200_000;

export function Chat({ query }) {
  const [models, setModels] = useState([]);
  const [model, setModel] = useState(query.get("model") ?? "");
  const [system, setSystem] = useState("");
  const [temperature, setTemperature] = useState("");
  const [key, setKey] = useState("");
  const [turns, setTurns] = useState([]);
  const [draft, setDraft] = useState("");
  const [problem, setProblem] = useState("");
  const stopping = useRef(null);

  const headers = () => (key ? { authorization: `Bearer ${key}` } : {});
  const load = async () => {
    try {
      const found = (await getJson("/chat/v1/models", { headers: headers() })).data.map((one) => one.id);
      setModels(found);
      setModel((now) => now || found[0] || "");
      setProblem(found.length ? "" : "No model is served yet.");
    } catch (error) {
      setProblem(error.message);
    }
  };
  useEffect(() => void load(), []);
  useEffect(() => () => stopping.current?.abort(), []);

  const replaceLast = (change) => setTurns((now) => [...now.slice(0, -1), { ...now.at(-1), ...change }]);

  const ask = async (question, before) => {
    const messages = before.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer },
    ]);
    if (system) messages.unshift({ role: "system", content: system });
    const body = {
      model,
      messages: [...messages, { role: "user", content: question }],
      stream: true,
      stream_options: { include_usage: true },
      ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    };
    setTurns([...before, { question, answer: "", reasoning: "", trace: null, figures: null, problem: "" }]);
    setDraft("");
    setProblem("");
    const abort = (stopping.current = new AbortController());
    try {
      await stream(body, { headers: headers(), signal: abort.signal }, replaceLast);
    } catch (error) {
      replaceLast({ problem: error.name === "AbortError" ? "stopped" : error.message });
    } finally {
      stopping.current = null;
      setTurns((now) => [...now]);
    }
  };
  const send = (event) => {
    event.preventDefault();
    if (draft.trim() && model && !stopping.current) void ask(draft, turns);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };

  return html`
    <h1>Chat</h1>
    <div class="chat-settings">
      <label>Model
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${[...new Set([...(model ? [model] : []), ...models])].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
      </label>
      <label>System prompt <input value=${system} onInput=${(event) => setSystem(event.target.value)} /></label>
      <label>Temperature
        <input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(event) => setTemperature(event.target.value)} />
      </label>
      <label>API key, if the gateway requires one
        <input type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} onChange=${load} />
      </label>
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <ol class="turns" aria-live="polite">
      ${turns.map((turn, at) => html`<${Turn} key=${at} turn=${turn} isLast=${at === turns.length - 1}
        onAgain=${() => !stopping.current && ask(turn.question, turns.slice(0, at))} />`)}
    </ol>
    <form class="ask" onSubmit=${send}>
      <label><span class="hidden">Message</span>
        <textarea rows="3" value=${draft} placeholder="Message (Enter sends, Shift-Enter begins a line)"
          onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKey}></textarea>
      </label>
      ${stopping.current
        ? html`<button type="button" onClick=${() => stopping.current?.abort()}>Stop</button>`
        : html`<button type="submit" disabled=${!model}>Send</button>`}
    </form>
    <${Candidates} model=${model} key=${`${model} ${turns.length}`} />
    <details>
      <summary>The same with curl</summary>
      <${Curl} model=${model} system=${system} />
    </details>
  `;
}

function Turn({ turn, isLast, onAgain }) {
  const { trace, figures } = turn;
  return html`<li>
    <p class="question"><span class="hidden">You: </span>${turn.question}</p>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><pre class="text">${turn.reasoning}</pre></details>`}
    <pre class="answer text" data-answer>${turn.answer}</pre>
    ${turn.problem && html`<p class="problem">${turn.problem}</p>`}
    ${trace && html`<p class="trace quiet" data-trace>
      answered by ${trace.replica || "?"} on ${trace.node || "?"}${trace.attempts > 1 ? ` at attempt ${trace.attempts}` : ""}
      ${figures && ` · first token after ${figures.firstMs} ms`}
      ${figures?.rate ? ` · ${figures.rate} tokens/s` : ""}
      ${figures?.output ? ` · ${figures.prompt} tokens in (${figures.cached} cached), ${figures.output} out` : ""}
    </p>`}
    ${isLast && html`<p><button type="button" class="small" onClick=${onAgain}>Ask again</button>
      <button type="button" class="small" onClick=${() => copyText(turn.answer)}>Copy answer</button></p>`}
  </li>`;
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
  const parts = [...new Set(rows.flatMap((one) => Object.keys(one.parts ?? one.scores ?? {})))];
  const columns = [
    ["Engine", (one) => one.replica ?? one.name],
    ["Mac", (one) => (one.worker ? html`<${ObjectLink} kind="Node" name=${one.worker} />` : "-")],
    ["Score", (one) => shown(one.score), "number"],
    ...parts.map((part) => [part, (one) => shown((one.parts ?? one.scores)[part]), "number"]),
    ["Under way", (one) => one.inFlight ?? one.running ?? "-", "number"],
  ];
  return html`<details onToggle=${open}>
    <summary>Routing: which engine the next question gets, and why</summary>
    ${problem && html`<p class="problem">${problem}</p>`}
    ${found && html`<p class="quiet">gateway ${found.gateway}, best first. A session or a cached prompt may lead elsewhere.</p>
      <${Table} caption="Candidates" columns=${columns} rows=${rows.map((one, at) => ({ ...one, name: `${at}` }))} empty="No engine answers for this model." />`}
  </details>`;
}

const shown = (value) => (typeof value === "number" ? Number(value.toFixed(3)) : value ?? "-");

function Curl({ model, system }) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: "Hello!" }];
  const body = JSON.stringify({ model, messages }).replaceAll("'", "'\\''");
  return html`<pre tabindex="0">curl GATEWAY/v1/chat/completions -H 'content-type: application/json' \\
  -d '${body}'</pre>`;
}

/** Send a request, and pass on each change of its answer. Throws if it is refused or breaks. */
async function stream(body, init, change) {
  const beganAt = performance.now();
  const answer = await fetch("/chat/v1/chat/completions", {
    ...init,
    method: "POST",
    headers: { ...init.headers, ...CHANGE_HEADERS },
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(await refusalText(answer));
  const header = (name) => answer.headers.get(`x-fleet-${name}`) ?? "";
  change({ trace: { node: header("node"), replica: header("replica"), attempts: Number(header("attempts") || 1) } });
  const sum = { text: "", reasoning: "", firstAt: 0, usage: null, isDone: false };
  for await (const data of events(answer.body)) {
    take(data, sum);
    const now = performance.now();
    sum.firstAt ||= sum.text || sum.reasoning ? now : 0;
    change({ answer: sum.text, reasoning: sum.reasoning, figures: figures(sum, beganAt, now) });
    if (sum.isDone) return;
  }
  throw new Error("The answer broke off before its end.");
}

function take(data, sum) {
  if (data === "[DONE]") {
    sum.isDone = true;
    return;
  }
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message);
  const delta = event.choices?.[0]?.delta ?? {};
  sum.text = (sum.text + (delta.content ?? "")).slice(0, MAX_TEXT);
  sum.reasoning = (sum.reasoning + (delta.reasoning_content ?? "")).slice(0, MAX_TEXT);
  sum.usage = event.usage ?? sum.usage;
}

function figures(sum, beganAt, now) {
  if (!sum.firstAt) return null;
  const output = sum.usage?.completion_tokens ?? 0;
  const seconds = (now - sum.firstAt) / 1000;
  return {
    firstMs: Math.round(sum.firstAt - beganAt),
    rate: output > 1 && seconds > 0 ? (output / seconds).toFixed(1) : "",
    output,
    prompt: sum.usage?.prompt_tokens ?? 0,
    cached: sum.usage?.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

/** Yield the data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

/** Conversations with one model or two side by side: ask, stop, edit, attach, and who answered, how fast, from which cache. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { keptText, newTurn, requestOf, restored, stream } from "../conversation.js";
import { getJson, parsed } from "../fleet_store.js";
import { number, span } from "../format.js";
import { CandidateTable, Prefill } from "../request_trace.js";
import { Announced, copyText, lazy, ModelState, problemsOf, Segments, Select, useListener, useRead } from "../parts.js";
import { note } from "../router.js";

const Markdown = lazy(() => import("../markdown.js"), "Markdown");
const Waterfall = lazy(() => import("../request_trace.js"), "Waterfall");
const DRAW_MS = 60;
const PROGRESS_MS = 500;
const TRACE_MS = 1_000;
const TRACE_TRIES = 10;
const NEAR_END_PX = 80;
const UNAUTHORIZED = 401;
const PARAMETERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
];
const EXAMPLES = [
  "Explain in three sentences how a language model writes text.",
  "Write a shell command that lists the ten largest files below a folder.",
  "Compare bubble sort and merge sort in a table.",
];
const PANELS = { settings: "Settings", code: "Use from code", routing: "Routing" };

export function Chat({ store, query }) {
  const storageKey = `chat ${store.me.name}`; // of one session: another key of this browser has its own
  const [models, setModels] = useState([]);
  const [names, setNames] = useState([query.get("model") ?? "", ...(query.get("with") ? [query.get("with")] : [])]);
  const [kept] = useState(() => restored(localStorage.getItem(storageKey)));
  const [settings, setSettings] = useState(kept.settings);
  const [turns, setTurns] = useState(kept.turns); // by model
  const [key, setKey] = useState("");
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const [panel, setPanel] = useState("");
  const [isDue, setDue] = useState(false); // sent, but the models to ask are not known yet
  const [isLoading, setLoading] = useState(true);
  const aborts = useRef(new Map()); // of the answers under way, by model
  const asked = useRef(new Set()); // the models that were asked in this visit: their answers are announced
  const isAtEnd = useRef(true);
  const wasAsking = useRef(false);
  const isAsking = names.some((name) => aborts.current.has(name));
  const rows = names.map((name) => store.rows("models").find((row) => row.servedNames.includes(name)));
  const imageLimit = Math.min(...rows.map((row) => row?.vision?.maxImages ?? 0));

  const load = async () => {
    setLoading(true);
    try {
      const ids = (await getJson("/chat/v1/models", { headers: headersOf(key) })).data.map((model) => model.id);
      setModels(ids);
      setNames(([first, ...others]) => [first || ids[0] || "", ...others]);
      setProblem(ids.length ? "" : "No model is served yet.");
    } catch (error) {
      setProblem(error.message);
      if (error.status === UNAUTHORIZED) setPanel("settings");
    }
    setLoading(false);
  };
  useEffect(() => {
    void load();
    return () => aborts.current.forEach((abort) => abort.abort());
  }, []);
  useListener("scroll", () => (isAtEnd.current = innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_END_PX));
  useLayoutEffect(() => {
    // Also once after the answer: its figures and buttons come at the end.
    if ((isAsking || wasAsking.current) && isAtEnd.current) scrollTo(0, document.documentElement.scrollHeight);
    wasAsking.current = isAsking;
  });
  const count = Object.values(turns).reduce((sum, of) => sum + of.length, 0);
  useLayoutEffect(() => keep(storageKey, settings, turns), [settings, count, aborts.current.size]);
  useLayoutEffect(() => {
    if (!isDue || (isLoading && !names[0])) return;
    setDue(false);
    if (!names[0]) return; // the problem says why, and the question stays where it was typed
    askAll(newTurn({ question: draft, images }));
    setDraft("");
    setImages([]);
  }, [isDue, isLoading, names[0]]);

  const askAll = (turn) => names.forEach((name) => void ask(name, turn, turns[name] ?? []));
  const ask = async (model, turn, before) => {
    if (aborts.current.has(model)) return;
    const abort = new AbortController();
    aborts.current.set(model, abort);
    isAtEnd.current = true;
    asked.current.add(model);
    const conversation = [...before, turn];
    setTurns((now) => ({ ...now, [model]: conversation }));
    const draw = (change) => setTurns((now) => (now[model] ? { ...now, [model]: [...now[model].slice(0, -1), { ...now[model].at(-1), ...change }] } : now));
    const drawing = gather(draw);
    const end = { note: "", problem: "", isOver: true };
    const head = {}; // the id of the request and who answers it, if that was known when the answer began
    const change = (part) => (Object.assign(head, part.id !== undefined && part), drawing.add(part));
    try {
      const tools = toolsOf(settings);
      if (!tools) throw new Error('Settings, Tools: expected JSON, a list such as [{"type": "function", "function": {"name": "weather"}}]');
      await stream(requestOf({ ...settings, model, tools }, conversation), { headers: headersOf(key), signal: abort.signal }, change);
    } catch (error) {
      if (error.name === "AbortError") end.note = "Stopped.";
      else end.problem = error.message;
    }
    aborts.current.delete(model);
    drawing.end(end);
    if (!head.id || head.trace.replica || !store.may("viewer")) return;
    const trace = await traceOf(head.id);
    if (trace) setTurns((now) => ({ ...now, [model]: now[model]?.map((other) => (other.id === head.id ? { ...other, trace } : other)) ?? [] }));
  };
  const attach = async (files) => {
    const left = imageLimit - images.length - Math.max(0, ...names.map((name) => (turns[name] ?? []).flatMap((turn) => turn.images).length));
    if (files.length > left) {
      setProblem(`The model takes ${imageLimit} images in one conversation; ${Math.max(0, left)} more can be attached.`);
      return;
    }
    try {
      const urls = await Promise.all(files.map((file) => scaled(file, Math.min(...rows.map((row) => row.vision.maxPixels)))));
      setImages((now) => [...now, ...urls]);
      setProblem("");
    } catch {
      setProblem("A file is not an image that this browser reads.");
    }
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
  const onPaste = (event) => {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (files.length && imageLimit) event.preventDefault(), void attach(files);
  };
  const choose = (chosen) => {
    setNames(chosen);
    note({ model: chosen[0], with: chosen[1] ?? "" });
  };
  const rename = (at, name) => choose(names.map((before, index) => (index === at ? name : before)));
  const others = models.filter((name) => name !== names[0]);
  const compare = () => choose(names.length > 1 ? names.slice(0, 1) : [names[0], others[0]]);
  const clear = () => {
    for (const name of names) aborts.current.get(name)?.abort();
    setTurns((now) => Object.fromEntries(Object.entries(now).filter(([name]) => !names.includes(name))));
  };
  const select = (label, at, choices) => html`<${Select} label=${label} value=${names[at]}
    choices=${[...new Set([...(names[at] ? [names[at]] : []), ...choices])]} onChange=${(name) => rename(at, name)} />`;
  return html`<div class="chat">
    <div>
      <h1 class="hidden">Chat</h1>
      <div class="row chat-bar">
        ${select("Model", 0, names[1] ? models.filter((name) => name !== names[1]) : models)}
        ${names.length > 1 && select("Compared with", 1, others)}
        <button type="button" class="small" onClick=${compare} disabled=${names.length < 2 && !others.length}>${names.length > 1 ? "Close comparison" : "Compare two models"}</button>
        ${Object.entries(PANELS).filter(([name]) => name !== "routing" || store.may("viewer")).map(([name, title]) => html`<button type="button" class="small" key=${name} aria-expanded=${panel === name} onClick=${() => setPanel(panel === name ? "" : name)}>${title}</button>`)}
        <button type="button" class="small" onClick=${clear} disabled=${!names.some((name) => turns[name]?.length)}>New conversation</button>
      </div>
      ${panel === "settings" && html`<${Settings} settings=${settings} onChange=${setSettings} apiKey=${key} onKey=${setKey} onKeyDone=${load} />`}
      ${panel === "code" && html`<section class="panel" aria-label=${PANELS.code}><${ClientCode} gateway=${[...store.views.gateways.values()][0]?.url} request=${shownRequest(names[0], settings, turns[names[0]] ?? [], draft)} /></section>`}
      ${panel === "routing" && html`<${Candidates} model=${names[0]} key=${names[0]} />`}
    </div>
    <div class=${names.length > 1 ? "conversations two" : "conversations"}>
      ${names.map((name, at) => html`<section key=${name} aria-label=${name || "Conversation"}>
        ${names.length > 1 && html`<h2>${name}</h2>`}
        <${Announced} text=${asked.current.has(name) ? turnText(turns[name]?.at(-1)) : ""} />
        ${!turns[name]?.length && html`<${About} name=${name} model=${rows[at]} isViewer=${store.may("viewer")} onAsk=${(question) => names[0] && askAll(newTurn({ question }))} />`}
        <ol class="turns">${(turns[name] ?? []).map((turn, index, all) => html`<${Turn} key=${index} store=${store} turn=${turn} isLast=${index === all.length - 1} isBusy=${isAsking}
          onAsk=${(changed) => ask(name, newTurn({ ...turn, ...changed }), all.slice(0, index))} onResults=${(results) => ask(name, newTurn({ results }), all)} />`)}</ol>
        <${Availability} store=${store} model=${rows[at]} />
      </section>`)}
    </div>
    <form class="composer" onSubmit=${send}>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <p class="quiet" role="status">${isDue && "The question is sent when the list of models has arrived."}</p>
      ${images.length > 0 && html`<${Images} urls=${images} onRemove=${(at) => setImages(images.filter((_, index) => index !== at))} />`}
      <div class="ask">
        <label><span class="hidden">Message</span>
          <textarea rows="2" value=${draft} placeholder="Message (Enter sends, Shift-Enter begins a line)" onPaste=${onPaste}
            onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKey}></textarea>
        </label>
        ${imageLimit > 0 && html`<label class="attach"><span>Attach images</span>
          <input type="file" class="hidden" accept="image/*" multiple onChange=${(event) => (void attach([...event.target.files]), (event.target.value = ""))} /></label>`}
        ${isAsking
          ? html`<button type="button" onClick=${() => names.forEach((name) => aborts.current.get(name)?.abort())}>Stop</button>`
          : html`<button type="submit" disabled=${isDue}>Send</button>`}
      </div>
    </form>
  </div>`;
}

const headersOf = (key) => (key ? { authorization: `Bearer ${key}` } : {});

function keep(storageKey, settings, turns) {
  try {
    localStorage.setItem(storageKey, keptText(settings, turns));
  } catch {
    localStorage.removeItem(storageKey); // the browser has less room than this; what is shown stays
  }
}

/** Return the tools of the settings; null if they are no list of JSON. */
function toolsOf({ toolsText = "" }) {
  const tools = toolsText.trim() ? parsed(toolsText) : [];
  return Array.isArray(tools) ? tools : null;
}

/** Return the request of the draft, else that of the last answer, for the panel of code. */
function shownRequest(model, settings, turns, draft) {
  const last = draft.trim() || !turns.length ? newTurn({ question: draft.trim() || "Hello!" }) : newTurn(turns.at(-1));
  const before = draft.trim() ? turns : turns.slice(0, -1);
  return requestOf({ ...settings, model: model || "MODEL", tools: toolsOf(settings) }, [...before, last]);
}

function Settings({ settings, onChange, apiKey, onKey, onKeyDone }) {
  const { system = "", parameters = {}, toolsText = "" } = settings;
  const set = (name, text) => {
    const { [name]: _, ...rest } = parameters;
    onChange({ ...settings, parameters: text === "" ? rest : { ...rest, [name]: Number(text) } });
  };
  return html`<section class="panel chat-settings" aria-label=${PANELS.settings}>
    <label class="across">System prompt <textarea rows="2" value=${system} onInput=${(event) => onChange({ ...settings, system: event.target.value })}></textarea></label>
    ${PARAMETERS.map(([name, title, limits]) => html`<label key=${name}>${title}
      <input type="number" ...${limits} value=${parameters[name] ?? ""} onInput=${(event) => set(name, event.target.value)} /></label>`)}
    <label>API key, if the gateway requires one
      <input type="password" autocomplete="off" value=${apiKey} onInput=${(event) => onKey(event.target.value)} onChange=${onKeyDone} />
    </label>
    <label class="across">Tools, as JSON <textarea class="code" rows="3" spellcheck=${false} value=${toolsText} placeholder='[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
      onInput=${(event) => onChange({ ...settings, toolsText: event.target.value })}></textarea></label>
    <p class="quiet across">Conversations and settings stay in this browser, up to 2 MB; the oldest go first. The API key is forgotten with the page.</p>
  </section>`;
}

function About({ name, model, isViewer, onAsk }) {
  return html`<div class="about">
    <h2>${name || "Chat"}</h2>
    ${model && html`<p class="quiet">${model.source}${" · "}${number(model.contextLength)} tokens of context${model.vision ? " · sees images" : ""}${" · "}on ${model.macs.join(", ") || "no Mac"}</p>
      <p><${ModelState} model=${model} /> <a href=${`/models/${encodeURIComponent(model.name)}`}>About this model</a></p>`}
    ${!isViewer && html`<p class="quiet">Your key may chat. <a href="/settings">What else it may, and who can change that</a></p>`}
    <ul>${EXAMPLES.map((text) => html`<li key=${text}><button type="button" class="example" onClick=${() => onAsk(text)}>${text}</button></li>`)}</ul>
  </div>`;
}

/** Why a model does not answer now, or when it does. */
function Availability({ store, model }) {
  if (!model || model.ready > 0) return null;
  const cause = problemsOf(store, model.name)[0]?.cause ?? model.reason;
  const { loadsInSeconds, givesWay } = model;
  const loads = loadsInSeconds !== null && `${model.name} loads in about ${Math.round(loadsInSeconds)} s${givesWay.length ? `: ${givesWay.join(", ")} ${givesWay.length > 1 ? "give" : "gives"} way` : ""}.`;
  return html`<p class=${loads ? "quiet" : "warning-text"} data-availability>${loads || `${model.name} does not answer now. ${cause}`} <a href=${`/models/${encodeURIComponent(model.name)}`}>Details</a></p>`;
}

/** Return who answered a request that waited for an engine, once it is listed; null if it is not. */
async function traceOf(id) {
  for (let tries = 0; tries < TRACE_TRIES; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, TRACE_MS));
    const { requests } = await getJson(`/api/v1/requests?limit=1&id=${encodeURIComponent(id)}`).catch(() => ({ requests: [] }));
    if (requests.length) return { node: requests[0].worker, replica: requests[0].replica, attempts: requests[0].attempts.length };
  }
  return null;
}

/** What is said of an answer: that it is under way, and the whole when it is over. */
function turnText(turn) {
  if (!turn) return "";
  return turn.isOver ? [turn.answer, turn.note, turn.problem].filter(Boolean).join(". ") : "Generating";
}

/** Gather changes, and pass them on a few times a second: a long answer is laid out anew by each. */
function gather(pass) {
  let held = {};
  let timer = 0;
  const flush = () => {
    pass(held);
    held = {};
    timer = 0;
  };
  return {
    add: (change) => {
      Object.assign(held, change);
      timer ||= setTimeout(flush, DRAW_MS);
    },
    end: (change) => (clearTimeout(timer), pass({ ...held, ...change })),
  };
}

function Turn({ store, turn, isLast, isBusy, onAsk, onResults }) {
  const { question, images, results, answer, reasoning, toolCalls, figures } = turn;
  const [ended, setEnded] = useState(null);
  const [edited, setEdited] = useState(null);
  const open = () => getJson(`/api/v1/requests?limit=1&id=${encodeURIComponent(turn.id)}`).then(({ requests }) => setEnded(requests[0] ?? null), () => {});
  const retry = (event) => {
    event.preventDefault();
    setEdited(null);
    void onAsk({ question: edited });
  };
  return html`<li>
    ${edited === null
      ? html`<div class="question">${question && html`<p><span class="hidden">You: </span>${question}</p>`}
          ${images.length > 0 && html`<${Images} urls=${images} />`}
          ${results.map(({ id, content }) => html`<p key=${id}><span class="quiet">Result</span> <code>${content}</code></p>`)}
        </div>
        ${question && !isBusy && html`<button type="button" class="link" onClick=${() => setEdited(question)}>Edit</button>`}`
      : html`<form class="edit" onSubmit=${retry}><label><span class="hidden">Edited message</span><textarea rows="3" value=${edited} onInput=${(event) => setEdited(event.target.value)}></textarea></label>
          <p class="row"><button type="submit" disabled=${!edited.trim()}>Send again</button> <button type="button" onClick=${() => setEdited(null)}>Cancel</button>
          ${!isLast && html`<span class="quiet">The turns after it are removed.</span>`}</p></form>`}
    ${reasoning && html`<details class="reasoning"><summary>${turn.isOver || answer ? "Reasoning" : "Reasoning…"}</summary><pre class="text">${reasoning}</pre></details>`}
    ${!turn.isOver && !figures && html`<${Progress} store=${store} id=${turn.id} note=${turn.note} />`}
    <div class="answer" data-answer>${answer && html`<${Markdown} text=${answer} />`}</div>
    ${toolCalls.map((call, at) => html`<p key=${at} class="tool-call"><span class="quiet">Calls</span> <code>${call.name}(${call.arguments})</code></p>`)}
    ${isLast && turn.isOver && toolCalls.length > 0 && html`<${Results} calls=${toolCalls} onSend=${onResults} />`}
    ${turn.problem && html`<p class="problem">${turn.problem}</p>`}
    ${turn.isOver && turn.note && html`<p class="quiet">${turn.note}</p>`}
    ${turn.trace && html`<p class="trace quiet" data-trace>${traceText(turn)}</p>`}
    ${turn.isOver && html`<p class="turn-buttons">${isLast && !isBusy && html`<button type="button" class="small" onClick=${() => onAsk({})}>Regenerate</button>`}
      ${answer && html`<button type="button" class="small" onClick=${() => copyText(answer)}>Copy answer</button>`}
      ${turn.id && store.may("viewer") && html`<button type="button" class="small" aria-expanded=${ended !== null} onClick=${() => (ended ? setEnded(null) : open())}>Trace</button>`}</p>`}
    ${ended && html`<${Waterfall} store=${store} request=${ended} onClose=${() => setEnded(null)} />`}
  </li>`;
}

function traceText({ trace, figures }) {
  return [
    `answered by ${trace.replica || "?"} on ${trace.node || "?"}${trace.attempts > 1 ? ` at attempt ${trace.attempts}` : ""}`,
    figures && `first token after ${span(figures.firstMs)}`,
    figures?.rate && `${figures.rate} tokens/s`,
    figures?.output && `${figures.prompt} tokens in (${figures.cached} cached), ${figures.output} out`,
    figures?.output && `${span(figures.allMs)} in all`,
  ].filter(Boolean).join(" · ");
}

function Results({ calls, onSend }) {
  const [texts, setTexts] = useState(() => calls.map(() => ""));
  const send = (event) => {
    event.preventDefault();
    void onSend(calls.map(({ id }, at) => ({ id, content: texts[at] })));
  };
  return html`<form onSubmit=${send} class="row">
    ${calls.map((call, at) => html`<label key=${at}>Result of ${call.name} <input class="long" value=${texts[at]} onInput=${(event) => setTexts(texts.map((text, place) => (place === at ? event.target.value : text)))} /></label>`)}
    <button type="submit">${calls.length > 1 ? "Send the results" : "Send the result"}</button>
  </form>`;
}

function Images({ urls, onRemove }) {
  return html`<ul class="images">${urls.map((url, at) => html`<li key=${at}><img src=${url} alt=${`Attached image ${at + 1}`} />
    ${onRemove && html`<button type="button" class="small" onClick=${() => onRemove(at)}>Remove</button>`}</li>`)}</ul>`;
}

/** Return an image of a file as a data URL with so many pixels at most: models see no more of it. */
async function scaled(file, maxPixels) {
  const bitmap = await createImageBitmap(file);
  const factor = Math.min(1, Math.sqrt(maxPixels / (bitmap.width * bitmap.height)));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(bitmap.width * factor));
  canvas.height = Math.max(1, Math.floor(bitmap.height * factor));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.9);
}

/** What becomes of a request before its first token: its place, how much of the prompt is read, and about how long yet. */
function Progress({ store, id, note }) {
  const [found] = useRead(async () => id && store.may("viewer") && getJson("/api/v1/in-flight"), [id], PROGRESS_MS);
  const request = found?.requests?.find((row) => row.id === id) ?? {};
  if (request.phase === "prefill" && request.promptTokens && request.prefilledTokens) return html`<p><${Prefill} request=${request} /></p>`;
  return html`<p class="quiet">${note || (request.phase === "queued" ? "waiting for an engine" : "…")}${request.resumptions ? `, resumed ${request.resumptions} times` : ""}</p>`;
}

/** The engines that the next question could get, with the parts of their scores: why one of them is chosen. */
function Candidates({ model }) {
  const [route, problem] = useRead(async () => model && getJson(`/api/v1/explain/route?model=${encodeURIComponent(model)}`));
  return html`<section class="panel" aria-label=${PANELS.routing}>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${route && html`<p class="quiet">Which engine the next question gets, as gateway ${route.gateway} sees it, best first. A session or a cached prompt may lead elsewhere.</p>
      <${CandidateTable} rows=${route.backends.flatMap((backend) => backend.candidates)} empty="No engine answers for this model." />`}
  </section>`;
}

const MAKERS = { curl, Python: python };
const LONG_DATA = /(data:[\w/+.-]+;base64,)[\w+/=]{60,}/g;

/** `request`: the body that the page would send. */
function ClientCode({ gateway, request }) {
  const [client, setClient] = useState("curl");
  const text = MAKERS[client](gateway || "http://GATEWAY", request);
  return html`<${Segments} label="Client" value=${client} choices=${Object.keys(MAKERS)} onChange=${setClient} />
    <pre tabindex="0" data-code>${text.replace(LONG_DATA, "$1…")}</pre>
    <button type="button" class="small" onClick=${() => copyText(text)}>Copy</button>`;
}

function curl(gateway, request) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  return `curl ${gateway}/v1/chat/completions -H 'content-type: application/json' \\\n  -H "authorization: Bearer $FLEET_API_KEY" \\\n  -d '${body}'`;
}

function python(gateway, request) {
  return `import json
from openai import OpenAI

client = OpenAI(base_url="${gateway}/v1", api_key="...")
request = r"""${JSON.stringify(request, null, 2)}"""
answer = client.chat.completions.create(**json.loads(request))
print(answer.choices[0].message.content)`;
}

/** One conversation with a model: what is sent, the answer as it arrives, and what this browser keeps of it. */

import { ask, CHANGE_HEADERS, linesOf, parsed } from "./fleet_store.js";

const MAX_TEXT = 200_000;
const MAX_KEPT = 2_000_000; // characters: browsers keep about five million for one origin

/** @returns a question that is not answered yet. `results`: of the tool calls before it, `[{id, content}]` */
export function newTurn({ question = "", images = [], results = [] }) {
  return { question, images, results, answer: "", reasoning: "", toolCalls: [], id: "", trace: null, figures: null, note: "", problem: "", isOver: false };
}

/** @returns the body of a request for the answer to the last turn; turns before it that have no answer are left out. Pure. */
export function requestOf({ model, system, tools, parameters }, turns) {
  const shown = turns.filter((turn, at) => at === turns.length - 1 || turn.answer || turn.toolCalls.length);
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...shown.flatMap(messagesOf)];
  return { model, messages, ...parameters, ...(tools?.length ? { tools } : {}) };
}

function messagesOf({ question, images, results, answer, toolCalls }) {
  const parts = [{ type: "text", text: question }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))];
  const asked = results.length
    ? results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }))
    : [{ role: "user", content: images.length ? parts : question }];
  if (!answer && !toolCalls.length) return asked;
  const calls = toolCalls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return [...asked, { role: "assistant", content: answer, ...(calls.length ? { tool_calls: calls } : {}) }];
}

/** Send a request, and pass on each change of its turn. Throws if it is refused or breaks. */
export function stream(body, { headers, signal }, change) {
  const text = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const init = { signal, method: "POST", headers: { ...headers, ...CHANGE_HEADERS }, body: text };
  const beganAt = performance.now();
  return ask("/chat/v1/chat/completions", init, async (answer) => {
    const header = (name) => answer.headers.get(`x-fleet-${name}`) ?? "";
    change({
      id: answer.headers.get("x-request-id") ?? "",
      trace: { node: header("node"), replica: header("replica"), attempts: Number(header("attempts") || 1), strategy: header("strategy") },
    });
    const sum = { answer: "", reasoning: "", toolCalls: [], firstAt: 0, usage: null, isDone: false };
    for await (const line of linesOf(answer)) {
      if (line.startsWith(":")) change({ note: line.slice(1).trim() }); // such as why it waits
      if (!line.startsWith("data: ")) continue;
      addEvent(line.slice(6), sum);
      const now = performance.now();
      sum.firstAt ||= sum.answer || sum.reasoning || sum.toolCalls.length ? now : 0;
      change({ answer: sum.answer, reasoning: sum.reasoning, toolCalls: [...sum.toolCalls], note: "", figures: figuresOf(sum, beganAt, now) });
      if (sum.isDone) return;
    }
    throw new Error("The answer broke off before its end.");
  });
}

/** Add the data of one event to the sum of an answer; throws the error that it reports. */
function addEvent(data, sum) {
  sum.isDone = data === "[DONE]";
  if (sum.isDone) return;
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message);
  const delta = event.choices?.[0]?.delta ?? {};
  sum.answer = (sum.answer + (delta.content ?? "")).slice(0, MAX_TEXT);
  sum.reasoning = (sum.reasoning + (delta.reasoning_content ?? "")).slice(0, MAX_TEXT);
  for (const { index = 0, id, function: called = {} } of delta.tool_calls ?? []) {
    const call = sum.toolCalls[index] ?? { id: "", name: "", arguments: "" };
    sum.toolCalls[index] = { id: id ?? call.id, name: called.name ?? call.name, arguments: (call.arguments + (called.arguments ?? "")).slice(0, MAX_TEXT) };
  }
  sum.usage = event.usage ?? sum.usage;
}

function figuresOf(sum, beganAt, now) {
  if (!sum.firstAt) return null;
  const output = sum.usage?.completion_tokens ?? 0;
  const seconds = (now - sum.firstAt) / 1000;
  return {
    firstMs: Math.round(sum.firstAt - beganAt),
    allMs: Math.round(now - beganAt),
    rate: output > 1 && seconds > 0 ? (output / seconds).toFixed(1) : "",
    output,
    prompt: sum.usage?.prompt_tokens ?? 0,
    cached: sum.usage?.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

/** @returns the text to keep of conversations by model, without their oldest turns if they are too long. Pure. */
export function keptText(settings, turns, limit = MAX_KEPT) {
  const all = Object.fromEntries(Object.entries(turns).map(([model, of]) => [model, [...of]]));
  for (;;) {
    const text = JSON.stringify({ settings, turns: all });
    const longest = Object.values(all).reduce((a, b) => (b.length > a.length ? b : a), []);
    if (text.length <= limit || !longest.length) return text;
    longest.shift();
  }
}

/** @returns {{settings: object, turns: object}} what a kept text holds; nothing if it is not one of this release. Pure. */
export function restored(text) {
  const close = (turn) => ({ ...newTurn({}), ...turn, ...(turn.isOver ? {} : { isOver: true, note: "The page was left before the end of this answer." }) });
  const { settings = {}, turns } = parsed(text) ?? {};
  const isKnown = turns && Object.values(turns).every(Array.isArray);
  return { settings, turns: isKnown ? Object.fromEntries(Object.entries(turns).map(([model, of]) => [model, of.map(close)])) : {} };
}

/** One conversation with a model through a gateway: a request, the answer as it arrives, and what became of it. */

import { CHANGE_HEADERS, refusalText } from "./fleet_store.js";

const MAX_TEXT = 200_000;

/** @returns the messages of earlier turns and a question, as the chat API takes them */
export function messagesOf(system, turns, question) {
  const before = turns.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  return [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: question }];
}

/** Send a request, and pass on each change of its answer. Throws if it is refused or breaks. */
export async function stream(body, init, change) {
  const beganAt = performance.now();
  const answer = await fetch("/chat/v1/chat/completions", {
    ...init,
    method: "POST",
    headers: { ...init.headers, ...CHANGE_HEADERS },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!answer.ok) throw new Error(await refusalText(answer));
  const header = (name) => answer.headers.get(`x-fleet-${name}`) ?? "";
  change({
    id: answer.headers.get("x-request-id") ?? "",
    trace: { node: header("node"), replica: header("replica"), attempts: Number(header("attempts") || 1), strategy: header("strategy") },
  });
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

/** A request of the page as code: what it sends, for curl and for Python. */

import { html, useState } from "./vendor/htm-preact.js";
import { copyText, Segments } from "./parts.js";

const MAKERS = { curl, Python: python };
const LONG_DATA = /(data:[\w/+.-]+;base64,)[\w+/=]{60,}/g;

/** `request`: the body that the page would send. */
export function ClientCode({ gateway, request }) {
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
  const fields = Object.entries(request).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return `from openai import OpenAI

client = OpenAI(base_url="${gateway}/v1", api_key="...")
answer = client.chat.completions.create(
${fields.join("")})
print(answer.choices[0].message.content)`;
}

/** A value of JSON as Python writes it. */
function literal(value, depth) {
  const inner = "    ".repeat(depth + 1);
  const close = `\n${"    ".repeat(depth)}`;
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${inner}${literal(one, depth + 1)},`).join("\n")}${close}]` : "[]";
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`).join(", ")}}`;
}

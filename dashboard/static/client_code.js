/** The conversation of the page as code of other clients. */

import { html, useState } from "./vendor/htm-preact.js";
import { copyText } from "./parts.js";

const MAKERS = { curl, openai, anthropic, ollama };

export function ClientCode({ gateway, model, system }) {
  const [client, setClient] = useState("curl");
  const text = MAKERS[client](gateway || "http://GATEWAY", model || "MODEL", system);
  return html`<div class="segments" role="group" aria-label="Client">
      ${Object.keys(MAKERS).map((one) => html`<button type="button" class="small" key=${one} aria-pressed=${one === client} onClick=${() => setClient(one)}>${one}</button>`)}
    </div>
    <pre tabindex="0">${text}</pre>
    <button type="button" class="small" onClick=${() => copyText(text)}>Copy</button>`;
}

function curl(gateway, model, system) {
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: "Hello!" }];
  const body = JSON.stringify({ model, messages }).replaceAll("'", "'\\''");
  return `curl ${gateway}/v1/chat/completions -H 'content-type: application/json' \\\n  -H "authorization: Bearer $FLEET_API_KEY" \\\n  -d '${body}'`;
}

function openai(gateway, model, system) {
  const first = system ? `{"role": "system", "content": ${JSON.stringify(system)}}, ` : "";
  return `from openai import OpenAI

client = OpenAI(base_url="${gateway}/v1", api_key="...")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[${first}{"role": "user", "content": "Hello!"}],
)
print(answer.choices[0].message.content)`;
}

function anthropic(gateway, model, system) {
  return `from anthropic import Anthropic

client = Anthropic(base_url="${gateway}", api_key="...")
answer = client.messages.create(
    model=${JSON.stringify(model)},
    max_tokens=500,${system ? `\n    system=${JSON.stringify(system)},` : ""}
    messages=[{"role": "user", "content": "Hello!"}],
)
print(answer.content[0].text)`;
}

function ollama(gateway, model, system) {
  const first = system ? `{"role": "system", "content": ${JSON.stringify(system)}}, ` : "";
  return `from ollama import Client

client = Client(host="${gateway}")
answer = client.chat(model=${JSON.stringify(model)}, messages=[${first}{"role": "user", "content": "Hello!"}])
print(answer.message.content)`;
}

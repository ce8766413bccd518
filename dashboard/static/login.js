/** The login: by an API key, or by the link of `fleetctl dashboard`; and why a session has ended. */

import { html, useState } from "./vendor/htm-preact.js";
import { postJson } from "./fleet_store.js";

const LOGIN_LINK = /^#login=([\w.-]{1,300})$/;
let linkProblem = ""; // why the login link in the address did not work

export function Login({ store }) {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState(linkProblem || store.endReason);
  const send = async (event) => {
    event.preventDefault();
    try {
      await postJson("/login", { key });
      setKey("");
      store.connectLater();
    } catch (error) {
      setProblem(error.message);
    }
  };
  return html`<main id="main" class="login">
    <h1>mlx-fleet</h1>
    <p>Log in with an API key.</p>
    <form onSubmit=${send}>
      <label>API key
        <input type="password" autocomplete="current-password" required value=${key} onInput=${(event) => setKey(event.target.value)} />
      </label>
      <button type="submit">Log in</button>
    </form>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="quiet">An administrator makes one: <code>fleetctl create apikey NAME --role viewer</code>, or opens this page
      logged in: <code>fleetctl dashboard</code></p>
  </main>`;
}

/** Log in by the link of `fleetctl dashboard`; returns whether the address is one. It works once, and leaves the address. */
export async function followLoginLink() {
  const link = LOGIN_LINK.exec(location.hash);
  if (!link) return false;
  history.replaceState(null, "", location.pathname + location.search);
  linkProblem = "";
  try {
    await postJson("/login", { ticket: link[1] });
  } catch (error) {
    linkProblem = error.message;
  }
  return true;
}

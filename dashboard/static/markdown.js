/**
 * Markdown as nodes of the page. marked reads it; what it makes of it as HTML is never used: each token of its lexer
 * becomes a node here, raw HTML is shown as text, and links go to the web alone.
 */

import { Lexer } from "./vendor/marked.js";
import { html } from "./vendor/htm-preact.js";

const MOST_DEPTH = 20;
const WEB = /^https?:\/\//i;
const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"]; // a heading of an answer is below those of the page

/** A text in Markdown; of a broken one the source. */
export function Markdown({ text }) {
  return html`<div class="markdown">${nodes(tokensOf(text), 0)}</div>`;
}

function tokensOf(text) {
  try {
    return new Lexer({ gfm: true, breaks: true }).lex(text);
  } catch {
    return [{ type: "text", raw: text, text }];
  }
}

function nodes(tokens, depth) {
  return (tokens ?? []).map((token) => node(token, depth + 1));
}

function node(token, depth) {
  if (depth > MOST_DEPTH) return token.raw ?? "";
  const inner = () => (token.tokens ? nodes(token.tokens, depth) : decoded(token.text ?? token.raw ?? ""));
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return html`<p>${inner()}</p>`;
    case "heading":
      return html`<${HEADINGS[token.depth - 1] ?? "h6"}>${inner()}<//>`;
    case "code":
      return html`<pre tabindex="0"><code>${token.text}</code></pre>`;
    case "blockquote":
      return html`<blockquote>${inner()}</blockquote>`;
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "hr":
      return html`<hr />`;
    case "strong":
      return html`<strong>${inner()}</strong>`;
    case "em":
      return html`<em>${inner()}</em>`;
    case "del":
      return html`<del>${inner()}</del>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "br":
      return html`<br />`;
    case "link":
      return link(token, inner());
    case "image":
      return link(token, token.text || token.href); // no picture of another origin is loaded
    case "text":
    case "escape":
      return inner();
    default:
      return token.raw ?? ""; // raw HTML, too
  }
}

function list(token, depth) {
  const items = token.items.map((item) => html`<li>${item.task && html`<input type="checkbox" disabled checked=${item.checked} aria-label=${item.checked ? "done" : "not done"} /> `}${nodes(item.tokens, depth)}</li>`);
  return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function table(token, depth) {
  // In a narrow place the rows are cards, and each cell shows the title of its column.
  const cell = (one, tag, at) => html`<${tag} key=${at} data-title=${token.header[at]?.text} class=${one.align === "right" ? "number" : ""}>${nodes(one.tokens, depth)}<//>`;
  return html`<table><thead><tr>${token.header.map((one, at) => cell(one, "th", at))}</tr></thead>
    <tbody>${token.rows.map((row, at) => html`<tr key=${at}>${row.map((one, column) => cell(one, "td", column))}</tr>`)}</tbody></table>`;
}

function link(token, inner) {
  if (!WEB.test(token.href ?? "")) return token.raw;
  return html`<a href=${token.href} rel="noopener noreferrer nofollow" target="_blank" title=${token.href}>${inner}</a>`;
}

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };

/** Return a text without the few entities that marked writes itself. */
function decoded(text) {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => ENTITIES[name]);
}

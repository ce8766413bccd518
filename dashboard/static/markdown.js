/**
 * Markdown as nodes of the page. marked reads it; what it makes of it as HTML is never used: each token of its lexer
 * becomes a node here, raw HTML is shown as text, and links go to the web alone.
 */

import { Lexer } from "./vendor/marked.js";
import { html } from "./vendor/htm-preact.js";

const MOST_DEPTH = 20;
const WEB = /^https?:\/\//i;
const HEADINGS = ["h3", "h4", "h5", "h6", "h6", "h6"]; // a heading of an answer is below those of the page

/** Tokens that are an element around their inner ones. */
const ELEMENTS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };
/** All other tokens, as functions of the token, its depth and its inner nodes. Of what is in neither the source is shown: raw HTML, too. */
const OTHERS = {
  space: () => null,
  def: () => null,
  text: (token, depth, inner) => inner,
  escape: (token, depth, inner) => inner,
  heading: (token, depth, inner) => html`<${HEADINGS[token.depth - 1] ?? "h6"}>${inner}<//>`,
  code: (token) => html`<pre tabindex="0"><code>${token.text}</code></pre>`,
  codespan: (token) => html`<code>${token.text}</code>`,
  br: () => html`<br />`,
  hr: () => html`<hr />`,
  link: (token, depth, inner) => link(token, inner),
  image: (token) => link(token, token.text || token.href), // no picture of another origin is loaded
  list,
  table,
};

/** A text in Markdown; of a broken one the source. */
export const Markdown = ({ text }) => html`<div class="markdown">${nodes(tokensOf(text), 0)}</div>`;

function tokensOf(text) {
  try {
    return new Lexer({ gfm: true, breaks: true }).lex(text);
  } catch {
    return [{ type: "text", raw: text, text }];
  }
}

const nodes = (tokens, depth) => (tokens ?? []).map((token) => node(token, depth + 1));

function node(token, depth) {
  const source = token.raw ?? "";
  if (depth > MOST_DEPTH) return source;
  const [element, other] = [ELEMENTS[token.type], OTHERS[token.type]];
  if (!element && !other) return source;
  const inner = token.tokens ? nodes(token.tokens, depth) : decoded(token.text ?? source);
  return element ? html`<${element}>${inner}<//>` : other(token, depth, inner);
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
const decoded = (text) => text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => ENTITIES[name]);

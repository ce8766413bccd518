/**
 * The fleet's state in the page, as far as the screen shows it: a snapshot, then patches from the server's stream.
 *
 * One stream a page, because browsers open six connections to a host at most. It is closed while the page is hidden,
 * and resumed by its last id. Nothing here grows with time: rows replace each other.
 */

const VIEWS = ["macs", "models", "replicas", "groups", "gitSources", "gateways", "reconcilers", "dashboards", "conditions", "problems", "events", "figures", "traffic", "inFlight", "ended", "changes", "joinRequests"];
const HIDDEN_MS = 5_000;
const SILENT_MS = 10_000; // the server sends something every 2 s
const ANSWER_MS = 30_000; // for one answer; a request that hangs would hold the page up for ever
const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 10_000;
const POLL_MS = 5_000;
const ROLES = ["user", "viewer", "operator", "admin"];

/** @typedef {Record<string, any>} Row */

export class FleetStore {
  /** Rows of each view by name, and in the order of the names. @type {Record<string, Map<string, Row>>} */
  views = emptyViews();
  summary = null; // counts and the sentence about the fleet's health
  me = { name: "", role: "viewer", canWrite: false }; // this session, and whether the dashboard may change the fleet
  silentSeconds = 0; // since the control plane stopped to answer
  refusal = ""; // why the control plane refuses the dashboard
  at = ""; // the moment that is shown, as ISO 8601; "" for now
  isPolling = false; // while other windows have the streams, and this one asks every few seconds
  state = "connecting"; // or live, lost, login or past
  problem = ""; // why the state is not live
  endReason = ""; // why the session has ended
  heardAt = 0; // time of the last message, on the browser's clock
  page = ""; // the version of the page's files when it was opened
  isOldPage = false; // the server has another one now
  isLoading = true; // until the rows of the screen have arrived
  _query = "";
  _id = "";
  _pauseMs = FIRST_PAUSE_MS;
  _listeners = new Set();
  _isDue = false;
  _source = null;
  _timer = 0;

  /** Call `listener` after each change, at most once a frame; returns the function that ends it. */
  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** @returns {Row[]} the rows of a view, by name */
  rows(view) {
    return [...this.views[view].values()];
  }

  /** @returns {Row[]} the rows of conditions or events of an object */
  about(view, kind, name) {
    return this.rows(view).filter((row) => row.kind === kind && row.object === name);
  }

  row(view, name) {
    return this.views[view].get(name);
  }

  /** Follow other views, columns or rows from now on, because another screen is shown. @param {string[]} selections */
  show(selections) {
    const query = queryOf(selections);
    if (query === this._query) return;
    const isFirst = !this._query;
    this._query = query;
    this.isLoading = true;
    this.views = emptyViews();
    if (isFirst || this.state === "login") return;
    this._id = "";
    this._go();
  }

  /** Take what came with the page's document: who this session is, and the state of the screen that is shown first. */
  adopt({ page, me, view, state }) {
    this.page = page;
    if (me) this.me = me;
    if (!state || this.at || queryOf(view) !== this._query) return;
    this._replace(state);
    this._id = state.id ?? "";
  }

  may(role) {
    return ROLES.indexOf(this.me.role) >= ROLES.indexOf(role);
  }

  mayWrite(role) {
    return this.me.canWrite && !this.at && this.may(role);
  }

  /** Begin, and go on for the life of the page. */
  start() {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this._after(HIDDEN_MS, () => this._close());
      else if (this._source) this._expect();
      else if (!this.at) {
        if (this.state === "live") this.state = "connecting";
        this.connect();
      }
    });
    this.connect();
  }

  /** Follow the state; again after an error, with a pause that doubles. */
  async connect() {
    this.isPolling = false;
    this._close();
    try {
      // A stream also ends with its session: then this answer says why.
      if (!this._id || this.state === "lost") this.me = await getJson("/api/v1/me");
      this._go();
    } catch (error) {
      this._fail(error.status === 401 || error.status === 403 ? "login" : "lost", error.message);
    }
  }

  _go() {
    if (!this.may("viewer")) this._live(); // chat and the own key need no state of the fleet
    else if (this.at) void this._readPast();
    else if (this.isPolling) void this._poll();
    else this._follow();
  }

  async logOut() {
    try {
      await postJson("/logout");
      this._close();
      this._fail("login", "");
      this.endReason = "You have logged out.";
    } catch (error) {
      this._fail("lost", error.message);
    }
  }

  /** Show the fleet as it was at a moment; "" for now. */
  goTo(at) {
    if (at === this.at) return;
    this._close();
    Object.assign(this, { at, _id: "", problem: "", state: at ? "past" : "connecting", isPolling: false });
    this._go();
  }

  /** Read the state at the moment that is shown. What was there before must not stand below another time. */
  async _readPast() {
    const { at, _query: query } = this;
    const error = await this._read().catch((reason) => reason);
    if (this.at !== at || this._query !== query) return;
    if (error) this.views = emptyViews();
    Object.assign(this, { state: "past", problem: error?.message ?? "" });
    this._notify();
  }

  /** Read the state that is shown, and take it unless another one is by then. */
  async _read() {
    const { at, _query: query } = this;
    const answer = await getJson(`/api/v1/snapshot?${query}${at && `&at=${encodeURIComponent(at)}`}`);
    if (this.at !== at || this._query !== query) return;
    this._replace(answer);
    this._id = answer.id ?? "";
    if (answer.id) this._live();
    else this._notify(); // of the history: of a past moment, or the control plane has been away since the dashboard began
  }

  _follow() {
    this._close();
    const source = new EventSource(`/api/v1/stream?${this._query}&since=${encodeURIComponent(this._id)}`);
    this._source = source;
    this._expect();
    const on = (name, act) =>
      source.addEventListener(name, (event) => {
        if (source !== this._source) return;
        this._id = event.lastEventId || this._id;
        if (!document.hidden) this._expect();
        act(JSON.parse(event.data));
        this._live();
      });
    source.onopen = () => source === this._source && !this.isLoading && this._live();
    on("snapshot", (body) => {
      this.isOldPage = this.page !== body.page;
      this._replace(body);
    });
    on("patch", (body) => this._patch(body));
    on("ping", (body) => this._hear(body));
    on("bye", () => this._poll());
    source.onerror = () => source === this._source && this._lose("the connection to the dashboard broke");
  }

  _expect() {
    this._after(SILENT_MS, () => this._lose("the dashboard is silent"));
  }

  /** Connect again: the stream was refused, or it broke. Meanwhile the last known state may be shown. */
  _lose(problem) {
    this._close();
    if (!this._id) void this._read().catch(() => {}); // the next try says why
    this._fail("lost", problem);
  }

  /** Ask every few seconds: other windows of this browser have the streams. */
  async _poll() {
    this._close();
    this.isPolling = true;
    if (!document.hidden) await this._read().catch((error) => this._fail("lost", error.message));
    if (this.isPolling && !this.at) this._after(POLL_MS, () => this._poll());
  }

  /** Do this later, and nothing that was to be done before. */
  _after(ms, act) {
    clearTimeout(this._timer);
    this._timer = setTimeout(act, ms);
  }

  _close() {
    clearTimeout(this._timer);
    this._source?.close();
    this._source = null;
  }

  _fail(state, problem) {
    if (state === "login") {
      if (this.me.name) this.endReason = problem;
      this._id = "";
    }
    this.state = state;
    this.problem = problem;
    this._notify();
    if (state !== "lost" || this._source || this.isPolling) return;
    this._after(this._pauseMs * (0.5 + Math.random() / 2), () => this.connect());
    this._pauseMs = Math.min(2 * this._pauseMs, LAST_PAUSE_MS);
  }

  _live() {
    this.heardAt = performance.now();
    this._pauseMs = FIRST_PAUSE_MS;
    if (this.state !== "live") Object.assign(this, { state: "live", problem: "" });
    this._notify();
  }

  /** Take what the server says of the control plane. */
  _hear(body) {
    this.silentSeconds = body.storeRefusal ? Infinity : body.storeSilentSeconds ?? 0;
    this.refusal = body.storeRefusal ?? "";
  }

  _replace(body) {
    this._hear(body);
    for (const [view, rows] of Object.entries(body.views)) this.views[view] = ordered(rows.map((row) => [row.name, row]));
    this.summary = body.summary;
    this.isLoading = false;
  }

  /** Take what changed: the names of rows that are gone, and blocks of columns. */
  _patch({ views = {}, summary = this.summary }) {
    this.summary = summary;
    for (const [view, { gone = [], blocks = [] }] of Object.entries(views)) {
      const known = this.views[view];
      for (const name of gone) known.delete(name);
      const { size } = known;
      for (const block of blocks) {
        const columns = Object.keys(block);
        block.name.forEach((name, at) => {
          const row = { ...known.get(name) };
          for (const column of columns) row[column] = block[column][at];
          known.set(name, row);
        });
      }
      if (known.size > size) this.views[view] = ordered([...known]);
    }
  }

  _notify() {
    if (this._isDue) return;
    this._isDue = true;
    const show = () => {
      if (!this._isDue) return;
      this._isDue = false;
      for (const listener of this._listeners) listener();
    };
    // A page that is covered gets no frames.
    setTimeout(show, 200);
    if (!document.hidden) requestAnimationFrame(show);
  }
}

const ordered = (rows) => new Map(rows.sort(([a], [b]) => (a < b ? -1 : 1)));
const emptyViews = () => Object.fromEntries(VIEWS.map((view) => [view, new Map()]));
const queryOf = (selections) => selections.map((one) => `view=${encodeURIComponent(one)}`).join("&");

/** Return what `take` makes of an answer; throws the server's own message with its `status`, or an error that says what broke. */
export async function ask(path, init, take) {
  try {
    const answer = await fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout(ANSWER_MS), ...init });
    if (answer.ok) return await take(answer);
    throw Object.assign(new Error(await refusalText(answer)), { status: answer.status });
  } catch (error) {
    if (error.name === "TimeoutError") throw new Error(`the dashboard has not answered for ${ANSWER_MS / 1000} s`);
    if (error instanceof TypeError) throw new Error("the dashboard does not answer");
    throw error;
  }
}

export const getText = (path) => ask(path, {}, (answer) => answer.text());
export const getJson = (path, init) => ask(path, init, (answer) => answer.json());

/** Send a change and return the JSON of the answer. */
export const postJson = (path, body = {}) => getJson(path, { method: "POST", headers: CHANGE_HEADERS, body: JSON.stringify(body) });

/** Yield the lines of an answer as they arrive. */
export async function* linesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

/** Headers of every change: a page of another origin cannot send the second. */
export const CHANGE_HEADERS = { "content-type": "application/json", "x-fleet-csrf": "1" };

async function refusalText(answer) {
  const text = await answer.text();
  return parsed(text)?.error?.message ?? (text.slice(0, 300) || `status ${answer.status}`);
}

/** Return the value of a text of JSON; null if it is none. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

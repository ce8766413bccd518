/**
 * The fleet's state in the page, as far as the screen shows it: a snapshot, then patches from the server's stream.
 *
 * One stream a page, because browsers open six connections to a host at most. It is closed while the page is hidden,
 * and resumed by its last id. Nothing here grows with time: rows replace each other.
 */

const VIEWS = ["macs", "models", "replicas", "groups", "gitSources", "gateways", "reconcilers", "dashboards", "conditions", "problems", "events", "figures", "traffic", "inFlight", "ended", "changes", "joinRequests"];
const HIDDEN_MS = 5_000;
const HINT_MS = 4_000; // the server sends something every 2 s
const SILENT_MS = 10_000;
const ANSWER_MS = 30_000; // for one answer; a request that hangs would hold the page up for ever
const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 10_000;
const POLL_MS = 5_000;
const MAX_EVENTS = 500;
const ROLES = ["user", "viewer", "operator", "admin"];

/** @typedef {Record<string, any>} Row */

export class FleetStore {
  /** Rows of each view by name. @type {Record<string, Map<string, Row>>} */
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
  _openedAt = 0; // time at which the stream was opened last: each try has its time, however long the one before was silent
  _orders = new WeakMap(); // names of the rows of views in order, until there are others
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
    const rows = this.views[view];
    let order = this._orders.get(rows);
    if (!order) this._orders.set(rows, (order = [...rows.keys()].sort()));
    return order.map((name) => rows.get(name));
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
    if (this.at) void this._readPast();
    else if (this.isPolling) void this._read().catch((error) => this._fail("lost", error.message));
    else if (this.may("viewer")) this._follow();
  }

  /** Take what came with the page's document: who this session is, and the state of the screen that is shown first. */
  adopt({ page, me, view, state }) {
    this.page = page;
    if (me) this.me = me;
    if (!state || this.at || queryOf(view) !== this._query) return;
    this._replace(state);
    this._id = state.id;
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
      clearTimeout(this._timer);
      if (document.hidden) this._after(HIDDEN_MS, () => this._close());
      else if (!this._source && !this.at) {
        if (this.state === "live") this.state = "connecting";
        this.connect();
      }
    });
    setInterval(() => this._watch(), 1_000);
    this.connect();
  }

  /** Follow the state; again after an error, with a pause that doubles. */
  async connect() {
    this.isPolling = false;
    this._end();
    try {
      if (!this._id) await this._identify();
      if (!this.may("viewer")) return;
      if (this.at) await this._readPast();
      else this._follow();
    } catch (error) {
      this._fail(error.status === 401 || error.status === 403 ? "login" : "lost", error.message);
    }
  }

  async logOut() {
    try {
      await postJson("/logout");
      this._close();
      this._fail("login", "");
      this.endReason = "You have logged out.";
      this._id = "";
    } catch (error) {
      this._fail("lost", error.message);
    }
  }

  /** Show the fleet as it was at a moment; "" for now. */
  async goTo(at) {
    if (at === this.at) return;
    this.at = at;
    this._id = "";
    this.problem = "";
    this._end();
    this.state = at ? "past" : "connecting";
    await (at ? this._readPast() : this.connect());
  }

  /** Read the state at the moment that is shown. What was there before must not stand below another time. */
  async _readPast() {
    const { at, _query: query } = this;
    const isShown = () => this.at === at && this._query === query;
    try {
      const state = await getJson(`/api/v1/snapshot?${query}&at=${encodeURIComponent(at)}`);
      if (!isShown()) return;
      this._replace(state);
      this.problem = "";
    } catch (error) {
      if (!isShown()) return;
      this.views = emptyViews();
      this.problem = error.message;
    }
    this.state = "past";
    this._notify();
  }

  /** Learn who this session is; throws what the server refuses it with. */
  async _identify() {
    this.me = await getJson("/api/v1/me");
    if (!this.may("viewer")) this._live(); // chat and the own key need no state of the fleet
  }

  async _read() {
    const query = this._query;
    const answer = await getJson(`/api/v1/snapshot?${query}`);
    if (query !== this._query) return;
    this._replace(answer);
    this._id = answer.id ?? "";
    if (answer.id) this._live();
    else this._notify(); // of the history: the control plane has been away since the dashboard began
  }

  _follow() {
    this._close();
    const source = new EventSource(`/api/v1/stream?${this._query}&since=${encodeURIComponent(this._id)}`);
    this._source = source;
    this._openedAt = performance.now();
    const on = (name, act) =>
      source.addEventListener(name, (event) => {
        if (source !== this._source) return;
        this._id = event.lastEventId || this._id;
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
    source.onerror = () => {
      if (source !== this._source) return;
      // The browser connects again by itself only after a break, never after a refusal.
      if (source.readyState === EventSource.CLOSED) return this.connectLater();
      this._fail("lost", "the connection to the dashboard broke");
      // A stream also ends with its session: then the answer says why.
      this._identify().catch((error) => error.status === 401 && (this._close(), this._fail("login", error.message)));
    };
  }

  /** Read everything anew after a pause: the stream was refused. Meanwhile the last known state may be shown. */
  connectLater() {
    this._close();
    this._id = "";
    if (this.state !== "login") void this._read().catch(() => {}); // the next try says why
    this._retry();
  }

  /** Ask every few seconds: other windows of this browser have the streams. */
  _poll() {
    this._close();
    this.isPolling = true;
    this._after(POLL_MS, async () => {
      try {
        if (!document.hidden) await this._read();
      } catch (error) {
        this._fail("lost", error.message);
      }
      if (this.isPolling && !this.at) this._poll();
    });
  }

  _retry() {
    this._close();
    const pauseMs = this._pauseMs * (0.5 + Math.random() / 2);
    this._pauseMs = Math.min(2 * this._pauseMs, LAST_PAUSE_MS);
    this._after(pauseMs, () => this.connect());
  }

  /** Do this later, and nothing that was to be done before. */
  _after(ms, act) {
    clearTimeout(this._timer);
    this._timer = setTimeout(act, ms);
  }

  _end() {
    clearTimeout(this._timer);
    this._close();
  }

  _close() {
    this._source?.close();
    this._source = null;
  }

  _fail(state, problem) {
    if (state === "login" && this.me.name) this.endReason = problem;
    this.state = state;
    this.problem = problem;
    this._notify();
    if (state === "lost" && !this._source && !this.isPolling) this._retry();
  }

  _live() {
    this.heardAt = performance.now();
    this._pauseMs = FIRST_PAUSE_MS;
    if (this.state !== "live") Object.assign(this, { state: "live", problem: "" });
    this._notify();
  }

  _watch() {
    const isSilent = this._source && performance.now() - Math.max(this.heardAt, this._openedAt) > SILENT_MS;
    if (isSilent && !document.hidden) {
      this._fail("lost", "the dashboard is silent");
      this._retry();
    } else if (this.state === "live" && performance.now() - this.heardAt > HINT_MS) this._notify(); // its age is shown
  }

  /** Take what the server says of the control plane. */
  _hear(body) {
    this.silentSeconds = body.storeRefusal ? Infinity : body.storeSilentSeconds ?? 0;
    this.refusal = body.storeRefusal ?? "";
  }

  _replace(body) {
    this._hear(body);
    for (const [view, rows] of Object.entries(body.views)) {
      this.views[view] = new Map(rows.map((row) => [row.name, row]));
    }
    this.summary = body.summary;
    this.isLoading = false;
    this._trim();
  }

  /** Take what changed: the names of rows that are gone, and blocks of columns. */
  _patch({ views = {}, summary = this.summary }) {
    this.summary = summary;
    for (const [view, { gone = [], blocks = [] }] of Object.entries(views)) {
      const known = this.views[view];
      const count = known.size;
      for (const name of gone) known.delete(name);
      if (known.size < count) this._orders.delete(known);
      for (const block of blocks) {
        const columns = Object.keys(block);
        block.name.forEach((name, at) => {
          if (!known.has(name)) this._orders.delete(known);
          const row = { ...known.get(name) };
          for (const column of columns) row[column] = block[column][at];
          known.set(name, row);
        });
      }
    }
    this._trim();
  }

  _trim() {
    const events = this.views.events;
    if (events.size <= MAX_EVENTS) return;
    const oldest = [...events.values()].sort((a, b) => (a.lastSeen < b.lastSeen ? -1 : 1));
    for (const row of oldest.slice(0, events.size - MAX_EVENTS)) events.delete(row.name);
    this._orders.delete(events);
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
export function postJson(path, body = {}, init = {}) {
  const headers = { ...CHANGE_HEADERS, ...init.headers };
  return getJson(path, { ...init, method: "POST", headers, body: JSON.stringify(body) });
}

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

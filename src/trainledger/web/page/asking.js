// One question in flight and one that waits, the newest: a drag that is faster than its answers leaves no queue.

const LATE = 300; // milliseconds after which a reader wants to know that something goes on

export class Asking {
  /** `ask(question, how)` gives a promise; `shown`, `refused` and `working` (null: no more) hear of it. */
  constructor(ask, { shown, refused, working }) {
    Object.assign(this, { ask, shown, refused, working, flying: null, waiting: null, told: false });
  }

  /** The newest question that has no answer yet; null where there is none. */
  get newest() {
    const { flying } = this;
    return this.waiting ?? (flying && !flying.stop.signal.aborted ? flying.question : null);
  }

  want(question) {
    this.waiting = question;
    if (!this.flying) this.#next();
    else if (this.flying.late) this.flying.stop.abort();
  }

  cancel() {
    this.waiting = null;
    this.flying?.stop.abort();
  }

  async #next() {
    const question = this.waiting;
    const flying = { question, stop: new AbortController(), late: false };
    this.waiting = null;
    this.flying = flying;
    const slow = (what) => {
      flying.late = this.told = true;
      this.working(what);
    };
    let latest = { what: "", done: 0, of: 0 };
    const timer = setTimeout(() => slow(latest), LATE);
    let outcome;
    try {
      const answer = await this.ask(question, {
        signal: flying.stop.signal,
        working: (what) => ((latest = what), flying.late && slow(what)),
      });
      outcome = () => this.shown(question, answer);
    } catch (error) {
      const stopped = flying.stop.signal.aborted;
      outcome = () => (stopped && this.waiting ? undefined : this.refused(question, stopped ? null : error));
    }
    clearTimeout(timer);
    this.flying = null;
    if (this.told && !this.waiting) {
      this.told = false;
      this.working(null);
    }
    try {
      outcome();
    } finally {
      if (this.waiting && !this.flying) this.#next(); // also where showing an answer fails
    }
  }
}

const FIRST = 1000, LONGEST = 30_000; // milliseconds until nobody who answers is asked again

/** Asks again after a while: where an answer says when, and where there was none, each time after twice as long. */
export class Later {
  constructor(ask) {
    Object.assign(this, { ask, wait: FIRST });
  }

  stop() {
    clearTimeout(this.timer);
  }

  answered(seconds) {
    this.wait = FIRST;
    this.#after(seconds && 1000 * seconds);
  }

  failed() {
    this.#after(this.wait);
    this.wait = Math.min(LONGEST, 2 * this.wait);
  }

  #after(milliseconds) {
    this.stop();
    if (milliseconds) this.timer = setTimeout(() => whenSeen(this.ask), milliseconds);
  }
}

/** Now, or when the reader comes back to the page. */
function whenSeen(act) {
  if (document.hidden) addEventListener("visibilitychange", act, { once: true });
  else act();
}

// Where answers come from: a server, or the same Python in a worker of this browser.

import { learn } from "./element.js";

const AGAIN = 250; // milliseconds until a slow answer is asked for again

/** The question cannot be answered as it is: `problems` say which field, why, and what works. */
export class Refused extends Error {
  constructor(problems) {
    super(problems.map((each) => each.sentence).join("; "));
    this.problems = problems;
  }
}

/** Nobody answers: no server, no network, or a reply that ends in its middle. */
export class Unreachable extends Error {
  constructor() {
    super("nobody answers at this address. Is the server still running, and the network there?");
  }
}

/** The transport that `config.json` names, and what it says of the page. */
export async function connect() {
  const [config, terms] = await Promise.all(["config", "terms"].map(async (name) => (await fetch(`${name}.json`)).json()));
  learn(terms);
  return { config, transport: config.worker ? inBrowser() : overHttp() };
}

const wait = (milliseconds, signal) =>
  new Promise((done, stopped) => {
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), stopped(signal.reason)), { once: true });
  });

function overHttp() {
  const get = async (path, query = {}, { signal, working } = {}) => {
    const asked = new URLSearchParams(query).toString();
    for (;;) {
      const lost = () => {
        throw signal?.aborted ? signal.reason : new Unreachable();
      };
      const reply = await fetch(asked ? `${path}?${asked}` : path, { signal }).catch(lost);
      const found = await reply.json().catch(reply.ok ? lost : () => ({}));
      if (reply.status === 202) {
        working?.(found.working);
        await wait(AGAIN, signal);
      } else if (reply.ok) {
        return found;
      } else {
        throw new Refused(problemsOf(found, `the server answered with status ${reply.status}`));
      }
    }
  };
  return {
    looksAhead: true,
    listing: () => get("calculators.json"),
    answer: (name, query, how) => get(`api/${name}`, query, how),
    view: (name, query, frame, how) => get(`view/${name}`, { ...query, ...frame }, how),
    check: (name, seed, guess, misses) => get(`check/${name}`, { seed, guess, misses }),
    exercise: (name, seed) => get(`exercise/${name}`, { seed }),
  };
}

const problemsOf = (found, otherwise) =>
  Array.isArray(found.error) && found.error.length ? found.error : [{ field: "", sentence: otherwise }];

/** A worker in which Python answers. One that is stopped while it works is replaced, as Python cannot be interrupted. */
function inBrowser() {
  let worker, ready, awake = false, starting = null, number = 0;
  const examples = new Set(); // that were shown before Python was awake
  const open = new Map(); // what is asked and has no answer yet, by number

  const heard = ({ data }) => {
    const asked = open.get(data.id);
    if (data.starting) {
      starting = { what: data.starting, done: 0, of: 0 };
      open.forEach((each) => each.working?.(starting));
    }
    else if (data.working) asked?.working?.(data.working);
    else if (asked && open.delete(data.id)) {
      if (data.error) asked.failed(new Refused(problemsOf(data, "Python gave no answer")));
      else asked.done(data.result);
    }
  };
  const start = () => {
    const own = (worker = new Worker("worker.js", { type: "module" }));
    ready = new Promise((done, failed) => {
      const stopped = (why) => failed(new Refused([{ field: "", sentence: `Python does not start: ${why}` }]));
      own.onmessage = (event) => {
        if (event.data.ready) done((awake = true));
        else if (event.data.failed) stopped(event.data.failed);
        else heard(event);
      };
      own.onerror = (event) => stopped(event.message);
    });
    ready.catch(() => {}); // who asks hears of it
  };
  const send = async (id) => {
    try {
      await shown;
      await ready;
      const asked = open.get(id);
      if (asked) worker.postMessage({ id, ...asked.message });
      if (asked) asked.sent = true;
    } catch (error) {
      open.get(id)?.failed(error);
      open.delete(id);
    }
  };
  const call = (message, { signal, working } = {}) =>
    new Promise((done, failed) => {
      const id = ++number;
      open.set(id, { message, done, failed, working, sent: false });
      if (!awake && starting) working?.(starting);
      signal?.addEventListener("abort", () => {
        const asked = open.get(id);
        if (!asked) return;
        open.delete(id);
        failed(signal.reason);
        if (!asked.sent) return;
        worker.terminate();
        start();
        open.forEach((each, other) => send(other));
      });
      send(id);
    });
  /** The answer of an example that lies beside the page, while Python starts; it is asked again once that is awake. */
  const example = async (name, query) => {
    const own = JSON.stringify(Object.entries(query).sort()), key = `${name} ${own}`;
    if (awake || examples.has(key)) return undefined;
    examples.add(key);
    const found = await fetch(`presets/${name}.json`).then((reply) => reply.json()).catch(() => ({}));
    return found[own] && { ...found[own], again_seconds: 0.1 };
  };
  let drawn; // the page draws its first numbers before Python takes the processor, in so many milliseconds
  const shown = Promise.race([new Promise((done) => (drawn = () => setTimeout(done, 60))), wait(500)]).then(start);
  return {
    looksAhead: false, // there is one Python: it should be free for what is asked next
    listing: async () => (await fetch("calculators.json")).json(),
    answer: (name, query, how) => call({ call: "answer", name, query }, how),
    view: async (name, query, frame, how) => {
      const found = await example(name, query);
      drawn();
      return found ?? call({ call: "view", name, query, ...frame }, how);
    },
    check: (name, seed, guess, misses) => call({ call: "check", name, seed, guess, misses }),
    exercise: (name, seed) => call({ call: "exercise", name, seed }),
  };
}

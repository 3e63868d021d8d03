// Where answers come from: a server, or the same Python in a worker of this browser.

const AGAIN = 250; // milliseconds until a slow answer is asked for again

/** The question cannot be answered as it is: `problems` say which field, why, and what works. */
export class Refused extends Error {
  constructor(problems) {
    super(problems.map((each) => each.sentence).join("; "));
    this.problems = problems;
  }
}

/** The transport that `config.json` names, and what it says of the page. */
export async function connect(starting) {
  const config = await (await fetch("config.json")).json();
  return { config, transport: config.worker ? await inBrowser(starting) : overHttp() };
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
      const reply = await fetch(asked ? `${path}?${asked}` : path, { signal });
      const found = await reply.json().catch(() => ({}));
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
    listing: () => get("calculators.json"),
    answer: (name, query, how) => get(`api/${name}`, query, how),
    view: (name, query, width, how) => get(`view/${name}`, { ...query, width }, how),
    check: (name, query, of, guess) => get(`check/${name}`, { ...query, of, guess }),
    exercise: (name, seed) => get(`exercise/${name}`, { seed }),
  };
}

const problemsOf = (found, otherwise) =>
  Array.isArray(found.error) && found.error.length ? found.error : [{ field: "", sentence: otherwise }];

/** A worker in which Python answers. One that is stopped while it works is replaced, as Python cannot be interrupted. */
async function inBrowser(starting) {
  let worker, ready, number = 0;
  const open = new Map();

  const start = () => {
    worker = new Worker("worker.js", { type: "module" });
    ready = new Promise((done, failed) => {
      worker.onmessage = ({ data }) => {
        if (data.ready) return done();
        const asked = open.get(data.id);
        if (data.starting) return starting(data.starting);
        if (!asked) return undefined;
        if (data.working) return asked.working?.(data.working);
        open.delete(data.id);
        if (data.error) return asked.failed(new Refused(problemsOf(data, "Python gave no answer")));
        return asked.done(data.result);
      };
      worker.onerror = (event) => failed(new Refused([{ field: "", sentence: `Python does not start: ${event.message}` }]));
    });
  };
  const call = async (name, message = {}, { signal, working } = {}) => {
    await ready;
    return new Promise((done, failed) => {
      const id = ++number;
      open.set(id, { done, failed, working });
      signal?.addEventListener("abort", () => {
        if (!open.delete(id)) return;
        worker.terminate();
        start();
        failed(signal.reason);
      });
      worker.postMessage({ id, call: name, ...message });
    });
  };
  start();
  return {
    listing: () => call("listing"),
    answer: (name, query, how) => call("answer", { name, query }, how),
    view: (name, query, width, how) => call("view", { name, query, width }, how),
    check: (name, query, of, guess) => call("check", { name, query, of, guess }),
    exercise: (name, seed) => call("exercise", { name, seed }),
  };
}

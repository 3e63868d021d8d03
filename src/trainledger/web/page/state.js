// What the page asks, as it stands in the address: only what differs from the defaults.

const OWN = ["calculator", "exercise", "set", "pin", "embed", "lesson"];
/** In a page of others: the names of the fields that are shown there, with commas between them; null elsewhere. */
export const framed = new URLSearchParams(location.search).get("embed");

/** The state of a screen, counted from 1; null where there is none. */
export function opened(screens, number, listing) {
  const screen = screens[number - 1];
  const calculator = listing.find((each) => each.name === screen?.calculator);
  return calculator ? { calculator, given: { ...screen.given }, pin: screen.pin ?? null, exercise: null, set: null, lesson: number, left: "" } : null;
}

/** The state that an address says: a calculator of the listing, what is given, what is pinned, the number of an exercise and its set,
 * and the screen of the lesson, which is the first where an address says nothing.

 * `left` says what of the address is left out, since no calculator or field has its name. */
export function stateOf(search, listing, screens = []) {
  const said = new URLSearchParams(search);
  const wanted = said.get("calculator") ?? (search.length < 2 ? document.body.dataset.calculator : null), number = Number(said.get("lesson") ?? (search.length < 2 && !wanted && 1));
  const screen = opened(screens, number, listing);
  if (screen && !wanted) return screen;
  const calculator = listing.find((each) => each.name === wanted) ?? listing[0];
  const fields = new Set([...calculator.fields.map((each) => each.name), ...calculator.others]);
  const given = {}, unknown = [];
  for (const [name, text] of said) {
    if (fields.has(name)) given[name] = text;
    else if (!OWN.includes(name)) unknown.push(name.slice(0, 60));
  }
  const [, first, last] = /^(\d{1,9})-(\d{1,9})$/.exec(said.get("set") ?? "") ?? [];
  const set = Number(first) <= Number(last) ? { first: Number(first), last: Number(last) } : null;
  const exercise = /^\d{1,9}$/.test(said.get("exercise") ?? "") ? said.get("exercise") : (set && first);
  const pin = said.has("pin") ? Object.fromEntries(new URLSearchParams(said.get("pin"))) : null;
  const left = [
    ...(wanted && wanted !== calculator.name ? [`There is no calculator ${wanted.slice(0, 60)}; this is ${calculator.title}.`] : []),
    ...(unknown.length ? [`Left out of the address, since no field of ${calculator.title} has this name: ${unknown.join(", ")}.`] : []),
  ].join(" ");
  return { calculator, given, exercise, set, pin, left, lesson: screen && !exercise ? number : null };
}

/** The address of a state, relative to the page. */
export function addressOf({ calculator, given, exercise, set, pin, lesson, embed = framed }) {
  const said = new URLSearchParams({ ...(lesson && { lesson }), calculator: calculator.name, ...(embed && { embed }) });
  if (exercise && set) said.set("set", `${set.first}-${set.last}`);
  if (exercise) said.set("exercise", exercise);
  else for (const [name, text] of Object.entries(given)) said.set(name, text);
  if (pin && !exercise) said.set("pin", new URLSearchParams(pin));
  return `?${said}`;
}

/** What is given, without what is the default anyway. */
export function different(calculator, given) {
  const defaults = new Map(calculator.fields.map((each) => [each.name, each.default]));
  return Object.fromEntries(Object.entries(given).filter(([name, text]) => text !== (defaults.get(name) ?? "")));
}

/** What is given with these fields set, those with an empty text left out. */
export function withFields(before, fields) {
  const given = { ...before, ...fields };
  return Object.fromEntries(Object.entries(given).filter(([name, text]) => text || fields[name] === undefined));
}

/** Whether two states are the same question. */
export const same = (a, b) => canonical(a) === canonical(b);
const canonical = ({ calculator, given, exercise }) =>
  JSON.stringify([calculator.name, exercise ?? null, Object.entries(given).sort()]);

const AGAIN = 300; // milliseconds between two addresses of a drag: browsers refuse hundreds in a row
const SAME = 800; // milliseconds in which another key press on the same field is the same change

/** The browser's history as undo and redo: one entry for each change, however many steps a drag has. */
export class Trail {
  constructor() {
    this.at = history.state?.at ?? 0;
    this.last = this.at;
    this.open = null;
    history.replaceState({ at: this.at }, "", location.href);
  }

  /** A field has changed, or at once several (`name` null); `settled` where the reader let go of it. True where it is
   * another change than the one before. */
  moved(address, name, settled) {
    const now = performance.now();
    const goesOn = name !== null && this.open?.name === name && (!this.open.settled || now - this.open.settled < SAME);
    if (!goesOn) {
      this.write();
      history.pushState({ at: ++this.at }, "", address);
      this.last = this.at;
    } else if (settled) {
      this.write(address);
    } else {
      this.latest = address;
      this.timer ??= setTimeout(() => this.write(), AGAIN);
    }
    this.open = { name, settled: settled && now };
    return !goesOn;
  }

  /** Writes the address that a drag has reached. */
  write(address = this.latest) {
    clearTimeout(this.timer);
    this.timer = this.latest = undefined;
    if (address !== undefined) history.replaceState({ at: this.at }, "", address);
  }

  /** The browser went to another entry. */
  went(event) {
    clearTimeout(this.timer);
    this.timer = this.latest = undefined;
    this.at = event.state?.at ?? 0;
    this.last = Math.max(this.last, this.at);
    this.open = null;
  }
}

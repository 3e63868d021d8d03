// The page: what is asked (the address), the form, and the newest answer.
import { drawAnswer, showAnswer } from "./answer.js";
import { Asking } from "./asking.js";
import { copyMenu } from "./copy.js";
import { byId, element, keep, put } from "./element.js";
import { askedOf, drawExercise } from "./exercise.js";
import { focusOn } from "./field.js";
import { Form } from "./form.js";
import { addressOf, different, stateOf, Trail } from "./state.js";
import { connect } from "./transport.js";

const root = byId("answer");
const page = { state: null, view: null, hidden: false };

const { config, transport } = await connect().catch(stopped);
const listing = await transport.listing().catch(stopped);
const trail = new Trail();
const parts = drawAnswer(root);
const form = new Form(byId("form"), changed);
const asking = new Asking(
  ({ state, width }, how) => transport.view(state.calculator.name, state.given, width, how),
  { shown, refused, working },
);

function stopped(error) {
  byId("loading").textContent = `The calculators cannot be loaded: ${error.message}`;
  throw error;
}

// --- what is asked -------------------------------------------------------------------------------------------------

function changed(name, text, settled) {
  const given = { ...page.state.given };
  if (text === null) delete given[name];
  else given[name] = text;
  become({ given }, name, settled);
}

/** A new state: the address, the form and the question follow. */
function become(change, name, settled = true) {
  const state = { ...page.state, ...change };
  state.given = different(state.calculator, state.given);
  page.state = state;
  trail.moved(addressOf(state), name, settled);
  follow();
}

/** Everything that can be said before the answer is there. */
function follow() {
  const { calculator, given } = page.state;
  if (form.calculator !== calculator) {
    asking.cancel();
    page.view = null;
    root.classList.add("fresh");
    form.draw(calculator);
    byId("name").textContent = calculator.title;
    byId("question").textContent = calculator.question;
    form.show(given, null);
    byId("form").scrollTop = 0;
  }
  for (const link of byId("calculators").querySelectorAll("a")) {
    if (link.dataset.name !== calculator.name) link.removeAttribute("aria-current");
    else if (!link.hasAttribute("aria-current")) {
      link.setAttribute("aria-current", "page");
      const strip = byId("calculators");
      if (strip.scrollWidth > strip.clientWidth) link.scrollIntoView({ block: "nearest", inline: "center" });
    }
  }
  chips();
  buttons();
  ask();
}

function ask() {
  const measured = Math.round(parts.drawings.clientWidth / 20) * 20;
  page.width = Math.min(1200, Math.max(280, measured));
  root.setAttribute("aria-busy", "true");
  asking.want({ state: page.state, width: page.width });
}

/** The state that the address says, at the start and after back and forward. */
async function arrive() {
  const state = stateOf(location.search, listing);
  page.hidden = Boolean(state.exercise);
  page.state = state;
  page.view = null;
  root.setAttribute("aria-busy", "true");
  reveal();
  if (state.exercise) state.given = (await transport.exercise(state.calculator.name, state.exercise)).query;
  else state.given = different(state.calculator, state.given);
  byId("exercise").replaceChildren();
  follow();
}

/** The answer is seen, and the form can be changed, unless an exercise asks for it. */
function reveal() {
  parts.body.hidden = parts.verdict.hidden = page.hidden;
  byId("form").inert = page.hidden;
}

/** No question waits any more. */
const settle = () => asking.waiting === null && root.setAttribute("aria-busy", "false");

// --- what is answered ----------------------------------------------------------------------------------------------

function shown({ state }, view) {
  settle();
  if (state.calculator !== page.state.calculator || state.exercise !== page.state.exercise) return;
  page.view = view;
  root.classList.remove("fresh", "old");
  if (asking.waiting === null) {
    form.wrong([]);
    form.show(page.state.given, view, page.hidden);
  }
  showAnswer(parts, view);
  clearTimeout(page.again);
  if (view.again_seconds) page.again = setTimeout(() => page.view === view && unlessHidden(ask), 1000 * view.again_seconds);
  if (page.hidden && !byId("guess")) pose();
  exerciseButton.hidden = Boolean(state.exercise) || !view.headlines.some((each) => each.asked && each.value);
  const verdict = page.hidden ? `exercise ${state.exercise}` : view.verdict;
  document.title = `${state.calculator.title}: ${verdict} · trainledger`;
  byId("peek").textContent = page.hidden ? "" : view.verdict;
  byId("peek").className = `peek ${view.tone}`;
  if (!page.hidden) say(view.verdict, 900);
}

/** Now, or when the reader comes back to the page. */
function unlessHidden(act) {
  if (document.hidden) addEventListener("visibilitychange", act, { once: true });
  else act();
}

function refused({ state }, error) {
  settle();
  if (state.calculator !== page.state.calculator) return;
  root.classList.add("old");
  if (error === null) return say("Cancelled; the last answer stays.");
  const problems = error.problems ?? [{ field: "", sentence: `no answer: ${error.message}` }];
  if (state.exercise) {
    return become({ exercise: String(Number(state.exercise) + 1) }, "exercise") || arrive();
  }
  form.wrong(problems);
  document.title = `${state.calculator.title}: ${problems[0].sentence} · trainledger`;
  return say(problems.map((each) => each.sentence).join(". "), 900);
}

function working(what) {
  const bar = byId("progress");
  byId("working").hidden = what === null;
  if (what === null) return;
  byId("doing").textContent = what.what || "working";
  if (what.of) Object.assign(bar, { max: what.of, value: what.done });
  else bar.removeAttribute("value");
}

let speaking;
/** What a screen reader says and, for a moment, the page shows; of sentences that follow each other fast, the last. */
function say(sentence, pause = 0) {
  clearTimeout(speaking);
  speaking = setTimeout(() => put(byId("said"), sentence), pause);
}

// --- buttons -------------------------------------------------------------------------------------------------------

function chips() {
  const { calculator, given, exercise } = page.state;
  const now = JSON.stringify(Object.entries(given).sort());
  keep(byId("presets"), Object.entries(calculator.presets), ([title]) => title, chip, (made, [, query]) => {
    const own = JSON.stringify(Object.entries(different(calculator, query)).sort());
    made.setAttribute("aria-pressed", String(own === now));
    made.onclick = () => become({ given: query, exercise: null }, "preset");
  });
  byId("presets").hidden = Boolean(exercise);
}

const chip = ([title]) => element("button", { type: "button", class: "chip", text: title });

const button = (text, onclick, more = {}) => element("button", { type: "button", class: "quiet", text, onclick, ...more });
const undo = button("Undo", () => history.back());
const redo = button("Redo", () => history.forward());
const reset = button("Reset", () => become({ given: {} }, "reset"));
const exerciseButton = button("Exercise", () => exercise(1 + Math.floor(Math.random() * 9999)), { id: "exercises" });
const copying = copyMenu({
  texts: () => page.view?.paste ?? {},
  json: () => transport.answer(page.state.calculator.name, page.state.given),
  say: confirm,
});
parts.tools.append(undo, redo, reset, exerciseButton, copying);

function buttons() {
  undo.disabled = trail.at === 0;
  redo.disabled = trail.at >= trail.last;
  reset.disabled = !Object.keys(page.state.given).length;
  reset.hidden = copying.hidden = Boolean(page.state.exercise) && page.hidden;
}

/** Says what was done, also to the eye. */
function confirm(sentence) {
  put(byId("said"), "");
  say(sentence);
  const toast = element("p", { class: "toast", text: sentence, "aria-hidden": "true" });
  document.querySelector(".toast")?.remove();
  document.body.append(toast);
  setTimeout(() => toast.remove(), 2200);
}

function exercise(seed) {
  trail.moved(addressOf({ ...page.state, exercise: String(seed) }), "exercise", true);
  trail.open = null;
  arrive();
}

function pose() {
  const { calculator, given, exercise: seed } = page.state;
  const asked = askedOf(page.view.headlines, seed);
  drawExercise(byId("exercise"), {
    seed, asked, say,
    check: (guess) => transport.check(calculator.name, given, asked.name, guess),
    another: () => exercise(Number(seed) + 1),
    leave: () => {
      page.hidden = false;
      reveal();
      byId("exercise").replaceChildren();
      become({ exercise: null }, "exercise");
    },
    revealed: () => {
      page.hidden = false;
      reveal();
      form.show(given, page.view);
      buttons();
    },
  });
  byId("guess").focus();
}

// --- the start -----------------------------------------------------------------------------------------------------

function navigation() {
  const link = (calculator) =>
    element("li", {}, element("a", {
      href: addressOf({ calculator, given: {} }), "data-name": calculator.name, text: calculator.title,
      onclick: (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        page.hidden = false;
        reveal();
        byId("exercise").replaceChildren();
        become({ calculator, given: {}, exercise: null }, "calculator");
        trail.open = null;
      },
    }));
  const part = (title, some) => [element("h2", { text: title }), element("ol", { "aria-label": title }, ...some.map(link))];
  const lesson = listing.filter((each) => each.lesson), planner = listing.filter((each) => !each.lesson);
  byId("calculators").append(...(lesson.length ? part("Lesson", lesson) : []), ...(planner.length ? part("Planner", planner) : []));
}

navigation();
if (config.version) byId("version").textContent = `trainledger ${config.version}`;
byId("cancel").addEventListener("click", () => asking.cancel());
addEventListener("popstate", (event) => (trail.went(event), arrive()));
addEventListener("pagehide", () => trail.write());
new ResizeObserver(() => page.view && Math.abs(parts.drawings.clientWidth - page.width) >= 20 && ask()).observe(parts.drawings);
new IntersectionObserver(([seen]) => (byId("peek").hidden = seen.isIntersecting)).observe(parts.verdict);
if (location.hash.startsWith("#field-")) focusOn(location.hash.slice(7));
await arrive();

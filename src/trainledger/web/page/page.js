// The page: what is asked (the address), the form, and the newest answer.
import { confirm, say } from "./announce.js";
import { clear, drawAnswer, showAnswer, showWorking, stand } from "./answer.js";
import { Asking, Later } from "./asking.js";
import { copyMenu } from "./copy.js";
import { byId, element } from "./element.js";
import { drawExercise } from "./exercise.js";
import { remember } from "./drawing.js";
import { focusOn } from "./field.js";
import { Form } from "./form.js";
import { Lesson } from "./lesson.js";
import { axesOf } from "./moving.js";
import { drawCalculators, drawPresets, markCalculator } from "./navigation.js";
import { Pin } from "./pin.js";
import { Remedies } from "./remedies.js";
import { addressOf, different, framed, opened, same, stateOf, Trail, withFields } from "./state.js";
import { connect, Unreachable } from "./transport.js";

const root = byId("answer");
const page = { state: null, arriving: null, view: null, answered: null, hidden: false }; // the question that `view` answers

const { config, transport } = await connect().catch(stopped);
const listing = await transport.listing().catch(stopped);
const trail = new Trail();
const parts = drawAnswer(root, byId("details"));
const form = new Form(byId("form"), changed);
const asking = new Asking(
  ({ state, frame }, how) => transport.view(state.calculator.name, state.given, frame, how),
  { shown, refused, working },
);
const later = new Later(ask);
const lesson = new Lesson(config.lesson ?? [], transport, {
  go: (number) => (become(opened(config.lesson, number, listing)), scrollTo(0, 0)),
  leave: () => become({ lesson: null }), announce: say,
});
const pin = new Pin((state) => transport.view(state.calculator.name, state.given, { width: page.width }), ask);

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
function become(change, name = null, settled = true) {
  const state = { ...page.state, ...(change.calculator && { pin: null, lesson: null }), ...change };
  state.given = different(state.calculator, state.given);
  page.state = state;
  page.arriving = null;
  if (trail.moved(addressOf(state), name, settled)) remember(parts.picture);
  follow();
}

/** Everything that can be said before the answer is there; a question leaves first. */
function follow() {
  const { calculator, given } = page.state;
  const another = form.calculator !== calculator;
  if (another) {
    asking.cancel();
    page.view = page.answered = null;
    stand(parts, "");
    root.classList.add("fresh");
    clear(parts);
    form.draw(calculator);
    form.show(given, null);
    byId("form").scrollTop = 0;
  }
  const screen = screenOf();
  byId("name").textContent = screen ? `Lesson, ${page.state.lesson} of ${config.lesson.length}` : calculator.title;
  byId("question").textContent = screen?.title ?? calculator.question;
  document.documentElement.toggleAttribute("data-few", Boolean(screen || framed));
  form.choose(screen?.fields ?? framed?.split(",") ?? [], screen?.ranges);
  lesson.follow(page.state);
  const { newest } = asking, { answered } = page;
  const there = !newest && answered && !page.state.exercise && same(answered.state, page.state);
  if (!there && !(newest && same(newest.state, page.state))) ask();
  if (!another) form.follow(given);
  markCalculator(byId("calculators"), calculator, config.chapters);
  drawPresets(byId("presets"), page.state, (given) => become({ given, exercise: null }));
  buttons();
  if (there) restore();
  pin.follow(page.state);
}

/** The answer that is there is that of the question. */
function restore() {
  page.answered = { state: page.state, at: trail.at };
  form.wrong([]);
  form.show(page.state.given, page.view, page.hidden);
  root.classList.remove("old");
  stand(parts, "");
  draw(page.view);
  settle();
}

const screenOf = () => config.lesson?.[page.state.lesson - 1];
const draw = (view) => showAnswer(parts, view, pin, screenOf()?.number);

/** The whole address of the state, with these changes; of an export that of the file with its calculator's title and figure. */
const addressed = (more) => new URL(`${config.worker ? `${page.state.calculator.name}.html` : ""}${addressOf({ ...page.state, ...more })}`, location.href);

function ask() {
  later.stop();
  const measured = Math.round(parts.picture.clientWidth / 20) * 20;
  page.width = Math.min(1200, Math.max(280, measured));
  root.setAttribute("aria-busy", "true");
  remedies.stop();
  const shown = parts.picture.querySelector("svg"); // its axes stay where the next one's marks allow
  asking.want({ state: page.state, frame: { width: page.width, ...(shown && { held: axesOf(shown) }), ...pin.frame }, at: trail.at });
}

/** The state that the address says, at the start and after back and forward. */
async function arrive() {
  const state = stateOf(location.search, listing, config.lesson);
  page.hidden = Boolean(state.exercise);
  page.arriving = state;
  root.setAttribute("aria-busy", "true");
  reveal();
  const drawn = state.exercise && (await transport.exercise(state.calculator.name, state.exercise).catch((error) => ({ error })));
  if (page.arriving !== state) return; // the reader went on while the exercise was drawn
  page.arriving = null;
  if (state.left) (confirm(state.left), trail.write(addressOf(state)));
  page.state = { ...state, given: drawn?.query ?? different(state.calculator, state.given) };
  if (drawn?.error) {
    confirm(`There is no exercise now: ${drawn.error.message}.`);
    return leave();
  }
  byId("exercise").replaceChildren();
  follow();
  if (drawn) pose(drawn);
}

/** The answer is seen, and the form can be changed, unless an exercise asks for it. */
function reveal() {
  parts.body.hidden = parts.lead.hidden = parts.verdict.hidden = page.hidden;
  form.lock(page.hidden);
}

/** No question waits any more, and no exercise is being drawn. */
const settle = () => asking.waiting === null && !page.arriving && root.setAttribute("aria-busy", "false");

// --- what is answered ----------------------------------------------------------------------------------------------

function shown({ state, at }, view) {
  settle();
  if (page.arriving || state.calculator !== page.state.calculator || state.exercise !== page.state.exercise) return;
  page.view = view;
  page.answered = { state, at };
  root.classList.remove("fresh", "old");
  stand(parts, "");
  if (asking.waiting === null) {
    form.wrong([]);
    form.show(page.state.given, view, page.hidden);
  }
  draw(view);
  const offered = view.remedies?.filter((each) => !each.calculator || listing.some(({ name }) => name === each.calculator));
  remedies.show(offered, transport.looksAhead && !state.calculator.patient && !page.hidden);
  later.answered(view.again_seconds);
  exerciseButton.hidden = Boolean(state.exercise) || !state.calculator.exercises;
  const verdict = page.hidden ? `exercise ${state.exercise}` : view.verdict;
  document.title = `${state.calculator.title}: ${verdict} · trainledger`;
  if (!page.hidden) say(view.verdict, 900);
}

function refused({ state }, error) {
  settle();
  if (error === null || state.calculator !== page.state.calculator) return undefined;
  root.classList.add("old");
  if (error instanceof Unreachable) return unreachable(error);
  const problems = error.problems ?? [{ field: "", sentence: `no answer: ${error.message}` }];
  form.wrong(problems);
  if (page.answered) document.querySelector(".problem:not([hidden])")?.scrollIntoView({ block: "nearest" });
  const below = page.answered ? " Below is the answer to the question before." : "";
  stand(parts, `This question has no answer; what is wrong stands at its field.${below}`);
  document.title = `${state.calculator.title}: ${problems[0].sentence} · trainledger`;
  return say(problems.map((each) => each.sentence).join(". "), 900);
}

/** Asks again by itself, and at once where the reader wants it. */
function unreachable(error) {
  later.failed();
  const below = page.answered ? " Below is the last answer that came." : "";
  stand(parts, `There is no answer: ${error.message}${below} It is asked again by itself, or`, "Ask again", ask);
  say(`There is no answer: ${error.message}`, 900);
}

/** The reader does not wait: back to the question that is answered, or what to do where none is. */
function cancelled() {
  const { answered } = page;
  asking.cancel();
  settle();
  if (!answered) {
    const sentence = "Cancelled before there was an answer. Change a field, choose an example, or";
    stand(parts, sentence, "Ask again", () => (stand(parts, ""), ask()));
    return say(sentence.replace(", or", "."));
  }
  say("Cancelled; this is the question before, and its answer.");
  if (answered.at !== trail.at) return history.go(answered.at - trail.at);
  page.state = answered.state;
  trail.write(addressOf(page.state));
  trail.open = null;
  return follow();
}

function working(what) {
  showWorking(what);
  if (what === null) return;
  if (page.answered && !same(page.answered.state, page.state) && !root.classList.contains("old")) {
    root.classList.add("old");
    stand(parts, "Below is the answer to the question before; this one takes a moment.");
  }
}

// --- buttons -------------------------------------------------------------------------------------------------------

const button = (text, onclick, more = {}) => element("button", { type: "button", class: "quiet", text, onclick, ...more });
const undo = button("Undo", () => history.back());
const redo = button("Redo", () => history.forward());
const reset = button("Reset", () => become({ given: {} }));
const pinning = button("Pin", () => become({ pin: page.state.pin ? null : page.state.given }), { title: "Keep this state as an outline in the figure, and in the link" });
const exerciseButton = button("Exercise", () => exercise(1 + Math.floor(Math.random() * 9999)), { id: "exercises" });
const copying = copyMenu({
  texts: () => (page.answered && same(page.answered.state, page.state) ? page.view.paste : {}),
  link: addressed, frame: () => addressed({ embed: 1 }),
  drawing: () => page.view?.drawings[0] && { ...page.view.drawings[0], pinned: parts.picture.querySelector(".pinned") }, json: () => transport.answer(page.state.calculator.name, page.state.given),
  say: confirm,
});
const remedies = new Remedies(parts.remedies, {
  take: ({ calculator, fields }) => {
    const other = listing.find((each) => each.name === calculator);
    become(other ? { calculator: other, given: { ...fields }, exercise: null } : { given: withFields(page.state.given, fields) });
  },
  ask: ({ fields }) => transport.view(page.state.calculator.name, withFields(page.state.given, fields), { width: page.width }),
  say: confirm,
});
byId("tools").append(undo, redo, reset, pinning, exerciseButton, copying);

function buttons() {
  undo.disabled = trail.at === 0;
  redo.disabled = trail.at >= trail.last;
  reset.disabled = !Object.keys(page.state.given).length;
  pinning.setAttribute("aria-pressed", String(Boolean(page.state.pin)));
  reset.hidden = copying.hidden = pinning.hidden = Boolean(page.state.exercise) && page.hidden;
}

function exercise(seed, set = null) {
  trail.moved(addressOf({ ...page.state, exercise: String(seed), set }), null, true);
  arrive();
}

/** The answer is seen again, and there is no exercise. */
function leave(change = {}) {
  page.hidden = false;
  reveal();
  byId("exercise").replaceChildren();
  become({ ...change, exercise: null });
}

function pose(posed) {
  const { calculator, exercise: seed, set } = page.state;
  drawExercise(byId("exercise"), {
    ...posed, seed: Number(seed), set, say, leave: () => leave(), go: exercise, kept: `set of ${calculator.name}`,
    start: set && addressOf({ calculator, exercise: String(set.first), set }),
    check: (guess, misses) => transport.check(calculator.name, seed, guess, misses),
    revealed: () => {
      page.hidden = false;
      reveal();
      form.show(page.state.given, page.view);
      buttons();
    },
  });
  byId("guess").focus();
}

// --- the start -----------------------------------------------------------------------------------------------------

drawCalculators(byId("calculators"), listing, (calculator) => leave({ calculator, given: {} }));
if (config.version) byId("version").textContent = `trainledger ${config.version}`;
if (framed) {
  document.documentElement.dataset.embed = framed;
  byId("form").after(element("a", { class: "whole-page", href: "./", target: "_blank", text: "Open in trainledger", onclick: (event) => (event.target.href = addressed({ embed: null })) }));
}
for (const said of config.without ?? []) document.querySelector("footer").append(element("p", { text: said }));
if (config.worker) navigator.serviceWorker?.register("service.js").catch(() => {}); // then it is online only
byId("cancel").addEventListener("click", cancelled);
addEventListener("popstate", (event) => (trail.went(event), arrive()));
addEventListener("pagehide", () => trail.write());
new ResizeObserver(() => page.view && Math.abs(parts.picture.clientWidth - page.width) >= 20 && ask()).observe(parts.picture);
if (location.hash.startsWith("#field-")) focusOn(location.hash.slice(7));
await arrive();

// The lesson: a screen is a paragraph above a calculator in a state of its own, few of its fields, and an exercise.
import { byId, element, inside, say } from "./element.js";
import { drawExercise, results } from "./exercise.js";
import { addressOf } from "./state.js";

const ON = {
  "?calculator=memory": "Does your own model fit? Paste its config.json, or choose one.",
  "?calculator=serving": "What does a model take to serve once it is trained?",
  "?calculator=time&set=1-5": "Five more exercises on time",
  "?calculator=memory&set=1-5": "Five more exercises on memory",
};

export class Lesson {
  /** `go(number)` opens a screen and `leave()` its calculator; `announce(text)` is heard. */
  constructor(screens, transport, { go, leave, announce }) {
    Object.assign(this, { screens, transport, go, leave, announce, at: null });
  }

  /** Shows the paragraph and the exercise of the state's screen, or takes them away. */
  async follow(state) {
    const { lesson: number } = state, screen = this.screens[number - 1];
    byId("paragraph").hidden = byId("screens").hidden = !screen;
    if (screen) this.open.href = addressOf({ ...state, lesson: null });
    if (this.at === (number ?? null)) return;
    this.at = number ?? null;
    byId("task").replaceChildren();
    if (!screen) return;
    say(byId("paragraph"), screen.text);
    this.open.textContent = `Open this in ${state.calculator.title}`;
    this.#strip();
    const { calculator, seed } = screen.exercise;
    const drawn = await this.transport.exercise(calculator, seed).catch(() => null);
    if (!drawn || this.at !== number) return;
    drawExercise(byId("task"), {
      ...drawn, seed: number, set: { first: 1, last: this.screens.length }, kept: "lesson", go: this.go, say: this.announce, finish: () => this.#end(),
      check: (guess, misses) => this.transport.check(calculator, seed, guess, misses), revealed: () => this.#strip(),
    });
  }

  open = element("a", { href: "./", onclick: inside(() => this.leave()) });

  get #results() {
    return results(`lesson 1-${this.screens.length}`);
  }

  /** The numbers of the screens, with what became of their exercises. */
  #strip() {
    byId("screens").replaceChildren(element("ol", {}, ...this.screens.map((each, at) => element("li", {}, this.#link(each, at + 1, at + 1)))), this.open);
  }

  #link({ title }, number, text) {
    const link = element("a", { href: `?lesson=${number}`, title, text, "data-right": this.#results[number]?.toString(), onclick: inside(() => this.go(number)) });
    if (number === this.at) link.setAttribute("aria-current", "step");
    return link;
  }

  /** What was learnt, the score, and where to go on. */
  #end() {
    const done = Object.values(this.#results), right = done.filter(Boolean).length, all = this.screens.length;
    const left = done.length < all ? `; ${all - done.length} not tried` : "";
    const learnt = this.screens.map((each, at) => element("li", {}, this.#link(each, at + 1, each.title), `: ${each.learnt}`));
    const links = Object.entries(ON).map(([href, text]) => element("li", {}, element("a", { href, text })));
    byId("task").replaceChildren(element("section", { class: "guess end", "aria-label": "End of the lesson" },
      element("p", { class: "score", text: `${right} of ${all} exercises right${left}.` }), element("ol", {}, ...learnt),
      element("h2", { text: "Go on" }), element("ul", {}, ...links)));
    this.at = null; // each screen is another one than this
    byId("question").textContent = "What you have learnt";
    byId("question").focus();
    scrollTo(0, 0);
  }
}

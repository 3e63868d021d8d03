// The lesson: a screen is a paragraph above a calculator in a state of its own, few of its fields, and an exercise.
import { byId, element, say } from "./element.js";
import { drawExercise } from "./exercise.js";
import { addressOf } from "./state.js";

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
    byId("screens").replaceChildren(element("ol", {}, ...this.screens.map((each, at) => this.#link(each, at + 1))), this.open);
    const { calculator, seed } = screen.exercise;
    const drawn = await this.transport.exercise(calculator, seed).catch(() => null);
    if (!drawn || this.at !== number) return;
    drawExercise(byId("task"), {
      ...drawn, seed: number, set: { first: 1, last: this.screens.length }, kept: "lesson", go: this.go, say: this.announce,
      check: (guess, misses) => this.transport.check(calculator, seed, guess, misses), revealed: () => {},
    });
  }

  open = element("a", { href: "./", onclick: (event) => this.#inside(event, () => this.leave()) });

  #link({ title }, number) {
    const link = element("a", { href: `?lesson=${number}`, title, text: number, onclick: (event) => this.#inside(event, () => this.go(number)) });
    if (number === this.at) link.setAttribute("aria-current", "step");
    return element("li", {}, link);
  }

  #inside(event, act) {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    act();
  }
}

// The exercise: the answer is hidden, one of its numbers is asked for, and the guess is checked by the same functions.
import { element } from "./element.js";

/** The number that an exercise asks for, by its seed. */
export function askedOf(headlines, seed) {
  const asked = headlines.filter((each) => each.asked && each.value);
  return asked[Number(seed) % asked.length];
}

/** Draws the question into `root`; `check(guess)` promises the outcome, `another` and `leave` are its buttons. */
export function drawExercise(root, { seed, asked, check, another, leave, revealed, say }) {
  const guess = element("input", {
    type: "text", class: "text", id: "guess", autocomplete: "off", "aria-describedby": "outcome",
    placeholder: "about how much?",
  });
  const outcome = element("div", { id: "outcome", class: "outcome" });
  const form = element("form", { class: "guess", "aria-label": "Exercise" },
    element("p", { class: "name", text: `Exercise ${seed}` }),
    element("label", { for: "guess" }, "Work it out: ", element("b", { text: asked.title }), "?"),
    element("div", { class: "row" }, guess, element("button", { class: "button strong", type: "submit", text: "Check" })),
    outcome,
    element("div", { class: "row" },
      element("button", { type: "button", class: "button", text: "Another", onclick: another }),
      element("button", { type: "button", class: "quiet", text: "Leave the exercise", onclick: leave })),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const found = await check(guess.value);
      const kind = found.right ? "good" : "bad";
      outcome.replaceChildren(
        element("p", { class: `verdict ${kind}` }, element("span", { class: "tone", "aria-hidden": "true", text: found.right ? "✓" : "✕" }), found.said),
        element("code", { class: "formula", text: found.headline.formula }),
      );
      say(found.said);
      revealed();
    } catch (error) {
      outcome.replaceChildren(element("p", { class: "problem", text: error.message }));
      say(error.message);
    }
  });
  root.replaceChildren(form);
}

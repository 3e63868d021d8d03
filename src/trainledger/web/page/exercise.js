// The exercise: the answer is hidden until its number is found, or shown after two misses; a set of them has a score.
import { element } from "./element.js";

const SET = 5; // exercises

/** What became of the exercises of a set, right or not by number, as long as the tab is open. */
export const results = (key) => JSON.parse(sessionStorage.getItem(key) ?? "{}");

/** Draws an exercise into `root`.
 *
 * `check(guess, misses)` promises the outcome; `go(seed, set)` and, where there is one, `leave` are its buttons,
 * `revealed` hears of its end, `start` is the link to its set, `kept` the name under which the score is remembered, and
 * `finish` what follows the last of a set. */
export function drawExercise(root, { question, unit, seed, set, start, kept, check, go, leave, finish, revealed, say }) {
  const key = set && `${kept} ${set.first}-${set.last}`, of = set ? set.last - set.first + 1 : 0;
  const score = () => `${Object.values(results(key)).filter(Boolean).length} right`;
  const name = element("p", { class: "name" });
  const guess = element("input", {
    type: "text", class: "text", id: "guess", autocomplete: "off", "aria-describedby": "outcome", placeholder: "such as 12.6, 80B or 2^-7",
  });
  const outcome = element("div", { id: "outcome", class: "outcome" });
  const button = (text, onclick, quiet) => element("button", { type: "button", class: quiet ? "quiet" : "button", text, onclick });
  const next = !set ? [button("Another", () => go(seed + 1))] : seed < set.last ? [button("Next", () => go(seed + 1, set))] : finish ? [button("Finish", finish)] : [];
  const more = set ? start && element("a", { href: start, text: "Link to this set" }) : button(`A set of ${SET}`, () => go(seed, { first: seed, last: seed + SET - 1 }), true);
  const form = element("form", { class: "guess", "aria-label": "Exercise" },
    name,
    element("label", { for: "guess", text: question }),
    element("div", { class: "row" }, guess, element("span", { text: unit }), element("button", { class: "button strong", type: "submit", text: "Check" })),
    outcome,
    element("div", { class: "row" }, ...next, ...(more ? [more] : []), ...(leave ? [button("Leave the exercise", leave, true)] : [])),
  );
  const named = () => (name.textContent = set ? `Exercise ${seed - set.first + 1} of ${of}: ${score()} so far` : `Exercise ${seed}`);
  let misses = 0, over = false;
  const told = ({ right, said }) => {
    const mark = element("span", { class: "tone", "aria-hidden": "true", text: right ? "✓" : "✕" });
    outcome.replaceChildren(element("p", { class: `verdict ${right ? "good" : "bad"}` }, mark, said));
    say(said);
    outcome.scrollIntoView({ block: "nearest" }); // on a telephone it is below what stays in view
  };
  const end = ({ right }) => {
    over = true;
    if (set) {
      const had = results(key); // the first end of an exercise counts
      sessionStorage.setItem(key, JSON.stringify({ [seed]: right, ...had }));
      if (Object.keys(results(key)).length === of) outcome.append(element("p", { class: "score", text: `The set is done: ${score()} of ${of}.` }));
    }
    named();
    revealed();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const found = await check(guess.value, misses);
      told(found);
      if (!found.right) misses += 1;
      if (found.over && !over) end(found);
      else if (!over) guess.select();
    } catch (error) {
      outcome.replaceChildren(element("p", { class: "problem", text: error.message }));
      say(error.message);
    }
  });
  named();
  root.replaceChildren(form);
}

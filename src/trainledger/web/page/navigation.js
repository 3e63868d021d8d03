// What can be asked: the calculators, and the examples of one.
import { byId, element, inside, keep } from "./element.js";
import { addressOf, different } from "./state.js";

/** The links to all calculators; `chosen(calculator)` hears of one that is followed. */
export function drawCalculators(root, listing, chosen) {
  const link = (calculator) =>
    element("li", {}, element("a", {
      href: addressOf({ calculator, given: {} }), "data-name": calculator.name, text: calculator.title,
      onclick: inside(() => chosen(calculator)),
    }));
  const heading = (title) => (title === "Lesson" ? element("a", { href: "?lesson=1", text: title, title: "Ten screens, from 32 H100s to a run" }) : title);
  const part = (title, some) => (some.length ? [element("div", {}, element("h2", {}, heading(title)), element("ol", { "aria-label": title }, ...some.map(link)))] : []);
  const lesson = listing.filter((each) => each.lesson), planner = listing.filter((each) => !each.lesson);
  root.append(...part("Lesson", lesson), ...part("Planner", planner));
}

/** Marks the calculator that is asked, and brings its link into a strip that is too narrow for all. */
export function markCalculator(root, calculator, chapters = {}) {
  const chapter = chapters[calculator.name]; // of the lecture, where it lies beside the page
  byId("chapter").hidden = !chapter;
  if (chapter) byId("chapter").href = chapter;
  for (const link of root.querySelectorAll("a")) {
    if (link.dataset.name !== calculator.name) link.removeAttribute("aria-current");
    else if (!link.hasAttribute("aria-current")) {
      link.setAttribute("aria-current", "page");
      if (root.scrollWidth > root.clientWidth) link.scrollIntoView({ block: "nearest", inline: "center" });
    }
  }
}

/** The examples of a calculator, the one that is asked pressed; `chosen(query)` hears of another. */
export function drawPresets(root, { calculator, given, exercise }, chosen) {
  const now = JSON.stringify(Object.entries(given).sort());
  keep(root, Object.entries(calculator.presets), ([title]) => title, chip, (made, [, query]) => {
    const own = JSON.stringify(Object.entries(different(calculator, query)).sort());
    made.setAttribute("aria-pressed", String(own === now));
    made.onclick = () => chosen(query);
  });
  root.hidden = Boolean(exercise);
}

const chip = ([title]) => element("button", { type: "button", class: "chip", text: title });

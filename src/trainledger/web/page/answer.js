// The answer: a verdict, headlines that open their formulas, drawings, and the sections of the document.
import { byId, element, keep, put, putCommand, reachable, say, whole } from "./element.js";
import { drawing, redraw } from "./drawing.js";

const TONES = { good: "✓", warn: "!", bad: "✕", unknown: "–" };
const SAID = { warn: "Warning: ", bad: "Problem: ", unknown: "Unknown: " };
const STEP = 40; // pixels
const LONG = 12; // letters of a number that has the room of a card
const BASES = { exact: "●", bound: "◐", assumed: "○", measured: "◆" };

/** The empty parts of an answer, in the order in which they are read: what a first screen shows, and the details. */
export function drawAnswer(root, details) {
  const parts = {
    verdict: element("p", { class: "verdict", id: "verdict" }),
    standing: element("p", { class: "standing", id: "standing", hidden: true }),
    exercise: element("div", { id: "exercise" }),
    lead: element("div", { class: "lead" }),
    number: element("div", { class: "number-first" }),
    pinned: element("p", { class: "pinned-said", hidden: true }),
    picture: element("div", { class: "picture-first" }),
    body: element("div", { class: "body" }),
    headlines: element("div", { class: "headlines", role: "group", "aria-label": "Numbers" }),
    remedies: element("div", { class: "remedies", hidden: true }),
    drawings: element("div", { class: "drawings" }),
    notes: element("ul", { class: "notes", "aria-label": "Notes" }),
    sections: element("div", { class: "sections" }),
    terminal: element("div", { class: "terminal", hidden: true }),
  };
  parts.verdict.append(element("span", { class: "tone", "aria-hidden": "true" }), element("span", { class: "unseen" }), element("span", { class: "said" }));
  parts.terminal.append(element("h2", { text: "The same from a terminal" }), element("pre", { tabindex: "0" }, element("code")));
  parts.lead.append(parts.number, parts.pinned, parts.picture);
  parts.body.append(parts.headlines, parts.remedies, parts.drawings, parts.notes, parts.sections, parts.terminal);
  byId("loading")?.remove();
  root.append(element("div", { class: "said-first" }, parts.standing, parts.verdict), parts.exercise, parts.lead);
  details.append(parts.body);
  return parts;
}

/** Shows an answer in the parts, the number of the name `first` before all, beside what is pinned; whatever has not changed
 * is left alone. */
export function showAnswer(parts, view, pin, first) {
  const [tone, spoken, said] = parts.verdict.children;
  parts.verdict.className = `verdict ${view.tone}`;
  tone.hidden = !TONES[view.tone];
  put(tone, TONES[view.tone] ?? "");
  put(spoken, SAID[view.tone] ?? "");
  say(said, view.verdict);
  const [number, ...numbers] = view.headlines.toSorted((a, b) => (b.name === first) - (a.name === first)), [picture, ...pictures] = view.drawings;
  keep(parts.number, number ? [number] : [], (each) => each.name, card, fill);
  keep(parts.headlines, numbers, (each) => each.name, card, fill);
  keep(parts.notes, view.notes, (each) => each, () => element("li"), say);
  parts.notes.hidden = !view.notes.length;
  parts.pinned.hidden = !pin.said;
  say(parts.pinned, pin.said);
  keep(parts.picture, picture ? [{ ...picture, pinned: pin.picture }] : [], () => "0", drawing, redraw);
  keep(parts.drawings, pictures, (_, at) => String(at), drawing, redraw);
  keep(parts.sections, view.sections, sectionKey, fold, unfold);
  parts.terminal.hidden = !view.paste.command;
  putCommand(parts.terminal.querySelector("code"), view.paste.command ?? "");
  for (const each of document.querySelectorAll(".picture, .notes, div.section")) hold(each);
}

/** Room for the highest that a part has been at its width, and for a line more: what is below it stays. */
function hold(part) {
  if (part.wide !== part.clientWidth) {
    Object.assign(part, { wide: part.clientWidth, high: 0 });
    part.style.setProperty("min-height", "0");
  }
  if (part.scrollHeight <= part.high) return;
  part.high = STEP * Math.ceil((part.scrollHeight + 4) / STEP);
  part.style.setProperty("min-height", `${part.high}px`);
}

/** Forgets the parts of another calculator. */
export function clear(parts) {
  for (const each of [parts.picture, parts.drawings, parts.remedies.querySelector("ul"), parts.notes, parts.sections]) {
    each.replaceChildren();
    each.wide = undefined;
  }
}

/** Says how the answer below stands to the question, with a button that acts on it; an empty sentence says nothing. */
export function stand(parts, sentence, action, act) {
  parts.standing.hidden = !sentence;
  parts.standing.replaceChildren(sentence);
  if (action) parts.standing.append(" ", element("button", { type: "button", class: "button", text: action, onclick: act }));
}

/** How far an answer is that takes a while; null: there is none. */
export function showWorking(what) {
  const bar = byId("progress");
  byId("working").hidden = what === null;
  if (what === null) return;
  byId("doing").textContent = what.what || "working";
  if (what.of) Object.assign(bar, { max: what.of, value: what.done });
  else bar.removeAttribute("value");
}

function card() {
  const text = element("span", { class: "number" }, element("span"), element("small"));
  const title = element("span", { class: "title" });
  const basis = element("span", { class: "basis" }), interval = element("span", { class: "interval" });
  const formula = element("code", { class: "formula" });
  const full = element("p", { class: "full" });
  const source = element("p", { class: "source" });
  return element("details", { class: "headline" }, element("summary", {}, title, text, interval, basis), full, formula, source);
}

function fill(child, each) {
  const [title, text, interval, basis] = child.firstChild.children;
  const [number, ...unit] = each.text.split(" ");
  say(title, each.title);
  put(text.firstChild, number);
  text.classList.toggle("long", each.text.length > LONG);
  put(text.lastChild, unit.length ? ` ${unit.join(" ")}` : "");
  put(interval, each.interval);
  put(basis, `${BASES[each.basis] ?? "○"} ${each.basis}${each.in_full ? ", rounded here" : ""}`);
  basis.dataset.basis = each.basis;
  const full = child.querySelector(".full");
  full.hidden = !each.in_full;
  put(full, `in full: ${each.in_full}`);
  say(child.querySelector(".formula"), each.formula);
  say(child.querySelector(".source"), each.source);
}

const sectionKey = (each, at) => each.title || `part ${at}`;

function fold(each) {
  const body = element("div", { class: "document" }), head = element("h2", { text: each.title });
  whole(head);
  return each.title
    ? element("details", { class: "section" }, element("summary", {}, head), body)
    : element("div", { class: "section" }, body);
}

function unfold(child, each) {
  const body = child.querySelector(".document");
  if (!put(body, each.html, "innerHTML")) return;
  whole(body);
  reachable(body, each.title);
}

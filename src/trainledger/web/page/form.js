// The form of a calculator: its fields in their groups, and what no field stands for.
import { combobox } from "./combobox.js";
import { control, told } from "./field.js";
import { element } from "./element.js";

const OPEN = 8; // fields of a narrow screen that are seen before the answer
const narrow = matchMedia("(max-width: 860px)");

/** Fields under a heading that folds them; on a narrow screen those after the first are folded. */
function group(title, seen, boxes, folded) {
  const set = element("fieldset", { class: folded ? "folded" : "" });
  const why = element("p", { class: "unused", hidden: true }); // of all its fields
  const fold = element("button", {
    type: "button", class: "fold", "aria-expanded": String(!folded), text: title,
    onclick: () => fold.setAttribute("aria-expanded", String(!set.classList.toggle("folded"))),
  });
  set.append(seen ? element("legend", {}, fold) : element("legend", { class: "unseen", text: title }), why, ...boxes);
  return set;
}

/** Opens the group of a field. */
const unfold = (box) => box.closest(".folded")?.querySelector(".fold").click();

export class Form {
  /** `changed(name, text, settled)` hears of each step of each field. */
  constructor(root, changed) {
    Object.assign(this, { root, changed, controls: new Map(), calculator: null, given: {}, locked: false });
    root.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Draws the fields of a calculator, unless they are there already. */
  draw(calculator) {
    if (this.calculator === calculator) return;
    this.calculator = calculator;
    this.controls.clear();
    this.general = element("div", { class: "problem", role: "group", "aria-label": "Problems", hidden: true });
    this.chips = element("div", { class: "chips", role: "group", "aria-label": "Other settings" });
    this.others = element("fieldset", { class: "others", hidden: !calculator.others.length });
    this.others.append(element("legend", { text: "Any other setting" }), this.chips, ...this.#another());
    const groups = new Map();
    for (const field of calculator.fields) {
      const made = control(field, (text, settled) => this.changed(field.name, text, settled));
      this.controls.set(field.name, made);
      if (!groups.has(field.group)) groups.set(field.group, []);
      groups.get(field.group).push(made.box);
    }
    let above = 0;
    const sets = [...groups].map(([title, boxes]) => {
      const folded = narrow.matches && above >= OPEN;
      above += boxes.length;
      return group(title || calculator.title, Boolean(title), boxes, folded);
    });
    this.root.replaceChildren(this.general, ...sets, this.others);
    this.lock(this.locked);
  }

  /** Marks the fields that alone are shown where a page has few: the named ones, else the first two that slide; sliders have `ranges`. */
  choose(names, ranges = {}) {
    const slides = this.calculator.fields.filter((each) => each.stops.length).map((each) => each.name);
    const known = names.filter((name) => this.controls.has(name)), chosen = known.length ? known : slides.slice(0, 2);
    for (const [name, { box, limit }] of this.controls) {
      box.toggleAttribute("data-chosen", chosen.includes(name));
      limit(ranges[name]);
    }
  }

  /** Where `locked`, fields are seen and scrolled to, and not changed. */
  lock(locked) {
    this.locked = locked;
    this.root.toggleAttribute("data-locked", locked);
    for (const set of this.root.querySelectorAll("fieldset")) set.disabled = locked;
  }

  /** Shows at once what is given, in the fields where that is another text; the answer to it shows the others. */
  follow(given) {
    for (const field of this.calculator.fields) {
      const { name } = field;
      if (given[name] === this.given[name]) continue;
      const text = given[name] ?? field.default, at = field.stops.indexOf(text);
      this.controls.get(name).show({ text, at: at < 0 ? undefined : at, follows: false, unused: "" }, name in given, false);
    }
    this.#rest(given);
  }

  /** Shows what is given and what the answer says of every field; `hidden` keeps what it decides to itself. */
  show(given, view, hidden = false) {
    const answered = view?.fields;
    for (const [name, choices] of Object.entries(view?.choices ?? {})) this.controls.get(name)?.offer(choices);
    for (const field of this.calculator.fields) {
      const text = given[field.name] ?? field.default;
      if (field.name in given) unfold(this.controls.get(field.name).box);
      const known = answered?.[field.name] ?? { text, at: Math.max(0, field.stops.indexOf(text)), follows: false, unused: "" };
      this.controls.get(field.name).show(known, field.name in given, hidden);
    }
    this.#rest(given);
  }

  /** Where no field of a group counts, for one reason, it stands there once and the fields are hidden. */
  #idle() {
    for (const set of this.root.querySelectorAll("fieldset:not(.others)")) {
      const reasons = new Set([...set.querySelectorAll("[data-field]")].map((box) => this.controls.get(box.dataset.field).unused));
      const [reason] = reasons, idle = reasons.size === 1 && reason !== "";
      const why = set.querySelector(":scope > .unused");
      why.hidden = !idle;
      why.textContent = idle ? `not counted: ${reason}` : "";
      set.classList.toggle("idle", idle);
    }
  }

  /** What is given and no field stands for. */
  #rest(given) {
    this.#idle();
    this.given = given;
    const more = Object.entries(given).filter(([name]) => !this.controls.has(name));
    this.chips.replaceChildren(...more.map(([name, text]) => this.#other(name, text)));
  }

  /** A field of a run by its path, and its value. */
  #another() {
    const { box, input } = combobox({
      id: "another", choices: this.calculator.others.map((each) => [each, each]), chosen: () => value.focus(),
    });
    const value = element("input", { type: "text", class: "text", id: "another-value", "aria-label": "its value", placeholder: "value" });
    const add = () => {
      if (!input.value || !value.value) return;
      this.changed(input.value, value.value, true);
      input.value = value.value = "";
    };
    input.placeholder = "recipe.optimizer";
    input.setAttribute("aria-label", "a field of the run");
    value.addEventListener("keydown", (event) => event.key === "Enter" && add());
    const button = element("button", { type: "button", class: "button", text: "Set", onclick: add });
    return [element("div", { class: "another" }, box, value, button)];
  }

  #other(name, text) {
    const said = `${name} = ${text}  ×`, label = `leave ${name} out`;
    return element("button", {
      type: "button", class: "chip", "aria-label": `${said}: ${label}`, title: label, text: said,
      onclick: () => this.changed(name, null, true),
    });
  }

  /** Shows problems at their fields, and those that belong to none above all. */
  wrong(problems) {
    const left = [...problems];
    for (const [name, made] of this.controls) {
      const at = left.findIndex((each) => each.field === name);
      const own = at < 0 ? null : left.splice(at, 1)[0];
      if (own) unfold(made.box);
      made.wrong(own, (text) => this.changed(name, text, true));
    }
    this.#idle();
    this.general.hidden = !left.length;
    this.general.replaceChildren(...left.map((each) => element("p", {}, ...told(each, this.#taken(each)))));
  }

  #taken(each) {
    return each.field?.includes(".") ? (text) => this.changed(each.field, text, true) : null;
  }
}

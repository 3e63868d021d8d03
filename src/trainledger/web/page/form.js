// The form of a calculator: its fields in their groups, and what no field stands for.
import { control, told } from "./field.js";
import { element } from "./element.js";

export class Form {
  /** `changed(name, text, settled)` hears of each step of each field. */
  constructor(root, changed) {
    Object.assign(this, { root, changed, controls: new Map(), calculator: null });
    root.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Draws the fields of a calculator, unless they are there already. */
  draw(calculator) {
    if (this.calculator === calculator) return;
    this.calculator = calculator;
    this.controls.clear();
    this.general = element("div", { class: "problem", role: "group", "aria-label": "Problems", hidden: true });
    this.others = element("div", { class: "chips others", role: "group", "aria-label": "Other settings" });
    const groups = new Map();
    for (const field of calculator.fields) {
      const made = control(field, (text, settled) => this.changed(field.name, text, settled));
      this.controls.set(field.name, made);
      if (!groups.has(field.group)) groups.set(field.group, []);
      groups.get(field.group).push(made.box);
    }
    const sets = [...groups].map(([title, boxes]) =>
      element("fieldset", {}, ...(title ? [element("legend", { text: title })] : [element("legend", { class: "unseen", text: calculator.title })]), ...boxes),
    );
    this.root.replaceChildren(this.general, ...sets, this.others);
  }

  /** Shows what is given and what the answer says of every field; `hidden` keeps what it decides to itself. */
  show(given, answered, hidden = false) {
    for (const field of this.calculator.fields) {
      const text = given[field.name] ?? field.default;
      const known = answered?.[field.name] ?? { text, at: Math.max(0, field.stops.indexOf(text)), follows: false };
      this.controls.get(field.name).show(known, field.name in given, hidden);
    }
    const more = Object.entries(given).filter(([name]) => !this.controls.has(name));
    this.others.replaceChildren(...more.map(([name, text]) => this.#other(name, text)));
  }

  #other(name, text) {
    const label = `leave ${name} out`;
    return element("button", {
      type: "button", class: "chip", "aria-label": label, title: label, text: `${name} = ${text}  ×`,
      onclick: () => this.changed(name, null, true),
    });
  }

  /** Shows problems at their fields, and those that belong to none above all. */
  wrong(problems) {
    const left = [...problems];
    for (const [name, made] of this.controls) {
      const at = left.findIndex((each) => each.field === name);
      const own = at < 0 ? null : left.splice(at, 1)[0];
      made.wrong(own, (text) => this.changed(name, text, true));
    }
    this.general.hidden = !left.length;
    this.general.replaceChildren(...left.map((each) => element("p", {}, ...told(each, this.#taken(each)))));
  }

  #taken(each) {
    return each.field?.includes(".") ? (text) => this.changed(each.field, text, true) : null;
  }
}

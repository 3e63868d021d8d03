// What may mend an answer: a button for each change, what the answer would be, and its command to copy.
import { copied } from "./copy.js";
import { element, keep, put, say } from "./element.js";

const REST = 400; // milliseconds without another answer, after which what each change gives is asked for
const kind = (each) => each.title.replace(/[\d,]+/g, "#"); // the same change by another number
const TONES = { good: "✓", bad: "✕" };

export class Remedies {
  /** `take(remedy)` makes a change; `ask(remedy)` promises the view of the changed question; `say(text)` is heard. */
  constructor(root, { take, ask, say }) {
    Object.assign(this, { take, ask, say, root, views: new Map(), timer: undefined });
    this.list = element("ul", { "aria-label": "What to change" });
    this.none = element("p", { class: "leads", text: "Nothing has to change. Where a run does not fit, what may mend it stands here." });
    root.append(element("h2", { text: "What to change" }), this.list, this.none);
  }

  /** Another question is asked: what the changes of this one lead to is of no use any more. */
  stop() {
    clearTimeout(this.timer);
    this.views = new Map();
  }

  /** Shows the changes that an answer has, null where it never has any; with `looks` also what each would lead to. */
  show(given, looks) {
    const remedies = given ?? [];
    this.stop();
    this.root.hidden = !given;
    this.none.hidden = remedies.length > 0;
    const before = [...this.list.children].map((line) => line.dataset.key); // each stays in its place
    const kinds = [...new Set([...before, ...remedies.map(kind)])];
    keep(this.list, kinds, (each) => each, () => this.#line(), (line, each) => this.#fill(line, remedies.find((one) => kind(one) === each)));
    const own = remedies.filter((each) => !each.calculator);
    if (looks && own.length) this.timer = setTimeout(() => this.#look(own), REST);
  }

  #line() {
    const copy = element("button", { type: "button", class: "quiet", text: "Copy" });
    return element("li", {}, element("button", { type: "button", class: "button" }), copy, element("span", { class: "leads" }));
  }

  #fill(line, each) {
    const [take, copy, outcome] = line.children;
    line.classList.toggle("gone", !each);
    if (!each) return;
    put(take, each.title);
    copy.setAttribute("aria-label", `Copy command: ${each.title}`);
    take.onclick = () => this.take(each);
    copy.onclick = () => this.#copy(each);
    put(outcome, "");
    outcome.className = "leads";
  }

  /** Asks what each change leads to, one after another, as long as the answer is the same. */
  async #look(remedies) {
    const { views } = this;
    for (const each of remedies) {
      const line = [...this.list.children].find((one) => one.dataset.key === kind(each));
      const view = await this.ask(each).catch(() => null); // it breaks a rule: no change to offer
      if (views !== this.views) return;
      if (view) views.set(each.title, view);
      line.classList.toggle("gone", !view);
      if (!view) continue;
      say(line.lastChild, `${TONES[view.tone] ?? ""} ${view.verdict}`.trim());
      line.lastChild.classList.add(view.tone);
    }
  }

  async #copy(each) {
    try {
      const view = each.command ? null : (this.views.get(each.title) ?? (await this.ask(each)));
      await copied(each.command || view.paste.command);
      this.say("Command line copied");
    } catch (error) {
      this.say(`Command line could not be copied: ${error.message}`);
    }
  }
}

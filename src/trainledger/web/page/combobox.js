// A text with a list that is filtered while one types: any part of a name finds it.
// The pattern is the editable combobox with list autocomplete of the ARIA Authoring Practices.
import { element } from "./element.js";

/** The input of `id` and its list of [value, title] pairs; `chosen(text)` hears of a value taken from the list. */
export function combobox({ id, choices: known, chosen, describedby }) {
  let choices = known;
  const input = element("input", {
    type: "text", id, class: "text", role: "combobox", spellcheck: "false", autocapitalize: "off", autocomplete: "off",
    "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": `${id}-list`,
    "aria-describedby": describedby,
  });
  const list = element("ul", { class: "options", id: `${id}-list`, role: "listbox", hidden: true });
  const box = element("div", { class: "combobox" }, input, list);
  let at = -1;

  const open = (all) => {
    const sought = all ? [] : input.value.trim().toLowerCase().split(/\s+/); // "llama 3.1 70" finds llama-3.1-70b
    const found = choices.filter((each) => sought.every((word) => each.join(" ").toLowerCase().includes(word)));
    list.replaceChildren(...found.map(option));
    list.hidden = !found.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    mark(all ? found.findIndex(([value]) => value === input.value) : -1);
  };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    mark(-1);
  };
  const option = ([value, title], place) =>
    element(
      "li",
      { role: "option", id: `${id}-${place}`, "data-value": value, "aria-selected": String(value === input.value) },
      title || value || "not given",
    );
  const mark = (place) => {
    list.children[at]?.classList.remove("at");
    at = place;
    const marked = list.children[at];
    marked?.classList.add("at");
    marked?.scrollIntoView({ block: "nearest" });
    if (marked) input.setAttribute("aria-activedescendant", marked.id);
    else input.removeAttribute("aria-activedescendant");
  };
  const take = (item) => {
    input.value = item.dataset.value;
    close();
    chosen(input.value);
  };

  input.addEventListener("input", (event) => {
    open(false);
    // Half a name is no question: it waits until one is taken from the list, or the reader goes on.
    if (!list.hidden && !choices.some(([value]) => value === input.value)) event.stopImmediatePropagation();
  });
  input.addEventListener("click", () => !input.readOnly && (list.hidden ? open(true) : close()));
  input.addEventListener("blur", close);
  list.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // the input keeps the focus
    const item = event.target.closest("li");
    if (item) take(item);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) return open(true);
      const step = event.key === "ArrowDown" ? 1 : -1;
      return mark(Math.min(list.children.length - 1, Math.max(0, at + step)));
    }
    if (event.key === "Enter" && !list.hidden && list.children[at]) {
      event.preventDefault();
      return take(list.children[at]);
    }
    if (event.key === "Escape" && !list.hidden) {
      event.preventDefault();
      return close();
    }
    return undefined;
  });
  const offer = (some) => {
    choices = some;
    input.placeholder = choices.find(([value]) => value === "")?.[1] || "not given";
  };
  offer(known);
  return { box, input, offer };
}

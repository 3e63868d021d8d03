// What can be pasted elsewhere: the same question as a command line, a run file, a link, JSON, or Python.
import { element } from "./element.js";
import { fileOf, imageOf, isHere } from "./figure.js";

const OF_LINKS = ["Link", "Frame for a page"];
const KINDS = { command: "Command line", run_file: "Run file", python: "Python" };

/** The menu; `texts()` gives what the answer has for pasting, `link()` its address and `frame()` that for a page of others, `drawing()`
 * its figure, `json()` promises the answer, `say(text)` is heard. */
export function copyMenu({ texts, link, frame, drawing, json, say }) {
  const list = element("div", { class: "menu", id: "copies", role: "menu", "aria-label": "Copy as", hidden: true });
  const button = element("button", {
    type: "button", class: "button", id: "copy", "aria-haspopup": "menu", "aria-expanded": "false",
    "aria-controls": "copies", text: "Copy as",
  });
  const box = element("div", { class: "copying" }, button, list);
  const items = () => [...list.children];

  const open = () => {
    const own = Object.entries(KINDS).filter(([name]) => texts()[name]);
    const kinds = [
      ...own.map(([name, title]) => [title, () => texts()[name]]),
      ["Link", () => link().href],
      ["Frame for a page", () => `<iframe src="${frame().href.replace(/&/g, "&amp;")}" width="100%" height="720" style="border: 0"></iframe>`],
      ["JSON", async () => JSON.stringify(await json(), null, 2)],
      ...(drawing() ? [["Figure as SVG", () => fileOf(drawing(), link())], ["Figure as PNG", () => imageOf(fileOf(drawing(), link()))]] : []),
    ];
    list.replaceChildren(...kinds.map(([title, text]) => item(title, text)));
    list.hidden = false;
    button.setAttribute("aria-expanded", "true");
    items()[0].focus();
  };
  const close = (back = true) => {
    if (list.hidden) return;
    list.hidden = true;
    button.setAttribute("aria-expanded", "false");
    if (back) button.focus();
  };
  const item = (title, text) =>
    element("button", {
      type: "button", role: "menuitem", tabindex: "-1", text: title,
      onclick: async () => {
        close();
        try {
          await copied(await text());
          say(`${title} copied${isHere.test(location.hostname) && OF_LINKS.includes(title) ? "; it works on this machine only" : ""}`);
        } catch (error) {
          say(`${title} could not be copied: ${error.message}`);
        }
      },
    });

  button.addEventListener("click", () => (list.hidden ? open() : close()));
  box.addEventListener("focusout", (event) => !box.contains(event.relatedTarget) && close(false));
  list.addEventListener("keydown", (event) => {
    const every = items(), at = every.indexOf(document.activeElement), last = every.length - 1;
    const to = {
      ArrowDown: at === last ? 0 : at + 1, ArrowUp: at === 0 ? last : at - 1, Home: 0, End: last,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      every[to].focus();
    } else if (event.key === "Escape") {
      close();
    }
  });
  return box;
}

/** Puts a text or a picture on the clipboard; a text, where the browser keeps that for secure pages, by the older way. */
export async function copied(text) {
  if (text instanceof Blob) return navigator.clipboard.write([new ClipboardItem({ [text.type]: text })]);
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not allow it");
  return undefined;
}

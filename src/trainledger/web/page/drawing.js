// A drawing with the table of what it shows beside it, and the sentence of the mark under the pointer.
import { element, keep, put, reachable, whole } from "./element.js";
import { become, outline, pictureOf } from "./moving.js";

/** An empty figure with its switch between drawing and table. */
export function drawing() {
  const picture = element("div", { class: "picture" });
  const table = element("div", { class: "document", hidden: true });
  const toggle = element("button", {
    type: "button", class: "quiet", "aria-pressed": "false", text: "Table",
    onclick: () => {
      table.hidden = !table.hidden;
      toggle.setAttribute("aria-pressed", String(!table.hidden));
      fill(table, figure.newest);
    },
  });
  const head = element("figcaption", {}, element("h2"), toggle);
  const key = element("ol", { class: "key" });
  const figure = element("figure", { class: "drawing" }, head, picture, key, table);
  hover(picture);
  return figure;
}

/** Puts the newest picture and table in. */
export function redraw(figure, each) {
  const [head, picture, key, table] = figure.children;
  put(head.firstElementChild, each.title);
  head.lastElementChild.setAttribute("aria-label", `Table of: ${each.title}`);
  keep(key, each.key, (said) => said, () => element("li"), (item, said) => put(item, said));
  key.hidden = !each.key.length;
  if (each.svg !== figure.newest?.svg || each.pinned !== figure.newest.pinned) {
    const next = pictureOf(each.svg);
    next.setAttribute("aria-label", `${each.title}; its numbers are in the table`);
    if (!picture.firstElementChild) picture.append(next.cloneNode(false));
    become(picture.firstElementChild, next);
    const before = each.pinned ?? figure.was;
    if (before) outline(picture.firstElementChild, before, each.pinned ? "pinned" : "ghost");
  }
  figure.newest = each;
  fill(table, each);
}

/** What a figure shows now is what it showed before, once the question is another. */
export function remember(root) {
  const figure = root.firstElementChild, svg = figure?.querySelector(".picture > svg");
  if (svg) figure.was = svg.cloneNode(true);
}

/** A table is written only while it is shown. */
function fill(table, each) {
  if (table.hidden || !put(table, each.table, "innerHTML")) return;
  whole(table);
  reachable(table, each.title);
}

function hover(picture) {
  const box = element("div", { class: "hover", "aria-hidden": "true", hidden: true });
  const over = (event) => {
    const mark = event.target.closest?.("[data-said]");
    box.hidden = !mark || !picture.contains(mark);
    if (box.hidden) return;
    if (!box.isConnected) document.body.append(box);
    put(box, mark.dataset.said);
    box.style.setProperty("left", `${event.clientX}px`);
    box.style.setProperty("top", `${event.clientY}px`);
    box.classList.toggle("leftwards", event.clientX > innerWidth / 2);
  };
  picture.addEventListener("pointermove", over);
  picture.addEventListener("pointerdown", over);
  picture.addEventListener("pointerleave", () => (box.hidden = true));
}

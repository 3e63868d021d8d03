// A picture that becomes the next one: what both have is kept and moves, and an outline says where it was before.
import { keep } from "./element.js";

const SVG = "http://www.w3.org/2000/svg";
const MILLISECONDS = 160; // of a movement, as drawing.css has it
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** An element of a picture. */
export function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const each of Object.entries(attributes)) made.setAttribute(...each);
  made.append(...children);
  return made;
}

/** The picture of an SVG text; what its marks say stands in `data-said`, so that our own box shows it. */
export function pictureOf(svg) {
  const holder = document.createElement("template");
  holder.innerHTML = svg;
  for (const title of holder.content.querySelectorAll("title")) {
    title.parentElement.dataset.said = title.textContent;
    title.remove();
  }
  return holder.content.firstElementChild;
}

/** Makes `old` what `fresh` is and keeps its elements: those of the same key, else of the same kind at the same place. */
export function become(old, fresh) {
  const from = placeOf(old);
  for (const { name } of [...old.attributes]) if (name !== "data-key" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "data-key" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (fresh.childElementCount) {
    const keys = keysOf(fresh);
    if (!old.childElementCount) old.textContent = "";
    keep(old, [...fresh.children], (_, at) => keys[at], (each) => each.cloneNode(false), become);
  } else if (old.textContent !== fresh.textContent) {
    old.textContent = fresh.textContent;
  }
  slide(old, from);
}

/** Words and ticks go by what they say, so that a tick moves with its number. */
function keysOf(parent) {
  const seen = new Map(), isTicks = parent.dataset.key?.startsWith("ticks");
  return [...parent.children].map((each) => {
    const name = each.dataset.key ?? (isTicks ? each.textContent : each.tagName);
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return `${name} ${seen.get(name)}`;
  });
}

const PLACES = { text: ["x", "y"], line: ["x1", "y1"] };
const placeOf = (node) => PLACES[node.tagName]?.map((name) => Number(node.getAttribute(name)));

/** Words and lines have no transitions of their own in CSS, as shapes have. */
function slide(node, from) {
  if (!from || still.matches || node.hasAttribute("transform")) return;
  const to = placeOf(node), [across, down] = [from[0] - to[0], from[1] - to[1]];
  if (across || down) node.animate({ transform: [`translate(${across}px, ${down}px)`, "none"] }, { duration: MILLISECONDS, easing: "ease-out" });
}

const ends = (svg, letter) => svg.dataset[letter].split(" ").map(Number);

/** The ends of the axes of a picture, for the next one to keep. */
export const axesOf = (svg) => ["x", "y"].flatMap((letter) => ends(svg, letter).slice(0, 2)).join();

/** Draws the outlines of the marks of `before` into a picture, where its axes have them. */
export function outline(svg, before, kind) {
  const [x, y] = ["x", "y"].map((letter) => {
    const [low, high, start, end] = ends(before, letter), [lowest, highest, first, last] = ends(svg, letter);
    const pixels = (last - first) / (highest - lowest), scale = ((high - low) / (end - start)) * pixels;
    return { scale, shift: first + (low - lowest) * pixels - start * scale, start: Math.min(first, last), size: Math.abs(last - first) };
  });
  const marks = before.querySelectorAll(":scope > :is([data-key^=Bars], [data-key^=Line], [data-key^=Area]):not([data-key*=points])");
  const transform = `matrix(${x.scale} 0 0 ${y.scale} ${x.shift - x.start} ${y.shift - y.start})`;
  const shapes = shape("g", { transform }, ...[...marks].map((each) => each.cloneNode(true)));
  svg.append(shape("svg", { class: `outline ${kind}`, x: x.start, y: y.start, width: x.size, height: y.size }, shapes));
}

// A figure as a file: on white, under its title, with the link to its question in the corner.
import { shape } from "./moving.js";

const PINNED = { fill: "none", stroke: "#0b5c94", "stroke-width": 2, "vector-effect": "non-scaling-stroke" };
/** A host that means another machine to everybody else. */
export const isHere = /^(localhost|127\..*|\[::1\])$/;
const TITLE = 34, LINE = 13, WIDE = 6; // pixels above the picture, of a line of the link, and of a letter of it
const SHARP = 2; // pixels of a PNG for one of the picture

/** The SVG of a drawing as text, with the outline of what is pinned in it where there is one. */
export function fileOf({ title, svg, pinned }, link) {
  const picture = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  const outline = pinned?.cloneNode(true);
  outline?.querySelectorAll("text, .pale, .ink").forEach((each) => each.remove());
  for (const each of outline?.querySelectorAll("g, rect, path") ?? []) for (const pair of Object.entries(PINNED)) each.setAttribute(...pair);
  if (outline) picture.append(outline);
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  const said = isHere.test(link.hostname) ? `trainledger ${link.search}` : link.href;
  const lines = said.match(new RegExp(`.{1,${Math.floor((width - 20) / WIDE)}}`, "g")), whole = TITLE + height + LINE * lines.length + 8;
  const corner = (text, at) => shape("text", { x: width - 10, y: TITLE + height + LINE * at + 10, "text-anchor": "end", "font-size": 10, fill: "#555" }, text);
  for (const [name, value] of Object.entries({ width, height, y: TITLE })) picture.setAttribute(name, value);
  const file = shape("svg", { viewBox: `0 0 ${width} ${whole}`, width, height: whole, "font-family": "Helvetica, Arial, sans-serif" },
    shape("rect", { width, height: whole, fill: "#fff" }),
    shape("text", { x: 10, y: 22, "font-size": 16, "font-weight": 600 }, title), picture, ...lines.map(corner));
  return new XMLSerializer().serializeToString(file);
}

/** An SVG's text as a PNG. */
export async function imageOf(text) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: SHARP * image.width, height: SHARP * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

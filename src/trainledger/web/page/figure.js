// A figure as a file: on white, under its title, with the link to its question in the corner.

const SVG = "http://www.w3.org/2000/svg";
const TITLE = 34, LINE = 13, WIDE = 6; // pixels above the picture, of a line of the link, and of a letter of it
const SHARP = 2; // pixels of a PNG for one of the picture

/** The SVG of a drawing as text. */
export function fileOf({ title, svg }, link) {
  const picture = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number);
  const lines = link.match(new RegExp(`.{1,${Math.floor((width - 20) / WIDE)}}`, "g")), whole = TITLE + height + LINE * lines.length + 8;
  const make = (name, attributes, ...children) => {
    const made = document.createElementNS(SVG, name);
    for (const each of Object.entries(attributes)) made.setAttribute(...each);
    made.append(...children);
    return made;
  };
  const corner = (text, at) => make("text", { x: width - 10, y: TITLE + height + LINE * at + 10, "text-anchor": "end", "font-size": 10, fill: "#555" }, text);
  for (const [name, value] of Object.entries({ width, height, y: TITLE })) picture.setAttribute(name, value);
  const file = make("svg", { viewBox: `0 0 ${width} ${whole}`, width, height: whole, "font-family": "Helvetica, Arial, sans-serif" },
    make("rect", { width, height: whole, fill: "#fff" }),
    make("text", { x: 10, y: 22, "font-size": 16, "font-weight": 600 }, title), picture, ...lines.map(corner));
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

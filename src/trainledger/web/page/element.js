// Elements of the page, and lists of them that keep what is already there.

/** An element with properties (`class`, `text`, `on...` and attributes) and children. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "text") made.textContent = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Sets text, markup or an attribute only where it is another one: what has not changed keeps focus and selection. */
export function put(node, content, how = "textContent") {
  if (node.given === undefined) node.given = {};
  if (node.given[how] === content) return false;
  node.given[how] = content;
  node[how] = content;
  return true;
}

/** Children of `parent`, one for each item by `key`: kept where there is one already, made where not, in this order. */
export function keep(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, at) => {
    const name = key(item, at);
    const child = before.get(name) ?? make(item, at);
    if (child.dataset.key !== name) child.dataset.key = name;
    before.delete(name);
    if (parent.children[at] !== child) parent.insertBefore(child, parent.children[at] ?? null);
    update(child, item, at);
  });
  for (const child of before.values()) child.remove();
}

const LONG = 24; // characters of a name that may be broken, at its joints
const JOINED = /(\S*[^\s-][-/][^\s-]\S*|\S{25,})/;

/** Keeps names such as h100-sxm on one line; longer ones, such as paths, may break behind a joint and nowhere else. */
export function whole(root) {
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) if (JOINED.test(texts.currentNode.data)) found.push(texts.currentNode);
  for (const each of found) {
    if (each.parentElement.closest("pre, svg")) continue;
    const parts = each.data.split(JOINED).map((text, at) => (at % 2 ? name(text) : [text]));
    each.replaceWith(...parts.flat());
  }
}

const name = (text) =>
  text.length <= LONG
    ? [element("span", { class: "whole", text })]
    : text.split(/(?<=[-_/:,])/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));

let terms = {}, TERM;
/** Takes the words of the field, each with its definition. */
export function learn(known) {
  terms = known;
  TERM = new RegExp(`\\b(${Object.keys(known).sort((a, b) => b.length - a.length).join("|")})\\b`);
}

/** Gives the first word of the field in each text its definition, under the pointer. */
export function explain(root) {
  for (const node of TERM ? [root, ...root.querySelectorAll("*")].flatMap((each) => [...each.childNodes]) : []) {
    if (node.nodeType !== Node.TEXT_NODE || node.parentElement.closest("abbr, code, pre, svg")) continue;
    const [before, word, ...after] = node.data.split(TERM);
    if (word) node.replaceWith(before, element("abbr", { title: terms[word], text: word }), after.join(""));
  }
}

/** Puts a text whose names stay whole and whose words of the field are explained, where it is another one. */
export const say = (node, text) => put(node, text) && (whole(node), explain(node));

/** Follows a link inside of the page, unless the reader wants it elsewhere. */
export const inside = (act) => (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  act();
};

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** What scrolls sideways can be scrolled with the keyboard too. */
export function reachable(root, title) {
  for (const each of root.querySelectorAll(".wide, pre")) {
    each.tabIndex = 0;
    each.setAttribute("role", "group");
    each.setAttribute("aria-label", title || "Table");
  }
}

/** Puts a command line whose flags stay whole: browsers break lines behind a hyphen. */
export function putCommand(node, text) {
  if (!put(node, text)) return;
  const parts = text.split(/(?<= )(--[\w-]+)/);
  node.replaceChildren(...parts.map((part, at) => (at % 2 ? element("span", { class: "whole", text: part }) : part)));
}

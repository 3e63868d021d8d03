// What a screen reader says and, for a moment, the page shows.
import { byId, element, put } from "./element.js";

let speaking;
/** Says a sentence; of sentences that follow each other fast, the last. */
export function say(sentence, pause = 0) {
  clearTimeout(speaking);
  speaking = setTimeout(() => put(byId("said"), sentence), pause);
}

/** Says what was done, also to the eye. */
export function confirm(sentence) {
  put(byId("said"), "");
  say(sentence);
  const toast = element("p", { class: "toast", text: sentence, "aria-hidden": "true" });
  document.querySelector(".toast")?.remove();
  document.body.append(toast);
  setTimeout(() => toast.remove(), 2200);
}

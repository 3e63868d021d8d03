// A state that is pinned: its answer stands as an outline in the figure of the newest, and in its link.
import { axesOf, pictureOf } from "./moving.js";
import { addressOf } from "./state.js";

export class Pin {
  /** `ask(state)` promises the answer to what is pinned; `changed()` hears when it is there, or nothing is any more. */
  constructor(ask, changed) {
    Object.assign(this, { ask, changed, key: null, picture: null, said: "" });
  }

  /** What a drawing of the newest answer must show too. */
  get frame() {
    return this.picture ? { pinned: axesOf(this.picture) } : {};
  }

  async follow({ calculator, pin }) {
    const key = pin && addressOf({ calculator, given: pin });
    if (key === this.key) return;
    Object.assign(this, { key, picture: null, said: "" });
    if (pin) {
      const view = await this.ask({ calculator, given: pin }).catch((error) => ({ verdict: error.message, headlines: [], drawings: [] }));
      if (key !== this.key) return;
      const [number] = view.headlines, [drawn] = view.drawings;
      this.said = `Pinned: ${number ? `${number.text}. ` : ""}${view.verdict}`;
      this.picture = drawn ? pictureOf(drawn.svg) : null;
    }
    this.changed();
  }
}

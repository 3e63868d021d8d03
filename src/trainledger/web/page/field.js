// One field: its label and help, a slider and a text, a list, or room for a pasted file, and what is wrong with it.
import { combobox } from "./combobox.js";
import { byId, element, explain, put } from "./element.js";

/** The control of a field; `changed(text, settled)` hears of each step, settled where the reader let go. */
export function control(field, changed) {
  const id = `field-${field.name}`;
  const describedby = `${id}-about ${id}-problem`;
  const parts = { texts: [], slider: null };
  const input = (event) => changed(event.target.value, false);
  const settled = (event) => changed(event.target.value, true);
  const listens = (made) => {
    made.addEventListener("input", input);
    made.addEventListener("change", settled);
    return made;
  };

  const label = element("label", { for: id, text: field.title });
  explain(label);
  const about = element("p", { class: "about", id: `${id}-about`, text: field.about, hidden: true });
  const help = element("button", {
    type: "button", class: "help", "aria-expanded": "false", "aria-controls": about.id, text: "?",
    "aria-label": `What is ${field.title}?`,
    onclick: () => {
      about.hidden = !about.hidden;
      help.setAttribute("aria-expanded", String(!about.hidden));
    },
  });
  const back = element("button", {
    type: "button", class: "back", hidden: true, onclick: () => changed(field.default, true, true),
    title: `back to ${field.default || "not given"}`, "aria-label": `${field.title}: back to ${field.default || "not given"}`,
  }, "↺");
  const note = element("span", { class: "follows", text: "follows", hidden: true });
  const read = element("span", { class: "reads" });
  const problem = element("p", { class: "problem", id: `${id}-problem`, hidden: true });
  const head = element("div", { class: "head" }, label, ...(field.about ? [help] : []), note, read, back);
  const box = element("div", { class: "field", "data-field": field.name }, ...(field.long ? [] : [head]), about);

  const text = field.long
    ? pasted(field, id, describedby, listens, changed, head)
    : field.strict
      ? listed(field, id, describedby, listens)
      : field.choices.length || field.offered
        ? sought(field, id, describedby, listens, changed)
        : { main: listens(typed(id, describedby)) };
  const main = text.main;
  let inputs;
  if (field.stops.length) {
    const most = field.stops.length - 1;
    parts.slider = element("input", {
      type: "range", min: 0, max: most, step: 1, class: "slider", "aria-label": `${field.title}, slider`,
      "aria-describedby": describedby,
    });
    const step = (isSettled) => {
      main.value = field.stops[parts.slider.value];
      reads(main.value);
      changed(main.value, isSettled);
    };
    parts.slider.addEventListener("input", () => step(false));
    parts.slider.addEventListener("change", () => step(true));
    inputs = element("div", { class: "both" }, parts.slider, text.box ?? main);
  } else {
    inputs = text.box ?? main;
  }
  const why = element("p", { class: "unused", hidden: true });
  box.append(inputs, why, problem);
  /** Says a text in full where the field has it short: the title of a choice, a number with its unit. */
  const reads = (text) => {
    const title = field.choices.find(([value]) => value === text)?.[1];
    const said = title && !field.strict && title !== text ? title : counted(text, field.unit);
    put(read, said);
    parts.slider?.setAttribute("aria-valuetext", said || text);
  };
  main.addEventListener("input", () => reads(main.value));
  /** Hides what does not count, and says why not; an empty reason shows it again. */
  const count = (reason) => {
    main.disabled = Boolean(reason);
    main.dataset.unused = reason;
    box.classList.toggle("uncounted", Boolean(reason) && !field.long);
    why.hidden = !reason;
    why.textContent = reason ? `not counted: ${reason}` : "";
  };

  return {
    box,
    /** Why it does not count; empty where it does. */
    get unused() {
      return main.dataset.unused ?? "";
    },
    /** Ends of the slider other than its own; without them those. */
    limit(ends = [field.stops[0], field.stops.at(-1)]) {
      if (parts.slider) [parts.slider.min, parts.slider.max] = ends.map((end) => field.stops.indexOf(end));
    },
    /** Choices that the answer has in place of the field's own. */
    offer: text.offer ?? (() => {}),
    /** Shows a text and its place among the stops; `follows` where the answer decides it, `unused` why it does not count. */
    show({ text: said, at, follows, unused }, isGiven, hidden) {
      const value = hidden && follows ? "" : said;
      if (main.value !== value && (document.activeElement !== main || follows || main.dataset.quiet)) main.value = value;
      if (parts.slider && at !== undefined && (!hidden || !follows)) parts.slider.value = at;
      reads(main.value);
      main.readOnly = Boolean(follows);
      if (parts.slider) parts.slider.disabled = Boolean(follows || unused);
      count(unused);
      note.hidden = !follows;
      box.classList.toggle("decided", Boolean(follows) || (!isGiven && said !== field.default));
      back.hidden = !isGiven;
    },
    /** Shows a problem, or none; `take(text)` puts in the nearest value that works. */
    wrong(each, take) {
      main.setAttribute("aria-invalid", String(Boolean(each)));
      problem.hidden = !each;
      problem.replaceChildren(...(each ? told(each, take) : []));
      if (each) text.opened?.();
      if (each && main.disabled) count("");
    },
  };
}

/** A whole number with its unit, 12,288 tokens; empty where a text is another, or has no unit. */
const counted = (text, unit) => (unit && /^\d+$/.test(text) ? `${Number(text).toLocaleString("en")} ${text === "1" ? unit.replace(/s$/, "") : unit}` : "");

/** A problem as a sentence, with a button for the nearest value that works. */
export function told(each, take) {
  const said = element("span", { text: each.sentence });
  if (each.nearest === null || each.nearest === undefined || each.nearest === "" || !take) return [said];
  const button = element("button", { type: "button", class: "nearest", onclick: () => take(String(each.nearest)) });
  button.append("use ", element("b", { text: String(each.nearest) }));
  return [said, " ", button];
}

const typed = (id, describedby) =>
  element("input", {
    type: "text", class: "text", id, spellcheck: "false", autocapitalize: "off", autocomplete: "off",
    placeholder: "not given", "aria-describedby": describedby,
  });

function listed(field, id, describedby, listens) {
  const options = field.choices.map(([value, title]) => element("option", { value, text: title || value || "not given" }));
  return { main: listens(element("select", { id, class: "text", "aria-describedby": describedby }, ...options)) };
}

function sought(field, id, describedby, listens, changed) {
  const { box, input, offer } = combobox({ id, choices: field.choices, describedby, chosen: (text) => changed(text, true) });
  return { main: listens(input), box, offer };
}

function pasted(field, id, describedby, listens, changed, head) {
  const area = listens(element("textarea", {
    id, class: "text", rows: 7, maxlength: field.longest, spellcheck: "false", "aria-describedby": describedby,
    placeholder: "paste it here",
  }));
  const file = element("input", {
    type: "file", class: "file", "aria-label": `${field.title} from a file`,
    onchange: async () => {
      area.value = (await file.files[0]?.text()) ?? "";
      changed(area.value, true);
    },
  });
  const fold = element("details", { class: "paste" }, element("summary", { text: `Paste a ${field.title}` }), head, area, file);
  return { main: area, box: fold, opened: () => (fold.open = true) };
}

/** Moves the focus to a field. */
export const focusOn = (name) => byId(`field-${name}`)?.focus();

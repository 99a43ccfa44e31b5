"use strict";
// Elements of the page, and numbers as text. What was recorded becomes text, never markup.

/** Return an element; `properties` are its attributes, `children` elements or texts. */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Characters that show nothing, or that turn the direction of the text around them.
const invisible = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;

/** Return a recorded text with its invisible characters named. */
function visible(text) {
  return String(text).replace(invisible, (char) =>
    char === "\r" ? "" : `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Return a recorded text in an element of its own. */
function recorded(text, kind = "") {
  return element("span", { class: `recorded ${kind}` }, visible(text));
}

/** Return a recorded name in an element of its own, which is broken between its parts first. */
function breakable(name) {
  const parts = visible(name).split(/(?<=[./_])/u);
  return element("span", { class: "recorded name" }, ...parts.flatMap((part, place) => (place ? [element("wbr"), part] : [part])));
}

/** Return a number in at most four significant digits. */
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function signed(value) {
  return value > 0 ? `+${short(value)}` : short(value);
}

function percent(value) {
  return `${(100 * value).toFixed(value < 0.095 ? 1 : 0)} %`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

/** Return a time in seconds since 1970 as text, to the minute or to the second. */
function utc(seconds, length = 16) {
  return `${new Date(1000 * seconds).toISOString().replace("T", " ").slice(0, length)} UTC`;
}

function grouped(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** Return a table. A cell is a text, an element, or {number: text} for a number. */
function table(headings, rows) {
  const cell = (name) => (value) => {
    const isNumber = value !== null && typeof value === "object" && "number" in value;
    return element(name, isNumber ? { class: "number" } : {}, isNumber ? value.number : value);
  };
  return element("div", { class: "scroll" },
    element("table", {},
      element("thead", {}, element("tr", {}, ...headings.map(cell("th")))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td")))))));
}

/** Return a menu; `choices` are pairs of value and text. */
function menu(title, choices, value, choose) {
  const select = element("select", { "aria-label": title, onchange: () => choose(select.value) },
    ...choices.map(([key, text]) => element("option", { value: key, selected: String(key) === String(value) }, visible(text))));
  return element("label", {}, title, select);
}

/** Return buttons of which one is pressed. */
function choiceButtons(title, choices, value, choose) {
  return element("span", { role: "group", "aria-label": title },
    ...choices.map(([key, text]) => element("button", {
      type: "button", "aria-pressed": String(key === value), onclick: () => choose(key),
    }, text)));
}

/** Return a colour of the style sheet as the present theme has it. */
function themeColor(name) {
  const probe = element("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

function swatch(index) {
  const made = element("span", { class: "swatch" });
  made.style.background = `var(--series-${index % 8})`;
  return made;
}

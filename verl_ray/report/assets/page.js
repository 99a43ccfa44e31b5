"use strict";
// The tabs of the page, its theme, and newer data where a server stands behind it.

const tabs = [["overview", "Overview", overviewTab], ["curves", "Curves", curvesTab], ["samples", "Samples", samplesTab], ["time", "Time and memory", timeTab], ["logs", "Logs", logsTab], ["settings", "Settings", settingsTab]];
const refreshMs = 5000;
let report = null;
let drawing = 0;

function currentTab() {
  const [name] = location.hash.slice(1).split("/");
  return tabs.some(([key]) => key === name) ? name : "overview";
}

/** Turn to the step that the address names, such as #samples/30, in every tab. */
function turnToStep() {
  const step = /^#\w+\/(\d+)$/.exec(location.hash)?.[1];
  markStep(step === undefined ? null : Number(step));
  if (step === undefined) return;
  samplesView.filters = { ...samplesView.filters, step };
  timeView.step = step;
}

async function draw() {
  // A slow drawing that another one has overtaken is left out.
  const number = ++drawing;
  const [name, , make] = tabs.find(([key]) => key === currentTab());
  for (const button of document.querySelectorAll("#tabs button")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === name));
    button.tabIndex = button.dataset.tab === name ? 0 : -1;
    if (button.dataset.tab === name) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  closeCharts();
  const parts = await make(report, draw);
  if (number !== drawing) return;
  const main = document.getElementById("main");
  const focused = main.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  main.replaceChildren(...parts.filter((part) => part !== null));
  main.dataset.tab = name;
  if (focused) [...main.querySelectorAll("[aria-label]")].find((other) => other.getAttribute("aria-label") === focused)?.focus();
}

function showTitle() {
  const title = report.runs.map((run) => run.name).join(", ");
  const target = document.getElementById("title");
  target.textContent = visible(title);
  target.title = `made ${utc(report.made)} by verl_ray ${report.version}`;
  document.title = `${visible(title)} · verl_ray`;
}

function makeTabs() {
  const nav = document.getElementById("tabs");
  const buttons = tabs.map(([key, title]) => {
    const button = element("button", { type: "button", role: "tab", onclick: () => { location.hash = key; } }, title);
    button.dataset.tab = key;
    return button;
  });
  nav.replaceChildren(...buttons);
  nav.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const at = tabs.findIndex(([key]) => key === currentTab());
    const next = (at + move + tabs.length) % tabs.length;
    location.hash = tabs[next][0];
    buttons[next].focus();
  });
}

function followTheme() {
  const names = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  let at = 0;
  const apply = () => {
    document.documentElement.style.colorScheme = at ? names[at] : "";
    button.textContent = { system: "◐ system", light: "☀ light", dark: "☾ dark" }[names[at]];
  };
  button.addEventListener("click", () => { at = (at + 1) % names.length; apply(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  apply();
}

/** Read the data of a document and draw them. */
async function show(doc) {
  const blocks = blocksOf(doc);
  const made = await blocks.json(Number(doc.body.dataset.index));
  for (const holder of [made, ...made.runs]) holder.blocks = blocks;
  report = made;
  showTitle();
  await draw();
}

/** Ask the server whether the record has changed, and draw the new one if it has. */
async function refresh(version) {
  let seen = version;
  try {
    const reply = await fetch(location.pathname + location.search, { headers: { "If-None-Match": seen } });
    if (reply.ok) {
      seen = reply.headers.get("ETag");
      const doc = new DOMParser().parseFromString(await reply.text(), "text/html");
      await show(doc);
    }
  } catch {
    // The server has ended; what it sent stays.
  }
  setTimeout(() => refresh(seen), refreshMs);
}

makeTabs();
followTheme();
turnToStep();
window.addEventListener("hashchange", () => {
  const isSame = currentTab() === document.getElementById("main").dataset.tab;
  turnToStep();
  // Charts have marked the step already.
  if (!isSame || currentTab() !== "curves") draw();
});
show(document).then(() => {
  document.body.dataset.ready = "yes";
  if (report.live) setTimeout(() => refresh(report.live), refreshMs);
});

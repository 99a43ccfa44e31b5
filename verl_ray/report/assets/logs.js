"use strict";
// What the logs of the processes say: errors first, then warnings, then the ends of the logs.

async function logsTab(report, redraw) {
  const number = Math.min(timeView.run, report.runs.length - 1);
  const run = report.runs[number];
  const tools = report.runs.length > 1 ? element("div", { class: "tools" }, menu("run", report.runs.map((other, i) => [i, other.name]), number,
    (value) => { timeView.run = Number(value); redraw(); })) : null;
  const ends = await run.blocks.json(run.logEnds);
  const errors = run.logErrors.filter((error) => !error.is_warning).reverse();
  const warnings = run.logErrors.filter((error) => error.is_warning).reverse();
  return [tools, logTable("Errors", errors, "The logs name no error."), logTable("Warnings", warnings, "The logs name no warning."), logEnds(ends)];
}

function logTable(title, lines, none) {
  const rows = lines.map((line) => [recorded(line.file), recorded(line.text, "mono"), { number: grouped(line.count) }]);
  const body = rows.length ? table(["log", "line", { number: "times" }], rows) : none;
  return element("section", { class: "log-lines" }, element("h2", {}, title), element("div", { class: "card" }, body),
    rows.length ? element("p", { class: "quiet" }, "Those of the newest log come first. Lines that differ in numbers alone are one.") : null);
}

function logEnds(ends) {
  if (!ends.length) return element("p", { class: "note" }, "No log has a line.");
  const parts = ends.map((end, i) => element("details", { open: i === 0 },
    element("summary", {}, recorded(end.file), element("span", { class: "quiet" }, ` last line ${utc(end.written_s, 19)}`)),
    element("p", { class: "text-block" }, visible(end.text))));
  return element("section", {}, element("h2", {}, "Ends of the logs"), element("div", { class: "card" }, ...parts),
    element("p", { class: "quiet" }, "The whole logs are in the run's folder (logs/)."));
}

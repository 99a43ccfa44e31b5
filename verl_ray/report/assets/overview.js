"use strict";
// What happened: the state of each run, what it reached, and what a practitioner would point at.

const stateClass = { finished: "good", running: "good", stopped: "warn", silent: "warn", new: "quiet", failed: "bad", killed: "bad" };

/** Return the number of a step, which leads to its samples, or to its values where there are none. */
function stepLink(step, number = null, text = grouped(step)) {
  const show = () => {
    samplesView.filters = number === null || report.runs.length === 1 ? {} : { run: String(number) };
    location.hash = `${report.samples.shown ? "samples" : "curves"}/${step}`;
  };
  return element("button", { type: "button", class: "link", onclick: show }, text);
}

function overviewTab(report) {
  const parts = report.runs.flatMap((run, number) => [
    element("h2", { class: "run-title" },
      report.runs.length > 1 ? swatch(number) : null, recorded(run.name),
      element("span", { class: `chip ${stateClass[run.state] ?? ""}` }, run.state),
      element("span", { class: "quiet made" }, `as of ${utc(report.made)}`)),
    run.summary ? element("p", { class: "summary" }, recorded(run.summary)) : null,
    run.reason ? element("p", { class: "note bad reason" }, recorded(run.reason)) : null,
    facts(run),
    ...run.damage.map((text) => element("p", { class: "note warn" }, recorded(text))),
    findingList(run, number),
    heldOutTable(run, number),
    keyCharts(report, [number]),
    element("details", { open: report.runs.length === 1 }, element("summary", {}, "What was learned from"), factTable(run)),
  ]);
  if (report.runs.length > 1) {
    parts.unshift(differences(report), element("h2", {}, `${report.runs.length} runs`), runTable(report), ...comparisons(report));
  }
  return parts;
}

function facts(run) {
  const total = run.totalSteps === null ? "" : ` of ${grouped(run.totalSteps)}`;
  const shown = [
    [grouped(run.step) + total, "steps"],
    [duration(run.wallS), run.segments.length > 1 ? `time, in ${run.segments.length} processes` : "time"],
    [run.tokens ? compact(run.tokens) : "–", "tokens learned from"],
  ];
  // The best step goes by the first one; a reward may stand beside it.
  const mains = run.heldOut.slice(0, 2).filter((row, place) => place === 0 || isReward(row.metric));
  for (const [place, main] of mains.entries()) {
    const name = heldOutName(main.metric);
    const [, value] = main.after;
    const change = changeOf(main);
    shown.push([short(value), `${name}, ${change === null ? "–" : signed(change)} since step ${main.before[0]}`]);
    if (place === 0) shown.push([short(main.best[1]), `best ${name}, at step ${grouped(main.best[0])}`]);
  }
  if (run.state === "running" && run.phaseNow) shown.push(["now", run.phaseNow]);
  return element("div", { class: "facts" },
    ...shown.map(([value, title]) => element("div", { class: "fact card" }, element("b", {}, visible(value)), breakable(title))));
}

/** Return the name of a held-out metric without val-core/ or val-aux/. */
function heldOutName(metric) {
  return metric.replace(/^val-(core|aux)\//, "");
}

function isReward(metric) {
  return /\/reward\/mean@\d+$/.test(metric);
}

/** Return the change of a held-out metric, paired where it has scores of each problem; null where there is none. */
function changeOf(row) {
  if (row.change) return row.change[0];
  const [before, after] = [row.before[1], row.after[1]];
  return before === null || after === null || before === undefined || after === undefined || row.before[0] === row.after[0] ? null : after - before;
}

function compact(value) {
  return new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
}

function findingList(run, number) {
  if (!run.findings.length) return element("p", { class: "note" }, "No problems found.");
  return element("div", { class: "findings" }, ...run.findings.map((finding) => {
    const kind = { critical: "bad", warning: "warn" }[finding.severity] ?? "quiet";
    const facts = [""];
    const step = (value) => stepLink(value, number, String(value));
    const isLasting = finding.last_step > finding.step;
    const steps = isLasting ? [`${finding.num_steps} steps, `, step(finding.step), " to ", step(finding.last_step)] : ["step ", step(finding.step)];
    if (finding.value !== null) facts.push(`value ${short(finding.value)}`);
    if (finding.threshold !== null) facts.push(`threshold ${short(finding.threshold)}`);
    return element("section", { class: `finding card ${finding.severity === "critical" ? "severe" : ""}` },
      element("span", { class: `chip ${kind}` }, visible(finding.severity)),
      element("h3", {}, recorded(finding.title)),
      element("p", {}, recorded(finding.text)),
      element("p", { class: "quiet" }, metricLink(run, finding.metric), " ", ...steps, facts.join(", "),
        finding.setting ? element("span", {}, " · change ", element("code", {}, visible(finding.setting))) : ""));
  }));
}

/** Return the name of a metric, which leads to its curve where it has one. */
function metricLink(run, name) {
  if (!run.metrics.some((pair) => pair[0] === name)) return element("code", {}, visible(name));
  const show = () => {
    curvesView.search = name;
    location.hash = "curves";
  };
  return element("button", { type: "button", class: "link mono", onclick: show }, visible(name));
}

function withBounds([, value, low, high]) {
  return { number: element("span", {}, short(value), low === null ? "" : element("span", { class: "quiet interval" }, ` [${short(low)}, ${short(high)}]`)) };
}

function heldOutTable(run, number) {
  if (!run.heldOut.length) return null;
  const rows = run.heldOut.map((row) => {
    const unpaired = changeOf(row);
    const change = row.change ? difference(row, row.change, [row.before, row.after]) : unpaired === null ? "–" : signed(unpaired);
    return [directed(row), withBounds(row.before), withBounds(row.after), { number: change },
      { number: bestOf(row, number) }];
  });
  const { before, after } = run.heldOut[0];
  return element("section", {}, element("h2", {}, "Held out"), element("div", { class: "card" }, table(
    ["metric", { number: stepLink(before[0], number, `step ${grouped(before[0])}`) }, { number: stepLink(after[0], number, `step ${grouped(after[0])}`) }, { number: "change, paired" }, { number: "best, at step" }], rows)),
    element("p", { class: "quiet" }, "Brackets are 95 % intervals of a bootstrap over problems. They are too narrow for fewer than 30, so that no change is coloured there."));
}

function bestOf(row, number) {
  return element("span", {}, `${short(row.best[1])} at `, stepLink(row.best[0], number));
}

/** Return a paired difference with its interval and problems, coloured where it is beyond noise. */
function difference(row, [mean, low, high, problems, isBeyondNoise], sides) {
  const kind = !isBeyondNoise ? "" : mean < 0 === row.lowerIsBetter ? "good" : "bad";
  const most = Math.max(...sides.map((side) => side[4] ?? 0));
  return element("span", {}, element("span", { class: kind }, signed(mean), low === null ? "" : element("span", { class: "interval" }, ` [${signed(low)}, ${signed(high)}]`)),
    element("span", { class: `interval ${problems < most ? "warn" : "quiet"}` }, ` on ${grouped(problems)}${problems < most ? ` of ${grouped(most)}` : ""} problems`));
}

/** Return the name of a held-out metric, and which way is better. */
function directed(row) {
  return element("span", {}, breakable(heldOutName(row.metric)), element("span", { class: "quiet direction" }, row.lowerIsBetter ? " ↓ lower is better" : " ↑ higher is better"));
}

function keyCharts(report, numbers) {
  const cards = panelsOf(report, numbers).map((panel) => panelCard(report, panel, numbers)).filter((card) => card !== null).slice(0, 4);
  return cards.length ? element("div", { class: "charts key" }, ...cards) : null;
}

function factTable(run) {
  const segments = run.segments.map((segment) => [
    utc(segment.begun_s, 19),
    { number: segment.ended_s === null ? "–" : duration(segment.ended_s - segment.begun_s) },
    { number: `${segment.first_step} to ${segment.last_step ?? "?"}` }, visible(segment.ending)]);
  return element("div", {},
    table(["", ""], run.facts.map(([title, value]) => [element("span", { class: "quiet fact-name" }, title), recorded(value, title === "command" ? "mono" : "")])),
    segments.length ? table(["process began", { number: "took" }, { number: "steps" }, "ended"], segments) : "");
}

function runTable(report) {
  const rows = report.runs.map((run, number) => [
    element("span", {}, swatch(number), " ", recorded(run.name)), element("span", { class: stateClass[run.state] ?? "" }, run.state),
    { number: grouped(run.step) }, { number: duration(run.wallS) }, { number: String(run.findings.length) }]);
  return element("div", { class: "card" }, table(["run", "state", { number: "steps" }, { number: "time" }, { number: "findings" }], rows));
}

/** Return a table per held-out metric: each run before and after, and its difference to the first one. */
function comparisons(report) {
  const parts = report.differences.map(({ metric, base, runs }) => {
    const having = report.runs.flatMap((run, number) => run.heldOut.filter((row) => row.metric === metric).map((row) => [run, number, row]));
    const after = having.find(([, number]) => number === base)?.[2].after;
    const rows = having.map(([run, number, row]) => [
      element("span", {}, swatch(number), " ", recorded(run.name)),
      { number: short(row.before[1]) }, withBounds(row.after), { number: stepLink(row.after[0], number) },
      { number: runs[number] ? difference(row, runs[number], [after, row.after]) : "–" }, { number: bestOf(row, number) }]);
    const headings = ["run", { number: "first" }, { number: "last" }, { number: "at step" },
      { number: base === null ? "difference, paired" : element("span", {}, "difference to ", recorded(report.runs[base].name), ", paired") }, { number: "best, at step" }];
    return element("section", { class: "comparison" }, element("h2", {}, directed(having[0][2])), element("div", { class: "card" }, table(headings, rows)));
  });
  return [...parts, parts.length ? element("p", { class: "quiet" }, "Brackets are 95 % intervals of a bootstrap over problems; they are too narrow for fewer than 30. A difference is that of the same problems in both runs' last evaluations.") : null];
}

"use strict";
// What happened: the state of each run, what it reached, and what a practitioner would point at.

const stateClass = { finished: "good", running: "good", stopped: "warn", silent: "warn", new: "quiet", failed: "bad", killed: "bad" };

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
    findingList(run),
    heldOutTable(run),
    keyCharts(report, [number]),
    element("details", { open: report.runs.length === 1 }, element("summary", {}, "What was learned from"), factTable(run)),
  ]);
  if (report.runs.length > 1) {
    parts.unshift(element("h2", {}, `${report.runs.length} runs`), runTable(report));
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
    ...shown.map(([value, title]) => element("div", { class: "fact card" }, element("b", {}, visible(value)), element("span", { class: "recorded" }, visible(title)))));
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

function findingList(run) {
  if (!run.findings.length) return element("p", { class: "note" }, "No problems found.");
  return element("div", { class: "findings" }, ...run.findings.map((finding) => {
    const kind = { critical: "bad", warning: "warn" }[finding.severity] ?? "quiet";
    const facts = [];
    const isLasting = finding.last_step > finding.step;
    facts.push(isLasting ? `${finding.num_steps} steps, ${finding.step} to ${finding.last_step}` : `step ${finding.step}`);
    if (finding.value !== null) facts.push(`value ${short(finding.value)}`);
    if (finding.threshold !== null) facts.push(`threshold ${short(finding.threshold)}`);
    return element("section", { class: `finding card ${finding.severity === "critical" ? "severe" : ""}` },
      element("span", { class: `chip ${kind}` }, visible(finding.severity)),
      element("h3", {}, recorded(finding.title)),
      element("p", {}, recorded(finding.text)),
      element("p", { class: "quiet" }, metricLink(run, finding.metric), ` ${facts.join(", ")}`,
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
  return { number: element("span", {}, short(value), low === null ? "" : element("span", { class: "quiet" }, ` [${short(low)}, ${short(high)}]`)) };
}

function heldOutTable(run) {
  if (!run.heldOut.length) return null;
  const rows = run.heldOut.map((row) => {
    let change = "–";
    if (row.change) {
      const [mean, low, high] = row.change;
      const isBetter = row.lowerIsBetter ? high < 0 : low > 0;
      const isWorse = row.lowerIsBetter ? low > 0 : high < 0;
      const kind = low === null ? "" : isBetter ? "good" : isWorse ? "bad" : "";
      change = element("span", { class: kind }, signed(mean), low === null ? "" : ` [${signed(low)}, ${signed(high)}]`);
    } else if (changeOf(row) !== null) change = signed(changeOf(row));
    return [directed(row), withBounds(row.before), withBounds(row.after), { number: change },
      { number: `${short(row.best[1])} at ${grouped(row.best[0])}` }];
  });
  const { before, after } = run.heldOut[0];
  return element("section", {}, element("h2", {}, "Held out"), element("div", { class: "card" }, table(
    ["metric", { number: `step ${before[0]}` }, { number: `step ${after[0]}` }, { number: "change, paired" }, { number: "best, at step" }], rows)),
    element("p", { class: "quiet" }, "Brackets are 95 % intervals of a bootstrap over problems."));
}

/** Return the name of a held-out metric, and which way is better. */
function directed(row) {
  return element("span", {}, recorded(heldOutName(row.metric)), element("span", { class: "quiet direction" }, row.lowerIsBetter ? " ↓ lower is better" : " ↑ higher is better"));
}

function keyCharts(report, numbers) {
  const cards = panelsOf(report).map((panel) => panelCard(report, panel, numbers)).filter((card) => card !== null).slice(0, 4);
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
  const rows = report.runs.map((run, number) => {
    const main = run.heldOut[0];
    return [element("span", {}, swatch(number), " ", recorded(run.name)), element("span", { class: stateClass[run.state] ?? "" }, run.state),
      { number: grouped(run.step) }, { number: duration(run.wallS) },
      { number: main ? short(main.before[1]) : "–" }, { number: main ? short(main.after[1]) : "–" },
      { number: main ? `${short(main.best[1])} at ${grouped(main.best[0])}` : "–" }, { number: String(run.findings.length) }];
  });
  return element("div", { class: "card" }, table(["run", "state", { number: "steps" }, { number: "time" }, { number: "held out before" },
    { number: "after" }, { number: "best, at step" }, { number: "findings" }], rows));
}

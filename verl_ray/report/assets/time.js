"use strict";
// Where the time and the memory went, and what failed.

const timeView = { run: 0, step: null };
const mostUseCurves = 8;

function timeTab(report, redraw) {
  const number = Math.min(timeView.run, report.runs.length - 1);
  const run = report.runs[number];
  const tools = report.runs.length > 1 ? element("div", { class: "tools" }, menu("run", report.runs.map((other, i) => [i, other.name]), number,
    (value) => { timeView.run = Number(value); timeView.step = null; redraw(); })) : null;
  return [tools, phaseChart(run), durationTable(run), traceSection(run, redraw), useCharts(run), memoryTable(run), ...failures(run)];
}

const useKinds = [
  ["CPUs and GPUs, percent", /^perf\/(.*\/)?(cpu|gpu)_percent$/, "%"],
  ["CPU cores by processes", /^perf\/(.*)\/cpu_cores$/, ""],
  ["memory in use, GiB", /^perf\/(cpu_memory_(used|total)|(.*\/)memory_used)_gb$|(^|\/)perf\/max_memory_(reserved|allocated)_gb$/, ""],
];

/** Return charts of the use of machines over the steps. */
function useCharts(run) {
  const cards = useKinds.flatMap(([title, pattern, unit]) => {
    const metrics = run.metrics.filter(([name]) => pattern.test(name));
    if (!metrics.length) return [];
    const load = async () => {
      const curves = [];
      for (const [name, block] of metrics.slice(0, mostUseCurves)) curves.push({ title: name.replace(/(^|\/)perf\//, "$1"), steps: run.steps, values: Array.from(await run.blocks.numbers(block)) });
      return curves.map((curve, color) => ({ ...curve, color }));
    };
    const left = metrics.length - mostUseCurves;
    return [chartCard(left > 0 ? `${title} (${left} more under Curves)` : title, load, { unit })];
  });
  if (!cards.length) return null;
  return element("section", {}, element("h2", {}, "Use of the machines"), element("div", { class: "charts" }, ...cards),
    element("p", { class: "quiet" }, "CPUs and GPUs: means from the beginning of the step before to that of this one, by node and by kind of process. Memory: as the step began."));
}

function phaseChart(run) {
  if (!run.phases.length) return element("p", { class: "note" }, "No phase of a step is recorded.");
  const load = async () => {
    const curves = [];
    for (const [name, words] of run.phases) {
      const values = Array.from(await run.blocks.numbers(run.metrics.find((pair) => pair[0] === name)[1]));
      const total = values.reduce((sum, value) => sum + (Number.isFinite(value) ? value : 0), 0);
      curves.push({ title: words, steps: run.steps, values, total, isEvent: isEvent(name, values) });
    }
    curves.sort((a, b) => b.total - a.total);
    const events = curves.filter((curve) => curve.isEvent);
    const lasting = withRest(curves.filter((curve) => !curve.isEvent), Math.max(1, 7 - events.length));
    return [...lasting, ...events].map((curve, color) => ({ ...curve, color }));
  };
  return element("section", {}, element("h2", {}, "Phases of each step"), chartCard("seconds, added up", load, { tall: true, stacked: true, unit: "s" }),
    element("p", { class: "quiet" }, "Phases that run at the same time count each, so they may add up to more than their step."));
}

/** Return the largest curves, and the sum of the others as one more. */
function withRest(curves, most) {
  const shown = curves.slice(0, most);
  const others = curves.slice(most);
  if (others.length) {
    const values = others[0].values.map((_, i) => others.reduce((sum, curve) => sum + (Number.isFinite(curve.values[i]) ? curve.values[i] : 0), 0));
    shown.push({ title: `${others.length} others`, steps: others[0].steps, values });
  }
  return shown;
}

function shareBar(share) {
  const bar = element("div", { class: "share" });
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return bar;
}

function durationTable(run) {
  if (!run.durations.length) return null;
  const total = run.wallS || run.durations.reduce((sum, [, seconds]) => sum + seconds, 0);
  const rows = run.durations.map(([name, seconds]) => [visible(name), { number: duration(seconds) }, { number: percent(seconds / total) }, shareBar(seconds / total)]);
  const made = table(["where the time went", { number: "time" }, { number: "share" }, ""], rows);
  for (const cell of made.querySelectorAll("td:last-child")) cell.className = "bar-cell";
  return element("section", {}, element("h2", {}, "The whole run"), element("div", { class: "card" }, made));
}

function memoryTable(run) {
  if (!run.memory.length) return null;
  const largest = Math.max(...run.memory.map((cell) => Math.max(cell.measured ?? 0, cell.predicted ?? 0)));
  const rows = run.memory.map((cell) => {
    const bar = shareBar((cell.measured ?? 0) / largest);
    if (cell.isBeyondPlan) bar.style.background = "var(--bad)";
    return [visible(cell.role), visible(cell.phase), { number: short(cell.predicted) }, { number: element("span", { class: cell.isBeyondPlan ? "bad" : "" }, short(cell.measured)) }, bar];
  });
  const made = table(["role", "phase", { number: "predicted, GiB" }, { number: "measured at most, GiB" }, ""], rows);
  for (const cell of made.querySelectorAll("td:last-child")) cell.className = "bar-cell";
  return element("section", {}, element("h2", {}, "Memory by phase, of the rank with most"), element("div", { class: "card" }, made),
    run.memory.some((cell) => cell.isBeyondPlan) ? element("p", { class: "quiet" }, "What is red is beyond its prediction by more than the tolerance, and the run has warned of it.") : null);
}

function failures(run) {
  const parts = [];
  const card = (title, body) => parts.push(element("section", {}, element("h2", {}, title), element("div", { class: "card" }, body)));
  if (run.scoreFailures.length) card("Scores that failed", table(["kind", { number: "scores" }], run.scoreFailures.map(([kind, count]) => [visible(kind), { number: grouped(count) }])));
  if (run.faults.length) {
    const rows = run.faults.map((fault) => [{ number: String(fault.step ?? "") }, recorded(`${fault.role} ${fault.rank}`), recorded(fault.kind), recorded(fault.cause), recorded(fault.cure)]);
    card("Processes that failed", table([{ number: "step" }, "process", "kind", "cause", "what the run did"], rows));
  }
  if (!parts.length) card("Failures", "No score failed, and no process failed.");
  return parts;
}

// -------------------------------------------------------------------------------- trace

function traceSection(run, redraw) {
  if (!run.trace) return null;
  const { tracks, names } = run.trace;
  const canvas = element("canvas", { class: "gantt", role: "img", "aria-label": "Processes of a step over time" });
  const shown = element("div", { class: "values quiet" }, "Point at a bar for its name.");
  const picker = element("span", {});
  const section = element("section", {}, element("h2", {}, "Processes of a step"),
    element("div", { class: "card" }, element("div", { class: "tools" }, picker), canvas, shown),
    element("p", { class: "quiet" }, "From trace.json, which ui.perfetto.dev opens in full.", run.trace.leftOut ? ` The ${grouped(run.trace.leftOut)} oldest events are left out here.` : "",
      run.trace.skippedBytes ? ` ${grouped(run.trace.skippedBytes / 1e6)} MB of older events are not read here.` : ""));

  run.blocks.json(run.trace.block).then(([starts, durations, ofTrack, ofName]) => {
    const steps = stepsOfTrace(names, starts, durations, ofName, ofTrack);
    if (!steps.some((step) => step.title === timeView.step)) timeView.step = lastWholeStep(steps, run.step).title;
    const step = steps.find((other) => other.title === timeView.step);
    picker.replaceChildren(menu("step", steps.map((other) => [other.title, other.title]), step.title, (value) => { timeView.step = value; redraw(); }));
    const events = [];
    for (let i = 0; i < starts.length; i++) {
      if (starts[i] < step.end && starts[i] + durations[i] > step.start) events.push(i);
    }
    const draw = () => drawTrace(canvas, step, events, { starts, durations, ofTrack, ofName, tracks, names });
    new ResizeObserver(draw).observe(section);
    canvas.addEventListener("mousemove", (event) => {
      const at = canvas.bars?.findLast((bar) => event.offsetX >= bar.x && event.offsetX <= bar.x + bar.width && event.offsetY >= bar.y && event.offsetY <= bar.y + 14);
      shown.replaceChildren(at ? `${visible(tracks[ofTrack[at.event]])}: ${visible(names[ofName[at.event]])}, ${duration(durations[at.event])}` : "Point at a bar for its name.");
    });
  });
  return section;
}

/** Return the last finished step whose processes have noted work; a step that was broken off may lack theirs. */
function lastWholeStep(steps, finished) {
  const worked = steps.filter((step) => step.hasWork);
  return worked.findLast((step) => Number(step.number) <= finished) ?? worked.at(-1) ?? steps.at(-1);
}

/** Return the steps of a trace with their times; all of it where it names none. */
function stepsOfTrace(names, starts, durations, ofName, ofTrack) {
  const numbers = names.map((name) => /^step (\d+)/.exec(name)?.[1]);
  const steps = [];
  const newest = new Map();
  const counts = new Map();
  for (let i = 0; i < starts.length; i++) {
    const number = numbers[ofName[i]];
    if (number === undefined) continue;
    const end = starts[i] + durations[i];
    const step = newest.get(ofTrack[i]);
    if (step?.number === number) {
      step.end = Math.max(step.end, end);
      continue;
    }
    // A run that goes back makes a step again, maybe in another process.
    const count = (counts.get(number) ?? 0) + 1;
    counts.set(number, count);
    const made = { number, title: count > 1 ? `${number}, made again (${count})` : number, start: starts[i], end, track: ofTrack[i], hasWork: false };
    newest.set(ofTrack[i], made);
    steps.push(made);
  }
  // Events are in the order of their beginnings, and so are steps.
  for (let i = 0, at = 0; i < starts.length && steps.length; i++) {
    while (at + 1 < steps.length && steps[at + 1].start <= starts[i]) at++;
    const isInside = steps[at].start <= starts[i] && starts[i] < steps[at].end;
    if (isInside && ofTrack[i] !== steps[at].track) steps[at].hasWork = true;
  }
  if (steps.length) return steps;
  return [{ title: "all", hasWork: true, start: 0, end: starts.reduce((end, start, i) => Math.max(end, start + durations[i]), 0) }];
}

function drawTrace(canvas, step, events, { starts, durations, ofTrack, ofName, tracks, names }) {
  const rows = [...new Set(events.map((i) => ofTrack[i]))].sort((a, b) => a - b);
  const [label, rowHeight, width] = [Math.min(190, canvas.clientWidth * 0.3), 22, canvas.clientWidth];
  const height = rows.length * rowHeight + 22;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  const [text, quiet, line] = ["text", "quiet", "line"].map(themeColor);
  const colors = Array.from({ length: 8 }, (_, i) => themeColor(`series-${i}`));
  const scale = (width - label - 8) / Math.max(1e-9, step.end - step.start);

  rows.forEach((track, row) => {
    pen.fillStyle = line;
    pen.fillRect(label, row * rowHeight + rowHeight - 1, width - label, 1);
    pen.fillStyle = text;
    pen.fillText(visible(tracks[track]), 0, row * rowHeight + 15, label - 10);
  });
  canvas.bars = [];
  // Longer events are drawn first, so that what lies within them stays visible.
  for (const i of [...events].sort((a, b) => durations[b] - durations[a])) {
    const from = Math.max(starts[i], step.start);
    const to = Math.min(starts[i] + durations[i], step.end);
    const bar = { event: i, x: label + (from - step.start) * scale, y: rows.indexOf(ofTrack[i]) * rowHeight + 4, width: Math.max(1, (to - from) * scale) };
    pen.fillStyle = colors[ofName[i] % 8];
    pen.fillRect(bar.x, bar.y, bar.width, 14);
    canvas.bars.push(bar);
  }
  pen.fillStyle = quiet;
  pen.fillText("0 s", label, height - 5);
  const end = duration(step.end - step.start);
  pen.fillText(end, width - pen.measureText(end).width - 8, height - 5);
}

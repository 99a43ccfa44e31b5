"use strict";
// Curves over the steps. Charts are drawn when they come into view, and zoom together.

const openCharts = new Set();
let sharedZoom = null;
// The step that the address names, which all charts mark.
let markedStep = null;
let isZooming = false;

const whenSeen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    whenSeen.unobserve(entry.target);
    entry.target.draw();
  }
}, { rootMargin: "200px" });

/** Forget all charts, before others take their place. */
function closeCharts() {
  for (const chart of openCharts) chart.destroy();
  openCharts.clear();
  whenSeen.disconnect();
}

/** Zoom all charts to some steps; null for all steps. */
function zoomTo(range) {
  sharedZoom = range;
  isZooming = true;
  for (const chart of openCharts) chart.setScale("x", range ?? chart.allSteps);
  isZooming = false;
}

/** Return numbers with a debiased exponential moving average; null stays null. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** Mark a step in all charts, which then show its values; null for none. */
function markStep(step) {
  markedStep = step;
  for (const chart of openCharts) {
    chart.redraw(false);
    chart.showValues();
  }
}

/** Return curves on the steps that any of them has: [steps, values, values, ...], null where there is none. */
function aligned(curves) {
  const recorded = curves.flatMap((curve) => curve.steps.filter((_, i) => Number.isFinite(curve.values[i])));
  const steps = [...new Set(recorded)].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  const columns = curves.map((curve) => {
    const column = new Array(steps.length).fill(null);
    curve.steps.forEach((step, i) => {
      if (Number.isFinite(curve.values[i])) column[places.get(step)] = curve.values[i];
    });
    return column;
  });
  return [steps, ...columns];
}

function axes() {
  const quiet = themeColor("quiet");
  const line = themeColor("line");
  const common = { stroke: quiet, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const whole = (chart, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? grouped(tick) : ""));
  return [{ ...common, values: whole, size: 24, gap: 3 }, { ...common, values: (chart, ticks) => ticks.map(short), size: 52, gap: 4 }];
}

/**
 * Return a chart as an element.
 *
 * `load` returns a promise of curves: {title, color (index), steps, values, isEvent}. Rare
 * events are bars. Options: smoothing (0 to 1), tall, stacked (values are added up and filled).
 */
function chartCard(title, load, options = {}) {
  const values = element("div", { class: "values" });
  const plot = element("div", { class: options.tall ? "plot tall" : "plot" });
  const card = element("figure", { class: "chart card", role: "img", "aria-label": visible(title) },
    element("figcaption", {}, element("strong", { class: "recorded" }, visible(title))), plot, values);
  plot.draw = async () => {
    const curves = await load();
    if (plot.isConnected) drawCurves(plot, values, curves, options);
  };
  whenSeen.observe(plot);
  return card;
}

/** Whether a metric is the time of something that few steps have, between which nothing is. */
function isEvent(name, values) {
  if (!name.startsWith("timing_s/")) return false;
  return /\/(testing|save_checkpoint)$/.test(name) || 2 * values.filter(Number.isFinite).length < values.length;
}

function drawCurves(plot, values, unordered, options) {
  // Bars stand on what lasts.
  const curves = [...unordered.filter((curve) => !curve.isEvent), ...unordered.filter((curve) => curve.isEvent)];
  const data = aligned(curves);
  const hasMany = data[0].length > 60;
  const series = [{}];
  const shown = [data[0]];
  const colors = curves.map((curve) => themeColor(`series-${curve.color % 8}`));
  const dashes = curves.map((curve) => (curve.dash ? [5, 4] : []));
  const labelled = [];
  const bar = (i) => ({ stroke: colors[i], fill: colors[i], width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.6, 24, 3] }) });

  if (options.stacked) {
    const sums = stackedSums(curves, data.slice(1));
    for (let i = sums.length - 1; i >= 0; i--) {
      shown.push(sums[i]);
      series.push(curves[i].isEvent ? bar(i) : { stroke: colors[i], fill: colors[i], width: 0, points: { show: false }, spanGaps: true });
    }
  } else {
    curves.forEach((curve, i) => {
      const column = data[i + 1];
      const isSparse = column.filter((value) => value !== null).length <= 40;
      const style = { stroke: colors[i], spanGaps: true, dash: dashes[i], points: { show: isSparse, size: 5, fill: colors[i] } };
      if (curve.isEvent) {
        labelled.push(column);
        shown.push(column);
        series.push(bar(i));
      } else if (options.smoothing && !isSparse) {
        shown.push(column);
        series.push({ ...style, alpha: 0.25, width: 1 });
        labelled.push(smoothed(column, options.smoothing));
        shown.push(labelled[i]);
        series.push({ ...style, width: 2 });
      } else {
        labelled.push(column);
        shown.push(column);
        series.push({ ...style, width: hasMany ? 1.25 : 1.75 });
      }
    });
  }

  const rows = options.stacked ? data.slice(1) : labelled;
  const allSteps = stepsOf(curves);
  if (curves.some((curve) => curve.isEvent)) {
    // A bar has half of its width on each side of its step.
    allSteps.min -= 0.5;
    allSteps.max += 0.5;
  }
  const startsAtZero = options.stacked || curves.some((curve) => curve.isEvent);
  const chart = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight,
    legend: { show: false }, axes: axes(), series,
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: startsAtZero ? (u, low, high) => [0, high || 1] : valueRange } },
    cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      setCursor: [(u) => showValues(values, curves, data[0], rows, u.cursor.idx, options)],
      draw: [drawMark],
      setScale: [(u, key) => {
        if (key !== "x" || isZooming || !openCharts.has(u)) return;
        const { min, max } = u.scales.x;
        const isAll = min <= u.data[0][0] && max >= u.data[0][u.data[0].length - 1];
        zoomTo(isAll ? null : { min, max });
      }],
    },
  }, shown, plot);
  chart.allSteps = allSteps;
  chart.showValues = () => showValues(values, curves, data[0], rows, null, options);
  // uPlot keeps the click that ends a drag to itself.
  chart.over.addEventListener("click", () => {
    const step = data[0][chart.cursor.idx];
    if (step !== undefined) location.hash = `${currentTab()}${step === markedStep ? "" : `/${step}`}`;
  });
  openCharts.add(chart);
  // A metric may lack the first or the last steps of its run.
  isZooming = true;
  chart.setScale("x", sharedZoom ?? allSteps);
  isZooming = false;
  plot.chart = chart;
  chart.showValues();
  new ResizeObserver(() => {
    if (openCharts.has(chart) && plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: plot.clientHeight });
  }).observe(plot);
}

/** Return the first and the last step of the runs of some curves. */
function stepsOf(curves) {
  const ends = curves.flatMap(({ steps }) => (steps.length ? [steps[0], steps[steps.length - 1]] : []));
  const [min, max] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
  // A single step has no width of its own.
  return min === max ? { min: min - 1, max: max + 1 } : { min, max };
}

/** Draw a line at the step that is marked. */
function drawMark(chart) {
  const { min, max } = chart.scales.x;
  if (markedStep === null || markedStep < min || markedStep > max) return;
  const { left, top, width, height } = chart.bbox;
  const pen = chart.ctx;
  pen.save();
  pen.fillStyle = themeColor("accent");
  pen.fillRect(left + (width * (markedStep - min)) / (max - min) - 1, top, 2, height);
  pen.restore();
}

function valueRange(u, low, high) {
  if (low === null || !Number.isFinite(low) || (low === 0 && high === 0)) return [0, 1];
  const margin = high > low ? 0.06 * (high - low) : Math.abs(low) * 0.1 || 1;
  return [low - margin, high + margin];
}

/** Return the sums of the columns up to each; an event has none where it did not happen. */
function stackedSums(curves, columns) {
  let below = null;
  return columns.map((column, k) => {
    const sums = column.map((value, i) => (value ?? 0) + (below ? below[i] : 0));
    below = sums;
    return curves[k].isEvent ? sums.map((sum, i) => (column[i] === null ? null : sum)) : sums;
  });
}

/** Show the values of one step: at the cursor, or of the step that is marked, or of the last one. */
function showValues(target, curves, steps, rows, place, options) {
  const marked = markedStep === null ? steps.length - 1 : steps.indexOf(markedStep);
  const at = place ?? marked;
  const items = curves.map((curve, i) => {
    const value = rows[i][at] ?? null;
    const text = options.unit === "s" ? duration(value) : short(value);
    return element("i", {}, swatch(curve.color), element("span", {}, visible(curve.title)), element("b", {}, text));
  });
  const step = steps[at] ?? markedStep;
  const words = step === null ? "nothing recorded" : `step ${grouped(step)}`;
  target.replaceChildren(element("i", {}, step !== null && step === markedStep ? stepLink(step, null, words) : words), ...items);
}

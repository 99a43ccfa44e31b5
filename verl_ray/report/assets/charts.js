"use strict";
// Curves over the steps. Charts are drawn when they come into view, and zoom together.

const openCharts = new Set();
let sharedZoom = null;
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
  for (const chart of openCharts) {
    const steps = chart.data[0];
    if (!steps.length) continue;
    chart.setScale("x", range ?? { min: steps[0], max: steps[steps.length - 1] });
  }
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

/** Return curves on common steps: [steps, values, values, ...], null where there is none. */
function aligned(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
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
 * `load` returns a promise of curves: {title, color (index), steps, values}. Options:
 * smoothing (0 to 1), tall, stacked (values are added up and filled).
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

function drawCurves(plot, values, curves, options) {
  const data = aligned(curves);
  const hasMany = data[0].length > 60;
  const series = [{}];
  const shown = [data[0]];
  const colors = curves.map((curve) => themeColor(`series-${curve.color % 8}`));
  const dashes = curves.map((curve) => (curve.dash ? [5, 4] : []));
  const labelled = [];

  if (options.stacked) {
    const sums = stackedSums(data.slice(1));
    for (let i = sums.length - 1; i >= 0; i--) {
      shown.push(sums[i]);
      series.push({ stroke: colors[i], fill: colors[i], width: 0, points: { show: false }, spanGaps: true });
    }
  } else {
    curves.forEach((curve, i) => {
      const column = data[i + 1];
      const isSparse = column.filter((value) => value !== null).length <= 40;
      const style = { stroke: colors[i], spanGaps: true, dash: dashes[i], points: { show: isSparse, size: 5, fill: colors[i] } };
      if (options.smoothing && !isSparse) {
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
  const chart = new uPlot({
    width: plot.clientWidth, height: plot.clientHeight,
    legend: { show: false }, axes: axes(), series,
    scales: { x: { time: false, range: stepRange }, y: { range: options.stacked ? (u, low, high) => [0, high || 1] : valueRange } },
    cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      setCursor: [(u) => showValues(values, curves, data[0], rows, u.cursor.idx, options)],
      setScale: [(u, key) => {
        if (key !== "x" || isZooming || !openCharts.has(u)) return;
        const { min, max } = u.scales.x;
        const isAll = min <= u.data[0][0] && max >= u.data[0][u.data[0].length - 1];
        zoomTo(isAll ? null : { min, max });
      }],
    },
  }, shown, plot);
  openCharts.add(chart);
  if (sharedZoom) {
    isZooming = true;
    chart.setScale("x", sharedZoom);
    isZooming = false;
  }
  plot.chart = chart;
  showValues(values, curves, data[0], rows, null, options);
  new ResizeObserver(() => {
    if (openCharts.has(chart) && plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: plot.clientHeight });
  }).observe(plot);
}

// A single step has no width of its own.
const stepRange = (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

function valueRange(u, low, high) {
  if (low === null || !Number.isFinite(low)) return [0, 1];
  const margin = high > low ? 0.06 * (high - low) : Math.abs(low) * 0.1 || 1;
  return [low - margin, high + margin];
}

function stackedSums(columns) {
  let below = null;
  return columns.map((column) => {
    const sums = column.map((value, i) => (value ?? 0) + (below ? below[i] : 0));
    below = sums;
    return sums;
  });
}

/** Show the values at the cursor, or the last ones. */
function showValues(target, curves, steps, rows, place, options) {
  const items = curves.map((curve, i) => {
    let at = place;
    // Values of few steps, such as held-out ones, are those of the last such step.
    if (at === null || at === undefined) at = steps.length - 1;
    while (at > 0 && rows[i][at] === null) at--;
    const text = options.unit === "s" ? duration(rows[i][at]) : short(rows[i][at]);
    return element("i", {}, swatch(curve.color), element("span", {}, visible(curve.title)), element("b", {}, text));
  });
  const at = place === null || place === undefined ? steps.length - 1 : place;
  const step = steps.length ? element("i", {}, `step ${grouped(steps[at])}`) : element("i", {}, "nothing recorded");
  target.replaceChildren(step, ...items);
}

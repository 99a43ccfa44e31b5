"use strict";
// All metrics as curves, several runs over each other, and what differs between their settings.

const keyPanels = [
  { title: "reward in training", names: ["critic/rewards/mean"] },
  { title: "loss in training", names: ["train/loss", "reward/loss"] },
  { title: "KL divergence", names: ["actor/kl_loss", "actor/reward_kl_penalty"] },
  { title: "response length, tokens", names: ["response_length/mean", "response_length/max"] },
  { title: "entropy, nats per token", names: ["actor/entropy_per_token"] },
  { title: "responses that were cut, share", names: ["response_length/clip_ratio"] },
  { title: "groups without spread, share", names: ["frac_reward_zero_std"] },
  { title: "gradient norm", names: ["actor/grad_norm", "critic/grad_norm", "train/grad_norm"] },
  { title: "sampler and trainer, difference of probabilities", names: ["training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"] },
  { title: "time of a step, s", names: ["timing_s/step"] },
  { title: "throughput, tokens/s per device", names: ["perf/throughput"] },
  { title: "learning rate", names: ["actor/lr", "train/lr"] },
];

const curvesView = { smoothing: 0, hidden: new Set(), search: "" };
const mostFiltered = 30;

const mostHeldOut = 8;

/** Return the panels that stand first. Each kind of held-out metric has its own, since their scales differ. */
function panelsOf(report, numbers) {
  const kinds = new Map();
  for (const row of numbers.flatMap((number) => report.runs[number].heldOut)) {
    if (!kinds.has(row.kind)) kinds.set(row.kind, new Set());
    kinds.get(row.kind).add(row.metric);
  }
  const heldOut = [...kinds].map(([kind, names]) => ({ title: `held out: ${kind}`, names: [...names].slice(0, mostHeldOut) }));
  return [...keyPanels.slice(0, 2), ...heldOut, ...keyPanels.slice(2)];
}

/** Return the names of a run's metrics that a panel shows. */
function namesOfPanel(run, panel) {
  const all = run.metrics.map(([name]) => name);
  return panel.names.filter((name) => all.includes(name));
}

/** Return the ends of some names, which begin where the names begin to differ. */
function distinctParts(names) {
  const parts = names.map((name) => name.split("/"));
  let same = 0;
  while (parts.every((words) => same < words.length - 1 && words[same] === parts[0][same])) same++;
  return parts.map((words) => words.slice(same).join("/"));
}

/** Return the chart of a panel over some runs; null where none of them has its metrics. */
function panelCard(report, panel, numbers) {
  const names = [...new Set(numbers.flatMap((number) => namesOfPanel(report.runs[number], panel)))];
  if (!names.length) return null;
  const distinct = distinctParts(names);
  const load = async () => {
    const curves = [];
    for (const number of numbers) {
      const run = report.runs[number];
      for (const [place, name] of names.entries()) {
        const metric = run.metrics.find((pair) => pair[0] === name);
        if (!metric) continue;
        const isAlone = report.runs.length === 1 || numbers.length === 1;
        const words = heldOutName(name);
        const title = isAlone ? words : names.length > 1 ? `${distinct[place]}, ${run.name}` : run.name;
        const values = Array.from(await report.blocks.numbers(metric[1]));
        curves.push({
          title, isEvent: isEvent(name, values), color: isAlone ? (report.runs.length > 1 && names.length === 1 ? number : place) : number, dash: !isAlone && place > 0,
          steps: run.steps, values,
        });
      }
    }
    return curves;
  };
  return chartCard(panel.title, load, { smoothing: curvesView.smoothing });
}

function curvesTab(report, redraw) {
  const numbers = report.runs.map((_, number) => number).filter((number) => !curvesView.hidden.has(number));
  return [
    report.runs.length > 1 ? differences(report) : null,
    curveTools(report, redraw),
    report.stride > 1 ? element("p", { class: "note" }, `Every ${report.stride}th step is shown, and every evaluation and checkpoint.`) : null,
    element("div", { id: "panels" }, ...curvePanels(report, numbers)),
  ];
}

function curveTools(report, redraw) {
  const shown = element("output", { class: "mono" }, curvesView.smoothing.toFixed(2));
  const runs = report.runs.length > 1 ? report.runs.map((run, number) => element("button", {
    type: "button", "aria-pressed": String(!curvesView.hidden.has(number)),
    onclick: () => {
      if (!curvesView.hidden.delete(number)) curvesView.hidden.add(number);
      redraw();
    },
  }, swatch(number), " ", recorded(run.name))) : [];
  return element("div", { class: "tools" },
    element("label", {}, "find", element("input", {
      type: "search", placeholder: "name of a metric", value: curvesView.search, "aria-label": "Name of a metric",
      oninput: (event) => {
        curvesView.search = event.target.value;
        const numbers = report.runs.map((_, number) => number).filter((number) => !curvesView.hidden.has(number));
        closeCharts();
        document.getElementById("panels").replaceChildren(...curvePanels(report, numbers));
      },
    })),
    element("label", {}, "smoothing", element("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: curvesView.smoothing, "aria-label": "Smoothing",
      oninput: (event) => { shown.textContent = Number(event.target.value).toFixed(2); },
      onchange: (event) => { curvesView.smoothing = Number(event.target.value); redraw(); },
    }), shown),
    element("button", { type: "button", onclick: () => zoomTo(null) }, "all steps"),
    element("span", { class: "quiet" }, "Drag over a chart to zoom all of them."),
    ...runs);
}

function curvePanels(report, numbers) {
  const names = [...new Set(numbers.flatMap((number) => report.runs[number].metrics.map(([name]) => name)))].sort();
  const card = (name) => panelCard(report, { title: name, names: [name] }, numbers);
  const search = curvesView.search.trim().toLowerCase();
  if (search) {
    const matching = names.filter((name) => name.toLowerCase().includes(search));
    const more = matching.length - mostFiltered;
    return [element("p", { class: "quiet" }, `${matching.length} metrics${more > 0 ? `, the first ${mostFiltered} are shown` : ""}`),
      element("div", { class: "charts" }, ...matching.slice(0, mostFiltered).map(card))];
  }

  const cards = panelsOf(report, numbers).map((panel) => panelCard(report, panel, numbers)).filter((made) => made !== null);
  const groups = new Map();
  for (const name of names) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "others";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  const rest = [...groups].map(([group, inGroup]) => {
    const charts = element("div", { class: "charts" });
    return element("details", {
      ontoggle: (event) => { if (event.target.open && !charts.children.length) charts.append(...inGroup.map(card)); },
    }, element("summary", {}, visible(group), element("span", { class: "quiet" }, ` ${inGroup.length}`)), charts);
  });
  return [element("div", { class: "charts" }, ...cards), element("h2", {}, "All metrics"), ...rest];
}

// Names and places differ between any two runs.
const ownKeys = /^run\.(name|dir|resolved\.)|\.folder$/;

const mostShown = 12;

/** Return the settings in which the runs differ, those first that were set by hand. */
function differences(report) {
  const trees = report.runs.map((run) => new Map(run.config));
  const topOf = (key) => key.split(".")[0];
  // A section that some runs lack is one row.
  const tops = trees.map((tree) => new Set([...tree.keys()].filter((key) => key.includes(".")).map(topOf)));
  const isSection = (top) => tops.some((names) => names.has(top));
  const isLacking = (top) => isSection(top) && !tops.every((names) => names.has(top));
  const groups = report.runs.flatMap((run) => (run.typed ?? []).map(([key]) => key)).filter((key) => trees.every((tree) => !tree.has(key)) && !isLacking(topOf(key)));
  const keys = [...new Set([...groups, ...trees.flatMap((tree) => [...tree.keys()].map((key) => (isLacking(topOf(key)) ? topOf(key) : key)))])];
  const valueOf = (key, number) => {
    const typed = (report.runs[number].typed ?? []).find(([name]) => name === key);
    if (groups.includes(key)) return typed ? typed[1] : "–";
    if (trees[number].has(key)) return String(trees[number].get(key));
    return isLacking(key) && tops[number].has(key) ? "a section" : "not there";
  };
  const isOurs = (run, key) => byHand(run, key) || (isLacking(key) && (run.typed ?? []).some(([name]) => topOf(name) === key));
  const differing = keys
    .filter((key) => !ownKeys.test(key))
    .map((key) => [key, report.runs.map((_, number) => valueOf(key, number))])
    .filter(([, values]) => new Set(values).size > 1);
  const ours = differing.filter(([key]) => report.runs.some((run) => isOurs(run, key)));
  const first = ours.length ? ours : differing.slice(0, mostShown);
  const rest = differing.filter((row) => !first.includes(row));
  const card = (pairs) => element("div", { class: "card" }, table(
    ["setting", ...report.runs.map((run, number) => element("span", {}, swatch(number), " ", recorded(run.name)))],
    pairs.map(([key, values]) => [settingName(key), ...values.map((value, number) =>
      element("span", {}, recorded(value), ...(isOurs(report.runs[number], key) ? [" ", mark("by hand")] : [])))])));
  return element("section", { id: "differences" }, element("h2", {}, "What differs between their settings"),
    first.length ? card(first) : element("p", { class: "note" }, "Nothing but names and folders."),
    rest.length ? element("details", {}, element("summary", {}, `${rest.length} more${ours.length ? ", which no command names" : ""}`), card(rest)) : null);
}

function settingName(key) {
  return element("code", {}, breakable(key));
}

function mark(text) {
  return element("span", { class: "chip small" }, text);
}

/** Whether a command of a run names a setting, or a table or section that it is in. */
function byHand(run, key) {
  return (run.typed ?? []).some(([name, text]) => key === name || (text.startsWith("{") && key.startsWith(`${name}.`)));
}

const settingsView = { search: "" };

function settingsTab(report) {
  const body = element("div", {});
  const fill = () => {
    const search = settingsView.search.trim().toLowerCase();
    const has = (...texts) => texts.join(" ").toLowerCase().includes(search);
    body.replaceChildren(...report.runs.flatMap((run) => {
      const wasAuto = run.config.map(([key]) => /^run\.resolved\.(?:cpu|gpu)\.(.+)$/.exec(key)?.[1]).filter((key) => key);
      const rows = run.config.filter(([key, value]) => has(key, value)).map(([key, value]) => [
        element("span", {}, settingName(key), ...(byHand(run, key) ? [" ", mark("by hand")] : []), ...(wasAuto.includes(key) ? [" ", mark("was auto")] : [])),
        recorded(String(value), "mono")]);
      const title = report.runs.length > 1 ? [element("h2", {}, recorded(run.name))] : [];
      return [...title, typedTable(run, has), element("div", { class: "card" }, rows.length ? table(["setting", "value"], rows) : "no such setting")];
    }));
  };
  fill();
  return [
    element("div", { class: "tools" }, element("label", {}, "find", element("input", {
      type: "search", placeholder: "setting or value", value: settingsView.search, "aria-label": "Setting or value",
      oninput: (event) => { settingsView.search = event.target.value; fill(); },
    }))),
    report.runs.length > 1 ? differences(report) : null, body,
  ];
}

/** Return what was set by hand, and what became of it. */
function typedTable(run, has) {
  if (run.typed === null) return element("p", { class: "note" }, "No command is on record, so what was set by hand is not marked.");
  const rows = run.typed.filter((item) => has(...item)).map(([key, text, became]) =>
    [settingName(key), recorded(text, "mono"), recorded(became, "mono")]);
  if (!rows.length) return element("p", { class: "note" }, "Nothing was set by hand.");
  return element("section", { class: "typed" }, element("h2", {}, "Set by hand"), element("div", { class: "card" }, table(["setting", "as typed", "became"], rows)), element("h2", {}, "All settings"));
}

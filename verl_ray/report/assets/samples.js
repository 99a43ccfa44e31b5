"use strict";
// Prompts and responses: filtered, sorted, side by side, and with the values of their tokens.

const itemHeight = 76;
const mostBeside = 24;
const samplesView = {
  filters: {}, sort: "recorded", selected: null, selectedKey: null, mode: "sample", coloring: null,
  scrolled: { order: "", top: 0 },
};

const identity = ["run", "source", "step", "group", "member", "row"];

/** Return what a row is known by, whatever its place. */
function keyOf(columns, place) {
  return place === null ? null : identity.map((name) => columns[name][place]);
}

function isRow(columns, place, key) {
  return place !== null && identity.every((name, i) => columns[name][place] === key[i]);
}

async function samplesTab(report, redraw) {
  const columns = await report.blocks.json(report.samples.columns);
  const samples = { ...report.samples, columns, report };
  if (!samples.shown) return [element("p", { class: "note" }, "No prompts and responses are recorded.")];

  const places = matching(samples);
  // Newer data may have the row that is selected at another place.
  const last = samplesView.selectedKey;
  if (last !== null && !isRow(columns, samplesView.selected, last)) samplesView.selected = places.find((place) => isRow(columns, place, last)) ?? null;
  if (!places.includes(samplesView.selected)) samplesView.selected = places[0] ?? null;
  samplesView.selectedKey = keyOf(columns, samplesView.selected);
  const detail = element("div", { id: "detail", "aria-live": "polite" });
  const showDetail = async () => {
    const made = await detailOf(samples, samplesView.selected, showDetail);
    detail.replaceChildren(...made);
  };
  const select = (place) => {
    samplesView.selected = place;
    samplesView.selectedKey = keyOf(columns, place);
    list.refresh();
    return showDetail();
  };
  const list = sampleList(samples, places, select);
  await showDetail();

  const kind = has(columns, "margin") ? "pairs" : has(columns, "loss") ? "examples" : columns.end.some((end) => end !== "") ? "episodes" : "responses";
  const total = new Set(columns.episode.slice(0, samples.shown)).size;
  const rest = samples.recorded - samples.shown;
  const isPart = samples.steps < samples.recordedSteps;
  return [
    filterTools(samples, redraw),
    element("p", { class: "quiet", id: "count" }, `${grouped(places.length)} of ${grouped(total)} ${kind}`,
      isPart ? `, from ${grouped(samples.steps)} of ${grouped(samples.recordedSteps)} recorded steps` : "",
      rest > 0 ? `; ${grouped(rest)} more rows${isPart ? " of these steps" : ""} are in the run's folder (rollouts/, evaluations/)` : ""),
    element("div", { class: "split" }, list, detail),
  ];
}

// ------------------------------------------------------------------------------ filters

const choiceFilters = [["run", "run"], ["source", "from"], ["step", "step"], ["data_source", "data source"], ["label", "label"], ["finish", "finish"], ["end", "end"], ["failure", "failure"]];
const rangeFilters = [["reward", "reward"], ["margin", "margin"], ["loss", "loss"], ["response_tokens", "tokens"]];
const sorts = {
  recorded: ["as drawn", null], rewardDown: ["highest reward", ["reward", -1]], rewardUp: ["lowest reward", ["reward", 1]],
  longest: ["longest", ["response_tokens", -1]], shortest: ["shortest", ["response_tokens", 1]],
  marginUp: ["smallest margin", ["margin", 1]], lossDown: ["highest loss", ["loss", -1]],
  advantage: ["largest advantage", ["advantage", -1]], step: ["newest step", ["step", -1]],
};

/** Return whether any row has a number of this name. */
function has(columns, name) {
  return columns[name].some((value) => value !== null);
}

/** Return the places of the first rows of the episodes that pass the filters, in the order that is chosen. */
function matching(samples) {
  const seen = new Set();
  return matchingRows(samples).filter((place) => {
    const episode = samples.columns.episode[place];
    return !seen.has(episode) && seen.add(episode);
  });
}

function matchingRows({ columns, shown }) {
  const tests = [];
  for (const [name, value] of Object.entries(samplesView.filters)) {
    if (value === "" || value === null) continue;
    const [column, bound] = name.split(":");
    const values = columns[column];
    if (bound === "from") tests.push((i) => values[i] !== null && values[i] >= Number(value));
    else if (bound === "to") tests.push((i) => values[i] !== null && values[i] <= Number(value));
    else if (value === "any failure") tests.push((i) => values[i] !== "");
    else tests.push((i) => String(values[i]) === value);
  }
  const places = [];
  for (let i = 0; i < shown; i++) if (tests.every((test) => test(i))) places.push(i);

  const order = sorts[samplesView.sort][1];
  if (order === null) {
    const keys = ["run", "step", "group", "member", "row"].map((name) => columns[name]);
    return places.sort((a, b) => {
      for (const key of keys) if (key[a] !== key[b]) return key[a] - key[b];
      return a - b;
    });
  }
  const [name, sign] = order;
  const values = columns[name];
  const rank = (i) => (values[i] === null ? Infinity : sign * values[i]);
  return places.sort((a, b) => (rank(a) === rank(b) ? a - b : rank(a) - rank(b)));
}

function filterTools(samples, redraw) {
  const { columns, report } = samples;
  const set = (name) => (value) => { samplesView.filters[name] = value; redraw(); };
  const menus = choiceFilters.flatMap(([name, title]) => {
    const values = [...new Set(columns[name])].filter((value) => value !== "");
    // An address may name a step of which nothing is recorded.
    if (name === "step" && samplesView.filters.step && !values.includes(Number(samplesView.filters.step))) values.push(Number(samplesView.filters.step));
    // Both responses of a pair are one entry of the list.
    const isUseful = (values.length > 1 && !(name === "label" && has(columns, "margin"))) || (name === "failure" && values.length);
    if (!isUseful) return [];
    values.sort((a, b) => (typeof a === "number" ? a - b : String(a) < String(b) ? -1 : 1));
    const choices = values.map((value) => [value, name === "run" ? report.runs[value].name : String(value)]);
    if (name === "failure") choices.unshift(["any failure", "any failure"]);
    return [menu(title, [["", "all"], ...choices], samplesView.filters[name] ?? "", set(name))];
  });
  const ranges = rangeFilters.flatMap(([name, title]) => {
    if (columns[name].every((value) => value === null || value < 0)) return [];
    const bound = (end) => element("input", {
      type: "number", step: "any", value: samplesView.filters[`${name}:${end}`] ?? "", "aria-label": `${title} ${end}`, placeholder: end,
      onchange: (event) => set(`${name}:${end}`)(event.target.value),
    });
    return [element("label", {}, title, bound("from"), bound("to"))];
  });
  const isKnown = ([, [, order]]) => order === null || has(columns, order[0]);
  const choices = Object.entries(sorts).filter(isKnown).map(([key, [title]]) => [key, title]);
  return element("div", { class: "tools" }, ...menus, ...ranges,
    menu("sort", choices, samplesView.sort, (value) => { samplesView.sort = value; redraw(); }),
    element("button", { type: "button", onclick: () => { samplesView.filters = {}; redraw(); } }, "clear"));
}

// --------------------------------------------------------------------------------- list

/** Return a list of which only the visible part exists as elements. */
function sampleList(samples, places, select) {
  const space = element("div", {});
  space.style.height = `${places.length * itemHeight}px`;
  const list = element("div", { class: "list card", role: "listbox", tabindex: "0", "aria-label": "Prompts and responses", id: "list" }, space);

  list.refresh = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / itemHeight) - 4);
    const last = Math.min(places.length, first + Math.ceil((list.clientHeight || 800) / itemHeight) + 9);
    space.replaceChildren(...places.slice(first, last).map((place, i) => sampleItem(samples, place, first + i, select)));
  };
  const order = JSON.stringify([samplesView.filters, samplesView.sort]);
  list.addEventListener("scroll", () => {
    samplesView.scrolled = { order, top: list.scrollTop };
    list.refresh();
  }, { passive: true });
  list.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 };
    if (!(event.key in moves) || !places.length) return;
    event.preventDefault();
    const at = places.indexOf(samplesView.selected) + moves[event.key];
    const next = Math.min(places.length - 1, Math.max(0, at));
    const top = next * itemHeight;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + itemHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + itemHeight - list.clientHeight;
    select(places[next]);
  });
  list.refresh();
  requestAnimationFrame(() => {
    // Newer data leave the list where it was.
    if (samplesView.scrolled.order === order) list.scrollTop = samplesView.scrolled.top;
    list.refresh();
  });
  return list;
}

function sampleItem({ columns, report }, place, order, select) {
  const [title, value] = mainNumber(columns, place);
  const isSelected = place === samplesView.selected;
  const item = element("div", { class: "item", role: "option", "aria-selected": String(isSelected), onclick: () => select(place) },
    element("div", { class: "top" },
      report.runs.length > 1 ? swatch(columns.run[place]) : null,
      element("span", {}, `step ${columns.step[place]}`), element("span", {}, `${unitOf(columns, place)} ${columns.group[place]}`),
      element("span", {}, visible(columns.failure[place] || columns.finish[place])), element("b", {}, title === "reward" ? short(value) : `${title} ${short(value)}`)),
    element("div", { class: "text question" }, visible(columns.question[place])),
    element("div", { class: "text" }, visible(columns.preview[place]) || "(empty)"));
  item.style.top = `${order * itemHeight}px`;
  return item;
}

/** Return what a row and those of its group belong to. */
function unitOf(columns, place) {
  if (columns.source[place] !== "training") return "problem";
  if (columns.margin[place] !== null) return "pair";
  return columns.loss[place] !== null ? "example" : "prompt";
}

/** Return the number that tells most of a row, with its name. */
function mainNumber(columns, place) {
  const name = ["margin", "reward", "loss"].find((key) => columns[key][place] !== null) ?? "reward";
  return [name, columns[name][place]];
}

// ------------------------------------------------------------------------------- detail

const modes = [["sample", "itself"], ["group", "its group"], ["prompt", "its prompt over the steps"], ["runs", "its prompt in each run"]];
const colorings = [
  ["none", "nothing"], ["turns", "who wrote it"], ["logProb", "log-prob"], ["difference", "trainer less sampler"],
  ["advantage", "advantage"], ["version", "policy version"],
];
// Of a row of a data set, of which nothing was sampled.
const exampleColorings = [["loss", "loss"], ["turns", "what is learned from"], ["none", "nothing"]];

/** Return the colourings that a row has, the usual one among them. */
function coloringsOf({ columns }, place) {
  const isExample = columns.loss[place] !== null;
  const hasLosses = isExample && columns.label[place] === "";
  const choices = isExample ? exampleColorings.slice(hasLosses ? 0 : 1) : colorings;
  const isChoice = choices.some(([key]) => key === samplesView.coloring);
  return { choices, coloring: isChoice ? samplesView.coloring : hasLosses ? "loss" : "turns" };
}

async function detailOf(samples, place, redraw) {
  if (place === null) return [element("p", { class: "note" }, "Nothing passes the filters.")];
  const beside = placesBeside(samples, place);
  const shown = beside.slice(0, mostBeside);
  const cards = await Promise.all(shown.map((other) => sampleCard(samples, other, place)));
  const { choices, coloring } = coloringsOf(samples, place);
  const runs = samples.report.runs;
  const isPossible = { runs: runs.length > 1, group: samples.columns.loss[place] === null };
  const shownModes = modes.filter(([mode]) => isPossible[mode] ?? true);
  const tools = element("div", { class: "tools" },
    choiceButtons("What stands side by side", shownModes, samplesView.mode, (mode) => { samplesView.mode = mode; redraw(); }),
    shown.some((other) => samples.columns.hasTokens[other]) ? menu("colour by", choices, coloring, (value) => { samplesView.coloring = value; redraw(); }) : "",
    coloringScale(coloring));
  const more = beside.length - shown.length;
  const absent = samplesView.mode === "runs" ? runs.filter((_, run) => !beside.some((other) => samples.columns.run[other] === run)) : [];
  return [tools,
    absent.length ? element("p", { class: "quiet" }, "Not recorded in ", recorded(absent.map((run) => run.name).join(", ")), ".") : "",
    more > 0 ? element("p", { class: "quiet" }, `${beside.length} rows, the first ${mostBeside} are shown`) : "",
    cards.length === 1 ? cards[0] : element("div", { class: "beside", tabindex: "0" }, ...cards)];
}

/** Return the places of the rows that are shown together with a row. */
function placesBeside({ columns, shown }, place) {
  const same = (names) => (i) => names.every((name) => columns[name][i] === columns[name][place]);
  const all = Array.from({ length: shown }, (_, i) => i);
  if (samplesView.mode === "group") {
    return all.filter(same(["run", "source", "step", "group"])).sort((a, b) => columns.member[a] - columns.member[b] || columns.row[a] - columns.row[b]);
  }
  if (samplesView.mode === "prompt") {
    return all.filter(same(["source", "prompt"])).sort((a, b) => columns.step[a] - columns.step[b] || columns.run[a] - columns.run[b] || columns.member[a] - columns.member[b] || columns.row[a] - columns.row[b]);
  }
  if (samplesView.mode === "runs") return placesInRuns(columns, all.filter(same(["source", "prompt"])), place);
  return all.filter(same(["episode"])).sort((a, b) => columns.member[a] - columns.member[b] || columns.row[a] - columns.row[b]);
}

/** Return the places of the episodes of each run that are nearest to a row's step, and to its place in the group. */
function placesInRuns(columns, places, place) {
  const distance = (i) => [i === place ? 0 : 1, Math.abs(columns.step[i] - columns.step[place]), Math.abs(columns.member[i] - columns.member[place])];
  const compare = (a, b) => {
    const [first, second] = [distance(a), distance(b)];
    const at = first.findIndex((value, i) => value !== second[i]);
    return at < 0 ? 0 : first[at] - second[at];
  };
  const nearest = new Map();
  for (const i of places.toSorted(compare)) if (!nearest.has(columns.run[i])) nearest.set(columns.run[i], columns.episode[i]);
  const episodes = new Set(nearest.values());
  return places.filter((i) => episodes.has(columns.episode[i]))
    .sort((a, b) => columns.run[a] - columns.run[b] || columns.member[a] - columns.member[b] || columns.row[a] - columns.row[b]);
}

/** Return the value of a row from blocks, of which each has its first row and its number. */
async function valueOfRow(blocks, places, place) {
  const [first, number] = places.findLast(([start]) => start <= place);
  return (await blocks.json(number))[place - first];
}

async function sampleCard(samples, place, selected) {
  const { columns, report } = samples;
  const [prompt, response, answer, scores, turns, output] = await valueOfRow(report.blocks, samples.texts, place);
  const tokens = columns.hasTokens[place] ? await valueOfRow(report.blocks, samples.tokens, place) : null;

  const isExample = columns.loss[place] !== null;
  const coloring = coloringsOf(samples, place).coloring;
  const pairs = [["step", columns.step[place]]];
  if (columns.label[place]) pairs.push(["label", columns.label[place]]);
  for (const name of ["reward", "margin", "loss"]) {
    if (columns[name][place] !== null || (name === "reward" && !isExample)) pairs.push([name, short(columns[name][place])]);
  }
  for (const [name, value] of Object.entries(scores)) pairs.push([`${name} score`, value === null ? "failed" : short(value)]);
  if (columns.advantage[place] !== null) pairs.push(["advantage", signed(columns.advantage[place])]);
  if (columns.response_tokens[place] >= 0) pairs.push(["tokens", columns.response_tokens[place]]);
  if (columns.num_turns[place] > 1) pairs.push(["turns", columns.num_turns[place]]);
  if (columns.row[place] > 0) pairs.push(["row of the episode", columns.row[place] + 1]);
  for (const name of ["data_source", "finish", "end", "failure"]) {
    if (columns[name][place]) pairs.push([name.replace("_", " "), columns[name][place]]);
  }
  if (report.runs.length > 1) pairs.unshift(["run", report.runs[columns.run[place]].name]);

  // How an episode ended is known of its rows alone.
  const isEpisode = columns.end[place] !== "";
  const part = (title, body) => element("div", { class: "part" }, element("span", {}, title), body);
  const plain = (text) => element("p", { class: "text-block" }, visible(text));
  return element("article", { class: "card sample", "aria-current": place === selected ? "true" : null },
    element("div", { class: "pairs" }, ...pairs.map(([title, value]) => element("div", {}, element("span", {}, `${visible(title)} `), recorded(value)))),
    ...(tokens ? [part(tokenTitle(tokens, isEpisode, isExample), tokenText(tokens, isEpisode, turns, coloring))] : []),
    ...(tokens && !isCut(tokens) ? [] : [part("prompt", plain(prompt)), part("response", plain(response))]),
    answer ? part("expected answer", plain(answer)) : "",
    output ? part("printed by the command of the episode", plain(output)) : "");
}

// ------------------------------------------------------------------------------- tokens

/** Return how strongly a token is coloured, from -1 to 1, and null for not at all. */
function strengthOf(tokens, i, coloring) {
  const [, mask, sampler, trainer, advantages, versions, , losses] = tokens;
  if (!mask[i]) return null;
  switch (coloring) {
    case "turns": return 0.3;
    case "logProb": return sampler[i] === null ? null : Math.max(-1, sampler[i] / 4000);
    case "difference": return sampler[i] === null || trainer[i] === null ? null : Math.max(-1, Math.min(1, (trainer[i] - sampler[i]) / 500));
    case "advantage": return advantages[i] === null ? null : Math.max(-1, Math.min(1, advantages[i] / 2000));
    case "loss": return losses[i] === null ? null : -Math.min(1, losses[i] / 4000);
    case "version": return versions[i] < 0 ? null : versions[i] % 2 ? 0.7 : -0.7;
    default: return null;
  }
}

/** Return whether a page has the first tokens of a row alone. */
function isCut([pieces, , , , , , total]) {
  return pieces.length < total;
}

function tokenTitle(tokens, isEpisode, isExample) {
  const [pieces, , , , , , total] = tokens;
  const which = isCut(tokens) ? `the first ${grouped(pieces.length)} of the row's ${grouped(total)} tokens` : "tokens of the row";
  if (isExample) return `${which}, prompt included; grey ones are not learned from`;
  return `${which}, prompt included; ${isEpisode ? "frames are turns of the policy, and " : ""}grey ones are masked: the policy did not sample them`;
}

/** Return the tokens of a row. A run of sampled ones is a turn of the policy; the others were given to it. Turns have their numbers in the episode and their rewards, where these are recorded. */
function tokenText(tokens, isEpisode, turns, coloring) {
  const [pieces, mask] = tokens;
  const ends = new Set(turns.map(([, end]) => end));
  const parts = [];
  let begun = 0;
  pieces.forEach((_, i) => {
    if (i === 0 || mask[i] !== mask[i - 1] || ends.has(i - 1)) {
      if (mask[i]) begun++;
      const kind = mask[i] ? (isEpisode ? "sampled turn" : "sampled") : begun ? "given between" : "given";
      parts.push(element("span", { class: kind, "data-turn": mask[i] && isEpisode ? turnTitle(turns, begun) : null }));
    }
    parts.at(-1).append(tokenSpan(tokens, i, coloring));
  });
  return element("p", { class: "text-block" }, ...parts);
}

function turnTitle(turns, begun) {
  if (!turns.length) return begun;
  const [number, , reward] = turns[begun - 1];
  return `${number + 1}, reward ${short(reward)}`;
}

function tokenSpan(tokens, i, coloring) {
  const [pieces, mask, sampler, trainer, advantages, versions, , losses] = tokens;
  const span = element("span", {}, visible(pieces[i]));
  const strength = strengthOf(tokens, i, coloring);
  if (strength !== null) {
    const share = Math.round(70 * Math.abs(strength));
    span.style.background = `color-mix(in srgb, var(--series-${strength < 0 ? 1 : 0}) ${share}%, transparent)`;
  }
  if (!mask[i]) return span;
  const thousandths = (value) => (value === null ? "–" : (value / 1000).toFixed(3));
  if (losses[i] !== null) span.title = `loss ${thousandths(losses[i])}`;
  else if (sampler[i] !== null) span.title = `log-prob ${thousandths(sampler[i])}, of the trainer ${thousandths(trainer[i])}, advantage ${thousandths(advantages[i])}, version ${versions[i]}`;
  return span;
}

function coloringScale(coloring) {
  const texts = {
    logProb: ["certain", "log-prob of −4 or less", "transparent", "series-1"],
    difference: ["−0.5", "+0.5", "series-1", "series-0"], advantage: ["−2", "+2", "series-1", "series-0"],
    version: ["even", "odd versions", "series-1", "series-0"], loss: ["0", "loss of 4 or more", "transparent", "series-1"],
  }[coloring];
  if (!texts) return "";
  const [low, high, from, to] = texts;
  const name = (color) => (color === "transparent" ? color : `color-mix(in srgb, var(--${color}) 70%, transparent)`);
  const ramp = element("span", { class: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${name(from)}, transparent, ${name(to)})`;
  if (from === "transparent") ramp.style.background = `linear-gradient(to right, transparent, ${name(to)})`;
  return element("span", { class: "scale" }, low, ramp, high);
}

// Text of models and files reaches the page through textContent alone.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#444444", "#8A6FDF", "#7A9A01", "#A6761D",
  "#E7298A", "#17BECF"];
const AXES = { step: "steps", tokens: "tokens trained", seconds: "training seconds" };
const few = 40; // points up to which each is marked
const DASHES = ["solid", "dash", "dot"];
const PHONE = window.matchMedia("(max-width: 760px)").matches;
const state = { axis: "step", smooth: false, shown: data.runs.map(() => true), drawn: false };

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "dataset") Object.assign(node.dataset, value);
    else if (name.startsWith("aria-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

function layout(extra = {}) {
  const base = {
    margin: { l: 52, r: 10, t: 6, b: 36 }, font: { size: 12, color: "#1b1f24" }, showlegend: false,
    hovermode: "closest", dragmode: PHONE ? false : "zoom", paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    xaxis: { gridcolor: "#eaeef2", zeroline: false, title: { text: AXES[state.axis], standoff: 4 } },
    yaxis: { gridcolor: "#eaeef2", zeroline: false },
  };
  for (const [name, value] of Object.entries(extra)) {
    base[name] = typeof value === "object" && base[name] ? { ...base[name], ...value } : value;
  }
  return base;
}
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

function plot(node, traces, settings, nothing) {
  if (!traces.length) {
    Plotly.purge(node);
    node.replaceChildren(make("div", { className: "empty" }, nothing));
    return;
  }
  if (!node.querySelector(".js-plotly-plot, .plot-container")) node.replaceChildren();
  Plotly.react(node, traces, settings, CONFIG);
}

// Exponential mean with a weight of 0.1 for each new point, started without a bias towards zero; gaps stay gaps.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = 0.9 * sum + 0.1 * value;
    weight = 0.9 * weight + 0.1;
    return sum / weight;
  });
}

function line(run, index, name, meaning, order) {
  const found = run.series[name];
  if (!found) return null;
  const [places, values] = found;
  return {
    x: places.map((i) => run.x[state.axis][i]), y: state.smooth && places.length > few ? smoothed(values) : values, name: plain(run.name), type: "scatter",
    mode: places.length <= few ? "lines+markers" : "lines", connectgaps: false,
    line: { color: COLOURS[index % COLOURS.length], width: order ? 1.3 : 1.8, dash: DASHES[order] },
    marker: { size: 5 }, opacity: order ? 0.8 : 1,
    hovertemplate: `%{fullData.name}<br>${meaning}: %{y:.5g}<br>${AXES[state.axis]}: %{x}<extra></extra>`,
  };
}

function drawPanels() {
  data.panels.forEach(({ series, scale }, number) => {
    const traces = data.runs.flatMap((run, index) =>
      state.shown[index] ? series.map(([name, meaning], order) => line(run, index, name, meaning, order)) : []).filter(Boolean);
    plot(document.getElementById(`panel-${number}`), traces, layout({ yaxis: { type: scale } }), "no values");
  });
  drawStages();
}

function drawStages() {
  const runs = data.runs.filter((run, i) => state.shown[i] && Object.keys(run.stages).length);
  const stages = [...new Set(runs.flatMap((run) => Object.keys(run.stages)))];
  const palette = ["#4C78A8", "#F58518", "#54A24B", "#B279A2", "#E45756", "#72B7B2", "#EECA3B", "#9D755D", "#BAB0AC"];
  const traces = stages.map((stage, i) => ({
    type: "bar", orientation: "h", name: stage, y: runs.map((run) => plain(run.name)), x: runs.map((run) => run.stages[stage] || 0),
    marker: { color: palette[i % palette.length] }, hovertemplate: `%{y}<br>${stage}: %{x:.4g} s<extra></extra>`,
  }));
  const height = Math.max(PHONE ? 220 : 250, 24 * runs.length + 120);
  document.getElementById("stages").style.height = `${height}px`;
  plot(document.getElementById("stages"), runs.length ? traces : [], layout({
    barmode: "stack", showlegend: true, legend: { orientation: "h", font: { size: 11 }, y: -34 / (height - 106), yanchor: "top" },
    xaxis: { title: { text: "" } }, margin: { l: runs.length > 1 ? 110 : 20, r: 10, t: 6, b: 100 },
    yaxis: { automargin: false, showticklabels: runs.length > 1, tickmode: "array", tickvals: runs.map((run) => plain(run.name)),
      ticktext: runs.map((run) => plain(shorten(run.name, 15))) },
  }), "no values");
}

// Plotly reads a little HTML in labels; a name is no HTML.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const wrap = (text, width) => text.split(" ").reduce((lines, word) =>
  (lines.at(-1).length + word.length < width ? [...lines.slice(0, -1), `${lines.at(-1)} ${word}`.trim()] : [...lines, word]), [""])
  .map(plain).join("<br>");
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

function drawSelection() {
  const run = data.runs[Number(document.getElementById("selection-run").value)];
  if (!run) return;
  const chosen = run.selection;
  const names = Object.keys(chosen.reasons).sort((a, b) => (b === "kept") - (a === "kept"));
  const greys = ["#0072B2", "#c7d0d9", "#E69F00", "#CC79A7", "#8a939c", "#56B4E9"];
  const single = chosen.steps.length === 1;
  const axis = { title: { text: "step" } };
  if (single) axis.dtick = 1;
  plot(document.getElementById("reasons"), names.map((name, i) => ({
    x: chosen.steps, y: chosen.reasons[name], name: wrap(name, PHONE ? 36 : 70), type: single ? "bar" : "scatter", mode: "none", stackgroup: single ? undefined : "all",
    fillcolor: greys[i % greys.length], marker: { color: greys[i % greys.length] },
    hovertemplate: "%{fullData.name}<br>step %{x}: %{y:.1%}<extra></extra>",
  })), layout({ showlegend: true, barmode: "stack", xaxis: axis, yaxis: { range: [0, 1], tickformat: ".0%" },
    legend: { orientation: "h", font: { size: 11 }, y: 1, yanchor: "bottom", traceorder: "normal" }, margin: { l: 52, r: 10, t: PHONE ? 76 : 44, b: 36 } }), "no audit");
  const heights = chosen.all.map((row) => { const total = row.reduce((a, b) => a + b, 0) || 1; return row.map((n) => n / total); });
  // The first and the last bin stand for everything below and above.
  const centres = [data.edges[0] / 1.15, ...data.edges.slice(1).map((e, i) => Math.sqrt(e * data.edges[i])), data.edges.at(-1) * 1.15];
  const used = centres.map((_, bin) => heights.some((row) => row[bin] > 0));
  const low = Math.max(1, used.indexOf(true, 1)), high = Math.max(low + 1, used.lastIndexOf(true));
  const traces = chosen.steps.length ? [{
    type: "heatmap", x: chosen.steps, y: centres.slice(low, high + 1), z: centres.slice(low, high + 1).map((_, i) => heights.map((row) => row[low + i])),
    colorscale: [[0, "#ffffff"], [1, "#b4460f"]], showscale: false, hovertemplate: "step %{x}<br>score %{y:.3g}<br>%{z:.1%} of the tokens<extra></extra>",
  }] : [];
  if (chosen.threshold.some((value) => value > 0)) {
    traces.push({ type: "scatter", mode: chosen.steps.length <= few ? "lines+markers" : "lines", x: chosen.steps,
      y: chosen.threshold.map((value) => (value > 0 ? value : null)), name: "threshold", line: { color: "#0b3d66", width: 2 },
      hovertemplate: "step %{x}<br>lowest kept score %{y:.4g}<extra></extra>" });
  }
  plot(document.getElementById("scores"), traces, layout({ xaxis: axis,
    yaxis: { type: "log", title: { text: "abs(A) x H", standoff: 2 }, nticks: 6 }, margin: { l: 60, r: 10, t: 44, b: 36 } }), "no audit");
}

function fill(select, labels, keep) {
  const before = select.selectedIndex;
  select.replaceChildren(...labels.map((label, i) => make("option", { value: String(i) }, label)));
  select.selectedIndex = keep && before >= 0 ? Math.min(before, labels.length - 1) : labels.length ? 0 : -1;
}

const pick = (id) => document.getElementById(id);
const signed = (value) => (value === null ? "-" : (value > 0 ? "+" : "") + value.toFixed(3));

function drawBrowser() {
  const run = data.runs[pick("token-run").selectedIndex];
  const step = run && run.tokens[pick("token-step").selectedIndex];
  const prompt = step && step.prompts[pick("token-prompt").selectedIndex];
  const list = pick("rollouts");
  if (!prompt) {
    pick("prompt").textContent = "";
    list.replaceChildren(make("div", { className: "row head" }, ""));
    list.firstChild.textContent = "This run's audit holds no tokens (audit.tokens_every).";
    pick("facts").textContent = pick("tokens").textContent = "";
    plot(pick("histogram"), [], {}, "no tokens");
    return;
  }
  pick("prompt").replaceChildren(make("span", { className: "mark" }, "prompt "), prompt.text || prompt.id,
    make("span", { className: "mark" }, "\nreference answer "), prompt.answer);
  const cell = (text, name = "num") => make("span", { className: name }, text);
  list.replaceChildren(make("div", { className: "row head" }, cell("#"), cell("reward"), cell("kept, or why not", ""), cell("advantage"), cell("tokens")),
    ...prompt.rollouts.map((rollout, i) => make("button", {
      type: "button", className: "row" + (rollout.kept ? "" : " dropped"), role: "option", "aria-selected": "false",
      onclick: () => show(step, prompt, i),
    }, cell(String(i + 1)), cell(rollout.reward === null ? "none" : String(rollout.reward)), cell(rollout.reason, ""),
      cell(signed(rollout.advantage), "num " + (rollout.advantage > 0 ? "plus" : rollout.advantage < 0 ? "minus" : "")),
      cell(rollout.kept ? `${rollout.num_kept_tokens}/${rollout.length}` : String(rollout.length)))));
  const kept = prompt.rollouts.map((rollout) => rollout.num_kept_tokens);
  show(step, prompt, kept.indexOf(Math.max(...kept)));
  drawHistogram(step);
}

function highest(step) {
  const all = step.prompts.flatMap((prompt) => prompt.rollouts.flatMap((rollout) => rollout.score || []));
  return all.reduce((a, b) => Math.max(a, b ?? 0), 0) || 1;
}

function show(step, prompt, index) {
  const rollout = prompt.rollouts[index];
  pick("rollouts").querySelectorAll("button").forEach((row, i) => row.setAttribute("aria-selected", String(i === index)));
  if (!rollout) { pick("tokens").textContent = ""; pick("facts").textContent = ""; return; }
  const bold = (text) => make("b", {}, text);
  pick("facts").replaceChildren("Rollout ", bold(String(index + 1)), " of ", bold(prompt.id), ": ", bold(rollout.status),
    `, reward ${rollout.reward === null ? "none" : rollout.reward}, advantage ${signed(rollout.advantage)}, ${rollout.length} tokens` +
    `${rollout.truncated ? ", cut at the length limit" : ""}; `, bold(rollout.kept ? `kept, ${rollout.num_kept_tokens} tokens trained on` : rollout.reason),
    `. Step ${step.step}: N ${step.N}, rho ${step.rho}.`);
  const most = highest(step);
  pick("tokens").replaceChildren(...rollout.pieces.map((piece, i) => {
    const score = rollout.score ? rollout.score[i] : null;
    const kept = rollout.mask ? rollout.mask[i] === "1" : false;
    const node = make("span", { className: "token" + (kept ? " kept" : "") + (rollout.score ? "" : " dim"),
      title: rollout.score ? `score ${score ?? "none"}, entropy ${rollout.entropy[i] ?? "none"}, ${kept ? "trained on" : "not trained on"}` : "not scored" });
    if (score !== null) node.style.setProperty("--s", String(Math.sqrt(Math.min(1, score / most)).toFixed(3)));
    if (piece === "") node.append(make("span", { className: "mark" }, "·"));
    else piece.split("\n").forEach((part, j) => { if (j) node.append(make("span", { className: "mark" }, "↵"), "\n"); node.append(part); });
    return node;
  }));
}

function drawHistogram(step) {
  const { all, kept } = step.histogram;
  const used = all.map((n, i) => (n > 0 ? i : -1)).filter((i) => i >= 0);
  const low = Math.min(...used), high = Math.max(...used);
  const label = (i) => (i === 0 ? `below ${data.edges[0]}` : i === all.length - 1 ? `above ${data.edges.at(-1)}`
    : `${data.edges[i - 1].toPrecision(2)} to ${data.edges[i].toPrecision(2)}`);
  const bins = used.length ? Array.from({ length: high - low + 1 }, (_, i) => low + i).filter((i) => i > 0 || all[0] > 0) : [];
  const shown = bins.filter((i) => i === 0 || i >= Math.max(1, used.find((j) => j > 0) ?? 1));
  const bar = (counts, name, color) => ({ type: "bar", name, x: shown.map(label), y: shown.map((i) => counts[i]), marker: { color },
    hovertemplate: `%{x}<br>%{y} tokens ${name}<extra></extra>` });
  const rest = all.map((n, i) => n - kept[i]);
  plot(pick("histogram"), used.length ? [bar(kept, "trained on", "#b4460f"), bar(rest, "not trained on", "#e7c3ae")] : [],
    layout({ barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.14, font: { size: 11 } }, margin: { l: 52, r: 10, t: 18, b: 78 },
      xaxis: { title: { text: "" }, tickangle: 40, tickfont: { size: 10 }, automargin: false, nticks: 14 }, yaxis: { title: { text: "tokens", standoff: 2 } } }), "no scored tokens");
}

function table(node, heading, rows, marked = new Set()) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((text) => make(tag, {}, text)));
  const body = rows.map((cells) => row(cells, "td"));
  body.forEach((line, i) => { if (marked.has(i)) line.className = "ours"; });
  node.replaceChildren(make("table", {}, make("thead", {}, row(heading, "th")), make("tbody", {}, ...body)));
}

function start() {
  const said = data.runs.map((run) => `${run.name}: ${run.algorithm}, ${run.steps_done} of ${run.steps} steps`);
  pick("about").textContent = [`${data.made}`, ...said.slice(0, 8), ...(said.length > 8 ? [`and ${said.length - 8} more`] : []),
    ...(data.skipped ? [`left out, as unreadable: ${data.skipped}`] : [])].join("\n");
  pick("runs").append(...data.runs.map((run, i) => make("button", { type: "button", "aria-pressed": "true", title: run.name,
    onclick: (event) => { state.shown[i] = !state.shown[i]; event.currentTarget.setAttribute("aria-pressed", String(state.shown[i])); drawPanels(); } },
    Object.assign(make("i"), { style: `background:${COLOURS[i % COLOURS.length]}` }), run.name)));
  pick("axis").append(...Object.entries(AXES).map(([axis, label]) => make("button", { type: "button", "aria-pressed": String(axis === state.axis),
    dataset: { axis }, onclick: () => {
      state.axis = axis;
      pick("axis").querySelectorAll("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === axis)));
      drawPanels();
    } }, label)));
  pick("axis").append(make("button", { type: "button", id: "smooth", "aria-pressed": "false", onclick: (event) => {
    state.smooth = !state.smooth;
    event.currentTarget.setAttribute("aria-pressed", String(state.smooth));
    drawPanels();
  } }, "smooth"));
  pick("panels").append(...data.panels.map(({ title, series }, number) => make("div", {}, make("h3", {}, title),
    make("div", { className: "key" }, series.map(([, meaning], i) => `${["—", "- -", "···"][i]} ${meaning}`).join("   ")),
    make("div", { className: "plot", id: `panel-${number}` }))),
    make("div", {}, make("h3", {}, "Seconds by stage"), make("div", { className: "key" }, "mean over the steps"), make("div", { className: "plot", id: "stages" })));
  drawPanels();
  const names = data.runs.map((run) => run.name);
  fill(pick("selection-run"), names);
  fill(pick("token-run"), names);
  pick("selection-run").onchange = drawSelection;
  const steps = (keep) => { const run = data.runs[pick("token-run").selectedIndex]; fill(pick("token-step"), run ? run.tokens.map((t) => `${t.step}`) : [], keep); };
  const prompts = (keep) => {
    const run = data.runs[pick("token-run").selectedIndex], step = run && run.tokens[pick("token-step").selectedIndex];
    fill(pick("token-prompt"), step ? step.prompts.map((p) => `${p.id}: ${p.rollouts.filter((r) => r.kept).length} of ${p.rollouts.length} kept`) : [], keep);
  };
  pick("token-run").onchange = () => { steps(true); prompts(false); drawBrowser(); };
  pick("token-step").onchange = () => { prompts(true); drawBrowser(); };
  pick("token-prompt").onchange = drawBrowser;
  const full = data.runs.findIndex((run) => run.tokens.length);
  if (full > 0) pick("token-run").selectedIndex = full;
  steps(false);
  pick("token-step").selectedIndex = pick("token-step").options.length - 1;
  prompts(false);
  // The first look is at a prompt that has signal.
  const newest = full >= 0 ? data.runs[full].tokens.at(-1).prompts : [];
  const signal = newest.map((p) => p.rollouts.reduce((sum, r) => sum + (r.kept ? Math.abs(r.advantage) * r.num_kept_tokens : 0), 0));
  if (signal.length) pick("token-prompt").selectedIndex = signal.indexOf(Math.max(...signal));
  drawSelection();
  drawBrowser();
  table(pick("settings-table"), ["setting", ...names], data.settings);
  const { columns, paper, ours, notes } = data.paper;
  table(pick("paper-table"), ["", ...columns], [...paper, ...ours], new Set(ours.map((_, i) => paper.length + i)));
  pick("paper-notes").append(...notes.map((note) => make("li", {}, note)));
  document.documentElement.dataset.ready = "true";
}
start();

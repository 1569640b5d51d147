"use strict";
// Draws the page from the deflated JSON in #data. All text goes in as text: nothing is parsed as HTML.
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(plain).json();
  const runs = data.runs;
  const tablesOf = [...data.tables, ...data.varied];
  const form = document.getElementById("filters");
  const dialog = document.getElementById("dialog");
  const MANY_TABLES = 12;
  const DASH = "–";
  let showAll = false;
  const unfolded = new Set(); // names of the tables of variants that are open

  // ------------------------------------------------------------------------------ helpers

  const make = (create) => (tag, attributes = {}, ...children) => {
    const element = create(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== ""));
    return element;
  };
  const h = make((tag) => document.createElement(tag));
  const svg = make((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const unique = (values) => [...new Set(values)].sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const megabytes = (bytes) =>
    bytes >= 1e5 || bytes === 0 ? `${(bytes / 1e6).toFixed(2)} MB` : `${(bytes / 1e3).toFixed(2)} kB`;
  const seconds = (value) => (typeof value === "number" ? `${value.toFixed(value < 10 ? 3 : 1)} s` : DASH);

  // -------------------------------------------------------------------------------- state

  const DEFAULTS = {
    dataset: "", protocol: "", recipe: "", metric: "", split: "test",
    rule: "last", q: "", published: "1", sort: "", dir: "", cell: "",
  };
  let state = {...DEFAULTS};

  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    state = {...DEFAULTS};
    for (const name of Object.keys(DEFAULTS)) if (given.has(name)) state[name] = given.get(name);
    for (const select of form.querySelectorAll("select")) {
      const known = [...select.options].some((option) => option.value === state[select.name]);
      if (!known) state[select.name] = DEFAULTS[select.name];
    }
  }

  function address() {
    const said = new URLSearchParams();
    for (const [name, value] of Object.entries(state)) if (value !== DEFAULTS[name]) said.set(name, value);
    return `#${said}`;
  }

  function change(values, keep = false) {
    state = {...state, ...values};
    history[keep ? "pushState" : "replaceState"](null, "", address());
    draw();
  }

  // ------------------------------------------------------------------------------ filters

  function fillFilters() {
    const put = (name, options) => form.elements[name].append(
      ...options.map(([value, text]) => h("option", {value}, text)));
    for (const name of ["dataset", "protocol", "recipe"]) {
      const values = unique(data.tables.map((table) => table[name]));
      put(name, [["", "all"], ...values.map((v) => [v, data.titles[name]?.[v] ?? v])]);
    }
    const own = unique(data.tables.map((table) => table.metric));
    const units = Object.fromEntries(data.tables.flatMap((table) => table.views).map((view) => [view.metric, view.unit]));
    put("metric", [
      ["", own.length === 1 ? metricText(own[0], units[own[0]]) : "each data set's own"],
      ...data.measured.filter((metric) => own.length > 1 || metric !== own[0])
        .map((metric) => [metric, metricText(metric, units[metric])]),
    ]);
    put("split", data.splits.map((split) => [split, split]));
    put("rule", data.rules.map(([rule]) => [rule, rule === "oracle" ? "oracle (looks at test)" : rule]));
    const {method, dataset} = data.titles;
    document.getElementById("summary").textContent = `${count(runs.length, "run")} of ` +
      `${count(Object.keys(method).length, "method")} on ${unique(Object.values(dataset)).join(", ")}`;
    document.getElementById("order").textContent = data.tables.length > 1 ? data.order : "";
  }

  const SPLITS = {
    test: "images of the held-out test domain", val: "images of the held-out validation domain",
    id_test: "held-out images of the training domains", id_val: "held-out images of the training domains",
  };

  function showFilters() {
    for (const element of form.elements) {
      if (element.type === "checkbox") element.checked = state[element.name] === "1";
      else if (element.name in state) element.value = state[element.name];
    }
    const cost = state.metric === "cost";
    form.elements.split.disabled = form.elements.rule.disabled = cost;
    const sentence = data.rules.find(([rule]) => rule === state.rule)[1];
    const said = document.getElementById("rule");
    said.textContent = cost ? "Mean over all rounds." : `Split ${state.split}: ${SPLITS[state.split]}. Rule ${state.rule}: ${sentence}.`;
    said.className = !cost && state.rule === "oracle" ? "warning" : "";
  }

  form.addEventListener("input", (event) => {
    const element = event.target;
    const value = element.type === "checkbox" ? (element.checked ? "1" : "0") : element.value;
    showAll = false;
    change({[element.name]: value});
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    change({...DEFAULTS});
  });

  // ------------------------------------------------------------------------------- tables

  function fitting() {
    return data.tables.filter((table) =>
      ["dataset", "protocol", "recipe"].every((name) => !state[name] || state[name] === table[name]));
  }

  const metricText = (metric, unit) => `${data.names[metric]}${unit ? ` in ${unit}` : ""}`;

  function viewOf(table) {
    const metric = state.metric || table.metric;
    return table.views.find((view) =>
      view.metric === metric && (view.rule === null || view.rule === state.rule));
  }

  function splitOf(view) {
    return view.splits.find((split) => view.metric === "cost" || split.split === state.split);
  }

  const valueOf = (cell) => parseFloat(cell.text.replace("<", ""));

  function sortedRows(table, part, view) {
    const words = state.q.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const places = table.rows.map((_, n) => n).filter((n) =>
      !words.length || words.some((word) => table.rows[n].label.toLowerCase().includes(word)));
    const names = part.columns.map((column) => column.name);
    const mean = names.find((name) => name === "iqm" || name === "mean");
    const sort = state.sort || (mean ?? (table.name === table.setup ? names[0] : "method"));
    const column = names.indexOf(sort);
    const natural = column < 0 ? "asc" : naturally(sort, view);
    const direction = state.dir === "asc" || state.dir === "desc" ? state.dir : natural;
    const sign = direction === "asc" ? 1 : -1;
    const label = (n) => table.rows[n].label;
    places.sort((a, b) => {
      const byLabel = label(a).localeCompare(label(b), "en", {numeric: true});
      if (column < 0) return sign * byLabel;
      const [x, y] = [valueOf(part.cells[a][column]), valueOf(part.cells[b][column])];
      if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || byLabel; // missing ones last
      return sign * (x - y) || byLabel;
    });
    return {places, sort: column < 0 ? "method" : sort, direction};
  }

  // The best number is on top.
  const naturally = (name, view) => (name === "method" || name === "p_value" || name === "p_same" || view.lower ? "asc" : "desc");

  function sortHead(name, text, below, sorted, view) {
    const current = sorted.sort === name;
    const next = current ? (sorted.direction === "asc" ? "desc" : "asc") : naturally(name, view);
    const arrow = current ? (sorted.direction === "asc" ? "▲" : "▼") : "";
    return h("th", {
      scope: "col",
      "aria-sort": current ? (sorted.direction === "asc" ? "ascending" : "descending") : "none",
    }, h("button", {
      type: "button", class: "sort", "data-sort": name,
      onclick: () => change({sort: name, dir: next}),
    }, h("span", {}, name === "method" ? text : "", h("span", {class: "arrow", "aria-hidden": "true"}, arrow),
      name === "method" ? "" : text),
    below ? h("small", {}, below) : null));
  }

  // A test supports each mark: see `bold` in the tables.
  function drawCell(table, row, name, cell) {
    const {text, mark, footnotes, published, source, gap} = cell;
    let number = text;
    const best = mark === "best";
    if (best) number = h("b", {}, text);
    if (mark === "second") number = h("u", {}, text);
    const button = h("button", {
      type: "button", class: "cell", "data-cell": JSON.stringify([table.name, row.label, name]),
      "aria-haspopup": "dialog",
      onclick: (event) => change({cell: event.currentTarget.dataset.cell}, true),
    }, best ? h("span", {class: "star", role: "img", "aria-label": "best: "}, "★ ") : null, number, footnotes ? h("sup", {}, footnotes.map((n) => n + 1).join(",")) : null);
    const beside = state.published === "1" && published
      ? h("span", {class: "published", title: source},
        `paper ${published}`, gap ? ` (${gap.replace("-", "−")})` : "")
      : null;
    return h("td", {class: best ? "top" : null}, button, beside);
  }

  function drawTable(table) {
    const view = viewOf(table);
    const part = view && splitOf(view);
    const {title} = table;
    const folded = table.name !== table.setup;
    const section = h(folded ? "div" : "section", {class: "table"}, folded ? null : h("h2", {}, title));
    if (!part) {
      section.append(h("p", {}, `Nothing to show: these runs have no such metric, no split ${state.split}, or ` +
        `none that rule ${state.rule} can choose by.`));
      section.append(...(folded ? [] : drawVaried(table)));
      return section;
    }
    const sorted = sortedRows(table, part, view);
    const head = h("tr", {}, sortHead("method", "method", "", sorted, view),
      part.columns.map(({name, head, below}) => sortHead(name, head, head.includes(below) ? "" : below, sorted, view)));
    const body = sorted.places.map((n) => {
      const row = table.rows[n];
      const own = view.rows[n].map((note) => note + 1).join(",");
      return h("tr", {}, h("th", {scope: "row"}, row.label, own ? h("sup", {}, own) : null),
        part.columns.map(({name}, c) => drawCell(table, row, name, part.cells[n][c])));
    });
    section.append(
      h("div", {class: "wide", tabindex: "0", role: "region", "aria-label": `Table ${title}`},
        h("table", {"data-table": table.name},
          h("thead", {}, head), h("tbody", {}, body))));
    if (!body.length) section.append(h("p", {}, `No method's name holds ${state.q}.`));
    const used = part.cells.some((row) => row.some((cell) => cell.published)) && state.published === "1";
    const cells = sorted.places.flatMap((n) => part.cells[n]);
    const marks = new Set([...cells.flatMap((cell) => cell.footnotes ?? []), ...view.rows.flat()]);
    const notes = [
      ...view.footnotes.map((said, n) => (marks.has(n) ? h("li", {}, h("sup", {}, n + 1), ` ${said}.`) : null)),
      ...view.notes.filter((said) => used || !said.startsWith("Published:")).map((said) => h("li", {}, said)),
    ].filter(Boolean);
    const star = cells.some((cell) => cell.mark === "best") ? " ★ better than every other row." : "";
    section.append(h("details", {class: "notes"},
      h("summary", {}, h("span", {class: "caption"}, view.caption + star), " ", h("span", {class: "more"}, "more")),
      h("ul", {}, notes)));
    if (!folded) section.append(...drawVaried(table));
    return section;
  }

  // What was varied is drawn when it is opened.
  function drawVaried(main) {
    return data.varied.filter((table) => table.setup === main.setup && table.rows.length).map((table) => {
      const details = h("details", {class: "varied"},
        h("summary", {}, `What was varied: ${count(table.rows.length, "row")}`));
      const fill = () => { if (details.children.length === 1) details.append(drawTable(table)); };
      if (unfolded.has(table.name)) {
        details.open = true;
        fill();
      }
      details.addEventListener("toggle", () => {
        unfolded[details.open ? "add" : "delete"](table.name);
        fill();
      });
      return details;
    });
  }

  function drawTables() {
    const main = document.getElementById("tables");
    const focused = document.activeElement?.dataset?.sort;
    const tableOf = (element) => element?.closest("table")?.dataset.table;
    const within = focused && tableOf(document.activeElement);
    const left = new Map([...main.querySelectorAll(".wide")].map((box) =>
      [box.firstElementChild.dataset.table, box.scrollLeft]));
    const tables = fitting();
    const shown = showAll ? tables : tables.slice(0, MANY_TABLES);
    main.replaceChildren(...shown.map(drawTable));
    const rest = tables.length - shown.length;
    if (rest) {
      main.append(h("p", {}, h("button", {type: "button", onclick: () => { showAll = true; draw(); }},
        `Show ${rest} more`)));
    }
    document.getElementById("status").textContent = tables.length
      ? `${tables.length} of ${count(data.tables.length, "table")}`
      : "No table fits these filters.";
    for (const box of main.querySelectorAll(".wide")) {
      box.scrollLeft = left.get(box.firstElementChild.dataset.table) ?? 0;
    }
    if (focused) {
      const heads = [...main.querySelectorAll("button.sort")].filter((b) => b.dataset.sort === focused);
      (heads.find((button) => tableOf(button) === within) ?? heads[0])?.focus({preventScroll: true});
    }
  }

  // ------------------------------------------------------------------------------- charts

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step);
    return found;
  }

  // series: [{name, colour: 0.., points: [[round, value]], marks: [[round, value]]}]
  function chart(series, label, width) {
    const points = series.flatMap((one) => one.points);
    if (!points.length) return h("p", {}, "No round was evaluated on this split.");
    const height = 250;
    const box = {left: 46, right: 12, top: 10, bottom: 38};
    let [x0, x1] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
    let [y0, y1] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    if (y0 === y1) [y0, y1] = [y0 - 1, y1 + 1];
    const pad = (y1 - y0) * 0.06;
    [y0, y1] = [y0 - pad, y1 + pad];
    const x = (value) => box.left + ((value - x0) / (x1 - x0)) * (width - box.left - box.right);
    const y = (value) => height - box.bottom - ((value - y0) / (y1 - y0)) * (height - box.top - box.bottom);
    const at = ([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`;
    const said = (value) => String(+value.toPrecision(6));
    const grid = ticks(y0, y1, 5).map((value) => [
      svg("line", {class: "grid", x1: box.left, x2: width - box.right, y1: y(value), y2: y(value)}),
      svg("text", {x: box.left - 6, y: y(value) + 4, "text-anchor": "end"}, said(value)),
    ]);
    const below = ticks(x0, x1, Math.max(3, Math.floor(width / 90))).filter(Number.isInteger).map((value) =>
      svg("text", {x: x(value), y: height - box.bottom + 16, "text-anchor": "middle"}, said(value)));
    const lines = series.map((one) => [
      svg("polyline", {class: `line c${one.colour % 8}`, points: one.points.map(at).join(" ")}),
      ...(one.points.length < 25 ? one.points : []).map((point) =>
        svg("circle", {class: `dot c${one.colour % 8}`, cx: x(point[0]), cy: y(point[1]), r: 2})),
      one.marks.length === 1
        ? svg("circle", {class: `chosen c${one.colour % 8}`, cx: x(one.marks[0][0]), cy: y(one.marks[0][1]), r: 5})
        : svg("polyline", {class: `chosen c${one.colour % 8}`, points: one.marks.map(at).join(" ")}),
    ]);
    const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label},
      grid.flat(), below,
      svg("text", {x: (box.left + width - box.right) / 2, y: height - 4, "text-anchor": "middle"}, "round"),
      lines.flat());
    const named = new Map(series.map((one) => [one.name, one.colour]));
    const legend = h("ul", {class: "legend"}, [...named].map(([name, colour]) =>
      h("li", {}, svg("svg", {class: "key", width: 34, height: 8, "aria-hidden": "true"},
        svg("line", {class: `line c${colour % 8}`, x1: 0, x2: 34, y1: 4, y2: 4})), name)));
    return h("figure", {class: "chart"}, h("figcaption", {}, label), picture, legend);
  }

  function curve(run, split, metric) {
    const values = run.curves[split][metric] ?? [];
    return run.evaluated.map((round, n) => [round, values[n] ?? null]).filter((p) => p[1] !== null);
  }

  const chosen = (run) => run.chosen[state.rule].map((place) => run.evaluated[place]);
  const chosenText = (run) => {
    const rounds = chosen(run);
    return rounds.length > 1 ? `${rounds[0]} to ${rounds.at(-1)}` : String(rounds[0] ?? DASH);
  };

  // The points that the rule takes, each at the height of their mean.
  function chosenPoints(run, points) {
    const rounds = chosen(run);
    const found = points.filter((point) => rounds.includes(point[0]));
    const mean = found.reduce((sum, point) => sum + point[1], 0) / found.length;
    return found.length === rounds.length ? found.map((point) => [point[0], mean]) : [];
  }

  // ------------------------------------------------------------------------------- dialog

  const scenarioText = ({train, val, test}) =>
    `${train.join(", ")} → ${[val, test].filter((domain) => domain !== null).join(" → ")}`;

  function facts(pairs) {
    return h("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {class: String(value).length > 40 ? "long" : null}, h("dt", {}, name), h("dd", {}, value instanceof Node ? value : String(value)))));
  }

  function simpleTable(heads, rows, label) {
    return h("div", {class: "wide", tabindex: "0", role: "region", "aria-label": label},
      h("table", {class: "plain"},
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", {scope: "col"}, head)))),
        h("tbody", {}, rows.map(([first, ...cells]) =>
          h("tr", {}, h("th", {scope: "row"}, first), cells.map((cell) => h("td", {}, cell)))))));
  }

  function settingsOf(table) {
    const common = new Map();
    const setups = new Set(table.rows.flatMap((row) => row.runs.map((n) => runs[n].setup)));
    for (const place of setups) {
      for (const [key, value] of data.setups[place].settings) {
        if (!common.has(key)) common.set(key, new Map());
        common.get(key).set(value, (common.get(key).get(value) ?? 0) + 1);
      }
    }
    return new Map([...common].map(([key, votes]) =>
      [key, [...votes].reduce((best, vote) => (vote[1] > best[1] ? vote : best))[0]]));
  }

  function drawRun(run, table, view, width, usual, open) {
    const setup = data.setups[run.setup];
    const {scenario, environment} = run;
    const [up, down, upOnce, downOnce] = run.bytes;
    const own = setup.settings.filter(([key, value]) =>
      key.startsWith("hyper.") || usual.get(key) !== value);
    const pair = ([key, value]) => h("li", {}, h("code", {}, `${key}=${value}`));
    // Costs are no curve: beside them stands the data set's own metric.
    const metric = view.metric === "cost" ? table.metric : view.metric;
    const unit = table.views.find((one) => one.metric === metric).unit;
    const series = data.splits.map((split, n) => {
      const points = curve(run, split, metric);
      return {name: split, colour: n, points, marks: chosenPoints(run, points)};
    }).filter((one) => one.points.length);
    const drops = run.drops.map(([round, client, tensor]) => `round ${round}: ${client} (${tensor})`);
    const body = () => [
      facts([
        ["method", `${data.titles.method[setup.method]}, version ${setup.version}`],
        ["scenario", `${scenario.name}: ${scenarioText(scenario)}`],
        ["seed", run.seed],
        ["rounds", `${run.rounds}${run.skipped ? `, ${run.skipped} of them skipped` : ", none skipped"}`],
        ["chosen round", state.metric === "cost" ? null : `${chosenText(run)} (rule ${state.rule})`],
        ["clients", run.clients],
        ["dropped clients", run.dropped ? `${run.dropped}: ${drops.join(", ")}${run.dropped > drops.length ? ", …" : ""}` : "none"],
        ["bytes up", `${megabytes(up)} a round${upOnce ? `, ${megabytes(upOnce)} before round 1` : ""}`],
        ["bytes down", `${megabytes(down)} a round${downOnce ? `, ${megabytes(downOnce)} before round 1` : ""}`],
        ["took", seconds(run.seconds)],
        ["peak memory", typeof run.memory === "number" ? `${run.memory.toFixed(0)} MiB` : null],
        ["started", run.started],
        ["run key", h("code", {}, run.key)],
        ["images", h("code", {}, setup.images)],
        ...Object.entries(environment).map(([name, value]) => [name, name === "commit" ? h("code", {}, value) : value]),
      ]),
      h("h4", {}, "Repeat it"),
      h("pre", {class: "command", tabindex: "0"}, h("code", {}, `${setup.command} --scenario ${scenario.flag} --seeds ${run.seed}`)),
      setup.command.includes("=FILE") || setup.command.includes("[FILE")
        ? h("p", {}, "FILE stands for a file's path; the settings below have the beginning of its SHA-256.") : null,
      chart(series, `${metricText(metric, unit)}, by split; ring or bar: what the rule chooses`, width - 26),
      h("h4", {}, "Seconds"),
      simpleTable(["phase", "a round", "before round 1"],
        run.phases.map(([name, round, once]) => [name, seconds(round), seconds(once)]), "Seconds by phase"),
      h("h4", {}, "Settings of its own"),
      own.length ? h("ul", {class: "settings"}, own.map(pair)) : h("p", {}, "None: all are those of most runs here."),
      h("details", {}, h("summary", {}, `All ${setup.settings.length} settings`),
        h("ul", {class: "settings"}, setup.settings.map(pair))),
    ].filter(Boolean);
    const details = h("details", {class: "run"},
      h("summary", {}, `${scenario.name}, seed ${run.seed}`, " ", h("code", {}, run.key)));
    const fill = () => { if (details.children.length === 1) details.append(...body()); };
    details.addEventListener("toggle", () => { if (details.open) fill(); });
    if (open) { fill(); details.open = true; }
    return details;
  }

  function parsed(text) {
    try {
      const value = JSON.parse(text);
      return Array.isArray(value) ? value : [];
    } catch {
      return [];
    }
  }

  function drawDialog() {
    const [name, label, head] = parsed(state.cell);
    const table = tablesOf.find((one) => one.name === name);
    const n = table ? table.rows.findIndex((row) => row.label === label) : -1;
    const view = table && viewOf(table);
    const part = view && splitOf(view);
    const c = part ? part.columns.findIndex((column) => column.name === head) : -1;
    if (n < 0 || c < 0) return false;
    const [column, cell] = [part.columns[c], part.cells[n][c]];
    const mine = table.rows[n].runs.map((place) => runs[place])
      .filter((run) => !column.scenario || run.scenario.name === column.scenario);
    const costs = state.metric === "cost";
    const metric = metricText(view.metric, view.unit);
    const where = costs ? column.head : `${column.head}, ${state.split}`;
    document.getElementById("dialog-head").textContent = `${label}: ${where}`;
    const body = document.getElementById("dialog-body");
    const width = Math.min(800, Math.max(260, document.documentElement.clientWidth - 56));
    const fill = table.fills.find(([row, scenario]) =>
      row === n && (!column.scenario || scenario === column.scenario) && !costs);
    const shown = [h("p", {class: "number"}, h("b", {}, cell.text),
      ` ${costs ? "" : metric} on ${table.title}`, costs ? "" : `; rule ${state.rule}`)];
    const gap = cell.gap ? `; ours minus published: ${cell.gap.replace("-", "−")}` : "";
    if (cell.published) shown.push(h("p", {}, `Published: ${cell.published} (${cell.source})${gap}. ` +
      "Papers have settings of their own, which may not be those of this recipe."));
    for (const note of cell.footnotes ?? []) shown.push(h("p", {}, `${view.footnotes[note]}.`));
    if (!mine.length) {
      shown.push(h("p", {}, "There is no run yet."));
      if (fill) shown.push(h("p", {}, "This would make it:"), h("pre", {class: "command", tabindex: "0"}, h("code", {}, fill[2])));
    } else {
      if (!costs) {
        const scenarios = unique(mine.map((run) => run.scenario.name));
        const several = scenarios.length > 1;
        const seeds = [...new Set(mine.map((run) => run.seed))];
        shown.push(chart(mine.map((run) => {
          const points = curve(run, state.split, view.metric);
          const colour = several ? scenarios.indexOf(run.scenario.name) : seeds.indexOf(run.seed);
          return {name: several ? run.scenario.name : `seed ${run.seed}`, colour, points, marks: chosenPoints(run, points)};
        }), `${metric} on ${state.split}; ring or bar: what the rule chooses`, width));
      }
      const value = (run) => {
        const [found] = costs ? [] : chosenPoints(run, curve(run, state.split, view.metric));
        return found ? found[1].toFixed(view.unit ? 2 : 3) : DASH;
      };
      shown.push(h("h3", {}, count(mine.length, "run")), simpleTable(
        ["scenario", "seed", ...(costs ? [] : [metric.replace(" in %", ""), "round"]), "up / round", "down / round", "took", "dropped", "skipped", "commit"],
        mine.map((run) => [run.scenario.name, String(run.seed),
          ...(costs ? [] : [value(run), chosenText(run)]),
          megabytes(run.bytes[0]), megabytes(run.bytes[1]), seconds(run.seconds), String(run.dropped),
          String(run.skipped), h("code", {}, run.environment.commit ?? DASH)]),
        "Runs of this number"));
      const usual = settingsOf(table);
      shown.push(...mine.map((run) => drawRun(run, table, view, width, usual, mine.length === 1)));
    }
    body.replaceChildren(...shown);
    return true;
  }

  function syncDialog() {
    const wanted = state.cell !== "" && drawDialog();
    if (wanted && !dialog.open) {
      dialog.showModal();
      dialog.scrollTop = 0;
    }
    if (!wanted && dialog.open) dialog.close();
  }

  window.addEventListener("resize", () => { if (dialog.open) drawDialog(); });
  dialog.addEventListener("close", () => {
    const cell = state.cell;
    if (cell) change({cell: ""});
    [...document.querySelectorAll("button.cell")].find((button) => button.dataset.cell === cell)?.focus();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.getElementById("close").addEventListener("click", () => dialog.close());

  // -------------------------------------------------------------------------------- start

  function draw() {
    showFilters();
    drawTables();
    syncDialog();
  }

  fillFilters();
  const follow = () => {
    if (location.hash === "#tables") return;
    readHash();
    draw();
  };
  window.addEventListener("popstate", follow);
  window.addEventListener("hashchange", follow);
  readHash();
  draw();
  document.body.dataset.drawn = "yes";
})();

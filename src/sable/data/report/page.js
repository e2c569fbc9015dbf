// The page: what the data says, in reading order, and the switches that change what is shown.

const data = JSON.parse(document.getElementById("data").textContent);
const systems = new Map(data.systems.map((system) => [system.name, system]));
const state = { hidden: new Set(), seeds: false, summary: "absolute", chosen: data.contestants[0] };
const shown = (name) => !state.hidden.has(name);
const charts = [];
const tables = [];
const LONG = { mean: "mean over training", max: "max over training", final: "final", absolute: "absolute", iqm: "IQM over training" };
const VERDICTS = { "at or above": ["good", "▲"], overlapping: ["even", "●"], below: ["poor", "▼"] };
const plural = (count, word) => `${format(count, 0)} ${word}${count === 1 ? "" : "s"}`;
const tail = (task) => task.slice(task.indexOf("/") + 1);

/** A chart with a title, drawn when it first comes into sight. */
function figure(title, aside, build) {
  const place = make("figure", {}, make("figcaption", {}, make("span", {}, title), aside ?? null));
  charts.push(build(place));
  return place;
}

/** A table in a box that scrolls; `fill` returns its rows, again after every change of what is shown. */
function table(label, fill) {
  const body = make("table", { "aria-label": label });
  tables.push(() => body.replaceChildren(...fill()));
  return make("div", { class: "box", tabindex: 0, role: "region", "aria-label": label }, body);
}

const header = (...cells) => make("thead", {}, make("tr", {}, cells));
const column = (system) => make("th", { scope: "col" }, mark(system), " ", system.name);
const row = (name) => make("th", { scope: "row" }, name);

/** A choice that is the same wherever it stands on the page; `now` says what it is here. */
function choice(label, key, options, now = () => state[key]) {
  const select = make("select", { "aria-label": label, onchange: () => change({ [key]: select.value }) },
    options.map(([value, text]) => make("option", { value }, text)));
  tables.push(() => { select.value = now(); });
  return select;
}

const summaryChoice = () => choice("Summary of a run", "summary", Object.entries(LONG));

function change(what) {
  Object.assign(state, what);
  for (const fill of tables) fill();
  for (const one of charts) one.stale = true;
  drawSeen();
}

// Only what is in sight is drawn, so that a page with hundreds of charts opens at once.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.seen = entry.isIntersecting;
  drawSeen();
}, { rootMargin: "300px" });
const size = new ResizeObserver((entries) => {
  for (const { target } of entries) charts.find((one) => one.place === target).stale = true;
  drawSeen();
});

function drawSeen(all = false) {
  for (const one of charts)
    if (one.stale && (all || one.place.seen)) {
      one.stale = false;
      one.draw();
    }
}

function top() {
  const wins = data.contestants.map((name) => [name, winsOf(name)]).sort((a, b) => b[1] - a[1]);
  const contested = (name) => tasks().filter((task) => task.contested && (!name || name in task.seeds)).length;
  const [name, most] = wins[0];
  const title = most ? `${name} wins ${most} of ${plural(contested(name), "task")}`
    : contested() ? `No system wins any of ${plural(contested(), "task")}`
    : `${wins.length > 1 ? plural(wins.length, "system") : name} on ${plural(tasks().length, "task")}`;
  document.title = `${title} · Sable report`;
  document.getElementById("top").append(
    make("p", { class: "eyebrow" }, "Sable report"),
    make("h1", {}, title),
    make("p", { class: "lead" }, [plural(data.systems.filter((s) => !s.best).length, "system"), plural(tasks().length, "task"), plural(data.suites.length, "suite"), plural(data.runs, "run")].join(" · ")),
    make("nav", { "aria-label": "Suites" }, data.suites.map((suite, k) => make("a", { href: `#suite${k}` }, suite.name))),
  );
}

const tasks = () => data.suites.flatMap((suite) => suite.tasks);
const winsOf = (name, list = tasks()) => list.filter((task) => task.winner === name).length;

function bar() {
  const chips = data.systems.map((system) => {
    const chip = make("button", { class: "chip", type: "button", title: "show or hide everywhere", onclick: () => {
      state.hidden.has(system.name) ? state.hidden.delete(system.name) : state.hidden.add(system.name);
      change({});
    } }, mark(system), system.name);
    tables.push(() => chip.setAttribute("aria-pressed", shown(system.name)));
    return chip;
  });
  const seeds = make("button", { type: "button", title: "draw every seed", onclick: () => change({ seeds: !state.seeds }) }, "seeds");
  tables.push(() => seeds.setAttribute("aria-pressed", state.seeds));
  document.getElementById("bar").append(
    make("div", { id: "legend", role: "group", "aria-label": "Systems" }, chips),
    make("div", { class: "tools" }, seeds, themeButton()),
  );
}

/** Light or dark, remembered where the browser allows it. */
function themeButton() {
  const root = document.documentElement;
  const kept = (value) => { try { return value ? localStorage.setItem("sable-theme", value) : localStorage.getItem("sable-theme"); } catch { return null; } };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "light" : "dark"; };
  const button = make("button", { type: "button", id: "theme", "aria-label": "Change between light and dark", onclick: () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept(root.dataset.theme);
    name();
  } });
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  name();
  return button;
}

function notes() {
  if (!data.notes.length) return null;
  const list = (lines) => make("ul", {}, lines.map((line) => make("li", {}, line)));
  const [first, rest] = data.notes.length > 6 ? [data.notes.slice(0, 4), data.notes.slice(4)] : [data.notes, []];
  return make("aside", { class: "notes", "aria-label": "Notes on the runs" },
    make("h2", {}, `${plural(data.notes.length, "thing")} to know about these runs`), list(first),
    rest.length ? make("details", {}, make("summary", {}, `${rest.length} more`), list(rest)) : null);
}

function meter(parts, whole) {
  return make("span", { class: "meter", "aria-hidden": "true" }, parts.map(([count, fill]) => make("i", { style: `width: ${(100 * count) / whole}%; background: ${fill}` })));
}

function wins() {
  const contested = tasks().filter((task) => task.contested);
  if (!contested.length) return null;
  const suites = data.suites.filter((suite) => suite.tasks.some((task) => task.contested));
  const fill = () => [
    header(make("th", { scope: "col" }, "System"), make("th", { scope: "col", class: "wide" }, "Tasks won"), suites.map((suite) => make("th", { scope: "col" }, suite.name))),
    make("tbody", {}, data.contestants.filter(shown).sort((a, b) => winsOf(b) - winsOf(a)).map((name) => make("tr", {}, row(name),
      make("td", { class: "wide" }, meter([[winsOf(name), colour(systems.get(name))]], contested.length), ` ${winsOf(name)} of ${contested.filter((task) => name in task.seeds).length}`),
      suites.map((suite) => make("td", {}, suite.tasks.some((task) => name in task.seeds) ? String(winsOf(name, suite.tasks)) : make("span", { class: "none" }, "–")))))),
  ];
  const open = contested.filter((task) => !task.winner).length;
  return make("section", {}, make("h2", {}, "Tasks won against every other system"),
    make("p", { class: "small" }, "A task is won where the chance that a run of the system beats a run of another lies above one half with its whole 95 % interval, against every other system (absolute metric). " +
      (open ? `On ${plural(open, "task")} nobody wins. ` : "") + bestSaid()),
    table("Tasks won", fill));
}

function bestSaid() {
  const best = data.systems.filter((system) => system.best);
  return best.length ? `${best.map((system) => system.name).join(", ")}: with memory or without, whichever has the higher mean on a task, as the paper reports it. It is chosen by the same runs it is judged by, which flatters it a little.` : "";
}

function beside() {
  if (!data.paper.length) return null;
  const all = [...new Set(data.paper.map((one) => one.system))];
  const kinds = Object.keys(VERDICTS);
  const fill = () => [
    header(make("th", { scope: "col" }, "System"), make("th", { scope: "col", class: "wide" }, "Against the paper"), kinds.map((kind) => make("th", { scope: "col" }, kind)), make("th", { scope: "col" }, "tasks")),
    make("tbody", {}, all.filter((name) => shown(standing(name))).map((name) => {
      const own = data.paper.filter((one) => one.system === name && one.summary === state.summary);
      const counts = kinds.map((kind) => own.filter((one) => one.verdict === kind).length);
      return make("tr", {}, row(name), make("td", { class: "wide" }, meter(counts.map((count, k) => [count, `var(--${VERDICTS[kinds[k]][0]})`]), own.length || 1)),
        counts.map((count, k) => make("td", {}, make("span", { class: VERDICTS[kinds[k]][0] }, `${VERDICTS[kinds[k]][1]} `), String(count))), make("td", {}, String(own.length)));
    })),
  ];
  return make("section", {}, make("h2", {}, "Beside the paper"),
    make("p", { class: "small" }, "At or above: our mean, rounded as the paper's, is not below its 95 % interval. Overlapping: it is, but the intervals share something. Tables by task stand with each suite."),
    make("p", {}, summaryChoice()), table("Beside the paper", fill));
}

/** Our system that stands beside one of the paper's. */
const standing = (name) => data.paper.find((one) => one.system === name).variant;

/** Our figures of a suite's tasks beside the paper's. */
function besideTasks(suite) {
  const own = data.paper.filter((one) => one.task.startsWith(`${suite.name}/`));
  if (!own.length) return [];
  const names = () => [...new Set(own.map((one) => one.system))].filter((name) => shown(standing(name)));
  const find = (task, name) => own.find((one) => one.task === task.name && one.system === name && one.summary === state.summary);
  const cell = (one, decimals) => make("td", {}, !one ? make("span", { class: "none" }, "–") : [
    make("span", { class: VERDICTS[one.verdict][0], title: one.verdict, role: "img", "aria-label": one.verdict }, `${VERDICTS[one.verdict][1]} `),
    format(one.ours[0], decimals), " ", make("span", { class: "none" }, "·"), ` ${format(one.paper[0], decimals)}`,
    make("small", {}, interval(one.paper, decimals))]);
  const fill = () => [header(make("th", { scope: "col" }, "Ours · the paper's"), names().map((name) => make("th", { scope: "col" }, name))),
    make("tbody", {}, suite.tasks.filter((task) => own.some((one) => one.task === task.name)).map((task) =>
      make("tr", {}, row(tail(task.name)), names().map((name) => cell(find(task, name), task.decimals)))))];
  return [make("h3", {}, "Beside the paper", summaryChoice()), table(`${suite.name} beside the paper`, fill)];
}

/** The scores of a suite's tasks, the highest of a task in bold. */
function scores(suite) {
  const present = data.systems.filter((system) => suite.tasks.some((task) => system.name in task.seeds));
  const fill = () => [
    header(make("th", { scope: "col" }, "Task"), present.filter((s) => shown(s.name)).map(column)),
    make("tbody", {}, suite.tasks.map((task) => {
      const found = task.summaries[state.summary];
      const highest = Math.max(...Object.values(found).map(([value]) => value));
      return make("tr", {}, row(tail(task.name)), present.filter((s) => shown(s.name)).map(({ name }) => {
        const estimate = found[name];
        if (!estimate) return make("td", { class: "none" }, "–");
        return make("td", { class: estimate[0] === highest ? "top" : null, title: `${plural(task.seeds[name], "seed")}` },
          format(estimate[0], task.decimals), make("small", {}, interval(estimate, task.decimals)));
      }));
    })),
  ];
  return [make("h3", {}, "Scores", summaryChoice()),
    make("p", { class: "small" }, "Mean over seeds with 95 % bootstrap intervals; the highest in bold."), table(`${suite.name} scores`, fill)];
}

function aggregates(suite) {
  if (!suite.leader) return null;
  const known = (found) => data.systems.filter((system) => shown(system.name) && system.name in found);
  const lines = (found, last) => () => known(found).map((system) => ({ system, x: [0, last], ...found[system.name] }));
  const percent = (value) => `${format(100 * value, 0)} %`;
  const unit = { bounds: [0, 1], height: 290, decimals: 3, seeds: () => false };
  const chosen = () => (state.chosen in suite.improvement ? state.chosen : suite.leader);
  const found = [
    figure("Normalised score", make("small", {}, "interquartile mean, 95 %"), (place) => intervalChart(place, {
      rows: () => known(suite.iqm).map((system) => [system, suite.iqm[system.name]]).sort((a, b) => b[1][0] - a[1][0]), xLabel: "min–max normalised IQM",
      label: () => `Normalised scores on ${suite.name}`,
    })),
    figure("Probability of improvement", choice("System compared with the others", "chosen", Object.keys(suite.improvement).map((name) => [name, `of ${name}`]), chosen), (place) => intervalChart(place, {
      rows: () => known(suite.improvement[chosen()]).map((system) => [system, suite.improvement[chosen()][system.name]]), bounds: [0, 1], half: true, xLabel: "chance to beat",
      label: () => `Chance that ${chosen()} beats each other system on ${suite.name}`,
    })),
    figure("Performance profile", make("small", {}, "share of runs above a score"), (place) => lineChart(place, {
      ...unit, lines: lines(suite.profiles, 1), xLabel: "normalised score", yLabel: "share of runs", xTick: format, title: (x) => `score above ${format(x)}`,
      label: () => `Performance profiles on ${suite.name}`,
    })),
  ];
  if (Object.keys(suite.efficiency).length) found.push(
    figure("Sample efficiency", make("small", {}, "interquartile mean of normalised returns"), (place) => lineChart(place, {
      ...unit, bounds: null, lines: lines(suite.efficiency, 1), xLabel: "share of training", yLabel: "normalised return", xTick: percent, title: (x) => `after ${percent(x)} of training`,
      label: () => `Sample efficiency on ${suite.name}`,
    })));
  return make("div", { class: "grid pair" }, found);
}

function curves(suite) {
  const drawn = suite.tasks.map((task) => figure(tail(task.name), task.winner ? make("small", {}, `won by ${task.winner}`) : null, (place) => lineChart(place, {
    lines: () => data.systems.filter(({ name }) => shown(name) && task.curves[name]).map((system) => ({ system, ...task.curves[system.name] })),
    seeds: () => state.seeds, height: 250, decimals: task.decimals, xLabel: "environment steps", yLabel: "return", xTick: short, title: (x) => `${short(x)} steps`,
    label: () => `Learning curves on ${task.name}. Arrow keys read values, plus zooms in, Escape resets.`,
  })));
  return [make("h3", {}, "Learning curves"), make("p", { class: "small" }, "Interquartile mean over seeds, with its 95 % interval. Drag to zoom, double-click to see all again."),
    make("div", { class: drawn.length > 2 ? "grid" : "grid pair" }, drawn)];
}

function section(suite, k) {
  const count = suite.compared.length;
  const few = count < suite.tasks.length ? `over the ${count} that the systems share, ` : "";
  const how = `aggregates are ${few}of absolute metrics, scaled from 0 for a task's lowest run to 1 for its highest`;
  const said = plural(suite.tasks.length, "task") + (count ? `; ${how}.` : "");
  return make("section", { id: `suite${k}` }, make("h2", {}, suite.name), make("p", { class: "small" }, said), aggregates(suite), scores(suite), besideTasks(suite), curves(suite));
}

top();
bar();
document.getElementById("main").append(...[wins(), notes(), beside(), ...data.suites.map(section)].filter(Boolean));
document.getElementById("foot").append(make("p", { class: "small" }, data.made));
change({});
for (const one of charts) {
  sight.observe(one.place);
  size.observe(one.place);
}
addEventListener("beforeprint", () => drawSeen(true));

// The page: what the data says, in reading order, and the switches that change what is shown.

const data = JSON.parse(document.getElementById("data").textContent);
const systems = new Map(data.systems.map((system) => [system.name, system]));
const state = { hidden: new Set(), seeds: false, summary: "absolute", chosen: data.contestants[0] };
const shown = (name) => !state.hidden.has(name);
const charts = [];
const tables = [];
const LONG = {
  mean: "mean over training",
  max: "max over training",
  final: "final",
  absolute: "absolute",
  iqm: "IQM over training",
};
const VERDICTS = { "not below": ["good", "▲"], overlapping: ["even", "●"], below: ["poor", "▼"] };
const plural = (count, word) => `${format(count, 0)} ${word}${count === 1 ? "" : "s"}`;
const isPaper = (name) => name.endsWith(" (paper)");
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
  const select = make(
    "select",
    { "aria-label": label, onchange: () => change({ [key]: select.value }) },
    options.map(([value, text]) => make("option", { value }, text)),
  );
  tables.push(() => {
    select.value = now();
  });
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
const sight = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) Object.assign(target, { seen: isIntersecting });
    drawSeen();
  },
  { rootMargin: "300px" },
);
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
  const contested = (name) =>
    tasks().filter((task) => task.contested && (!name || name in task.seeds)).length;
  const [name, most] = wins[0];
  const title = most
    ? `${name} wins ${most} of ${plural(contested(name), "task")}`
    : contested()
      ? `No system wins any of ${plural(contested(), "task")}`
      : `${wins.length > 1 ? plural(wins.length, "system") : name} on ${plural(tasks().length, "task")}`;
  document.title = `${title} · Sable report`;
  document.getElementById("top").append(
    make("p", { class: "eyebrow" }, "Sable report"),
    make("h1", {}, title),
    make(
      "p",
      { class: "lead" },
      [
        plural(data.systems.filter((s) => !s.best && !isPaper(s.name)).length, "system"),
        plural(tasks().length, "task"),
        plural(data.suites.length, "suite"),
        plural(data.runs, "run"),
      ].join(" · "),
    ),
    make(
      "nav",
      { "aria-label": "Chapters" },
      data.chapters.length ? make("a", { href: "#paper" }, "the paper's figures") : [],
      data.suites.map((suite, k) => make("a", { href: `#suite${k}` }, suite.name)),
    ),
  );
}

const tasks = () => data.suites.flatMap((suite) => suite.tasks);
const winsOf = (name, list = tasks()) => list.filter((task) => task.winner === name).length;

function bar() {
  const chips = data.systems.map((system) => {
    const chip = make(
      "button",
      {
        class: "chip",
        type: "button",
        title: "show or hide everywhere",
        onclick: () => {
          state.hidden.has(system.name) ? state.hidden.delete(system.name) : state.hidden.add(system.name);
          change({});
        },
      },
      mark(system),
      system.name,
    );
    tables.push(() => chip.setAttribute("aria-pressed", shown(system.name)));
    return chip;
  });
  const seeds = make(
    "button",
    { type: "button", title: "draw every seed", onclick: () => change({ seeds: !state.seeds }) },
    "seeds",
  );
  tables.push(() => seeds.setAttribute("aria-pressed", state.seeds));
  document
    .getElementById("bar")
    .append(
      make("div", { id: "legend", role: "group", "aria-label": "Systems" }, chips),
      make("div", { class: "tools" }, seeds, themeButton()),
    );
}

function notes() {
  if (!data.notes.length) return null;
  const list = (lines) =>
    make(
      "ul",
      {},
      lines.map((line) => make("li", {}, line)),
    );
  const [first, rest] =
    data.notes.length > 6 ? [data.notes.slice(0, 4), data.notes.slice(4)] : [data.notes, []];
  return make(
    "aside",
    { class: "notes", "aria-label": "Notes on the runs" },
    make("h2", {}, `${plural(data.notes.length, "thing")} to know about these runs`),
    list(first),
    rest.length ? make("details", {}, make("summary", {}, `${rest.length} more`), list(rest)) : null,
  );
}

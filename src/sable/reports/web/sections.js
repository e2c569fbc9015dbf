// The sections of the page: what is won, and how we stand beside the paper.

function meter(parts, whole) {
  return make(
    "span",
    { class: "meter", "aria-hidden": "true" },
    parts.map(([count, fill]) =>
      make("i", { style: `width: ${(100 * count) / whole}%; background: ${fill}` }),
    ),
  );
}

function wins() {
  const contested = tasks().filter((task) => task.contested);
  if (!contested.length) return null;
  const suites = data.suites.filter((suite) => suite.tasks.some((task) => task.contested));
  const fill = () => [
    header(
      make("th", { scope: "col" }, "System"),
      make("th", { scope: "col", class: "wide" }, "Tasks won"),
      suites.map((suite) => make("th", { scope: "col" }, suite.name)),
    ),
    make(
      "tbody",
      {},
      data.contestants
        .filter(shown)
        .sort((a, b) => winsOf(b) - winsOf(a))
        .map((name) =>
          make(
            "tr",
            {},
            row(name),
            make(
              "td",
              { class: "wide" },
              meter([[winsOf(name), colour(systems.get(name))]], contested.length),
              ` ${winsOf(name)} of ${contested.filter((task) => name in task.seeds).length}`,
            ),
            suites.map((suite) =>
              make(
                "td",
                {},
                suite.tasks.some((task) => name in task.seeds)
                  ? String(winsOf(name, suite.tasks))
                  : make("span", { class: "none" }, "–"),
              ),
            ),
          ),
        ),
    ),
  ];
  const open = contested.filter((task) => !task.winner).length;
  return make(
    "section",
    {},
    make("h2", {}, "Tasks won against every other system"),
    make(
      "p",
      { class: "small" },
      "A task is won where the chance that a run of the system beats a run of another lies above one half " +
        "with its whole 95 % interval, against every other system (absolute metric). " +
        (open ? `On ${plural(open, "task")} nobody wins.` : ""),
    ),
    table("Tasks won", fill),
  );
}

function beside() {
  if (!data.paper.length) return null;
  const all = [...new Set(data.paper.map((one) => one.system))];
  const kinds = Object.keys(VERDICTS);
  const fill = () => [
    header(
      make("th", { scope: "col" }, "System"),
      make("th", { scope: "col", class: "wide" }, "Against the paper"),
      kinds.map((kind) => make("th", { scope: "col" }, kind)),
      make("th", { scope: "col" }, "tasks"),
    ),
    make(
      "tbody",
      {},
      all
        .filter((name) => shown(standing(name)))
        .map((name) => {
          const own = data.paper.filter((one) => one.system === name && one.summary === state.summary);
          const counts = kinds.map((kind) => own.filter((one) => one.verdict === kind).length);
          return make(
            "tr",
            {},
            row(name),
            make(
              "td",
              { class: "wide" },
              meter(
                counts.map((count, k) => [count, `var(--${VERDICTS[kinds[k]][0]})`]),
                own.length || 1,
              ),
            ),
            counts.map((count, k) =>
              make(
                "td",
                {},
                make("span", { class: VERDICTS[kinds[k]][0] }, `${VERDICTS[kinds[k]][1]} `),
                String(count),
              ),
            ),
            make("td", {}, String(own.length)),
          );
        }),
    ),
  ];
  return make(
    "section",
    {},
    make("h2", {}, "Beside the paper"),
    make(
      "p",
      { class: "small" },
      "Not below: our mean, rounded as the paper's, is not below its 95 % interval. Overlapping: it is, " +
        "but the intervals share something. Tables by task stand with each suite.",
    ),
    make("p", {}, summaryChoice()),
    table("Beside the paper", fill),
  );
}

/** Our system that stands beside one of the paper's. */
const standing = (name) => data.paper.find((one) => one.system === name).variant;

/** Our figures of a suite's tasks beside the paper's. */
function besideTasks(suite) {
  const own = data.paper.filter((one) => one.task.startsWith(`${suite.name}/`));
  if (!own.length) return [];
  const names = () => [...new Set(own.map((one) => one.system))].filter((name) => shown(standing(name)));
  const find = (task, name) =>
    own.find((one) => one.task === task.name && one.system === name && one.summary === state.summary);
  const cell = (one, decimals) =>
    make(
      "td",
      {},
      !one
        ? make("span", { class: "none" }, "–")
        : [
            make(
              "span",
              { class: VERDICTS[one.verdict][0], title: one.verdict, role: "img", "aria-label": one.verdict },
              `${VERDICTS[one.verdict][1]} `,
            ),
            format(one.ours[0], decimals),
            " ",
            make("span", { class: "none" }, "·"),
            ` ${format(one.paper[0], decimals)}`,
            make("small", {}, interval(one.paper, decimals)),
          ],
    );
  const fill = () => [
    header(
      make("th", { scope: "col" }, "Ours · the paper's"),
      names().map((name) => make("th", { scope: "col" }, name)),
    ),
    make(
      "tbody",
      {},
      suite.tasks
        .filter((task) => own.some((one) => one.task === task.name))
        .map((task) =>
          make(
            "tr",
            {},
            row(tail(task.name)),
            names().map((name) => cell(find(task, name), task.decimals)),
          ),
        ),
    ),
  ];
  return [make("h3", {}, "Beside the paper", summaryChoice()), table(`${suite.name} beside the paper`, fill)];
}

// The section of a suite: aggregates, scores and learning curves.

/** The scores of a suite's tasks, the highest of a task in bold. */
function scores(suite) {
  const present = data.systems.filter((system) => suite.tasks.some((task) => system.name in task.seeds));
  const fill = () => [
    header(make("th", { scope: "col" }, "Task"), present.filter((s) => shown(s.name)).map(column)),
    make(
      "tbody",
      {},
      suite.tasks.map((task) => {
        const found = task.summaries[state.summary];
        const highest = Math.max(...Object.values(found).map(([value]) => value));
        return make(
          "tr",
          {},
          row(tail(task.name)),
          present
            .filter((s) => shown(s.name))
            .map(({ name }) => {
              const estimate = found[name];
              if (!estimate) return make("td", { class: "none" }, "–");
              return make(
                "td",
                {
                  class: estimate[0] === highest ? "top" : null,
                  title: `${plural(task.seeds[name], "seed")}`,
                },
                format(estimate[0], task.decimals),
                make("small", {}, interval(estimate, task.decimals)),
              );
            }),
        );
      }),
    ),
  ];
  return [
    make("h3", {}, "Scores", summaryChoice()),
    make("p", { class: "small" }, "Mean over seeds with 95 % bootstrap intervals; the highest in bold."),
    table(`${suite.name} scores`, fill),
  ];
}

/** What the runs of a suite took, where they say. */
function costs(suite) {
  const known = suite.tasks.filter((task) => Object.keys(task.costs).length);
  if (!known.length) return [];
  const present = data.systems.filter((system) => known.some((task) => system.name in task.costs));
  const devices = new Set(known.flatMap((task) => Object.values(task.costs).map((cost) => cost[3])));
  const fill = () => [
    header(make("th", { scope: "col" }, "Task"), present.filter((s) => shown(s.name)).map(column)),
    make(
      "tbody",
      {},
      known.map((task) =>
        make(
          "tr",
          {},
          row(tail(task.name)),
          present
            .filter((s) => shown(s.name))
            .map(({ name }) => {
              if (!task.costs[name]) return make("td", { class: "none" }, "–");
              const [pace, memory, seeds, device] = task.costs[name];
              return make(
                "td",
                { title: `${plural(seeds, "seed")} on ${device}` },
                `${short(pace)} steps/s`,
                make("small", {}, memory === null ? "memory not known" : `${format(memory / 1e9, 2)} GB`),
              );
            }),
        ),
      ),
    ),
  ];
  return [
    make("h3", {}, "Cost"),
    make(
      "p",
      { class: "small" },
      "Environment steps of all seeds a second while training, and the most memory in use, of the device or, " +
        `on a CPU, of the process. Measured on: ${[...devices].join(", ")}.`,
    ),
    table(`${suite.name} cost`, fill),
  ];
}

function aggregates(suite) {
  if (!suite.leader) return null;
  const known = (found) => data.systems.filter((system) => shown(system.name) && system.name in found);
  const lines = (found, x) => () => known(found).map((system) => ({ system, x, ...found[system.name] }));
  const percent = (value) => `${format(100 * value, 0)} %`;
  const unit = { bounds: [0, 1], height: 290, decimals: 3, seeds: () => false };
  const chosen = () => (state.chosen in suite.improvement ? state.chosen : suite.leader);
  const found = [
    figure("Normalised score", make("small", {}, "interquartile mean, 95 %"), (place) =>
      intervalChart(place, {
        rows: () =>
          known(suite.iqm)
            .map((system) => [system, suite.iqm[system.name]])
            .sort((a, b) => b[1][0] - a[1][0]),
        xLabel: "min–max normalised IQM",
        label: () => `Normalised scores on ${suite.name}`,
      }),
    ),
    figure(
      "Probability of improvement",
      choice(
        "System compared with the others",
        "chosen",
        Object.keys(suite.improvement).map((name) => [name, `of ${name}`]),
        chosen,
      ),
      (place) =>
        intervalChart(place, {
          rows: () =>
            known(suite.improvement[chosen()]).map((system) => [
              system,
              suite.improvement[chosen()][system.name],
            ]),
          bounds: [0, 1],
          half: true,
          xLabel: "chance to beat",
          label: () => `Chance that ${chosen()} beats each other system on ${suite.name}`,
        }),
    ),
    figure("Performance profile", make("small", {}, "share of runs above a score"), (place) =>
      lineChart(place, {
        ...unit,
        lines: lines(suite.profiles, [0, 1]),
        xLabel: "normalised score",
        yLabel: "share of runs",
        xTick: format,
        title: (x) => `score above ${format(x)}`,
        label: () => `Performance profiles on ${suite.name}`,
      }),
    ),
  ];
  if (Object.keys(suite.efficiency).length)
    found.push(
      figure("Sample efficiency", make("small", {}, "interquartile mean of normalised returns"), (place) =>
        lineChart(place, {
          ...unit,
          bounds: null,
          lines: lines(suite.efficiency, suite.steps ?? [0, 1]),
          xLabel: suite.steps ? "environment steps" : "share of training",
          yLabel: "normalised return",
          xTick: suite.steps ? short : percent,
          title: (x) => (suite.steps ? `${short(x)} steps` : `after ${percent(x)} of training`),
          label: () => `Sample efficiency on ${suite.name}`,
        }),
      ),
    );
  return make("div", { class: "grid pair" }, found);
}

function curves(suite) {
  const drawn = suite.tasks.map((task) =>
    figure(tail(task.name), task.winner ? make("small", {}, `won by ${task.winner}`) : null, (place) =>
      lineChart(place, {
        lines: () =>
          data.systems
            .filter(({ name }) => shown(name) && task.curves[name])
            .map((system) => ({ system, ...task.curves[system.name] })),
        references: () =>
          data.systems
            .filter(({ name }) => shown(name) && task.references[name])
            .map((system) => [system, task.references[system.name]]),
        seeds: () => state.seeds,
        height: 250,
        decimals: task.decimals,
        xLabel: "environment steps",
        yLabel: "return",
        xTick: short,
        title: (x) => `${short(x)} steps`,
        label: () => `Learning curves on ${task.name}. Arrow keys read values, plus zooms in, Escape resets.`,
      }),
    ),
  );
  return [
    make("h3", {}, "Learning curves"),
    make(
      "p",
      { class: "small" },
      `${data.curve === "mean" ? "Mean" : "Interquartile mean"} over seeds, with its 95 % interval. Drag to zoom, double-click to see all again.`,
    ),
    make("div", { class: drawn.length > 2 ? "grid" : "grid pair" }, drawn),
  ];
}

function section(suite, k) {
  const count = suite.compared.length;
  const few = count < suite.tasks.length ? `over the ${count} that the systems share, ` : "";
  const how = `aggregates are ${few}of absolute metrics, from 0 for a task's lowest run to 1 for its highest`;
  const said = plural(suite.tasks.length, "task") + (count ? `; ${how}.` : "");
  return make(
    "section",
    { id: `suite${k}` },
    make("h2", {}, suite.name),
    make("p", { class: "small" }, said),
    aggregates(suite),
    scores(suite),
    besideTasks(suite),
    curves(suite),
    costs(suite),
  );
}

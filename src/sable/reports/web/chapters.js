// The paper's figures and tables.

/** `looks`: { name: system } as the chapter draws it. */
function chapterPanel(panel, looks) {
  const own = (found) =>
    Object.values(looks).filter((system) => shown(system.name) && system.name in found);
  return figure(panel.title, null, (place) => {
    const label = () => `${panel.title}: ${panel.yLabel ?? panel.xLabel}`;
    if (panel.kind === "bars")
      return barChart(place, {
        rows: () =>
          Object.entries(panel.bars)
            .filter(([name]) => shown(name))
            .map(([name, [share, text]]) => [looks[name], share, text]),
        xLabel: panel.xLabel,
        label,
      });
    if (panel.kind === "points")
      return intervalChart(place, {
        rows: () => own(panel.points).map((system) => [system, panel.points[system.name]]),
        bounds: panel.chance ? [0, 1] : null,
        half: panel.chance,
        xLabel: panel.xLabel,
        label,
      });
    return lineChart(place, {
      lines: () => own(panel.lines).map((system) => ({ system, ...panel.lines[system.name] })),
      references: () => own(panel.references).map((system) => [system, panel.references[system.name]]),
      seeds: () => false,
      height: 250,
      decimals: panel.decimals,
      dots: panel.dots,
      zero: panel.zero,
      log: panel.log,
      xLabel: panel.xLabel,
      yLabel: panel.yLabel,
      xTick: panel.dots ? String : short,
      title: (x) => `${panel.dots ? x : short(x)} ${panel.xLabel}`,
      label,
    });
  });
}

/** A table of text and figures, as in the Markdown. */
function chapterTable({ caption, head, rows }) {
  const cell = (content) => {
    if (typeof content === "string") return make("td", {}, content);
    const [estimate, decimals, highest, overlaps] = content;
    return make(
      "td",
      { class: highest ? "top" : null },
      format(estimate[0], decimals) + (overlaps ? "*" : ""),
      make("small", {}, interval(estimate, decimals)),
    );
  };
  const fill = () => [
    header(head.map((text) => make("th", { scope: "col" }, text))),
    make(
      "tbody",
      {},
      rows.map(([first, ...cells]) => make("tr", {}, row(first), cells.map(cell))),
    ),
  ];
  return [make("p", { class: "small" }, caption), table(caption, fill)];
}

/** A legend of its own, where a chapter's colours are not those of the whole page. */
function chapterLegend(found) {
  const alike = ({ name, colour, dash }) =>
    systems.get(name)?.colour === colour && systems.get(name)?.dash === dash;
  if (found.every((system) => isPaper(system.name) || alike(system))) return null;
  return make(
    "p",
    { class: "small legend" },
    found.map((system) => make("span", {}, mark(system), " ", system.name)),
  );
}

function chapter({ title, text, missing, command, panels, elsewhere, tables, systems: own }) {
  const looks = Object.fromEntries(own.map((system) => [system.name, system]));
  const pair = panels.length < 3 || panels.some((panel) => panel.kind !== "lines");
  return [
    make("h3", {}, title),
    make("p", { class: "small" }, text, elsewhere ? " They stand with each suite below." : null),
    missing
      ? make("p", { class: "small" }, `${missing}. `, make("code", {}, command), " makes what is missing.")
      : null,
    panels.length ? make("div", { class: pair ? "grid pair" : "grid" }, panels.map((panel) => chapterPanel(panel, looks))) : null,
    panels.length ? chapterLegend(own) : null,
    tables.length > 3
      ? make(
          "details",
          {},
          make("summary", {}, plural(tables.length, "table")),
          tables.map(chapterTable),
        )
      : tables.map(chapterTable),
  ];
}

function chapters() {
  if (!data.chapters.length) return null;
  return make(
    "section",
    { id: "paper" },
    make("h2", {}, "The paper's figures and tables"),
    make(
      "p",
      { class: "small" },
      "Made of these runs, in the paper's order. What the paper prints stands beside them, marked (paper).",
    ),
    data.chapters.map(chapter),
  );
}

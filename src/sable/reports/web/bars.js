// Charts of bars.

/** Bars from 0 to 1 with what they say, one row a system. `rows()`: [[system, share, text]]. */
function barChart(place, { rows, xLabel, label }) {
  const step = 27;
  const percent = (value) => `${format(100 * value, 0)} %`;
  return chart(place, {
    xLabel,
    label,
    upright: true,
    tick: percent,
    height: () => 48 + step * Math.max(rows().length, 1),
    domain: () => [0, 1],
    frame(width) {
      const names = rows().map(([system]) => system.name.length);
      const left = Math.min(16 + 7 * Math.max(...names, 6), width * 0.4);
      return {
        width,
        height: this.height(),
        left,
        right: width - 76,
        top: 4,
        bottom: this.height() - 40,
        y: (k) => 8 + step * (k + 0.5),
      };
    },
    paint(frame) {
      rows().forEach(([system, share, text], k) => {
        const y = frame.y(k);
        frame.svg.append(rowName(system, frame, y));
        frame.svg.append(make("text", { x: frame.right + 10, y: y + 4 }, text));
        frame.inside.append(
          make(
            "g",
            { "data-system": system.name, stroke: colour(system), "stroke-width": 1.5 },
            make("rect", {
              class: "bar",
              x: frame.x(0),
              y: y - 8,
              width: Math.max(0, frame.x(share) - frame.x(0)),
              height: 16,
              fill: isPaper(system.name) ? "var(--paper)" : colour(system),
            }),
          ),
        );
      });
    },
    pick(px, frame, py) {
      const shown = rows();
      if (!shown.length) return null;
      const k = clamp(Math.round((py - 8) / step - 0.5), 0, shown.length - 1);
      const [system, share, text] = shown[k];
      return {
        x: frame.x(share),
        at: frame.y(k),
        y: frame.y(k) + 10,
        title: text,
        rows: [[system, [100 * share, null, null], 0]],
        dots: [],
      };
    },
    stops: (frame) => rows().map(([, share], k) => [frame.x(share), frame.y(k)]),
  });
}

/** A system's name left of its row, as much of it as there is room for. */
function rowName(system, frame, y) {
  const fits = Math.floor((frame.left - 12) / 6.6);
  const name = system.name.length > fits ? system.name.slice(0, fits - 1) + "…" : system.name;
  return make("text", { class: "name", x: 0, y: y + 4 }, make("title", {}, system.name), name);
}

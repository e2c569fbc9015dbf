// Charts of points with intervals.

/** Points with intervals, one row a system. `rows()`: [[system, estimate]]. */
function intervalChart(place, { rows, bounds = null, half = null, xLabel, label }) {
  const step = 27;
  return chart(place, {
    xLabel,
    label,
    upright: true,
    tick: format,
    height: () => 48 + step * Math.max(rows().length, 1),
    domain() {
      if (bounds) return bounds;
      const all = rows()
        .flatMap(([, estimate]) => estimate)
        .filter((value) => value !== null);
      const [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
      const room = (high - low) * 0.08 || 0.05;
      return [low - room, high + room];
    },
    frame(width) {
      const names = rows().map(([system]) => system.name.length);
      const left = Math.min(16 + 7 * Math.max(...names, 6), width * 0.36);
      const values = 112;
      const bottom = this.height() - 40;
      return {
        width,
        height: this.height(),
        left,
        right: width - values - 14,
        values: width - values,
        top: 4,
        bottom,
        y: (k) => 8 + step * (k + 0.5),
      };
    },
    paint(frame, low, high) {
      if (half && low < 0.5 && high > 0.5)
        frame.svg.append(
          make("line", {
            class: "half",
            x1: frame.x(0.5),
            x2: frame.x(0.5),
            y1: frame.top,
            y2: frame.bottom,
          }),
        );
      rows().forEach(([system, estimate], k) => {
        const [value, least, most] = estimate;
        const y = frame.y(k);
        frame.svg.append(make("line", { class: "rule", x1: frame.left, x2: frame.right, y1: y, y2: y }));
        frame.svg.append(rowName(system, frame, y));
        frame.svg.append(
          make("text", { x: frame.values, y: y + 4 }, `${format(value)} ${interval(estimate)}`),
        );
        const group = make("g", { "data-system": system.name, stroke: colour(system) });
        if (least !== null)
          group.append(
            make("line", {
              class: "span",
              x1: frame.x(least),
              x2: frame.x(most),
              y1: y,
              y2: y,
              "stroke-width": 5,
              opacity: 0.32,
              "stroke-linecap": "butt",
            }),
          );
        group.append(
          system.best
            ? diamond(frame.x(value), y, 6, system)
            : make("circle", {
                cx: frame.x(value),
                cy: y,
                r: 4.6,
                "stroke-width": 2,
                fill: system.dash ? "var(--paper)" : colour(system),
              }),
        );
        frame.inside.append(group);
      });
    },
    pick(_px, frame, py) {
      const shown = rows();
      if (!shown.length) return null;
      const k = clamp(Math.round((py - 8) / step - 0.5), 0, shown.length - 1);
      const [system, estimate] = shown[k];
      return {
        x: frame.x(estimate[0]),
        at: frame.y(k),
        y: frame.y(k) + 10,
        title: xLabel,
        rows: [[system, estimate, 3]],
        dots: [],
      };
    },
    stops: (frame) => rows().map(([, estimate], k) => [frame.x(estimate[0]), frame.y(k)]),
  });
}

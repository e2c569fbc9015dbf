// Charts of lines.

/** Lines with bands. `lines()`: [{ system, x: [first, last], value, low, high, seeds }]; points lie evenly. */
function lineChart(place, { lines, bounds, xLabel, yLabel, xTick, title, decimals, height, label, seeds }) {
  const at = (line, k) =>
    line.value.length < 2 ? line.x[0] : line.x[0] + ((line.x[1] - line.x[0]) * k) / (line.value.length - 1);
  const nearest = (line, x) =>
    line.value.length < 2
      ? 0
      : clamp(
          Math.round(((x - line.x[0]) / (line.x[1] - line.x[0])) * (line.value.length - 1)),
          0,
          line.value.length - 1,
        );
  const path = (line, values, frame) =>
    values
      .map((y, k) => `${k ? "L" : "M"}${frame.x(at(line, k)).toFixed(1)} ${frame.y(y).toFixed(1)}`)
      .join("");

  function reach(low, high) {
    if (bounds) return bounds;
    let [least, most] = [Infinity, -Infinity];
    for (const line of lines())
      for (const set of [line.value, line.low, line.high, ...(seeds() ? line.seeds : [])])
        set.forEach((y, k) => {
          if (y === null || at(line, k + 1) < low || at(line, k - 1) > high) return;
          [least, most] = [Math.min(least, y), Math.max(most, y)];
        });
    if (least > most) return [0, 1];
    const room = (most - least) * 0.05 || Math.abs(most) * 0.05 || 0.5;
    return [least - room, most + room];
  }

  return chart(place, {
    xLabel,
    tick: xTick,
    label,
    height: () => height,
    domain() {
      const shown = lines();
      if (!shown.length) return [0, 1];
      const [low, high] = [
        Math.min(...shown.map((line) => line.x[0])),
        Math.max(...shown.map((line) => line.x[1])),
      ];
      // Training begins at 0; a budget rounded to whole updates still ends at its round number.
      return high > low
        ? [low < high / 10 ? Math.min(low, 0) : low, high > 1 ? high * 1.002 : high]
        : [low - 1, low + 1];
    },
    frame(width, low, high) {
      const [least, most] = reach(low, high);
      const scale = ticks(least, most, 5);
      const texts = scale.found.map((value) => format(value, scale.decimals));
      const left = 12 + 6.3 * Math.max(...texts.map((text) => text.length), 1);
      const [top, bottom] = [20, height - 40];
      const y = (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
      return {
        width,
        height,
        left,
        right: width - 14,
        top,
        bottom,
        y,
        levels: scale.found.map((value, k) => [y(value), texts[k]]),
      };
    },
    paint(frame) {
      for (const [py, text] of frame.levels) {
        frame.svg.append(make("line", { class: "rule", x1: frame.left, x2: frame.right, y1: py, y2: py }));
        frame.svg.append(make("text", { x: frame.left - 7, y: py + 4, "text-anchor": "end" }, text));
      }
      frame.svg.append(make("text", { x: 0, y: 9 }, yLabel));
      for (const line of lines()) {
        const own = { stroke: colour(line.system), "data-system": line.system.name };
        const group = make("g", own);
        if (line.low[0] !== null)
          group.append(
            make("path", {
              class: "band",
              fill: colour(line.system),
              d:
                path(line, line.high, frame) +
                "L" +
                path({ ...line, x: [line.x[1], line.x[0]] }, [...line.low].reverse(), frame).slice(1) +
                "z",
            }),
          );
        if (seeds())
          for (const seed of line.seeds)
            group.append(make("path", { class: "seed", d: path(line, seed, frame) }));
        if (line.value.length > 1)
          group.append(
            make("path", {
              class: "series",
              "stroke-dasharray": DASHES[line.system.dash],
              d: path(line, line.value, frame),
            }),
          );
        else
          group.append(
            make("circle", {
              class: "series",
              cx: frame.x(line.x[0]),
              cy: frame.y(line.value[0]),
              r: 3.5,
              style: `fill: ${colour(line.system)}`,
            }),
          );
        frame.inside.append(group);
      }
      if (!lines().length)
        frame.svg.append(
          make(
            "text",
            { x: (frame.left + frame.right) / 2, y: (frame.top + frame.bottom) / 2, "text-anchor": "middle" },
            "nothing chosen that is drawn here",
          ),
        );
    },
    pick(px, frame) {
      const x = frame.back(clamp(px, frame.left, frame.right));
      const shown = lines();
      if (!shown.length) return null;
      const close = shown
        .map((line) => at(line, nearest(line, x)))
        .reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
      const within = (line) => {
        const gap = (line.x[1] - line.x[0]) / Math.max(line.value.length - 1, 1) / 2;
        return close >= line.x[0] - gap && close <= line.x[1] + gap;
      };
      const rows = shown
        .filter(within)
        .map((line) => [line, nearest(line, close)])
        .sort(([a, i], [b, k]) => b.value[k] - a.value[i]);
      return {
        x: frame.x(close),
        line: true,
        title: title(close),
        rows: rows.map(([line, k]) => [line.system, [line.value[k], line.low[k], line.high[k]], decimals]),
        dots: rows
          .map(([line, k]) => [frame.x(at(line, k)), frame.y(line.value[k]), line.system])
          .filter(([x]) => x >= frame.left - 1 && x <= frame.right + 1),
      };
    },
    stops(frame) {
      const [line] = lines();
      const all = line ? line.value.map((_, k) => [frame.x(at(line, k)), frame.top]) : [];
      return all.filter(([x]) => x >= frame.left - 1 && x <= frame.right + 1);
    },
  });
}

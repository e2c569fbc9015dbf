// Charts of lines.

/**
 * Lines with bands. `lines()`: [{ system, x: [first, last], at, value, low, high, seeds }]; points lie evenly but
 * where `at` says their places. `references()`: [[system, estimate]], levels drawn across.
 */
function lineChart(
  place,
  {
    lines, bounds = null, xLabel, yLabel, xTick, title, decimals, height, label, seeds,
    references = () => [], dots = false, zero = false, log = false,
  },
) {
  const scaled = log ? Math.log10 : (y) => y;
  const last = (line) => line.value.length - 1;
  const at = (line, k) =>
    line.at
      ? line.at[clamp(k, 0, last(line))]
      : last(line) < 1
        ? line.x[0]
        : line.x[0] + ((line.x[1] - line.x[0]) * k) / last(line);
  const places = (line) => line.value.map((_, k) => at(line, k));
  const nearest = (line, x) =>
    line.at
      ? line.at.reduce((best, value, k) => (Math.abs(value - x) < Math.abs(line.at[best] - x) ? k : best), 0)
      : last(line) < 1
      ? 0
      : clamp(
          Math.round(((x - line.x[0]) / (line.x[1] - line.x[0])) * (line.value.length - 1)),
          0,
          line.value.length - 1,
        );
  const backwards = (line) => ({
    ...line,
    x: [line.x[1], line.x[0]],
    at: line.at ? [...line.at].reverse() : null,
  });
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
    for (const [, estimate] of references()) {
      least = Math.min(least, ...estimate);
      most = Math.max(most, ...estimate);
    }
    if (zero) least = Math.min(least, 0);
    if (least > most) return [0, 1];
    [least, most] = [scaled(least), scaled(most)];
    const room = (most - least) * 0.05 || Math.abs(most) * 0.05 || 0.5;
    return [zero && least === 0 ? 0 : least - room, most + room];
  }

  return chart(place, {
    xLabel,
    tick: xTick,
    places: () => (dots ? [...new Set(lines().flatMap((line) => places(line)))].sort((a, b) => a - b) : null),
    label,
    height: () => height,
    domain() {
      const shown = lines();
      if (!shown.length) return [0, 1];
      const [low, high] = [
        Math.min(...shown.map((line) => line.x[0])),
        Math.max(...shown.map((line) => line.x[1])),
      ];
      if (dots) return [0, (high || 1) * 1.04];
      // Training begins at 0; a budget rounded to whole updates still ends at its round number.
      return high > low
        ? [low < high / 10 ? Math.min(low, 0) : low, high > 1 ? high * 1.002 : high]
        : [low - 1, low + 1];
    },
    frame(width, low, high) {
      const [least, most] = reach(low, high);
      const even = ticks(least, most, 5);
      const found = log ? decades(least, most) : even.found;
      const texts = found.map((value) => (log ? short(value) : format(value, even.decimals)));
      const left = 12 + 6.3 * Math.max(...texts.map((text) => text.length), 1);
      const [top, bottom] = [20, height - 40];
      const y = (value) => bottom - ((scaled(value) - least) / (most - least)) * (bottom - top);
      return {
        width,
        height,
        left,
        right: width - 14,
        top,
        bottom,
        y,
        levels: found.map((value, k) => [y(value), texts[k]]),
      };
    },
    paint(frame) {
      for (const [py, text] of frame.levels) {
        frame.svg.append(make("line", { class: "rule", x1: frame.left, x2: frame.right, y1: py, y2: py }));
        frame.svg.append(make("text", { x: frame.left - 7, y: py + 4, "text-anchor": "end" }, text));
      }
      frame.svg.append(make("text", { x: 0, y: 9 }, yLabel));
      for (const [system, [value, least, most]] of references())
        frame.inside.append(
          make(
            "g",
            { "data-paper": system.name, stroke: colour(system) },
            make("rect", {
              class: "band",
              fill: colour(system),
              x: frame.left,
              width: Math.max(0, frame.right - frame.left),
              y: frame.y(most),
              height: frame.y(least) - frame.y(most),
            }),
            make("line", {
              class: "level",
              x1: frame.left,
              x2: frame.right,
              y1: frame.y(value),
              y2: frame.y(value),
            }),
          ),
        );
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
                path(backwards(line), [...line.low].reverse(), frame).slice(1) +
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
        if (dots || line.value.length === 1)
          line.value.forEach((value, k) =>
            group.append(
              make("circle", {
                class: "series",
                cx: frame.x(at(line, k)),
                cy: frame.y(value),
                r: 3.5,
                style: `fill: ${colour(line.system)}`,
              }),
            ),
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
        if (line.at) return line.at.includes(close);
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

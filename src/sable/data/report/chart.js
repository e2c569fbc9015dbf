// Charts as SVG. Names come from files: they are only ever set as text or attributes, never as markup.

const DRAWN = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title", "clipPath", "defs"]);
const SLIP = 8; // a press that moves less, in pixels, is no drag
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];

/** An element with attributes, listeners (`onclick`) and children. */
function make(name, attributes, ...children) {
  const node = DRAWN.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** A number with so many decimals, thousands set apart, and a true minus. */
function format(value, decimals = 2) {
  if (value === null || value === undefined) return "–";
  const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  const text = Math.abs(value).toLocaleString("en-GB", digits).replaceAll(",", "\u202f");
  return (value < 0 && /[1-9]/.test(text) ? "−" : "") + text;
}

/** 20 M, 1.5 k. */
function short(value) {
  const [unit, name] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([unit]) => Math.abs(value) >= unit) ?? [1, ""];
  return String(+(value / unit).toPrecision(3)).replace("-", "−") + name;
}

const interval = ([, low, high], decimals) => (low === null ? "" : `[${format(low, decimals)}, ${format(high, decimals)}]`);
const colour = (system) => `var(--c${system.colour})`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Round numbers in [low, high], about as many as asked for. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const found = Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, k) => (first + k) * step);
  return { found, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

/** A line sample as in the legend: the system's colour, its dashes, a diamond for the best of variants. */
function mark(system) {
  const line = make("line", { x1: 1, y1: 6, x2: 21, y2: 6, stroke: colour(system), "stroke-width": 2.4, "stroke-dasharray": DASHES[system.dash] });
  return make("svg", { class: "mark", width: 22, height: 12, "aria-hidden": "true" }, line, system.best ? diamond(11, 6, 5, system) : null);
}

function diamond(x, y, size, system) {
  return make("path", { d: `M${x} ${y - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}z`, fill: colour(system) });
}

/**
 * A chart in `place` that can be pointed at, zoomed and read by keyboard.
 *
 * `kind` says what is in it: its `height()`, `domain()` along x, the `frame(width, low, high)` it leaves for drawing, `paint(frame)`,
 * what `pick(x, frame, y)` finds nearest: { x, title, rows: [[system, estimate]], dots: [[x, y, system]] }, and the `stops(frame)` of arrow keys.
 */
function chart(place, kind) {
  const view = { zoom: null, at: null, frame: null };
  // Room is kept for what is not yet drawn, so that links lead where they say.
  const box = make("div", { class: "plot", style: `min-height: ${kind.height()}px` });
  place.append(box);

  function draw() {
    const [low, high] = view.zoom ?? kind.domain();
    const frame = (view.frame = kind.frame(box.clientWidth, low, high));
    const { left, right, top, bottom } = frame;
    frame.x = (value) => left + ((value - low) / (high - low || 1)) * (right - left);
    frame.back = (px) => low + ((px - left) / (right - left)) * (high - low);
    frame.layer = make("g");
    const clip = `clip${(chart.count = (chart.count ?? 0) + 1)}`;
    frame.svg = make("svg", {
      height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}`, tabindex: 0, role: "img", "aria-label": kind.label(), "data-low": low, "data-high": high,
      onpointerdown: press, onpointermove: move, onpointerup: release, onpointercancel: leave, onpointerleave: leave, ondblclick: reset, onkeydown: key, onblur: leave,
    });
    frame.inside = make("g", { "clip-path": `url(#${clip})` });
    frame.svg.append(
      make("defs", {}, make("clipPath", { id: clip }, make("rect", { x: left - 6, y: top - 6, width: Math.max(0, right - left + 12), height: bottom - top + 12 }))),
      make("rect", { x: 0, y: 0, width: frame.width, height: frame.height, fill: "transparent" }),
    );
    axis(frame, low, high);
    kind.paint(frame, low, high);
    frame.svg.append(frame.inside, frame.layer);
    const back = view.zoom ? make("button", { class: "reset", onclick: reset }, "reset zoom") : null;
    box.replaceChildren(frame.svg, ...(back ? [back] : []));
    box.style.minHeight = "";
  }

  function axis(frame, low, high) {
    const { found, decimals } = ticks(low, high, Math.max(3, Math.floor((frame.right - frame.left) / 58)));
    for (const value of found) {
      const px = frame.x(value);
      frame.svg.append(make("line", { class: "axis", x1: px, x2: px, y1: frame.bottom, y2: frame.bottom + 4 }));
      frame.svg.append(make("text", { x: px, y: frame.bottom + 17, "text-anchor": "middle" }, kind.tick(value, decimals)));
    }
    frame.svg.append(make("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
    frame.svg.append(make("text", { x: frame.right, y: frame.bottom + 34, "text-anchor": "end" }, kind.xLabel));
  }

  function show(px, py, aloud) {
    const frame = view.frame;
    const found = kind.pick(px, frame, py);
    view.at = found;
    box.querySelector(".tip")?.remove();
    if (!found) return frame.layer.replaceChildren();
    const dots = found.dots.map(([x, y, system]) => make("circle", { cx: x, cy: y, r: 3.6, fill: colour(system), stroke: "var(--paper)", "stroke-width": 1.5 }));
    const line = found.line ? [make("line", { class: "pick", x1: found.x, x2: found.x, y1: frame.top, y2: frame.bottom })] : [];
    frame.layer.replaceChildren(...line, ...dots);
    const rows = found.rows.map(([system, estimate, decimals]) =>
      make("tr", {}, make("td", {}, mark(system), " ", system.name), make("td", {}, make("b", {}, format(estimate[0], decimals))), make("td", {}, interval(estimate, decimals))));
    const tip = make("div", { class: "tip" }, make("b", {}, found.title), make("table", {}, make("tbody", {}, rows)));
    box.append(tip);
    const [x, y] = beside(found, frame, tip.offsetWidth);
    tip.style.transform = `translate(${x}px, ${y}px)`;
    if (aloud) document.getElementById("spoken").textContent = `${found.title}: ` +
      found.rows.map(([system, estimate, decimals]) => `${system.name} ${format(estimate[0], decimals)} ${interval(estimate, decimals)}`).join("; ");
  }

  /** Where words of this width hide nothing: right of what is meant, left of it, or else below the chart. */
  function beside(found, frame, width) {
    const edge = box.getBoundingClientRect().left;
    const y = found.y ?? frame.top;
    if (edge + found.x + 20 + width < document.documentElement.clientWidth) return [found.x + 14, y];
    if (edge + found.x - 20 - width > 0) return [found.x - 14 - width, y];
    return [clamp(found.x - width / 2, 0, Math.max(0, frame.width - width)), kind.upright ? y : frame.bottom + 22];
  }

  const point = (event) => {
    const edge = view.frame.svg.getBoundingClientRect();
    return [event.clientX - edge.left, event.clientY - edge.top];
  };

  function press(event) {
    if (event.button) return;
    view.from = point(event)[0];
    view.frame.svg.setPointerCapture(event.pointerId);
    show(...point(event));
  }

  function move(event) {
    const [px, py] = point(event);
    if (view.from === undefined || Math.abs(px - view.from) <= SLIP) return show(px, py);
    const { left, right, top, bottom, layer } = view.frame;
    const [a, b] = [view.from, px].map((x) => clamp(x, left, right)).sort((x, y) => x - y);
    box.querySelector(".tip")?.remove();
    layer.replaceChildren(make("rect", { class: "drag", x: a, width: b - a, y: top, height: bottom - top }));
  }

  function release(event) {
    const px = point(event)[0];
    const from = view.from;
    view.from = undefined;
    if (from !== undefined && Math.abs(px - from) > SLIP) zoom(from, px);
  }

  function zoom(from, to) {
    const { left, right, back } = view.frame;
    const chosen = [from, to].map((px) => back(clamp(px, left, right))).sort((a, b) => a - b);
    if (chosen[1] > chosen[0]) view.zoom = chosen;
    draw();
  }

  function leave(event) {
    view.from = undefined;
    if (event.pointerType === "touch") return; // what a finger has asked for stays until another is asked
    view.at = null;
    view.frame.layer.replaceChildren();
    box.querySelector(".tip")?.remove();
  }

  function reset() {
    view.zoom = null;
    draw();
  }

  function key(event) {
    const { left, right } = view.frame;
    const stops = kind.stops(view.frame);
    if (!stops.length) return;
    const spot = ([x, y]) => (kind.upright ? y : x);
    const now = view.at ? (kind.upright ? view.at.at : view.at.x) : -Infinity;
    const on = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (on) {
      const index = stops.findLastIndex((stop) => spot(stop) <= now + 0.5);
      show(...stops[clamp(index + on, 0, stops.length - 1)], true);
    } else if (event.key === "+" || event.key === "=") {
      const middle = view.at?.x ?? (left + right) / 2;
      zoom(middle - (right - left) / 4, middle + (right - left) / 4);
      view.frame.svg.focus();
    } else if (event.key === "Escape" || event.key === "-" || event.key === "0") {
      reset();
      view.frame.svg.focus();
    } else return;
    event.preventDefault();
  }

  return { place, draw };
}

/** Lines with bands. `lines()`: [{ system, x: [first, last], value, low, high, seeds }]; points lie evenly along x. */
function lineChart(place, { lines, bounds, xLabel, yLabel, xTick, title, decimals, height, label, seeds }) {
  const at = (line, k) => line.value.length < 2 ? line.x[0] : line.x[0] + ((line.x[1] - line.x[0]) * k) / (line.value.length - 1);
  const nearest = (line, x) => line.value.length < 2 ? 0 : clamp(Math.round(((x - line.x[0]) / (line.x[1] - line.x[0])) * (line.value.length - 1)), 0, line.value.length - 1);
  const path = (line, values, frame) => values.map((y, k) => `${k ? "L" : "M"}${frame.x(at(line, k)).toFixed(1)} ${frame.y(y).toFixed(1)}`).join("");

  function reach(low, high) {
    if (bounds) return bounds;
    let [least, most] = [Infinity, -Infinity];
    for (const line of lines())
      for (const set of [line.value, line.low, line.high, ...(seeds() ? line.seeds : [])])
        set.forEach((y, k) => {
          if (y === null || at(line, k) < low || at(line, k) > high) return;
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
      const [low, high] = [Math.min(...shown.map((line) => line.x[0])), Math.max(...shown.map((line) => line.x[1]))];
      // Training begins at 0; a budget rounded to whole updates still ends at its round number.
      return high > low ? [low < high / 10 ? Math.min(low, 0) : low, high > 1 ? high * 1.002 : high] : [low - 1, low + 1];
    },
    frame(width, low, high) {
      const [least, most] = reach(low, high);
      const scale = ticks(least, most, 5);
      const texts = scale.found.map((value) => format(value, scale.decimals));
      const left = 12 + 6.3 * Math.max(...texts.map((text) => text.length), 1);
      const [top, bottom] = [20, height - 40];
      const y = (value) => bottom - ((value - least) / (most - least)) * (bottom - top);
      return { width, height, left, right: width - 14, top, bottom, y, levels: scale.found.map((value, k) => [y(value), texts[k]]) };
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
          group.append(make("path", { class: "band", fill: colour(line.system), d: path(line, line.high, frame) + "L" + path({ ...line, x: [line.x[1], line.x[0]] }, [...line.low].reverse(), frame).slice(1) + "z" }));
        if (seeds()) for (const seed of line.seeds) group.append(make("path", { class: "seed", d: path(line, seed, frame) }));
        if (line.value.length > 1) group.append(make("path", { class: "series", "stroke-dasharray": DASHES[line.system.dash], d: path(line, line.value, frame) }));
        else group.append(make("circle", { class: "series", cx: frame.x(line.x[0]), cy: frame.y(line.value[0]), r: 3.5, style: `fill: ${colour(line.system)}` }));
        frame.inside.append(group);
      }
      if (!lines().length) frame.svg.append(make("text", { x: (frame.left + frame.right) / 2, y: (frame.top + frame.bottom) / 2, "text-anchor": "middle" }, "nothing chosen that is drawn here"));
    },
    pick(px, frame) {
      const x = frame.back(clamp(px, frame.left, frame.right));
      const shown = lines();
      if (!shown.length) return null;
      const close = shown.map((line) => at(line, nearest(line, x))).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
      const within = (line) => {
        const gap = (line.x[1] - line.x[0]) / Math.max(line.value.length - 1, 1) / 2;
        return close >= line.x[0] - gap && close <= line.x[1] + gap;
      };
      const rows = shown.filter(within).map((line) => [line, nearest(line, close)]).sort(([a, i], [b, k]) => b.value[k] - a.value[i]);
      return {
        x: frame.x(close), line: true, title: title(close),
        rows: rows.map(([line, k]) => [line.system, [line.value[k], line.low[k], line.high[k]], decimals]),
        dots: rows.map(([line, k]) => [frame.x(at(line, k)), frame.y(line.value[k]), line.system]).filter(([x]) => x >= frame.left - 1 && x <= frame.right + 1),
      };
    },
    stops(frame) {
      const [line] = lines();
      const all = line ? line.value.map((_, k) => [frame.x(at(line, k)), frame.top]) : [];
      return all.filter(([x]) => x >= frame.left - 1 && x <= frame.right + 1);
    },
  });
}

/** Points with intervals, one row a system. `rows()`: [[system, estimate]]. */
function intervalChart(place, { rows, bounds, half, xLabel, label }) {
  const step = 27;
  return chart(place, {
    xLabel,
    label,
    upright: true,
    tick: format,
    height: () => 48 + step * Math.max(rows().length, 1),
    domain() {
      if (bounds) return bounds;
      const all = rows().flatMap(([, estimate]) => estimate).filter((value) => value !== null);
      const [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
      const room = (high - low) * 0.08 || 0.05;
      return [low - room, high + room];
    },
    frame(width) {
      const names = rows().map(([system]) => system.name.length);
      const left = Math.min(16 + 7 * Math.max(...names, 6), width * 0.36);
      const values = 112;
      const bottom = this.height() - 40;
      return { width, height: this.height(), left, right: width - values - 14, values: width - values, top: 4, bottom, y: (k) => 8 + step * (k + 0.5) };
    },
    paint(frame, low, high) {
      if (half && low < 0.5 && high > 0.5) frame.svg.append(make("line", { class: "half", x1: frame.x(0.5), x2: frame.x(0.5), y1: frame.top, y2: frame.bottom }));
      rows().forEach(([system, estimate], k) => {
        const [value, least, most] = estimate;
        const y = frame.y(k);
        const fits = Math.floor((frame.left - 12) / 6.6);
        const name = system.name.length > fits ? system.name.slice(0, fits - 1) + "…" : system.name;
        frame.svg.append(make("line", { class: "rule", x1: frame.left, x2: frame.right, y1: y, y2: y }));
        frame.svg.append(make("text", { class: "name", x: 0, y: y + 4 }, make("title", {}, system.name), name));
        frame.svg.append(make("text", { x: frame.values, y: y + 4 }, `${format(value)} ${interval(estimate)}`));
        const group = make("g", { "data-system": system.name, stroke: colour(system) });
        if (least !== null) group.append(make("line", { class: "span", x1: frame.x(least), x2: frame.x(most), y1: y, y2: y, "stroke-width": 5, opacity: 0.32, "stroke-linecap": "butt" }));
        group.append(system.best ? diamond(frame.x(value), y, 6, system)
          : make("circle", { cx: frame.x(value), cy: y, r: 4.6, "stroke-width": 2, fill: system.dash ? "var(--paper)" : colour(system) }));
        frame.inside.append(group);
      });
    },
    pick(px, frame, py) {
      const shown = rows();
      if (!shown.length) return null;
      const k = clamp(Math.round((py - 8) / step - 0.5), 0, shown.length - 1);
      const [system, estimate] = shown[k];
      return { x: frame.x(estimate[0]), at: frame.y(k), y: frame.y(k) + 10, title: xLabel, rows: [[system, estimate, 3]], dots: [] };
    },
    stops: (frame) => rows().map(([, estimate], k) => [frame.x(estimate[0]), frame.y(k)]),
  });
}

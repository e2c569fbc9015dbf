// The frame of every chart: its axis, and what pointing, dragging and keys do.

const SLIP = 8; // a press that moves less, in pixels, is no drag
let drawings = 0; // so far: each needs an id of its own

/**
 * A chart in `place` that can be pointed at, zoomed and read by keyboard.
 *
 * `kind` says what is in it: its `height()`, its `domain()` along x, the `frame(width, low, high)` left for
 * drawing, `paint(frame)`, what `pick(x, frame, y)` finds nearest, as { x, title, rows: [[system, estimate,
 * decimals]], dots: [[x, y, system]] }, and the `stops(frame)` of arrow keys; `places()`, if there are any, are
 * what its axis is marked at.
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
    const clip = `clip${++drawings}`;
    frame.svg = make("svg", {
      height: frame.height,
      viewBox: `0 0 ${frame.width} ${frame.height}`,
      tabindex: 0,
      role: "img",
      "aria-label": kind.label(),
      "data-low": low,
      "data-high": high,
      onpointerdown: press,
      onpointermove: move,
      onpointerup: release,
      onpointercancel: leave,
      onpointerleave: leave,
      ondblclick: reset,
      onkeydown: key,
      onblur: leave,
    });
    frame.inside = make("g", { "clip-path": `url(#${clip})` });
    frame.svg.append(
      make(
        "defs",
        {},
        make(
          "clipPath",
          { id: clip },
          make("rect", {
            x: left - 6,
            y: top - 6,
            width: Math.max(0, right - left + 12),
            height: bottom - top + 12,
          }),
        ),
      ),
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
    let free = -Infinity;
    for (const value of kind.places?.() ?? found) {
      if (kind.places?.() && (value < low || value > high || frame.x(value) < free)) continue;
      free = frame.x(value) + 24;
      const px = frame.x(value);
      frame.svg.append(
        make("line", { class: "axis", x1: px, x2: px, y1: frame.bottom, y2: frame.bottom + 4 }),
      );
      frame.svg.append(
        make("text", { x: px, y: frame.bottom + 17, "text-anchor": "middle" }, kind.tick(value, decimals)),
      );
    }
    frame.svg.append(
      make("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }),
    );
    frame.svg.append(
      make("text", { x: frame.right, y: frame.bottom + 34, "text-anchor": "end" }, kind.xLabel),
    );
  }

  function show(px, py, aloud) {
    const frame = view.frame;
    const found = kind.pick(px, frame, py);
    view.at = found;
    box.querySelector(".tip")?.remove();
    if (!found) return frame.layer.replaceChildren();
    const dots = found.dots.map(([x, y, system]) =>
      make("circle", {
        cx: x,
        cy: y,
        r: 3.6,
        fill: colour(system),
        stroke: "var(--paper)",
        "stroke-width": 1.5,
      }),
    );
    const line = found.line
      ? [make("line", { class: "pick", x1: found.x, x2: found.x, y1: frame.top, y2: frame.bottom })]
      : [];
    frame.layer.replaceChildren(...line, ...dots);
    const rows = found.rows.map(([system, estimate, decimals]) =>
      make(
        "tr",
        {},
        make("td", {}, mark(system), " ", system.name),
        make("td", {}, make("b", {}, format(estimate[0], decimals))),
        make("td", {}, interval(estimate, decimals)),
      ),
    );
    const tip = make(
      "div",
      { class: "tip" },
      make("b", {}, found.title),
      make("table", {}, make("tbody", {}, rows)),
    );
    box.append(tip);
    const [x, y] = beside(found, frame, tip.offsetWidth);
    tip.style.transform = `translate(${x}px, ${y}px)`;
    if (aloud)
      document.getElementById("spoken").textContent =
        `${found.title}: ` +
        found.rows
          .map(
            ([system, estimate, decimals]) =>
              `${system.name} ${format(estimate[0], decimals)} ${interval(estimate, decimals)}`,
          )
          .join("; ");
  }

  /** Where words of this width hide nothing: right of what is meant, left of it, or else below the chart. */
  function beside(found, frame, width) {
    const edge = box.getBoundingClientRect().left;
    const y = found.y ?? frame.top;
    if (edge + found.x + 20 + width < document.documentElement.clientWidth) return [found.x + 14, y];
    if (edge + found.x - 20 - width > 0) return [found.x - 14 - width, y];
    return [
      clamp(found.x - width / 2, 0, Math.max(0, frame.width - width)),
      kind.upright ? y : frame.bottom + 22,
    ];
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

// Shapes as SVG; colours are roles that the style defines for light and dark.

const paint = (role) => (role ? `var(--${role})` : "none");

function shape([kind, , ...rest]) {
  if (kind === "rect") {
    const [x, y, width, height, fill, line, thick, radius] = rest;
    const look = { fill: paint(fill), stroke: paint(line), "stroke-width": thick };
    return make("rect", { x, y, width, height, rx: radius, ...look });
  }
  if (kind === "disc") {
    const [cx, cy, r, fill, line, thick] = rest;
    return make("circle", { cx, cy, r, fill: paint(fill), stroke: paint(line), "stroke-width": thick });
  }
  if (kind === "path" || kind === "area") {
    const [points, colour, thick] = rest;
    const pairs = points.flatMap((x, k) => (k % 2 ? [] : [`${x} ${points[k + 1]}`]));
    const d = `M${pairs.join("L")}`;
    if (kind === "area") return make("path", { d: `${d}Z`, fill: paint(colour) });
    const look = { "stroke-linecap": "round", "stroke-linejoin": "round", fill: "none" };
    return make("path", { d, stroke: paint(colour), "stroke-width": thick, ...look });
  }
  const [x, y, size, text, fill, place] = rest;
  return make("text", { x, y, "font-size": size, "text-anchor": place, fill: paint(fill) }, text);
}

/** The map of an episode: `show(frame)` brings it up to date, touching only what changed; `marks` draws rings
 * where agents once were. */
function mapOf(scene, label) {
  const drawn = make("g", {});
  const rings = make("g", { id: "rings" });
  const box = `0 0 ${scene.width} ${scene.height}`;
  const svg = make("svg", { viewBox: box, role: "img", "aria-label": label }, drawn, rings);
  const frames = unfold(scene);
  const nodes = new Map();
  function show(frame) {
    const wanted = new Set(frames[frame]);
    for (const [id, node] of nodes) {
      if (!wanted.has(id)) {
        node.remove();
        nodes.delete(id);
      }
    }
    let after = drawn.firstChild;
    for (const id of frames[frame]) {
      if (!nodes.has(id)) nodes.set(id, shape(scene.shapes[id]));
      const node = nodes.get(id);
      if (node === after) after = after.nextSibling;
      else drawn.insertBefore(node, after);
    }
  }
  function marks(spots) {
    const unit = Math.max(scene.width, scene.height) / 100;
    rings.replaceChildren(
      ...spots.map(({ x, y, share, colour }) =>
        make("circle", {
          cx: x,
          cy: y,
          r: unit * (3.2 + 4 * Math.sqrt(share)),
          fill: "none",
          stroke: colour,
          "stroke-width": unit * (0.35 + 1.6 * share),
          "stroke-dasharray": `${unit} ${unit * 0.8}`,
        }),
      ),
    );
  }
  return { svg, show, marks };
}

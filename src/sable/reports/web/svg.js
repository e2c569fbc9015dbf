// Elements, numbers and ticks. Names come from files: they are set as text or attributes, never as markup.

const DRAWN = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title", "clipPath", "defs"]);
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
  const units = [
    { unit: 1e9, name: " G" },
    { unit: 1e6, name: " M" },
    { unit: 1e3, name: " k" },
  ];
  const { unit, name } = units.find(({ unit }) => Math.abs(value) >= unit) ?? { unit: 1, name: "" };
  return String(+(value / unit).toPrecision(3)).replace("-", "−") + name;
}

const interval = ([, low, high], decimals) =>
  low === null ? "" : `[${format(low, decimals)}, ${format(high, decimals)}]`;
const colour = (system) => `var(--c${system.colour})`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Round numbers in [low, high], about as many as asked for. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const found = Array.from(
    { length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) },
    (_, k) => (first + k) * step,
  );
  return { found, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

/** 1, 2 and 5 times powers of ten between 10 ** low and 10 ** high; the powers alone where there are many. */
function decades(low, high) {
  const steps = high - low > 2.5 ? [1] : [1, 2, 5];
  return Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, k) => Math.floor(low) + k)
    .flatMap((power) => steps.map((step) => step * 10 ** power))
    .filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
}

/** A line sample as in the legend: the system's colour, its dashes, a diamond for the best of variants. */
function mark(system) {
  const line = make("line", {
    x1: 1,
    y1: 6,
    x2: 21,
    y2: 6,
    stroke: colour(system),
    "stroke-width": 2.4,
    "stroke-dasharray": DASHES[system.dash],
  });
  return make(
    "svg",
    { class: "mark", width: 22, height: 12, "aria-hidden": "true" },
    line,
    system.best ? diamond(11, 6, 5, system) : null,
  );
}

function diamond(x, y, size, system) {
  return make("path", {
    d: `M${x} ${y - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}z`,
    fill: colour(system),
  });
}

// The whole episode in one strip: rewards as bars, the team's mean value as a line, and where we are.

function timeline(episode, go) {
  const [width, height, floor] = [1000, 76, 58];
  const step = width / Math.max(episode.length, 1);
  const gains = episode.rewards.map((row) => row.reduce((a, b) => a + b, 0) / row.length);
  const reach = Math.max(...gains.map(Math.abs), 1e-9);
  const down = gains.some((gain) => gain < 0);
  const zero = down ? (gains.some((gain) => gain > 0) ? (floor + 6) / 2 : 6) : floor;
  const room = down && gains.some((gain) => gain > 0) ? floor / 2 - 4 : floor - 8;
  const children = [make("line", { x1: 0, x2: width, y1: zero, y2: zero, stroke: "var(--line)" })];
  gains.forEach((gain, t) => {
    if (!gain) return;
    const high = Math.max((Math.abs(gain) / reach) * room, 1);
    children.push(
      make("rect", {
        x: t * step + (step > 4 ? 1 : 0),
        y: gain > 0 ? zero - high : zero,
        width: Math.max(step - (step > 4 ? 2 : 0), 2),
        height: high,
        fill: gain > 0 ? "var(--good)" : "var(--poor)",
        opacity: 0.65,
      }),
    );
  });
  if (episode.values) {
    const means = gains.map((_, t) => {
      const row = episode.values.slice(t * data.shown, (t + 1) * data.shown);
      return row.reduce((a, b) => a + b, 0) / row.length;
    });
    const [low, high] = [Math.min(...means), Math.max(...means)];
    const y = (value) => floor - 4 - ((value - low) / (high - low || 1)) * (floor - 12);
    const d = means.map((value, t) => `${t ? "L" : "M"}${((t + 0.5) * step).toFixed(1)} ${y(value).toFixed(1)}`);
    const line = { fill: "none", stroke: "var(--a0)", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" };
    children.push(make("path", { d: d.join(""), ...line }));
  }
  const cursor = make("line", {
    y1: 0,
    y2: floor + 2,
    stroke: "var(--ink)",
    "stroke-width": 1.5,
    "vector-effect": "non-scaling-stroke",
  });
  const svg = make(
    "svg",
    {
      viewBox: `0 0 ${width} ${height - 18}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
      onclick: (event) => {
        const box = svg.getBoundingClientRect();
        go(Math.round(((event.clientX - box.left) / box.width) * episode.length));
      },
    },
    children,
    cursor,
  );
  const show = (t) => {
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, t * step);
  };
  return { svg, show };
}

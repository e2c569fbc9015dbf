// The page: a map, a slider, what each agent does, and what its memory weighs.

const data = await read(document.getElementById("data").textContent);
const state = { episode: 0, t: 0, agent: 0, option: 0, playing: null, pace: data.pace };
let episode, map, strip;

/** The element of that id; any kind of it. @returns {any} */
const $ = (id) => document.getElementById(id);
/** @returns {any} */
const focused = () => document.activeElement;
const labelled = (text, control) => make("label", { class: "small" }, `${text} `, control);

function choose(id, label, names, onchange) {
  const options = names.map((name, k) => make("option", { value: k }, name));
  return make("select", { id, "aria-label": label, onchange: () => onchange(Number($(id).value)) }, options);
}

function frame() {
  const one = data.episodes.length > 1 ? `${data.episodes.length} episodes` : "one episode";
  $("top").append(
    make(
      "div",
      {},
      make("h1", {}, `${data.system} on ${data.task}`),
      make("p", { class: "lead" }, `${data.agents} agents, ${data.how}, ${one}.`),
    ),
    themeButton(),
  );
  document.title = `${data.system} on ${data.task} · Sable replay`;
  const slider = make("input", { type: "range", id: "slider", min: 0, value: 0, "aria-label": "Step" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const paces = [0.5, 1, 2, 4, 8];
  const pace = choose("pace", "Speed", paces.map((x) => `${x}×`), (k) => {
    state.pace = data.pace * paces[k];
    if (state.playing) (pause(), play());
  });
  const episodes = data.episodes.map((one, k) => `episode ${k + 1}: return ${format(one.returns.at(-1), 2)}`);
  $("main").append(
    make(
      "section",
      { id: "stage", class: "card", "aria-label": "The episode" },
      make("div", { id: "map" }),
      slider,
      make("div", { id: "timeline" }),
      make(
        "div",
        { id: "controls" },
        make("button", { type: "button", id: "play", onclick: toggle }, "Play"),
        make("button", { type: "button", "aria-label": "One step back", onclick: () => go(state.t - 1) }, "←"),
        make("button", { type: "button", "aria-label": "One step on", onclick: () => go(state.t + 1) }, "→"),
        make("span", { id: "where" }),
        pace,
        episodes.length > 1 ? choose("episode", "Episode", episodes, open) : null,
      ),
      make("ul", { id: "legend" }),
      make("p", { class: "small" }, strapline()),
    ),
    make(
      "div",
      { class: "card" },
      make(
        "section",
        { "aria-label": "What the agents do" },
        make("h2", {}, "What they do"),
        make("div", { class: "order", id: "order" }),
        make("div", { id: "agents" }),
        make("p", { class: "small" }, oddsline()),
      ),
      data.episodes[0].memory ? make("section", { id: "memory", "aria-label": "What is remembered" }) : null,
    ),
  );
  pace.value = 1;
  order();
  $("foot").append(make("p", { class: "small" }, data.made));
}

function strapline() {
  const line = data.episodes[0].values ? "; the line is the team's mean value" : "";
  return `Above the controls: the reward of every step${line}. Space plays, ← and → step, with Shift by ten; ↑ and ↓ choose an agent.`;
}

function oddsline() {
  const rest = data.shown < data.agents ? ` The first ${data.shown} of ${data.agents} agents are listed.` : "";
  const values = data.episodes[0].values ? " Value: the return an agent expects from here on." : "";
  const every = data.actions.length > MOST_BARS ? "the likeliest actions" : "every action";
  const what = {
    probability: `Bars: the probability of ${every}, to half a percent; the one taken is coloured.`,
    q: `Bars: the Q-value of ${every}; the one taken is coloured.`,
    spread: "Marks: what was done, from lowest to highest; bands: one standard deviation about the policy's centre.",
  }[data.odds];
  return `${what ?? ""}${values}${rest}`;
}

/** Who decides after whom. */
function order() {
  if (!data.inTurn) {
    $("order").append("All agents decide at once.");
    return;
  }
  const listed = Array.from({ length: Math.min(data.agents, 12) }, (_, k) => [k ? "→" : "", badge(k)]);
  const more = data.agents > 12 ? `→ … → ${data.agents}` : "";
  $("order").append("They decide in turn, each told what those before it do:", ...listed.flat(), more);
}

function open(index) {
  state.episode = index;
  episode = unpack(data.episodes[index]);
  map = mapOf(episode.scene, `${data.task}, as it was played`);
  strip = timeline(episode, go);
  $("map").replaceChildren(map.svg);
  $("timeline").replaceChildren(strip.svg);
  $("slider").max = episode.length;
  $("legend").replaceChildren(
    ...episode.scene.legend.map(([shapes, text]) =>
      make("li", {}, make("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, shapes.map(shape)), text),
    ),
  );
  if (episode.memory) chooser();
  go(0);
}

function chooser() {
  const names = episode.memory.options.map((option) => option.name);
  const layer = choose("layer", "Layer", names, (k) => {
    state.option = k;
    show();
  });
  $("memory").replaceChildren(
    make("h2", { id: "whose" }),
    make("p", { class: "small" }, episode.memory.about),
    make("div", { class: "choice" }, labelled("Layer", layer)),
    make("div", { id: "recalled" }),
    make("p", { class: "small" }, episode.memory.note),
  );
  layer.value = state.option;
}

function show() {
  const { t, agent } = state;
  map.show(t);
  strip.show(t);
  $("slider").value = t;
  const gain = t ? episode.rewards[t - 1].reduce((a, b) => a + b, 0) / episode.rewards[t - 1].length : 0;
  const kind = gain > 0 ? "gain" : "loss";
  $("where").replaceChildren(
    make("b", {}, `step ${t} of ${episode.length}`),
    ` · return ${format(t ? episode.returns[t - 1] : 0, 2)} `,
    gain ? make("span", { class: kind }, `${gain > 0 ? "+" : ""}${format(gain, 2)}`) : "",
    t === episode.length ? " · over" : "",
  );
  const rows = Array.from({ length: data.shown }, (_, k) => agentRow(episode, t, k, k === agent, pick));
  const held = focused()?.dataset?.agent;
  $("agents").replaceChildren(...rows);
  if (held) rows[held - 1]?.focus({ preventScroll: true });
  if (episode.memory) remember(t, agent);
  if (!state.playing) $("spoken").textContent = $("where").textContent;
}

function remember(t, agent) {
  const option = episode.memory.options[state.option];
  const there = agent < episode.memory.agents && t < episode.length;
  $("whose").replaceChildren(`What agent ${agent + 1} recalls${there ? ` at step ${t}` : ""}`);
  $("recalled").replaceChildren(
    ...(there ? memoryOf(episode, t, agent, option, go) : [make("p", { class: "small" }, "The episode is over.")]),
  );
  const placed = data.placed;
  const spots = !there || !episode.anchors ? [] : tops(episode, t, agent, option).filter(({ of }) => of < placed);
  map.marks(
    spots.map(({ step, of, share }) => ({
      x: episode.anchors[(step * placed + of) * 2],
      y: episode.anchors[(step * placed + of) * 2 + 1],
      share: Math.abs(share),
      colour: own(of),
    })),
  );
}

function go(t) {
  state.t = clamp(t, 0, episode.length);
  show();
}

function pick(agent) {
  state.agent = clamp(agent, 0, data.shown - 1);
  show();
  document.querySelector(`[data-agent="${state.agent + 1}"]`)?.scrollIntoView({ block: "nearest" });
}

function play() {
  if (state.t >= episode.length) state.t = 0;
  state.playing = setInterval(() => {
    if (state.t >= episode.length) pause();
    else go(state.t + 1);
  }, 1000 / state.pace);
  $("play").textContent = "Pause";
  show();
}

function pause() {
  clearInterval(state.playing);
  state.playing = null;
  $("play").textContent = "Play";
  show();
}

const toggle = () => (state.playing ? pause() : play());

/** Whether an event happened at such an element. */
const at = (event, selector) => event.target.matches(selector);

addEventListener("keydown", (event) => {
  if (at(event, "select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const far = event.shiftKey ? 10 : 1;
  const keys = {
    " ": toggle,
    ArrowLeft: () => go(state.t - far),
    ArrowRight: () => go(state.t + far),
    ArrowUp: () => pick(state.agent - 1),
    ArrowDown: () => pick(state.agent + 1),
    Home: () => go(0),
    End: () => go(episode.length),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

// A button that has the focus would be pressed by the space bar too, in some browsers when it is let go.
addEventListener("keyup", (event) => {
  if (event.key === " " && at(event, "button")) event.preventDefault();
});

frame();
open(0);

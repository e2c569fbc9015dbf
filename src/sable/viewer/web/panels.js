// What each agent does and why: actions with their probabilities, values, and what its memory weighs.

const MOST_BARS = 8;
const own = (agent) => `var(--a${agent % 8})`;
const percent = (share) => (share > 0 && share < 0.005 ? "<1 %" : `${Math.round(share * 100)} %`);
const badge = (agent) => make("span", { class: "badge", style: `background:${own(agent)}` }, String(agent + 1));

/** The parts of an episode that the panels read, with their arrays unpacked. */
function unpack(episode) {
  const memory = episode.memory && {
    ...episode.memory,
    options: episode.memory.options.map((option) => ({
      name: option.name,
      kind: option.kind,
      byAgent: numbers(option.byAgent),
      byLag: numbers(option.byLag),
      topLag: numbers(option.topLag),
      topAgent: numbers(option.topAgent),
      topShare: numbers(option.topShare),
    })),
  };
  return {
    ...episode,
    action: numbers(episode.action),
    odds: numbers(episode.odds),
    values: numbers(episode.values),
    anchors: numbers(episode.anchors),
    memory,
  };
}

/** An action's name and how likely it was. */
function chosen(episode, t, agent) {
  const at = (t * data.shown + agent) * (data.discrete ? 1 : data.actions.length);
  if (!data.discrete) {
    const said = Array.from(episode.action.slice(at, at + data.actions.length), (x) => format(x / 100, 1));
    return { name: said.slice(0, 3).join(" ") + (said.length > 3 ? " …" : ""), chance: null };
  }
  const index = episode.action[at];
  const chance = data.odds === "probability" ? episode.odds[(at * data.actions.length) + index] / 200 : null;
  return { name: data.actions[index], chance, index };
}

function bars(episode, t, agent) {
  const count = data.actions.length;
  const at = (t * data.shown + agent) * count;
  const { index } = chosen(episode, t, agent);
  // Where there are many actions, the likely ones alone.
  let shown = Array.from({ length: count }, (_, k) => k);
  if (count > MOST_BARS) {
    const likely = [...shown].sort((a, b) => level(b) - level(a)).slice(0, MOST_BARS - 1);
    shown = shown.filter((k) => likely.includes(k) || k === index);
  }
  function level(k) {
    const found = episode.odds[at + k];
    if (data.odds === "probability") return found === 255 ? 0 : found / 200;
    return found === 255 ? 0 : found / 254;
  }
  return make(
    "span",
    { class: "odds" },
    shown.map((k) => {
      const banned = episode.odds[at + k] === 255;
      const amount =
        data.odds === "probability"
          ? percent(level(k))
          : format(episode.oddsLow + level(k) * (episode.oddsHigh - episode.oddsLow), 2);
      const title = `${data.actions[k]}: ${banned ? "not allowed" : amount}`;
      return make(
        "span",
        { class: `odd${k === index ? " taken" : ""}${banned ? " banned" : ""}`, title },
        make("i", { style: `height:${(level(k) * 100).toFixed(1)}%` }),
        make("span", {}, banned ? "–" : shortAction(data.actions[k])),
      );
    }),
  );
}

const shortAction = (name) =>
  ({ forward: "ahead", "turn left": "left", "turn right": "right" })[name] ??
  name.replace("action ", "").replace("attack ", "⚔");

/** Continuous actions: where each component is, on a band it was likely to be in. */
function dials(episode, t, agent) {
  const size = data.actions.length;
  const at = (t * data.shown + agent) * size;
  const spot = (x) => ((x + 100) / 200) * 100;
  return make(
    "span",
    { class: "dials" },
    data.actions.slice(0, 9).map((name, k) => {
      const taken = episode.action[at + k];
      const band = episode.odds && Array.from(episode.odds.slice((at + k) * 3, (at + k) * 3 + 3));
      const title = `${name}: ${format(taken / 100, 2)}`;
      return make(
        "span",
        { class: "dial", title },
        band ? make("i", { style: `left:${spot(band[0])}%;width:${spot(band[2]) - spot(band[0])}%` }) : null,
        make("b", { style: `left:${spot(taken)}%` }),
      );
    }),
  );
}

function agentRow(episode, t, agent, picked, pick) {
  const acted = t < episode.length ? chosen(episode, t, agent) : null;
  const value = acted && episode.values ? format(episode.values[t * data.shown + agent], 2) : null;
  const reward = t > 0 ? episode.rewards[t - 1][Math.min(agent, episode.rewards[t - 1].length - 1)] : 0;
  return make(
    "button",
    {
      type: "button",
      class: "agent",
      style: `--own:${own(agent)}`,
      "aria-pressed": picked ? "true" : "false",
      "data-agent": agent + 1,
      onclick: () => pick(agent),
    },
    badge(agent),
    make(
      "span",
      { class: "does" },
      acted ? acted.name : "episode over",
      acted && acted.chance !== null ? make("small", {}, percent(acted.chance)) : null,
    ),
    acted && data.odds ? (data.discrete ? bars(episode, t, agent) : dials(episode, t, agent)) : make("span", {}),
    make(
      "span",
      { class: "worth" },
      value !== null ? [make("small", {}, "value"), value] : null,
      reward && episode.rewards[t - 1].length > 1
        ? make("small", { class: reward > 0 ? "gain" : "loss" }, `got ${format(reward, 2)}`)
        : null,
    ),
  );
}

const lagName = (lags, k) => {
  const [low, high] = [lags[k], lags[k + 1]];
  return k === 0 ? "now" : high === undefined ? `${low}+` : high - 1 === low ? String(low) : `${low}–${high - 1}`;
};

/** What one agent recalls at a step through one layer; `option` says which. */
function memoryOf(episode, t, agent, option, go) {
  const { lags, top } = episode.memory;
  const at = t * episode.memory.agents + agent;
  const parts = [];
  if (option.byAgent) {
    const shares = Array.from(option.byAgent.slice(at * data.agents, (at + 1) * data.agents), (x) => x / 200);
    parts.push(
      make("h3", {}, "Whom"),
      make(
        "div",
        { class: "bar" },
        shares.map((share, k) =>
          make(
            "div",
            {
              style: `flex:${share} 0 0;background:${own(k)}`,
              title: `agent ${k + 1}: ${percent(share)}`,
              "data-share": share,
            },
            share > 0.07 ? `${k + 1}: ${percent(share)}` : "",
          ),
        ),
      ),
    );
  }
  const spans = Array.from(option.byLag.slice(at * lags.length, (at + 1) * lags.length), (x) => x / 200);
  const tallest = Math.max(...spans, 0.3);
  const used = spans.slice(0, Math.max(lags.filter((lag) => lag <= episode.length - 1).length, 1));
  parts.push(
    make("h3", {}, "How many steps ago"),
    make(
      "div",
      { class: "lags" },
      used.map((share, k) =>
        make(
          "span",
          { class: "odd", title: `${lagName(lags, k)}: ${percent(share)}` },
          make("span", {}, share >= 0.005 ? percent(share) : ""),
          make("i", { style: `height:${((share / tallest) * 58).toFixed(1)}%` }),
          make("span", {}, lagName(lags, k)),
        ),
      ),
    ),
  );
  const found = tops(episode, t, agent, option);
  parts.push(
    make("h3", {}, `The ${top} largest parts`),
    make(
      "ul",
      { class: "tops" },
      found.map(({ step, of, share }) =>
        make(
          "li",
          {},
          make(
            "button",
            { type: "button", style: `--own:${own(of)}`, title: `go to step ${step}`, onclick: () => go(step) },
            badge(of),
            make(
              "span",
              {},
              step === t ? "now" : `${t - step} step${t - step > 1 ? "s" : ""} ago`,
              make("small", {}, whatOf(episode, step, of, option)),
            ),
            make(
              "span",
              { class: `meter${share < 0 ? " less" : ""}` },
              make("i", { style: `width:${Math.abs(share) * 100}%` }),
            ),
            make("b", {}, percent(Math.abs(share))),
          ),
        ),
      ),
    ),
  );
  return parts;
}

/** What a token stands for: in the encoder what an agent saw, in the decoder what it was told. */
function whatOf(episode, step, agent, option) {
  if (option.kind === "encoder") return `what ${agent + 1} saw`;
  if (agent === 0) return "1's turn, told nothing yet";
  if (agent > data.shown) return `${agent + 1}'s turn`;
  return `${agent + 1}'s turn, told that ${agent} does: ${chosen(episode, step, agent - 1).name}`;
}

function tops(episode, t, agent, option) {
  const { top } = episode.memory;
  const at = (t * episode.memory.agents + agent) * top;
  return Array.from({ length: top }, (_, k) => ({
    step: t - option.topLag[at + k],
    of: option.topAgent[at + k],
    share: option.topShare[at + k] / 100,
  })).filter(({ share }) => share !== 0);
}

"""One PettingZoo parallel environment as arrays: views flattened and padded, masks, alive agents, true ends.

Runs in a worker process, without jax. Environments of gymnasium whose spaces are tuples, one entry per agent
(rware, lbforaging), are taken for parallel ones.
"""

import dataclasses
import typing as tp

import numpy as np
from gymnasium import spaces

from sable.errors import SableError

_LIMITS = ("max_cycles", "max_steps", "_max_episode_steps", "max_episode_steps")
"""Names that environments give the most steps an episode can last."""


class TeamObservation(tp.NamedTuple):
    """The team's view of the environment before it acts."""

    view: np.ndarray  # [N, F] float32; zeros for an agent that is not there
    action_mask: np.ndarray  # [N, A] bool; [N, 1] of ones where actions are continuous
    step_count: int


class TeamStep(tp.NamedTuple):
    """The result of an action."""

    observation: TeamObservation
    reward: np.ndarray  # [N] float32
    done: bool
    terminated: bool
    """Whether the episode truly ended, rather than was cut short."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The fields of an `EnvSpec`."""

    num_agents: int
    view_size: int
    time_limit: int
    num_actions: int
    action_size: int


class Team:
    """A parallel environment and how its agents' spaces map to arrays."""

    def __init__(
        self,
        env: tp.Any,
        time_limit: tp.Any = None,
        note: tp.Callable[[str], None] = lambda text: None,
    ):
        """`note` is told, in words, what is odd about the environment and can be lived with."""
        self.env, self.note = _parallel(env), note
        self.noted: set[str] = set()
        self.agents = list(self.env.possible_agents)
        self.declared = frozenset(self.agents)
        self.views = [_view_space(self.env.observation_space(agent)) for agent in self.agents]
        self.actions = [self.env.action_space(agent) for agent in self.agents]
        self.sizes = Sizes(
            num_agents=len(self.agents),
            view_size=max(spaces.flatdim(space) for space in self.views),
            time_limit=_time_limit(env, time_limit),
            **_action_sizes(self.agents, self.actions),
        )
        self.step_count, self.live = 0, set()

    def reset(self, seed: int) -> TeamObservation:
        observations, infos = self.env.reset(seed=seed)
        self.step_count, self.live = 0, set(self.env.agents)
        self._refuse_strangers()
        return self._observation(observations, infos, self.live)

    def step(self, action: np.ndarray) -> TeamStep:
        alive = self.live
        chosen = {
            agent: self._action(space, action[i])
            for i, (agent, space) in enumerate(zip(self.agents, self.actions, strict=True))
            if agent in alive
        }
        observations, rewards, terminations, truncations, infos = self.env.step(chosen)
        self.step_count += 1
        # An agent may leave before the others: it is dead from its own last step on.
        finished = {agent for agent in alive if terminations.get(agent) or truncations.get(agent)}
        self.live = set(self.env.agents) - finished
        self._refuse_strangers()
        truncated = any(truncations.get(agent) and not terminations.get(agent) for agent in alive)
        terminated = not self.live and not truncated
        done = not self.live or self.step_count >= self.sizes.time_limit
        if not rewards.keys() <= self.declared:
            self._note_strangers(rewards)
        reward = np.array([rewards.get(agent, 0.0) if agent in alive else 0.0 for agent in self.agents])
        # The last observation counts for all who have one; a dead agent's is not seen while others go on.
        observation = self._observation(observations, infos, set(observations) if done else self.live, done)
        return TeamStep(observation, reward.astype(np.float32), done, terminated)

    def _refuse_strangers(self) -> None:
        if strangers := self.live - set(self.agents):
            raise SableError(
                f"agent {min(map(str, strangers))!r} is not among possible_agents: sable needs to know all "
                "agents that can ever appear"
            )

    def _note_strangers(self, rewards: dict) -> None:
        """Note, once each, who is rewarded and was never declared."""
        for stranger in sorted({*map(str, rewards.keys() - self.declared)} - self.noted):
            self.noted.add(stranger)
            self.note(f"a reward for agent {stranger!r}, which is not among possible_agents, is ignored")

    def _observation(
        self, observations: dict, infos: dict, shown: set, done: bool = False
    ) -> TeamObservation:
        sizes = self.sizes
        view = np.zeros((sizes.num_agents, sizes.view_size), np.float32)
        action_mask = np.zeros((sizes.num_agents, max(sizes.num_actions, 1)), bool)
        for i, agent in enumerate(self.agents):
            if agent not in shown:
                action_mask[i, 0] = True  # whatever a dead agent does is not done
                continue
            if agent not in observations:
                raise SableError(f"agent {agent!r} is alive and was given no observation")
            observation, mask = observations[agent], infos.get(agent, {}).get("action_mask")
            if isinstance(observation, dict) and "action_mask" in observation:
                mask = observation["action_mask"]
                others = {name: part for name, part in observation.items() if name != "action_mask"}
                observation = others["observation"] if set(others) == {"observation"} else others
            flat = _flat(self.views[i], observation)
            view[i, : flat.size] = flat
            action_mask[i] = self._action_mask(i, mask, done)
        return TeamObservation(view, action_mask, self.step_count)

    def _action_mask(self, i: int, mask: tp.Any, done: bool) -> np.ndarray:
        action_mask = np.zeros(max(self.sizes.num_actions, 1), bool)
        if not self.sizes.num_actions:
            return ~action_mask
        own = int(self.actions[i].n)
        action_mask[:own] = True if mask is None else np.asarray(mask, bool)
        if not action_mask.any():
            if not done:
                raise SableError(f"agent {self.agents[i]!r} has no legal action at step {self.step_count}")
            action_mask[:own] = True  # nobody will act on it
        return action_mask

    def _action(self, space: tp.Any, action: np.ndarray) -> tp.Any:
        if self.sizes.num_actions:
            return space.start + int(action)
        own = action[: int(np.prod(space.shape))].reshape(space.shape)
        scaled = space.low + (np.clip(own, -1.0, 1.0) + 1.0) / 2.0 * (space.high - space.low)
        return scaled.astype(space.dtype)


class Tuples:
    """An environment of gymnasium whose spaces and observations are tuples over agents, as a parallel one."""

    def __init__(self, env: tp.Any):
        self.env = env
        self.possible_agents = [f"agent_{i}" for i in range(len(env.action_space))]
        self.agents = []

    def observation_space(self, agent: str) -> tp.Any:
        return self.env.observation_space[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> tp.Any:
        return self.env.action_space[self.possible_agents.index(agent)]

    def reset(self, seed: int) -> tuple[dict, dict]:
        observations, _ = self.env.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return self._each(observations), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        chosen = tuple(actions[agent] for agent in self.possible_agents)
        observations, *others, _ = self.env.step(chosen)
        count = len(self.possible_agents)
        rewards, terminated, truncated = (
            self._each(np.broadcast_to(np.asarray(x), (count,))) for x in others
        )
        self.agents = [a for a in self.possible_agents if not (terminated[a] or truncated[a])]
        if len(self.agents) < count:  # such environments go on with everyone or not at all
            self.agents = []
        return self._each(observations), rewards, terminated, truncated, {}

    def _each(self, values: tp.Iterable) -> dict:
        return dict(zip(self.possible_agents, values, strict=True))


def _parallel(env: tp.Any) -> tp.Any:
    if isinstance(getattr(env, "action_space", None), spaces.Tuple):
        if not isinstance(env.observation_space, spaces.Tuple):
            raise SableError("its actions are a tuple over agents and its observations are not")
        return Tuples(env)
    if hasattr(env, "agent_iter") and hasattr(env, "last"):
        raise SableError("its agents act in turns (AEC): give its parallel form, such as parallel_env")
    for part in ("possible_agents", "observation_space", "action_space", "reset", "step"):
        if not hasattr(env, part):
            raise SableError(f"{type(env).__name__} is no PettingZoo parallel environment: it has no {part}")
    if not env.possible_agents:
        raise SableError("its possible_agents are empty: sable needs to know all agents that can ever appear")
    return env


def _view_space(space: tp.Any) -> tp.Any:
    """Return the space of what is flattened into a view: an observation without its mask."""
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        others = {name: part for name, part in space.spaces.items() if name != "action_mask"}
        return others["observation"] if set(others) == {"observation"} else spaces.Dict(others)
    return space


def _flat(space: tp.Any, observation: tp.Any) -> np.ndarray:
    if isinstance(space, spaces.Box):  # by far the most common; gymnasium's own way is slower
        flat = np.asarray(observation, np.float32).ravel()
        if flat.size != int(np.prod(space.shape)):
            raise SableError(f"an observation of shape {np.shape(observation)} is not in its space {space}")
        return flat
    return np.asarray(spaces.flatten(space, observation), np.float32)


def _time_limit(env: tp.Any, limit: tp.Any) -> int:
    """Return the most steps of an episode: as given, else as the environment says."""
    if limit is None:
        inner = getattr(env, "unwrapped", env)
        places = [env, inner, getattr(env, "spec", None)]
        limits = [getattr(place, name, None) for place in places for name in _LIMITS]
        limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        if limit is None:
            raise SableError(
                "it does not say how long an episode can last (max_cycles, max_steps): give --env-options "
                "time_limit=STEPS; episodes are then cut there"
            )
    if type(limit) is not int or not 1 <= limit < 2**31:
        raise SableError(f"option time_limit={limit!r}: expected a whole number from 1 to {2**31 - 1}")
    return limit


def _action_sizes(agents: list, actions: list) -> dict[str, int]:
    """Return `num_actions` and `action_size` of a team, one of them 0."""
    if all(isinstance(space, spaces.Discrete) for space in actions):
        return {"num_actions": max(int(space.n) for space in actions), "action_size": 0}
    if all(isinstance(space, spaces.Box) for space in actions):
        for agent, space in zip(agents, actions, strict=True):
            if not space.is_bounded():
                raise SableError(f"the actions of agent {agent!r} have no bounds ({space}): give them some")
        return {"num_actions": 0, "action_size": max(int(np.prod(space.shape)) for space in actions)}
    raise SableError(
        f"agents' actions must all be Discrete or all be Box; these are {', '.join(map(str, actions[:4]))}"
    )

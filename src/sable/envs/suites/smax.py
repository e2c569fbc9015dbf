"""JaxMARL's battles without loops and scatters: a GPU launches kernels for each of them.

The suite takes a step as eight of its world, one after another in a loop, and writes what units see feature
by feature. Here the eight stand side by side in the program, their randomness drawn at once, and what is seen
is put together in one go. Results are the suite's but for rounding (tests/envs/suites/test_smax.py).
"""

import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX
from jaxmarl.environments.smax.smax_env import SMAX

from sable.types import PyTree


class Battle(SMAX):
    """The suite's two teams: its reset, states and viewer, and an equal step that is faster."""

    def __init__(self, **arguments: tp.Any) -> None:
        super().__init__(**arguments)
        number = np.arange(self.num_agents)
        others = np.array([np.delete(number, unit) for unit in number])
        self._team = number >= self.num_allies
        self._others = np.where(self._team[:, None], others[:, ::-1], others)  # counted from the own end
        self._tells = (self._team[:, None] == self._team[self._others]) | self.see_enemy_actions

    @partial(jax.jit, static_argnums=(0, 4))
    def step_env_no_decode(
        self, key: Array, state: PyTree, actions: tuple[Array, Array], get_state_sequence: bool = False
    ) -> PyTree:
        if get_state_sequence:
            return super().step_env_no_decode(key, state, actions, get_state_sequence)
        before, state = state.unit_health, self._fight(key, state, *actions)
        state = state.replace(done=self.is_terminal(state), step=state.step + 1)
        dones = {agent: ~state.unit_alive[unit] for agent, unit in self.agent_ids.items()}
        observations = self.get_obs_unit_list(state) | {"world_state": self.get_world_state(state)}
        rewards = self.compute_reward(state, before, state.unit_health)
        return observations, state, rewards, dones | {"__all__": state.done}, {}

    def _fight(self, key: Array, state: PyTree, movement: Array, attack: Array) -> PyTree:
        """Return the state after the steps of the world that make one of the battle."""
        speed, reach, damage, radius, cooldown_after = (
            table[state.unit_types]
            for table in (
                self.unit_type_velocities,
                self.unit_type_attack_ranges,
                self.unit_type_attacks,
                self.unit_type_radiuses,
                self.unit_type_weapon_cooldowns,
            )
        )
        unit, chosen = jnp.arange(self.num_agents), attack - self.num_movement_actions
        target = jnp.where(self._team, self.num_allies - 1 - chosen, self.num_allies + chosen)
        attacks = attack >= self.num_movement_actions
        target = jnp.where(attacks, target, unit)
        aimed, attacks = target[:, None] == unit, attacks & (target != unit)
        step = [movement[:, axis] * speed * self.time_per_step for axis in (0, 1)]
        size, apart = (self.map_width, self.map_height), jnp.identity(self.num_agents) + 1e-6
        touching = radius[:, None] + radius
        place, alive, health = list(state.unit_positions.T), state.unit_alive, state.unit_health
        cooldown = state.unit_weapon_cooldowns
        for deviation in self._deviations(key):
            # What units do follows from where all were.
            near = _length(*(p - p[target] for p in place)) < reach
            hits = attacks & near & alive & alive[target] & (cooldown <= 0.0)
            cooldown = cooldown + jnp.where(hits, cooldown_after + deviation - cooldown, -self.time_per_step)
            health = jnp.maximum(health - jnp.where(aimed & hits[:, None], damage[:, None], 0.0).sum(0), 0.0)
            moved = [jnp.clip(p + by, 0.0, most) for p, by, most in zip(place, step, size, strict=True)]
            place = [jnp.where(alive, new, old) for new, old in zip(moved, place, strict=True)]
            if self.walls_cause_death:
                outside = [(p <= 0.0) | (p >= most) for p, most in zip(place, size, strict=True)]
                health = jnp.where(outside[0] | outside[1], 0.0, health)
            alive = health > 0
            # The living push each other away.
            between = [p[:, None] - p for p in place]
            overlap = jax.nn.relu(touching / (_length(*between) + apart) - 1.0)
            overlap = jnp.where(alive[:, None] & alive, overlap, 0.0)
            pushed = [p + (d * overlap).sum(1) / 2 for p, d in zip(place, between, strict=True)]
            place = [jnp.where(alive, new, old) for new, old in zip(pushed, place, strict=True)]
        return state.replace(
            unit_positions=jnp.stack(place, axis=-1),
            unit_alive=alive,
            unit_health=health,
            unit_weapon_cooldowns=cooldown,
            prev_movement_actions=movement,
            prev_attack_actions=attack,
        )

    def _deviations(self, key: Array) -> list[Array]:
        """Return by how much the cooldowns of units differ, for each step of the world, by the suite's
        keys."""
        steps = []
        for _ in range(self.world_steps_per_env_step):
            key, own = jax.random.split(key)
            steps.append(own)
        keys = jax.vmap(lambda own: jax.random.split(own, self.num_agents))(jnp.stack(steps))
        least, most = -self.time_per_step, 2 * self.time_per_step
        draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, minval=least, maxval=most)))
        return list(draw(keys))

    def get_obs_unit_list(self, state: PyTree) -> dict[str, Array]:
        """Return what each unit sees of every other, and of itself."""
        health, cooldown, kind, sight = self._condition(state)
        most = jnp.where(self._team, self.num_enemy_actions - 1.0, self.num_ally_actions - 1.0)
        deeds = jnp.column_stack([state.prev_movement_actions, state.prev_attack_actions / most])
        place, alive, others = state.unit_positions, state.unit_alive, self._others
        # Else a GPU would go through the last steps of the world again for all that sees a unit.
        health, cooldown, place, alive = jax.lax.optimization_barrier((health, cooldown, place, alive))
        away = place[others] - place[:, None]
        features = [
            health[others, None],
            away / sight[:, None, None],
            jnp.where(self._tells[..., None], deeds[others], 0.0),
            cooldown[others, None],
            kind[others],
        ]
        visible = (_length(away[..., 0], away[..., 1]) < sight[:, None]) & alive[:, None] & alive[others]
        features = jnp.where(visible[..., None], jnp.concatenate(features, axis=-1), 0.0)
        own = jnp.column_stack([health, place / jnp.array([self.map_width, self.map_height]), cooldown, kind])
        own = jnp.where(alive[:, None], own, 0.0)
        observations = jnp.concatenate([features.reshape(self.num_agents, -1), own], axis=-1)
        return {agent: observations[unit] for agent, unit in self.agent_ids.items()}

    def get_world_state(self, state: PyTree) -> Array:
        """Return all units as they are, and the teams and kinds they are of."""
        health, _, kind, _ = self._condition(state)
        units = jnp.column_stack([health, state.unit_positions, state.unit_weapon_cooldowns, kind])
        units = jnp.where(state.unit_alive[:, None], units, 0.0)
        return jnp.concatenate([units.reshape(-1), state.unit_teams, state.unit_types], axis=-1)

    def _condition(self, state: PyTree) -> tuple[Array, Array, Array, Array]:
        """Return (health and cooldown as shares of the most, one-hot kinds, how far units see)."""
        kinds = state.unit_types
        health = state.unit_health / self.unit_type_health[kinds]
        cooldown = jnp.clip(state.unit_weapon_cooldowns / self.unit_type_weapon_cooldowns[kinds], 0.0, 1.0)
        kind = jax.nn.one_hot(kinds, self.unit_type_bits)
        return health, cooldown, kind, self.unit_type_sight_ranges[kinds]


def _length(x: Array, y: Array) -> Array:
    return jnp.sqrt(x * x + y * y)


class ScriptedEnemies(HeuristicEnemySMAX):
    """The suite's battle of one team against its script, in the form where enemies shoot at the closest."""

    def __init__(self, **arguments: tp.Any) -> None:
        super().__init__(attack_mode="closest", **arguments)
        self._env = Battle(**arguments)
        self.heuristic_policy = partial(_script, self._env)


def _script(env: Battle, key: Array, state: PyTree, observations: Array) -> tuple[Array, PyTree]:
    """Return what an enemy does: it shoots at whom it shot last, or at the closest in reach, or goes towards
    any it sees, or else to the other side of the map."""
    size, centre = (jnp.array([env.map_width, env.map_height]) / share for share in (1, 2))
    features, own = jnp.split(observations, [(env.num_agents - 1) * len(env.unit_features)])
    features = features.reshape(env.num_agents - 1, -1)[
        env.num_enemies - 1 :
    ]  # of the other team, after its own
    kind = jnp.argmax(own[-env.unit_type_bits :])
    place, away = own[1:3] * size, features[:, 1:3] * env.unit_type_sight_ranges[kind]
    visible, distance = features[:, 0] > 0, _length(*away.T)
    near = visible & (distance < env.unit_type_attack_ranges[kind])
    last, closest = state.last_attacked_enemy, jnp.argmin(jnp.where(near, distance, _length(*size)))
    aim = jnp.where((last != -1) & near[last], last, closest)
    # As `jax.random.choice` draws by chances, but that it would search for them in a loop.
    chances = jnp.cumsum(visible / visible.sum())
    sampled = chances[-1] * (1 - jax.random.uniform(jax.random.split(key)[0]))
    followed = away[(chances < sampled).sum()] + place
    fresh = (state.default_target == 0).all() & (last == -1)
    across = jnp.where(fresh, centre - (place - centre), state.default_target)
    x, y = jnp.where(visible.any(), followed, across) - place
    step = jnp.argmax(jnp.stack([y, x, -y, -x]))
    action = jnp.where(near.any(), aim + env.num_movement_actions, step)
    return action, state.replace(
        default_target=across, last_attacked_enemy=jnp.where(near[aim], aim, -1).astype(last.dtype)
    )

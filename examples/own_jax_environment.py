"""An environment of your own in JAX: check it, then train on it. Usage: own_jax_environment.py [STEPS]."""

import dataclasses
import sys

import jax
import jax.numpy as jnp

import sable
from sable.envs.base import first_timestep, next_timestep
from sable.types import EnvSpec, Observation, struct


@struct
class State:
    """Where everybody stands."""

    key: jax.Array
    time: jax.Array
    place: jax.Array  # [N]


class Meet:
    """Three agents on a line are paid for being close; meeting ends the episode."""

    spec = EnvSpec(num_agents=3, view_size=2, num_actions=3, time_limit=20)

    def reset(self, key):
        """Put everybody somewhere."""
        key, place_key = jax.random.split(key)
        place = jax.random.randint(place_key, (3,), -5, 6)
        state = State(key=key, time=jnp.zeros((), jnp.int32), place=place)
        return state, first_timestep(self.observe(state), {"met": 0.0})

    def step(self, state, action):
        """Move everybody to the left, not at all, or to the right."""
        state = dataclasses.replace(state, time=state.time + 1, place=state.place + action - 1)
        apart = state.place.max() - state.place.min()
        met, late = apart == 0, state.time >= self.spec.time_limit
        now = self.observe(state)
        return state, next_timestep(now, -apart / 10, terminated=met, truncated=late, stats={"met": met})

    def rekey(self, state, key):
        """Give a copied state randomness of its own."""
        return dataclasses.replace(state, key=key)

    def observe(self, state):
        """Return what each agent sees: where it stands, and how far from the middle of all."""
        view = jnp.stack([state.place, state.place - state.place.mean()], axis=-1) / 10
        return Observation(view=view, action_mask=jnp.ones((3, 3), bool), step_count=state.time, state=())


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    print([finding for finding in sable.check(Meet()) if finding.verdict == "wrong"] or "nothing is wrong")
    fields = {"num_envs": 32, "rollout_length": 20, "num_evaluations": 4, "video": False}
    result = sable.train(Meet(), total_steps=steps, **fields)
    print("return:", result.summary["absolute_return"], "met:", result.summary["absolute_met"])

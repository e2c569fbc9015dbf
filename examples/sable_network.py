"""The Sable network alone, in a loop of your own: by REINFORCE a team learns to choose different actions."""

import sys

import jax
import jax.numpy as jnp
import optax

from sable.config.schema import SableConfig
from sable.systems.sable import make_policy
from sable.types import EnvSpec, Observation, Transition

TEAMS, AGENTS = 128, 3
spec = EnvSpec(num_agents=AGENTS, view_size=1, num_actions=AGENTS, time_limit=1)
config = SableConfig(embed_dim=32, memory=False, rollout_length=1)
policy = make_policy(spec, config)  # pure functions: init, act, value, evaluate_actions, ...
optimiser = optax.adam(2e-3)
order = jnp.arange(AGENTS)  # in which agents decide: each knows what those before it did

observation = Observation(  # nothing to see: only what the others do matters
    view=jnp.zeros((TEAMS, AGENTS, 1)),
    action_mask=jnp.ones((TEAMS, AGENTS, AGENTS), bool),
    step_count=jnp.zeros(TEAMS, jnp.int32),
    state=(),
)


def reward(action: jax.Array) -> jax.Array:
    """Return 1 for each team whose agents all chose different actions, else 0."""
    return (jnp.diff(jnp.sort(action, axis=-1)) > 0).all(-1).astype(jnp.float32)


@jax.jit
def update(params, opt_state, key):
    """Act, then take one gradient step on what was done; the mean reward comes along."""
    act_key, entropy_key = jax.random.split(key)
    decision = policy.act(params, observation, (), order, act_key)
    won = reward(decision.action)
    end = {"discount": jnp.zeros(TEAMS), "first": jnp.ones(TEAMS, bool), "next_extras": ()}
    step = Transition(
        observation=observation, action=decision.action, reward=won, extras=decision.extras, **end
    )
    steps = jax.tree.map(lambda x: x[None], step)  # [T=1, B, ..]

    def loss(params):
        found = policy.evaluate_actions(params, policy.prepare(steps), (), order, entropy_key)
        return -(found.log_prob * (won - won.mean())[None, :, None]).sum(-1).mean()

    updates, opt_state = optimiser.update(jax.grad(loss)(params), opt_state)
    return optax.apply_updates(params, updates), opt_state, won.mean()


if __name__ == "__main__":
    params = policy.init(jax.random.key(0))
    opt_state = optimiser.init(params)
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 200):
        params, opt_state, mean = update(params, opt_state, jax.random.key(number + 1))
    print(f"teams whose agents all differ: {mean:.2f} (by chance 0.22)")

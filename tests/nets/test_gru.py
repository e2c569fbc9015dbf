"""The GRU is the usual one, and forgets where an episode opens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.nets.gru import GRU
from sable.ops import trees as tree

T, B, N, F, R = 5, 2, 3, 4, 6
KEYS = jax.random.split(jax.random.key(0), 4)
GRU_6 = GRU(R)
FIRST = jnp.array([[False, True], [False, False], [True, False], [True, False], [False, False]])


@pytest.fixture(scope="module")
def weights():
    x, carry = jnp.zeros((1, 1, F)), jnp.zeros((1, R))
    params = GRU_6.init(KEYS[0], x, carry, FIRST[:1, :1], method=GRU.sequence)
    return params | {"params": params["params"] | {"bias": jnp.linspace(-1, 1, R)}}


@pytest.mark.parametrize("team", [(), (N,)])
def test_a_sequence_equals_its_steps_forgetting_before_each_that_is_first(weights, team):
    x, carry = jax.random.normal(KEYS[1], (T, B, *team, F)), jax.random.normal(KEYS[2], (B, *team, R))
    out, last = jax.jit(lambda: GRU_6.apply(weights, x, carry, FIRST, method=GRU.sequence))()
    step = jax.jit(lambda x, carry: GRU_6.apply(weights, x, carry, method=GRU.step))
    for t in range(T):
        carry = step(x[t], tree.reset_memory(carry, FIRST[t]))
        np.testing.assert_allclose(out[t], carry, atol=1e-6)
    np.testing.assert_array_equal(last, out[-1])


def test_a_step_is_that_of_flax_with_the_same_weights(weights):
    x, carry = jax.random.normal(KEYS[1], (B, F)), jax.random.normal(KEYS[2], (B, R))
    params = weights["params"]
    kernels = jnp.split(params["input"]["kernel"], 3, axis=1)
    biases = jnp.split(params["input"]["bias"] + jnp.linspace(0, 1, 3 * R), 3)
    recurrent = jnp.split(params["recurrent"], 3, axis=1)
    ours = params | {"input": params["input"] | {"bias": jnp.concatenate(biases)}}
    flax = {
        f"i{gate}": {"kernel": kernel, "bias": bias}
        for gate, kernel, bias in zip("rzn", kernels, biases, strict=True)
    } | {f"h{gate}": {"kernel": kernel} for gate, kernel in zip("rzn", recurrent, strict=True)}
    flax["hn"]["bias"] = params["bias"]
    expected, _ = nn.GRUCell(R).apply({"params": flax}, carry, x)
    found = GRU_6.apply({"params": ours}, x, carry, method=GRU.step)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_recurrent_weights_of_every_gate_start_orthogonal(weights):
    for gate in jnp.split(weights["params"]["recurrent"], 3, axis=1):
        np.testing.assert_allclose(gate @ gate.T, np.eye(R), atol=1e-5)

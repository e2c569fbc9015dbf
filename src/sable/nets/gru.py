"""A gated recurrent unit over many episodes at once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sable.nets.layers import orthogonal_parts
from sable.ops import trees as tree


class GRU(nn.Module):
    """h' = (1 - z) n + z h, with r, z = sigmoid(W x + b + U h) and n = tanh(W_n x + b_n + r (U_n h + c_n)).

    Its carry, which is also its output, is zero where an episode opens.
    """

    size: int

    def setup(self):
        self.input = nn.Dense(3 * self.size)
        self.recurrent = self.param("recurrent", orthogonal_parts(1.0), (self.size, 3 * self.size))
        self.bias = self.param("bias", nn.initializers.zeros, (self.size,))

    def sequence(
        self, x: Float[Array, "T *b F"], carry: Float[Array, "*b size"], first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T *b size"], Float[Array, "*b size"]]:
        """Return (the carry after every step, after the last), reset *before* each step that is `first`; the
        axes *b begin with B."""
        # All inputs are projected at once and the bias is laid out once: a step is one product of matrices.
        shape, carry = carry.shape, carry.reshape(-1, self.size)
        gates = self.input(x.reshape(-1, x.shape[-1])).reshape(len(x), *carry.shape[:-1], -1)
        first = first.repeat(carry.shape[0] // first.shape[1], axis=1)
        bias = jnp.broadcast_to(self.bias, carry.shape)

        def step(carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            gates, first = inputs
            carry = self._advance(gates, tree.reset_memory(carry, first), bias)
            return carry, carry

        carry, out = jax.lax.scan(step, carry, (gates, first))
        return out.reshape(-1, *shape), carry.reshape(shape)

    def step(self, x: Float[Array, "*b F"], carry: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
        """Return the carry after one more step."""
        return self._advance(self.input(x), carry, jnp.broadcast_to(self.bias, carry.shape))

    def _advance(self, gates: Array, carry: Array, bias: Array) -> Array:
        reset, update, candidate = jnp.split(gates, 3, axis=-1)
        past_reset, past_update, past = jnp.split(carry @ self.recurrent, 3, axis=-1)
        update = nn.sigmoid(update + past_update)
        candidate = jnp.tanh(candidate + nn.sigmoid(reset + past_reset) * (past + bias))
        return (1 - update) * candidate + update * carry

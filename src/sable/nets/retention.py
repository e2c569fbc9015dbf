"""Multi-scale retention as a layer: projections around `ops.retention`, a norm per head, a gate."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import normal
from jaxtyping import Array, Bool, Float, Int

from sable.kernels import cached_decoder as row_kernel
from sable.kernels import memory_update as memory_kernel
from sable.kernels import retention as kernel
from sable.nets.layers import spread
from sable.ops import retention, sharding


class MultiScaleRetention(nn.Module):
    """Retention of `query` over `key`, whose stream also gives the values and the gate.

    Several ways in: a whole sequence while learning, one timestep of all agents while encoding, one agent or
    all while decoding. `memory` is () in the first two where nothing is to be remembered. Sequences are laid
    out environment by environment, so that cutting them into chunks moves nothing.

    All give what is recalled, normed and gated; `output`, the product that ends the layer, is left to the
    block, which does it together with what follows.
    """

    width: int
    num_heads: int
    decay_scaling: float
    causal: bool
    cross: bool = False
    """Whether queries come from another stream than keys; else one product makes all four projections."""
    chunk: int | None = None
    """Time steps of a sequence taken at once; None: what suits the sizes."""
    agent_chunk: int | None = None
    """Without memory and unless causal, agents who see each other and those before; None: all."""

    def setup(self):
        def project(size):
            # A quiet start, as in SwiGLU: 1/√width, which would keep variances, learns more slowly.
            return nn.Dense(size, use_bias=False, kernel_init=normal(1 / self.width))

        if self.cross:
            self.query = project(self.width)
        self.projections = project((3 if self.cross else 4) * self.width)
        self.output = project(self.width)
        self.scale = self.param("scale", nn.initializers.ones, (self.width,))
        self.bias = self.param("bias", nn.initializers.zeros, (self.width,))

    def sequence(
        self,
        query: Float[Array, "B T N E"],  # the same as `key` unless `cross`
        key: Float[Array, "B T N E"],
        memory: Float[Array, "B H d d"] | tuple[()],
        first: Bool[Array, "T B"],
    ) -> tuple[Float[Array, "B T N E"], Float[Array, "B H d d"] | tuple[()]]:
        """What is recalled for every token, and the memory after the last timestep."""
        sources, head = self._sources(query, key), self.width // self.num_heads
        by_kernel = self.chunk is None and self.agent_chunk is None and kernel.chosen(head)
        if by_kernel and kernel.fits(head, key.shape[2], self.causal, sources[0].dtype):
            return self._by_kernel(sources, memory, first)
        q, k, v, gate = self._split(sources)
        if isinstance(memory, tuple):
            return self._gated(self._within(q, k, v), gate), ()
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        block = None if self.chunk is None else q.shape[2]  # whole time steps, if so many are asked for
        out, memory = retention.chunkwise(
            q, k, v, memory, self._kappa(), first, causal=self.causal, chunk=self.chunk, block=block
        )
        return self._gated(out.swapaxes(0, 1), gate), memory

    def timestep(
        self, x: Float[Array, "B N E"], memory: Float[Array, "B H d d"] | tuple[()]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B H d d"] | tuple[()]]:
        """All agents of one timestep, its opening reset already done."""
        sources = self._sources(x, x)
        q, k, v, gate = self._split(sources)
        if isinstance(memory, tuple):
            return self._gated(self._within(q[None], k[None], v[None])[0], gate), ()
        if self._team_by_kernel(x.shape[1]):
            return self._team(kernel.timestep, sources, memory)
        opened = jnp.zeros(x.shape[:1], bool)
        out, memory = retention.step(q, k, v, memory, self._kappa(), opened, causal=self.causal)
        return self._gated(out, gate), memory

    def ask(
        self, query: Float[Array, "B N E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
        """With `cross`: (a timestep's queries, what the memory that the last timestep left says to them), the
        same however often a team decides anew."""
        query = self.query(query)
        if memory_kernel.chosen(self.width // self.num_heads, query.shape[1]):
            return query, memory_kernel.ask(memory, query, self._kappa())
        found = jnp.einsum("bnhi,bhij->bnhj", self._heads(query), memory)
        return query, (found * self._kappa().reshape(1, 1, -1, 1)).reshape(query.shape)

    def team(
        self,
        key: Float[Array, "B N E"],
        past: Float[Array, "B H d d"] | tuple[Float[Array, "B N E"], Float[Array, "B N E"]],
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N _"]]:
        """All agents of a timestep, each seeing those before it and the memory the last timestep left, or
        with `cross` what was found by asking it: (what is recalled, the projections to `remember`)."""
        query, past = past if isinstance(past, tuple) else (None, past)
        told = self.projections(key)
        sources = (told,) if query is None else (query, told)
        if self._team_by_kernel(key.shape[1]):
            return self._team(kernel.team, sources, past), told
        q, k, v, gate = self._split(sources)
        # Blocks of agents, each told the sum of the blocks before it: linear in agents, and causal exactly.
        out = retention.within(q[None], k[None], v[None], causal=True)[0]
        if query is None:
            out = out + jnp.einsum("bnhi,bhij->bnhj", q, self.open(past))
        else:
            out = out + self._heads(past)
        return self._gated(out, gate), told

    def row(
        self,
        key: Float[Array, "B E"],
        past: Float[Array, "B H d d"] | tuple[Float[Array, "B N E"], Float[Array, "B N E"]],
        kept: Float[Array, "B N _"],
        agent: Int[Array, ""],
    ) -> tuple[Float[Array, "B E"], Float[Array, "B N _"]]:
        """`team` for the next agent alone, by a kernel: (what is recalled, the keys and values to `remember`,
        with this agent's beside those of the ones before)."""
        norm_and_decay = self.scale, self.bias, self._kappa()
        return row_kernel.recall(agent[None], self.projections(key), past, kept, *norm_and_decay)

    def remember(
        self, memory: Float[Array, "B H d d"], told: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """The memory that a timestep leaves, from that of the timestep before and what its agents told: keys
        and values, or all projections."""
        start = self.width if told.shape[-1] == 4 * self.width else 0  # after the queries
        keys, values = start, start + self.width
        if memory_kernel.chosen(self.width // self.num_heads, told.shape[1]):
            return memory_kernel.remember(memory, told, self._kappa(), (keys, values))
        k, v = (self._heads(told[..., at : at + self.width]) for at in (keys, values))
        return retention.told(self.open(memory), k, v)

    def token(
        self, query: Float[Array, "B E"], key: Float[Array, "B E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "B H d d"]]:
        """The next agent of a timestep whose decay (`open`) is already done."""
        q, k, v, gate = self._split(self._sources(query, key))
        out, memory = retention.attend(q, k, v, memory)
        return self._gated(out, gate), memory

    def open(self, memory: Float[Array, "B H d d"]) -> Float[Array, "B H d d"]:
        """The memory as the first agent of a new timestep finds it."""
        return retention.past(memory, self._kappa(), jnp.zeros(memory.shape[:1], bool))

    def _by_kernel(self, sources, memory, first):
        """`sequence`, by kernels over all tokens of an environment."""
        (num_envs, num_steps, num_agents), past = sources[0].shape[:3], memory
        if isinstance(memory, tuple):  # every timestep an episode of its own
            past = jnp.zeros((num_envs, self.num_heads, *[self.width // self.num_heads] * 2))
            first = jnp.ones_like(first)

        def recall(norm, sources, past, first):
            tokens = tuple(x.reshape(x.shape[0], num_steps * num_agents, -1) for x in sources)
            scale, bias = norm
            return kernel.gated(num_agents, self.causal, tokens, past, scale, bias, self._kappa(), first)

        recalled, after = sharding.apart(recall, (self.scale, self.bias), sources, past, first.T)
        recalled = recalled.reshape(*sources[0].shape[:3], self.width)
        return recalled, () if isinstance(memory, tuple) else after

    def _within(self, q, k, v):
        """Retention among the agents of each timestep alone."""
        if self.agent_chunk is None:
            return retention.within(q, k, v, causal=self.causal)
        return retention.within_chunks(q, k, v, chunk=self.agent_chunk)

    def _kappa(self):
        return retention.kappas(self.num_heads, self.decay_scaling)

    def _sources(self, query, key):
        """Queries, keys, values and gates side by side; of two streams, queries, and all else."""
        return (self.query(query), self.projections(key)) if self.cross else (self.projections(key),)

    def _split(self, sources):
        """Queries, keys and values by head, and gates."""
        parts = (jnp.split(x, x.shape[-1] // self.width, axis=-1) for x in sources)
        q, k, v, gate = itertools.chain.from_iterable(parts)
        return *map(self._heads, (q, k, v)), gate

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _team_by_kernel(self, num_agents):
        return kernel.team_chosen(self.width // self.num_heads, num_agents, self.causal)

    def _team(self, form, sources, past):
        def recall(norm, sources, past):
            scale, bias = norm
            return form(self.causal, sources, past, scale, bias, self._kappa())

        return sharding.apart(recall, (self.scale, self.bias), sources, past)

    def _gated(self, out, gate):
        """swish(gate) * norm(out), one normalisation group per head."""
        mean = out.mean(axis=-1, keepdims=True)
        out = out - mean
        out = out * jax.lax.rsqrt(jnp.square(out).mean(axis=-1, keepdims=True) + 1e-6)
        scale, bias = (spread(x, gate.shape) for x in (self.scale, self.bias))
        out = out.reshape(gate.shape).astype(gate.dtype)
        return nn.swish(gate) * (out * scale + bias)

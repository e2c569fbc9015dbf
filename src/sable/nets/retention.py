"""Multi-scale retention as a layer: projections around `ops.retention`, a norm per head, a gate."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import normal
from jaxtyping import Array, Bool, Float, Int

from sable.kernels import cached_decoder, memory_update
from sable.kernels import retention as retention_kernel
from sable.nets.layers import broadcast_rows
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
        """Return the retention of every token, and the memory after the last timestep."""
        sources, head_dim = self._sources(query, key), self.width // self.num_heads
        use_kernel = self.chunk is None and self.agent_chunk is None and retention_kernel.use_kernel(head_dim)
        if use_kernel and retention_kernel.fits_shared_memory(
            head_dim, key.shape[2], self.causal, sources[0].dtype
        ):
            return self._sequence_kernel(sources, memory, first)
        q, k, v, gate = self._split(sources)
        if isinstance(memory, tuple):
            return self._norm_and_gate(self._within(q, k, v), gate), ()
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
        block = None if self.chunk is None else q.shape[2]  # whole time steps, if so many are asked for
        out, memory = retention.chunkwise(
            q, k, v, memory, self._kappa(), first, causal=self.causal, chunk=self.chunk, block=block
        )
        return self._norm_and_gate(out.swapaxes(0, 1), gate), memory

    def timestep(
        self, x: Float[Array, "B N E"], memory: Float[Array, "B H d d"] | tuple[()]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B H d d"] | tuple[()]]:
        """Return the retention of all agents of one timestep, its opening reset already done."""
        sources = self._sources(x, x)
        q, k, v, gate = self._split(sources)
        if isinstance(memory, tuple):
            return self._norm_and_gate(self._within(q[None], k[None], v[None])[0], gate), ()
        if self._use_timestep_kernel(x.shape[1]):
            return self._timestep_kernel(retention_kernel.timestep, sources, memory)
        no_reset = jnp.zeros(x.shape[:1], bool)
        out, memory = retention.step(q, k, v, memory, self._kappa(), no_reset, causal=self.causal)
        return self._norm_and_gate(out, gate), memory

    def read_memory(
        self, query: Float[Array, "B N E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N E"]]:
        """Return, with `cross`, (a timestep's queries, what they read from the memory that the last timestep
        left), the same however often a team decides anew."""
        query = self.query(query)
        if memory_update.use_kernel(self.width // self.num_heads, query.shape[1]):
            return query, memory_update.read_memory(memory, query, self._kappa())
        readout = jnp.einsum("bnhi,bhij->bnhj", self._heads(query), memory)
        return query, (readout * self._kappa().reshape(1, 1, -1, 1)).reshape(query.shape)

    def all_agents(
        self,
        key: Float[Array, "B N E"],
        past: Float[Array, "B H d d"] | tuple[Float[Array, "B N E"], Float[Array, "B N E"]],
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N _"]]:
        """Return the retention of all agents of a timestep, each seeing those before it and the memory the
        last timestep left, or with `cross` what was read from that: (readout, the projections to
        `write_memory`)."""
        query, past = past if isinstance(past, tuple) else (None, past)
        projections = self.projections(key)
        sources = (projections,) if query is None else (query, projections)
        if self._use_timestep_kernel(key.shape[1]):
            return self._timestep_kernel(retention_kernel.all_agents, sources, past), projections
        q, k, v, gate = self._split(sources)
        # Blocks of agents, each told the sum of the blocks before it: linear in agents, and causal exactly.
        out = retention.intra_timestep(q[None], k[None], v[None], causal=True)[0]
        if query is None:
            out = out + jnp.einsum("bnhi,bhij->bnhj", q, self.decay_memory(past))
        else:
            out = out + self._heads(past)
        return self._norm_and_gate(out, gate), projections

    def next_agent(
        self,
        key: Float[Array, "B E"],
        past: Float[Array, "B H d d"] | tuple[Float[Array, "B N E"], Float[Array, "B N E"]],
        cache: Float[Array, "B N _"],
        agent: Int[Array, ""],
    ) -> tuple[Float[Array, "B E"], Float[Array, "B N _"]]:
        """Return `all_agents` for the next agent alone, by a kernel: (readout, the key/value cache to
        `write_memory`, with this agent's beside those of the ones before)."""
        norm_and_decay = self.scale, self.bias, self._kappa()
        return cached_decoder.next_agent(agent[None], self.projections(key), past, cache, *norm_and_decay)

    def write_memory(
        self, memory: Float[Array, "B H d d"], projections: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """Return the memory that a timestep leaves, from that of the timestep before and its agents'
        projections: keys and values, or all."""
        start = self.width if projections.shape[-1] == 4 * self.width else 0  # after the queries
        keys, values = start, start + self.width
        if memory_update.use_kernel(self.width // self.num_heads, projections.shape[1]):
            return memory_update.write_memory(memory, projections, self._kappa(), (keys, values))
        k, v = (self._heads(projections[..., at : at + self.width]) for at in (keys, values))
        return retention.add_key_values(self.decay_memory(memory), k, v)

    def token(
        self, query: Float[Array, "B E"], key: Float[Array, "B E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "B H d d"]]:
        """Return the retention of the next agent of a timestep whose decay (`decay_memory`) is already
        done."""
        q, k, v, gate = self._split(self._sources(query, key))
        out, memory = retention.token_step(q, k, v, memory)
        return self._norm_and_gate(out, gate), memory

    def decay_memory(self, memory: Float[Array, "B H d d"]) -> Float[Array, "B H d d"]:
        """Return the memory as the first agent of a new timestep finds it."""
        return retention.decay_memory(memory, self._kappa(), jnp.zeros(memory.shape[:1], bool))

    def _sequence_kernel(self, sources, memory, first):
        """Return `sequence`, by kernels over all tokens of an environment."""
        (num_envs, num_steps, num_agents), past = sources[0].shape[:3], memory
        if isinstance(memory, tuple):  # every timestep an episode of its own
            past = jnp.zeros((num_envs, self.num_heads, *[self.width // self.num_heads] * 2))
            first = jnp.ones_like(first)

        def per_device(norm, sources, past, first):
            tokens = tuple(x.reshape(x.shape[0], num_steps * num_agents, -1) for x in sources)
            scale, bias = norm
            return retention_kernel.gated_retention(
                num_agents, self.causal, tokens, past, scale, bias, self._kappa(), first
            )

        readout, after = sharding.shard_map_envs(per_device, (self.scale, self.bias), sources, past, first.T)
        readout = readout.reshape(*sources[0].shape[:3], self.width)
        return readout, () if isinstance(memory, tuple) else after

    def _within(self, q, k, v):
        """Return retention among the agents of each timestep alone."""
        if self.agent_chunk is None:
            return retention.intra_timestep(q, k, v, causal=self.causal)
        return retention.intra_timestep_chunks(q, k, v, chunk=self.agent_chunk)

    def _kappa(self):
        return retention.kappas(self.num_heads, self.decay_scaling)

    def _sources(self, query, key):
        """Return queries, keys, values and gates side by side; of two streams, queries, and all else."""
        return (self.query(query), self.projections(key)) if self.cross else (self.projections(key),)

    def _split(self, sources):
        """Return queries, keys and values by head, and gates."""
        parts = (jnp.split(x, x.shape[-1] // self.width, axis=-1) for x in sources)
        q, k, v, gate = itertools.chain.from_iterable(parts)
        return *map(self._heads, (q, k, v)), gate

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _use_timestep_kernel(self, num_agents):
        return retention_kernel.use_timestep_kernel(self.width // self.num_heads, num_agents, self.causal)

    def _timestep_kernel(self, form, sources, past):
        def per_device(norm, sources, past):
            scale, bias = norm
            return form(self.causal, sources, past, scale, bias, self._kappa())

        return sharding.shard_map_envs(per_device, (self.scale, self.bias), sources, past)

    def _norm_and_gate(self, out, gate):
        """Return swish(gate) * norm(out), one normalisation group per head."""
        mean = out.mean(axis=-1, keepdims=True)
        out = out - mean
        out = out * jax.lax.rsqrt(jnp.square(out).mean(axis=-1, keepdims=True) + 1e-6)
        scale, bias = (broadcast_rows(x, gate.shape) for x in (self.scale, self.bias))
        out = out.reshape(gate.shape).astype(gate.dtype)
        return nn.swish(gate) * (out * scale + bias)

"""Multi-scale retention as layers: projections around `ops.retention`, a norm per head, a gate.

`SelfRetention` is over one stream, `CrossRetention` of one stream over another. Several ways in: a whole
sequence while learning, one timestep of all agents while encoding, one agent or all while decoding. `memory`
is () in the first two where nothing is to be remembered. Sequences are laid out environment by environment,
so that cutting them into chunks moves nothing.

All give what is recalled, normed and gated; `output`, the product that ends a layer, is left to the block,
which does it together with what follows.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import normal
from jaxtyping import Array, Bool, Float, Int

from sable.kernels import cached_decoder, memory_update
from sable.kernels import retention as retention_kernel
from sable.nets.layers import broadcast_rows
from sable.ops import retention, sharding
from sable.types import struct


@struct
class CrossQueries:
    """A timestep's queries of cross-retention, and what they read from the memory before it."""

    query: Float[Array, "B N E"]
    readout: Float[Array, "B N E"]


class SelfRetention(nn.Module):
    """Retention of a stream over itself: one product makes queries, keys, values and gates, side by side."""

    width: int
    num_heads: int
    decay_scaling: float
    causal: bool
    chunk: int | None = None
    """Time steps of a sequence taken at once; None: what suits the sizes."""
    agent_chunk: int | None = None
    """Without memory and unless causal, agents who see each other and those before; None: all."""

    def setup(self):
        self.projections = _project(self.width, 4 * self.width)
        self.output = _project(self.width, self.width)
        self.scale = self.param("scale", nn.initializers.ones, (self.width,))
        self.bias = self.param("bias", nn.initializers.zeros, (self.width,))

    def sequence(
        self,
        x: Float[Array, "B T N E"],
        memory: Float[Array, "B H d d"] | tuple[()],
        first: Bool[Array, "T B"],
    ) -> tuple[Float[Array, "B T N E"], Float[Array, "B H d d"] | tuple[()]]:
        """Return the retention of every token, and the memory after the last timestep."""
        return _sequence(self, (self.projections(x),), memory, first)

    def timestep(
        self, x: Float[Array, "B N E"], memory: Float[Array, "B H d d"] | tuple[()]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B H d d"] | tuple[()]]:
        """Return the retention of all agents of one timestep, its opening reset already done."""
        projections = self.projections(x)
        q, k, v, gate = self._split(projections)
        if isinstance(memory, tuple):
            return self._norm_and_gate(_within_timesteps(self, q[None], k[None], v[None])[0], gate), ()
        if _use_timestep_kernel(self, x.shape[1]):
            return _timestep_kernel(self, retention_kernel.timestep, (projections,), memory)
        no_reset = jnp.zeros(x.shape[:1], bool)
        out, memory = retention.step(q, k, v, memory, _kappa(self), no_reset, causal=self.causal)
        return self._norm_and_gate(out, gate), memory

    def all_agents(
        self, x: Float[Array, "B N E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N 4*E"]]:
        """Return the retention of all agents of a timestep, each seeing those before it and the memory that
        the last timestep left: (readout, the projections to `write_projections`)."""
        projections = self.projections(x)
        if _use_timestep_kernel(self, x.shape[1]):
            return _timestep_kernel(self, retention_kernel.all_agents, (projections,), memory), projections
        q, k, v, gate = self._split(projections)
        # Blocks of agents, each told the sum of the blocks before it: linear in agents, and causal exactly.
        out = retention.intra_timestep(q[None], k[None], v[None], causal=True)[0]
        out = out + jnp.einsum("bnhi,bhij->bnhj", q, self.decay_memory(memory))
        return self._norm_and_gate(out, gate), projections

    def next_agent(
        self,
        x: Float[Array, "B E"],
        memory: Float[Array, "B H d d"],
        cache: Float[Array, "B N 2*E"],
        agent: Int[Array, ""],
    ) -> tuple[Float[Array, "B E"], Float[Array, "B N 2*E"]]:
        """Return `all_agents` for the next agent alone, by a kernel: (readout, the key/value cache to
        `write_cache`, with this agent's beside those of the ones before)."""
        return _next_agent(self, x, memory, cache, agent)

    def token(
        self, x: Float[Array, "B E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "B H d d"]]:
        """Return the retention of the next agent of a timestep, the memory decayed (`decay_memory`)."""
        q, k, v, gate = self._split(self.projections(x))
        out, memory = retention.token_step(q, k, v, memory)
        return self._norm_and_gate(out, gate), memory

    def write_projections(
        self, memory: Float[Array, "B H d d"], projections: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """Return the memory that a timestep leaves, from that of the timestep before and `all_agents`."""
        columns = self.width, 2 * self.width
        return memory_update.write_memory(memory, projections, _kappa(self), columns)

    def write_cache(
        self, memory: Float[Array, "B H d d"], cache: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """Return the memory that a timestep leaves, from that of the timestep before and its agents' keys and
        values."""
        return memory_update.write_memory(memory, cache, _kappa(self), (0, self.width))

    def decay_memory(self, memory: Float[Array, "B H d d"]) -> Float[Array, "B H d d"]:
        """Return the memory as the first agent of a new timestep finds it."""
        return _decay_memory(self, memory)

    def _split(self, projections):
        """Return queries, keys and values by head, and gates."""
        q, k, v, gate = jnp.split(projections, 4, axis=-1)
        return *(_heads(self, x) for x in (q, k, v)), gate

    def _norm_and_gate(self, out, gate):
        return _norm_and_gate(out, gate, self.scale, self.bias)


class CrossRetention(nn.Module):
    """Retention of a stream of queries over another, of whose keys, values and gates one product makes all
    three; causal."""

    width: int
    num_heads: int
    decay_scaling: float
    chunk: int | None = None
    """Time steps of a sequence taken at once; None: what suits the sizes."""

    causal = True
    agent_chunk = None

    def setup(self):
        self.query = _project(self.width, self.width)
        self.projections = _project(self.width, 3 * self.width)
        self.output = _project(self.width, self.width)
        self.scale = self.param("scale", nn.initializers.ones, (self.width,))
        self.bias = self.param("bias", nn.initializers.zeros, (self.width,))

    def sequence(
        self,
        query: Float[Array, "B T N E"],
        key: Float[Array, "B T N E"],
        memory: Float[Array, "B H d d"] | tuple[()],
        first: Bool[Array, "T B"],
    ) -> tuple[Float[Array, "B T N E"], Float[Array, "B H d d"] | tuple[()]]:
        """Return the retention of every token, and the memory after the last timestep."""
        return _sequence(self, (self.query(query), self.projections(key)), memory, first)

    def read_memory(self, query: Float[Array, "B N E"], memory: Float[Array, "B H d d"]) -> CrossQueries:
        """Return a timestep's queries and what they read from the memory that the last timestep left, the
        same however often a team decides anew."""
        query = self.query(query)
        return CrossQueries(query=query, readout=memory_update.read_memory(memory, query, _kappa(self)))

    def all_agents(
        self, key: Float[Array, "B N E"], queries: CrossQueries
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N 3*E"]]:
        """Return the retention of all agents of a timestep, each seeing those before it and what its query
        read: (readout, the projections to `write_projections`)."""
        projections = self.projections(key)
        if _use_timestep_kernel(self, key.shape[1]):
            sources, form = (queries.query, projections), retention_kernel.all_agents
            return _timestep_kernel(self, form, sources, queries.readout), projections
        q, k, v, gate = self._split(queries.query, projections)
        out = retention.intra_timestep(q[None], k[None], v[None], causal=True)[0]
        out = out + _heads(self, queries.readout)
        return self._norm_and_gate(out, gate), projections

    def next_agent(
        self,
        key: Float[Array, "B E"],
        queries: CrossQueries,
        cache: Float[Array, "B N 2*E"],
        agent: Int[Array, ""],
    ) -> tuple[Float[Array, "B E"], Float[Array, "B N 2*E"]]:
        """Return `all_agents` for the next agent alone, by a kernel: (readout, the key/value cache to
        `write_cache`, with this agent's beside those of the ones before)."""
        past = queries.query, queries.readout
        return _next_agent(self, key, past, cache, agent)

    def token(
        self, query: Float[Array, "B E"], key: Float[Array, "B E"], memory: Float[Array, "B H d d"]
    ) -> tuple[Float[Array, "B E"], Float[Array, "B H d d"]]:
        """Return the retention of the next agent of a timestep, the memory decayed (`decay_memory`)."""
        q, k, v, gate = self._split(self.query(query), self.projections(key))
        out, memory = retention.token_step(q, k, v, memory)
        return self._norm_and_gate(out, gate), memory

    def write_projections(
        self, memory: Float[Array, "B H d d"], projections: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """Return the memory that a timestep leaves, from that of the timestep before and `all_agents`."""
        return memory_update.write_memory(memory, projections, _kappa(self), (0, self.width))

    def write_cache(
        self, memory: Float[Array, "B H d d"], cache: Float[Array, "B N _"]
    ) -> Float[Array, "B H d d"]:
        """Return the memory that a timestep leaves, from that of the timestep before and its agents' keys and
        values."""
        return memory_update.write_memory(memory, cache, _kappa(self), (0, self.width))

    def decay_memory(self, memory: Float[Array, "B H d d"]) -> Float[Array, "B H d d"]:
        """Return the memory as the first agent of a new timestep finds it."""
        return _decay_memory(self, memory)

    def _split(self, query, projections):
        """Return queries, keys and values by head, and gates."""
        k, v, gate = jnp.split(projections, 3, axis=-1)
        return *(_heads(self, x) for x in (query, k, v)), gate

    def _norm_and_gate(self, out, gate):
        return _norm_and_gate(out, gate, self.scale, self.bias)


Layer = SelfRetention | CrossRetention
Sources = tuple[Array, ...]
"""Of `SelfRetention`, all projections; of `CrossRetention`, queries, and keys, values and gates."""


def _project(width: int, size: int) -> nn.Dense:
    # A quiet start, as in SwiGLU: 1/√width, which would keep variances, learns more slowly.
    return nn.Dense(size, use_bias=False, kernel_init=normal(1 / width))


def _sequence(layer: Layer, sources: Sources, memory, first):
    """Return `sequence` of either layer, by kernels where they can."""
    head_dim, num_agents = layer.width // layer.num_heads, sources[0].shape[2]
    use_kernel = layer.chunk is None and layer.agent_chunk is None and retention_kernel.use_kernel(head_dim)
    if use_kernel and retention_kernel.fits_shared_memory(
        head_dim, num_agents, layer.causal, sources[0].dtype
    ):
        return _sequence_kernel(layer, sources, memory, first)
    q, k, v, gate = layer._split(*sources)
    if isinstance(memory, tuple):
        return layer._norm_and_gate(_within_timesteps(layer, q, k, v), gate), ()
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    block = None if layer.chunk is None else q.shape[2]  # whole time steps, if so many are asked for
    out, memory = retention.chunkwise(
        q, k, v, memory, _kappa(layer), first, causal=layer.causal, chunk=layer.chunk, block=block
    )
    return layer._norm_and_gate(out.swapaxes(0, 1), gate), memory


def _sequence_kernel(layer: Layer, sources: Sources, memory, first):
    """Return `sequence`, by kernels over all tokens of an environment."""
    (num_envs, num_steps, num_agents), past = sources[0].shape[:3], memory
    if isinstance(memory, tuple):  # every timestep an episode of its own
        past = jnp.zeros((num_envs, layer.num_heads, *[layer.width // layer.num_heads] * 2))
        first = jnp.ones_like(first)

    def per_device(norm, sources, past, first):
        tokens = tuple(x.reshape(x.shape[0], num_steps * num_agents, -1) for x in sources)
        scale, bias = norm
        return retention_kernel.gated_retention(
            num_agents, layer.causal, tokens, past, scale, bias, _kappa(layer), first
        )

    readout, after = sharding.shard_map_envs(per_device, (layer.scale, layer.bias), sources, past, first.T)
    readout = readout.reshape(*sources[0].shape[:3], layer.width)
    return readout, () if isinstance(memory, tuple) else after


def _use_timestep_kernel(layer: Layer, num_agents: int) -> bool:
    return retention_kernel.use_timestep_kernel(layer.width // layer.num_heads, num_agents, layer.causal)


def _timestep_kernel(layer: Layer, form, sources: Sources, past):
    def per_device(norm, sources, past):
        scale, bias = norm
        return form(layer.causal, sources, past, scale, bias, _kappa(layer))

    return sharding.shard_map_envs(per_device, (layer.scale, layer.bias), sources, past)


def _next_agent(layer: Layer, key, past, cache, agent):
    norm_and_decay = layer.scale, layer.bias, _kappa(layer)
    return cached_decoder.next_agent(agent[None], layer.projections(key), past, cache, *norm_and_decay)


def _decay_memory(layer: Layer, memory):
    return retention.decay_memory(memory, _kappa(layer), jnp.zeros(memory.shape[:1], bool))


def _within_timesteps(layer: Layer, q, k, v):
    """Return retention among the agents of each timestep alone."""
    if layer.agent_chunk is None:
        return retention.intra_timestep(q, k, v, causal=layer.causal)
    return retention.intra_timestep_chunks(q, k, v, chunk=layer.agent_chunk)


def _kappa(layer: Layer):
    return retention.kappas(layer.num_heads, layer.decay_scaling)


def _heads(layer: Layer, x):
    return x.reshape(*x.shape[:-1], layer.num_heads, -1)


def _norm_and_gate(out, gate, scale, bias):
    """Return swish(gate) * norm(out), one normalisation group per head."""
    mean = out.mean(axis=-1, keepdims=True)
    out = out - mean
    out = out * jax.lax.rsqrt(jnp.square(out).mean(axis=-1, keepdims=True) + 1e-6)
    scale, bias = (broadcast_rows(x, gate.shape) for x in (scale, bias))
    out = out.reshape(gate.shape).astype(gate.dtype)
    return nn.swish(gate) * (out * scale + bias)

"""Retention over (timestep, agent) tokens: one definition, several exact forms.

Per head with decay kappa, timesteps in order, agents inside:

    P[t] = 0 if first[t] else kappa M[t-1]          what the past says
    M[t] = P[t] + sum_i k[t,i]^T v[t,i]             stored undecayed; M[-1] comes in, M[T-1] goes out
    full:    out[t,i] = q[t,i] M[t]                                      every agent of a timestep sees all
    of them
    causal:  out[t,i] = q[t,i] (P[t] + sum_{j<=i} k[t,j]^T v[t,j])       an agent sees itself and those
    before it

`recurrent` is the truth. `parallel` materialises every pair of tokens, for tests and teaching. `chunkwise`
is what training uses:
its memory grows linearly with timesteps and with agents, and its chunk sizes change nothing but speed.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tokens = Float[Array, "T B N H d"]
Memory = Float[Array, "B H d d"]
Decay = Float[Array, " H"]
First = Bool[Array, "T B"]

MAX_UNROLLED_AGENTS = 16
"""Agents whose keys and values are added to a memory one by one, in the one pass that writes it anyway; more
make a matrix product worth while."""


def kappas(num_heads: int, scaling: float) -> Decay:
    """Return each head's decay, scaling * (1 - exp(linspace(ln 1/32, ln 1/512, H)))."""
    return scaling * (1 - jnp.exp(jnp.linspace(math.log(1 / 32), math.log(1 / 512), num_heads)))


def decay_memory(
    memory: Float[Array, "*b H d d"], kappa: Decay, first: Bool[Array, "*b"]
) -> Float[Array, "*b H d d"]:
    """Return P[t]: the memory as a new timestep finds it, decayed once, or nothing where an episode opens."""
    kappa = kappa.reshape(*[1] * first.ndim, -1, 1, 1)
    return jnp.where(first[..., None, None, None], 0.0, kappa * memory)


def token_step(
    q: Float[Array, "B H d"], k: Float[Array, "B H d"], v: Float[Array, "B H d"], memory: Memory
) -> tuple[Float[Array, "B H d"], Memory]:
    """Return the retention of one token within a timestep, where nothing decays: (q M, M) with M = memory +
    k^T v."""
    memory = memory + k[..., :, None] * v[..., None, :]
    return jnp.einsum("bhi,bhij->bhj", q, memory), memory


def add_key_values(memory: Memory, k: Float[Array, "B N H d"], v: Float[Array, "B N H d"]) -> Memory:
    """Return the memory after a timestep's agents, from P[t]."""
    if k.shape[1] > MAX_UNROLLED_AGENTS:
        return memory + jnp.einsum("bnhi,bnhj->bhij", k, v)
    for i in range(k.shape[1]):
        memory = memory + k[:, i, :, :, None] * v[:, i, :, None, :]
    return memory


def read_memory(memory: Memory, query: Float[Array, "B N E"], kappa: Decay) -> Float[Array, "B N E"]:
    """Return what a timestep's queries, heads side by side, read from the memory that the last timestep
    left: q P[t]."""
    readout = jnp.einsum("bnhi,bhij->bnhj", query.reshape(*query.shape[:-1], kappa.shape[0], -1), memory)
    return (readout * kappa.reshape(1, 1, -1, 1)).reshape(query.shape)


def write_memory(
    memory: Memory, projections: Float[Array, "B N _"], kappa: Decay, columns: tuple[int, int]
) -> Memory:
    """Return M[t], the memory that a timestep leaves, from that of the timestep before and its agents'
    projections, heads side by side, where keys and values begin at `columns`."""
    _, num_heads, head_dim, _ = memory.shape
    k, v = (projections[..., start : start + num_heads * head_dim] for start in columns)
    k, v = (x.reshape(*x.shape[:-1], num_heads, -1) for x in (k, v))
    return add_key_values(decay_memory(memory, kappa, jnp.zeros(memory.shape[:1], bool)), k, v)


def step(
    q: Float[Array, "B N H d"],
    k: Float[Array, "B N H d"],
    v: Float[Array, "B N H d"],
    memory: Memory,
    kappa: Decay,
    first: Bool[Array, " B"],
    *,
    causal: bool,
) -> tuple[Float[Array, "B N H d"], Memory]:
    """Return (out, M[t]) of one timestep of the definition."""
    visible = decay_memory(memory, kappa, first)
    if not causal:
        memory = add_key_values(visible, k, v)
        return jnp.einsum("bnhi,bhij->bnhj", q, memory), memory
    visible = visible[:, None] + jnp.cumsum(jnp.einsum("bnhi,bnhj->bnhij", k, v), axis=1)
    return jnp.einsum("bnhi,bnhij->bnhj", q, visible), visible[:, -1]


def recurrent(
    q: Tokens, k: Tokens, v: Tokens, memory: Memory, kappa: Decay, first: First, *, causal: bool
) -> tuple[Tokens, Memory]:
    """Return (out, M[T-1]) by the definition, one timestep after another. The truth the other forms are held
    to."""

    def body(memory, inputs):
        q, k, v, first = inputs
        out, memory = step(q, k, v, memory, kappa, first, causal=causal)
        return memory, out

    memory, out = jax.lax.scan(body, memory, (q, k, v, first))
    return out, memory


def decay_matrix(first: First, kappa: Decay) -> Float[Array, "B H T T"]:
    """Return D[t, s] = kappa^(t-s) where s <= t and no episode opens in (s, t], else 0."""
    t, episode = jnp.arange(first.shape[0]), jnp.cumsum(first.T, axis=-1)
    lag = t[:, None] - t[None, :]
    power = kappa[:, None, None] ** jnp.maximum(lag, 0)[None]
    visible = (lag >= 0)[None] & (episode[:, :, None] == episode[:, None, :])
    return jnp.where(visible[:, None], power[None], 0.0)


def memory_decay(first: First, kappa: Decay) -> Float[Array, "B H T"]:
    """Return xi[t] = kappa^(t+1) until the first episode opens, then 0: how much of the incoming memory
    timestep t sees."""
    untouched = jnp.cumsum(first.T, axis=-1) == 0
    power = kappa[:, None] ** jnp.arange(1, first.shape[0] + 1)[None]
    return jnp.where(untouched[:, None], power[None], 0.0)


def token_decay_matrix(
    first: First, kappa: Decay, num_agents: int, *, causal: bool
) -> Float[Array, "B H tokens tokens"]:
    """Return D between tokens: constant over the agents of a timestep, lower-triangular over tokens when
    causal."""
    weight = _per_agent(_per_agent(decay_matrix(first, kappa), num_agents).mT, num_agents).mT
    return jnp.where(jnp.tri(weight.shape[-1], dtype=bool)[None, None], weight, 0.0) if causal else weight


def parallel(
    q: Tokens, k: Tokens, v: Tokens, memory: Memory, kappa: Decay, first: First, *, causal: bool
) -> tuple[Tokens, Memory]:
    """Return (out, M[T-1]) with every pair of tokens at once: (Q K^T * D) V + (Q M[-1]) * xi. Memory (T
    N)^2."""
    return _chunkwise(q, k, v, memory, kappa, first, causal=causal, chunk=q.shape[0])


def chunkwise(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    memory: Memory,
    kappa: Decay,
    first: First,
    *,
    causal: bool,
    chunk: int | None = None,
    block: int | None = None,
) -> tuple[Tokens, Memory]:
    """Return (out, M[T-1]) with every pair of tokens inside a chunk and the memory carried between chunks.

    A chunk is `chunk` timesteps of all agents; with `block` below the number of agents each timestep is
    instead cut into blocks
    of agents. Left out, both are chosen from the shapes for speed. Sizes need not divide.
    """
    num_steps, _, num_agents, _, width = q.shape
    fit_chunk, fit_block = _default_sizes(num_agents, width)
    chunk = min(fit_chunk if chunk is None else chunk, num_steps)
    block = min(fit_block if block is None else block, num_agents)
    if chunk < 1 or block < 1:
        raise ValueError(f"chunk={chunk} and block={block} must be at least 1")
    if block < num_agents:
        return _blockwise(q, k, v, memory, kappa, first, causal=causal, block=block)
    body = num_steps - num_steps % chunk
    if body == num_steps:
        return _chunkwise(q, k, v, memory, kappa, first, causal=causal, chunk=chunk)
    out, memory = _chunkwise(
        q[:body], k[:body], v[:body], memory, kappa, first[:body], causal=causal, chunk=chunk
    )
    rest, memory = parallel(q[body:], k[body:], v[body:], memory, kappa, first[body:], causal=causal)
    return jnp.concatenate([out, rest]), memory


def intra_timestep(q: Tokens, k: Tokens, v: Tokens, *, causal: bool, block: int | None = None) -> Tokens:
    """Return retention among the agents of each timestep alone: `first` everywhere, no memory in or out.

    full:    out[t,i] = q[t,i] sum_j k[t,j]^T v[t,j]
    causal:  out[t,i] = q[t,i] sum_{j<=i} k[t,j]^T v[t,j]
    """
    num_agents, _, width = q.shape[2:]
    if not causal and num_agents > width:
        return jnp.einsum("tbnhi,tbhij->tbnhj", q, jnp.einsum("tbnhi,tbnhj->tbhij", k, v))
    block = num_agents if not causal else min(block or _default_sizes(num_agents, width)[1], num_agents)
    return _agent_blocks(q, k, v, causal=causal, block=block)


def intra_timestep_chunks(q: Tokens, k: Tokens, v: Tokens, *, chunk: int) -> Tokens:
    """Return retention among the agents of each timestep, cut into chunks: a policy of its own.

    out[t,i] = q[t,i] sum_j k[t,j]^T v[t,j] over all j of i's chunk and of those before it, later ones of its
    own included. Self-retention over all agents (`intra_timestep`) is given up unless one chunk holds them.
    """
    if chunk >= q.shape[2]:
        return intra_timestep(q, k, v, causal=False)
    return _agent_blocks(q, k, v, causal=False, block=chunk)


def _agent_blocks(q: Tokens, k: Tokens, v: Tokens, *, causal: bool, block: int) -> Tokens:
    """Return retention within blocks of agents, causal or full, plus over all blocks before."""
    num_agents = q.shape[2]
    missing = -num_agents % block

    def cut(x):  # [T, B, N, H, d] -> [T, B, blocks, block, H, d]; agents of zeros add nothing
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])

    q, k, v = cut(q), cut(k), cut(v)
    scores = jnp.einsum("tbgnhi,tbgmhi->tbghnm", q, k)
    if causal:
        scores = jnp.where(jnp.tri(block, dtype=bool).reshape((1,) * 4 + (block, block)), scores, 0.0)
    out = jnp.einsum("tbghnm,tbgmhj->tbgnhj", scores, v)
    if block < num_agents:
        # Summed over earlier blocks only: cumsum(kv) - kv would leak later agents by rounding.
        earlier = jnp.cumsum(jnp.einsum("tbgnhi,tbgnhj->tbghij", k[:, :, :-1], v[:, :, :-1]), axis=2)
        out = out.at[:, :, 1:].add(jnp.einsum("tbgnhi,tbghij->tbgnhj", q[:, :, 1:], earlier))
    return out.reshape(*out.shape[:2], -1, *out.shape[4:])[:, :, :num_agents]


def _default_sizes(num_agents: int, width: int) -> tuple[int, int]:
    """Return (chunk, block) of about half as many tokens as a memory has rows, but 32 at least.

    Measured fastest on two CPU cores for 4 and for 32 agents at width 64.
    """
    tokens = min(max(width // 2, 32), 128)
    num_blocks = -(-num_agents // tokens)
    return max(tokens // num_agents, 1), -(-num_agents // num_blocks)


def _chunkwise(q, k, v, memory, kappa, first, *, causal, chunk):
    """Return `chunkwise` over whole chunks of timesteps: each chunk by itself, then what the memories before
    it say."""
    num_steps, num_envs, num_agents, num_heads, width = q.shape
    first = first.reshape(-1, chunk, num_envs)

    def cut(x):  # [T, B, N, H, d] -> [chunks, B, H, chunk * N, d]
        x = x.swapaxes(0, 1).reshape(num_envs, -1, chunk * num_agents, num_heads, width)
        return x.transpose(1, 0, 3, 2, 4)

    def join(x):
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(num_envs, num_steps, num_agents, num_heads, width).swapaxes(0, 1)

    q, k, v = cut(q), cut(k), cut(v)
    weight = jax.vmap(partial(token_decay_matrix, num_agents=num_agents, causal=causal), (0, None))(
        first, kappa
    )
    # How much of each token the chunk's last timestep keeps: the last row of D, over timesteps.
    zeta = _per_agent(jax.vmap(decay_matrix, (0, None))(first, kappa)[..., -1, :], num_agents)
    xi = _per_agent(jax.vmap(memory_decay, (0, None))(first, kappa), num_agents)
    before, last = chunk_recurrence(memory, first.any(axis=1), kappa**chunk, (k * zeta[..., None]).mT @ v)
    return join((q @ k.mT * weight) @ v + q @ before * xi[..., None]), last


def _blockwise(q, k, v, memory, kappa, first, *, causal, block):
    """Return `chunkwise` one timestep at a time, its agents cut into blocks: what the timestep adds, and what
    the past says."""
    update = jnp.einsum("tbnhi,tbnhj->tbhij", k, v)
    before, last = chunk_recurrence(memory, first, kappa, update)
    visible = decay_memory(before, kappa, first)
    if not causal:
        return jnp.einsum("tbnhi,tbhij->tbnhj", q, visible + update), last
    from_memory = jnp.einsum("tbnhi,tbhij->tbnhj", q, visible)
    return intra_timestep(q, k, v, causal=True, block=block) + from_memory, last


def chunk_recurrence(
    memory: Memory, has_reset: Bool[Array, "G B"], kappa: Decay, update: Float[Array, "G B H d d"]
) -> tuple[Float[Array, "G B H d d"], Memory]:
    """Return M[g] = added[g] + (0 if opened[g] else kappa M[g-1]): (every M[g-1], the last M)."""
    if jax.default_backend() == "gpu":
        return chunk_recurrence_parallel(memory, has_reset, kappa, update)

    def body(memory, inputs):
        has_reset, update = inputs
        return decay_memory(memory, kappa, has_reset) + update, memory

    last, before = jax.lax.scan(body, memory, (has_reset, update))
    return before, last


def chunk_recurrence_parallel(memory, has_reset, kappa, update):
    """Return `chunk_recurrence` as one product over all pairs: more work, but no step waits for another."""
    after = jnp.einsum("bhst,tbhij->sbhij", decay_matrix(has_reset, kappa), update)
    after += jnp.einsum("bhs,bhij->sbhij", memory_decay(has_reset, kappa), memory)
    return jnp.concatenate([memory[None], after[:-1]]), after[-1]


def _per_agent(x: Float[Array, "*b T"], num_agents: int) -> Float[Array, "*b tokens"]:
    """Return a weight per timestep, repeated for each of its agents."""
    x = jnp.broadcast_to(x[..., None], (*x.shape, num_agents))
    return x.reshape(*x.shape[:-2], -1)

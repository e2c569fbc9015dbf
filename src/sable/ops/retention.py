"""Retention over (timestep, agent) tokens: one definition, several exact forms.

Per head with decay kappa, timesteps in order, agents inside (SPEC section 1):

    P[t] = 0 if first[t] else kappa M[t-1]          what the past says
    M[t] = P[t] + sum_i k[t,i]^T v[t,i]             stored undecayed; M[-1] comes in, M[T-1] goes out
    full:    out[t,i] = q[t,i] M[t]                                      every agent of a timestep sees all of them
    causal:  out[t,i] = q[t,i] (P[t] + sum_{j<=i} k[t,j]^T v[t,j])       an agent sees itself and those before it

`recurrent` is the truth. `parallel` materialises every pair of tokens, for tests and teaching. `chunkwise` is what training uses:
its memory grows linearly with timesteps and with agents, and its chunk sizes change nothing but speed.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tokens = Float[Array, "T B N H d"]
Memory = Float[Array, "B H d d"]
Decay = Float[Array, " H"]
First = Bool[Array, "T B"]


def kappas(num_heads: int, scaling: float) -> Decay:
    """Each head's decay, scaling * (1 - exp(linspace(ln 1/32, ln 1/512, H)))."""
    return scaling * (1 - jnp.exp(jnp.linspace(math.log(1 / 32), math.log(1 / 512), num_heads)))


def past(memory: Float[Array, "*b H d d"], kappa: Decay, first: Bool[Array, "*b"]) -> Float[Array, "*b H d d"]:
    """P[t]: the memory as a new timestep finds it, decayed once, or nothing where an episode opens."""
    return jnp.where(first[..., None, None, None], 0.0, _per_head(kappa) * memory)


def attend(
    q: Float[Array, "B H d"], k: Float[Array, "B H d"], v: Float[Array, "B H d"], memory: Memory
) -> tuple[Float[Array, "B H d"], Memory]:
    """One token within a timestep, where nothing decays: (q M, M) with M = memory + k^T v."""
    memory = memory + k[..., :, None] * v[..., None, :]
    return jnp.einsum("bhi,bhij->bhj", q, memory), memory


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
    """One timestep of the definition: (out, M[t])."""
    seen = past(memory, kappa, first)
    if not causal:
        memory = seen + jnp.einsum("bnhi,bnhj->bhij", k, v)
        return jnp.einsum("bnhi,bhij->bnhj", q, memory), memory
    seen = seen[:, None] + jnp.cumsum(jnp.einsum("bnhi,bnhj->bnhij", k, v), axis=1)
    return jnp.einsum("bnhi,bnhij->bnhj", q, seen), seen[:, -1]


def recurrent(
    q: Tokens, k: Tokens, v: Tokens, memory: Memory, kappa: Decay, first: First, *, causal: bool
) -> tuple[Tokens, Memory]:
    """(out, M[T-1]) by the definition, one timestep after another. The truth the other forms are held to."""

    def body(memory, now):
        q, k, v, first = now
        out, memory = step(q, k, v, memory, kappa, first, causal=causal)
        return memory, out

    memory, out = jax.lax.scan(body, memory, (q, k, v, first))
    return out, memory


def decay(first: First, kappa: Decay) -> Float[Array, "B H T T"]:
    """D[t, s] = kappa^(t-s) where s <= t and no episode opens in (s, t], else 0."""
    t, episode = jnp.arange(first.shape[0]), jnp.cumsum(first.T, axis=-1)
    lag = t[:, None] - t[None, :]
    visible = (lag >= 0) & (episode[:, :, None] == episode[:, None, :])
    return jnp.where(visible[:, None], kappa[:, None, None] ** jnp.maximum(lag, 0), 0.0)


def carry(first: First, kappa: Decay) -> Float[Array, "B H T"]:
    """xi[t] = kappa^(t+1) until the first episode opens, then 0: how much of the incoming memory timestep t sees."""
    untouched = jnp.cumsum(first.T, axis=-1) == 0
    return jnp.where(untouched[:, None], kappa[:, None] ** jnp.arange(1, first.shape[0] + 1), 0.0)


def token_decay(first: First, kappa: Decay, num_agents: int, *, causal: bool) -> Float[Array, "B H tokens tokens"]:
    """D between tokens: constant over the agents of a timestep, lower-triangular over tokens when causal."""
    return _merge_tokens(decay(first, kappa)[:, :, :, None, :, None] * _visible(first.shape[0], num_agents, causal=causal))


def parallel(
    q: Tokens, k: Tokens, v: Tokens, memory: Memory, kappa: Decay, first: First, *, causal: bool
) -> tuple[Tokens, Memory]:
    """(out, M[T-1]) with every pair of tokens at once: (Q K^T * D) V + (Q M[-1]) * xi. Memory (T N)^2."""
    out, added, xi = _stretch(q, k, v, kappa, first, causal=causal)
    return out + _recall(q, memory, xi), xi[:, :, -1, None, None] * memory + added


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
    """(out, M[T-1]) with every pair of tokens inside a chunk and the memory carried between chunks.

    A chunk is `chunk` timesteps of all agents; with `block` below the number of agents each timestep is instead cut into blocks
    of agents. Left out, both are chosen from the shapes for speed. Sizes need not divide.
    """
    num_steps, _, num_agents, _, width = q.shape
    fit_chunk, fit_block = _fit(num_agents, width)
    chunk = min(fit_chunk if chunk is None else chunk, num_steps)
    block = min(fit_block if block is None else block, num_agents)
    if chunk < 1 or block < 1:
        raise ValueError(f"chunk={chunk} and block={block} must be at least 1")
    if block < num_agents:
        return _blocks(q, k, v, memory, kappa, first, causal=causal, block=block)
    body = num_steps - num_steps % chunk
    if body == num_steps:
        return _chunks(q, k, v, memory, kappa, first, causal=causal, chunk=chunk)
    out, memory = _chunks(q[:body], k[:body], v[:body], memory, kappa, first[:body], causal=causal, chunk=chunk)
    rest, memory = parallel(q[body:], k[body:], v[body:], memory, kappa, first[body:], causal=causal)
    return jnp.concatenate([out, rest]), memory


def within(q: Tokens, k: Tokens, v: Tokens, *, causal: bool, block: int | None = None) -> Tokens:
    """Retention among the agents of each timestep alone: `first` everywhere, no memory in or out.

    full:    out[t,i] = q[t,i] sum_j k[t,j]^T v[t,j]
    causal:  out[t,i] = q[t,i] sum_{j<=i} k[t,j]^T v[t,j]
    """
    num_agents, _, width = q.shape[2:]
    if not causal and num_agents > width:
        return jnp.einsum("tbnhi,tbhij->tbnhj", q, jnp.einsum("tbnhi,tbnhj->tbhij", k, v))
    block = num_agents if not causal else min(block or _fit(num_agents, width)[1], num_agents)
    missing = -num_agents % block

    def cut(x):  # [T, B, N, H, d] -> [T, B, blocks, block, H, d]; agents of zeros add nothing
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
        return x.reshape(*x.shape[:2], -1, block, *x.shape[3:])

    q, k, v = cut(q), cut(k), cut(v)
    scores = jnp.einsum("tbgnhi,tbgmhi->tbghnm", q, k)
    scores = jnp.where(jnp.tri(block, dtype=bool), scores, 0.0) if causal else scores
    out = jnp.einsum("tbghnm,tbgmhj->tbgnhj", scores, v)
    if block < num_agents:
        # Summed over earlier blocks only: cumsum(kv) - kv would leak later agents by rounding.
        earlier = jnp.cumsum(jnp.einsum("tbgnhi,tbgnhj->tbghij", k[:, :, :-1], v[:, :, :-1]), axis=2)
        out = out.at[:, :, 1:].add(jnp.einsum("tbgnhi,tbghij->tbgnhj", q[:, :, 1:], earlier))
    return out.reshape(*out.shape[:2], -1, *out.shape[4:])[:, :, :num_agents]


def _fit(num_agents: int, width: int) -> tuple[int, int]:
    """(chunk, block) of about `width` tokens, where pairs of tokens and d x d memories cost the same."""
    tokens = min(max(width, 32), 128)
    num_blocks = -(-num_agents // tokens)
    return max(tokens // num_agents, 1), -(-num_agents // num_blocks)


def _chunks(q, k, v, memory, kappa, first, *, causal, chunk):
    """`chunkwise` over whole chunks of timesteps: all chunks side by side, then their memories in order."""
    num_envs, num_chunks = q.shape[1], q.shape[0] // chunk

    def side_by_side(x):  # [T, B, ...] -> [chunk, chunks * B, ...]
        x = x.reshape(num_chunks, chunk, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(chunk, num_chunks * num_envs, *x.shape[3:])

    def in_order(x):
        x = x.reshape(chunk, num_chunks, num_envs, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(num_chunks * chunk, num_envs, *x.shape[3:])

    def per_chunk(x):  # [chunks * B, ...] -> [chunks, B, ...]
        return x.reshape(num_chunks, num_envs, *x.shape[1:])

    q = side_by_side(q)
    out, added, xi = _stretch(q, side_by_side(k), side_by_side(v), kappa, side_by_side(first), causal=causal)
    opened = first.reshape(num_chunks, chunk, num_envs).any(axis=1)
    before, memory = _thread(memory, opened, kappa**chunk, per_chunk(added))
    before = before.reshape(-1, *before.shape[2:])
    return in_order(out + _recall(q, before, xi)), memory


def _blocks(q, k, v, memory, kappa, first, *, causal, block):
    """`chunkwise` one timestep at a time, its agents cut into blocks: what the timestep adds, and what the past says."""
    before, last = _thread(memory, first, kappa, jnp.einsum("tbnhi,tbnhj->tbhij", k, v))
    recalled = jnp.einsum("tbnhi,tbhij->tbnhj", q, past(before, kappa, first))
    return within(q, k, v, causal=causal, block=block) + recalled, last


def _stretch(q, k, v, kappa, first, *, causal):
    """(out, memory, xi) of a stretch that starts from nothing, each pair of its tokens weighed by D."""
    num_steps, _, num_agents = q.shape[:3]
    weight = decay(first, kappa)
    scores = jnp.einsum("tbnhi,sbmhi->bhtnsm", q, k) * weight[:, :, :, None, :, None]
    scores = jnp.where(_visible(num_steps, num_agents, causal=causal), scores, 0.0)
    out = jnp.einsum("bhtnsm,sbmhj->tbnhj", scores, v)
    weighed = k * weight[:, :, -1].transpose(2, 0, 1)[:, :, None, :, None]
    added = jnp.einsum("sbmhi,sbmhj->bhij", weighed, v)
    return out, added, carry(first, kappa)


def _recall(q, memory, xi):
    """(Q M) * xi: what the incoming memory says to each token."""
    return jnp.einsum("tbnhi,bhij->tbnhj", q, memory) * xi.transpose(2, 0, 1)[:, :, None, :, None]


def _thread(memory, opened, kappa, added):
    """M[g] = added[g] + (0 if opened[g] else kappa M[g-1]): (every M[g-1], the last M)."""

    def body(memory, now):
        opened, added = now
        return past(memory, kappa, opened) + added, memory

    last, before = jax.lax.scan(body, memory, (opened, added))
    return before, last


def _visible(num_steps: int, num_agents: int, *, causal: bool) -> Bool[Array, "T N T N"]:
    """Whether token (t, n) may see token (s, m) as far as agents go; timesteps are D's business."""
    if not causal:
        return jnp.ones((num_steps, num_agents, num_steps, num_agents), bool)
    tokens = num_steps * num_agents
    return jnp.tri(tokens, dtype=bool).reshape(num_steps, num_agents, num_steps, num_agents)


def _merge_tokens(x: Float[Array, "B H T N S M"]) -> Float[Array, "B H tokens tokens"]:
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], -1)


def _per_head(x: Float[Array, " H"]) -> Float[Array, "H 1 1"]:
    return x[:, None, None]

"""The paper's worked example (last appendix, "Concrete Example"): 3 agents, 4 timesteps, one episode end."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.ops import retention

NUM_AGENTS, NUM_STEPS = 3, 4
NUM_TOKENS = NUM_AGENTS * NUM_STEPS
KAPPA = 0.7
FIRST_UNIT = np.eye(NUM_TOKENS)[[0] * NUM_TOKENS]
# "Termination at l + 1": l + 2 opens the next episode. Our flag stands there, and so must the paper's t_d.
FIRST = np.array([False, False, True, False])

# As printed, one character per entry: 0 is kappa^0, 1 is kappa^1, 2 is kappa^2, a dot is zero.
ENCODER = """
000.........
000.........
000.........
111000......
111000......
111000......
......000...
......000...
......000...
......111000
......111000
......111000
"""
DECODER = """
0...........
00..........
000.........
1110........
11100.......
111000......
......0.....
......00....
......000...
......1110..
......11100.
......111000
"""
XI = "111222......"
ZETA = "......111000"
PRINTED = {False: ENCODER, True: DECODER}
FORMS = {
    "recurrent": retention.recurrent,
    "parallel": retention.parallel,
    "one chunk": partial(retention.chunkwise, chunk=4),
    "chunks of one timestep": partial(retention.chunkwise, chunk=1),
    "a chunk across the boundary": partial(retention.chunkwise, chunk=3),
    "blocks of agents": partial(retention.chunkwise, block=2),
}

kinds = pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
# Jitted, and called with the same shapes in every test, so that each form compiles once.
forms = pytest.mark.parametrize(
    "form", [jax.jit(form, static_argnames="causal") for form in FORMS.values()], ids=FORMS.keys()
)


def numbers(printed):
    """The printed symbols as powers of KAPPA, one row per line."""
    return np.array([[0.0 if c == "." else KAPPA ** int(c) for c in row] for row in printed.split()])


def flags():
    return jnp.asarray(FIRST)[:, None], jnp.array([KAPPA])


def tokens(rows):
    """Token rows [T * N, d] as the operator takes them, [T, B, N, H, d], for one environment and one head."""
    return jnp.asarray(rows, jnp.float32).reshape(NUM_STEPS, 1, NUM_AGENTS, 1, -1)


def rows(out):
    return np.asarray(out).reshape(NUM_TOKENS, -1)


@kinds
def test_token_decay_is_the_printed_matrix(causal):
    first, kappa = flags()
    matrix = retention.token_decay_matrix(first, kappa, NUM_AGENTS, causal=causal)
    assert matrix.shape == (1, 1, NUM_TOKENS, NUM_TOKENS)
    np.testing.assert_allclose(matrix[0, 0], numbers(PRINTED[causal]), rtol=1e-6)


def test_timestep_decay_is_the_printed_encoder_matrix_at_one_agent():
    np.testing.assert_allclose(retention.decay_matrix(*flags())[0, 0], numbers(ENCODER)[::3, ::3], rtol=1e-6)


def test_carry_is_the_printed_xi():
    xi = np.repeat(retention.memory_decay(*flags())[0, 0], NUM_AGENTS)
    np.testing.assert_allclose(xi, numbers(XI)[0], rtol=1e-6)


@kinds
def test_zeta_is_the_last_row_of_the_decay_matrix(causal):
    np.testing.assert_array_equal(numbers(PRINTED[causal])[-1], numbers(ZETA)[0])
    matrix = retention.token_decay_matrix(*flags(), NUM_AGENTS, causal=causal)[0, 0]
    np.testing.assert_allclose(matrix[-1], numbers(ZETA)[0], rtol=1e-6)


@forms
@kinds
def test_every_form_reproduces_the_printed_matrix_entry_by_entry(form, causal):
    # Queries and keys all the first unit vector, values one-hot: out[i, j] is what token i keeps of token j.
    first, kappa = flags()
    same, apart = tokens(FIRST_UNIT), tokens(np.eye(NUM_TOKENS))
    memory = jnp.zeros((1, 1, NUM_TOKENS, NUM_TOKENS))
    out, memory = form(same, same, apart, memory, kappa, first, causal=causal)
    np.testing.assert_allclose(rows(out), numbers(PRINTED[causal]), rtol=1e-5, atol=1e-7)
    # What goes out is K^T (V * zeta): row 0 holds zeta, and nothing else was written.
    np.testing.assert_allclose(memory[0, 0, 0], numbers(ZETA)[0], rtol=1e-5, atol=1e-7)
    assert not memory[0, 0, 1:].any()


@forms
@kinds
def test_every_form_reads_the_incoming_memory_through_the_printed_xi(form, causal):
    # No keys, so that only the incoming memory speaks: the identity, queried by the first unit vector.
    first, kappa = flags()
    same, nothing = tokens(FIRST_UNIT), tokens(np.zeros((NUM_TOKENS, NUM_TOKENS)))
    out, memory = form(same, nothing, nothing, jnp.eye(NUM_TOKENS)[None, None], kappa, first, causal=causal)
    np.testing.assert_allclose(rows(out)[:, 0], numbers(XI)[0], rtol=1e-5, atol=1e-7)
    # delta = 0: the memory of the ended episode does not go out.
    assert not memory.any()


@forms
@kinds
def test_without_a_reset_the_incoming_memory_decays_by_the_timesteps_of_the_chunk(form, causal):
    # The example's kappa^4; the general formula prints floor(L / C), the number of chunks, instead.
    nothing = tokens(np.zeros((NUM_TOKENS, NUM_TOKENS)))
    first, kappa = jnp.zeros((NUM_STEPS, 1), bool), jnp.array([KAPPA])
    _, memory = form(nothing, nothing, nothing, jnp.eye(NUM_TOKENS)[None, None], kappa, first, causal=causal)
    np.testing.assert_allclose(memory[0, 0], KAPPA**4 * np.eye(NUM_TOKENS), rtol=1e-5)


def test_the_printed_formula_contradicts_the_printed_matrix_and_ours_does_not():
    # The erratum: the exponent is floor(i / N) - floor(j / N); the printed floor((i - j) / N) fails at 3, 2.
    i, j = np.indices((NUM_TOKENS, NUM_TOKENS))
    episode = np.cumsum(FIRST)
    visible = (i >= j) & (episode[i // NUM_AGENTS] == episode[j // NUM_AGENTS])
    printed = np.where(visible, KAPPA ** ((i - j) // NUM_AGENTS), 0.0)
    correct = np.where(visible, KAPPA ** (i // NUM_AGENTS - j // NUM_AGENTS), 0.0)
    np.testing.assert_allclose(correct, numbers(DECODER))
    assert printed[3, 2] != numbers(DECODER)[3, 2]


def test_the_bound_in_xi_is_strict_and_t_d_opens_the_new_episode():
    # The erratum: with t_d = 2 and tokens counted from 0, the printed j <= N t_d lets token 6 see the past.
    j, t_d = np.arange(NUM_TOKENS), int(np.argmax(FIRST))
    power = KAPPA ** (j // NUM_AGENTS + 1)
    np.testing.assert_allclose(np.where(j < NUM_AGENTS * t_d, power, 0.0), numbers(XI)[0])
    assert np.where(j <= NUM_AGENTS * t_d, power, 0.0)[NUM_AGENTS * t_d] != 0.0


@kinds
def test_the_cross_chunk_term_uses_the_memory_before_the_chunk(causal):
    # The erratum: printed as Q h_i. The recurrence equals the formula with h_{i-1}, and not with h_i.
    first, kappa = flags()
    q, k, v = jax.random.normal(jax.random.key(0), (3, NUM_STEPS, 1, NUM_AGENTS, 1, 2))
    before = jax.random.normal(jax.random.key(1), (1, 1, 2, 2))
    out, after = retention.recurrent(q, k, v, before, kappa, first, causal=causal)

    inside = (rows(q) @ rows(k).T * numbers(PRINTED[causal])) @ rows(v)
    by_formula = [inside + rows(q) @ np.asarray(h[0, 0]) * numbers(XI).T for h in (before, after)]
    np.testing.assert_allclose(rows(out), by_formula[0], rtol=1e-4, atol=1e-5)
    assert np.abs(rows(out) - by_formula[1]).max() > 0.1

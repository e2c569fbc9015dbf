"""Every decoding samples what sequential decoding samples, for any team, policy and memory."""

import functools
import itertools
import re
import typing as tp
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from sable.config.schema import SableConfig
from sable.errors import SableError
from sable.kernels import block as block_kernel
from sable.kernels import fused_decoder as kernel
from sable.kernels import retention as retention_kernel
from sable.nets.embeddings import previous_tokens
from sable.nets.sable import Sable, decoder_weights, initial_memory
from sable.ops.distributions import Categorical, TanhNormal
from sable.systems import autoregressive
from sable.systems import sable as sable_system
from sable.systems.autoregressive import TeamActions, TeamInputs
from sable.types import EnvSpec, Observation

KEY = jax.random.key(3)
BATCH = 3


@functools.cache
def make(
    num_agents: int, *, discrete: bool, memory: bool, positions: tp.Any = "timestep", scaling: float = 0.8
):
    """A network whose agents mind what the others do, and what they are to decide about."""
    spec = EnvSpec(
        num_agents=num_agents,
        view_size=6,
        num_actions=5 if discrete else 0,
        action_size=0 if discrete else 2,
        time_limit=9,
    )
    sizes = {"embed_dim": 32, "num_heads": 2, "num_blocks": 2}
    settings = {"memory": memory, "positions": positions, "decay_scaling": scaling}
    net = Sable(SableConfig(**sizes, **settings), spec)

    @jax.jit
    def prepared(key):
        flat, restore = ravel_pytree(autoregressive.init(net, key))
        params = restore(flat + 0.2 * jax.random.normal(key, flat.shape))
        view, time = jax.random.normal(key, (BATCH, num_agents, 6)), jnp.arange(BATCH)
        past = jax.tree.map(lambda x: x + 0.3, initial_memory(net.config, BATCH))
        encoded, _, past = net.apply(params, view, time, jnp.arange(num_agents), past, method=net.encode)
        action_mask = jax.random.bernoulli(key, 0.8, (BATCH, num_agents, 5 if discrete else 1))
        kind, size = (Categorical, 5) if discrete else (TanhNormal, 2)
        drawn = kind.noise(key, (BATCH, num_agents, size))
        time_encoding = net.apply(params, time, method=net.encode_time)
        inputs = TeamInputs(
            encoded=encoded,
            action_mask=action_mask.at[..., 0].set(True),
            time_encoding=time_encoding,
            noise=drawn,
        )
        return params, inputs, past

    return net, *prepared(jax.random.key(3))


JACOBI, FUSED = sable_system.decode_jacobi, sable_system.decode_fused
CACHED = sable_system.decode_cached
CASES = [(JACOBI, *case) for case in itertools.product([1, 5, 40], [True, False], [True, False])]
CASES += [(FUSED, *case) for case in itertools.product([1, 5, 40], [True], [True, False])]
CASES += [(CACHED, *case) for case in itertools.product([1, 5, 40], [True, False], [True, False])]
QUICK = [
    (CACHED, 5, True, True),
    (CACHED, 40, False, True),
    (JACOBI, 40, True, True),
    (JACOBI, 5, False, True),
    (FUSED, 5, True, True),
]


def marks(form, num_agents, *rest):
    gpu = [pytest.mark.gpu] if form is not JACOBI or num_agents > 1 else []
    return gpu if (form, num_agents, *rest) in QUICK else [*gpu, pytest.mark.slow]


# 40 agents are two blocks of retention.
@pytest.mark.parametrize(
    ("form", "num_agents", "discrete", "memory"), [pytest.param(*case, marks=marks(*case)) for case in CASES]
)
def test_every_decoding_gives_what_sequential_decoding_gives(form, num_agents, discrete, memory):
    """Agent by agent, each told what the others did by another form: it would have done the same, but for
    rounding. (Left to themselves the two may part at a near-tie and differ from there on.)"""
    assert_same_decisions(form, num_agents, discrete=discrete, memory=memory)


@pytest.mark.parametrize(
    ("form", "discrete"),
    [
        (sable_system.decode_sequential, True),
        pytest.param(JACOBI, True, marks=pytest.mark.slow),
        pytest.param(JACOBI, False, marks=pytest.mark.slow),
        pytest.param(CACHED, True, marks=pytest.mark.slow),
    ],
)
def test_each_agent_has_the_position_of_its_own_token(form, discrete):
    assert_same_decisions(form, 5, discrete=discrete, memory=True, positions="token")


@pytest.mark.gpu
@pytest.mark.parametrize("form", [JACOBI, FUSED, CACHED])
def test_every_form_of_deciding_allows_heads_that_forget_all(form):
    assert_same_decisions(form, 5, discrete=True, memory=True, scaling=0.0)


def assert_same_decisions(form, num_agents, *, discrete, **settings):
    net, params, inputs, past = make(num_agents, discrete=discrete, **settings)
    clocks = jnp.broadcast_to(inputs.time_encoding, (BATCH, num_agents, inputs.time_encoding.shape[-1]))

    @jax.jit
    def both(params):
        actions, told = form(net, params, inputs, past)
        raw, log_prob = actions.raw, actions.log_prob
        tokens = previous_tokens(net.spec, (raw if discrete else jnp.tanh(raw))[None])[0]

        def agent(memory, now):
            encoded, action_mask, time_encoding, token = now
            distribution, memory = net.apply(
                params, encoded, action_mask, time_encoding, token, memory, method=net.decode_agent
            )
            return memory, distribution

        in_turn = tuple(x.swapaxes(0, 1) for x in (inputs.encoded, inputs.action_mask, clocks, tokens))
        opened = net.apply(params, past, BATCH, method=net.decay_memory)
        memory, distribution = jax.lax.scan(agent, opened, in_turn)
        distribution = jax.tree.map(lambda x: x.swapaxes(0, 1), distribution)
        return (told, raw, log_prob), (memory, distribution, distribution.log_prob(raw))

    with jax.default_matmul_precision("highest"):
        (told, raw, log_prob), (memory, distribution, alone) = both(params)
    for a, b in zip(jax.tree.leaves(memory if past else ()), jax.tree.leaves(told), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max())
    np.testing.assert_allclose(log_prob, alone, atol=1e-4, rtol=1e-4)
    if discrete:
        wish = distribution.logits + inputs.noise
        chosen = np.take_along_axis(np.asarray(wish), np.asarray(raw)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(chosen, wish.max(-1), atol=1e-3)
        assert num_agents == 1 or len(np.unique(raw)) > 1
    else:
        np.testing.assert_allclose(raw, distribution.sample_from_noise(inputs.noise), atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("discrete", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_agent_sees_a_later_one_to_the_last_bit(discrete):
    net, params, inputs, past = make(40, discrete=discrete, memory=True)
    where = inputs.encoded, inputs.action_mask, inputs.time_encoding
    shape = (BATCH, 40) if discrete else (BATCH, 40, 2)
    action = jax.random.randint(KEY, shape, 0, 5) if discrete else jax.random.uniform(KEY, shape)

    @jax.jit
    def decode(tokens):
        asked = net.apply(params, inputs.encoded, inputs.time_encoding, past, method=net.read_memory)
        return net.apply(params, *where, tokens, past, asked, method=net.decode_all_agents)

    def parameters(action):
        distribution, _ = decode(previous_tokens(net.spec, action[None])[0])
        return np.asarray(distribution.logits if discrete else distribution.mean)

    before = parameters(action)
    for agent in (0, 7, 31, 32, 38):
        after = parameters(action.at[:, agent].add(1 if discrete else 0.5) % 5)
        np.testing.assert_array_equal(before[:, : agent + 1], after[:, : agent + 1])
        assert (before[:, agent + 1 :] != after[:, agent + 1 :]).any()


@pytest.mark.slow
def test_a_number_that_is_not_finite_ends_the_rounds():
    net, params, inputs, past = make(5, discrete=False, memory=True)
    inputs = replace(inputs, encoded=inputs.encoded.at[0, 2].set(jnp.nan))
    raw = JACOBI(net, params, inputs, past)[0].raw
    assert np.isnan(raw[0, 2:]).all() and np.isfinite(raw[1:]).all()


@pytest.mark.gpu
@pytest.mark.slow
def test_seeds_side_by_side_decide_as_each_alone():
    """Under vmap a kernel becomes another one, with an axis more."""
    net, params, *given = make(5, discrete=True, memory=True)
    both = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x]), params)
    decide = jax.jit(lambda params: FUSED(net, params, *given))
    together = jax.jit(jax.vmap(lambda params: FUSED(net, params, *given)))(both)
    for k, alone in enumerate((params, jax.tree.map(lambda x: 0.9 * x, params))):
        for a, b in zip(jax.tree.leaves(decide(alone)), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(a, b[k], atol=1e-5 * np.abs(a).max())


def test_fused_decoding_can_be_built_for_a_gpu(monkeypatch, triton_modules):
    """As far as a machine without one can tell: Triton takes every operation of it."""
    net, params, inputs, past = make(5, discrete=True, memory=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    memories = [tuple(getattr(m, name) for m in past) for name in ("decoder_self", "decoder_cross")]
    where = inputs.encoded, inputs.time_encoding[:, 0], inputs.action_mask, inputs.noise
    given = decoder_weights(net, params), *where, *memories
    lowered = jax.jit(kernel.decode).trace(*given).lower(lowering_platforms=("cuda",))
    assert "sable_decode" in lowered.as_text() and len(triton_modules) == 1


def test_cached_decoding_can_be_built_for_a_gpu(monkeypatch, triton_modules):
    """As above; seeds side by side make other kernels, with an axis more."""
    net, params, *given = make(5, discrete=False, memory=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    both = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    decide = jax.jit(jax.vmap(lambda params: CACHED(net, params, *given)))
    lowered = decide.trace(both).lower(lowering_platforms=("cuda",))
    assert "retention_next_agent" in lowered.as_text()
    assert sum("retention_next_agent" in str(each.module) for each in triton_modules) == 4


@pytest.mark.parametrize(
    ("decoding", "field", "value"),
    [
        ("fused", "num_heads", 4),
        ("fused", "embed_dim", 48),
        ("fused", "discrete", False),
        ("cached", "num_heads", 4),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(decoding, field, value):
    actions = {"num_actions": 5} if field != "discrete" else {"num_actions": 0, "action_size": 2}
    spec = EnvSpec(num_agents=2, view_size=6, time_limit=9, **actions)
    config = SableConfig(embed_dim=32, decoding=decoding)
    with pytest.raises(SableError, match="decoding='sequential' takes all"):
        sable_system.make(spec, replace(config, **{} if field == "discrete" else {field: value}))


def test_a_policy_acts_by_the_decoder_it_is_given():
    """It is told of the agents in `order`, and what it decides is put back into their own."""
    net, params, _, past = make(5, discrete=True, memory=True)
    order, seen = jnp.array([2, 0, 3, 1, 4]), []

    def decode(params, inputs, memory):
        seen.append(inputs)
        places = jnp.broadcast_to(jnp.arange(5), (BATCH, 5))
        return TeamActions(raw=places, action=places + 10, log_prob=-places), "memory"

    policy = autoregressive.make_policy(net, decode, lambda num_envs: past, chunk=1)
    observation = _observation(net.spec, BATCH)
    mask = observation.action_mask.at[:, 3, 1].set(False)
    decision = policy.act(params, replace(observation, action_mask=mask), past, order, None)
    np.testing.assert_array_equal(decision.action[0], [11, 13, 10, 12, 14])
    np.testing.assert_array_equal(decision.extras.log_prob, -decision.extras.raw)
    assert decision.memory == "memory"
    np.testing.assert_array_equal(seen[0].action_mask, mask[:, order])
    assert seen[0].encoded.shape == (BATCH, 5, 32) and not seen[0].noise.any()


class Old:
    """Stands in for a GPU of before 2020, a T4."""

    compute_capability = "7.5"


def test_a_gpu_that_cannot_run_kernels_does_without_them(monkeypatch):
    spec = EnvSpec(num_agents=2, view_size=6, time_limit=9, num_actions=5)
    net = Sable(SableConfig(), spec)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sable_system.resolve_decoding(net) == "fused"
    assert sable_system.resolve_decoding(Sable(SableConfig(positions="token"), spec)) == "jacobi"
    monkeypatch.setattr(jax, "devices", lambda: [Old()])
    assert sable_system.resolve_decoding(net) == "jacobi"
    assert not block_kernel.use_kernel(64) and not retention_kernel.use_kernel(64)
    with pytest.raises(SableError, match=r"compute capability 8\.0"):
        sable_system.make(spec, SableConfig(decoding="fused"))


def test_acting_by_kernels_is_acting_by_layers(monkeypatch):
    """All that a timestep of a few agents goes through: recalling, asking, writing, ends of blocks, heads."""
    net, params, *_, past = make(5, discrete=True, memory=True)
    net = Sable(replace(net.config, decoding="jacobi"), net.spec)

    def acting():  # anew each time, since JAX keeps what it has traced of a function
        observation = _observation(net.spec, BATCH)
        act = sable_system.make_policy(net.spec, net.config).act
        return lambda params: act(params, observation, past, jnp.arange(5), KEY)

    truth = jax.jit(acting())(params)
    for module in (retention_kernel, block_kernel):
        monkeypatch.setattr(module, "use_kernel", module.supported)
    kernels = set(re.findall(r"\bname=(\w+)", str(jax.make_jaxpr(acting())(params))))
    assert {
        "retention_all_agents",
        "read_memory",
        "write_memory",
        "project_add_norm",
        "project_add_norm_ffn",
        "dense_gelu_norm",
    } <= kernels
    found = jax.jit(acting())(params)
    np.testing.assert_array_equal(found.action, truth.action)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


def test_the_switch_switches(monkeypatch):
    net, params, *_ = make(5, discrete=True, memory=True)
    called = []
    for name in ("decode_sequential", "decode_jacobi", "decode_fused", "decode_cached"):
        real = getattr(sable_system, name)
        monkeypatch.setattr(
            sable_system, name, lambda *args, real=real, name=name: called.append(name) or real(*args)
        )
    wanted = {
        "sequential": ["decode_sequential"],
        "jacobi": ["decode_jacobi"],
        "fused": ["decode_fused"],
        "cached": ["decode_cached"],
    }
    for decoding, expected in wanted.items():
        called.clear()
        policy = sable_system.make_policy(net.spec, replace(net.config, decoding=decoding))
        seen = jax.eval_shape(
            lambda act=policy.act: act(
                params, _observation(net.spec), initial_memory(net.config, 2), jnp.arange(5), KEY
            )
        )
        assert seen.action.shape == (2, 5) and called == expected


def _observation(spec, num_envs=2):
    return Observation(
        view=jax.random.normal(KEY, (num_envs, 5, spec.view_size)),
        action_mask=jnp.ones((num_envs, 5, 5), bool),
        step_count=jnp.zeros(num_envs, jnp.int32),
        state=(),
    )

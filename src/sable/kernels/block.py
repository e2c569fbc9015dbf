"""What ends a block of the network, as GPU kernels (Pallas, Triton): one forwards, one backwards.

While learning, this is bound by memory: XLA reads or writes an array of all tokens some 75 times for it. Here
a program takes a few tokens through products, norms and gate, all in registers, and writes only what comes
out. Going back, everything is computed again from what went in; the weights' gradients are sums over all
tokens, which XLA makes of what the kernel writes.

The layers of `nets.layers`, put together as in `nets.sable`, are the truth.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.kernels import gpu
from sable.kernels.retention import dot
from sable.ops import sharding

EPSILON = 1e-6


class Launch(tp.NamedTuple):
    """How many tokens a program takes, a power of two, and with how many warps and stages."""

    rows: int
    warps: int
    stages: int = 1


FORWARD = {32: Launch(64, 4), 64: Launch(64, 4), 128: Launch(64, 4)}
BACKWARD = {32: Launch(64, 4), 64: Launch(64, 4), 128: Launch(32, 4)}
"""By width."""
FEW, FOR_FEW = 16_384, Launch(16, 4)
"""For fewer tokens, all learners' together, as while acting: more, smaller programs fill the GPU better."""


def supported(width: int) -> bool:
    """Whether the kernels can handle tokens of so many channels."""
    return width in FORWARD


def chosen(width: int) -> bool:
    """Whether blocks end by the kernels: on a GPU, if both can."""
    return gpu.capable() and supported(width)


@jax.custom_vjp
def finish(
    mixed: Array,  # [.., E] tokens: what retention gives before its output weights
    residual: Array,  # [.., E]
    output: Array,  # [E, E]
    first_scale: Array,  # [E]
    gate_and_input: Array,  # [E, 2 E]
    ff_output: Array,  # [E, E]
    second_scale: Array,  # [E]
) -> Array:
    """norm(a + SwiGLU(a)) of a = norm(residual + mixed W_o)."""
    return _finish(mixed, residual, output, first_scale, gate_and_input, ff_output, second_scale)[0]


def _finish(*given):
    mixed, residual, *weights = given
    tokens = _flat(mixed, residual)
    (out,) = _call(_finish_kernel, "finish", FORWARD, tokens, weights, [tokens[1]])
    return out.reshape(residual.shape), given


def _finish_back(given, dout):
    mixed, residual, output, first_scale, gate_and_input, ff_output, second_scale = given
    tokens, weights = _flat(mixed, residual, dout), given[2:]
    like = tokens[1]
    wide = jax.ShapeDtypeStruct((like.shape[0], 2 * like.shape[1]), like.dtype)
    dmixed, dz, a, dhidden, inner, dend, *dscales = _call(
        _finish_back_kernel, "finish_back", BACKWARD, tokens, weights, [like, like, like, wide, like, like], 2
    )
    return (
        dmixed.reshape(mixed.shape).astype(mixed.dtype),
        dz.reshape(residual.shape),
        _weight_gradient(tokens[0], dz, output),
        dscales[0].sum(0).astype(first_scale.dtype),
        _weight_gradient(a, dhidden, gate_and_input),
        _weight_gradient(inner, dend, ff_output),
        dscales[1].sum(0).astype(second_scale.dtype),
    )


finish.defvjp(_finish, _finish_back)


@jax.custom_vjp
def mend(
    mixed: Array,  # [.., E] tokens: what retention gives before its output weights
    residual: Array,  # [.., E]
    output: Array,  # [E, E]
    scale: Array,  # [E]
) -> Array:
    """norm(residual + mixed W_o)."""
    return _mend(mixed, residual, output, scale)[0]


def _mend(*given):
    mixed, residual, *weights = given
    tokens = _flat(mixed, residual)
    (out,) = _call(_mend_kernel, "mend", FORWARD, tokens, weights, [tokens[1]])
    return out.reshape(residual.shape), given


def _mend_back(given, dout):
    mixed, residual, output, scale = given
    tokens = _flat(mixed, residual, dout)
    like = [tokens[1]] * 2
    dmixed, dz, dscale = _call(_mend_back_kernel, "mend_back", BACKWARD, tokens, given[2:], like, 1)
    return (
        dmixed.reshape(mixed.shape).astype(mixed.dtype),
        dz.reshape(residual.shape),
        _weight_gradient(tokens[0], dz, output),
        dscale.sum(0).astype(scale.dtype),
    )


mend.defvjp(_mend, _mend_back)


def _flat(*tokens):
    return tuple(x.reshape(-1, x.shape[-1]) for x in tokens)


def _weight_gradient(tokens, error, weight):
    """That of `weight` where tokens @ weight has the gradient `error`."""
    return jnp.dot(tokens.T, error, preferred_element_type=jnp.float32).astype(weight.dtype)


def _call(kernel, name, launches, tokens, weights, out_shape, num_scales=0):
    """A program for every few tokens. Last in what comes out are `num_scales` arrays with a row for each
    program: its part of a scale's gradient."""
    num_tokens, width = tokens[0].shape
    few = num_tokens * sharding.num_learners() < FEW
    launch, interpret = FOR_FEW if few else launches[width], jax.default_backend() != "gpu"
    programs = pl.cdiv(num_tokens, launch.rows)
    given = (*tokens, *weights)
    part = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    return pl.pallas_call(
        functools.partial(kernel, _Rows(num_tokens, launch.rows)),
        grid=(programs,),
        in_specs=[*map(_whole, given)],
        out_specs=[*map(_whole, out_shape), *[pl.BlockSpec((None, width), lambda i: (i, 0))] * num_scales],
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape), *[part] * num_scales],
        interpret=interpret,
        compiler_params=None
        if interpret
        else triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        name=name,
    )(*given)


def _whole(x) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))


class _Rows(tp.NamedTuple):
    """The tokens of a program in arrays of all tokens. Past the last there are zeros, whose gradients are
    zero."""

    num_tokens: int
    num: int

    def _at(self, ref, width, column):
        """Their place in `width` channels, and which of them there are."""
        start = pl.program_id(0) * self.num
        there = start + jax.lax.iota(jnp.int32, self.num) < self.num_tokens
        mask = jnp.broadcast_to(there[:, None], (self.num, width))
        return ref.at[pl.ds(start, self.num), pl.ds(column, width)], mask

    def load(self, ref):
        place, mask = self._at(ref, ref.shape[-1], 0)
        return triton.load(place, mask=mask, other=0.0)

    def store(self, ref, value, column=0):
        place, mask = self._at(ref, value.shape[-1], column)
        triton.store(place, value.astype(ref.dtype), mask=mask)


def _finish_kernel(rows, mixed, residual, output, first_scale, gate_and_input, ff_output, second_scale, out):
    normal, _ = _normal(_sum(rows, mixed, residual, output))
    a = normal * first_scale[...][None]
    gate, inner_in = _hidden(a.astype(out.dtype), gate_and_input)
    inner = gate * jax.nn.sigmoid(gate) * inner_in
    normal, _ = _normal(a + dot(inner.astype(out.dtype), ff_output[...]))
    rows.store(out, normal * second_scale[...][None])


def _finish_back_kernel(rows, *refs):
    mixed, residual, dout, output, first_scale, gate_and_input, ff_output, second_scale, *gradients = refs
    dmixed, dz, a_, dhidden, inner_, dend_, dfirst, dsecond = gradients
    dtype, width = residual.dtype, residual.shape[-1]
    normal, spread = _normal(_sum(rows, mixed, residual, output))
    a = normal * first_scale[...][None]
    rows.store(a_, a)
    gate, inner_in = _hidden(a.astype(dtype), gate_and_input)
    sigmoid = jax.nn.sigmoid(gate)
    inner = (gate * sigmoid * inner_in).astype(dtype)
    rows.store(inner_, inner)
    end, end_spread = _normal(a + dot(inner, ff_output[...]))
    error = rows.load(dout).astype(jnp.float32)
    dsecond[...] = (error * end).sum(0)
    dend = _through_norm(error * second_scale[...][None], end, end_spread)
    rows.store(dend_, dend)
    dinner = dot(dend.astype(dtype), ff_output[...].T)
    dgate = (dinner * inner_in * sigmoid * (1 + gate * (1 - sigmoid))).astype(dtype)
    dinner_in = (dinner * gate * sigmoid).astype(dtype)
    rows.store(dhidden, dgate)
    rows.store(dhidden, dinner_in, width)
    da = dend + dot(dgate, gate_and_input[:, pl.ds(0, width)].T)
    da = da + dot(dinner_in, gate_and_input[:, pl.ds(width, width)].T)
    dfirst[...] = (da * normal).sum(0)
    _through_sum(rows, _through_norm(da * first_scale[...][None], normal, spread), output, dmixed, dz)


def _mend_kernel(rows, mixed, residual, output, scale, out):
    normal, _ = _normal(_sum(rows, mixed, residual, output))
    rows.store(out, normal * scale[...][None])


def _mend_back_kernel(rows, mixed, residual, dout, output, scale, dmixed, dz, dscale):
    normal, spread = _normal(_sum(rows, mixed, residual, output))
    error = rows.load(dout).astype(jnp.float32)
    dscale[...] = (error * normal).sum(0)
    _through_sum(rows, _through_norm(error * scale[...][None], normal, spread), output, dmixed, dz)


def _sum(rows, mixed, residual, output):
    return dot(rows.load(mixed), output[...]) + rows.load(residual).astype(jnp.float32)


def _through_sum(rows, error, output, dmixed, dresidual):
    """Writes the gradients of what `_sum` adds."""
    rows.store(dresidual, error)
    rows.store(dmixed, dot(error.astype(dresidual.dtype), output[...].T))


def _hidden(a, gate_and_input):
    """(gate, input) of the feed-forward layer."""
    width = a.shape[-1]
    return tuple(dot(a, gate_and_input[:, pl.ds(start, width)]) for start in (0, width))


def _normal(x):
    """(x normalised over channels, what it was multiplied with)."""
    spread = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * spread, spread


def _through_norm(error, normal, spread):
    """The gradient of what was normalised, from that of `normal`."""
    return (error - normal * (error * normal).mean(axis=1, keepdims=True)) * spread

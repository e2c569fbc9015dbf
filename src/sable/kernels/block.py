"""What ends a block of the network, and what begins a head, as GPU kernels (Pallas, Triton): one forwards,
one backwards.

While learning, this is bound by memory: XLA reads or writes an array of all tokens some 75 times for it. Here
a program takes a few tokens through products, norms and gate, all in registers, and writes only what comes
out and, where gradients are wanted, what costs more to compute again than to read. The weights' gradients are
sums over all tokens, which XLA makes of what the kernels write.

The layers of `nets.layers`, put together as in `nets.sable`, are the truth.
"""

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.kernels import gpu
from sable.kernels.retention import dot, sigmoid
from sable.ops import sharding

EPSILON = 1e-6


class Launch(tp.NamedTuple):
    """How many tokens a program takes, a power of two, how many channels of weights it reads at a time, and
    with how many warps and stages."""

    rows: int
    part: int
    warps: int = 4
    stages: int = 1


LAUNCHES = {32: Launch(64, 32), 64: Launch(64, 64), 128: Launch(64, 64, stages=2)}
FINISH_BACKWARD = {**LAUNCHES, 128: Launch(64, 32, stages=3)}
"""By width (benchmarks/README.md)."""
FEW = 16_384
FOR_FEW = {32: Launch(16, 32), 64: Launch(16, 32, stages=2), 128: Launch(32, 32, stages=2)}
"""Forwards for fewer tokens, all learners' together, as while acting: more, smaller programs fill the GPU
better."""


def supported(width: int) -> bool:
    """Whether the kernels can handle tokens of so many channels."""
    return width in LAUNCHES


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
    weights = output, first_scale, gate_and_input, ff_output, second_scale
    return _finish_call(mixed, residual, weights, lambda like: [like])[0].reshape(residual.shape)


def _finish_call(mixed, residual, weights, shapes):
    tokens = _flat(mixed, residual)
    like = tokens[1]
    return _call(_finish_kernel, "finish", _launch(LAUNCHES, like, FOR_FEW), tokens, weights, shapes(like))


def _finish(mixed, residual, *weights):
    def shapes(like):
        factor = jax.ShapeDtypeStruct(like.shape[:1], jnp.float32)
        return [like, like, _wide(like), like, factor, factor]

    out, *kept = _finish_call(mixed, residual, weights, shapes)
    return out.reshape(residual.shape), (mixed, kept, weights)


def _finish_back(given, dout):
    mixed, (normal, hidden, end, *spreads), weights = given
    output, first_scale, gate_and_input, ff_output, second_scale = weights
    tokens = normal, hidden, end, *_flat(dout)
    like, launch = normal, _launch(FINISH_BACKWARD, normal)
    shapes = [like, like, _wide(like), like, like]
    dmixed, dz, dhidden, inner, dend, *dscales = _call(
        _finish_back_kernel, "finish_back", launch, tokens, (*spreads, *weights), shapes, 2
    )
    scaled = _weight_gradient(normal, dhidden, gate_and_input)  # where a = scale * normal went in
    return (
        dmixed.reshape(mixed.shape).astype(mixed.dtype),
        dz.reshape(dout.shape),
        _weight_gradient(_flat(mixed)[0], dz, output),
        dscales[0].sum(0).astype(first_scale.dtype),
        first_scale[:, None] * scaled,
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
    like = tokens[1]
    (out,) = _call(_mend_kernel, "mend", _launch(LAUNCHES, like, FOR_FEW), tokens, weights, [like])
    return out.reshape(residual.shape), given


def _mend_back(given, dout):
    mixed, residual, output, scale = given
    tokens = _flat(mixed, residual, dout)
    like = tokens[1]
    launch = _launch(LAUNCHES, like)
    dmixed, dz, dscale = _call(_mend_back_kernel, "mend_back", launch, tokens, given[2:], [like, like], 1)
    return (
        dmixed.reshape(mixed.shape).astype(mixed.dtype),
        dz.reshape(residual.shape),
        _weight_gradient(tokens[0], dz, output),
        dscale.sum(0).astype(scale.dtype),
    )


mend.defvjp(_mend, _mend_back)


@jax.custom_vjp
def head(
    tokens: Array,  # [.., E]
    weight: Array,  # [E, E]
    bias: Array,  # [E]
) -> Array:
    """norm(gelu(tokens W + b)), a norm without a scale."""
    return _head(tokens, weight, bias)[0]


def _head(*given):
    (tokens,), weights = _flat(given[0]), given[1:]
    (out,) = _call(_head_kernel, "head", _launch(LAUNCHES, tokens, FOR_FEW), (tokens,), weights, [tokens])
    return out.reshape(given[0].shape), given


def _head_back(given, dout):
    x, weight, bias = given
    tokens = _flat(x, dout)
    like = tokens[0]
    launch = _launch(LAUNCHES, like)
    dx, dhidden, dbias = _call(_head_back_kernel, "head_back", launch, tokens, given[1:], [like, like], 1)
    return dx.reshape(x.shape), _weight_gradient(like, dhidden, weight), dbias.sum(0).astype(bias.dtype)


head.defvjp(_head, _head_back)


def _flat(*tokens):
    return tuple(x.reshape(-1, x.shape[-1]) for x in tokens)


def _wide(like):
    return jax.ShapeDtypeStruct((like.shape[0], 2 * like.shape[1]), like.dtype)


def _weight_gradient(tokens, error, weight):
    """That of `weight` where tokens @ weight has the gradient `error`."""
    return jnp.dot(tokens.T, error, preferred_element_type=jnp.float32).astype(weight.dtype)


def _call(kernel, name, launch, tokens, weights, out_shape, num_scales=0):
    """A program for every few tokens. Last in what comes out are `num_scales` arrays with a row for each
    program: its part of a scale's gradient."""
    num_tokens, width = tokens[0].shape
    interpret = jax.default_backend() != "gpu"
    programs = pl.cdiv(num_tokens, launch.rows)
    given = (*tokens, *weights)
    part = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    return pl.pallas_call(
        lambda *refs: kernel(_Tile(num_tokens, launch), *refs),
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


def _launch(launches, tokens, for_few=None) -> Launch:
    num_tokens, width = tokens.shape
    if for_few and num_tokens * sharding.num_learners() < FEW:
        return for_few[width]
    launch = launches[width]
    if tokens.dtype == jnp.float32 and width > 64:  # twice the bytes must fit, on any GPU
        return launch._replace(rows=launch.rows // 2, part=launch.part // 2)
    return launch


def _whole(x) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))


class _Tile:
    """The tokens of a program in arrays of all tokens. Past the last there are zeros, whose gradients are
    zero."""

    def __init__(self, num_tokens, launch):
        self.rows, self.part, self.start = launch.rows, launch.part, pl.program_id(0) * launch.rows
        self.there = self.start + jax.lax.iota(jnp.int32, self.rows) < num_tokens

    def _at(self, ref, width, column):
        """Their place in `width` channels, and which of them there are."""
        mask = jnp.broadcast_to(self.there[:, None], (self.rows, width))
        return ref.at[pl.ds(self.start, self.rows), pl.ds(column, width)], mask

    def load(self, ref, part=None):
        start, width = (part.start, part.size) if part else (0, ref.shape[-1])
        place, mask = self._at(ref, width, start)
        return triton.load(place, mask=mask, other=0.0)

    def store(self, ref, value, column=0):
        place, mask = self._at(ref, value.shape[-1], column)
        triton.store(place, value.astype(ref.dtype), mask=mask)

    def load_factor(self, ref):
        """A number for each token [rows, 1]."""
        return triton.load(ref.at[pl.ds(self.start, self.rows)], mask=self.there, other=0.0)[:, None]

    def store_factor(self, ref, value):
        triton.store(ref.at[pl.ds(self.start, self.rows)], value.reshape(self.rows), mask=self.there)

    def by_parts(self, add, total, width):
        """`total` after add(a part of `width` channels, total) for each in turn. Weights that come in parts
        leave registers for tokens, and one is read while the one before is used."""
        if self.part == width:
            return add(pl.ds(0, width), total)
        return jax.lax.fori_loop(
            0, width // self.part, lambda i, total: add(pl.ds(i * self.part, self.part), total), total
        )


def _finish_kernel(tile, *refs):
    """What comes out; also, where they are asked for, the first norm's result, what the gate and the product
    beside it are given, the second norm's result, and both norms' factors."""
    mixed, residual, output, first_scale, gate_and_input, ff_output, second_scale, out, *kept = refs
    normal_, hidden, end_, spread_, end_spread_ = kept or [None] * 5
    normal, spread = _normal(_sum(tile, mixed, residual, output))
    a = normal * first_scale[...][None]
    given = a.astype(out.dtype)
    if kept:
        tile.store(normal_, normal)
        tile.store_factor(spread_, spread)

    def add(part, total):
        gate, inner_in = (dot(given, gate_and_input[:, half]) for half in _halves(part, a))
        if kept:
            for half, value in zip(_halves(part, a), (gate, inner_in), strict=True):
                tile.store(hidden, value, half.start)
        inner = gate * sigmoid(gate, out.dtype) * inner_in
        return total + dot(inner.astype(out.dtype), ff_output[part, :])

    end, end_spread = _normal(tile.by_parts(add, a, a.shape[-1]))
    tile.store(out, end * second_scale[...][None])
    if kept:
        tile.store(end_, end)
        tile.store_factor(end_spread_, end_spread)


def _finish_back_kernel(tile, *refs):
    normal_, hidden, end_, dout, spread, end_spread, *weights = refs[:11]
    output, first_scale, gate_and_input, ff_output, second_scale = weights
    dmixed, dz, dhidden, inner_, dend_, dfirst, dsecond = refs[11:]
    dtype, width = normal_.dtype, normal_.shape[-1]
    error, end = (tile.load(ref).astype(jnp.float32) for ref in (dout, end_))
    dsecond[...] = (error * end).sum(0)
    dend = _through_norm(error * second_scale[...][None], end, tile.load_factor(end_spread))
    tile.store(dend_, dend)
    dend_in = dend.astype(dtype)

    def through(part, da):
        gate, inner_in = (tile.load(hidden, half).astype(jnp.float32) for half in _halves(part, normal_))
        opened = sigmoid(gate, dtype)
        swish = gate * opened
        tile.store(inner_, swish * inner_in, part.start)
        dinner = dot(dend_in, ff_output[part, :].T)
        dgate = (dinner * inner_in * (opened + swish * (1 - opened))).astype(dtype)
        dinner_in = (dinner * swish).astype(dtype)
        for half, error in zip(_halves(part, normal_), (dgate, dinner_in), strict=True):
            tile.store(dhidden, error, half.start)
            da = da + dot(error, gate_and_input[:, half].T)
        return da

    da = tile.by_parts(through, dend, width)
    normal = tile.load(normal_).astype(jnp.float32)
    dfirst[...] = (da * normal).sum(0)
    dz_ = _through_norm(da * first_scale[...][None], normal, tile.load_factor(spread))
    _through_sum(tile, dz_, output, dmixed, dz)


def _halves(part, tokens):
    """Where the gate's channels of a part are in the feed-forward layer's first product, and those beside
    it."""
    return part, pl.ds(tokens.shape[-1] + part.start, part.size)


def _mend_kernel(tile, mixed, residual, output, scale, out):
    normal, _ = _normal(_sum(tile, mixed, residual, output))
    tile.store(out, normal * scale[...][None])


def _mend_back_kernel(tile, mixed, residual, dout, output, scale, dmixed, dz, dscale):
    normal, spread = _normal(_sum(tile, mixed, residual, output))
    error = tile.load(dout).astype(jnp.float32)
    dscale[...] = (error * normal).sum(0)
    _through_sum(tile, _through_norm(error * scale[...][None], normal, spread), output, dmixed, dz)


def _head_kernel(tile, x, weight, bias, out):
    gelu, _ = _gelu(_product(tile, x, weight, bias[...][None]), x.dtype)
    tile.store(out, _normal(gelu)[0])


def _head_back_kernel(tile, x, dout, weight, bias, dx, dhidden_, dbias):
    gelu, slope = _gelu(_product(tile, x, weight, bias[...][None]), x.dtype)
    dhidden = _through_norm(tile.load(dout).astype(jnp.float32), *_normal(gelu)) * slope
    dbias[...] = dhidden.sum(0)
    _through_sum(tile, dhidden, weight, dx, dhidden_)


def _gelu(x, dtype):
    """(`jax.nn.gelu`, its derivative). Its (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    rate, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    opened = sigmoid(rate * x * (1 + cubic * x * x), dtype)
    return x * opened, opened + x * opened * (1 - opened) * rate * (1 + 3 * cubic * x * x)


def _sum(tile, mixed, residual, output):
    return _product(tile, mixed, output, tile.load(residual))


def _product(tile, tokens, weight, added):
    """tokens @ weight + added."""

    def add(part, total):
        return total + dot(tile.load(tokens, part), weight[part, :])

    width = weight.shape[0]
    added = jnp.broadcast_to(added.astype(jnp.float32), (tile.rows, width))
    return tile.by_parts(add, added, width)


def _through_sum(tile, error, output, dmixed, dresidual):
    """Writes the gradients of what `_sum` adds."""
    tile.store(dresidual, error)
    error = error.astype(dresidual.dtype)

    def write(part, total):
        tile.store(dmixed, dot(error, output[part, :].T), part.start)
        return total

    tile.by_parts(write, 0, output.shape[0])


def _normal(x):
    """(x normalised over channels, what it was multiplied with)."""
    spread = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * spread, spread


def _through_norm(error, normal, spread):
    """The gradient of what was normalised, from that of `normal`."""
    return (error - normal * (error * normal).mean(axis=1, keepdims=True)) * spread

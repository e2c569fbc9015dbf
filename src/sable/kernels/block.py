"""The end of a network's block, and the beginning of a head, as fused GPU kernels (Pallas, Triton): one
forwards, one backwards.

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
FFN_BWD_LAUNCHES = {**LAUNCHES, 128: Launch(64, 32, stages=3)}
"""By width (benchmarks/README.md)."""
FEW_TOKENS = 16_384
FEW_TOKENS_LAUNCHES = {32: Launch(16, 32), 64: Launch(16, 32, stages=2), 128: Launch(32, 32, stages=2)}
"""Forwards for fewer tokens, all learners' together, as while acting: more, smaller programs fill the GPU
better."""


def supported(width: int) -> bool:
    """Return whether the kernels can handle tokens of so many channels."""
    return width in LAUNCHES


def use_kernel(width: int) -> bool:
    """Return whether blocks end by the kernels: on a GPU, if both can."""
    return gpu.supports_kernels() and supported(width)


@jax.custom_vjp
def project_add_norm_ffn(
    retention_out: Array,  # [.., E] tokens: gated retention, before its output weights
    residual: Array,  # [.., E]
    output: Array,  # [E, E]
    first_scale: Array,  # [E]
    gate_and_input: Array,  # [E, 2 E]
    ff_output: Array,  # [E, E]
    second_scale: Array,  # [E]
) -> Array:
    """Return norm(a + SwiGLU(a)) of a = norm(residual + mixed W_o)."""
    weights = output, first_scale, gate_and_input, ff_output, second_scale
    return _ffn_call(retention_out, residual, weights, lambda like: [like])[0].reshape(residual.shape)


def _ffn_call(retention_out, residual, weights, shapes):
    tokens = _flatten_tokens(retention_out, residual)
    like = tokens[1]
    return _call(
        _project_add_norm_ffn_kernel,
        "project_add_norm_ffn",
        _launch(LAUNCHES, like, FEW_TOKENS_LAUNCHES),
        tokens,
        weights,
        shapes(like),
    )


def _project_add_norm_ffn_fwd(retention_out, residual, *weights):
    def shapes(like):
        factor = jax.ShapeDtypeStruct(like.shape[:1], jnp.float32)
        return [like, like, _double_width(like), like, factor, factor]

    out, *residuals = _ffn_call(retention_out, residual, weights, shapes)
    return out.reshape(residual.shape), (retention_out, residuals, weights)


def _project_add_norm_ffn_bwd(residuals, dout):
    retention_out, (normal, hidden, end, *factors), weights = residuals
    output, first_scale, gate_and_input, ff_output, second_scale = weights
    tokens = normal, hidden, end, *_flatten_tokens(dout)
    like, launch = normal, _launch(FFN_BWD_LAUNCHES, normal)
    shapes = [like, like, _double_width(like), like, like]
    dretention_out, dz, dhidden, inner, dend, *dscales = _call(
        _project_add_norm_ffn_bwd_kernel,
        "project_add_norm_ffn_bwd",
        launch,
        tokens,
        (*factors, *weights),
        shapes,
        2,
    )
    scaled = _weight_gradient(normal, dhidden, gate_and_input)  # where a = scale * normal went in
    return (
        dretention_out.reshape(retention_out.shape).astype(retention_out.dtype),
        dz.reshape(dout.shape),
        _weight_gradient(_flatten_tokens(retention_out)[0], dz, output),
        dscales[0].sum(0).astype(first_scale.dtype),
        first_scale[:, None] * scaled,
        _weight_gradient(inner, dend, ff_output),
        dscales[1].sum(0).astype(second_scale.dtype),
    )


project_add_norm_ffn.defvjp(_project_add_norm_ffn_fwd, _project_add_norm_ffn_bwd)


@jax.custom_vjp
def project_add_norm(
    retention_out: Array,  # [.., E] tokens: gated retention, before its output weights
    residual: Array,  # [.., E]
    output: Array,  # [E, E]
    scale: Array,  # [E]
) -> Array:
    """Return norm(residual + mixed W_o)."""
    return _project_add_norm_fwd(retention_out, residual, output, scale)[0]


def _project_add_norm_fwd(*inputs):
    retention_out, residual, *weights = inputs
    tokens = _flatten_tokens(retention_out, residual)
    like = tokens[1]
    (out,) = _call(
        _project_add_norm_kernel,
        "project_add_norm",
        _launch(LAUNCHES, like, FEW_TOKENS_LAUNCHES),
        tokens,
        weights,
        [like],
    )
    return out.reshape(residual.shape), inputs


def _project_add_norm_bwd(residuals, dout):
    retention_out, residual, output, scale = residuals
    tokens = _flatten_tokens(retention_out, residual, dout)
    like = tokens[1]
    launch = _launch(LAUNCHES, like)
    dretention_out, dz, dscale = _call(
        _project_add_norm_bwd_kernel, "project_add_norm_bwd", launch, tokens, residuals[2:], [like, like], 1
    )
    return (
        dretention_out.reshape(retention_out.shape).astype(retention_out.dtype),
        dz.reshape(residual.shape),
        _weight_gradient(tokens[0], dz, output),
        dscale.sum(0).astype(scale.dtype),
    )


project_add_norm.defvjp(_project_add_norm_fwd, _project_add_norm_bwd)


@jax.custom_vjp
def dense_gelu_norm(
    tokens: Array,  # [.., E]
    weight: Array,  # [E, E]
    bias: Array,  # [E]
) -> Array:
    """Return norm(gelu(tokens W + b)), a norm without a scale."""
    return _dense_gelu_norm_fwd(tokens, weight, bias)[0]


def _dense_gelu_norm_fwd(*inputs):
    (tokens,), weights = _flatten_tokens(inputs[0]), inputs[1:]
    (out,) = _call(
        _dense_gelu_norm_kernel,
        "dense_gelu_norm",
        _launch(LAUNCHES, tokens, FEW_TOKENS_LAUNCHES),
        (tokens,),
        weights,
        [tokens],
    )
    return out.reshape(inputs[0].shape), inputs


def _dense_gelu_norm_bwd(residuals, dout):
    x, weight, bias = residuals
    tokens = _flatten_tokens(x, dout)
    like = tokens[0]
    launch = _launch(LAUNCHES, like)
    dx, dhidden, dbias = _call(
        _dense_gelu_norm_bwd_kernel, "dense_gelu_norm_bwd", launch, tokens, residuals[1:], [like, like], 1
    )
    return dx.reshape(x.shape), _weight_gradient(like, dhidden, weight), dbias.sum(0).astype(bias.dtype)


dense_gelu_norm.defvjp(_dense_gelu_norm_fwd, _dense_gelu_norm_bwd)


def _flatten_tokens(*tokens):
    return tuple(x.reshape(-1, x.shape[-1]) for x in tokens)


def _double_width(like):
    return jax.ShapeDtypeStruct((like.shape[0], 2 * like.shape[1]), like.dtype)


def _weight_gradient(tokens, cotangent, weight):
    """Return that of `weight` where tokens @ weight has the gradient `cotangent`."""
    return jnp.dot(tokens.T, cotangent, preferred_element_type=jnp.float32).astype(weight.dtype)


def _call(kernel, name, launch, tokens, weights, out_shape, num_scales=0):
    """Run a program for every few tokens. Last in what comes out are `num_scales` arrays with a row for each
    program: its part of a scale's gradient."""
    num_tokens, width = tokens[0].shape
    interpret = jax.default_backend() != "gpu"
    programs = pl.cdiv(num_tokens, launch.rows)
    inputs = (*tokens, *weights)
    part = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    return pl.pallas_call(
        lambda *refs: kernel(_Tile(num_tokens, launch), *refs),
        grid=(programs,),
        in_specs=[*map(_full_spec, inputs)],
        out_specs=[
            *map(_full_spec, out_shape),
            *[pl.BlockSpec((None, width), lambda i: (i, 0))] * num_scales,
        ],
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape), *[part] * num_scales],
        interpret=interpret,
        compiler_params=None
        if interpret
        else triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        name=name,
    )(*inputs)


def _launch(launches, tokens, few_tokens=None) -> Launch:
    num_tokens, width = tokens.shape
    if few_tokens and num_tokens * sharding.num_learners() < FEW_TOKENS:
        return few_tokens[width]
    launch = launches[width]
    if tokens.dtype == jnp.float32 and width > 64:  # twice the bytes must fit, on any GPU
        return launch._replace(rows=launch.rows // 2, part=launch.part // 2)
    return launch


def _full_spec(x) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))


class _Tile:
    """The tokens of a program in arrays of all tokens. Past the last there are zeros, whose gradients are
    zero."""

    def __init__(self, num_tokens, launch):
        self.rows, self.part, self.start = launch.rows, launch.part, pl.program_id(0) * launch.rows
        self.valid = self.start + jax.lax.iota(jnp.int32, self.rows) < num_tokens

    def _at(self, ref, width, column):
        """Return their place in `width` channels, and which of them there are."""
        mask = jnp.broadcast_to(self.valid[:, None], (self.rows, width))
        return ref.at[pl.ds(self.start, self.rows), pl.ds(column, width)], mask

    def load(self, ref, part=None):
        start, width = (part.start, part.size) if part else (0, ref.shape[-1])
        place, mask = self._at(ref, width, start)
        return triton.load(place, mask=mask, other=0.0)

    def store(self, ref, value, column=0):
        place, mask = self._at(ref, value.shape[-1], column)
        triton.store(place, value.astype(ref.dtype), mask=mask)

    def load_factor(self, ref):
        """Return a number for each token [rows, 1]."""
        return triton.load(ref.at[pl.ds(self.start, self.rows)], mask=self.valid, other=0.0)[:, None]

    def store_factor(self, ref, value):
        triton.store(ref.at[pl.ds(self.start, self.rows)], value.reshape(self.rows), mask=self.valid)

    def loop_over_parts(self, add, total, width):
        """Return `total` after add(a part of `width` channels, total) for each in turn. Weights that come in
        parts leave registers for tokens, and one is read while the one before is used."""
        if self.part == width:
            return add(pl.ds(0, width), total)
        return jax.lax.fori_loop(
            0, width // self.part, lambda i, total: add(pl.ds(i * self.part, self.part), total), total
        )


def _project_add_norm_ffn_kernel(tile, *refs):
    """Write what comes out; also, where they are asked for, the first norm's result, what the gate and the
    product beside it are given, the second norm's result, and both norms' factors."""
    retention_out, residual, output, first_scale, gate_and_input, ff_output, second_scale, out, *residuals = (
        refs
    )
    normal_, hidden, end_, inv_rms_, end_inv_rms_ = residuals or [None] * 5
    normal, inv_rms = _rms_normalise(_sum(tile, retention_out, residual, output))
    a = normal * first_scale[...][None]
    ffn_input = a.astype(out.dtype)
    if residuals:
        tile.store(normal_, normal)
        tile.store_factor(inv_rms_, inv_rms)

    def add(part, total):
        gate, inner_in = (dot(ffn_input, gate_and_input[:, half]) for half in _halves(part, a))
        if residuals:
            for half, value in zip(_halves(part, a), (gate, inner_in), strict=True):
                tile.store(hidden, value, half.start)
        inner = gate * sigmoid(gate, out.dtype) * inner_in
        return total + dot(inner.astype(out.dtype), ff_output[part, :])

    end, end_inv_rms = _rms_normalise(tile.loop_over_parts(add, a, a.shape[-1]))
    tile.store(out, end * second_scale[...][None])
    if residuals:
        tile.store(end_, end)
        tile.store_factor(end_inv_rms_, end_inv_rms)


def _project_add_norm_ffn_bwd_kernel(tile, *refs):
    normal_, hidden, end_, dout, inv_rms, end_inv_rms, *weights = refs[:11]
    output, first_scale, gate_and_input, ff_output, second_scale = weights
    dretention_out, dz, dhidden, inner_, dend_, dfirst, dsecond = refs[11:]
    dtype, width = normal_.dtype, normal_.shape[-1]
    cotangent, end = (tile.load(ref).astype(jnp.float32) for ref in (dout, end_))
    dsecond[...] = (cotangent * end).sum(0)
    dend = _norm_bwd(cotangent * second_scale[...][None], end, tile.load_factor(end_inv_rms))
    tile.store(dend_, dend)
    dend_in = dend.astype(dtype)

    def add_bwd(part, da):
        gate, inner_in = (tile.load(hidden, half).astype(jnp.float32) for half in _halves(part, normal_))
        sig = sigmoid(gate, dtype)
        swish = gate * sig
        tile.store(inner_, swish * inner_in, part.start)
        dinner = dot(dend_in, ff_output[part, :].T)
        dgate = (dinner * inner_in * (sig + swish * (1 - sig))).astype(dtype)
        dinner_in = (dinner * swish).astype(dtype)
        for half, cotangent in zip(_halves(part, normal_), (dgate, dinner_in), strict=True):
            tile.store(dhidden, cotangent, half.start)
            da = da + dot(cotangent, gate_and_input[:, half].T)
        return da

    da = tile.loop_over_parts(add_bwd, dend, width)
    normal = tile.load(normal_).astype(jnp.float32)
    dfirst[...] = (da * normal).sum(0)
    dz_ = _norm_bwd(da * first_scale[...][None], normal, tile.load_factor(inv_rms))
    _sum_bwd(tile, dz_, output, dretention_out, dz)


def _halves(part, tokens):
    """Return where the gate's channels of a part are in the feed-forward layer's first product, and those
    beside it."""
    return part, pl.ds(tokens.shape[-1] + part.start, part.size)


def _project_add_norm_kernel(tile, retention_out, residual, output, scale, out):
    normal, _ = _rms_normalise(_sum(tile, retention_out, residual, output))
    tile.store(out, normal * scale[...][None])


def _project_add_norm_bwd_kernel(
    tile, retention_out, residual, dout, output, scale, dretention_out, dz, dscale
):
    normal, inv_rms = _rms_normalise(_sum(tile, retention_out, residual, output))
    cotangent = tile.load(dout).astype(jnp.float32)
    dscale[...] = (cotangent * normal).sum(0)
    _sum_bwd(tile, _norm_bwd(cotangent * scale[...][None], normal, inv_rms), output, dretention_out, dz)


def _dense_gelu_norm_kernel(tile, x, weight, bias, out):
    gelu, _ = _gelu(_product(tile, x, weight, bias[...][None]), x.dtype)
    tile.store(out, _rms_normalise(gelu)[0])


def _dense_gelu_norm_bwd_kernel(tile, x, dout, weight, bias, dx, dhidden_, dbias):
    gelu, derivative = _gelu(_product(tile, x, weight, bias[...][None]), x.dtype)
    dhidden = _norm_bwd(tile.load(dout).astype(jnp.float32), *_rms_normalise(gelu)) * derivative
    dbias[...] = dhidden.sum(0)
    _sum_bwd(tile, dhidden, weight, dx, dhidden_)


def _gelu(x, dtype):
    """Return (`jax.nn.gelu`, its derivative). Its (1 + tanh(z)) / 2 is the sigmoid of 2 z."""
    rate, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    sig = sigmoid(rate * x * (1 + cubic * x * x), dtype)
    return x * sig, sig + x * sig * (1 - sig) * rate * (1 + 3 * cubic * x * x)


def _sum(tile, retention_out, residual, output):
    return _product(tile, retention_out, output, tile.load(residual))


def _product(tile, tokens, weight, added):
    """Return tokens @ weight + added."""

    def add(part, total):
        return total + dot(tile.load(tokens, part), weight[part, :])

    width = weight.shape[0]
    added = jnp.broadcast_to(added.astype(jnp.float32), (tile.rows, width))
    return tile.loop_over_parts(add, added, width)


def _sum_bwd(tile, cotangent, output, dretention_out, dresidual):
    """Write the gradients of what `_sum` adds."""
    tile.store(dresidual, cotangent)
    cotangent = cotangent.astype(dresidual.dtype)

    def write(part, total):
        tile.store(dretention_out, dot(cotangent, output[part, :].T), part.start)
        return total

    tile.loop_over_parts(write, 0, output.shape[0])


def _rms_normalise(x):
    """Return (x normalised over channels, what it was multiplied with)."""
    inv_rms = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * inv_rms, inv_rms


def _norm_bwd(cotangent, normal, inv_rms):
    """Return the gradient of what was normalised, from that of `normal`."""
    return (cotangent - normal * (cotangent * normal).mean(axis=1, keepdims=True)) * inv_rms

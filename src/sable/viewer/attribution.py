"""Whom and what a retention memory recalls: retention is linear, so what each past token adds is exact.

out[t, i] = sum over tokens (s, j) of w v[s, j],   w = (q[t, i] . k[s, j]) kappa^(t - s),

over the steps s <= t of an episode; of step t itself all agents j where the layer is not causal, else j <= i.
"""

import math
import typing as tp
from dataclasses import dataclass

import flax.linen as nn
import numpy as np

from sable.nets.retention import CrossRetention, SelfRetention
from sable.ops import retention

KINDS = {"retention": "encoder", "self_retention": "decoder, self", "cross_retention": "decoder, cross"}
FORGOTTEN = 1e-9
"""Tokens that have decayed below this are left out of summaries."""
LAGS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Steps back at which the spans of a summary begin."""


@dataclass(frozen=True)
class Layer:
    """One retention layer over one episode, numpy [T, N, H, d]; agents in the order they decide."""

    kind: str
    block: int
    causal: bool
    kappa: np.ndarray  # [H]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    """What the layer itself found, before its norm and gate."""


@dataclass(frozen=True)
class Recall:
    """Shares, in [0, 1], of what the agents recall at every step: how large each token's part is, over the
    sum of all parts' sizes. Agents on axis 1 are those who recall."""

    by_agent: np.ndarray  # [T, n, N] whose tokens
    by_lag: np.ndarray  # [T, n, len(LAGS)] how long ago
    top_lag: np.ndarray  # [T, n, K] the largest parts: how many steps ago,
    top_agent: np.ndarray  # [T, n, K] of whom,
    top_share: np.ndarray  # [T, n, K] how large; below 0 where it is subtracted


class Capture:
    """Retention layers' projections and outputs, caught by `nn.intercept_methods` as a network is applied."""

    def __init__(self):
        self.outputs: dict[str, tuple] = {}

    def __call__(
        self, call: tp.Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext
    ) -> tp.Any:
        result = call(*args, **kwargs)
        module = context.module
        if isinstance(module, SelfRetention | CrossRetention):
            path = "/".join(module.path)
            if context.method_name == "_split":
                kappa = retention.kappas(module.num_heads, module.decay_scaling)
                self.outputs[path] = (module.causal, kappa, *result[:3])
            elif context.method_name == "_norm_and_gate":
                self.outputs[path] += (args[0],)
        return result


def layers(outputs: dict[str, tuple], index: int, length: int) -> list[Layer]:
    """Return the captured layers [B, T, N, H, d] of one episode, in the order they come in."""

    def layer(path: str) -> Layer:
        *_, block, name = path.split("/")
        causal, kappa, q, k, v, out = (np.asarray(x) for x in outputs[path])
        cut = {"q": q, "k": k, "v": v, "out": out}
        cut = {name: x[index, :length].astype(np.float64) for name, x in cut.items()}
        number = int(block.rpartition("_")[2]) + 1
        return Layer(
            kind=KINDS[name], block=number, causal=bool(causal), kappa=kappa.astype(np.float64), **cut
        )

    order = list(KINDS.values())
    return sorted(
        map(layer, outputs), key=lambda one: (one.kind != "encoder", one.block, order.index(one.kind))
    )


def weights(layer: Layer, t: int, *, since: int = 0, num_agents: int | None = None) -> np.ndarray:
    """Return w [H, n, t + 1 - since, N] of all tokens from step `since` on, in what the first n agents recall
    at step t."""
    q = layer.q[t, :num_agents]
    scores = np.einsum("nhd,smhd->hnsm", q, layer.k[since : t + 1], optimize=True)
    if layer.causal:
        scores[:, :, -1] *= np.tri(q.shape[0], layer.k.shape[1])
    return scores * (layer.kappa[:, None] ** (t - np.arange(since, t + 1)))[:, None, :, None]


def recall(layer: Layer, *, head: int | None, num_agents: int, top: int) -> Recall:
    """Return what the first `num_agents` recall through a layer: through one head, or through all together,
    whose outputs stand side by side, so that a token's part is as long as their squares' sum."""
    num_steps, team = layer.q.shape[:2]
    heads = slice(None) if head is None else slice(head, head + 1)
    selected = Layer(
        kind=layer.kind,
        block=layer.block,
        causal=layer.causal,
        kappa=layer.kappa[heads],
        q=layer.q[:, :, heads],
        k=layer.k[:, :, heads],
        v=layer.v[:, :, heads],
        out=layer.out[:, :, heads],
    )
    size = np.linalg.norm(selected.v, axis=-1).transpose(2, 0, 1)  # [H, T, N]
    longest = float(selected.kappa.max())
    window = math.ceil(math.log(FORGOTTEN) / math.log(longest)) if 0 < longest < 1 else num_steps
    shape = (num_steps, num_agents)
    by_agent, by_lag = np.zeros((*shape, team)), np.zeros((*shape, len(LAGS)))
    top_lag, top_agent, top_share = (np.zeros((*shape, top), kind) for kind in (int, int, float))
    for t in range(num_steps):
        since = max(0, t - window)
        weight = weights(selected, t, since=since, num_agents=num_agents)
        parts = weight * size[:, None, since : t + 1]
        lengths = np.sqrt(np.square(parts).sum(0))  # [n, s, N]
        share = lengths / np.maximum(lengths.sum((1, 2), keepdims=True), 1e-30)
        by_agent[t] = share.sum(1)
        lags = np.array([lag for lag in LAGS if lag <= t - since])
        by_lag[t, :, : len(lags)] = np.add.reduceat(share.sum(2)[:, ::-1], lags, axis=1)
        flat = share.reshape(num_agents, -1)
        count = min(top, flat.shape[1])
        largest = np.argpartition(flat, flat.shape[1] - count, axis=1)[:, -count:]
        values = np.take_along_axis(flat, largest, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        largest, values = np.take_along_axis(largest, order, 1), np.take_along_axis(values, order, 1)
        sign = np.sign(np.take_along_axis(parts.sum(0).reshape(num_agents, -1), largest, axis=1))
        top_lag[t, :, :count] = t - since - largest // team
        top_agent[t, :, :count] = largest % team
        top_share[t, :, :count] = np.where(sign < 0, -1, 1) * values
    return Recall(by_agent, by_lag, top_lag, top_agent, top_share)

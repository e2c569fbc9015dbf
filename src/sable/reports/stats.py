"""From scores to conclusions: the paper's summaries, and point estimates with bootstrap intervals.

Scores are one system's, `{task: one per run}`. Intervals hold 95 %. A resample draws each task's runs again,
with replacement, and keeps the tasks (stratified bootstrap, percentiles). It is written as how often each run
was drawn, so that every statistic is a product of matrices, without sorting or copying scores.
"""

import typing as tp
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sable.errors import SableError

Array = np.ndarray
Scores = Mapping[str, Sequence[float] | Array]
Statistic = tp.Callable[[Array, Array], Array]
"""(scores [n], how often each was drawn [reps, n]) -> the statistic of each resample [reps]"""

REPS = 5000
"""Resamples behind an interval: its ends are then sure to about a fiftieth of its width."""
SUMMARIES = ("mean", "max", "final", "absolute", "iqm")


class Estimate(tp.NamedTuple):
    """A point estimate and its interval, numbers or arrays; without an interval, nan, where no task has more
    than one run."""

    value: tp.Any
    low: tp.Any
    high: tp.Any


def summaries(series: Sequence[float] | Array, absolute: float) -> dict[str, float]:
    """Return the paper's five summaries of one run, from its evaluations in order and its absolute metric."""
    series = np.asarray(series, float)
    values = series.mean(), series.max(), series[-1], absolute, iqm(series, np.ones((1, series.size)))[0]
    return dict(zip(SUMMARIES, map(float, values), strict=True))


def mean(x: Array, drawn: Array) -> Array:
    """Return the mean of each resample."""
    return drawn @ x / drawn.sum(-1)


def iqm(x: Array, drawn: Array) -> Array:
    """Return the interquartile mean of each resample: the mean of its middle half."""
    order = np.argsort(x, kind="stable")
    until = np.cumsum(drawn[:, order], axis=-1)
    cut = until[:, -1:] // 4
    weights = np.diff(np.clip(until, cut, until[:, -1:] - cut), axis=-1, prepend=cut)
    return weights @ x[order] / weights.sum(-1)


def estimate(scores: Scores, statistic: Statistic = iqm, *, reps: int = REPS, seed: int = 0) -> Estimate:
    """Return a statistic over all runs of all tasks."""
    x, drawn = _pool(scores), _draw(scores, reps, seed)
    return _interval(statistic(x, np.ones((1, x.size)))[0], statistic(x, drawn), scores)


def difference(x: Sequence[float] | Array, y: Sequence[float] | Array, *, reps: int = REPS) -> Estimate:
    """Return the mean of x less that of y, two samples that may be of different size.

    What deviates from its own mean is pooled, of one or two runs alone no spread could be told; and scaled
    up by what fitting two means took of it.
    """
    x, y, rng = np.asarray(x, float), np.asarray(y, float), np.random.default_rng(0)
    residuals = np.concatenate([x - x.mean(), y - y.mean()])
    residuals = residuals * (residuals.size / max(residuals.size - 2, 1)) ** 0.5
    ours, theirs = (mean(residuals, _drawn(residuals.size, reps, rng, draws)) for draws in (x.size, y.size))
    value = x.mean() - y.mean()
    return Estimate(float(value), *map(float, np.percentile(value + ours - theirs, [2.5, 97.5])))


def curve(
    series: Mapping[str, Array], statistic: Statistic = iqm, *, reps: int = REPS // 5, seed: int = 0
) -> Estimate:
    """Return a statistic at every evaluation, from `{task: [runs, evaluations]}`: a learning curve, or sample
    efficiency."""
    lengths = {np.shape(runs)[1] for runs in series.values()}
    if len(lengths) != 1:
        raise SableError(f"runs of {_listed(sorted(lengths))} evaluations cannot share one curve")
    points = [{task: np.asarray(runs)[:, k] for task, runs in series.items()} for k in range(lengths.pop())]
    drawn = _draw(points[0], reps, seed)
    pooled = [_pool(scores) for scores in points]
    value = np.array([statistic(x, np.ones((1, x.size)))[0] for x in pooled])
    return _interval(value, np.stack([statistic(x, drawn) for x in pooled], axis=-1), points[0])


def profile(scores: Scores, thresholds: Array, *, reps: int = REPS, seed: int = 0) -> Estimate:
    """Return the share of runs that score above each threshold: a performance profile."""
    x, drawn = _pool(scores), _draw(scores, reps, seed)
    above = (x[:, None] > thresholds).astype(float)
    return _interval(above.mean(0), drawn @ above / x.size, scores)


def improvement(scores: Scores, over: Scores, *, reps: int = REPS, seed: int = 0) -> Estimate:
    """Return the chance that a run beats one of another system on the same task, ties counting half; mean
    over tasks."""
    if scores.keys() != over.keys():
        alone = sorted(scores.keys() ^ over.keys())
        raise SableError(f"systems can only be compared on tasks both have; only one has {_listed(alone)}")
    rng, values, resampled = np.random.default_rng(seed), [], []
    for task in scores:
        ours, theirs = _pool({task: scores[task]}), _pool({task: over[task]})
        beats = (np.sign(ours[:, None] - theirs) + 1) / 2
        drawn_ours, drawn_theirs = (_drawn(x.size, reps, rng) / x.size for x in (ours, theirs))
        values.append(beats.mean())
        resampled.append(((drawn_ours @ beats) * drawn_theirs).sum(-1))
    return _interval(np.mean(values), np.mean(resampled, axis=0), scores, over)


def normalise(systems: Mapping[str, Scores]) -> dict[str, dict[str, Array]]:
    """Return the scores of several systems, every task's from 0 for its lowest to 1 for its highest of all
    systems' runs; a half where all are the same."""
    tasks = sorted({task for scores in systems.values() for task in scores})
    low, high = {}, {}
    for task in tasks:
        everyone = _pool({name: scores[task] for name, scores in systems.items() if task in scores})
        low[task], high[task] = everyone.min(), everyone.max()

    def scaled(task: str, x: Sequence[float] | Array) -> Array:
        if low[task] == high[task]:
            return np.full(len(x), 0.5)
        return (np.asarray(x, float) - low[task]) / (high[task] - low[task])

    return {name: {task: scaled(task, x) for task, x in scores.items()} for name, scores in systems.items()}


def task_wins(systems: Mapping[str, Scores], *, reps: int = REPS, seed: int = 0) -> dict[str, list[str]]:
    """Return for each system the tasks it wins: where its chance of improvement over every other that has the
    task lies above one half with its whole interval. With a single run there is no interval, and no win."""
    wins: dict[str, list[str]] = {name: [] for name in systems}
    for task in dict.fromkeys(task for scores in systems.values() for task in scores):
        here = {name: {task: scores[task]} for name, scores in systems.items() if task in scores}
        if any(len(scores[task]) < 2 for scores in here.values()):
            continue
        for name, scores in here.items():
            others = [over for other, over in here.items() if other != name]
            chances = (improvement(scores, over, reps=reps, seed=seed) for over in others)
            if others and all(chance.low > 0.5 for chance in chances):
                wins[name].append(task)
    return wins


def _pool(scores: Scores) -> Array:
    """Return all runs of all tasks in a row."""
    if not scores:
        raise SableError("there are no scores")
    for task, x in scores.items():
        if not len(x) or not np.isfinite(np.asarray(x, float)).all():
            raise SableError(f"{task}: {'no runs' if not len(x) else 'a score that is not finite'}")
    return np.concatenate([np.asarray(x, float) for x in scores.values()])


def _draw(scores: Scores, reps: int, seed: int) -> Array:
    """Return how often each run is drawn in each resample, [reps, n], task after task."""
    rng = np.random.default_rng(seed)
    return np.hstack([_drawn(len(x), reps, rng) for x in scores.values()])


def _drawn(size: int, reps: int, rng: np.random.Generator, draws: int | None = None) -> Array:
    return rng.multinomial(size if draws is None else draws, np.full(size, 1 / size), reps).astype(float)


def _interval(value: tp.Any, resampled: Array, *systems: Scores) -> Estimate:
    if all(len(x) < 2 for scores in systems for x in scores.values()):
        return Estimate(value, *(np.full_like(value, np.nan, float)[()],) * 2)
    return Estimate(value, *np.percentile(resampled, [2.5, 97.5], axis=0))


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))

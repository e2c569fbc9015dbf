"""A row of the ledger run again, or its policies measured again, and set beside what the row says."""

import dataclasses
import sys
import typing as tp
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sable.config import meaning
from sable.config import resolve as settings
from sable.config.meaning import MEANING
from sable.config.schema import Config
from sable.envs.custom import is_custom
from sable.errors import SableError
from sable.reports import ledger
from sable.reports.ledger import Row
from sable.studies import benchmark
from sable.trust import NOTHING, Trust, Untrusted

if tp.TYPE_CHECKING:
    import numpy as np

    from sable.training.loop import Result


class Reproduction(tp.NamedTuple):
    """A row run again, beside the row."""

    directory: Path
    interrupted: int | None
    """the signal that cut it short, if one did; nothing below is known then"""
    absolute: dict[int, float]
    """the absolute return of every seed"""
    published: dict[int, float]
    """the row's, of the same seeds"""
    difference: float
    """the mean of these seeds less the mean of all of the row's"""
    interval: tuple[float, float]
    """of that difference, with 95 %: both means are of a few runs"""

    @property
    def within(self) -> bool:
        """Whether chance explains the difference, to the paper's digits."""
        return _explains(self.interval)

    @property
    def identical(self) -> list[int]:
        """The seeds whose returns are the row's to the last bit."""
        return [seed for seed, value in self.absolute.items() if value == self.published[seed]]


class Measurement(tp.NamedTuple):
    """Fresh episodes of the policies that a row keeps."""

    episodes: int
    returns: dict[int, float]
    """the mean return of every seed's policy"""
    published: dict[int, float]
    """the row's absolute returns, of the same policies"""
    difference: float
    """of the means over seeds, fresh less published"""
    interval: tuple[float, float]
    """where 95 % of such differences lie, by chance of episodes alone, around this one"""

    @property
    def within(self) -> bool:
        """Whether chance explains the difference, to the paper's digits."""
        return _explains(self.interval)


def _explains(interval: tuple[float, float]) -> bool:
    from sable.reports import paper

    low, high = (round(x, paper.DIGITS) for x in interval)
    return low <= 0 <= high


def cell(row: Row, out: Path, seeds: Sequence[int] | None, trust: Trust = NOTHING) -> benchmark.Cell:
    """Return the run that reproduces a row: its settings, as they are meant now, and its seeds or some of
    them; refused where its folder holds something else, or where it needs code from outside sable that
    `trust` does not cover."""
    try:
        config = settings.from_dict(row["settings"], trust)
        if is_custom(config.run.task):
            trust.require("env", config.run.task)
    except Untrusted as error:
        raise Untrusted(f"row {row['row']}: {error}") from None
    selected = select_seeds(row, seeds)
    config = Config(
        dataclasses.replace(config.run, seeds=selected, video=False),
        dataclasses.replace(config.system, meaning=MEANING),
    )
    again = benchmark.Cell(out.expanduser().absolute(), row["row"].partition(":")[2], config)
    benchmark.check(again)
    return again


def select_seeds(row: Row, seeds: Iterable[int] | None) -> tuple[int, ...]:
    """Return the row's seeds, or those of them that were named."""
    known = tuple(row["seeds"])
    selected = known if seeds is None else tuple(seeds)
    if strange := [seed for seed in selected if seed not in known]:
        listed = " ".join(map(str, known))
        raise SableError(f"seeds={strange[0]!r} is none of the seeds of {row['row']}: {listed}")
    if not selected or len(set(selected)) < len(selected):
        raise SableError(f"seeds={list(selected)}: expected some of the row's, none twice")
    return selected


def policies(row: Row, results: Path, seeds: Sequence[int] | None) -> dict[int, Path]:
    """Return the folders of the policies that a row keeps; refused in one line where it keeps none."""
    place, published = ledger.folder(results, row) / ledger.POLICIES, row.get("policies")
    if not published:
        raise SableError(
            f"{row['row']} keeps no policies, as rows of before 18 November 2026: train it again, with "
            f"sable reproduce {row['row']}"
        )
    # Wide networks weigh so much that a row may keep those of some seeds only.
    folders = {
        seed: place / str(seed) for seed in select_seeds(row, map(int, published) if seeds is None else seeds)
    }
    if missing := next((folder for folder in folders.values() if not folder.is_dir()), None):
        raise SableError(
            f"the policies of {row['row']} are not here, at {missing}: they lie beside the ledger; run this "
            "in a checkout of the repository, or name its folder with --results"
        )
    return folders


def compare_policies(row: Row, seeds: Sequence[int], returns: "np.ndarray") -> Measurement:
    """Return what the returns [seeds, episodes] of a row's policies say of its absolute returns."""
    before = settings.plain_from_dict(row["settings"])[0].absolute_episodes
    published = dict(zip(row["seeds"], row["absolute_return"], strict=True))
    published = {seed: published[seed] for seed in seeds}
    count, episodes = returns.shape
    difference = float(returns.mean()) - sum(published.values()) / count
    # Both means are over episodes of the same policies, of which only the new ones' spread is known.
    variance = float(returns.var(axis=1).sum()) / count**2 * (1 / max(episodes - 1, 1) + 1 / before)
    half = 1.96 * variance**0.5
    means = dict(zip(seeds, returns.mean(axis=1).tolist(), strict=True))
    return Measurement(episodes, means, published, difference, (difference - half, difference + half))


def reproduce(row: Row, again: benchmark.Cell, train: Callable[[Path], "Result"]) -> Reproduction:
    """Finish the run, unless that was done before, and compare."""
    if line := describe_older_meaning(row):
        print(f"sable: {line}", file=sys.stderr)
    directory = benchmark.prepare(again)
    if not again.finished and (signal := train(directory).interrupted) is not None:
        return Reproduction(directory, signal, {}, {}, 0.0, (0.0, 0.0))
    return compare(row, directory)


def compare(row: Row, directory: Path) -> Reproduction:
    """Return a finished run beside the row, two samples of runs. Numbers count with the paper's digits: where
    all seeds agree, the interval has no width."""
    from sable.reports import read as results
    from sable.reports import stats
    from sable.runs import sums

    if line := sums.unchecked(directory):
        print(f"sable: {line}", file=sys.stderr)
    series, _ = results.read_run(directory)
    for one in series:
        if problem := one.problem():
            raise SableError(f"{directory}: seed {one.seed}: {problem}")
    absolute = {int(one.seed): one.absolute for one in series}
    published = dict(zip(row["seeds"], row["absolute_return"], strict=True))
    value, *interval = stats.difference(list(absolute.values()), row["absolute_return"])
    published = {seed: published[seed] for seed in absolute}
    return Reproduction(directory, None, absolute, published, value, (interval[0], interval[1]))


def describe_older_meaning(row: Row) -> str:
    """Return what a row's settings meant when it was made, if that has changed since."""
    if not (changes := ledger.older_meaning(row)):
        return ""
    return f"{row['row']} was made when {meaning.describe_changes(changes)}; here it is run as meant now"


def format_reproduction(row: Row, result: Reproduction) -> str:
    """Return what came of it, in a few lines."""
    count, same, published = len(result.absolute), len(result.identical), result.published
    apart = max(abs(value - published[seed]) for seed, value in result.absolute.items())
    table = _table(published, result.absolute)
    seeds = f"{same} of {count} seeds' returns are identical to the last bit"
    seeds += f", the others up to {apart:.3g} apart" if same < count else ""
    low, high = result.interval
    chance = "explains" if result.within else "does not explain"
    means = f"the mean of {count} seeds differs from that of the row's {len(row['seeds'])} by "
    means += f"{result.difference:.3g} [{low:.3g}, {high:.3g}], which chance {chance}"
    return "\n".join(filter(None, (table, seeds, means, describe_older_meaning(row))))


def format_measurement(result: Measurement) -> str:
    """Return what came of measuring a row's policies, in a few lines."""
    low, high = result.interval
    chance = "explains" if result.within else "does not explain"
    return (
        f"{_table(result.published, result.returns)}\n{result.episodes} fresh episodes of each policy: "
        "the mean "
        f"differs by {result.difference:.3g} [{low:.3g}, {high:.3g}], which chance {chance}"
    )


def _table(published: dict[int, float], now: dict[int, float]) -> str:
    """Return the returns of every seed side by side, and their means."""
    count = len(now)
    lines = [("seed", "published", "now")]
    lines += [(str(seed), f"{published[seed]:.6g}", f"{value:.6g}") for seed, value in now.items()]
    lines += [("mean", f"{sum(published.values()) / count:.6g}", f"{sum(now.values()) / count:.6g}")]
    return "\n".join(f"{name:>10}  {before:>12}  {after:>12}" for name, before, after in lines)

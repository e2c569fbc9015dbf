"""A row of the ledger run again, and set beside what the row says."""

import dataclasses
import typing as tp
from collections.abc import Callable, Sequence
from pathlib import Path

from sable import settings
from sable.errors import SableError
from sable.experiments import benchmark
from sable.experiments.ledger import Row

if tp.TYPE_CHECKING:
    from sable.training.loop import Result


class Reproduction(tp.NamedTuple):
    """What came of running a row again."""

    directory: Path
    interrupted: int | None
    """the signal that cut it short, if one did; nothing below is known then"""
    absolute: dict[int, float]
    """the absolute return of every seed"""
    published: dict[int, float]
    """the row's, of the same seeds"""
    interval: tuple[float, float]
    """where the mean of so many seeds of the row lies, 95 % of the time; of all of them the row's interval"""
    within: bool

    @property
    def mean(self) -> float:
        return sum(self.absolute.values()) / len(self.absolute)

    @property
    def identical(self) -> list[int]:
        """The seeds whose returns are the row's to the last bit."""
        return [seed for seed, value in self.absolute.items() if value == self.published[seed]]


def cell(row: Row, out: Path, seeds: Sequence[int] | None) -> benchmark.Cell:
    """The run that reproduces a row: its settings, and its seeds or some of them; refused where its folder
    holds something else."""
    run, config = settings.from_dict(row["settings"])
    given = run.seeds if seeds is None else tuple(seeds)
    if strange := [seed for seed in given if seed not in run.seeds]:
        known = " ".join(map(str, run.seeds))
        raise SableError(f"seeds={strange[0]!r} is none of the seeds of {row['row']}: {known}")
    if not given or len(set(given)) < len(given):
        raise SableError(f"seeds={list(given)}: expected some of the row's, none twice")
    run = dataclasses.replace(run, seeds=given, video=False)
    again = benchmark.Cell(out.expanduser().absolute(), row["row"].partition(":")[2], run, config)
    benchmark.check(again)
    return again


def reproduce(row: Row, again: benchmark.Cell, train: Callable[[Path], "Result"]) -> Reproduction:
    """Finish the run, unless that was done before, and compare."""
    directory = benchmark.prepare(again)
    if not again.finished and (signal := train(directory).interrupted) is not None:
        return Reproduction(directory, signal, {}, {}, (0.0, 0.0), False)
    return compare(row, directory)


def compare(row: Row, directory: Path) -> Reproduction:
    """A finished run beside the row. Numbers count with the paper's digits: where all seeds of a row agree,
    its interval has no width."""
    from sable.experiments import paper, results, stats

    series, _ = results.read_run(directory)
    for one in series:
        if problem := one.problem():
            raise SableError(f"{directory}: seed {one.seed}: {problem}")
    absolute = {int(one.seed): one.absolute for one in series}
    published = dict(zip(row["seeds"], row["absolute_return"], strict=True))
    low, high = stats.interval_of_mean(row["absolute_return"], len(absolute))
    found = Reproduction(
        directory, None, absolute, {seed: published[seed] for seed in absolute}, (low, high), False
    )
    mean, low, high = (round(x, paper.DIGITS) for x in (found.mean, low, high))
    return found._replace(within=low <= mean <= high)


def in_words(row: Row, found: Reproduction) -> str:
    """What came of it, in a few lines."""
    count, same, published = len(found.absolute), len(found.identical), found.published
    apart = max(abs(value - published[seed]) for seed, value in found.absolute.items())
    lines = [("seed", "published", "now")]
    lines += [(seed, f"{published[seed]:.6g}", f"{now:.6g}") for seed, now in found.absolute.items()]
    lines += [("mean", f"{sum(published.values()) / count:.6g}", f"{found.mean:.6g}")]
    table = "\n".join(f"{name:>10}  {before:>12}  {now:>12}" for name, before, now in lines)
    seeds = f"{same} of {count} seeds' returns are identical to the last bit"
    seeds += f", the others up to {apart:.3g} apart" if same < count else ""
    low, high = found.interval
    what = "the row's 95 % interval"
    if count < len(row["seeds"]):
        what = f"where the mean of {count} of the row's {len(row['seeds'])} seeds lies 95 % of the time"
    where = "within" if found.within else "outside"
    return f"{table}\n{seeds}\nthe mean lies {where} [{low:.6g}, {high:.6g}], {what}"

"""Batches of a tuning study: how one is made of points that share a program, run, and told about."""

import dataclasses
import math
import shutil
import typing as tp
from pathlib import Path

from sable.config import resolve as settings
from sable.config.schema import Config, SystemConfig
from sable.errors import SableError
from sable.runs import circumstances
from sable.runs import directory as runs
from sable.studies.trials import Batch, Point, Space, Study, Values, combinations, write_points
from sable.studies.tune_view import View
from sable.trust import NOTHING, Trust

if tp.TYPE_CHECKING:
    from sable.envs.base import Env
    from sable.training.loop import Result
    from sable.types import PyTree


class Worker:
    """Makes batches of a study and runs them."""

    def __init__(
        self,
        study: Study,
        config: Config,
        env: "Env",
        space: Space,
        out: Path,
        parallel_trials: int,
        trust: Trust = NOTHING,
    ):
        self.study, self.config, self.env, self.space = study, config, env, space
        self.out, self.parallel_trials, self.trust = out, parallel_trials, trust
        self.free = self._free_dimensions()
        self.shaping = [name for name in space if name not in self.free]

    def begin(self, left: int, name: str) -> Batch:
        """Return a new batch of at most `left` trials."""
        size = min(self.parallel_trials, left, combinations(self.space, self.free))
        points = self.study.draw(size, self.space, self.shaping, self._refusal)
        system = self._with_values({name: points[0].values[name] for name in self.shaping})
        first = self.config.run.seeds[0]
        seeds = tuple(range(first, first + len(points) * len(self.config.run.seeds)))
        run = dataclasses.replace(self.config.run, seeds=seeds)
        directory = runs.create_pending(self.out, Config(run, system), name)
        batch = Batch(
            directory, [Point(p.number, {name: p.values[name] for name in self.free}) for p in points]
        )
        write_points(batch)
        return batch

    def work(self, batch: Batch, view: View) -> int | None:
        """Run a batch from where it stands and tell the study; the signal that interrupted it, if one did."""
        from sable.training import checkpoint

        reporter = TrialReporter(self.study, batch, view)
        view.begin(batch, self.config.run.total_steps, self.study.records())
        result = self._train_batch(batch, reporter)
        if result.interrupted is None:
            if result.summary:  # else no point is left
                reporter.end(_absolute(result.summary))
                runs.finish(batch.directory, result.summary)
            # With the experience of systems that replay it they are large, and nobody goes on with them.
            shutil.rmtree(batch.directory / checkpoint.FOLDER, ignore_errors=True)
        return result.interrupted

    def _train_batch(self, batch: Batch, reporter: "TrialReporter") -> "Result":
        """Return what training the batch left; no summary where it ended early."""
        import jax

        from sable import systems
        from sable.training import device_memory as memory
        from sable.training import loop
        from sable.training.interruption import Exit, interruption

        directory = batch.directory
        config = runs.read_config(directory, self.trust)
        system = systems.make(config.run.system, self.env.spec, config.system)
        hypers = self._hypers(config.system, batch.points, len(config.run.seeds) // len(batch.points))
        resumed = circumstances.describe() if (directory / "meta.json").exists() else None
        runs.begin(directory)
        if resumed is not None:
            runs.note_resumption(directory, resumed)
        parts = self.env, system, config, directory
        how = {"resume": True, "quiet": True, "hypers": hypers, "on_evaluation": reporter.watch}
        try:
            with interruption(Exit("the same command goes on from here")) as interrupted:
                return loop.train_loop(*parts, **how, interrupted=interrupted)
        except loop.Halted:
            reporter.end([math.nan] * len(config.run.seeds))
            return loop.Result(directory, {})
        except (jax.errors.JaxRuntimeError, memory.DoesNotFit, memory.OutOfMemory) as error:
            why = " ".join(str(error).split())[:200]
            reporter.give_up(why)
            raise SableError(
                f"{directory} was given up: {why}; fewer --parallel-trials would need less memory"
            ) from None

    def _with_values(self, values: Values) -> SystemConfig:
        """Return the configuration with those values, checked."""
        return settings.replace_fields(self.config, {}, values).system

    def _refusal(self, values: Values) -> str | None:
        """Return what is wrong with those values together."""
        from sable import systems

        try:
            systems.make(self.config.run.system, self.env.spec, self._with_values(values))
        except SableError as error:
            return str(error)
        return None

    def _hyper(self, config: SystemConfig) -> "PyTree":
        from sable import systems

        return systems.make(self.config.run.system, self.env.spec, config).hyper

    def _hypers(self, config: SystemConfig, points: list[Point], num_seeds: int) -> "PyTree":
        """Return the numbers of every lane: those of its point."""
        import jax
        import jax.numpy as jnp

        each = [self._hyper(dataclasses.replace(config, **point.values)) for point in points]
        return jax.tree.map(lambda *leaves: jnp.repeat(jnp.stack(leaves), num_seeds, axis=0), *each)

    def _free_dimensions(self) -> list[str]:
        """Return the dimensions that reach the learner as array leaves."""
        import jax
        import numpy as np

        def leaves(name: str, value: tp.Any) -> list | None:
            try:
                hyper = self._hyper(self._with_values({name: value}))
                return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(hyper)]
            except SableError:  # not beside the other fields as they are
                return None

        leaves_by_name = {
            name: [leaves(name, value) for value in values] for name, values in self.space.items()
        }
        return [name for name, of in leaves_by_name.items() if None not in of and any(x != of[0] for x in of)]


def _absolute(summary: Values) -> list[float]:
    """Return the absolute metric of every seed, nan for one that halted."""
    halted = summary["halted_seeds"]
    return [
        math.nan if seed in halted else value
        for seed, value in zip(summary["seeds"], summary["absolute_return"], strict=True)
    ]


class TrialReporter:
    """Tells the study, and whoever looks on, what becomes of a batch's points. Some of them may have ended
    before, by pruning or because a killed worker told of them."""

    def __init__(self, study: Study, batch: Batch, view: View):
        self._study, self._view, self._numbers = study, view, [point.number for point in batch.points]

    def watch(self, steps: int, returns: list[float]) -> bool:
        """Take in an evaluation of every seed; whether no point is left."""
        means = self._means(returns)
        self._view.evaluated(steps, means)
        for number, mean in self._unfinished(means):
            if math.isfinite(mean) and self._study.report(number, steps, mean):
                self._study.prune(number, f"below the median at {steps:,} steps")
                self._view.ended(number, self._study.records())
        return not self._unfinished(means)

    def end(self, absolute: list[float]) -> None:
        """Take in the absolute metric of every seed, nan for one that halted.

        The value of a trial is its mean over seeds: the return of the best evaluated parameters on fresh
        episodes. Results are reported by it, and unlike the highest return of an evaluation it does not
        favour the noisy. A point with a seed that halted counts as pruned, so that it is not tried for ever.
        """
        for number, mean in self._unfinished(self._means(absolute)):
            if math.isfinite(mean):
                self._study.complete(number, mean)
            else:
                self._study.prune(number, "a number was no longer finite")
            self._view.ended(number, self._study.records())

    def give_up(self, why: str) -> None:
        """Note that the batch cannot be run, which says nothing about its points."""
        for number, _ in self._unfinished([0.0] * len(self._numbers)):
            self._study.give_up(number, why)

    def _means(self, per_seed: list[float]) -> list[float]:
        size = len(per_seed) // len(self._numbers)
        return [sum(per_seed[i : i + size]) / size for i in range(0, len(per_seed), size)]

    def _unfinished(self, means: list[float]) -> list[tuple[int, float]]:
        """Return the points that have not ended, each with its mean."""
        running = self._study.running()
        return [pair for pair in zip(self._numbers, means, strict=True) if pair[0] in running]

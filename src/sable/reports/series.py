"""How one seed of a run did, and many of them as `stats` takes them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sable.reports import stats


@dataclass(frozen=True, kw_only=True)
class Series:
    """One seed's evaluations; nan stands where a number is missing."""

    task: str
    system: str  # with its variant: "sable", "sable no memory"
    seed: str
    steps: np.ndarray  # [K] environment steps at each evaluation
    returns: np.ndarray  # [K]
    seconds: np.ndarray  # [K] since the run began
    absolute: float
    source: Path

    def problem(self) -> str | None:
        """Return why no score can be made of it, if so."""
        if not self.returns.size:
            return "it has no evaluations"
        odd = self.steps[~np.isfinite(self.returns)]
        if odd.size:
            return f"its return at step {odd[0]:,.0f} is not a finite number"
        if not np.isfinite(self.absolute):
            return "its absolute metric is missing or not a finite number"
        return None


def scores(series: Iterable[Series], summary: str = "absolute") -> dict[str, dict[str, np.ndarray]]:
    """Return `{system: {task: one score per seed}}`, each one of `stats.SUMMARIES`."""
    grouped = defaultdict(lambda: defaultdict(list))
    for one in series:
        grouped[one.system][one.task].append(stats.summaries(one.returns, one.absolute)[summary])
    return {system: {t: np.array(x) for t, x in tasks.items()} for system, tasks in grouped.items()}


def curves(
    series: Sequence[Series], points: int = 60
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return every task's common time axis, and `{system: {task: [runs, points]}}` along it.

    Systems are evaluated at different steps: between two evaluations returns are interpolated, and nothing is
    said of steps that not all runs of a task have reached.
    """
    axes, grouped = {}, defaultdict(lambda: defaultdict(list))
    for task in dict.fromkeys(one.task for one in series):
        here = [one for one in series if one.task == task]
        begin, end = max(one.steps[0] for one in here), min(one.steps[-1] for one in here)
        axes[task] = np.linspace(begin, end, points)
        for one in here:
            grouped[one.system][task].append(np.interp(axes[task], one.steps, one.returns))
    return axes, {system: {t: np.stack(x) for t, x in tasks.items()} for system, tasks in grouped.items()}

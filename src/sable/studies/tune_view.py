"""What `sable tune` shows while it works: in a terminal a live table, in a pipe a line per finished trial."""

import math
import typing as tp
from collections.abc import Sequence

from sable.studies.live_table import LiveDisplay
from sable.studies.study_files import best
from sable.studies.trials import Batch, TrialRecord, Values


class View(LiveDisplay):
    """The trials so far, and the batch this worker is at."""

    def __init__(self, title: str, trials: int, quiet: bool):
        super().__init__(quiet)
        self._title, self._trials = title, trials
        self._tried: list[TrialRecord] = []
        self._batch: Batch | None = None
        self._steps, self._total_steps, self._returns = 0, 1, []

    def begin(self, batch: Batch, total_steps: int, records: list[TrialRecord]) -> None:
        """Show that this worker turns to a batch."""
        self._batch, self._total_steps, self._tried = batch, total_steps, records
        self._steps, self._returns = 0, [math.nan] * len(batch.points)

    def evaluated(self, steps: int, returns: Sequence[float]) -> None:
        """Show that the batch's points reached these returns."""
        self._steps, self._returns = steps, list(returns)

    def ended(self, number: int, records: list[TrialRecord]) -> None:
        """Show that a trial of the batch ended."""
        self._tried = records
        count, trial, winner = sum(t.finished for t in records), records[number], best(records)
        value = "" if trial.value is None else f" {trial.value:.4g}"
        top = "" if winner is None else f"  best {winner.value:.4g} (trial {winner.number})"
        how = trial.state if trial.state != "complete" else "return"
        self.say(f"[{count}/{self._trials}] trial {number}: {how}{value}{top}  {format_values(trial.values)}")

    def table(self) -> tp.Any:
        """Return the study so far, and the batch this worker is at."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        count, winner = sum(t.finished for t in self._tried), best(self._tried)
        head = Text.assemble((self._title, "bold"), f"   {count} of {self._trials} trials finished")
        lines = [head]
        if winner is not None:
            lines.append(
                Text.assemble("best ", (f"{winner.value:.4g}", "bold green"), f"   trial {winner.number}")
            )
            lines.append(Text(format_values(winner.values), style="dim"))
        if self._batch is None:
            return Group(*lines)
        done = min(self._steps / self._total_steps, 1.0)
        lines.append(
            Text(f"\n{self._batch.directory.name}   {done:.0%} of {self._total_steps:,} steps", "cyan")
        )
        states = {trial.number: trial.state for trial in self._tried}
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("trial", "return", "", *(self._batch.points[0].values if self._batch.points else ())):
            table.add_column(column, justify="right")
        for point, value in zip(self._batch.points, self._returns, strict=True):
            reached = f"{value:.4g}" if math.isfinite(value) else "·"
            state = states.get(point.number, "running")
            style = {"running": "", "pruned": "dim", "complete": "green"}.get(state, "dim")
            cells = [str(point.number), reached, state, *(_format_value(v) for v in point.values.values())]
            table.add_row(*cells, style=style)
        return Group(*lines, table)


def format_values(values: Values) -> str:
    """Return the values in one line."""
    return " ".join(f"{name}={_format_value(value)}" for name, value in values.items())


def _format_value(value: tp.Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

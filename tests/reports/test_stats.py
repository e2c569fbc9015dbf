"""Equal to figures recorded from rliable 1.2.0 (pandas 2.3.3, arch 7.2.0), and honest at the edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sable.errors import SableError
from sable.reports import stats


def recorded(system: int, runs: int = 10, tasks: int = 6) -> np.ndarray:
    """The arrays [runs, tasks] the figures below were recorded on; rounded, so that some scores tie."""
    i, j = np.meshgrid(np.arange(runs), np.arange(tasks), indexing="ij")
    return np.round(0.5 + 0.1 * system + 0.35 * np.sin(1.7 * i + 0.9 * j * j + 2.3 * system), 2)


def by_task(scores: np.ndarray) -> dict[str, np.ndarray]:
    return {f"t{j}": scores[:, j] for j in range(scores.shape[1])}


A, B = by_task(recorded(0)), by_task(recorded(1))
# Two sets of resamples differ by about this much at an interval's ends.
MONTE_CARLO = 0.012


def agrees(found: stats.Estimate, value, low, high) -> None:
    np.testing.assert_allclose(found.value, value, atol=5e-5)
    np.testing.assert_allclose(found.low, low, atol=MONTE_CARLO)
    np.testing.assert_allclose(found.high, high, atol=MONTE_CARLO)


@pytest.mark.parametrize(
    ("scores", "statistic", "expected"),
    [
        (A, stats.iqm, (0.49967, 0.39633, 0.59700)),
        (B, stats.iqm, (0.58933, 0.49333, 0.68400)),
        (A, stats.mean, (0.49817, 0.43633, 0.56033)),
        (B, stats.mean, (0.59283, 0.53217, 0.65433)),
        ({"t0": A["t0"]}, stats.mean, (0.537, 0.392, 0.676)),
        ({"t0": B["t0"]}, stats.mean, (0.582, 0.429, 0.739)),
    ],
)
def test_aggregates_and_their_intervals_are_rliables(scores, statistic, expected):
    agrees(stats.estimate(scores, statistic, reps=20_000), *expected)


def test_the_probability_of_improvement_is_rliables():
    agrees(stats.improvement(B, A), 0.6125, 0.50667, 0.71167)


def test_performance_profiles_are_rliables():
    found = stats.profile(B, np.array([0.1, 0.3, 0.5, 0.7, 0.9]), reps=20_000)
    value, low = [1, 0.81667, 0.55, 0.36667, 0.18333], [1, 0.71667, 0.41667, 0.25, 0.08333]
    np.testing.assert_allclose(found.value, value, atol=5e-5)
    # Shares of 60 runs: an interval may end one run further on.
    np.testing.assert_allclose(found.low, low, atol=1.01 / 60)
    np.testing.assert_allclose(found.high, [1, 0.9, 0.66708, 0.48333, 0.28333], atol=1.01 / 60)


def test_curves_are_rliables():
    frames = np.stack([recorded(k) for k in range(3)], axis=-1)
    series = {f"t{j}": frames[:, j] for j in range(frames.shape[1])}
    found = stats.curve(series, reps=20_000)
    agrees(found, [0.49967, 0.58933, 0.71833], [0.39567, 0.49233, 0.61333], [0.59667, 0.68267, 0.82067])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(0, 2**31))
def test_the_iqm_of_a_resample_is_that_of_the_runs_drawn(x, seed):
    x = np.array(x)
    index = np.random.default_rng(seed).integers(x.size, size=x.size)
    drawn = np.bincount(index, minlength=x.size)[None].astype(float)
    middle = np.sort(x[index])[x.size // 4 : x.size - x.size // 4]
    np.testing.assert_allclose(stats.iqm(x, drawn), [middle.mean()], atol=1e-9)


def test_the_five_summaries_of_a_run():
    found = stats.summaries([0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 8.0], absolute=7.5)
    assert found == {"mean": 4.0, "max": 9.0, "final": 8.0, "absolute": 7.5, "iqm": 3.5}
    assert tuple(found) == stats.SUMMARIES


def test_tasks_may_have_different_numbers_of_runs():
    found = stats.estimate({"a": [1.0, 1.0, 1.0], "b": [0.0]}, stats.mean)
    assert found == (0.75, 0.75, 0.75)  # whatever is drawn of a task whose runs are alike


def test_a_single_run_has_no_interval():
    found = stats.estimate({"a": [1.0], "b": [3.0]}, stats.mean)
    assert found.value == 2.0 and np.isnan(found.low) and np.isnan(found.high)
    thresholds = np.array([0.0, 2.0])
    assert np.isnan(stats.profile({"a": [1.0]}, thresholds).low).tolist() == [True, True]


def test_normalising_spans_all_systems_and_settles_for_a_half_where_nothing_differs():
    systems = {"x": {"a": [0.0, 5.0], "b": [3.0]}, "y": {"a": [10.0], "b": [3.0], "c": [1.0, 2.0]}}
    found = stats.normalise(systems)
    assert {task: x.tolist() for task, x in found["x"].items()} == {"a": [0.0, 0.5], "b": [0.5]}
    assert {task: x.tolist() for task, x in found["y"].items()} == {"a": [1.0], "b": [0.5], "c": [0.0, 1.0]}


def test_a_win_needs_an_interval_over_every_other():
    clear, close = np.linspace(2, 3, 10), np.linspace(0, 1, 10)
    systems = {
        "x": {"a": clear, "b": close + 0.05, "c": [1.0, 2.0], "d": clear},
        "y": {"a": close, "b": close, "d": [0.0]},
        "z": {"a": close + 0.05, "b": close - 5},
    }
    # b: x is better than y on average only; c: there is nobody to win against; d: y has no interval.
    assert stats.task_wins(systems) == {"x": ["a"], "y": [], "z": []}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.estimate({}), "no scores"),
        (lambda: stats.estimate({"a": []}), "a: no runs"),
        (lambda: stats.estimate({"a": [1.0, np.nan]}), "a: a score that is not finite"),
        (lambda: stats.improvement({"a": [1.0]}, {"b": [1.0]}), "a, b"),
        (lambda: stats.curve({"a": np.ones((2, 3)), "b": np.ones((2, 4))}), "3, 4 evaluations"),
    ],
)
def test_what_cannot_be_computed_is_said_in_one_line(call, words):
    with pytest.raises(SableError, match=words) as error:
        call()
    assert "\n" not in str(error.value)

"""The paper's figures as shipped, and what it means to reach them."""

import math

import pytest

import sable
from sable.reports import paper, stats
from sable.reports.stats import Estimate


def test_every_figure_of_the_paper_is_there_under_our_names():
    found = paper.figures()
    tasks = {task.id for task in sable.list_tasks() if task.group == "paper"}
    assert len(found) == 1035
    assert {summary for summary, _, _ in found} == set(stats.SUMMARIES)
    assert {system for _, _, system in found} == set(sable.list_systems())
    assert {task for _, task, _ in found} == tasks and len(tasks) == 45
    assert all(figure.low <= figure.value <= figure.high for figure in found.values())


def test_figures_are_those_printed():
    assert paper.figures()["mean", "rware/tiny-2ag", "sable"] == (15.33, 14.91, 15.69)
    assert paper.figures()["final", "mpe/simple_spread_3ag", "mat"] == (-6.78, -7.06, -6.48)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (Estimate(2.0, 1.9, 2.1), "not below"),
        (Estimate(0.9, 0.8, 1.0), "not below"),
        (Estimate(0.8951, 0.8, 0.99), "not below"),  # rounds to the lower bound
        (Estimate(0.85, 0.8, 0.95), "overlapping"),
        (Estimate(0.85, 0.8, 0.88), "below"),
        (Estimate(0.85, math.nan, math.nan), "below"),
    ],
)
def test_a_verdict_is_by_the_papers_interval(ours, verdict):
    assert paper.verdict(ours, Estimate(1.0, 0.9, 1.1)) == verdict

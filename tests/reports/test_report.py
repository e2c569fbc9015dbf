"""Reports as data and as files: what is concluded, what is said of odd runs, and what is written where."""

import csv
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sable.errors import SableError
from sable.reports import aggregates, analysis, beside, looks, paper, stats, typeset, variants
from sable.reports import page as report
from sable.reports import read as results
from sable.reports.stats import Estimate
from sable.runs import directory as runs

LBF, LBF2, RWARE = "lbf/8x8-2p-2f-coop", "lbf/15x15-4p-5f", "rware/tiny-2ag"


def concluded(*paths: Path, **how) -> analysis.Analysis:
    return analysis.analyse(results.read(paths), **how)


def said(found: analysis.Analysis, *words: str) -> bool:
    return any(all(word in note for word in words) for note in found.notes)


def theirs(
    path: Path, data: dict[str, dict[str, dict[str, list[float]]]], steps: tuple[int, ...] = (10, 20)
) -> Path:
    """A marl-eval file of `{suite: {task: {system: one absolute metric per seed}}}`."""
    path.write_text(
        json.dumps(
            {
                suite: {
                    task: {
                        system: {
                            f"seed_{seed}": {
                                f"step_{k}": {"step_count": step, "elapsed_time": 1.0, "return": [value * k]}
                                for k, step in enumerate(steps)
                            }
                            | {"absolute_metrics": {"return": [value]}}
                            for seed, value in enumerate(values)
                        }
                        for system, values in systems.items()
                    }
                    for task, systems in tasks.items()
                }
                for suite, tasks in data.items()
            }
        )
    )
    return path


def page_data(path: Path):
    """The data in a page, as its script reads it."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_runs) -> report.Report:
    out = tmp_path_factory.mktemp("report")
    for task in (LBF, LBF2, RWARE):
        make_runs(out / "runs", task, "sable", better=2.0)
        make_runs(out / "runs", task, "sable", better=3.0 if task == LBF else 1.0, memory=False)
        make_runs(out / "runs", task, "ippo")
    return report.write([out / "runs"], out / "site", paper=True)


def test_all_files_of_a_report_are_written_and_nothing_else(written):
    folder = written.page.parent
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    figures = {"suite-lbf", "suite-rware", "lbf-8x8-2p-2f-coop", "lbf-15x15-4p-5f", "rware-tiny-2ag"}
    chapters = ("tasks-won", "sample-efficiency", "learning-curves", "performance-profiles")
    figures |= {f"paper-{chapter}" for chapter in chapters}  # those of which there are runs
    expected = {f"figures/{name}.{kind}" for name in figures for kind in ("svg", "png")}
    assert names == expected | {"report.html", "report.md", "tables.tex"}
    for path in (folder / "figures").glob("*.svg"):
        assert ET.parse(path).getroot().tag.endswith("svg")
    linked = re.findall(r"\]\((.*?)\)", (folder / "report.md").read_text())
    assert {name for name in expected if name.endswith("svg")} == set(linked)


def test_the_page_is_one_small_file_that_loads_nothing(written):
    text = written.page.read_text()
    assert len(text) < 200_000
    assert not re.search(r"""(src|href)=["'](?!data:,)|@import|url\((?!#)""", text)
    assert "default-src 'none'" in text


def test_the_page_holds_what_was_concluded(written, make_runs):
    data = page_data(written.page)
    assert [system["name"] for system in data["systems"]] == [
        "sable",
        "sable no memory",
        "sable (best)",
        "ippo",
        *(f"{name} (paper)" for name in ("sable", "mat", "mappo", "ippo")),
    ]
    assert data["contestants"] == ["sable (best)", "ippo"]
    (task,) = [task for suite in data["suites"] for task in suite["tasks"] if task["name"] == LBF]
    # Seeds end at 40.0, 40.1, 40.2, 40.3 for ippo; sable does better by 2 with memory and by 3 without.
    values = {n: found[0] for n, found in task["summaries"]["final"].items() if "(paper)" not in n}
    assert values == pytest.approx(
        {"sable": 42.15, "sable no memory": 43.15, "sable (best)": 43.15, "ippo": 40.15}
    )
    assert task["winner"] == "sable (best)" and task["seeds"]["sable (best)"] == 4
    curve = task["curves"]["ippo"]
    assert curve["x"] == [1000, 5000] and len(curve["value"]) == aggregates.POINTS
    assert curve["value"][0] == pytest.approx(0.15, abs=1e-3) and len(curve["seeds"]) == 4
    assert curve["low"][0] <= curve["value"][0] <= curve["high"][0]


def test_curves_are_means_where_that_is_asked_for(tmp_path):
    """Of four seeds the interquartile mean is that of the middle two."""
    path = theirs(tmp_path / "x.json", {"s": {"a": {"x": [0.0, 1.0, 2.0, 9.0], "y": [1.0, 1.0]}}})
    ends = {}
    for curves in analysis.CURVES:
        (task,) = concluded(path, curves=curves).suites[0].tasks
        ends[curves] = task.curves["x"].value.value[-1]
    assert ends == {"iqm": 1.5, "mean": 3.0}
    written = report.write([path], tmp_path / "out", curves="mean")
    assert page_data(written.page)["curve"] == "mean"
    assert "mean over seeds" in (tmp_path / "out" / "figures" / "s-a.svg").read_text()
    with pytest.raises(SableError, match="curves='median' is not one of iqm, mean"):
        report.write([path], tmp_path / "other", curves="median")
    assert not (tmp_path / "other").exists()


def test_what_runs_took_is_told_with_the_machine(written):
    (task,) = [t for suite in page_data(written.page)["suites"] for t in suite["tasks"] if t["name"] == LBF]
    assert task["costs"]["ippo"] == [1_234_567, 2_500_000_000, 4, "cpu"] and len(task["costs"]) == 3
    folder = written.page.parent
    assert "| 8x8-2p-2f-coop | 1.23M, 2.50 GB |" in (folder / "report.md").read_text()
    assert "1.23M, 2.50 GB" in (folder / "tables.tex").read_text()


def test_the_best_variant_is_chosen_task_by_task():
    scores = {
        "sable": {"a": [1.0, 3.0], "b": [1.0]},
        "sable no memory": {"a": [2.5], "b": [0.0]},
        "mat": {"a": [9.0]},
    }
    systems = variants.group_by_family(scores)
    assert [system.name for system in systems] == ["sable", "sable no memory", "sable (best)", "mat"]
    assert variants.with_best(scores, systems)["sable (best)"] == {"a": [2.5], "b": [1.0]}
    assert variants.contestants(systems) == ["sable (best)", "mat"]
    assert variants.contestants(systems[:3]) == ["sable", "sable no memory"]


def test_what_a_system_computes_in_is_no_other_system():
    assert [system.family for system in variants.group_by_family(["sable compute=bfloat16"])] == ["sable"]


def test_a_systems_colour_does_not_depend_on_the_others():
    few, many = (
        looks.looks(variants.group_by_family(names))
        for names in (["mat", "x"], ["mat", "sable", "x", "ippo memory"])
    )
    assert few["mat"] == many["mat"]
    families = [f"system {k}" for k in range(20)]
    found = looks.looks(variants.group_by_family(families))
    assert len(set(found.values())) == 20


def test_our_figures_beside_the_papers(written):
    data = page_data(written.page)
    assert {one["summary"] for one in data["paper"]} == set(stats.SUMMARIES)
    # The paper's Sable has an absolute metric of about 1 on LBF and of 20 on RWARE; ours is about 42 here.
    assert {one["verdict"] for one in data["paper"] if one["system"] == "sable"} == {"not below"}
    assert "Beside the paper: absolute metric" in (written.page.parent / "report.md").read_text()


def test_the_papers_systems_stand_beside_ours_in_every_task(written):
    """And over the tasks of a suite: ours end at 40 and more, where no system of the paper's does."""
    for suite in page_data(written.page)["suites"]:
        for task in suite["tasks"]:
            theirs = {f"{s} (paper)" for s in paper.of_task(task["name"], "mean")}
            for summary, found in task["summaries"].items():
                assert theirs == {name for name in found if name.endswith("(paper)")} and theirs
                figure = paper.figures()[summary, task["name"], "mat"]
                assert found["mat (paper)"] == list(figure) and task["seeds"]["mat (paper)"] == 10
    markdown = (written.page.parent / "report.md").read_text()
    assert "| sable (best) | **1.00** [1.00, 1.00] |" in markdown
    assert "| sable (best) | 3 | 3 | 0 | 3 | 3 |" in markdown
    assert "| sable (paper) | 3 | 2 | 1 | 2 | 3 |" in markdown


def test_who_is_best_of_all_is_counted_by_what_is_printed():
    ours = {
        "sable (best)": {"rware/tiny-2ag": Estimate(21.2, 20.0, 22.0), "own/task": Estimate(1.0, 1.0, 1.0)}
    }
    ours["sable (best)"]["lbf/8x8-2p-2f-coop"] = Estimate(0.9951, 0.994, 0.996)  # rounds to the others' 1.00
    ours["sable (best)"]["smax/2s3z"] = Estimate(1.5, 1.4, 1.6)
    ours["mine"] = {"rware/tiny-2ag": Estimate(21.0, 20.5, 22.0)}
    (found,) = beside.counts(ours, {"sable (best)": "sable", "mine": "mine"})
    assert found == ("sable (best)", 3, 1, 1, 0) and found.best == 2
    counted = {one.system: one for one in beside.papers_counts()}
    stars = [best for (summary, _, _), (best, _) in printed().items() if summary == "absolute" and best]
    assert sum(one.best for one in counted.values()) == len(stars)
    assert counted["sable (paper)"][1:4] == (45, 21, 7)


def test_systems_are_compared_with_the_papers_on_the_tasks_they_share():
    scores = {
        "sable": {"rware/tiny-2ag": [25.0, 27.0], "rware/tiny-4ag": [40.0, 42.0], "rware/small-4ag": [9.0]}
    }
    scores |= {
        "mat": {"rware/tiny-2ag": [15.0, 15.0], "rware/tiny-4ag": [20.0, 20.0]},
        "ippo": {"lbf/x": [1.0]},
    }
    found = beside.suite_comparison(scores, "rware")
    assert found and found.tasks == ["rware/tiny-2ag", "rware/tiny-4ag"] and found.ours == ["sable", "mat"]
    low = [paper.figures()["absolute", task, "ippo"].value for task in found.tasks]
    tops = [26.0, paper.figures()["absolute", "rware/tiny-4ag", "sable"].value]
    expected = [((15.0, 20.0)[k] - low[k]) / (tops[k] - low[k]) for k in range(2)]
    assert found.scores["mat"].value == pytest.approx(sum(expected) / 2)
    assert found.scores["ippo (paper)"].value == 0 and set(found.scores) == {
        "sable", "mat", *(f"{name} (paper)" for name in ("sable", "mat", "mappo", "ippo"))
    }  # fmt: skip
    for one in found.scores.values():
        assert one.low <= one.value <= one.high
    assert beside.suite_comparison(scores, "mpe") is None


def printed():
    """The paper's own marks: {(summary, task, system): (bold, asterisk)}."""
    text = Path(paper.__file__).with_name("paper.csv").read_text()
    return {
        (row["metric"], f"{row['suite']}/{row['task']}", row["system"]): tuple(
            row[name] == "1" for name in ("best", "overlaps_best")
        )
        for row in csv.DictReader(text.splitlines())
    }


def test_bold_and_asterisks_are_the_papers_own():
    for (summary, task, system), marks in printed().items():
        best, overlapping = paper.mark_best(paper.of_task(task, summary))
        assert (system in best, system in overlapping) == marks, (summary, task, system)


def test_without_a_figure_of_the_papers_that_is_said(tmp_path):
    found = concluded(theirs(tmp_path / "x.json", {"own": {"a": {"x": [1.0, 2.0]}}}), beside_paper=True)
    assert found.paper == [] and said(found, "paper has no figures")


def test_one_seed_has_no_interval_and_wins_nothing(tmp_path):
    found = concluded(theirs(tmp_path / "x.json", {"s": {"a": {"x": [5.0], "y": [1.0]}}}))
    assert found.won("x") == [] and said(found, "one seed each", "no intervals")
    (task,) = found.suites[0].tasks
    assert math.isnan(task.summaries["absolute"]["x"].low)
    report.page(found)


def test_a_task_on_which_one_system_has_a_single_seed_is_won_by_nobody(tmp_path):
    data = {"s": {"a": {"x": [5.0, 5.1, 5.2, 5.3], "y": [1.0]}, "b": {"x": [5.0, 5.1], "y": [1.0, 1.1]}}}
    found = concluded(theirs(tmp_path / "x.json", data))
    assert found.won("x") == ["s/b"] and found.won("y") == []


def test_different_numbers_of_seeds_are_pointed_out(tmp_path):
    data = {"s": {"a": {"x": [1.0] * 6, "y": [1.0] * 6}, "b": {"x": [1.0] * 6, "y": [1.0] * 3}}}
    found = concluded(theirs(tmp_path / "x.json", data))
    assert said(found, "s/b: seeds differ: y has 3, where most have 6") and said(found, "fewer than 5 seeds")


def test_aggregates_are_over_shared_tasks_of_systems_that_have_half_of_them(tmp_path):
    tasks = {name: {"x": [1.0, 2.0], "y": [0.0, 1.0]} for name in "abc"}
    tasks["a"]["rare"] = [5.0, 6.0]
    tasks["d"] = {"x": [1.0, 2.0]}
    (suite,) = (found := concluded(theirs(tmp_path / "x.json", {"s": tasks}))).suites
    assert suite.aggregates.compared == ["s/a", "s/b", "s/c"] and set(suite.aggregates.iqm) == {"x", "y"}
    assert said(found, "aggregates are without rare (1 of 4 tasks)")
    assert said(found, "over 3 of 4 tasks", "not all have d")
    chances = suite.aggregates.improvement
    assert chances["x"]["y"].value == pytest.approx(1 - chances["y"]["x"].value)
    assert chances["x"]["y"].low == pytest.approx(1 - chances["y"]["x"].high)


def test_systems_of_some_suites_only_are_named(tmp_path):
    data = {"s": {"a": {"x": [1.0, 2.0], "y": [0.0, 1.0]}}, "t": {"b": {"x": [1.0, 2.0]}}}
    found = concluded(theirs(tmp_path / "x.json", data))
    assert said(found, "y: no runs on t") and said(found, "t: one system only", "no aggregates")
    assert found.suites[1].aggregates.iqm == {} and found.suites[0].aggregates.iqm


def test_runs_without_common_steps_have_no_curve_but_count(tmp_path, make_runs):
    early = make_runs(tmp_path, LBF, "sable", evaluations=1, seeds=8)
    late = theirs(tmp_path / "late.json", {"lbf": {LBF[4:]: {"sable": [1.0] * 6}}}, steps=(5000, 6000))
    found = concluded(early, late)
    assert said(found, "runs of sable have no steps in common")
    (task,) = found.suites[0].tasks
    assert task.curves == {} and task.seeds == {"sable": 8}
    report.write([early, late], tmp_path / "out")


def test_runs_of_other_lengths_do_not_cut_a_systems_curve(tmp_path, make_runs):
    make_runs(tmp_path, LBF, "sable", evaluations=9)
    make_runs(tmp_path, LBF, "ippo", evaluations=3)
    found = concluded(tmp_path)
    (task,) = found.suites[0].tasks
    assert said(found, "runs of 3,000 and of 9,000 steps")
    assert [task.curves[name].steps[-1] for name in ("sable", "ippo")] == [9000, 3000]


def test_one_evaluation_is_a_point(tmp_path, make_runs):
    make_runs(tmp_path, LBF, "sable", evaluations=1)
    (task,) = concluded(tmp_path).suites[0].tasks
    assert task.curves["sable"].steps.tolist() == [1000.0]
    report.write([tmp_path], tmp_path / "out")


def test_what_does_not_count_is_on_the_page(tmp_path, make_runs):
    make_runs(tmp_path, LBF, "sable")
    (make_runs(tmp_path, LBF, "ippo") / "summary.json").unlink()
    halted = make_runs(tmp_path, LBF, "mappo", seeds=2)
    runs.finish(halted, {"absolute_return": [1.0, None], "halted_seeds": [1]})
    written = report.write([tmp_path], tmp_path / "out")
    assert written.notes == page_data(written.page)["notes"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    for words in ("not finished, at 5,000 of 5,000 steps", "absolute metric is missing", "seed 1 halted"):
        assert any(words in note for note in written.notes) and words in markdown


def test_nothing_to_report_is_one_line_and_writes_nothing(tmp_path, make_runs):
    for task in (LBF, LBF2):
        (make_runs(tmp_path / "runs", task, "sable") / "summary.json").unlink()
    with pytest.raises(SableError, match=r"no finished run; .*not finished.*and 1 more") as error:
        report.write([tmp_path / "runs"], tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_refused_and_kept(tmp_path, make_runs):
    make_runs(tmp_path / "runs", LBF, "sable")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SableError, match="not a folder"):
        report.write([tmp_path / "runs"], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tables.tex").write_text("mine")
    with pytest.raises(SableError, match=r"tables.tex is there already"):
        report.write([tmp_path / "runs"], tmp_path / "site")
    assert (tmp_path / "site" / "tables.tex").read_text() == "mine"
    (tmp_path / "site" / "tables.tex").unlink()
    (tmp_path / "site" / "figures").write_text("mine")
    with pytest.raises(SableError, match=r"cannot write a report to .*site"):
        report.write([tmp_path / "runs"], tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["figures"]


def test_a_report_replaces_the_last_one_and_leaves_other_files(tmp_path, make_runs):
    make_runs(tmp_path / "runs", LBF, "sable")
    out = tmp_path / "out"
    report.write([tmp_path / "runs"], out)
    (out / "mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    report.write([tmp_path / "runs"], out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name", ["humanoid_9|8", "</script><b>", "100%_{$x^2$}\\~#&", "a\nb", "@data@", "../../up", "ä/ö"]
)
def test_any_name_is_shown_as_it_is_and_breaks_nothing(tmp_path, name):
    path = theirs(tmp_path / "x.json", {"s": {name: {name: [1.0, 2.0], "other": [0.0, 1.0]}}})
    written = report.write([path], tmp_path / "out")
    data = page_data(written.page)
    assert data["suites"][0]["tasks"][0]["name"] == f"s/{name}"
    assert written.page.read_text().count("</script>") == 2
    folder = tmp_path / "out" / "figures"
    assert len(list(folder.iterdir())) == 4 and {path.parent for path in folder.rglob("*")} == {folder}
    rows = [
        line for line in (tmp_path / "out" / "tables.tex").read_text().splitlines() if line.endswith(r"\\")
    ]
    assert all(len(re.findall(r"(?<!\\)&", row)) >= 1 for row in rows)


def test_names_that_differ_in_signs_only_have_figures_of_their_own(tmp_path):
    path = theirs(tmp_path / "x.json", {"s": {name: {"x": [1.0, 2.0]} for name in ("a|b", "a-b", "A-B")}})
    report.write([path], tmp_path / "out")
    assert len(list((tmp_path / "out" / "figures").glob("*.svg"))) == 3


def test_tables_in_both_languages():
    estimate = stats.Estimate(-3.14159, -4.0, -0.001)
    one = typeset.Table("a_b", ["task", "x|y"], [["t_1", typeset.Figure(estimate, 2, True)], ["u", ""]])
    assert typeset.to_markdown(one).splitlines()[2:] == [
        r"| task | x\|y |",
        "| --- | ---: |",
        r"| t\_1 | **-3.14** [-4.00, 0.00] |",
        "| u |  |",
    ]
    text = typeset.to_latex(one)
    assert r"\caption{a\_b}" in text and r"task & x\textbar{}y \\" in text
    assert r"t\_1 & \shortstack{\rule{0pt}{2.6ex}\textbf{$-$3.14}\\{\tiny [$-$4.00, 0.00]}} \\" in text


@pytest.mark.parametrize(
    ("values", "digits"), [([0.5, -99.0], 2), ([999.0], 1), ([-1234.5, 0.1], 0), ([math.nan], 2)]
)
def test_large_numbers_have_fewer_decimals(values, digits):
    assert looks.decimals(values) == digits

"""The paper's figures and tables, made of runs whose numbers are known."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from sable.config.schema import SYSTEM_CONFIGS, field_names
from sable.reports import analysis, chapters, hyperparameters, looks, page, paper, scaling, tuning
from sable.reports import read as results
from sable.reports.panels import Chapter
from sable.reports.typeset import Figure
from sable.studies import grid
from tests.reports.test_report import page_data

TINY, MEDIUM = "rware/tiny-4ag", "rware/medium-4ag"
LBF32, LBF64 = "lbf/2s-32x32-32p-16f", "lbf/2s-45x45-64p-32f"
NEOM = ("neom/simple-sine-512ag", "neom/quick-flip-512ag")


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_runs) -> Path:
    """A report of small runs of every study of the paper; every return is 10 k + seed / 10 + `better`."""
    out = tmp_path_factory.mktemp("chapters")
    for task in (TINY, MEDIUM):
        for system, better in (("sable", 4.0), ("mat", 2.0), ("ippo", 0.0)):
            make_runs(out / "runs", task, system, better=better)
        make_runs(out / "runs", task, "sable", better=1.0, memory=False)
        for k, changed in enumerate(("rms_norm", "swiglu")):
            make_runs(out / "runs", task, "mat", better=2.5 + k, **{changed: True})
        make_runs(out / "runs", task, "mat", better=3.7, rms_norm=True, swiglu=True)
    for size in (8, 128):
        label = {"label": f"sable chunk-size={size}"}
        make_runs(
            out / "runs", TINY, "sable", better=size / 8, chunk_size=size, peak=1e9 + 1e7 * size, **label
        )
    for task, agents in ((LBF32, 32), (LBF64, 64)):
        make_runs(out / "runs", task, "sable", better=2.0, pace=64e3 / agents, peak=1e8 * agents)
        make_runs(out / "runs", task, "mat", better=1.0, pace=1024e3 / agents**2, peak=1e6 * agents**2)
    for task, peak in zip(NEOM, (3e9, 5e9), strict=True):
        make_runs(out / "runs", task, "sable", better=2.0, pace=500.0, peak=peak)
    return page.write([out / "runs"], out / "site", paper=True).page.parent


@pytest.fixture(scope="module")
def made(written) -> dict[str, Chapter]:
    """The chapters of those runs, by key."""
    return of(written.parent / "runs")


def of(*paths: Path) -> dict[str, Chapter]:
    found = results.read(paths)
    return {one.key: one for one in chapters.make(found, analysis.analyse(found, beside_paper=True))}


def row(chapter: Chapter, first: str, table: int = 0) -> dict[str, object]:
    """The cells of a row by the heads of their columns."""
    found = chapter.tables[table]
    (cells,) = [cells for cells in found.rows if cells[0] == first]
    return dict(zip(found.head, cells, strict=True))


def test_every_chapter_has_its_files(written, made):
    drawn = {key for key, chapter in made.items() if chapter.panels}
    assert drawn == {
        "tasks-won", "throughput", "memory", "sample-efficiency", "team-sizes", "ablation", "chunk-size",
        "learning-curves", "performance-profiles",
    }  # fmt: skip
    markdown = (written / "report.md").read_text()
    for key in drawn:
        for kind in ("svg", "png"):
            assert (written / "figures" / f"paper-{key}.{kind}").stat().st_size > 2000
        assert f"(figures/paper-{key}.svg)" in markdown
    latex = (written / "tables.tex").read_text()
    for chapter in made.values():
        for table in chapter.tables:
            assert table.caption.partition(" ")[0] in latex and table.rows
    assert len(page_data(written / "report.html")["chapters"]) == len(made)


def test_tasks_won_stand_beside_the_papers(made):
    won, highest = made["tasks-won"].panels
    assert won.bars == {
        "sable (best)": (1.0, "2 of 2"),
        "mat": (0.0, "0 of 2"),
        "ippo": (0.0, "0 of 2"),
        "sable (paper)": (34 / 45, "34 of 45"),
        "mat (paper)": (3 / 45, "3 of 45"),
    }
    assert highest.bars["sable (best)"].text == "2 of 2"
    assert "2 of the paper's 45 tasks" in made["tasks-won"].missing
    assert made["tasks-won"].command == "sable benchmark paper"


def test_throughput_and_memory_are_drawn_by_team_size(made):
    pace, memory = (made[key].panels for key in ("throughput", "memory"))
    assert [panel.title for panel in pace] == ["LBF", "Neom"] == [panel.title for panel in memory]
    sable, mat = (pace[0].lines[name] for name in ("sable", "mat"))
    assert sable.x.tolist() == [32, 64] and sable.y.value.tolist() == [2000, 1000]
    assert mat.y.value.tolist() == [1000, 250]
    assert memory[0].lines["mat"].y.value == pytest.approx([1.024, 4.096])
    # Two patterns of one size count as their mean.
    assert memory[1].lines["sable"].x.tolist() == [512]
    assert memory[1].lines["sable"].y.value == pytest.approx([4.0])
    text = made["throughput"].text
    assert "sable takes up to 4.0 times MAT's steps a second, at 64 agents" in text and "up to 6.5" in text
    assert row(made["memory"], "64")["mat"] == "250 steps/s, 4.10 GB"
    assert row(made["memory"], "512", 1)["sable"] == "500 steps/s, 4.00 GB"
    assert not made["memory"].missing


def test_large_teams_have_their_learning_curves(made):
    titles = [panel.title for panel in made["team-sizes"].panels]
    assert titles == [
        "LBF 2s-32x32-32p-16f", "LBF 2s-45x45-64p-32f", "Neom quick-flip-512ag", "Neom simple-sine-512ag",
    ]  # fmt: skip
    curve = made["team-sizes"].panels[0].lines["sable"]
    assert curve.x[[0, -1]].tolist() == [1000, 5000]
    assert curve.y.value[[0, -1]] == pytest.approx([2.15, 42.15])


def test_sample_efficiency_is_along_steps(made):
    lines, chances = made["sample-efficiency"].panels
    assert (lines.title, lines.x_label) == ("RWARE", "environment steps")
    assert set(lines.lines) == {"sable (best)", "mat", "ippo"}
    x, y = lines.lines["sable (best)"]
    assert x[[0, -1]].tolist() == [1000, 5000]
    # From 0, where IPPO's first seed begins, to 44.3, where Sable's last ends; its middle seeds end at 44.15.
    assert y.value[-1] == pytest.approx(44.15 / 44.3) and y.value[0] == pytest.approx(4.15 / 44.3)
    assert {name: found.value for name, found in chances.points.items()} == {"mat": 1.0, "ippo": 1.0}


def test_steps_of_unequal_length_become_shares(tmp_path, make_runs):
    for system in ("sable", "ippo"):
        make_runs(tmp_path, TINY, system, evaluations=5)
        make_runs(tmp_path, MEDIUM, system, evaluations=9)
    lines, _ = of(tmp_path)["sample-efficiency"].panels
    assert lines.x_label == "share of training" and lines.lines["ippo"].x[[0, -1]].tolist() == [0, 1]


def test_table_1_is_ours_and_the_papers(made):
    ours = row(made["table-1"], "RWARE, 2 of 15 tasks")
    # Absolute metrics from 40 to 44.3; the interquartile mean of Sable's is 44.15.
    assert ours["Sable"].estimate.value == pytest.approx(4.15 / 4.3) and ours["Sable"].highest
    assert ours["IPPO"].estimate.value == pytest.approx(0.15 / 4.3) and ours["QMIX"] == "/"
    rows = {cells[0]: cells for cells in made["table-1"].tables[0].rows}
    figures = {name: [x for x in cells[1:] if isinstance(x, Figure)] for name, cells in rows.items()}
    stars = {name: [cell.overlaps for cell in cells] for name, cells in figures.items()}
    assert stars["SMAX (paper)"] == [False, True, False, True, False]
    assert stars["MABrax (paper)"] == [False, False, False, False, False, True]
    assert stars["LBF (paper)"] == [False, False, False, True]
    assert not any(any(stars[f"{name} (paper)"]) for name in ("RWARE", "Connector", "MPE"))
    assert [cell.highest for cell in figures["LBF (paper)"]] == [True, False, True, False]


def test_the_ablation_tells_its_systems_apart(made, written):
    chapter = made["ablation"]
    (panel,) = chapter.panels
    assert panel.title == "RWARE, 2 tasks" and len(panel.lines) == 6
    assert panel.lines["mat rms_norm swiglu"].y.value[-1] == pytest.approx((43.85 - 1) / (44.3 - 1))
    cells = row(chapter, TINY)
    assert cells["sable"].highest and cells["mat swiglu"].estimate.value == pytest.approx(43.65)
    assert cells["mat (paper)"].estimate == paper.figures()["absolute", TINY, "mat"]
    found = analysis.analyse(results.read([written.parent / "runs"]), beside_paper=True)
    drawn = looks.chapter_looks(found.systems, chapter.systems())
    assert len({(own.colour, own.dash) for own in drawn.values()}) == 6
    assert "smax/3s5z" in chapter.missing and chapter.command == "sable benchmark ablation"


def test_chunk_sizes_have_memory_and_return(made):
    memory, score = made["chunk-size"].panels
    assert memory.lines["sable"].x.tolist() == [8, 128]
    assert memory.lines["sable"].y.value == pytest.approx([1.08, 2.28])
    assert score.lines["sable"].y.value == pytest.approx([41.15, 56.15])
    assert score.references == {"sable (paper)": paper.figures()["absolute", TINY, "sable"]}
    assert row(made["chunk-size"], "128")["memory"] == "2.28 GB"


def test_changed_systems_do_not_count_as_systems(made):
    """Those of the ablation and of chunks are in their chapters and in no other."""
    names = {name for key in ("tasks-won", "sample-efficiency") for name in made[key].systems()}
    assert not {name for name in names if "norm" in name or "chunk" in name}


def test_variants_of_one_system_do_not_compete(tmp_path, make_runs):
    make_runs(tmp_path, TINY, "sable")
    make_runs(tmp_path, TINY, "sable", memory=False)
    found = of(tmp_path)
    assert found["tasks-won"].missing.startswith("None of the paper's 45 tasks")
    assert not found["sample-efficiency"].panels and len(found["table-1"].tables[0].rows) == 6


def test_unknown_memory_is_left_out(tmp_path, make_runs):
    make_runs(tmp_path / "runs", LBF32, "sable", peak=None)
    make_runs(tmp_path / "runs", LBF32, "mat")
    make_runs(tmp_path / "runs", TINY, "sable", seeds=1, chunk_size=8, peak=None)
    found = of(tmp_path / "runs")
    assert set(found["memory"].panels[0].lines) == {"mat"}
    assert set(found["throughput"].panels[0].lines) == {"sable", "mat"}
    assert [list(panel.lines) for panel in found["chunk-size"].panels] == [[], ["sable"]]
    written = page.write([tmp_path / "runs"], tmp_path / "site", paper=True).page
    assert "memory not known" in (written.parent / "report.md").read_text()
    (task,) = [
        task for suite in page_data(written)["suites"] for task in suite["tasks"] if task["name"] == TINY
    ]
    assert task["costs"]["sable"][1] is None


def test_what_is_missing_names_its_command(tmp_path, make_runs):
    make_runs(tmp_path, "lbf/8x8-2p-2f-coop", "sable")
    found = of(tmp_path)
    commands = {key: one.command for key, one in found.items() if one.missing}
    assert commands == {
        "tasks-won": "sable benchmark paper",
        "throughput": "sable benchmark scaling",
        "memory": "sable benchmark scaling",
        "sample-efficiency": "sable benchmark paper",
        "table-1": "sable benchmark paper",
        "team-sizes": "sable benchmark scaling",
        "ablation": "sable benchmark ablation",
        "chunk-size": "sable benchmark chunk",
        "learning-curves": "sable benchmark paper",
        "performance-profiles": "sable benchmark paper",
    }
    assert [cells[0] for cells in found["table-1"].tables[0].rows] == [
        f"{name} (paper)" for name in ("RWARE", "MABrax", "SMAX", "Connector", "LBF", "MPE")
    ]
    page.write([tmp_path], tmp_path / "site", paper=True)
    markdown = (tmp_path / "site" / "report.md").read_text()
    for command in set(commands.values()):
        assert f"`{command}` makes what is missing." in markdown


def test_the_studies_make_what_the_chapters_need():
    for study in ("scaling", "ablation", "chunk"):
        pairs = grid.pairs([study])
        if study == "scaling":
            assert all(scaling.team_size(task) for task, _ in pairs)
        if study == "ablation":
            labels = {results.variant(one.system, one.fields) for _, one in pairs}
            assert labels == {"mat", "sable", *chapters.CHANGED}
            assert tuple(dict.fromkeys(task for task, _ in pairs)) == paper.ABLATION
        if study == "chunk":
            assert all(one.fields["chunk_size"] for _, one in pairs)
    assert scaling.team_size("rware/tiny-4ag") is scaling.team_size("lbf/no such") is None


def test_tables_of_settings_are_those_of_the_files():
    folder = resources.files("sable.config")
    searched = tomllib.loads(folder.joinpath("recipes", "search.toml").read_text())
    fixed = tomllib.loads(folder.joinpath("protocol.toml").read_text())
    defaults, spaces = hyperparameters.chapters()
    families = ["sable", "mat", "ppo", "sac", "qmix"]
    members = {"ppo": "ippo", "sac": "hasac"}
    for k, family in enumerate(families):
        table, space = defaults.tables[k + 1], spaces.tables[k]
        config = SYSTEM_CONFIGS[members.get(family, family)]
        assert [cells[0] for cells in space.rows] == list(searched[family])
        assert {cells[0] for cells in table.rows + space.rows} == set(field_names(config))
        assert len(table.rows) + len(space.rows) == len(field_names(config))
        for name, values, *_ in space.rows:
            assert values == ", ".join(map(hyperparameters.text_of, searched[family][name]))
        ours = {cells[0]: cells[-1] for cells in table.rows + space.rows}
        assert ours == {name: hyperparameters.text_of(vars(config())[name]) for name in field_names(config)}
        theirs = {cells[0]: cells[1] for cells in table.rows if cells[1] != hyperparameters.NONE}
        assert set(theirs) == (set(fixed[family]) - {"code", "scaling"}) | set(fixed[family].get("code", {}))
    assert row(defaults, "gae_lambda", 1)["the paper"] == "0.9"
    assert row(defaults, "learning_rate_horizon", 1)["the paper"] == "0 (public code)"


def test_unequal_tuning_is_the_first_thing_said(tmp_path, make_runs):
    for task in (TINY, MEDIUM):
        make_runs(tmp_path / "runs", task, "sable", learning_rate=5e-4)
        make_runs(tmp_path / "runs", task, "mat", rms_norm=True)
        make_runs(tmp_path / "runs", task, "ippo", clip_eps=0.1, memory=True)
    make_runs(tmp_path / "runs", "smax/3s5z", "ippo")
    make_runs(tmp_path / "runs", "smax/3s5z", "sable")
    written = page.write([tmp_path / "runs"], tmp_path / "site")
    line = (
        "UNEQUAL TUNING on rware (2 tasks): mat ran on defaults where sable, ippo ran a tuned recipe; this "
        "does not compare systems at their best"
    )
    assert written.notes[0] == line == page_data(written.page)["notes"][0]
    assert sum("UNEQUAL" in note for note in written.notes) == 1
    assert line in (tmp_path / "site" / "report.md").read_text().replace("\\", "")


def test_recipes_are_tuned_and_variants_are_not():
    assert not any(tuning.is_tuned(name, vars(config())) for name, config in SYSTEM_CONFIGS.items())
    assert not tuning.is_tuned("ippo", {"memory": True}) and not tuning.is_tuned("mat", {"swiglu": True})
    assert tuning.is_tuned("sable", {"learning_rate_horizon": 20_000_000})
    assert tuning.is_tuned("hasac", {"policy_delay": 4})


def test_names_in_figures_are_text(written):
    svg = (written / "figures" / "paper-tasks-won.svg").read_text()
    assert ">34 of 45<" in svg and ">sable (paper)<" in svg
    assert not [path for path in written.rglob("*.svg") if "$" in path.read_text()]

"""The page in a real browser, opened from disk with no network: drawn, read, zoomed, at any width."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from sable.reports import page as report

TASKS = ("lbf/8x8-2p-2f-coop", "lbf/15x15-4p-5f", "rware/tiny-2ag")
SYSTEMS = ("sable", "sable no memory", "sable (best)", "mappo", "ippo")


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_runs) -> Path:
    """A report of four systems on three tasks of two suites, and a name that wants to be a script."""
    out = tmp_path_factory.mktemp("report")
    for k, task in enumerate(TASKS):
        make_runs(out / "runs", task, "sable", better=3.0 + k, seeds=6)
        make_runs(out / "runs", task, "sable", better=2.0, seeds=6, memory=False)
        make_runs(out / "runs", task, "mappo", better=0.5, seeds=6)
        make_runs(out / "runs", task, "ippo", better=0.0, seeds=5)
    blocks = {
        "step_0": {"step_count": 1000, "return": [1.0]},
        "step_1": {"step_count": 5000, "return": [2.0]},
    }
    run = blocks | {"absolute_metrics": {"return": [2.0]}}
    evil = {"odd": {NASTY: {NASTY: {"seed_0": run, "seed_1": run}}}}
    (out / "evil.json").write_text(json.dumps(evil))
    return report.write([out / "runs", out / "evil.json"], out / "site", paper=True).page


NASTY = "</script><img src=x onerror=alert(1)>&amp; @data@ $x_1$"


@pytest.fixture
def page(opened, written: Path):
    """The page on a laptop's screen; at the end, nothing was complained of and nothing asked for."""
    with opened(written, width=1280) as page:
        yield page


def chart(page: Page, title: str, *, suite: str = "lbf"):
    """The plot under a title in a suite's section, in sight."""
    section = page.locator("section", has=page.get_by_role("heading", name=suite, exact=True))
    figure = section.locator("figure").filter(has=page.get_by_text(title, exact=True))
    figure.scroll_into_view_if_needed()
    figure.locator("svg[role=img] .axis").first.wait_for(state="attached")
    return figure


def series(figure) -> list[str]:
    """The systems whose lines are drawn."""
    return figure.locator("g[data-system]").evaluate_all("all => all.map(g => g.dataset.system)")


def content(page: Page):
    return json.loads(page.locator("#data").text_content())


def test_the_headline_and_all_notes_are_there(page):
    heading = page.get_by_role("heading", level=1)
    assert heading.text_content() == "sable (best) wins 3 of 3 tasks"
    notes = page.get_by_label("Notes on the runs").text_content()
    assert all(note in notes for note in content(page)["notes"])
    assert "ippo has 5, where most have 6" in notes


def test_every_chart_is_drawn_with_real_extents(page):
    for title in ("Normalised score", "Performance profile", "Sample efficiency"):
        assert sorted(series(chart(page, title))) == sorted(SYSTEMS)
    assert series(chart(page, "Probability of improvement")) == ["mappo", "ippo"]
    for task in TASKS:
        suite, name = task.split("/")
        figure = chart(page, name, suite=suite)
        assert series(figure) == [name for name in SYSTEMS if "best" not in name]
        for line in figure.locator("path.series").all():
            box = line.bounding_box()
            assert box["width"] > 150 and box["height"] > 50
        assert figure.locator("path.band").count() == 4


def test_names_are_text_and_never_markup(page):
    assert page.locator("img").count() == 0
    assert page.get_by_role("button", name=NASTY).is_visible()
    assert page.get_by_role("heading", name="odd").is_visible()


def test_the_legend_hides_and_shows_a_system_everywhere(page):
    table = page.get_by_role("table", name="lbf scores")
    chip = page.locator("#legend").get_by_role("button", name="mappo", exact=True)

    def found(times: int) -> None:
        for title in ("8x8-2p-2f-coop", "Normalised score", "Performance profile"):
            expect(chart(page, title).locator("g[data-system=mappo]")).to_have_count(times)
        expect(table.get_by_role("columnheader", name="mappo", exact=True)).to_have_count(times)

    found(1)
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    found(0)
    chip.click()
    found(1)


def test_pointing_shows_the_values_of_all_systems(page):
    figure = chart(page, "8x8-2p-2f-coop")
    box = figure.locator("svg[role=img]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100)
    tip = figure.locator(".tip")
    steps = tip.locator("b").first.text_content()
    rows = [
        re.split(r"\s{2,}|\t", row.strip())
        for row in tip.locator("tr").evaluate_all("x => x.map(r => r.innerText)")
    ]
    shown = {row[0].strip(): [float(x) for x in re.findall(r"\d+\.\d+", " ".join(row[1:]))] for row in rows}
    (task,) = [t for suite in content(page)["suites"] for t in suite["tasks"] if t["name"] == TASKS[0]]
    curve = task["curves"]["sable"]
    places = len(curve["value"])
    at = [curve["x"][0] + (curve["x"][1] - curve["x"][0]) * k / (places - 1) for k in range(places)]
    k = min(range(places), key=lambda k: abs(at[k] - float(steps.split()[0]) * 1000))
    assert set(shown) == {"sable", "sable no memory", "mappo", "ippo"}
    for name, values in shown.items():
        own = task["curves"][name]
        assert values == pytest.approx([own["value"][k], own["low"][k], own["high"][k]], abs=0.0051)
    page.mouse.move(5, 5)
    assert tip.count() == 0


def test_arrow_keys_read_the_values_aloud(page):
    figure = chart(page, "8x8-2p-2f-coop")
    figure.locator("svg[role=img]").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#spoken").text_content().startswith("1 k steps: sable 3.25 [")
    page.keyboard.press("+")
    assert figure.get_by_role("button", name="reset zoom").is_visible()
    page.keyboard.press("Escape")
    assert figure.get_by_role("button", name="reset zoom").count() == 0


def test_dragging_zooms_and_a_double_click_shows_all_again(page):
    figure = chart(page, "8x8-2p-2f-coop")

    def ends() -> list[float]:
        plot = figure.locator("svg[role=img]")
        return [float(plot.get_attribute(f"data-{end}")) for end in ("low", "high")]

    whole, labels = ends(), figure.locator("svg[role=img] > text").all_inner_texts()
    box = figure.locator("svg[role=img]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 80, steps=3)
    page.mouse.up()
    low, high = ends()
    assert whole[0] < low < high < whole[1]
    assert figure.locator("svg[role=img] > text").all_inner_texts() != labels
    figure.locator("svg[role=img]").dblclick()
    assert ends() == whole and figure.locator("svg[role=img] > text").all_inner_texts() == labels


def test_seeds_are_drawn_on_demand(page):
    figure = chart(page, "8x8-2p-2f-coop")
    assert figure.locator("path.seed").count() == 0
    page.get_by_role("button", name="seeds").click()
    assert figure.locator("path.seed").count() == 6 + 6 + 6 + 5


def test_the_summary_is_chosen_for_all_tables_at_once(page):
    scores = page.get_by_role("table", name="lbf scores")
    before = scores.inner_text()
    page.get_by_label("Summary of a run").last.select_option("mean")
    assert scores.inner_text() != before
    assert page.get_by_label("Summary of a run").first.input_value() == "mean"


def test_what_runs_took_is_in_a_table_with_its_machine(page):
    first = page.get_by_role("table", name="lbf cost").locator("tbody td").first
    assert first.inner_text().split("\n") == ["1.23 M steps/s", "2.50 GB"]
    assert first.get_attribute("title") == "6 seeds on cpu"


def test_our_figures_stand_beside_the_papers(page):
    verdicts = page.get_by_role("table", name="Beside the paper", exact=True)
    assert verdicts.locator("tbody tr").count() == 3
    first = page.get_by_role("table", name="rware beside the paper").locator("tbody td").first
    assert first.get_by_role("img").get_attribute("aria-label") == "not below"


PAPER = "The paper's figures and tables"


def test_the_papers_figures_are_drawn(page):
    won = chart(page, "Tasks won", suite=PAPER)
    bars = won.locator("g[data-system]")
    assert series(won) == ["sable (best)", "mappo", "ippo", "sable (paper)", "mat (paper)"]
    assert "3 of 3" in won.text_content() and "34 of 45" in won.text_content()
    widths = [bar.bounding_box()["width"] for bar in bars.locator("rect").all()]
    assert widths[3] == pytest.approx(widths[0] * 34 / 45, abs=3)
    section = page.locator("section", has=page.get_by_role("heading", name=PAPER))
    efficiency = section.locator("figure").filter(has=page.get_by_text("LBF", exact=True)).first
    efficiency.scroll_into_view_if_needed()
    efficiency.locator("svg[role=img] .axis").first.wait_for(state="attached")
    assert sorted(series(efficiency)) == ["ippo", "mappo", "sable (best)"]
    assert "environment steps" in efficiency.text_content()
    curves = chart(page, "tiny-2ag", suite="rware")
    papers = curves.locator("g[data-paper]").evaluate_all("all => all.map(g => g.dataset.paper)")
    assert papers == ["sable (paper)", "mappo (paper)", "ippo (paper)"]


def test_the_papers_tables_and_what_is_missing_are_there(page):
    section = page.locator("section", has=page.get_by_role("heading", name=PAPER))
    for study in ("paper", "scaling", "ablation", "chunk"):
        assert section.get_by_text(f"sable benchmark {study}").count() >= 1
    cells = section.get_by_role("row", name="SMAX (paper)").locator("td").all_inner_texts()
    assert [cell.split("\n")[0] for cell in cells] == ["0.94", "0.92*", "0.86", "0.93*", "/", "/", "0.86"]
    section.get_by_text("5 tables").click()
    searched = section.get_by_role("table", name="Search space of Sable").get_by_role("row", name="embed_dim")
    assert searched.locator("td").all_inner_texts() == ["32, 64, 128", "64"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(opened, written, scheme):
    with opened(written, width=1280, scheme=scheme) as page:
        colour = "getComputedStyle(document.body).backgroundColor"
        light, dark = "rgb(253, 252, 250)", "rgb(19, 20, 22)"
        own, other = (light, dark) if scheme == "light" else (dark, light)
        assert page.evaluate(colour) == own
        page.locator("#theme").click()
        assert page.evaluate(colour) == other
        page.reload()
        assert page.evaluate(colour) == other
        page.locator("#theme").click()
        assert page.evaluate(colour) == own


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out_of_the_screen(opened, written, width):
    with opened(written, width=width) as page:
        for title in ("Normalised score", "Sample efficiency", "15x15-4p-5f"):
            chart(page, title)
        figure = chart(page, "15x15-4p-5f")
        figure.locator("svg[role=img]").tap() if width < 500 else figure.locator("svg[role=img]").hover()
        expect(figure.locator(".tip")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        sticking = "all => all.filter(x => x.getBoundingClientRect().right > innerWidth + 1).length"
        assert (
            page.locator("h1, h2, h3, p, figure, figcaption, .box, .tip, svg text").evaluate_all(sticking)
            == 0
        )


def test_all_is_drawn_for_print(page):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("figure:not(:has(svg .axis))").count() == 0

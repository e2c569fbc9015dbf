"""The replay in a real browser, opened from disk with no network: stepped, played, read, at any width."""

import base64
import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from sable.viewer import show
from sable.viewer.page import content_of

GIVEN = {"seed": 0, "greedy": False, "formats": ["html"], "quiet": True}
SIZES = {"embed_dim": 16, "num_heads": 2, "num_blocks": 1}
TASKS = ["probe/recall", pytest.param("neom/simple-sine-4ag", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=TASKS)
def written(request, untrained, tmp_path_factory) -> Path:
    """Five episodes of agents that remember by retention."""
    team, env = untrained(request.param, **SIZES)
    return show.watch(team, env, tmp_path_factory.mktemp("watch"), episodes=5, **GIVEN)[0]


@pytest.fixture(scope="module")
def data(written):
    return content_of(written.read_text())


@pytest.fixture
def page(opened, written):
    with opened(written, width=1280) as page:
        yield page


def numbers(packed, *shape) -> np.ndarray:
    kind, text = packed
    return np.frombuffer(base64.b64decode(text), f"<{kind}").reshape(shape)


def at(page: Page) -> int:
    return int(re.match(r"step (\d+) of", page.locator("#where").inner_text())[1])


def test_the_slider_and_the_keys_move_through_the_episode(page, data):
    expect(page.get_by_role("heading", level=1)).to_have_text(f"sable on {data['task']}")
    last = data["episodes"][0]["length"]
    map_at_start = page.locator("#map svg > g").first.inner_html()
    page.get_by_role("slider", name="Step").fill("2")
    assert at(page) == 2 and page.locator("#map svg > g").first.inner_html() != map_at_start
    for key, step in (
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("Shift+ArrowRight", min(12, last)),
        ("End", last),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert at(page) == step and page.locator("#slider").input_value() == str(step)
    assert page.locator("#map svg > g").first.inner_html() == map_at_start
    page.keyboard.press("ArrowLeft")
    assert at(page) == 0
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#where")).not_to_have_text(re.compile("^step [01] of"))
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_text("Play")
    assert at(page) > 1


def test_the_map_shows_every_situation(page, data):
    """Every shape of a frame is drawn, once, in order, however one gets there."""
    scene = data["episodes"][0]["scene"]
    shapes, now, frames = scene["shapes"], set(), []
    for gone, came in scene["changes"]:
        now = (now - set(gone)) | set(came)
        frames.append([shapes[k] for k in sorted(now, key=lambda k: (shapes[k][1], k))])
    names = {"rect": "rect", "disc": "circle", "path": "path", "area": "path", "text": "text"}
    last = data["episodes"][0]["length"]
    for step in (0, 1, 2, last, last - 1, 3):
        page.get_by_role("slider", name="Step").fill(str(step))
        drawn = page.locator("#map svg > g").first.evaluate("g => [...g.children].map(x => x.tagName)")
        assert drawn == [names[shape[0]] for shape in frames[step]]
        words = page.locator("#map svg > g").first.locator("text").all_text_contents()
        assert words == [shape[5] for shape in frames[step] if shape[0] == "text"]


def test_actions_probabilities_and_values_are_the_recorded_ones(page, data):
    episode, step, team = data["episodes"][0], 2, data["agents"]
    length = episode["length"]
    page.get_by_role("slider", name="Step").fill(str(step))
    actions = numbers(episode["action"], length, team)[step]
    odds = numbers(episode["odds"], length, team, len(data["actions"]))[step]
    values = numbers(episode["values"], length, team)[step]
    for k, row in enumerate(page.locator("#agents .agent").all()):
        name, chance = row.locator(".does").inner_text().split("\n")
        assert name == data["actions"][actions[k]]
        assert abs(float(chance.split()[0]) - odds[k, actions[k]] / 2) <= 0.5
        assert row.locator(".odd").count() == len(data["actions"])
        said = row.locator(".worth").inner_text().replace("−", "-").split()[-1]
        assert float(said) == pytest.approx(values[k], abs=0.0051)
    order = page.locator("#order").inner_text()
    assert order.startswith("They decide in turn") and re.findall(r"\d", order) == [
        str(k + 1) for k in range(team)
    ]


def test_what_an_agent_recalls_follows_step_agent_and_layer(page, data):
    memory, team, step = data["episodes"][0]["memory"], data["agents"], 3
    shape = (data["episodes"][0]["length"], team)
    page.get_by_role("slider", name="Step").fill(str(step))
    for option, agent in ((0, 0), (3, 1), (5, team - 1)):
        page.get_by_label("Layer", exact=True).select_option(str(option))
        page.locator(f"[data-agent='{agent + 1}']").click()
        expect(page.locator("#whose")).to_have_text(f"What agent {agent + 1} recalls at step {step}")
        found = memory["options"][option]
        top = numbers(found["topShare"], *shape, memory["top"])[step, agent] / 100
        shown = [int(text.split()[0]) for text in page.locator(".tops b").all_inner_texts()]
        assert shown == [round(abs(x) * 100) for x in top if x]
        hatched = page.locator(".tops .meter").evaluate_all("all => all.map(x => x.matches('.less'))")
        assert hatched == [bool(x < 0) for x in top if x]
        whom = page.locator(".bar div").evaluate_all("all => all.map(x => Number(x.dataset.share))")
        assert whom == pytest.approx((numbers(found["byAgent"], *shape, team)[step, agent] / 200).tolist())
        assert page.locator("#rings circle").count() == len(shown)
    lag = numbers(memory["options"][5]["topLag"], *shape, memory["top"])[step, team - 1]
    page.locator(".tops button").last.click()
    assert at(page) == step - lag[len(shown) - 1]
    page.keyboard.press("End")
    expect(page.locator("#recalled")).to_contain_text("The episode is over.")


def test_another_episode_begins_anew(page, data):
    page.get_by_role("slider", name="Step").fill("3")
    page.get_by_label("Episode", exact=True).select_option("1")
    assert at(page) == 0
    page.keyboard.press("End")
    total = data["episodes"][1]["returns"][-1]
    said = page.locator("#where").inner_text().replace("−", "-").replace("\u202f", "")
    assert float(re.search(r"return (\S+)", said)[1]) == pytest.approx(total, abs=0.0051)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out_in_either_theme(opened, written, width, scheme):
    with opened(written, width=width, scheme=scheme) as page:
        page.get_by_role("slider", name="Step").fill("3")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        out = "all => all.filter(x => x.getBoundingClientRect().right > innerWidth + 1).length"
        assert page.locator("h1, h2, h3, p, section, .agent, .bar, .tops button").evaluate_all(out) == 0
        assert page.locator("#map svg").bounding_box()["width"] > 250
        colour = "getComputedStyle(document.body).backgroundColor"
        own = {"light": "rgb(253, 252, 250)", "dark": "rgb(19, 20, 22)"}
        assert page.evaluate(colour) == own[scheme]
        page.locator("#theme").click()
        assert page.evaluate(colour) != own[scheme]


def test_without_memory_the_page_does_not_speak_of_it(untrained, opened, tmp_path):
    team, env = untrained("probe/continuous", "masac", policy_layers=(8,), q_layers=(8,))
    (path,) = show.watch(team, env, tmp_path, episodes=1, **GIVEN)
    with opened(path, width=1280) as page:
        expect(page.locator("#order")).to_have_text("All agents decide at once.")
        assert page.locator(".dial").count() == 2 * 2 and page.locator("#memory").count() == 0
        text = page.locator("body").inner_text().lower()
        assert "recall" not in text and "memory" not in text and "value" not in text

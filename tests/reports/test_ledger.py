"""Published numbers: that each follows from its data, says what ran, and can be made again."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import typing as tp
from pathlib import Path

import jax
import numpy as np
import pytest

import sable
from sable.cli.flags import parse
from sable.cli.main import main
from sable.cli.parsers import system_of, train_parser
from sable.config import protocol
from sable.config import resolve as settings
from sable.config.schema import ActorCriticConfig, Config, RunConfig, SableConfig, SystemConfig
from sable.reports import ledger, paper, results_page, stats, tables
from sable.reports import read as results
from sable.runs import circumstances, provenance, sums
from sable.runs import directory as runs
from sable.studies import reproduce

REPOSITORY = Path(__file__).resolve().parents[2]
TASK = "lbf/2s-8x8-2p-2f-coop"
SMALL = {"system": "ippo", "num_envs": 4, "rollout_length": 4, "policy_layers": (8,), "critic_layers": (8,)}
SMALL |= {"total_steps": 640, "num_evaluations": 4, "evaluation_episodes": 8, "absolute_episodes": 8}
PAGE = f"# Results\n\n{results_page.BEGIN}\n{results_page.END}\n\nThe rest.\n"


# What is published here.


def test_the_page_is_what_the_ledger_gives_and_the_ledger_what_its_data_gives():
    rows = ledger.read(REPOSITORY / "results")
    assert ledger.find_mistakes(REPOSITORY / "results") == []
    text = (REPOSITORY / results_page.PAGE).read_text()
    assert results_page.section_of(text) == results_page.section(rows), (
        "run sable publish; numbers are not edited by hand"
    )
    for suite in {row["row"].partition("/")[0] for row in rows}:
        assert (REPOSITORY / "docs" / "figures" / f"{suite}.svg").is_file()


def test_the_readme_counts_all_current_rows():
    text = results_page.section_of((REPOSITORY / results_page.README).read_text())
    rows = ledger.read(REPOSITORY / "results")
    assert text == results_page.in_brief(rows), "run sable publish; counts are not made by hand"
    judged = [row for row in rows if "superseded" not in row and row["verdict"]]
    for name, words in tables.LONG.items():
        found = [row["summaries"][name] for row in judged]
        kinds = [one["verdict"] for one in found]
        counts = [kinds.count("not below"), sum(one["by_rounding"] for one in found)]
        counts += [kinds.count("overlapping"), kinds.count("below")]
        assert f"| {words} | {' | '.join(map(str, counts))} |" in text and len(kinds) == len(judged)


def test_no_page_calls_a_table_reproduced():
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        assert not re.search(
            r"tables?\b[^.]{0,80}\breproduced|reproduced[^.]{0,80}\btables?\b", page.read_text()
        ), page


def test_no_run_ever_published_left_the_list():
    """By the history of the list itself, as far as this clone has it."""
    log = ["git", "log", "--format=", "-p", "--", "results/published.txt"]
    done = subprocess.run(log, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    once = {line[1:] for line in done.stdout.splitlines() if re.match(r"[+-]\w", line)}
    assert once <= set(ledger.published(REPOSITORY / "results"))


FIRST = """
lbf/10x10-3p-3f:sable 5e7f3dd2eb5c8856 b8ae72df524e165d
lbf/15x15-3p-5f:sable adb1fb07ad0a89ad b8ae72df524e165d
lbf/15x15-4p-3f:sable f789e544db43ae12 c7b4e0e32c671f28
lbf/15x15-4p-5f:sable e9904f777e34538b a67b43884d52c2cf
lbf/2s-10x10-3p-3f:sable be414c3750ded986 b8ae72df524e165d
lbf/2s-8x8-2p-2f-coop:sable 9755d435d8a7612f b8ae72df524e165d
lbf/8x8-2p-2f-coop:sable 57d1b495b306b0c2 b8ae72df524e165d
connector/con-5x5x3a:sable 596f261446eb2104 0ce9c0edfc7ae34a
connector/con-10x10x10a:sable 03b3c480eff57123 a67b43884d52c2cf
connector/con-7x7x5a:sable 471c1f0ef0bcdec4 f83321ca6df3bca7
connector/con-15x15x23a:sable 15194675359c9891 f9dfde3ea82be66b
mpe/simple_spread_3ag:sable 024f933f0a486d9d f9dfde3ea82be66b
mpe/simple_spread_5ag:sable 658a7568a24b4249 f9dfde3ea82be66b
mpe/simple_spread_10ag:sable 6bf0883f389790ea a1c2e2747b914621
"""
REPLACED = {
    "lbf/15x15-4p-3f:sable f789e544db43ae12 b8ae72df524e165d": 0.994423,
    "lbf/15x15-4p-5f:sable 7d5b9f33623adcee b8ae72df524e165d": 0.982131,
    "lbf/15x15-4p-5f:sable 7d5b9f33623adcee c7b4e0e32c671f28": 0.980757,
}


def test_what_was_published_stays_and_says_what_it_is():
    rows = {ledger.identity(row): row for row in ledger.read(REPOSITORY / "results")}
    assert {run: rows[run]["mean"] for run in REPLACED} == REPLACED
    assert all(rows[run]["superseded"]["reason"] for run in REPLACED)
    first = [rows[run] for run in FIRST.split("\n") if run]
    counts = {
        name: [
            [row["summaries"][name]["verdict"] for row in first].count(kind)
            for kind in tp.get_args(paper.Verdict)
        ]
        for name in stats.SUMMARIES
    }
    assert counts == {
        "mean": [8, 2, 4],
        "max": [14, 0, 0],
        "final": [13, 1, 0],
        "absolute": [14, 0, 0],
        "iqm": [11, 1, 2],
    }
    for row in first:
        others = {text.partition(" ")[0] for text in row["deviations"]}
        assert {"learning_rate_horizon", "agent_order", "compute_dtype"} <= others
        assert ("num_epochs" in others) == row["task"].startswith("lbf/")
        mpe = {"discount", "value_weight", "entropy_weight", "clip_value"} <= others
        assert mpe == row["task"].startswith("mpe/") and "advantage_floor" not in others
    assert {row["task"] for row in first if row["by_rounding"]} == {
        "lbf/10x10-3p-3f",
        "lbf/15x15-4p-3f",
        "lbf/2s-10x10-3p-3f",
        "connector/con-10x10x10a",
    }


def test_a_checkout_has_one_ledger_and_a_built_package_its_own(tmp_path):
    assert ledger.shipped() == REPOSITORY / "results" / ledger.LEDGER
    built = tmp_path / "reports" / ledger.LEDGER
    built.parent.mkdir()
    built.touch()
    assert ledger.shipped(tmp_path) == built


# A real run, published and run again.


@pytest.fixture
def committed(monkeypatch):
    """The code counts as committed, though it may be worked on, or be no part of a checkout."""
    monkeypatch.setattr(provenance, "commit_of", {provenance.source(): "c" * 40}.get)


@pytest.fixture
def policies(committed, monkeypatch):
    """Runs made without training have policies, too."""

    def export(directory: Path) -> Path:
        for seed in runs.read_config(directory).run.seeds:
            (directory / "policies" / str(seed)).mkdir(parents=True, exist_ok=True)
            (directory / "policies" / str(seed) / "weights.safetensors").write_bytes(b"%d" % seed)
        return directory / "policies"

    monkeypatch.setattr("sable.runs.policy.collect_policies", export)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A short run of two seeds."""
    out = tmp_path_factory.mktemp("trained")
    return sable.train(
        "probe/bandit", seeds=(0, 1), out=out, name="run", quiet=True, video=False, **SMALL
    ).directory


@pytest.fixture
def place(tmp_path, monkeypatch, trained, committed) -> Path:
    """A folder with a page and a ledger of one row, the run it was made of gone."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (tmp_path / "docs").mkdir()
    (tmp_path / results_page.PAGE).write_text(PAGE)
    monkeypatch.chdir(tmp_path)
    assert main(["publish", "run", "--allow-deviations"]) == 0
    shutil.rmtree(run)
    return tmp_path


ROW = "probe/bandit:ippo"


def test_a_row_says_what_ran_and_what_came_out(place, trained):
    (row,) = ledger.read()
    summary, meta = runs.read_summary(trained), runs.read_meta(trained)
    assert row["row"] == ROW and row["commit"] == "c" * 40 and row["earlier_commits"] == []
    assert row["sources"] == [meta["source"]] == [provenance.source()]
    assert (row["seeds"], row["absolute_return"]) == ([0, 1], summary["absolute_return"])
    estimate = stats.estimate({"x": summary["absolute_return"]}, stats.mean)
    assert [row["mean"], *row["interval"]] == pytest.approx(list(estimate), rel=1e-5)
    assert (row["device"], row["jax"], row["date"]) == (
        "cpu",
        meta["versions"]["jax"],
        meta["finished"][:10],
    )
    assert row["device_minutes"] == pytest.approx(summary["wall_seconds"] / 60, rel=1e-5)
    assert row["steps_per_second"] == pytest.approx(summary["steps_per_second"], rel=1e-5)
    assert row["paper"] is None and row["verdict"] is None
    outside = ledger.outside_protocol(row)
    assert {text.split()[0] for text in outside} == {*protocol.PROTOCOL} - {"env_options"}
    others = {text for text in row["deviations"] if text not in outside}
    assert {"num_envs 4 (paper: 128)", "policy_layers 8 (paper: 128 128)"} <= others
    assert settings.from_dict(row["settings"]) == runs.read_config(trained)


def test_what_is_kept_is_small_says_nothing_of_the_machine_and_makes_the_same_report(place, trained):
    kept = place / "results" / "probe" / "bandit" / "ippo"
    names = {"config.json", "meta.json", "summary.json", "metrics.jsonl.gz", "sums.json"}
    assert {path.name for path in kept.iterdir()} == names | {"policies"}
    files = {"policy.json", "weights.safetensors"}
    assert {path.name for path in kept.glob("policies/*/*")} == files
    assert {path.name for path in kept.glob("policies/*")} == {"0", "1"}
    assert not {"command", "platform"} & runs.read_meta(kept).keys()
    assert str(trained.parent) not in "".join(path.read_text() for path in kept.rglob("*.json"))
    assert runs.read_metrics(kept) == runs.read_metrics(trained)
    ours, theirs = (results.read([path]) for path in (place / "results", trained))
    assert list(ours.costs) == list(theirs.costs) and ours.notes == theirs.notes == []
    for one, other in zip(ours.series, theirs.series, strict=True):
        assert one.returns.tolist() == other.returns.tolist() and one.absolute == other.absolute
    assert main(["report", "results", "-o", "report"]) == 0


def test_the_page_shows_the_row_and_keeps_the_rest(place):
    text = (place / results_page.PAGE).read_text()
    (row,) = ledger.read()
    assert text.startswith("# Results\n") and text.endswith("\n\nThe rest.\n")
    assert results_page.section_of(text) == results_page.section([row])
    low, high = row["interval"]
    assert f"| `{ROW}` | {row['mean']:.2f} [{low:.2f}, {high:.2f}] |" in text
    assert f"`{row['command']}`" in text and "is not by the protocol: total_steps 640" in text
    assert b"<svg" in (place / "docs" / "figures" / "probe.svg").read_bytes()


def test_whatever_is_changed_by_hand_is_found(place):
    kept, file = place / "results" / "probe" / "bandit" / "ippo", place / "results" / ledger.LEDGER
    assert ledger.find_mistakes(place / "results") == []
    page = place / results_page.PAGE
    page.write_text(page.read_text().replace("| cpu", "| H200").replace("Rows: 1", "Rows: 2"))
    assert results_page.section_of(page.read_text()) != results_page.section(ledger.read())
    whole = file.read_text()
    names = ["mean", "interval", "seeds", "absolute_return", "device", "config_hash", "steps_per_second"]
    for name in (*names, "deviations", "summaries", "verdict", "paper"):
        row = json.loads(whole)
        changed = {"interval": [0.0, 1.5], "mean": 2.0, "absolute_return": [1.0, 1.0], "seeds": [0, 2]}
        changed |= {"deviations": row["deviations"][1:], "paper": {"mean": 1.0, "interval": [0.9, 1.1]}}
        changed["summaries"] = row["summaries"] | {"iqm": row["summaries"]["max"]}
        row[name] = changed.get(name, 7.0 if name == "steps_per_second" else "H200")
        file.write_text(json.dumps(row) + "\n")
        wrong, *_ = ledger.find_mistakes(place / "results")
        assert wrong.startswith(f"{ROW}: its ") and name in wrong
        assert main(["publish"]) == 2
    file.write_text(whole)
    summary = (kept / "summary.json").read_text()
    (kept / "summary.json").write_text(summary.replace('"absolute_return": [', '"absolute_return": [5.0, '))
    assert "its data cannot be used" in ledger.find_mistakes(place / "results")[0]
    (kept / "summary.json").unlink()
    assert "its data cannot be used" in ledger.find_mistakes(place / "results")[0]
    (kept / "summary.json").write_text(summary)
    file.write_text("")
    alone, gone = ledger.find_mistakes(place / "results")
    assert alone == f"{kept}: data without a row"
    assert gone.startswith(f"{ROW} ") and gone.endswith("this run was published and its row is gone")


def test_of_this_ledger_no_row_can_vanish_or_change_its_judgement(monkeypatch):
    """As `mistakes` finds it; the data is read once."""
    results, rows = REPOSITORY / "results", ledger.read(REPOSITORY / "results")
    made = {
        ledger.folder(results, row): {k: v for k, v in row.items() if k not in ledger.NOT_DERIVED}
        for row in rows
    }
    monkeypatch.setattr(ledger, "make_row", lambda directory, *_: made[directory])
    for k, row in enumerate(rows):
        monkeypatch.setattr(ledger, "read", lambda _, k=k: [*rows[:k], *rows[k + 1 :]])
        assert ledger.find_mistakes(results) == [
            f"{ledger.folder(results, row)}: data without a row",
            f"{ledger.identity(row)}: this run was published and its row is gone",
        ]
        for name in ("deviations", "summaries", "verdict"):
            other = row | {name: "another"}
            monkeypatch.setattr(
                ledger, "read", lambda _, k=k, other=other: [*rows[:k], other, *rows[k + 1 :]]
            )
            assert (
                len(wrong := ledger.find_mistakes(results)) == 1 and f"its {name} do not follow" in wrong[0]
            )


# Rows of this ledger: one with every seed's policy, and one that is too wide to keep more than one of them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept", "seeds", "episodes"),
    [
        ("lbf/2s-8x8-2p-2f-coop:mappo", 10, None, 320),
        ("rware/tiny-4ag:sable", 1, None, 32),
        ("rware/tiny-2ag:ippo", 10, [4], 64),
    ],
)
def test_the_policies_of_a_published_row_earn_what_it_says(name, kept, seeds, episodes):
    """Within five standard errors of fresh episodes, and not what another row's earn."""
    row = ledger.require(ledger.read(REPOSITORY / "results"), name)
    assert len(row["policies"]) == kept
    found = sable.evaluate_row(name, seeds=seeds, episodes=episodes, results=REPOSITORY / "results")
    assert list(found.returns) == (seeds or [int(seed) for seed in row["policies"]])
    half = (found.interval[1] - found.interval[0]) / 2
    assert abs(found.difference) < 5 / 1.96 * half + 0.005, found
    assert found.published == {
        seed: row["absolute_return"][row["seeds"].index(seed)] for seed in found.returns
    }


def test_a_row_run_again_gives_the_same_returns_and_is_not_run_a_third_time(place, capsys):
    assert main(["reproduce", ROW, "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 seeds' returns are identical to the last bit" in said
    assert "by 0 [" in said and "which chance explains" in said
    (summary,) = (place / "reproduced").rglob("summary.json")
    before = summary.stat().st_mtime_ns
    file = place / "results" / ledger.LEDGER
    row = json.loads(file.read_text())
    better = [value + 5 for value in row["absolute_return"]]
    file.write_text(json.dumps(row | {"absolute_return": better}) + "\n")
    assert main(["reproduce", ROW, "--quiet"]) == 1
    said = capsys.readouterr().out
    assert "0 of 2 seeds' returns are identical" in said and "5 apart" in said
    assert "by -5 [" in said and "which chance does not explain" in said
    assert summary.stat().st_mtime_ns == before
    assert main(["reproduce", ROW, "--quiet", "--seeds", "1"]) == 2
    assert "was begun with seeds=(0, 1), not (1,); choose another --out" in capsys.readouterr().err


def test_the_policies_of_a_row_are_those_of_its_run_and_are_measured_again(place, trained, capsys):
    (row,) = ledger.read()
    for seed in ("0", "1"):
        kept = sable.load(place / "results" / row["data"] / "policies" / seed)
        best = jax.tree.map(np.array_equal, kept.params, sable.load(trained, seed=int(seed)).params)
        assert kept.seed == int(seed) and all(jax.tree.leaves(best))
    found = sable.evaluate_row(ROW, episodes=200)
    assert found.published == dict(zip(row["seeds"], row["absolute_return"], strict=True))
    exact = sable.evaluate(trained, episodes=2000, seed=5)["return"]
    assert list(found.returns.values()) == pytest.approx(exact, abs=4 * 0.5 / 200**0.5)
    assert main(["reproduce", ROW, "--evaluate", "--episodes", "200", "--seeds", "1"]) in (0, 1)
    said = capsys.readouterr().out
    assert f"{row['absolute_return'][1]:.6g}" in said and "200 fresh episodes of each policy" in said
    assert "         0  " not in said
    better = row | {"absolute_return": [value + 0.5 for value in row["absolute_return"]]}
    (place / "results" / ledger.LEDGER).write_text(ledger.line(better) + "\n")
    assert main(["reproduce", ROW, "--evaluate", "--episodes", "200"]) == 1
    assert "which chance does not explain" in capsys.readouterr().out


def test_a_row_without_policies_or_with_damaged_ones_says_so_in_one_line(place, tmp_path, capsys):
    file, (row,) = place / "results" / ledger.LEDGER, ledger.read()
    weights = place / "results" / row["data"] / "policies" / "1" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "its policies do not follow" in ledger.find_mistakes(place / "results")[0]
    for argv, damage, said in [
        (["--evaluate"], row, "policies/1/weights.safetensors cannot be read: it is damaged"),
        (["--evaluate"], row | {"policies": {}}, f"{ROW} keeps no policies"),
        (["--evaluate", "--seeds", "4"], row, "seeds=4 is none of the seeds"),
        (["--evaluate", "--episodes", "0"], row, "episodes=0"),
        (["--evaluate", "--out", "x"], row, "--out goes without --evaluate"),
        (["--episodes", "3"], row, "--episodes goes with --evaluate"),
        (["--evaluate"], row | {"row": "a/b:c"}, "no row"),
    ]:
        file.write_text(ledger.line(damage) + "\n")
        assert main(["reproduce", ROW, *argv]) == 2, said
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    file.write_text(ledger.line(row) + "\n")
    shutil.rmtree(weights.parent)
    assert main(["reproduce", ROW, "--evaluate"]) == 2
    assert "they lie beside the ledger" in capsys.readouterr().err


def test_a_run_without_checkpoints_is_published_with_the_policies_exported_where_it_ran(
    trained, tmp_path, committed, capsys
):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    where = ["--allow-deviations", "--results", str(tmp_path / "results")]
    assert main(["publish", str(run), *where]) == 2
    assert "keeps no policies: it has neither checkpoints nor policies" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert main(["export", str(trained), "-o", str(run / "policies"), "--every-seed"]) == 0
    assert main(["publish", str(run), *where]) == 0
    (row,) = ledger.read(tmp_path / "results")
    assert set(row["policies"]) == {"0", "1"} and ledger.find_mistakes(tmp_path / "results") == []
    capsys.readouterr()
    shutil.copytree(run / "policies" / "0", run / "policies" / "1", dirs_exist_ok=True)
    assert main(["publish", str(run), *where, "--name", "other"]) == 2
    assert "holds seed 0 alone, not 1" in capsys.readouterr().err
    foreign = tmp_path / "foreign" / "0"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    for argv, said in [
        (["-o", str(foreign.parent), "--every-seed"], "already holds something"),
        (["-o", str(foreign), "--every-seed", "--seed", "1"], "goes with no seed"),
        (["-o", str(foreign), "--every-seed", "--format", "onnx"], "safetensors alone"),
    ]:
        assert main(["export", str(trained), *argv]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_reproducing_can_be_stopped_and_goes_on(place):
    file = place / "results" / ledger.LEDGER
    row = json.loads(file.read_text())
    row["settings"]["run"] |= {"total_steps": 400_000, "num_evaluations": 40}
    file.write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "sable", "reproduce", ROW, "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (found := [*Path("reproduced").glob("*/*/*/*/checkpoints/0*")]):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM and re.search(
        "same command goes on from here|sable train --resume", said
    )
    directory = found[0].parents[1]
    before = runs.read_metrics(directory)
    assert before and not (directory / "summary.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    returns = runs.read_summary(directory)["absolute_return"]
    _, low, high = (round(x, 2) for x in stats.difference(returns, row["absolute_return"]))
    explained = "explains" if low <= 0 <= high else "does not explain"
    assert done.returncode == (explained != "explains") and f"which chance {explained}" in done.stdout
    assert runs.read_metrics(directory)[: len(before)] == before  # times included: not run again


def test_rows_are_listed_and_mistakes_named_in_one_line(place, capsys):
    capsys.readouterr()
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith(f"{ROW}  ") and "not the protocol" in listed and "min on cpu" in listed
    file = place / "results" / ledger.LEDGER
    whole = file.read_text()
    for argv, damage, said in [
        (["probe/bandit"], whole, f"no row 'probe/bandit'; did you mean '{ROW}'?"),
        (["prob/bandit:ipo"], whole, f"did you mean '{ROW}'?"),
        ([ROW, "--seeds", "7"], whole, "seeds=7 is none of the seeds of probe/bandit:ippo: 0 1"),
        ([ROW, "--seeds", "x"], whole, "seeds='x' is none of the seeds"),
        ([ROW, "--seeds", "0", "0"], whole, "none twice"),
        ([ROW, "--results", "nowhere"], whole, "nothing is published yet"),
        ([ROW], "{", "line 1 is not a JSON object"),
        ([ROW], whole + whole, f"two rows {ROW}"),
        ([ROW], whole.replace('"mean"', '"median"'), "line 1 has no proper 'mean'"),
        ([ROW], whole.replace('"seeds": [0, 1]', '"seeds": [0]'), "has not one return for each of its seeds"),
        ([ROW], whole.replace('"total_steps": 640', '"total_steps": -1'), "total_steps=-1"),
    ]:
        file.write_text(damage)
        assert main(["reproduce", *argv]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert not (place / "reproduced").exists()


def test_without_a_ledger_here_the_one_that_came_with_sable_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ledger.read() == ledger.read(REPOSITORY / "results")


# What is refused, and what a row is called; runs as training leaves them, without training.


def finished(out: Path, config: SystemConfig = SableConfig(), *, absolute: float = 1.0, **fields) -> Path:  # noqa: B008
    """A finished run by the protocol, with two evaluations."""
    run = RunConfig(**{"task": TASK, "seeds": tuple(range(10))} | fields)
    directory = runs.create(out, Config(run, config), str(len(list(out.glob("*/*/*/*")))))
    rows = [
        {"seed": seed, "env_steps": steps, "wall_seconds": 60.0, "evaluation/return": 0.5}
        for steps in (1000, 2000)
        for seed in run.seeds
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    took = {"steps_per_second": 1e6, "wall_seconds": 90.0, "halted_seeds": []}
    runs.finish(directory, {"absolute_return": [absolute] * len(run.seeds), **took})
    return directory


@pytest.mark.parametrize(
    ("absolute", "verdict", "by_rounding"),
    [(1.0, "not below", False), (0.996, "not below", True), (0.9, "below", False)],
)
def test_a_run_by_the_protocol_is_judged_by_the_papers_figure(
    tmp_path, policies, absolute, verdict, by_rounding
):
    sable.publish(finished(tmp_path, absolute=absolute), results=tmp_path / "results")
    (row,) = ledger.read(tmp_path / "results")
    theirs = paper.figures()["absolute", TASK, "sable"]
    assert row["paper"] == {"mean": theirs.value, "interval": [theirs.low, theirs.high]}
    assert (row["row"], row["verdict"], row["by_rounding"]) == (f"{TASK}:sable", verdict, by_rounding)
    assert ledger.outside_protocol(row) == []
    assert row["command"].startswith(f"sable train {TASK} --num-seeds 10")
    section = results_page.section([row])
    assert ("| not below, by rounding |" in section) == by_rounding and f"| {verdict}" in section
    assert "not by the protocol" not in section


def test_device_hours_are_those_of_all_devices_by_kind_and_of_sable_by_themselves(tmp_path, policies):
    folders = [finished(tmp_path, devices=2), finished(tmp_path, ActorCriticConfig(), system="ippo")]
    for directory, kind in zip(folders, ("H200", "cpu"), strict=True):
        meta = runs.read_meta(directory)
        meta |= {"device": {"kind": kind, "count": 4}}
        sums.remove(directory)
        (directory / "meta.json").write_text(json.dumps(meta))
    rows, _ = sable.publish(*folders, results=tmp_path / "results")
    assert [row["device_minutes"] for row in rows] == [3.0, 1.5]  # of runs of 90 seconds
    section = results_page.section(rows)
    assert "Device hours: 0.05 on H200, 0.03 on cpu; superseded rows: 0." in section
    assert "Sable on 1 of the paper's 45 tasks: 0.05 on H200" in section


def test_variants_have_rows_of_their_own_beside_the_same_figure_of_the_paper(tmp_path, policies):
    folders = (
        finished(tmp_path),
        finished(tmp_path, SableConfig(memory=False)),
        finished(tmp_path, label="sable x=[1]"),
    )
    rows, page = sable.publish(*folders, results=tmp_path / "results")
    assert page is None
    assert [row["row"] for row in rows] == [
        f"{TASK}:{name}" for name in ("sable", "sable-no-memory", "sable-x=-1")
    ]
    assert len({json.dumps(row["paper"]) for row in rows}) == 1
    assert ledger.find_mistakes(tmp_path / "results") == []
    odd = finished(tmp_path, task="mabrax/humanoid_9|8")
    (row,), _ = sable.publish(odd, results=tmp_path / "results", name="mine")
    assert row["row"] == "mabrax/humanoid_9-8:mine" and row["task"] == "mabrax/humanoid_9|8"
    assert "9\\|8" in results_page.section([row]) and row["paper"] is not None


def test_what_may_not_be_published_is_refused_in_one_line_and_nothing_changes(
    tmp_path, policies, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    good, again = finished(tmp_path), finished(tmp_path)
    assert main(["publish", str(good)]) == 0
    before = {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()}
    unfinished, halted, short = (finished(tmp_path, task="lbf/2s-10x10-3p-3f") for _ in range(3))
    (unfinished / "summary.json").unlink()
    summary = json.loads((halted / "summary.json").read_text())
    (halted / "summary.json").write_text(json.dumps(summary | {"absolute_return": [1.0] * 9 + [None]}))
    sums.write(halted)
    few = finished(tmp_path, seeds=(3, 4), task="lbf/2s-10x10-3p-3f")
    other = finished(tmp_path, total_steps=1000, env_options=("reward=mean",), task="mpe/simple_spread_3ag")
    unknown = finished(tmp_path, task="lbf/2s-10x10-3p-3f")
    meta = json.loads((unknown / "meta.json").read_text())
    (unknown / "meta.json").write_text(json.dumps({key: meta[key] for key in meta if key != "source"}))
    sums.write(unknown)
    for argv, said in [
        ([again], f"{TASK}:sable is published already, of {meta['finished'][:10]}"),
        ([again, "--replace"], "same settings and code; every run counts"),
        ([short, unfinished], "the run has not finished"),
        ([short, halted], "seed 9: its absolute metric is missing"),
        ([short, few], "not by the paper's protocol: seeds 3 4; with --allow-deviations"),
        ([short, other], "total_steps 1000, env_options reward=mean"),
        ([short, unknown], "ran code that no commit"),
        ([short, short], "is given twice"),
        (["results/lbf/2s-8x8-2p-2f-coop/sable", "--name", "x"], "it is not as training left it"),
    ]:
        capsys.readouterr()
        assert main(["publish", *map(str, argv)]) == 2, said
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
        assert {path: path.read_bytes() for path in Path("results").rglob("*") if path.is_file()} == before


def test_a_row_gives_way_to_one_of_other_settings_or_code_and_stays(tmp_path, policies, monkeypatch, capsys):
    place = tmp_path / "results"
    first, second = finished(tmp_path), finished(tmp_path, SableConfig(learning_rate=1e-3), absolute=0.75)
    sable.publish(first, results=place)
    (before,) = ledger.read(place)
    sable.publish(second, results=place, replace=True)
    row, old = ledger.read(place)
    assert row["mean"] == 0.75 and row["settings"]["config"]["learning_rate"] == 1e-3
    assert old["superseded"] == {"row": row["row"], "reason": "run again with another learning_rate"}
    changed = {"row": f"{row['row']}.1", "data": f"superseded/{TASK}/sable.1"}
    assert old == before | changed | {"superseded": old["superseded"]}
    assert len(list((place / old["data"] / "policies").glob("*/*"))) == 10
    third = finished(tmp_path, SableConfig(learning_rate=1e-3), absolute=0.5)
    meta = runs.read_meta(third)
    (third / "meta.json").write_text(json.dumps(meta | {"source": "later"}))
    sums.write(third)
    monkeypatch.setattr(provenance, "commit_of", lambda source: "d" * 40)
    sable.publish(third, results=place, replace=True, reason="the pool | was another")
    rows = ledger.read(place)
    assert [one["mean"] for one in rows] == [0.5, 0.75, 1.0] and ledger.find_mistakes(place) == []
    assert [one["row"].rpartition(":")[2] for one in rows] == ["sable", "sable.2", "sable.1"]
    section = results_page.section(rows)
    assert "`sable.2` | 0.75 [0.75, 0.75] | the pool \\| was another" in section.replace(f"{TASK}:", "")
    assert "Rows: 1, of which 1 are" in section and "| absolute metric | 0 | 0 | 0 | 1 |" in section
    # What gave way once is not published again, and a report leaves it out.
    assert main(["publish", str(first), "--results", str(place), "--replace"]) == 2
    assert "every run counts" in capsys.readouterr().err
    found = results.read([place])
    assert [one.absolute for one in found.series] == [0.5] * 10 and len(found.notes) == 2
    # Published as well as superseded: none goes missing unseen.
    (place / ledger.LEDGER).write_text(ledger.line(rows[0]) + "\n" + ledger.line(rows[2]) + "\n")
    said = ledger.find_mistakes(place)
    assert len(said) == 2 and "data without a row" in said[0] and said[1].startswith(f"{TASK}:sable ")
    assert "its row is gone" in said[1]


def test_an_interrupted_replacement_is_made_whole_by_the_next(tmp_path, policies, monkeypatch):
    place = tmp_path / "results"
    first, second = finished(tmp_path), finished(tmp_path, SableConfig(learning_rate=1e-3), absolute=0.75)
    sable.publish(first, results=place)
    (before,) = ledger.read(place)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ledger, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        sable.publish(second, results=place, replace=True)
    sable.publish(second, results=place, replace=True)
    row, old = ledger.read(place)
    assert (row["mean"], old["mean"]) == (0.75, before["mean"]) and ledger.find_mistakes(place) == []


def test_rows_are_made_anew_from_their_data(tmp_path, policies):
    place = tmp_path / "results"
    (row,), _ = sable.publish(finished(tmp_path), results=place)
    old = {name: row[name] for name in row if name not in ("summaries", "policies", "by_rounding")}
    (place / ledger.LEDGER).write_text(json.dumps(old | {"deviations": [], "verdict": "at or above"}) + "\n")
    assert "sable publish --remake" in ledger.find_mistakes(place)[0]
    assert main(["publish", "--remake", "--results", str(place)]) == 0
    assert ledger.read(place) == [row] and ledger.find_mistakes(place) == []


def test_a_run_that_was_resumed_with_other_code_names_all_its_commits(tmp_path, policies, monkeypatch):
    directory = finished(tmp_path)
    source = provenance.source()
    runs.note_resumption(directory, {**circumstances.describe(), "source": "later"})
    sums.write(directory)
    monkeypatch.setattr(provenance, "commit_of", {source: "a" * 40, "later": "b" * 40}.get)
    (row,), _ = sable.publish(directory, results=tmp_path / "results")
    assert (row["earlier_commits"], row["commit"]) == (["a" * 40], "b" * 40)
    assert ledger.find_mistakes(tmp_path / "results") == []
    assert "command" not in runs.read_meta(tmp_path / "results" / row["data"])["resumed"][0]


# The parts.


@pytest.mark.parametrize(
    "config",
    [
        Config(RunConfig(task=TASK, seeds=(0, 1, 2)), SableConfig()),
        Config(
            RunConfig(task="rware/tiny-4ag", seeds=(4, 8), total_steps=1000, deterministic=True),
            SableConfig(memory=False),
        ),
        Config(
            RunConfig(task="mpe/simple_spread_3ag", system="ippo", env_options=("reward=mean",)),
            ActorCriticConfig(policy_layers=(8, 9), memory=True, policy_learning_rate=1e-7),
        ),
    ],
)
def test_the_command_of_a_row_has_its_settings(config):
    words = ledger.command(config.run, vars(config.system)).split()[2:]
    given = parse(train_parser(system_of(words)), words)
    found = sable.configure(given.pop("task"), **given)
    assert found == config


def test_the_hash_of_settings_is_of_what_matters_and_stays():
    data = {
        "format": 1,
        "run": {"task": "a/b", "seeds": [0, 1], "video": True, "label": ""},
        "config": {"x": 0.1},
    }
    assert ledger.config_hash(data) == "42733744d0c33848"
    turned = {
        "config": {"x": 0.1},
        "run": {"label": "c", "video": False, "seeds": [0, 1], "task": "a/b"},
        "format": 1,
    }
    assert ledger.config_hash(turned) == ledger.config_hash(data)
    for path, value in ((("run", "seeds"), [1, 0]), (("config", "x"), 0.2), (("config", "y"), 1)):
        changed = {**data, path[0]: {**data[path[0]], path[1]: value}}
        assert ledger.config_hash(changed) != ledger.config_hash(data)


def test_the_commit_of_code_is_found_and_changed_code_has_none(tmp_path):
    package = tmp_path / "src" / "sable"
    (package / "recipes").mkdir(parents=True)
    (package / "__init__.py").write_text("first = 1\n")
    (package / "recipes" / "a.toml").write_text("x = 1\n")
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]

    def commit() -> str:
        for words in (["add", "-A"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
            subprocess.run(["git", *words], cwd=tmp_path, env=clean, check=True)
        return subprocess.check_output(
            ["git", "rev-parse", "HEAD"], cwd=tmp_path, env=clean, text=True
        ).strip()

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, env=clean, check=True)
    first, before = commit(), provenance.source(package)
    (tmp_path / "README.md").write_text("What is no code.\n")
    (package / "data.csv").write_text("1\n")
    assert provenance.source(package) == before
    documented = commit()
    (package / "recipes" / "a.toml").write_text("x = 2\n")
    changed = provenance.source(package)
    assert changed != before and provenance.commit_of(changed, package) is None
    assert provenance.commit_of(before, package) == documented != first
    assert provenance.git(package) == {"commit": documented, "dirty": True}
    assert provenance.commit_of(changed, package) is None
    assert commit() == provenance.commit_of(changed, package)
    assert provenance.commit_of(before, package) == documented


@pytest.mark.parametrize("seeds", [10, 3, 1])
def test_samples_of_one_system_differ_by_chance_19_times_of_20(seeds):
    rng = np.random.default_rng(0)
    found = [stats.difference(rng.normal(size=seeds), rng.normal(size=10), reps=400) for _ in range(600)]
    by_chance = np.mean([low <= 0 <= high for _, low, high in found])
    assert 0.9 <= by_chance <= 0.98
    apart = [stats.difference(rng.normal(size=seeds) + 4, rng.normal(size=10), reps=400) for _ in range(50)]
    assert np.mean([low > 0 for _, low, _ in apart]) > 0.8


def test_the_difference_of_two_samples_widens_with_fewer_runs():
    row, again = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0]
    value, low, high = stats.difference(again, row)
    assert value == 0.0 and low < 0 < high
    _, lower, higher = stats.difference(again[1:3], row)
    assert lower < low and high < higher
    assert stats.difference([1.0], [1.0]) == (0.0, 0.0, 0.0)
    assert stats.difference([0.5, 0.5], [1.0] * 3) == (-0.5, -0.5, -0.5)


def test_a_row_whose_seeds_agree_is_reproduced_to_the_papers_digits(tmp_path):
    row = {"row": "a/b:c", "seeds": list(range(10)), "absolute_return": [1.0] * 10}
    row["settings"] = settings.to_dict(Config(RunConfig(), SableConfig()))
    found = [reproduce.compare(row, finished(tmp_path, absolute=value)) for value in (0.996, 0.994)]
    assert [one.within for one in found] == [True, False] and found[0].identical == []
    few = reproduce.compare(row, finished(tmp_path, seeds=(3, 4)))
    assert few.within and few.identical == [3, 4] and few.published == {3: 1.0, 4: 1.0}
    said = reproduce.format_reproduction(row, few)
    assert "the mean of 2 seeds differs from that of the row's 10 by 0 [0, 0], which chance explains" in said
    assert math.isclose(found[1].difference, -0.006)


def test_reproducing_takes_the_rows_settings_whatever_the_recipe_says_now(tmp_path, policies):
    config = dataclasses.replace(SableConfig(), learning_rate=0.5)
    (row,), _ = sable.publish(finished(tmp_path, config), results=tmp_path / "results")
    cell = reproduce.cell(row, tmp_path / "again", [3, 1])
    run = cell.config.run
    assert cell.config.system == config and run.seeds == (3, 1) and run.total_steps == 20_000_000
    assert not (tmp_path / "again").exists()

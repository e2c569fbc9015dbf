"""Grids of runs: which cells there are, how far they are, and that killing loses and repeats nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sable
from sable.cli.main import main
from sable.config.schema import Config, RunConfig, SableConfig
from sable.errors import SableError
from sable.reports import paper
from sable.runs import directory as runs
from sable.studies import benchmark
from sable.studies import grid as studies
from sable.studies.live_table import BenchmarkTable, Status

SMALL = "num-envs=4:rollout-length=4:policy-layers=[8]:critic-layers=[8]"
SYSTEMS = [f"ippo:{SMALL}", f"ippo:{SMALL}:clip-eps=0.1"]
FIELDS = {"num_seeds": 2, "evaluation_episodes": 4, "absolute_episodes": 4, "video": False}


def labels(*wanted: str, systems: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    return [(task, ":".join([v.system, v.name])) for task, v in studies.pairs(wanted, systems)]


def test_the_papers_set_is_what_its_tables_hold_with_and_without_memory():
    found = studies.pairs(["paper"])
    tables = {(task, system) for summary, task, system in paper.figures() if summary == "absolute"}
    assert {(task, variant.system) for task, variant in found} == tables
    assert len({task for task, _ in found}) == 45
    memory = [(task, v.fields["memory"]) for task, v in found if v.system == "ippo"]
    assert len(memory) == 90 and len(set(memory)) == 90
    assert all(not v.fields for _, v in found if v.system in ("mat", "qmix", "masac", "hasac"))


def test_the_other_studies_are_the_papers():
    scaling, ablation, chunk = (studies.pairs([name]) for name in ("scaling", "ablation", "chunk"))
    sizes = {sable.make_env(task).spec.num_agents for task, _ in scaling if task.startswith("neom")}
    assert sizes == {32, 512, 1024} and {v.system for _, v in scaling} == {"sable", "mat", "ippo"}
    assert len(ablation) == 4 * 6 and {v.fields.get("memory") for _, v in ablation} == {None, True, False}
    assert [v.fields["chunk_size"] for _, v in chunk] == [128, 64, 32, 16, 8]
    assert len({v.label for _, v in chunk}) == 5


def test_tasks_come_by_name_and_pattern_and_systems_where_they_can():
    assert labels("mpe/*", "rware/tiny-2ag", systems=("qmix", "sable:no-memory")) == [
        ("mpe/simple_spread_3ag", "sable:no-memory"),
        ("mpe/simple_spread_5ag", "sable:no-memory"),
        ("mpe/simple_spread_10ag", "sable:no-memory"),
        ("rware/tiny-2ag", "qmix:default"),
        ("rware/tiny-2ag", "sable:no-memory"),
    ]
    assert {system.split(":")[0] for _, system in labels("rware/tiny-2ag")} == {
        "sable", "mat", "ippo", "mappo", "qmix",
    }  # fmt: skip
    assert len(labels("rware/tiny-2ag", "rware/tiny-*", systems=("mat",))) == 4


@pytest.mark.parametrize(
    ("wanted", "systems", "said"),
    [
        ([], [], "nothing to compare.*paper, scaling, ablation, chunk"),
        (["rwar/*"], [], "no task matches 'rwar/"),
        (["rware/tinny-2ag"], [], "rware/tinny-2ag"),
        (["rware/tiny-2ag"], ["sabel"], "unknown system 'sabel'.*did you mean 'sable'"),
        (["rware/tiny-2ag"], ["sable:memry"], "no field 'memry'; did you mean 'memory'"),
        (["rware/tiny-2ag"], ["sable:embed-dim=wide"], "embed_dim='wide': expected a whole number"),
        (["mpe/*"], ["qmix"], "qmix needs discrete actions"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(tmp_path, capsys, wanted, systems, said):
    with pytest.raises(SableError, match=said):
        sable.grid(*wanted, systems=systems, out=tmp_path)
    arguments = [*wanted, *(["--systems", *systems] if systems else []), "--out", str(tmp_path)]
    assert main(["benchmark", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_cells_follow_the_protocol_and_the_same_settings_are_one_cell(tmp_path):
    cells = sable.grid("lbf/2s-8x8-2p-2f-coop", systems=["ippo", "ippo:memory", "sable"], out=tmp_path)
    assert [cell.label for cell in cells] == ["ippo memory", "sable"]  # by the recipe, ippo has memory there
    run = cells[1].config.run
    assert run.seeds == tuple(range(10)) and run.total_steps == 20_000_000
    assert cells[1].directory == tmp_path / "lbf" / "2s-8x8-2p-2f-coop" / "sable" / "default"


def test_a_cell_begun_with_other_settings_is_refused(tmp_path):
    (cell,) = sable.grid("probe/bandit", systems=["sable"], out=tmp_path, total_steps=1000)
    benchmark.prepare(cell)
    assert sable.grid("probe/bandit", systems=["sable"], out=tmp_path, total_steps=1000) == [cell]
    with pytest.raises(SableError, match="begun with total_steps=1000, not 2000; choose another --out"):
        sable.grid("probe/bandit", systems=["sable"], out=tmp_path, total_steps=2000)


@pytest.mark.parametrize(("steps", "refused"), [(1000, False), (2000, True)])
def test_a_cell_another_worker_has_just_begun_is_his(tmp_path, monkeypatch, steps, refused):
    """Both found the folder empty; the slower one goes on with it only if it wants the same settings."""
    mine, his = (
        sable.grid("probe/bandit", systems=["sable"], out=tmp_path, total_steps=n)[0] for n in (1000, steps)
    )
    real = runs.claim_new

    def slower(*arguments):
        monkeypatch.undo()
        benchmark.prepare(his)
        return real(*arguments)

    monkeypatch.setattr(runs, "claim_new", slower)
    if refused:
        with pytest.raises(SableError, match="begun with total_steps=2000, not 1000"):
            benchmark.prepare(mine)
    else:
        assert benchmark.prepare(mine) == his.directory
    assert runs.read_config(his.directory) == his.config


def test_the_state_of_a_cell_is_read_from_its_folder(tmp_path):
    cell = benchmark.Cell(tmp_path, "a", Config(RunConfig(seeds=(0, 1), total_steps=400), SableConfig()))
    assert benchmark.status(cell) == Status("waiting")
    directory = benchmark.prepare(cell)
    assert benchmark.status(cell) == Status("stopped")
    rows = [
        {"seed": seed, "env_steps": 100, "wall_seconds": 1.0, "evaluation/return": seed} for seed in (0, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with runs.claim(directory):
        assert benchmark.status(cell) == Status("running", 0.25, 0.5, 0.5)
    assert benchmark.status(cell).text == "25% 0.5 stopped"
    runs.begin(directory)
    runs.finish(directory, {"absolute_return": [1.0, None]})
    assert benchmark.status(cell) == Status("finished", 1.0, 1.0, 0.0)


def test_the_board_tells_a_pipe_what_changed_and_draws_a_table(capsys):
    board = BenchmarkTable([("a", "rware/tiny-2ag", "sable"), ("b", "rware/tiny-2ag", "mat")])
    with board:
        board.show("a", Status("running"))
        board.show("a", Status("running", 0.5, 1.0))
        board.show("a", Status("finished", 1.0, 21.25, 0.5))
        board.show("b", Status("failed", note="out of memory"))
    assert capsys.readouterr().out.splitlines() == [
        "[0/2] rware/tiny-2ag · sable: running",
        "[1/2] rware/tiny-2ag · sable: finished: 21.25 ± 0.5",
        "[1/2] rware/tiny-2ag · mat: failed: out of memory",
    ]
    from rich.console import Console

    console = Console(width=80, height=24)
    with console.capture() as captured:
        console.print(board.table())
    table = captured.get()
    assert "1 of 2 cells finished   1 failed" in table
    assert table.split("\n")[2].split() == ["rware/tiny-2ag", "21.25", "failed"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> list[str]:
    """The arguments of a grid of two cells that train for some seconds."""
    out = tmp_path_factory.mktemp("grid")
    return arguments(out, total_steps=40_000, num_evaluations=40)


def arguments(out: Path, **fields) -> list[str]:
    given = {name: value for name, value in (FIELDS | fields | {"out": out}).items() if name != "video"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return ["probe/bandit", "--systems", *SYSTEMS, "--no-video", *flags]


def start(argv: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "sable", "benchmark", *argv], stdout=subprocess.PIPE)


def cells_of(argv: list[str]) -> list[benchmark.Cell]:
    fields = {"total_steps": 40_000, "num_evaluations": 40} | FIELDS
    return sable.grid("probe/bandit", systems=SYSTEMS, out=argv[-1].partition("=")[2], **fields)


def until(condition, process: subprocess.Popen | None = None, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        assert process is None or process.poll() is None, "the process ended before"
        time.sleep(0.05)


def kill_worker(cell: benchmark.Cell) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended with its benchmark
        os.kill(int(runs.holder(cell.directory).split()[0]), signal.SIGKILL)


def has_checkpoint(cell: benchmark.Cell, after: int = 0) -> bool:
    """Whether one is saved after so many updates and evaluations."""
    return any(int(path.name) > after for path in (cell.directory / "checkpoints").glob("0*"))


def assert_complete(cell: benchmark.Cell) -> None:
    rows = runs.read_metrics(cell.directory)
    found = [(row["env_steps"], row["seed"]) for row in rows]
    assert cell.finished and found == sorted(set(found)) and len(found) == 2 * cell.config.run.num_evaluations


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_and_neither_loses_nor_repeats_a_cell(grid):
    first, second = cells_of(grid)
    with start(grid) as process:
        until(lambda: has_checkpoint(second), process)
        process.kill()  # its worker ends with it, or is killed too
    kill_worker(second)
    until(lambda: not runs.is_claimed(second.directory))
    summary = (first.directory / "summary.json").stat()
    before = runs.read_metrics(second.directory)
    kept = [row for row in before if row["env_steps"] < before[-1]["env_steps"]]
    assert not second.finished
    with start(grid) as process:
        out = process.communicate()[0].decode()
    assert process.returncode == 0 and "report.html" in out
    assert (first.directory / "summary.json").stat().st_mtime_ns == summary.st_mtime_ns
    assert runs.read_metrics(second.directory)[: len(kept)] == kept  # times included: not run again
    for cell in (first, second):
        assert_complete(cell)


def test_a_failing_cell_is_named_the_others_go_on_and_it_is_tried_again_next_time(grid, tmp_path, capsys):
    argv = [*arguments(tmp_path, total_steps=160, num_evaluations=1)]
    first, second = sable.grid(
        "probe/bandit", systems=SYSTEMS, out=tmp_path, total_steps=160, num_evaluations=1, **FIELDS
    )
    benchmark.prepare(first)
    (first.directory / "checkpoints" / "0000000001").mkdir(parents=True)  # damaged: it holds nothing
    assert main(["benchmark", *argv, "--quiet", "--jobs", "2"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "failed: probe/bandit" in said and "is damaged" in said
    assert second.finished and not first.finished
    (first.directory / "checkpoints" / "0000000001").rmdir()
    assert main(["benchmark", *argv, "--quiet", "--cell", "0"]) == 0
    assert first.finished


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("kill -KILL $$", "its process ended (SIGKILL, as where memory has run out): what(): std::bad_alloc"),
        ("kill -ABRT $$", "its process ended (SIGABRT, as of std::bad_alloc): what(): std::bad_alloc"),
        ("exit 3", "what(): std::bad_alloc"),
    ],
)
def test_how_a_cells_process_ended_is_said(tmp_path, monkeypatch, last, words):
    (cell,) = sable.grid("probe/bandit", systems=["ippo"], out=tmp_path / "out")
    benchmark.prepare(cell)
    (cell.directory / benchmark.LOG).write_text("of an earlier process\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '  what():  std::bad_alloc' >&2\n{last}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (line,) = benchmark.work([cell], quiet=True).failures
    assert line == f"probe/bandit ippo: {words}"
    python.write_text(f"#!/bin/sh\n{last}\n")  # and says nothing
    (line,) = benchmark.work([cell], quiet=True).failures
    assert "its process ended (" in line and "what()" not in line and "earlier" not in line


@pytest.mark.slow
def test_cells_at_once_share_the_machine_are_all_stopped_and_saved_and_go_on(tmp_path):
    argv = [*arguments(tmp_path, total_steps=400_000, num_evaluations=40), "--jobs", "2"]
    systems = [*SYSTEMS, f"ippo:{SMALL}:clip-eps=0.3"]
    argv[argv.index("--systems") + 1 : argv.index("--no-video")] = systems
    fields = {"total_steps": 400_000, "num_evaluations": 40} | FIELDS
    first, second, third = cells = sable.grid("probe/bandit", systems=systems, out=tmp_path, **fields)
    with start(argv) as process:
        until(lambda: has_checkpoint(first) and has_checkpoint(second), process)
        for cell in (first, second):
            worker = int(runs.holder(cell.directory).split()[0])
            assert b"XLA_PYTHON_CLIENT_PREALLOCATE=false" in Path(f"/proc/{worker}/environ").read_bytes()
        assert not (third.directory / "config.json").exists()  # in their order, two at a time
        process.terminate()
        out = process.communicate(timeout=30)[0].decode()
    assert process.returncode == 128 + signal.SIGTERM
    assert [line.split(": ")[1] for line in out.splitlines()[:2]] == ["running", "running"]
    before = {}
    for cell in (first, second):
        assert not runs.is_claimed(cell.directory) and not cell.finished
        assert "interrupted; go on with" in (cell.directory / benchmark.LOG).read_text()
        before[cell] = runs.read_metrics(cell.directory)
        assert before[cell]
    with start(argv) as process:
        process.communicate()
    assert process.returncode == 0
    for cell in cells:
        assert_complete(cell)
        kept = before.get(cell, [])
        assert runs.read_metrics(cell.directory)[: len(kept)] == kept  # times included: not run again


@pytest.mark.slow
def test_a_benchmark_killed_at_any_moment_ends_as_one_that_was_not(grid, tmp_path):
    """Ten kills at various moments, of the benchmark, of its worker, or of both."""
    with start(grid) as whole:
        whole.communicate()
    argv = arguments(tmp_path, total_steps=40_000, num_evaluations=40)
    cells = cells_of(argv)
    moments = iter(range(10))
    while any(not cell.finished for cell in cells):
        with start(argv) as process:
            if (number := next(moments, None)) is None:
                process.wait()
                break
            time.sleep(1 + (number * 7919) % 11)
            if number % 3:
                process.kill()
            for cell in cells:
                if number % 3 != 1 and runs.is_claimed(cell.directory):
                    kill_worker(cell)
            process.kill()
    until(lambda: all(cell.finished for cell in cells))
    for cell, whole in zip(cells, cells_of(grid), strict=True):
        assert_complete(cell)
        assert [row["evaluation/return"] for row in runs.read_metrics(cell.directory)] == [
            row["evaluation/return"] for row in runs.read_metrics(whole.directory)
        ]


@pytest.mark.slow
def test_ray_tries_a_lost_cell_again_and_it_goes_on_from_its_checkpoint(tmp_path):
    argv = [*arguments(tmp_path, total_steps=40_000, num_evaluations=40), "--launcher", "ray"]
    cells = cells_of(argv[:-2])
    with start(argv) as process:
        # 62 updates before the first evaluation; killed between the two, the run would evaluate again
        until(lambda: has_checkpoint(cells[0], after=62), process)
        before = runs.read_metrics(cells[0].directory)[:2]
        kill_worker(cells[0])
        process.communicate()
    assert process.returncode == 0
    for cell in cells:
        assert_complete(cell)
    assert runs.read_metrics(cells[0].directory)[:2] == before  # times included: not run again
    assert "resumed" in json.loads((cells[0].directory / "meta.json").read_text())

"""The sinks: what is on disk after an evaluation, a resume and a crash, and what the user sees."""

import gzip
import json
import math
import sys

import numpy as np
import pytest

from sable.errors import SableError
from sable.runs.curve import draw_curve
from sable.training.console import sparkline
from sable.training.loggers.logger import Logger, read_rows


def make(directory, **changes) -> Logger:
    return Logger(directory, **{"title": "sable on a/b", "seeds": (3, 5), "total_steps": 400} | changes)


def evaluate(logger: Logger, *steps: int) -> None:
    for step in steps:
        logger.progress(step, step / 100)
        logger.evaluation(
            step, {"evaluation/return": np.array([step / 400, 0.0]), "loss/actor": np.array([1, 2])}
        )


def steps_of(directory) -> list[int]:
    return [row["env_steps"] for row in read_rows(directory / "metrics.jsonl")]


def events(directory) -> list:
    """The events in the TensorBoard files, older files first."""
    from tensorboardX.proto import event_pb2

    parse = event_pb2.Event.FromString  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for file in sorted((directory / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:  # length (8 bytes), its checksum (4), the event, its checksum (4)
            length = int.from_bytes(data[:8], "little")
            found.append(parse(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_an_evaluation_is_on_disk_as_one_object_per_seed_when_it_returns(tmp_path):
    logger = make(tmp_path)
    logger.evaluation(100, {"evaluation/return": np.array([0.5, np.nan]), "x": np.array([np.inf, 2])})
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logger.close()
    assert (first["seed"], first["env_steps"], first["evaluation/return"], first["x"]) == (3, 100, 0.5, None)
    assert (second["seed"], second["evaluation/return"], second["x"]) == (5, None, 2.0)
    assert first["wall_seconds"] >= 0


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_goes_on(tmp_path):
    logger = make(tmp_path)
    evaluate(logger, 100, 200, 300)
    logger.close()
    before = read_rows(tmp_path / "metrics.jsonl")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"seed": 3, "env_st')  # torn by a crash
    logger = make(tmp_path, resume_steps=200, metrics=None)
    evaluate(logger, 300, 400)
    logger.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert steps_of(tmp_path) == [100, 100, 200, 200, 300, 300, 400, 400]
    assert rows[:4] == before[:4]
    assert all(row["wall_seconds"] >= before[3]["wall_seconds"] for row in rows[4:])


def test_a_fresh_run_starts_with_no_rows(tmp_path):
    for _ in range(2):
        logger = make(tmp_path)
        evaluate(logger, 100)
        logger.close()
    assert steps_of(tmp_path) == [100, 100]


def test_rows_before_a_torn_end_are_read_and_damage_elsewhere_is_refused(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == []
    row = '{"seed": 0, "env_steps": 1, "wall_seconds": 0.5}\n'
    file.write_text(row + row[:20])
    assert len(read_rows(file)) == 1
    file.write_text(row + row[:20] + "\n" + row)
    with pytest.raises(SableError, match="line 2"):
        read_rows(file)


def test_compressed_rows_are_read_where_there_are_no_others_and_damage_is_refused(tmp_path):
    row = b'{"seed": 0, "env_steps": 1, "wall_seconds": 0.5}\n'
    packed = tmp_path / "metrics.jsonl.gz"
    packed.write_bytes(gzip.compress(row * 3))
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3
    for damaged in (b"no gzip", packed.read_bytes()[:-9], packed.read_bytes()[:-1] + b"\1"):
        packed.write_bytes(damaged)
        with pytest.raises(SableError, match=r"metrics.jsonl.gz is damaged"):
            read_rows(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_bytes(row)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_tensorboard_gets_the_mean_and_every_seed(tmp_path):
    with make(tmp_path) as logger:
        evaluate(logger, 100)
    values = {v.tag: v.simple_value for e in events(tmp_path) for v in e.summary.value if e.step == 100}
    assert values["evaluation/return"] == 0.125
    assert (values["seed_3/evaluation/return"], values["seed_5/evaluation/return"]) == (0.25, 0.0)
    assert values["loss/actor"] == 1.5


def test_tensorboard_is_told_from_where_a_resumed_run_goes_on(tmp_path):
    for resume_steps in (0, 200):
        with make(tmp_path, resume_steps=resume_steps) as logger:
            evaluate(logger, 300)
    assert [event.step for event in events(tmp_path) if event.session_log.status] == [201]


def test_piped_output_is_one_plain_line_per_evaluation(tmp_path, capsys):
    logger = make(tmp_path)
    logger.phase("compiling")
    evaluate(logger, 100, 200)
    logger.note("seed 5 halted")
    logger.close()
    title, _, second, note = capsys.readouterr().out.splitlines()
    assert (title, note) == ("sable on a/b", "seed 5 halted")
    for part in ("50%", "200 steps", "200 steps/s", "return 0.250 ± 0.250", "best 0.250", "left"):
        assert part in second
    assert "\x1b" not in second


def test_a_quiet_logger_prints_nothing_but_records(tmp_path, capsys):
    logger = make(tmp_path, quiet=True)
    evaluate(logger, 100)
    logger.note("hello")
    logger.close()
    assert capsys.readouterr() == ("", "")
    assert steps_of(tmp_path) == [100, 100]


def test_a_terminal_gets_a_live_view(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    logger = make(tmp_path)
    evaluate(logger, 100, 400)
    logger.note("[seed 5] halted")
    logger.close()
    out = capsys.readouterr().out
    for part in ("sable on a/b", "400 of 400 steps", "steps/s", "0.500 ± 0.500", "▁█", "[seed 5] halted"):
        assert part in out


def test_pace_counts_all_seeds_and_only_this_process(tmp_path):
    logger = make(tmp_path, resume_steps=200, quiet=True)
    logger.progress(300, 0.5)
    assert logger._progress.steps_per_second == 400
    assert logger._progress.seconds_left == 0.5
    logger.close()


def test_a_seed_that_halted_does_not_hide_the_others(tmp_path, capsys):
    logger = make(tmp_path)
    logger.evaluation(100, {"evaluation/return": np.array([0.5, np.nan])})
    logger.close()
    assert "return 0.500" in capsys.readouterr().out


def test_a_reader_that_goes_away_does_not_stop_training(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise BrokenPipeError

    logger = make(tmp_path)
    monkeypatch.setattr("builtins.print", broken)
    evaluate(logger, 100)
    logger.close()
    assert steps_of(tmp_path) == [100, 100]


def test_sparkline_spans_lowest_to_highest():
    assert sparkline([0, 1]) == "▁█"
    assert sparkline([2, 2, math.nan]) == "▁▁ "
    assert sparkline([math.nan]) == ""
    assert len(sparkline(range(100), width=10)) == 10


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_curve_is_drawn_from_the_metrics_alone(tmp_path, seeds):
    assert draw_curve(tmp_path) is None
    logger = make(tmp_path, seeds=seeds, quiet=True)
    for step in (100, 200, 300):
        logger.evaluation(step, {"evaluation/return": np.full(len(seeds), step / 300)})
    logger.close()
    curve = tmp_path / "curve.png"
    assert draw_curve(tmp_path) == curve and curve.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "config.json").write_text(json.dumps({"run": {"task": "a/b", "system": "sable"}}))
    before = curve.read_bytes()
    assert draw_curve(tmp_path, [1.0, math.nan]) == curve and curve.read_bytes() != before
    assert not list(tmp_path.glob(".*"))

"""What `sable watch` does: play, explain, draw, write; and the short film that training leaves."""

import sys
import typing as tp
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sable.config.schema import RunConfig
from sable.envs.base import Env
from sable.errors import SableError
from sable.files import write_atomically
from sable.runs.policy import Policy, load
from sable.trust import Trust
from sable.viewer import video
from sable.viewer.drawings import choose as drawings
from sable.viewer.explain import explain
from sable.viewer.page import EpisodeView, page
from sable.viewer.record import Recording, episode, episode_key, record
from sable.viewer.video import Clip

FORMATS = ("gif", "mp4", "html")
NAMES = {"gif": "replay.gif", "mp4": "replay.mp4", "html": "replay.html"}
VIDEO, VIDEO_STEPS = "video.gif", 100
"""The film that training leaves, and how much of an episode it shows at most."""

Step = tp.Callable[[int], None]


def watch(
    policy: Policy,
    env: Env,
    out: Path,
    *,
    episodes: int,
    seed: int | None,
    greedy: bool,
    formats: Sequence[str],
    quiet: bool,
) -> list[Path]:
    """Write files into the folder `out`: the episodes as films, and a page to replay them; return their
    paths."""
    if "mp4" in formats:
        video.encoder()  # what is missing is found out before anything is played
    paths = {kind: out / NAMES[kind] for kind in FORMATS if kind in formats}
    for path in paths.values():
        _refuse_foreign(path)
    if policy.spec != env.spec:
        raise SableError(
            f"{policy.config.run.task} is not what this team was trained for: its sizes are others"
        )
    with _progress(quiet) as stage:
        stage("playing", 0)
        key = episode_key(policy.config.run, policy.seed, seed)
        recording = record(env, policy.system, policy.params, key, episodes, policy.config.run, greedy=greedy)
        views = _scenes(policy, env, recording)
        clips = [_make_clip(policy, one) for one in views]
        pictures = sum(len(take.captions) for take in clips)
        try:
            out.mkdir(parents=True, exist_ok=True)
            for kind, path in paths.items():
                if kind == "html":
                    stage("explaining", len(views))
                    how = "most probable actions" if greedy else "actions sampled as in evaluation"
                    text = page(policy, recording, explain(policy, recording), views, how=how, progress=stage)
                    write_atomically(path, text.encode())
                else:
                    stage(f"drawing the {kind.upper()}", pictures)
                    (video.gif if kind == "gif" else video.mp4)(clips, path, progress=stage)
        except OSError as error:
            raise SableError(f"cannot write to {out}: {error.strerror or error}") from None
    return list(paths.values())


def leave_video(directory: Path, env: Env, run: RunConfig) -> str | None:
    """Leave a short film of a run's best parameters, for its first seed, in its folder; what kept us from it,
    in one line, or None. Never raises: a run is worth more than its film."""
    try:
        seed = run.seeds[0]
        policy = load(directory, seed=seed, trust=Trust(system=run.system))
        key = episode_key(policy.config.run, seed, None)
        recording = record(
            env, policy.system, policy.params, key, 1, policy.config.run, most_steps=VIDEO_STEPS
        )
        video.gif([_make_clip(policy, one) for one in _scenes(policy, env, recording)], directory / VIDEO)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"no {VIDEO}: {reason}"
    return None


def _scenes(policy: Policy, env: Env, recording: Recording) -> list[EpisodeView]:
    played = [episode(recording, index) for index in range(recording.num_episodes)]
    return [
        EpisodeView(one, drawings.draw(policy.config.run.task, env, one), k) for k, one in enumerate(played)
    ]


def _make_clip(policy: Policy, one: EpisodeView) -> Clip:
    length = one.episode.length
    returns = [0.0, *np.asarray(one.episode.returns, float)]
    gains = [0.0, *np.asarray(one.episode.reward, float).mean(-1)]

    def caption(t: int) -> str:
        gain = f"   {gains[t]:+.3g}" if gains[t] else ""
        return f"step {t} of {length}   return {returns[t]:.2f}{gain}"

    title = f"{policy.config.run.system} on {policy.config.run.task}"
    return Clip(one.scene, title, [caption(t) for t in range(length + 1)])


def _refuse_foreign(path: Path) -> None:
    """Raise where a file would be replaced that is not ours."""
    if path.exists() and not (path.is_file() and video.MARK in path.read_bytes()):
        raise SableError(f"{path} is there already and no replay of ours; choose another folder with -o")


@contextmanager
def _progress(quiet: bool) -> tp.Iterator[tp.Any]:
    """Yield a function that is told what begins, and how many there are, or how many are done."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def stage(what: str | int, total: int | None = None) -> None:
            if isinstance(what, int):
                bar.update(task, completed=what)
            else:
                bar.update(task, description=what, total=total or None, completed=0)

        yield stage

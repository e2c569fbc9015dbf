"""A trained team, ready to act: numpy in, numpy out. It needs no environment, and none of their suites.

>>> policy = sable.load("runs/lbf/2s-8x8-2p-2f-coop/sable/20261115-120000")
>>> policy.reset(batch=1)
>>> actions = policy.act(views)  # views [1, agents, features] -> actions [1, agents]
"""

import dataclasses
import hashlib
import json
import shutil
import typing as tp
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sable import systems, tensors
from sable.config import checks, renamed
from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, Config, check_actions, settings_of
from sable.envs.base import Env
from sable.envs.python.vector_env import PythonVectorEnv
from sable.errors import SableError
from sable.files import remove_leftovers, write_atomically
from sable.ops import trees as tree
from sable.reports.ledger import POLICIES
from sable.runs import directory as runs
from sable.runs import sums
from sable.training import best, checkpoint, loop
from sable.training.loggers.logger import number
from sable.trust import NOTHING, Trust, Untrusted
from sable.types import EnvSpec, Observation, PyTree, struct

FORMAT = 2
"""2 has a sum of policy.json itself; 1, which is still read, had none."""
WEIGHTS, ABOUT = "weights.safetensors", "policy.json"


@struct
class Memory:
    """All that a team carries from one step to the next, [B, ..]."""

    remembered: PyTree
    time: jax.Array
    key: jax.Array


class Policy:
    """A trained team. `act` keeps the memory inside; `step` is handed it and hands it back."""

    def __init__(self, config: Config, spec: EnvSpec, params: PyTree, seed: int | None = None):
        self.config, self.spec = config, spec
        self.seed = seed  # which of the run's seeds it is
        self.params = jax.tree.map(jnp.asarray, params)  # on the device, once
        self.system = systems.make(config.run.system, spec, config.system)
        self._steps = {greedy: jax.jit(partial(self.decide, greedy=greedy)) for greedy in (False, True)}
        self._memory: Memory | None = None

    def reset(self, batch: int = 1, seed: int = 0) -> None:
        """Begin `batch` episodes side by side; `seed` chooses what is sampled."""
        self._memory = self.initial_memory(batch, seed)

    def act(
        self,
        views: np.ndarray,
        legal: np.ndarray | None = None,
        first: np.ndarray | None = None,
        *,
        greedy: bool = False,
    ) -> np.ndarray:
        """Return the actions [batch, agents, ..] of every agent, given what each sees, [batch, agents,
        features].

        `legal` [batch, agents, actions] says which actions may be taken, all where it is left out; `first`
        [batch] where a new episode begins, which empties that part of the memory. Actions are sampled, or the
        most probable ones with `greedy`.
        """
        if self._memory is None:
            raise SableError("call reset(batch=..) before act: the team must know how many episodes it plays")
        action, self._memory = self.step(self._memory, views, legal, first, greedy=greedy)
        return action

    def step(
        self,
        memory: Memory,
        views: np.ndarray,
        legal: np.ndarray | None = None,
        first: np.ndarray | None = None,
        *,
        greedy: bool = False,
    ) -> tuple[np.ndarray, Memory]:
        """Return `act` for a memory of your own: (the actions, the memory after them)."""
        batch, spec = memory.time.shape[0], self.spec
        legal = np.ones((batch, spec.num_agents, spec.num_actions or 1), bool) if legal is None else legal
        first = np.zeros(batch, bool) if first is None else first
        expected = {
            "views": (views, (batch, spec.num_agents, spec.view_size), np.float32),
            "legal": (legal, (batch, spec.num_agents, spec.num_actions or 1), bool),
            "first": (first, (batch,), bool),
        }
        arrays = [_as_array(name, *what) for name, what in expected.items()]
        action, memory = self._steps[greedy](self.params, memory, *arrays)
        return np.asarray(action), memory

    def initial_memory(self, batch: int = 1, seed: int = 0) -> Memory:
        """Return the memory of `batch` episodes not yet begun."""
        checks.check_count("batch", batch, 1)
        return Memory(
            remembered=self.system.initial_memory(batch),
            time=jnp.zeros(batch, jnp.int32),
            key=jax.random.key(seed),
        )

    def decide(self, params, memory, view, legal, first, *, greedy):
        """`step` as a pure function of arrays: (the actions, the memory after them)."""
        key, sample_key = (memory.key, None) if greedy else jax.random.split(memory.key)
        time = jnp.where(first, 0, memory.time)
        # Only critics look at the global state, and nobody asks for values here.
        size = self.spec.state_size
        state = jnp.zeros((view.shape[0], size)) if size else ()
        observation = Observation(view=view, action_mask=legal, step_count=time, state=state)
        with jax.default_matmul_precision(self.config.run.precision):
            decision = self.system.act(
                params, observation, tree.reset_memory(memory.remembered, first), sample_key
            )
        return decision.action, Memory(remembered=decision.memory, time=time + 1, key=key)


def load(path: str | Path, *, seed: int | None = None, trust: Trust = NOTHING) -> Policy:
    """Return the policy of a run, its best parameters, or of a folder that `export` wrote.

    Of a run's seeds it is the one with the highest absolute return, or the one given. A system from outside
    sable is imported only if `trust` covers it.
    """
    directory = Path(path).expanduser()
    if not (directory / ABOUT).is_file():
        return _load_run(runs.find(directory), seed, trust)
    about = _read_object(directory / ABOUT)
    total = about.pop("sum", None)
    try:
        if about["format"] not in (1, FORMAT) or (
            total != _sum(about) and (about["format"], total) != (1, None)
        ):
            raise SableError("it is not what was written")
        config, spec = settings.from_dict(about["settings"], trust), _parse_spec(about["spec"])
    except Untrusted as error:
        raise Untrusted(f"{directory}: {error}") from None
    except (KeyError, TypeError, SableError) as error:
        raise SableError(f"{directory / ABOUT} cannot be used: {error}") from None
    kinds = _parameters(config, spec)
    params = tensors.read(directory / WEIGHTS, tensors.most_bytes(kinds), str(about.get("weights")))
    params = _current(params, kinds)
    tensors.refuse_unfit(params, kinds, str(directory / WEIGHTS))
    if seed is not None and seed != about.get("seed"):
        raise SableError(f"{directory} holds seed {about.get('seed')} alone, not {seed}")
    return Policy(config, spec, _unflatten(params), about.get("seed"))


def export(
    run: str | Path,
    out: str | Path,
    *,
    seed: int | None = None,
    write: tp.Callable[[Policy, Path], None] | None = None,
    trust: Trust = NOTHING,
) -> Path:
    """Return the folder `out` with the policy of a run in it: weights, settings, sizes, versions, a model
    card; or what `write` makes of the policy in it."""
    directory, folder = runs.find(run), Path(out).expanduser()
    remove_leftovers(folder)
    ours = not folder.exists() or (write is None and _is_ours(folder))
    if not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise SableError(f"{folder} already holds something; choose another folder")
    policy = _load_run(directory, seed, trust)
    runs.read_meta(directory)  # a damaged one is refused before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if write is not None:
            write(policy, folder)
            return folder
        tensors.write(folder / WEIGHTS, jax.device_get(checkpoint.named(policy.params)))
        if (directory / "curve.png").is_file():
            shutil.copyfile(directory / "curve.png", folder / "curve.png")
        write_atomically(folder / "README.md", _model_card(policy, directory).encode())
        _write_about(policy, folder, directory)
    except OSError as error:
        raise SableError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder


def _is_ours(folder: Path) -> bool:
    """Return whether an export wrote all of the folder, or began to."""
    if (folder / ABOUT).is_file():
        return True
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return WEIGHTS in names and names <= {WEIGHTS, "curve.png", "README.md"}


def export_seeds(run: str | Path, out: str | Path, trust: Trust = NOTHING) -> Path:
    """Return the folder `out` with a folder for every seed of a run in it, which `load` reads."""
    directory, folder = runs.find(run), Path(out).expanduser()
    best_params = _read_best(directory, trust)
    places = {seed: folder / str(seed) for seed in best_params.config.run.seeds}
    for place in places.values():
        remove_leftovers(place)
        empty = not place.exists() or (place.is_dir() and not any(place.iterdir()))
        if not empty and not _is_ours(place):
            raise SableError(f"{place} already holds something; choose another folder")
    try:
        for seed, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            policy = _make_policy(best_params, seed, directory)
            tensors.write(place / WEIGHTS, jax.device_get(checkpoint.named(policy.params)))
            _write_about(policy, place, directory)
    except OSError as error:
        raise SableError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder


def collect_policies(run: str | Path) -> Path:
    """Return the folder `policies` in a run, with the best policy of every seed: exported now, or before
    where the run has no checkpoints any more, then perhaps of some seeds only."""
    directory = runs.find(run)
    config, folder = runs.read_config(directory), directory / POLICIES
    if (directory / checkpoint.FOLDER).is_dir():
        export_seeds(directory, folder)
    elif not folder.is_dir():
        raise SableError(
            f"{directory} keeps no policies: it has neither {checkpoint.FOLDER} nor {POLICIES}, as "
            f"`sable export RUN -o RUN/{POLICIES} --every-seed` makes them where the run lies"
        )
    exported = [seed for seed in config.run.seeds if (folder / str(seed)).is_dir()]
    if not exported:
        listed = " ".join(map(str, config.run.seeds))
        raise SableError(f"{folder} has a policy of none of the run's seeds: {listed}")
    for policy in (load(folder / str(seed), seed=seed) for seed in exported):
        if policy.config != config:
            raise SableError(f"{folder / str(policy.seed)} is a policy of another run")
    return folder


def measure(
    policies: tp.Sequence[Policy], env: Env | PythonVectorEnv, *, episodes: int, seed: int | None = None
) -> np.ndarray:
    """Return the returns [policies, episodes] of fresh episodes that policies of one run play."""
    config, spec = policies[0].config, policies[0].spec
    if env.spec != spec:
        raise SableError(
            f"{config.run.task} is another environment now: its sizes are not those of the policy"
        )
    params = jax.tree.map(lambda *each: jnp.stack(each), *(policy.params for policy in policies))
    stats = best.evaluate_params(env, policies[0].system, config, params, episodes=episodes, seed=seed)
    return stats["return"]


def _write_about(policy: Policy, folder: Path, directory: Path) -> None:
    """Write what an export says of its weights, which are there already: what has it is whole."""
    about = {
        "format": FORMAT,
        "settings": settings.to_dict(policy.config),
        "spec": dataclasses.asdict(policy.spec),
        "seed": policy.seed,
        "weights": checkpoint.sha256(folder / WEIGHTS),
        "versions": runs.read_meta(directory).get("versions", {}),
    }
    about = json.loads(json.dumps(runs.to_plain(about)))
    about["sum"] = _sum(about)
    runs.write_json(folder / ABOUT, about)


class BestParams(tp.NamedTuple):
    """The best parameters of a run."""

    config: Config
    spec: EnvSpec
    params: dict[str, np.ndarray]  # [S, ..] each
    ranks: np.ndarray  # [S] the absolute returns, or scores in training where the run has not finished


def _load_run(directory: Path, seed: int | None, trust: Trust) -> Policy:
    """Return a run's policy."""
    return _make_policy(_read_best(directory, trust), seed, directory)


def _make_policy(best_params: BestParams, seed: int | None, directory: Path) -> Policy:
    run = best_params.config.run
    if seed is not None and seed not in run.seeds:
        raise SableError(f"{directory} has no seed {seed}; it has {', '.join(map(str, run.seeds))}")
    index = run.seeds.index(seed) if seed is not None else int(np.nanargmax(best_params.ranks))
    params = {name: x[index] for name, x in best_params.params.items()}
    kinds = _parameters(best_params.config, best_params.spec)
    params = _current(params, kinds)
    tensors.refuse_unfit(params, kinds, f"the newest checkpoint of {directory}")
    return Policy(best_params.config, best_params.spec, _unflatten(params), run.seeds[index])


def _read_best(directory: Path, trust: Trust = NOTHING) -> BestParams:
    config = runs.read_config(directory, trust)
    saved = _read_object(directory / "spec.json")
    if not saved:
        raise SableError(f"{directory} has no spec.json: it was trained by a version that did not keep one")
    try:
        spec = _parse_spec(saved)
    except SableError as error:
        raise SableError(f"{directory / 'spec.json'} is damaged: {error}") from None
    arrays = checkpoint.read(directory, "best.", loop.checkpoint_settings(config, spec))
    scores = np.asarray(arrays["best.score"], float)
    if not np.isfinite(scores).any():
        raise SableError(f"{directory} was stopped before its first evaluation: it has no best parameters")
    absolute = _absolute_returns(directory)
    ranks = absolute if len(absolute) == len(scores) and np.isfinite(absolute).any() else scores
    prefix = "best.params."
    params = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    return BestParams(config, spec, params, ranks)


def _parse_spec(saved: dict[str, tp.Any]) -> EnvSpec:
    """Return what an environment was like, from its description in a file."""
    checks.refuse_unknown(saved, EnvSpec, "of an environment")
    try:
        spec = checks.build(EnvSpec, saved)
    except TypeError:
        raise SableError("it does not say all there is to say of an environment") from None
    if (spec.num_actions > 0) == (spec.action_size > 0):
        raise SableError("one of num_actions and action_size must be 0, and the other not")
    return spec


def _parameters(config: Config, spec: EnvSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and types of the parameters, by name, that the system would begin with; nothing is
    allocated."""
    check_actions(config.run.system, discrete=spec.discrete, task=config.run.task)
    system = systems.make(config.run.system, spec, config.system)
    return checkpoint.named(jax.eval_shape(lambda: system.init(jax.random.key(0), system.hyper).params))


def _current(params: dict[str, np.ndarray], kinds: tp.Mapping[str, tp.Any]) -> dict[str, np.ndarray]:
    """Return parameters by the names that they have now."""
    return {name: params[saved] for name, saved in renamed.leaves(params, kinds).items()}


def _absolute_returns(directory: Path) -> np.ndarray:
    """Return the absolute return of every seed, where the run has finished."""
    sums.refuse_missing(directory / sums.SUMMARY)
    returns = _read_object(directory / "summary.json").get("absolute_return")
    return np.array([number(x) for x in returns] if isinstance(returns, list) else [], float)


def _sum(about: dict[str, tp.Any]) -> str:
    """Return the SHA-256 sum of what is said about a policy."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _read_object(path: Path) -> dict[str, tp.Any]:
    """Return the JSON object in a file; empty where there is no file."""
    return runs.read_object(path) if path.is_file() else {}


def _unflatten(flat: dict[str, np.ndarray]) -> dict[str, tp.Any]:
    """Return parameters as networks have them, from their names' parts."""
    nested: dict[str, tp.Any] = {}
    for name, array in flat.items():
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = array
    return nested


def _as_array(name: str, value: tp.Any, shape: tuple[int, ...], kind: tp.Any) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape:
        raise SableError(f"{name} has shape {list(array.shape)}; expected {list(shape)}")
    return array.astype(kind)


def _model_card(policy: Policy, directory: Path) -> str:
    """Return a model card in Markdown."""
    spec = policy.spec
    actions = f"{spec.num_actions} discrete actions" if spec.discrete else f"{spec.action_size} numbers"
    returns = ", ".join(f"{x:.4g}" for x in _absolute_returns(directory)) or "not finished"
    seeds = ", ".join(map(str, policy.config.run.seeds))
    argument = "" if policy.config.run.system in SYSTEM_CONFIGS else f", system={policy.config.run.system!r}"
    curve = "![evaluation return over environment steps](curve.png)\n\n"
    return f"""# {policy.config.run.system} on {policy.config.run.task}

A team of {spec.num_agents} agents, each seeing {spec.view_size} numbers and choosing {actions}. Trained by
sable for {policy.config.run.total_steps:,} environment steps; this is seed {policy.seed} of {seeds}.

Return of the best parameters on {policy.config.run.absolute_episodes} fresh episodes, by seed: {returns}.

{curve if (directory / "curve.png").is_file() else ""}```python
import sable

policy = sable.load("this folder"{argument})
policy.reset(batch=1)
actions = policy.act(views)  # numpy [1, {spec.num_agents}, {spec.view_size}] -> [1, {spec.num_agents}]
```

`{ABOUT}` holds every setting it was trained with.

```json
{json.dumps(settings_of(policy.config.system), indent=2)}
```
"""

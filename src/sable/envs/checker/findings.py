"""Results of an environment's checks, and the checks that need only know what happened: they hold for every
kind of environment."""

import typing as tp
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sable.types import EnvSpec, Observation, PyTree, TimeStep, struct

_LARGE_VIEW, _LARGE_RETURN = 100.0, 1000.0


class Finding(tp.NamedTuple):
    """The result of one check."""

    check: str
    verdict: tp.Literal["ok", "note", "wrong"]
    found: str
    fix: str = ""


@struct
class Play:
    """A stretch of play, [T, B]: the observation before each step, `env`'s own answer, and the same behind
    auto-reset."""

    before: Observation
    bare: TimeStep
    reset: TimeStep


def start(initial: TimeStep) -> Finding:
    """Check that what `reset` returns opens an episode."""
    problems = []
    if np.any(initial.reward != 0):
        problems.append("the reward of reset is not 0")
    if np.any(initial.discount != 1):
        problems.append("the discount of reset is not 1")
    if not np.all(initial.first):
        problems.append("first of reset is not true")
    if np.any(initial.observation.step_count != 0):
        problems.append("the step_count of reset is not 0")
    return verdict(
        "start",
        problems,
        "no reward, discount 1, first, step_count 0",
        "return first_timestep(observation, stats)",
    )


def common(spec: EnvSpec, play: Play) -> Iterator[Finding]:
    """Check that numbers, masks, step counts and ends are as they should be, all the way."""
    step = play.bare
    yield verdict(
        "finite numbers",
        [
            f"{name} is NaN or infinite in {np.mean(~np.isfinite(x)):.1%} of its entries"
            for name, x in (
                ("view", step.observation.view),
                ("reward", step.reward),
                ("discount", step.discount),
                ("state", np.asarray(step.observation.state, np.float32)),
                *((f"stats[{name!r}]", x) for name, x in step.stats.items()),
            )
            if not np.isfinite(x).all()
        ],
        "views, rewards, discounts and stats",
        "look for divisions by zero and roots or logarithms of what may be negative",
    )
    yield _masks(spec, play)
    # Steps before the first boundary of each environment, it included: there the length is the row's number.
    steps = np.arange(1, len(step.first) + 1)[:, None]
    first_episode = np.cumsum(step.first, axis=0) - step.first == 0
    counted = (
        (step.observation.step_count == steps)
        | ~first_episode
        | (step.first & (step.observation.step_count == 0))
    )
    yield verdict(
        "time",
        []
        if counted.all()
        else ["observation.step_count does not count 0, 1, 2, .. the steps of an episode"],
        "counts the steps of an episode",
        "keep the count in the state, add 1 in every step, show it as observation.step_count",
    )
    yield _ends(step)
    beyond = (first_episode & (steps >= spec.time_limit) & ~step.first).any(0)
    many = f"{int(beyond.sum())} of {len(beyond)} episodes go on beyond time_limit={spec.time_limit}"
    yield verdict(
        "time limit",
        [many] if beyond.any() else [],
        f"no episode lasts longer than {spec.time_limit} steps"
        if len(steps) >= spec.time_limit
        else f"{spec.time_limit} steps were not reached in {len(steps)}",
        "pass truncated=step_count >= spec.time_limit to next_timestep, or raise spec.time_limit",
    )
    yield _truncation(spec, step)


def _masks(spec: EnvSpec, play: Play) -> Finding:
    action_mask = play.before.action_mask
    fix = "action_mask says, for each agent, which actions it may choose: at least one"
    if not spec.discrete:
        found = [] if action_mask.all() else ["actions are continuous, and action_mask is not all true"]
        return verdict("masks", found, "none: actions are continuous", "give jnp.ones((N, 1), bool)")
    none = ~action_mask.any(-1)
    if none.any():
        agent = f"agent {int(np.argwhere(none)[0][-1])}"
        return Finding("masks", "wrong", f"{agent} had no legal action in {none.mean():.1%} of steps", fix)
    if action_mask.all():
        return Finding("masks", "ok", "all actions are always legal")
    return Finding(
        "masks", "ok", f"{1 - action_mask.mean():.0%} of actions are illegal, never all of an agent's"
    )


def _ends(step: TimeStep) -> Finding:
    problems = []
    if not np.isin(step.discount, (0.0, 1.0)).all():
        odd = step.discount[~np.isin(step.discount, (0.0, 1.0))][0]
        problems.append(f"the discount is {odd:g} somewhere: it is 0 where an episode truly ended, else 1")
    if ((step.discount == 0) & ~step.first).any():
        problems.append("the discount is 0 and first is not true: an episode ends and goes on")
    return verdict(
        "ends",
        problems,
        "discount is 0 only where first is true",
        "discounting is the system's; return next_timestep(.., terminated=.., truncated=..)",
    )


def _truncation(spec: EnvSpec, step: TimeStep) -> Finding:
    """Check whether time limits and true ends are told apart."""
    lengths, done = step.observation.step_count[step.first], step.discount[step.first] == 0
    if not len(lengths):
        return Finding("truncation", "note", f"no episode ended in {len(step.first)} steps")
    found = f"{int(done.sum())} episodes truly ended, {int((~done).sum())} were cut short"
    if done.all() and len(set(lengths.tolist())) == 1 and lengths[0] == spec.time_limit:
        return Finding(
            "truncation",
            "note",
            f"every episode truly ended (discount 0) at the time limit of {spec.time_limit}",
            "if that is a limit and not an end: truncated, not terminated. Make a Python environment "
            "without a limit of its own, and give it one by --env-options time_limit=STEPS",
        )
    short = ~done & (lengths < spec.time_limit)
    if short.any() and (lengths[~done] < spec.time_limit).all() and len(set(lengths[~done].tolist())) > 1:
        return Finding(
            "truncation",
            "note",
            f"{found}, at different times and none at the limit of {spec.time_limit}",
            "if those are ends and not limits: terminated, not truncated",
        )
    return Finding("truncation", "ok", found)


def determinism(one: Play, other: Play) -> Finding:
    """Check that the same play twice is the same to the last bit."""
    return verdict(
        "determinism",
        [] if same(one, other) else ["the same keys and actions gave another episode"],
        "the same keys and actions give the same episode",
        "all randomness comes from the key, or the seed, that reset is given",
    )


def scales(spec: EnvSpec, play: Play, starts: Observation) -> Iterator[Finding]:
    """Check how large views, rewards and returns are, and what is always the same."""
    if len(starts.view) > 1 and all(same(view, starts.view[0]) for view in starts.view):
        yield Finding("starts", "note", f"{len(starts.view)} episodes began with the same views")
    step, reward = play.bare, play.bare.reward
    returns = play.reset.stats["return"][step.first]
    found = f"{reward.min():.3g} to {reward.max():.3g} per step"
    if len(returns):
        found += f"; returns of random play {returns.min():.3g} to {returns.max():.3g}"
    if not reward.any():
        yield Finding("rewards", "note", "random play never got any", "make sure that there are some")
    elif len(returns) and np.abs(returns).max() > _LARGE_RETURN:
        yield Finding("rewards", "note", found, "large returns slow learning: scale them to about 1 to 100")
    else:
        yield Finding("rewards", "ok", found)
    views = np.concatenate([play.before.view, step.observation.view])
    views = views.reshape(-1, spec.num_agents, spec.view_size)
    constant = (views == views[:1]).all((0, 1))
    largest = float(np.abs(views).max())
    found, fixes = f"{views.min():.3g} to {views.max():.3g}", []
    if constant.any():
        found += f"; {int(constant.sum())} of {spec.view_size} features never changed"
        fixes.append("features that are always the same only cost time: padding?")
    if largest > _LARGE_VIEW:
        fixes.append(f"scale what an agent sees to about -1 to 1: {largest:.3g} was seen")
    bad = constant.mean() > 0.5 or largest > _LARGE_VIEW
    yield Finding("views", "note" if bad else "ok", found, "; ".join(fixes) if bad else "")


def verdict(check: str, problems: list[str], ok: str, fix: str) -> Finding:
    """Return the first three problems found, or that all is well."""
    if not problems:
        return Finding(check, "ok", ok)
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return Finding(check, "wrong", "; ".join(problems[:3]) + more, fix)


def is_key(x: tp.Any) -> bool:
    """Return whether an array holds keys of randomness."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def same(one: PyTree, other: PyTree) -> bool:
    """Return whether two trees hold the same bits."""

    def raw(x: tp.Any) -> bytes:
        return np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes()

    return all(raw(a) == raw(b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))

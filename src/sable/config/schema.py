"""Every setting there is: what to run (RunConfig), each system's own numbers, and both together (Config).

Imports no jax, so that mistakes answer at once. `resolve` says where their values come from, `checks` which
ones are allowed.
"""

import dataclasses
import math
import sys
import typing as tp
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sable.config.meaning import MEANING
from sable.errors import SableError, suggest
from sable.trust import NOTHING, Trust, Untrusted


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: task, length and how it is measured. The defaults are the paper's protocol."""

    task: str = "lbf/2s-8x8-2p-2f-coop"
    """Task name with its suite, as `sable list` prints it."""
    system: str = "sable"
    """Learning system: sable, mat, ippo, mappo, masac, hasac, qmix, or a module with one of your own."""
    seeds: tuple[int, ...] = (0,)
    """Seeds to train side by side in one program."""
    total_steps: int = 20_000_000
    """Environment steps per seed, rounded down to whole updates (at least one)."""
    num_evaluations: int = 122
    """Evaluations, evenly spaced over training."""
    evaluation_episodes: int = 32
    """Episodes per evaluation and seed."""
    absolute_episodes: int = 320
    """Episodes on which the best parameters are measured at the end (the absolute metric)."""
    reset_pool_size: int = 0
    """Start states generated per rollout for episodes that begin inside it, in whole rounds of one for each
    environment (at least one round); 0: as many as short episodes of the task take."""
    env_options: tuple[str, ...] = ()
    """Options of the task as name=value, such as reward=mean."""
    precision: tp.Literal["default", "high", "highest"] = "default"
    """Precision of float32 matrix products on accelerators (tf32 or full)."""
    deterministic: bool = False
    """Make GPU runs bit-exact (slower); CPU runs always are."""
    devices: int = 1
    """Devices that share seeds and environments; all (or 0): as many as there are."""
    video: bool = True
    """Leave a short film of the trained team, video.gif, in the run's folder."""
    label: str = ""
    """What reports call the run's system; none: its name with what is switched on or off."""


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """Settings of every system."""

    num_envs: int = 128
    """Environments stepped side by side, per seed."""
    rollout_length: int = 128
    """Environment steps between two updates."""
    discount: float = 0.99
    """Discount of future reward."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""
    agent_id: bool = True
    """Learn an embedding per agent; ignored where the views already carry identity (MABrax)."""
    # What training with these settings means (see `meaning`). No setting: it has no flag and is in no recipe,
    # and is written beside the settings. It is an older one in what was read from a file only.
    meaning: int = MEANING


@dataclass(frozen=True)
class Config:
    """Everything a run is trained with."""

    run: RunConfig
    """The run: its task, length and measurements."""
    system: SystemConfig
    """Settings of its learning system, of that system's own class."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(SystemConfig):
    """Proximal policy optimisation: settings of every on-policy system."""

    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 2
    """Minibatches per epoch; must divide the number of environments."""
    learning_rate_horizon: int = 0
    """Environment steps over which learning rates fall linearly to zero; 0 keeps them constant."""
    gae_lambda: float = 0.9
    """Decay of the generalised advantage estimate."""
    clip_eps: float = 0.2
    """Clipping of the probability ratio, and of the value's change with `clip_value`."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    clip_value: bool = True
    """Clip the value's change in an update too. It then moves by `clip_eps` at most: far too slow where
    returns are large."""
    advantage_floor: float = 0.1
    """Least standard deviation that advantages are divided by, as a fraction of the largest reward seen so
    far. Until rewards are found a critic's noise is then not learnt from; 0: none, as in the paper."""
    bootstrap_time_limits: bool = False
    """Go on valuing the future where an episode only ran out of time. The paper does not."""


@dataclass(frozen=True, kw_only=True)
class SableConfig(PPOConfig):
    """Sable: a retention network over time steps and agents, trained by PPO."""

    learning_rate: float = 2.5e-4
    """Adam's step size."""
    embed_dim: int = 64
    """Width of the network; a multiple of the number of heads."""
    num_heads: int = 1
    """Retention heads, each with its own decay."""
    num_blocks: int = 1
    """Encoder blocks, and decoder blocks."""
    decay_scaling: float = 0.8
    """Scales every head's decay: 0 forgets at once, 1 remembers longest."""
    memory: bool = True
    """Remember the whole episode; without it every time step stands alone."""
    positions: tp.Literal["timestep", "token"] = "timestep"
    """What positions count, with memory: time steps, so that the agents of one share theirs, or tokens (steps
    times agents, plus the agent's place), which the paper found much worse."""
    agent_chunk: int = 0
    """Without memory, agents encoded at a time, who see their own chunk and those before it, as in the
    paper's large teams; 0: all agents see each other."""
    agent_order: tp.Literal["natural", "per_rollout", "per_epoch"] = "per_rollout"
    """In which order agents are processed: natural, always the same, or a random one, drawn anew per rollout
    (acting, learning) or per epoch (learning only, the paper's)."""
    decoding: tp.Literal["auto", "sequential", "cached", "jacobi", "fused"] = "auto"
    """How a team decides: agent by agent, plainly (sequential) or with a key/value cache and a GPU kernel for
    each layer (cached); all at once until no action changes (jacobi); or by one GPU kernel (fused). All
    sample the same; `auto` is what was measured fastest for the team, the network and the machine."""
    compute_dtype: tp.Literal["float32", "bfloat16"] = "float32"
    """What learning computes with. bfloat16 takes half the memory, and on a GPU less time, for some rounding;
    parameters, the optimiser and acting stay float32."""
    chunk_size: int = 0
    """Time steps that learning with memory takes at once. Changes speed and memory use, never what is learnt;
    0: what suits the sizes."""


@dataclass(frozen=True, kw_only=True)
class MATConfig(PPOConfig):
    """MAT, the multi-agent transformer: attention over the agents of one time step, trained by PPO."""

    num_epochs: int = 5
    num_minibatches: int = 1
    clip_eps: float = 0.1
    max_grad_norm: float = 5.0
    learning_rate: float = 5e-4
    """Adam's step size."""
    embed_dim: int = 64
    """Width of the network; a multiple of the number of heads."""
    num_heads: int = 1
    """Attention heads."""
    num_blocks: int = 1
    """Encoder blocks, and decoder blocks."""
    rms_norm: bool = False
    """Normalise by the root mean square, as Sable does, instead of LayerNorm, everywhere."""
    swiglu: bool = False
    """Gated feed-forward layers, as Sable has, instead of plain ones."""
    agent_order: tp.Literal["natural", "per_rollout", "per_epoch"] = "per_rollout"
    """In which order agents are processed: natural, always the same, or a random one, drawn anew per rollout
    (acting, learning) or per epoch (learning only, the paper's)."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PPOConfig):
    """IPPO and MAPPO: one actor for all agents and one critic, which sees what its agent sees (IPPO) or the
    global state (MAPPO)."""

    policy_learning_rate: float = 2.5e-4
    """Adam's step size for the actor."""
    critic_learning_rate: float = 2.5e-4
    """Adam's step size for the critic."""
    policy_layers: tuple[int, ...] = (128, 128)
    """Widths of the actor's layers."""
    critic_layers: tuple[int, ...] = (128, 128)
    """Widths of the critic's layers."""
    memory: bool = False
    """Remember the episode with a GRU behind the first layer of actor and critic."""
    recurrent_size: int = 128
    """Width of the GRUs."""
    recurrent_chunk: int = 128
    """Contiguous time steps a gradient flows through with memory; must divide the rollout, or exceed it."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(SystemConfig):
    """Settings of every system that learns from stored experience."""

    max_grad_norm: float = 10.0
    num_updates_per_rollout: int = 32
    """Gradient steps after each rollout."""
    batch_size: int = 64
    """Transitions (SAC) or sequences (QMIX) per gradient step."""
    polyak: float = 0.005
    """How far the target networks move towards the learned ones, each time they move."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic over a team: twin critics of the global state and the joint action."""

    num_envs: int = 64
    rollout_length: int = 8
    replay_size: int = 100_000
    """Transitions kept, all environments together."""
    warmup_steps: int = 5000
    """Environment steps of random actions before learning starts."""
    policy_delay: int = 2
    """Gradient steps of the critics after which the policy takes as many, one after another."""
    policy_learning_rate: float = 3e-4
    """Adam's step size for the policy."""
    q_learning_rate: float = 5e-4
    """Adam's step size for the critics."""
    temperature_learning_rate: float = 1e-3
    """Adam's step size for the temperature."""
    autotune_temperature: bool = False
    """Learn the temperature, so that the policy keeps the target entropy."""
    initial_temperature: float = 0.005
    """Weight of the entropy, at first or for good."""
    target_entropy_scale: float = 5.0
    """The target entropy, as minus this for each component of an action."""
    policy_layers: tuple[int, ...] = (128, 128)
    """Widths of the policy's layers."""
    q_layers: tuple[int, ...] = (128, 128)
    """Widths of the critics' layers."""


@dataclass(frozen=True, kw_only=True)
class MASACConfig(SACConfig):
    """MASAC: soft actor-critic with one policy that all agents share."""

    batch_size: int = 32
    policy_delay: int = 4
    q_learning_rate: float = 1e-3
    temperature_learning_rate: float = 3e-4
    autotune_temperature: bool = True
    initial_temperature: float = 0.1


@dataclass(frozen=True, kw_only=True)
class HASACConfig(SACConfig):
    """HASAC: soft actor-critic with a policy per agent, improved one after another."""

    discount: float = 0.95
    shuffle_agents: bool = False
    """Improve the agents in a new random order each time, instead of from the first to the last."""


@dataclass(frozen=True, kw_only=True)
class QMIXConfig(ReplayConfig):
    """QMIX: recurrent Q-learning whose joint value rises with every agent's own."""

    num_envs: int = 32
    rollout_length: int = 2
    num_updates_per_rollout: int = 2
    batch_size: int = 128
    polyak: float = 0.01
    replay_size: int = 4000
    """Time steps kept per environment."""
    sequence_length: int = 20
    """Time steps of a replayed sequence."""
    warmup_sequences: int = 32
    """Sequences' worth of time steps, all environments together, before learning starts."""
    q_learning_rate: float = 3e-4
    """Adam's step size."""
    epsilon_min: float = 0.05
    """The chance of a random action in the end."""
    epsilon_decay: float = 1e-5
    """How much that chance, 1 at first, falls with every environment step."""
    hard_target_update: bool = False
    """Copy the target networks every `target_update_period` gradient steps instead of moving them softly."""
    target_update_period: int = 200
    """Gradient steps between two copies; used with `hard_target_update`."""
    q_layers: tuple[int, ...] = (128, 128)
    """Widths of the agents' layers: the first stands before the GRU, the others behind it."""
    recurrent_size: int = 256
    """Width of the GRU."""
    mixer_size: int = 32
    """Width of the mixing network."""


SYSTEM_CONFIGS: dict[str, type[SystemConfig]] = {
    "sable": SableConfig,
    "mat": MATConfig,
    "ippo": ActorCriticConfig,
    "mappo": ActorCriticConfig,
    "masac": MASACConfig,
    "hasac": HASACConfig,
    "qmix": QMIXConfig,
}

ONLY_ACTIONS = {"masac": "continuous", "hasac": "continuous", "qmix": "discrete"}
"""The systems that can do with one kind of actions only."""


def system_config(system: tp.Any, trust: Trust = NOTHING) -> type[SystemConfig]:
    """Return the configuration class of the system called `system`: one of ours, or a module's `Config`."""
    if isinstance(system, str) and system in SYSTEM_CONFIGS:
        return SYSTEM_CONFIGS[system]
    return own_system(system, trust).Config


def own_system(name: tp.Any, trust: Trust) -> ModuleType:
    """Import the module of that name, where a user keeps a system: `Config` and `make`
    (docs/guides/own-system.md)."""
    is_name = isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
    near = suggest(str(name), SYSTEM_CONFIGS)
    try:
        known = is_name and trust.exists("system", name, name)
    except Untrusted as error:
        raise Untrusted(f"{error}{near}") from None
    if not known:
        raise SableError(
            f"unknown system {name!r}; known systems: {', '.join(SYSTEM_CONFIGS)}, "
            f"or a module with one of your own{near}"
        )
    module = trust.import_module("system", name, name)
    for part in ("Config", "make"):
        if not hasattr(module, part):
            raise SableError(f"module {name!r} holds no system: it has no {part}")
    return module


def imported_system(name: str, config: SystemConfig) -> ModuleType:
    """Return the module of a user's own system that `config` is the configuration of. A configuration of its
    class is only there if `own_system` was allowed to import it."""
    module = sys.modules.get(name)
    if module is None or type(config) is not getattr(module, "Config", None):
        raise SableError(f"unknown system {name!r}; known systems: {', '.join(SYSTEM_CONFIGS)}")
    return module


def needs_trust(task: str, system: str) -> bool:
    """Return whether a run runs code from outside sable."""
    return ":" in task or system not in SYSTEM_CONFIGS


def resume_argv(directory: Path | str, task: str, system: str) -> list[str]:
    """Return the flags of `sable train` that go on with a run, --trust among them where it needs that."""
    return ["--resume", str(directory), *["--trust"] * needs_trust(task, system)]


def field_types(cls: type) -> dict[str, tp.Any]:
    """Return the types of a configuration class's settings by their names, in order."""
    return {field.name: field.type for field in dataclasses.fields(cls) if field.name != "meaning"}


def field_names(cls: type) -> list[str]:
    """Return the names of a configuration class's settings, in order."""
    return list(field_types(cls))


def settings_of(config: SystemConfig) -> dict[str, tp.Any]:
    """Return a system's settings as plain data."""
    return {name: getattr(config, name) for name in field_names(type(config))}


def split_devices(num_devices: int, num_seeds: int, config: SystemConfig) -> tuple[int, int]:
    """Return how many devices share the seeds, and how many share the environments of each.

    As many along seeds as divide them: seeds need nothing of each other. The others must divide what is
    worked on at a time, environments or those of a minibatch; where they do not, what would is named.
    """

    def split(num: int) -> tuple[int, int]:
        along_seeds = math.gcd(num, num_seeds)
        return along_seeds, num // along_seeds

    parts = config.num_minibatches if isinstance(config, PPOConfig) else 1
    each = config.num_envs // parts
    shape = split(num_devices)
    if each % shape[1]:
        fewer = next(num for num in range(num_devices, 0, -1) if each % split(num)[1] == 0)
        enough = math.ceil(config.num_envs / (shape[1] * parts)) * shape[1] * parts
        minibatches = f" in num_minibatches={parts}" if parts > 1 else ""
        raise SableError(
            f"devices={num_devices}: {num_seeds} seed{'s' * (num_seeds > 1)} of num_envs={config.num_envs}"
            f"{minibatches} cannot be shared evenly; devices={fewer} or num_envs={enough} would work"
        )
    return shape


def check_actions(system: str, *, discrete: bool, task: str) -> None:
    """Refuse a system that cannot handle this kind of actions, naming those that can."""
    kind = "discrete" if discrete else "continuous"
    if ONLY_ACTIONS.get(system, kind) != kind:
        able = ", ".join(name for name in SYSTEM_CONFIGS if ONLY_ACTIONS.get(name, kind) == kind)
        raise SableError(
            f"{system} needs {ONLY_ACTIONS[system]} actions and those of {task} are {kind}; "
            f"systems that would work: {able}"
        )

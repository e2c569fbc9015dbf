"""Every setting there is: what to run (RunConfig) and each system's own numbers. Imports no jax, so that mistakes answer at once."""

import typing as tp
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train, for how long, and how to measure it. The defaults are the paper's protocol."""

    task: str = "lbf/2s-8x8-2p-2f-coop"
    """Task name with its suite, as `sable list` prints it."""
    system: str = "sable"
    """Learning system."""
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
    pool_size: int = 0
    """Start states generated per rollout for episodes that begin inside it; 0 means as many as environments."""
    options: tuple[str, ...] = ()
    """Options of the task as name=value, such as reward=mean."""
    precision: tp.Literal["default", "high", "highest"] = "default"
    """Precision of float32 matrix products on accelerators (tf32 or full)."""
    deterministic: bool = False
    """Make GPU runs bit-exact (slower); CPU runs always are."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimisation: what every on-policy system shares."""

    num_envs: int = 128
    """Environments stepped side by side, per seed."""
    rollout_length: int = 128
    """Environment steps between two updates."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 2
    """Minibatches per epoch; must divide the number of environments."""
    learning_rate: float = 2.5e-4
    """Adam's step size."""
    learning_rate_horizon: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    discount: float = 0.99
    """Discount of future reward."""
    gae_lambda: float = 0.9
    """Decay of the generalised advantage estimate."""
    clip_eps: float = 0.2
    """Clipping of the probability ratio and of the value's change."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""
    bootstrap_time_limits: bool = False
    """Go on valuing the future where an episode only ran out of time. The paper does not."""


@dataclass(frozen=True, kw_only=True)
class SableConfig(PPOConfig):
    """Sable: a retention network over time steps and agents, trained by PPO."""

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
    agent_order: tp.Literal["per_rollout", "per_epoch"] = "per_rollout"
    """When the order of agents is drawn anew: per rollout (acting and learning alike) or per epoch (learning only, the paper's)."""
    agent_id: bool = True
    """Learn an embedding per agent; ignored where the views already carry identity (MABrax)."""

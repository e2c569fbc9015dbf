"""MAT: the multi-agent transformer as a PPO policy."""

from functools import partial

from sable.config.schema import MATConfig
from sable.nets.mat import MAT
from sable.systems import autoregressive, ppo
from sable.systems.autoregressive import TeamActions, TeamInputs, apply
from sable.systems.base import System
from sable.types import EnvSpec, PyTree


def make(spec: EnvSpec, config: MATConfig) -> System:
    """Return MAT for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: MATConfig) -> ppo.Policy:
    """Return the network's side of it. Nothing is remembered from one timestep to the next."""
    net = MAT(config, spec)
    return autoregressive.make_policy(net, partial(decode_sequential, net), lambda num_envs: (), chunk=1)


def decode_sequential(
    net: MAT, params: PyTree, inputs: TeamInputs, memory: tuple[()]
) -> tuple[TeamActions, tuple[()]]:
    """Return (the actions of all agents, no memory) by autoregressive decoding with a key/value cache, agent
    after agent in a scan."""

    def decide(cache, token, agent):
        return apply(net, params, net.decode_agent, agent.encoded, agent.action_mask, token, cache)

    cache = apply(net, params, net.empty_cache, inputs.encoded.shape[0])
    actions, _ = autoregressive.scan_agents(net.spec, decide, cache, inputs)
    return actions, memory

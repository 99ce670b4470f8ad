"""What PPO and SAC share of noise that depends on features: gSDE (Raffin et al. 2020, arXiv 2005.05719)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.settings import Range
from raynforce.spaces import EnvSpec


@dataclass(frozen=True)
class GSDEConfig(AlgorithmConfig):
    """Settings of exploration that depends on the state."""

    gsde: bool = False
    """Let the noise on continuous actions be a function of the policy's features, so that what is tried is smooth."""
    gsde_every: Annotated[int, Range(1, 1e9)] = 64
    """Steps for which such a function is kept, in each environment."""


def check_gsde(hp: GSDEConfig, config: Config, env: EnvSpec) -> None:
    """Refuse what it does not go with."""
    if not hp.gsde:
        return
    on = "algorithm.gsde = true"
    if env.action.kind != "box":
        raise UsageError(f"{on} is for continuous actions, and those of {env.env} are not: leave it out")
    if config.network.factory:
        raise UsageError(f"{on} needs the features of a network of ours, not network.factory: leave one out")
    if config.network.memory != "none":
        raise UsageError(f"{on} is not for network.memory = {config.network.memory}: leave one out")
    if not config.network.hidden:
        raise UsageError(f"{on} needs a hidden layer for its features, and network.hidden = []: add one")
    if config.sampling.inference == "client":
        raise UsageError(f"{on} is not for simulators that act by themselves: use --inference server")

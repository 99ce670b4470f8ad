"""A continuous task that is seen as an image."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Bright(gymnasium.Env[np.ndarray, np.ndarray]):
    """The action that pays is how bright the left half of the image is, from -1 to 1."""

    observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _seen(self) -> np.ndarray:
        self.wanted = float(self.np_random.uniform(-0.8, 0.8))
        image = np.zeros((8, 8, 1), np.uint8)
        image[:, :4] = round((self.wanted + 1) * 127)
        return image

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 8
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, self.left = -abs(float(action[0]) - self.wanted), self.left - 1
        return self._seen(), reward, self.left == 0, False, {}


def own_network(leaves: Any, outputs: dict[str, int]) -> Any:
    """A torch module with an actor and critics of Pendulum-v1, as a user would write one."""
    import torch

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, outputs["policy"])
            )
            self.critics = torch.nn.ModuleDict({k: torch.nn.Linear(4, 1) for k in ("q1", "q2")})

        def forward(self, obs: torch.Tensor, action: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            found = {"policy": self.policy(obs)}
            if action is not None:
                found |= {k: critic(torch.cat([obs, action], 1)) for k, critic in self.critics.items()}
            return found

    return Own()

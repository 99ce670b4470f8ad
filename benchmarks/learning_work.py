"""The peer's side of `learning_vs_sb3`: trains with Stable-Baselines3 or sb3-contrib, then judges the last policy.

    python -m benchmarks.learning_work NAME STEPS SEED EPISODES OUT

It runs in `.venv-contrib` and writes one JSON object to OUT. The settings here are what both sides are given.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

GAMMA = 0.99
REPLAY = {"learning_rate": 3e-4, "tau": 0.005, "batch_size": 256, "buffer_size": 100_000, "learning_starts": 1_000}
SMALL = {**REPLAY, "learning_rate": 1e-3, "hidden": 64}  # enough for Pendulum
HIDDEN = {"off-policy": 256, "ppo": 64}  # two layers of it; before or after a memory one
ROLLOUT = {"gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
LSTM = {"envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 1e-3}
MASKED = {"envs": 8, "n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4}
SPREAD = {"envs": 16, "n_steps": 125, "batch_size": 2_000, "n_epochs": 10, "learning_rate": 7e-4, "ent_coef": 0.01}
GAME = {"envs": 8, "n_steps": 256, "batch_size": 256, "n_epochs": 10, "learning_rate": 3e-4, "ent_coef": 0.01}
JUDGED_FROM = 100_000  # seeds of the episodes that judge
Act = Callable[[Any], Any]


def off_policy(algo: str, env: str, replay: dict[str, Any] = REPLAY) -> Callable[[int, int, int], list[float]]:
    def work(steps: int, seed: int, episodes: int) -> list[float]:
        import gymnasium
        import numpy as np
        import stable_baselines3 as sb3  # type: ignore[import-not-found]
        from stable_baselines3.common.noise import NormalActionNoise  # type: ignore[import-not-found]

        made = gymnasium.make(env)
        given = {"hidden": HIDDEN["off-policy"], "gamma": GAMMA, **replay}
        given["policy_kwargs"] = {"net_arch": [given.pop("hidden")] * 2}
        if algo == "TD3":
            size = made.action_space.shape[0]  # type: ignore[index]
            given["action_noise"] = NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))
        model = getattr(sb3, algo)("MlpPolicy", made, train_freq=1, gradient_steps=1, seed=seed, device="cpu", **given)
        model.learn(steps)
        return judged(gymnasium.make(env), lambda obs: model.predict(obs, deterministic=True)[0], episodes)

    return work


def lstm(normalized: bool) -> Callable[[int, int, int], list[float]]:
    def work(steps: int, seed: int, episodes: int) -> list[float]:
        import numpy as np
        from sb3_contrib import RecurrentPPO  # type: ignore[import-not-found]
        from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]
        from stable_baselines3.common.vec_env import VecNormalize  # type: ignore[import-not-found]

        from raynforce.envs.tiny import blind_cartpole

        width = HIDDEN["ppo"]
        shape = {"net_arch": [width], "lstm_hidden_size": width, "shared_lstm": True, "enable_critic_lstm": False}
        envs = make_vec_env(lambda: blind_cartpole(), LSTM["envs"], seed=seed)
        seen = VecNormalize(envs, norm_obs=normalized, norm_reward=normalized, gamma=GAMMA)
        model = RecurrentPPO("MlpLstmPolicy", seen, policy_kwargs=shape, **ppo(LSTM, seed))
        model.learn(steps)
        state: Any = None

        def act(obs: Any) -> Any:
            nonlocal state
            action, state = model.predict(seen.normalize_obs(obs), state, np.zeros(1, bool), deterministic=True)
            return action

        def forget() -> None:
            nonlocal state
            state = None

        return judged(blind_cartpole(), act, episodes, forget)

    return work


def masked(steps: int, seed: int, episodes: int) -> list[float]:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.wrappers import ActionMasker  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env

    from raynforce.envs.tiny import MaskedGrid

    def made() -> Any:
        return ActionMasker(MaskedGrid(), lambda env: env.unwrapped.mask())

    model = MaskablePPO("MlpPolicy", make_vec_env(made, MASKED["envs"], seed=seed), **ppo(MASKED, seed))
    model.learn(steps)
    env = made()
    return judged(env, lambda obs: model.predict(obs, deterministic=True, action_masks=env.action_masks())[0], episodes)


def spread(steps: int, seed: int, episodes: int) -> list[float]:
    """PPO with one policy for all agents, without a central critic, which Stable-Baselines3 does not have."""
    import numpy as np
    from mpe2 import simple_spread_v3
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv

    class Lanes(VecEnv):  # type: ignore[misc]
        """Each agent of each environment is a lane."""

        def __init__(self, count: int) -> None:
            self.games = [simple_spread_v3.parallel_env() for _ in range(count)]
            self.names = self.games[0].possible_agents
            name = self.names[0]
            size = count * len(self.names)
            super().__init__(size, self.games[0].observation_space(name), self.games[0].action_space(name))
            self.first = [seed * 1_000 + i for i in range(count)]

        def reset(self) -> Any:
            pairs = zip(self.games, self.first, strict=True)
            return np.stack([obs for game, start in pairs for obs in self.ordered(game.reset(seed=start)[0])])

        def ordered(self, by_name: Any) -> list[Any]:
            return [by_name[name] for name in self.names]

        def step_async(self, actions: Any) -> None:
            self.actions = actions.reshape(len(self.games), -1)

        def step_wait(self) -> Any:
            seen, rewards, ends, infos = [], [], [], []
            for game, chosen in zip(self.games, self.actions, strict=True):
                obs, reward, _, truncated, _ = game.step(dict(zip(self.names, chosen.tolist(), strict=True)))
                over, shown = any(truncated.values()), self.ordered(obs)
                infos += [{"terminal_observation": x, "TimeLimit.truncated": True} if over else {} for x in shown]
                seen += self.ordered(game.reset()[0]) if over else shown
                rewards += self.ordered(reward)
                ends += [over] * len(shown)
            return np.stack(seen), np.asarray(rewards, np.float32), np.asarray(ends), infos

        def close(self) -> None: ...

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * self.num_envs  # it asks for render_mode

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            return []

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

    model = PPO("MlpPolicy", Lanes(int(SPREAD["envs"])), **ppo(SPREAD, seed))
    model.learn(steps)
    world = simple_spread_v3.parallel_env()
    return judged_team(world, lambda obs: model.predict(np.stack(obs), deterministic=True)[0].tolist(), episodes)


def judged_team(game: Any, act: Act, episodes: int) -> list[float]:
    """The mean return of the agents in each of the episodes."""
    returns = []
    for episode in range(episodes):
        obs, totals = game.reset(seed=JUDGED_FROM + episode)[0], dict.fromkeys(game.possible_agents, 0.0)
        while game.agents:
            names = list(obs)
            obs, rewards, _, _, _ = game.step(dict(zip(names, act(list(obs.values())), strict=True)))
            for name, reward in rewards.items():
                totals[name] += float(reward)
        returns.append(sum(totals.values()) / len(totals))
    return returns


def game(steps: int, seed: int, episodes: int) -> list[float]:
    """Masked PPO against itself as in PettingZoo's tutorial: each step is the move of whoever's turn it is."""
    import gymnasium
    import numpy as np
    from pettingzoo.classic import tictactoe_v3
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.wrappers import ActionMasker
    from stable_baselines3.common.env_util import make_vec_env

    class Turns(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            self.board: Any = tictactoe_v3.raw_env()
            name = self.board.possible_agents[0]
            self.observation_space = self.board.observation_space(name)["observation"]
            self.action_space = self.board.action_space(name)

        def shown(self) -> Any:
            return self.board.observe(self.board.agent_selection)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.board.reset(seed=seed)
            return self.shown()["observation"], {}

        def step(self, action: Any) -> Any:
            mover = self.board.agent_selection
            self.board.step(int(action))
            over = self.board.terminations[mover]
            # the tutorial's reward: what the one who moved has after its move
            return self.shown()["observation"], float(self.board.rewards[mover]), over, False, {}

        def mask(self) -> Any:
            return np.asarray(self.shown()["action_mask"], bool)

    def made() -> Any:
        return ActionMasker(Turns(), lambda env: env.unwrapped.mask())

    model = MaskablePPO("MlpPolicy", make_vec_env(made, GAME["envs"], seed=seed), **ppo(GAME, seed))
    model.learn(steps)
    rng, env, returns = np.random.default_rng(JUDGED_FROM + seed), Turns(), []
    for episode in range(episodes):
        obs, _ = env.reset()
        hero = env.board.possible_agents[episode % 2]
        over = False
        while not over:
            mask = env.mask()
            if env.board.agent_selection == hero:
                action = model.predict(obs, deterministic=True, action_masks=mask)[0]
            else:
                action = rng.choice(np.flatnonzero(mask))
            obs, _, over, _, _ = env.step(action)
        returns.append(float(env.board.rewards[hero]))
    return returns


def ppo(given: dict[str, Any], seed: int) -> dict[str, Any]:
    own = {name: value for name, value in given.items() if name != "envs"}
    return {**ROLLOUT, "gamma": GAMMA, **own, "seed": seed, "device": "cpu"}


def judged(env: Any, act: Act, episodes: int, forget: Callable[[], None] = lambda: None) -> list[float]:
    """The returns of greedy episodes, before each of which what was before is forgotten."""
    returns = []
    for episode in range(episodes):
        forget()
        obs, total, over = env.reset(seed=JUDGED_FROM + episode)[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


WORKS: dict[str, Callable[[int, int, int], list[float]]] = {
    "sac-pendulum": off_policy("SAC", "Pendulum-v1", SMALL),
    "sac-hopper": off_policy("SAC", "Hopper-v5"),
    "sac-halfcheetah": off_policy("SAC", "HalfCheetah-v5"),
    "td3-hopper": off_policy("TD3", "Hopper-v5"),
    "ppo-lstm": lstm(normalized=False),
    "ppo-lstm-normalized": lstm(normalized=True),
    "ppo-masked": masked,
    "mappo-spread": spread,
    "self-play": game,
}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    name, *numbers, out = sys.argv[1:]
    steps, seed, episodes = map(int, numbers)
    began = time.monotonic()
    returns = WORKS[name](steps, seed, episodes)
    names = ("stable_baselines3", "sb3_contrib", "torch", "gymnasium")
    facts = {"returns": returns, "steps": steps, "seconds": round(time.monotonic() - began, 1)}
    whole = json.dumps(facts | {"versions": {package: version(package) for package in names}})
    part = Path(out).with_suffix(".part")
    part.write_text(whole, encoding="utf-8")
    part.rename(out)


if __name__ == "__main__":
    main()

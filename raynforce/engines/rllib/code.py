"""A translated experiment as Python that RLlib runs without us."""

from __future__ import annotations

import math
import pprint
import textwrap
from collections.abc import Mapping
from typing import Any

from raynforce.config import Config
from raynforce.engines.rllib.translation import Translation
from raynforce.envs.launching import is_simulator
from raynforce.errors import UsageError
from raynforce.imports import is_given
from raynforce.policies.spec import Input

CONNECTORS = "ray.rllib.connectors.env_to_module"


def program(found: Translation, config: Config) -> str:
    """The experiment as a script."""
    if is_given(config.env):
        raise UsageError(f"env {config.env!r} is not in a module: put it into one, and name it module:factory")
    kind, calls = found.algorithm, {section: dict(given) for section, given in found.calls.items()}
    imports = [f"from ray.rllib.algorithms.{kind.module} import {kind.config_class}"]
    before: list[str] = []
    environment = calls["environment"]
    environment["env"], needed, before = _environment(config, found.image)
    imports += needed
    model = calls.get("rl_module", {}).get("model_config")
    if model is not None:
        imports.append("from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig")
        calls["rl_module"]["model_config"] = _Text(f"DefaultModelConfig({_arguments(model)})")
    if found.connectors:
        imports.append(f"from {CONNECTORS} import {', '.join(sorted(found.connectors))}")
        made = ", ".join(f"{name}()" for name in found.connectors)
        calls["env_runners"]["env_to_module_connector"] = _Text(f"lambda env=None, spaces=None, device=None: [{made}]")
    chain = "".join(f"\n    .{section}({_arguments(given)})" for section, given in calls.items() if given)
    text = "\n".join(
        [
            f"# {config.algo} on {config.env} as RLlib trains it: pip install 'ray[rllib]==2.60.0' torch",
            "import ray",
            *sorted(imports),
            "",
            *before,
            f"config = (\n    {kind.config_class}(){chain}\n)",
            "",
            'if __name__ == "__main__":',
            textwrap.indent(_LOOP.format(steps=config.steps), "    "),
        ]
    )
    return text + "\n"


_LOOP = """\
algo = config.build_algo()
steps = 0
while steps < {steps}:
    result = algo.train()
    steps = result["num_env_steps_sampled_lifetime"]
    print(int(steps), result["env_runners"].get("episode_return_mean"))
print(algo.save_to_path())
algo.stop()
ray.shutdown()"""


def _environment(config: Config, image: Input | None) -> tuple[Any, list[str], list[str]]:
    """What RLlib is given as the environment, the imports for it, and lines before the config."""
    module, colon, name = config.env.partition(":")
    simulates = is_simulator(config.env)
    imports = ["from ray.tune.registry import register_env"]
    lines: list[str] = []
    if simulates:
        imports.append("import raynforce")
        made = f"raynforce.simulator({config.env!r}, envs=config['num_envs'], autoreset='next-step')"
        lines.append("# A simulator speaks our protocol: raynforce has to be installed for it.")
    elif colon:
        imports.append(f"from {module} import {name.partition('.')[0]}")
        made = f"{name}(**config)"
    elif image is None:
        return config.env, [], []
    else:
        made = f"gymnasium.make({config.env!r}, **config)"
    if image is not None:
        channels, height, width = image.image_shape
        first = ".swapaxes(-1, -2).swapaxes(-2, -3)" if image.channels_last else ""
        batch = "-1, " if simulates else ""
        at = 1 if simulates else 0
        read = f"np.asarray(seen){first}.reshape({batch}{channels}, {height}, {width})"
        read = f"np.moveaxis({read}, {at}, -1).astype(np.float32)"
        scaled = f"{read} / 255" if image.encoding == "image" else read
        page = _SIMULATED_IMAGES if simulates else _IMAGES
        lines.append(page.format(made=made, shape=(height, width, channels), read=scaled))
        imports += ["import gymnasium", "import numpy as np"]
        return "images", imports, [*lines, 'register_env("images", images)', ""]
    known = "simulator" if simulates else config.env
    return known, imports, [*lines, f"register_env({known!r}, lambda config: {made})", ""]


_READ = """

def read(seen):
    return {read}

"""
_IMAGES = (
    """\

def images(config):
    \"\"\"What RLlib's convolutions read: [height, width, channels] from 0 to 1.\"\"\"
    space = gymnasium.spaces.Box(0.0, 1.0, {shape}, np.float32)
    return gymnasium.wrappers.TransformObservation({made}, read, space)
"""
    + _READ
)
_SIMULATED_IMAGES = (
    """\

def images(config):
    \"\"\"What RLlib's convolutions read: [envs, height, width, channels] from 0 to 1.\"\"\"
    space = gymnasium.spaces.Box(0.0, 1.0, {shape}, np.float32)
    made = {made}
    every = gymnasium.vector.utils.batch_space(space, made.num_envs)
    return gymnasium.wrappers.vector.TransformObservation(made, read, every, space)
"""
    + _READ
)


class _Text(str):
    """Python, to be written as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _arguments(given: Mapping[str, Any]) -> str:
    parts = [f"{name}={_written(value)}" for name, value in given.items()]
    line = ", ".join(parts)
    if len(line) <= 100 and "\n" not in line:
        return line
    return "\n" + "".join(f"        {part},\n" for part in parts) + "    "


def _written(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return 'float("inf")'
    return value if isinstance(value, _Text) else pprint.pformat(value, compact=True, width=88, sort_dicts=False)

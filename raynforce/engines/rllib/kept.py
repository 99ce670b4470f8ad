"""Modules of RLlib that our network spec has no layers for: kept as torch, behind `network.factory`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import create_empty_array
from torch import Tensor, nn

from raynforce.engines.rllib.modules import (
    SQUASHED_RANGE,
    WIDEST,
    CannotConvert,
    Conversion,
    Move,
    distribution_of,
    inputs_of,
    require_stateless,
    scales,
    tensors_of,
)
from raynforce.errors import UsageError, summary
from raynforce.imports import load_object
from raynforce.policies.acting import ActingSpec
from raynforce.policies.spec import NetworkSpec, Param, Tower
from raynforce.policies.torch_net import encode
from raynforce.spaces import EnvSpec, ObsLeaf

if TYPE_CHECKING:
    from ray.rllib.core.rl_module.torch import TorchRLModule

FACTORY = f"{__name__}:rebuild"
Space = gymnasium.Space[Any]


def keep(module: TorchRLModule, env: EnvSpec, *, normalize: bool, why: str = "") -> Conversion:
    """Any stateless module, by its class, its config and its spaces: `rebuild` makes it again where it acts."""
    plain: Any = module.unwrapped()
    require_stateless(plain)
    inputs = inputs_of(env, plain, convolves=_reads_image(env.obs, plain.observation_space))
    if normalize and any(i.encoding != "vector" for i in inputs):
        raise CannotConvert("the filter normalises images or one-hot codes, which modules here get as they are")
    args = _arguments(plain)
    heads, acting = _outputs(plain, env)
    try:
        again = rebuild(env.obs, heads, **args)
        again(_zeros(env))
    except Exception as error:
        name = type(plain).__qualname__
        raise CannotConvert(f"{name} cannot be made again from its model_config: {summary(error)}") from error
    network = NetworkSpec(inputs, (), (), normalize)
    spec = ActingSpec(env, network, heads, FACTORY, factory_args=args, **acting)
    return Conversion(spec, _moves(again, plain), kept=why or "it was asked for")


def rebuild(
    leaves: Sequence[ObsLeaf],
    outputs: Mapping[str, int],
    *,
    module: str,
    model_config: dict[str, Any],
    observation_space: dict[str, Any],
    action_space: dict[str, Any],
    catalog: str | None = None,
) -> KeptModule:
    """The factory: a module of RLlib with the outputs that our distributions read."""
    try:
        import ray.rllib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{module} is a module of RLlib's: pip install 'raynforce[rllib]' to act with it") from error
    spaces = {"observation_space": space_from(observation_space), "action_space": space_from(action_space)}
    more = {} if catalog is None else {"catalog_class": load_object(catalog, "catalog")}
    made = load_object(module, "module")(inference_only=False, model_config=model_config, **spaces, **more)
    return KeptModule(made, leaves, outputs)


class KeptModule(nn.Module):
    """What `network.factory` asks for, around a module of RLlib."""

    def __init__(self, module: Any, leaves: Sequence[ObsLeaf], outputs: Mapping[str, int]) -> None:
        super().__init__()
        self.module, self._leaves, self._wanted = module, list(leaves), tuple(outputs)
        space = module.observation_space
        self._nested = isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        self._whole = _is_whole(leaves, space)
        self._image = _reads_image(leaves, space)
        if not self._nested and not self._whole:
            inputs = inputs_of(EnvSpec("", tuple(leaves), _NO_ACTION), module, convolves=self._image)
            self._read = NetworkSpec(inputs, (Tower("read", (), inputs[0].path if self._image else "input"),))
        _without_buffers(module)

    def forward(self, obs: Any) -> dict[str, Tensor]:
        from ray.rllib.core.columns import Columns

        given = {self._leaves[0].path: obs} if isinstance(obs, Tensor) else obs
        batch = {Columns.OBS: self._observation(given)}
        found: dict[str, Tensor] = {}
        if "policy" in self._wanted:
            found["policy"] = self.module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
        if "q" in self._wanted:
            found["q"] = self.module.compute_q_values(batch)["qf_preds"]
        if "value" in self._wanted:
            found["value"] = self.module.compute_values(batch).reshape(-1, 1)
        return found

    def _observation(self, obs: Mapping[str, Tensor]) -> Any:
        if self._whole:
            return obs[self._leaves[0].path].float()
        if self._nested:
            return self._below("obs", self.module.observation_space, obs)
        (found,) = encode(self._read, obs).values()
        return found.permute(0, 2, 3, 1) if self._image else found  # channels last

    def _below(self, path: str, space: Any, obs: Mapping[str, Tensor]) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            return {key: self._below(f"{path}/{key}", one, obs) for key, one in space.spaces.items()}
        if isinstance(space, gymnasium.spaces.Tuple):
            return tuple(self._below(f"{path}/{i}", one, obs) for i, one in enumerate(space.spaces))
        return obs[path].float() if isinstance(space, gymnasium.spaces.Box) else obs[path]


def _is_whole(leaves: Sequence[ObsLeaf], space: Any) -> bool:
    """Whether the module gets the observation as it is."""
    return len(leaves) == 1 and not leaves[0].sizes and leaves[0].shape == space.shape and not scales(leaves[0], space)


def _reads_image(leaves: Sequence[ObsLeaf], space: Any) -> bool:
    """Whether it gets an image that was scaled or transposed for it."""
    return len(leaves) == 1 and not _is_whole(leaves, space) and len(space.shape or ()) == 3


def _without_buffers(module: nn.Module) -> None:
    """Buffers as constant parameters: all that a policy version carries."""
    for part in module.modules():
        for name in list(part._buffers):
            buffer = part._buffers.pop(name)
            if buffer is None:
                setattr(part, name, None)
            elif not buffer.is_floating_point():
                raise CannotConvert(f"{type(part).__qualname__}.{name} is a buffer of {buffer.dtype}, not of floats")
            else:
                part.register_parameter(name, nn.Parameter(buffer.float(), requires_grad=False))


def _moves(again: KeptModule, module: nn.Module) -> tuple[Move, ...]:
    """Flat as they are: `image` and transposition are of layers of ours."""
    names = [name.removeprefix("module.") for name, _ in again.named_parameters()]
    sizes = [p.numel() for p in again.parameters()]
    missing = sorted(set(names) - set(tensors_of(module)))
    if missing:
        raise CannotConvert(f"{type(module).__qualname__} has no {missing[0]}: give the learner's module")
    offsets = accumulate(sizes, initial=0)
    return tuple(Move(Param(n, (s,), at, 0.0), n, flat=True) for n, s, at in zip(names, sizes, offsets, strict=False))


def _arguments(module: Any) -> dict[str, Any]:
    given: Any = module.model_config or {}
    config = dict(given if isinstance(given, dict) else dataclasses.asdict(given))
    for name, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise CannotConvert(f"model_config has {name!r} = {value!r}: only what JSON has can be kept") from None
    args: dict[str, Any] = {"module": _path(type(module)), "model_config": json.loads(json.dumps(config))}
    args["observation_space"] = space_to(module.observation_space)
    args["action_space"] = space_to(module.action_space)
    if module.catalog is not None:
        args["catalog"] = _path(type(module.catalog))
    return args


def _path(made: type) -> str:
    path = f"{made.__module__}:{made.__qualname__}"
    try:
        found = None if made.__module__ == "__main__" else load_object(path, "module")
    except UsageError:
        found = None
    if found is not made:
        raise CannotConvert(f"{made.__qualname__} of {made.__module__} cannot be imported: put it in a module")
    return path


def _outputs(module: Any, env: EnvSpec) -> tuple[dict[str, int], dict[str, Any]]:
    """The outputs that it acts by, with their sizes, and how."""
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.apis import QNetAPI, ValueFunctionAPI

    choices = sum(env.action.sizes)
    if Columns.ACTION_DIST_INPUTS not in _tried(module):
        if not isinstance(module, QNetAPI) or env.action.kind != "discrete":
            raise CannotConvert(f"{type(module).__qualname__}.forward_inference returns no action_dist_inputs")
        return {"q": choices}, {"exploration": "epsilon"}
    value = {"value": 1} if isinstance(module, ValueFunctionAPI) else {}
    kind = distribution_of(module, env)
    if kind == "choices":
        return {"policy": choices, **value}, {}
    size, clips = 2 * math.prod(env.action.shape), SQUASHED_RANGE if kind == "squashed" else (-WIDEST, WIDEST)
    return {"policy": size, **value}, {"gaussian": kind, "log_std_range": clips}


def _tried(module: Any) -> Any:
    """What it returns for an observation of zeros."""
    from ray.rllib.core.columns import Columns
    from ray.rllib.utils.torch_utils import convert_to_torch_tensor

    obs = create_empty_array(module.observation_space, 2, np.zeros)
    device = next(module.parameters()).device
    try:
        with torch.no_grad():
            return module.forward_inference({Columns.OBS: convert_to_torch_tensor(obs, device)})
    except Exception as error:
        raise CannotConvert(f"{type(module).__qualname__}.forward_inference raised {summary(error)}") from error


def _zeros(env: EnvSpec) -> Any:
    zeros = {leaf.path: torch.zeros(2, *leaf.shape, dtype=getattr(torch, leaf.dtype)) for leaf in env.obs}
    return zeros if len(zeros) > 1 else next(iter(zeros.values()))


# -- spaces as JSON ---------------------------------------------------------------------------------------

_NO_ACTION: Any = None
_CHOICES = {"Discrete": gymnasium.spaces.Discrete, "MultiDiscrete": gymnasium.spaces.MultiDiscrete}


def space_to(space: Any) -> dict[str, Any]:
    """A space as JSON; RLlib has a form of its own, which needs RLlib to be read."""
    kind = type(space).__name__
    if isinstance(space, gymnasium.spaces.Box):
        low, high = (_short(bound) for bound in (space.low, space.high))
        return {"kind": kind, "low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, gymnasium.spaces.Discrete):
        return {"kind": kind, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return {"kind": kind, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return {"kind": kind, "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, gymnasium.spaces.Dict):
        return {"kind": kind, "spaces": [[key, space_to(one)] for key, one in space.spaces.items()]}
    if isinstance(space, gymnasium.spaces.Tuple):
        return {"kind": kind, "spaces": [space_to(one) for one in space.spaces]}
    raise CannotConvert(f"a module with the space {space} cannot be kept")


def space_from(data: dict[str, Any]) -> Space:
    from gymnasium import spaces

    kind, rest = data["kind"], {name: value for name, value in data.items() if name != "kind"}
    if kind == "Box":
        dtype: Any = np.dtype(rest["dtype"])
        low, high = (np.broadcast_to(np.asarray(rest[name], dtype), rest["shape"]) for name in ("low", "high"))
        return spaces.Box(low, high, dtype=dtype.type)
    if kind in _CHOICES:
        made: Space = _CHOICES[kind](**rest)
        return made
    if kind == "MultiBinary":
        return spaces.MultiBinary(rest["n"])
    if kind == "Dict":
        return spaces.Dict([(key, space_from(one)) for key, one in rest["spaces"]])
    return spaces.Tuple([space_from(one) for one in rest["spaces"]])


def _short(bound: np.ndarray) -> Any:
    return bound.reshape(-1)[0].item() if bound.size and (bound == bound.reshape(-1)[0]).all() else bound.tolist()

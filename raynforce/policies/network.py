"""What a loss sees of a network, and a user's own torch module over one flat parameter tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raynforce.errors import AlgorithmError, UsageError, summary
from raynforce.policies.spec import NetworkSpec, require_named

Outputs = dict[str, Tensor]
STATE = "state0/"  # what the columns of recurrent states are called
FIRST, ROWS = "first", "rows"


class Sequences(NamedTuple):
    """How the rows of a call are laid out for a network with memory: `[L * S]`, in the order of time."""

    state: Mapping[str, Tensor]  # what is remembered before the first step, `[S, size]` each
    first: Tensor | None  # [L, S] where an episode begins, and the state is zero
    rows: Tensor | None  # [N] which of all rows outputs are made of; None: all

    @staticmethod
    def of(obs: Mapping[str, Tensor], names: Iterable[str]) -> Sequences:
        """Those that come with observations, as `observations(minibatch)` has them."""
        try:
            state = {name: obs[STATE + name] for name in names}
        except KeyError:
            raise UsageError(
                "this network has memory and was given no state: call it with observations(minibatch) of sequences, "
                "which rows(fragment, …) and shuffled(…) make"
            ) from None
        return Sequences(state, obs.get(FIRST), obs.get(ROWS))

    @property
    def width(self) -> int:
        return len(next(iter(self.state.values())))

    def selected(self, values: Tensor) -> Tensor:
        """Of all rows those that outputs are made of."""
        return values if self.rows is None else values.index_select(0, self.rows)

    def spread(self, g: Tensor, count: int) -> Tensor:
        """The derivative by all rows, from that by those."""
        return g if self.rows is None else g.new_zeros(count, *g.shape[1:]).index_copy_(0, self.rows, g)


class SomeOutputs(Outputs):
    def __init__(self, found: Mapping[str, Tensor], why: Callable[[str], str]) -> None:
        super().__init__(found)
        self._why = why

    def __missing__(self, name: str) -> Tensor:
        if why := self._why(name):
            raise UsageError(f"output {name!r} {why}")
        raise KeyError(name)


def tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """On the device; what is received read-only, and may be released, is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device, non_blocking=True)


class Network:
    """What an algorithm's loss sees of a network: a spec's (`SpecNet`), or a user's own module (`ModuleNet`)."""

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.flat = torch.from_numpy(flat.copy()).to(device)  # all parameters, float32 `[P]`; targets are copies of it
        self.parts: dict[str, slice] = {}  # where each parameter is in the flat vector
        self._shift: Tensor | None = None
        self._scale: Tensor | None = None
        self._recorded: Outputs = {}
        self.after: Outputs = {}
        """Of a network with memory: the states after each row of the last call, `[L, S, size]` each."""

    def __call__(
        self, obs: Mapping[str, Tensor], params: Tensor | None = None, only: Collection[str] = (), **named: Tensor
    ) -> Outputs:
        """Evaluate the outputs on `[N, ...]` observations, with other parameters than its own if given.

        `named` are inputs beside the observation, such as `action`; an output that reads one that is not given is left
        out; of the others `only` some are made, if given. Gradients flow to the network's own parameters and to all
        inputs. Other parameters are constants, unless they require gradients themselves. A network with memory goes
        over sequences, which `observations(minibatch)` has (`Sequences`).
        """
        raise NotImplementedError

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient `[P]` of a loss made from outputs since the last call; the next call may reuse the vector."""
        raise NotImplementedError

    def record(self, obs: Mapping[str, Tensor], only: Collection[str] = (), **named: Tensor) -> Outputs:
        """Evaluate without autograd, and keep what `backward` needs: for losses derived by hand."""
        with torch.enable_grad():
            self._recorded = self(obs, only=only, **named)
        return {k: v.detach() for k, v in self._recorded.items()}

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient `[P]` of a loss, given its gradients with respect to the outputs `record` returned."""
        self._require_recorded(gradients, self._recorded)
        with torch.enable_grad():
            return self.gradient(torch.stack([(self._recorded[k] * g).sum() for k, g in gradients.items()]).sum())

    def through(
        self, name: str, obs: Mapping[str, Tensor], only: Collection[str] = (), /, **named: Tensor
    ) -> tuple[Outputs, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Evaluate with the parameters as constants. The function that comes with the outputs turns a loss's gradients
        by them into that by the named input `name`."""
        given = named[name].detach().requires_grad_()
        with torch.enable_grad():
            made = self(obs, params=self.flat.detach(), only=only, **{**named, name: given})

        def back(gradients: Mapping[str, Tensor]) -> Tensor:
            return torch.autograd.grad([made[k] for k in gradients], given, list(gradients.values()))[0]

        return {k: v.detach() for k, v in made.items()}, back

    def normalize_with(self, shift: np.ndarray, scale: np.ndarray) -> None:
        """Set the first layer: `clip((x - shift) * scale)`."""
        if self.spec.normalizes:
            self._shift, self._scale = (torch.tensor(x, device=self.device) for x in (shift, scale))  # may be read-only

    def predict(
        self, obs: Mapping[str, np.ndarray], only: Collection[str] = (), /, **named: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Evaluate on numpy arrays, without gradients, into numpy arrays; `only` some of the outputs if given."""
        with torch.no_grad():
            given = {k: tensor(v, self.device) for k, v in named.items()}
            outputs = self._evaluate({k: tensor(v, self.device) for k, v in obs.items()}, given, only)
        return {k: v.detach().cpu().numpy().copy() for k, v in outputs.items()}  # no views of the parameters

    def _evaluate(self, obs: Mapping[str, Tensor], named: Mapping[str, Tensor], only: Collection[str]) -> Outputs:
        outputs = self(obs, **named)
        return {name: outputs[name] for name in only} if only else outputs

    def unroll(
        self, obs: Mapping[str, Tensor], params: Tensor | None = None, only: Collection[str] = ()
    ) -> tuple[Outputs, Outputs]:
        """Outputs without gradients, and the states after each row, `[L, S, size]` each."""
        with torch.no_grad():
            outputs = self(obs, params=params, only=only)
        return {k: v.detach() for k, v in outputs.items()}, {k: v.detach() for k, v in self.after.items()}

    def _require_vector(self, params: Tensor) -> None:
        if params.shape != self.flat.shape:
            wanted = f"a vector like net.flat, {list(self.flat.shape)}"
            raise UsageError(f"params has the shape {list(params.shape)}; wanted is {wanted}")

    @staticmethod
    def _require_recorded(gradients: Mapping[str, Tensor], recorded: Mapping[str, object]) -> None:
        for name in gradients:
            if name not in recorded:
                raise AlgorithmError(f"Loss.gradients has {name!r}, which net.record(obs) did not return")
        if not gradients:
            raise AlgorithmError("Loss.gradients has no derivatives: give one by each output that the loss is made of")


def derivatives(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """The gradient of a loss by each leaf; None where it does not depend on one, refused if that holds for all."""
    found: list[Tensor | None] = [*torch.autograd.grad(loss, leaves, allow_unused=True)] if leaves else []
    if all(g is None for g in found):
        raise AlgorithmError(
            "the loss does not depend on the network's parameters: make Loss.total of what net(observations(minibatch))"
            " returns in the same call of loss, without params=, torch.no_grad() or detach()"
        )
    return found


class ModuleNet(Network):
    """A user's own `torch.nn.Module` whose parameters become views into the flat vector.

    `factory(leaves, heads)` gets the observation's leaves (`raynforce.spaces.ObsLeaf`) and the outputs wanted with
    their sizes, and returns a module. Its `forward(obs)` gets a dict of `[N, ...]` tensors under the leaves' paths
    (just the tensor if there is one leaf) and returns a dict with a `[N, size]` tensor for each head. Further arguments
    of `forward` are named inputs, None by default: `forward(obs, action=None)`, which leaves out what it cannot make.
    With `network.memory=own`, `forward(obs, state)` makes one step from a state `[N, network.memory_size]`, zero where
    an episode begins, and returns that dict and the next state.
    """

    def __init__(self, spec: NetworkSpec, module: torch.nn.Module, heads: Mapping[str, int], device: torch.device):
        named = [(n, p) for n, p in module.named_parameters() if n not in {f.name for f in spec.free}]
        if not named:
            raise UsageError("network.factory returned a module without parameters: there is nothing to learn")
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            raise UsageError("network.factory returned a module with batch normalisation: use layer normalisation")
        if any(True for _ in module.buffers()):
            why = "which do not travel with the policy: make them parameters with requires_grad=False"
            raise UsageError(f"network.factory returned a module with buffers, {why}")
        start = [p.detach().float().reshape(-1).numpy() for _, p in named]
        start += [np.full(f.size, f.init, np.float32) for f in spec.free]
        super().__init__(spec, np.concatenate(start), device)
        self.module = module.to(device)
        self.heads = dict(heads)
        self._takes = _further_arguments(module)
        if bool(spec.own_state) != ("state" in self._takes):
            takes = "has no argument `state`" if spec.own_state else "takes `state`"
            fix = "let it take `state` and return outputs and the next state" if spec.own_state else "set it to own"
            raise UsageError(f"network.factory's forward {takes}, and network.memory is {_memory(spec)}: {fix}")
        self._grad = torch.zeros_like(self.flat)
        self._own: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in named:
            part = self.parts[name] = slice(offset, offset + parameter.numel())
            parameter.data = self.flat[part].view(parameter.shape)
            self._own[name] = parameter
            offset = part.stop
        for free in spec.free:
            part = self.parts[free.name] = slice(offset, offset + free.size)
            self._own[free.name] = self.flat[part].requires_grad_()
            offset = part.stop
        self._free = {free.name: self._own[free.name] for free in spec.free}
        self._learned = {name: p for name, p in self._own.items() if p.requires_grad}

    def __call__(
        self, obs: Mapping[str, Tensor], params: Tensor | None = None, only: Collection[str] = (), **named: Tensor
    ) -> Outputs:
        if named:
            require_named(named, self._takes, "network.factory's forward")
        inputs: Any = self._prepared(obs)
        if len(self.spec.inputs) == 1:
            inputs = inputs[self.spec.inputs[0].path]
        free, views = self._free, None
        if params is not None:
            self._require_vector(params)
            views = {n: params[part].view(self._own[n].shape) for n, part in self.parts.items()}
            free = {n: views.pop(n) for n in free}
        if self.spec.own_state:
            outputs = self._over_sequences(inputs, Sequences.of(obs, self.spec.states), named, views)
        else:
            outputs = self._call(inputs, named, views)
        for head, size in self.heads.items():
            given = outputs.get(head) if isinstance(outputs, dict) else outputs
            if isinstance(outputs, dict) and head not in outputs and self._takes:
                continue
            if not (isinstance(outputs, dict) and isinstance(given, Tensor) and tuple(given.shape[1:]) == (size,)):
                found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                found = found if isinstance(outputs, dict) else type(outputs).__name__
                raise UsageError(f"network.factory's module must return a dict with {head!r} [N, {size}]; got {found}")
        made = {k: v for k, v in {**outputs, **free}.items() if not only or k in only}
        return SomeOutputs(made, self._lacks) if self._takes else made

    def require_input(self, name: str) -> None:
        """Refuse a module that does not take this beside the observation."""
        if name not in self._takes:
            fix = f"let it be forward(self, obs, {name}=None), and leave out what it cannot make without"
            raise UsageError(f"network.factory's forward does not take {name!r}, which this algorithm gives it: {fix}")

    def _over_sequences(
        self, inputs: Any, sequences: Sequences, named: dict[str, Tensor], views: dict[str, Tensor] | None
    ) -> Outputs:
        """Step by step, the outputs `[N, size]` of all rows that are wanted."""
        (state,), width = sequences.state.values(), sequences.width
        several = isinstance(inputs, dict)
        length = len(next(iter(inputs.values())) if several else inputs) // width
        steps: list[Outputs] = []
        after: list[Tensor] = []
        for t in range(length):
            rows = slice(t * width, (t + 1) * width)
            if sequences.first is not None:
                state = state * ~sequences.first[t].unsqueeze(1)
            given = {k: v[rows] for k, v in inputs.items()} if several else inputs[rows]
            beside = {k: v[rows] for k, v in named.items()}
            returned = self._call(given, {**beside, "state": state}, views)
            made, found = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
            if not isinstance(made, dict) or not isinstance(found, Tensor) or found.shape != state.shape:
                wanted = f"a dict of outputs, and the next state {list(state.shape)}"
                said = f"{list(found.shape)}" if isinstance(found, Tensor) else type(returned).__name__
                raise UsageError(f"network.factory's forward must return {wanted}; as a state it returned {said}")
            state = found
            steps.append(made)
            after.append(found)
        self.after = {name: torch.stack(after) for name in self.spec.states}
        return {k: sequences.selected(torch.cat([step[k] for step in steps])) for k in steps[0]}

    def _lacks(self, head: str) -> str:
        takes = ", ".join(f"{name}=…" for name in self._takes)
        return f"was not returned by network.factory's module: does it want {takes}" if head in self.heads else ""

    def _call(self, inputs: Any, named: dict[str, Tensor], views: dict[str, Tensor] | None) -> Any:
        try:
            if views is None:
                return self.module(inputs, **named)
            return torch.func.functional_call(self.module, views, (inputs,), named)
        except Exception as error:
            given = {k: tuple(v.shape) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(inputs.shape)
            state = f" and a state {tuple(named['state'].shape)} (network.memory_size)" if "state" in named else ""
            told = f"network.factory's forward raised {summary(error)}; it was given {given}{state}"
            raise UsageError(told) from error

    def _prepared(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leaves as the module gets them: raw, but for vectors when observations are normalised."""
        prepared: dict[str, Tensor] = {}
        offset = 0
        for leaf in self.spec.inputs:
            x, part = obs[leaf.path], slice(offset, offset + leaf.width)
            offset = part.stop
            if leaf.encoding == "vector" and self._shift is not None and self._scale is not None:
                flat = (x.reshape(len(x), -1).float() - self._shift[part]) * self._scale[part]
                x = flat.clamp_(-10.0, 10.0).view(x.shape)
            prepared[leaf.path] = x
        return prepared

    def predict(
        self, obs: Mapping[str, np.ndarray], only: Collection[str] = (), /, **named: np.ndarray
    ) -> dict[str, np.ndarray]:
        self.module.eval()  # no dropout where nothing is learned
        try:
            return super().predict(obs, only, **named)
        finally:
            self.module.train()

    def gradient(self, loss: Tensor) -> Tensor:
        found = derivatives(loss, list(self._learned.values()))
        self._grad.zero_()
        for name, g in zip(self._learned, found, strict=True):
            if g is not None:
                self._grad[self.parts[name]].view(g.shape).copy_(g)
        return self._grad


def _memory(spec: NetworkSpec) -> str:
    return "own" if spec.own_state else "not own"


def _further_arguments(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        given = list(inspect.signature(module.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # some callables have none
        return ()
    return tuple(p.name for p in given if p.kind in kinds)

"""Recurrent layers of a network spec in torch: by hand in numpy on the CPU, by autograd everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from raynforce.policies import cells
from raynforce.policies.cells import CellParams, Unrolled
from raynforce.policies.network import Sequences
from raynforce.policies.spec import GRU, LSTM


class Recurrence:
    """One call of a network with memory: its sequences, and what its recurrent layers leave for a backward pass."""

    def __init__(self, sequences: Sequences | None = None) -> None:
        self.sequences = sequences
        self.kept: dict[str, Unrolled] = {}  # by layer
        self.states: dict[str, Tensor] = {}  # after each row, `[L, S, size]`

    def spread(self, back: dict[str, Tensor | None], values: Mapping[str, list[Tensor]]) -> dict[str, Tensor | None]:
        """Derivatives by the outputs of all rows, from those by the rows that were wanted."""
        assert self.sequences is not None
        if self.sequences.rows is None:
            return back
        return {
            name: g if g is None or name not in values else self.sequences.spread(g, len(values[name][-1]))
            for name, g in back.items()
        }


Now = Callable[[], Recurrence]


def bind(layer: LSTM | GRU, name: str, views: Mapping[str, Tensor], now: Now) -> Callable[[Tensor], Tensor]:
    """The layer as a function of its input `[L * S, ...]`, over views into a flat vector."""
    mine = _views(name, views)
    constant = all(not view.requires_grad for view in mine if view is not None) and mine[0].device.type == "cpu"
    params = _numpy(mine) if constant else None

    def op(x: Tensor) -> Tensor:
        call = now()
        sequences = call.sequences
        assert sequences is not None
        state, width = sequences.state[name], sequences.width
        rows = x.reshape(len(x) // width, width, -1)  # [L, S, in]
        if params is None or x.requires_grad or state.requires_grad:
            h, call.states[name] = unrolled(layer, mine, rows, state, sequences.first)
            return h.reshape(len(x), layer.size)
        first = None if sequences.first is None else sequences.first.numpy()
        made, kept = cells.unroll(layer, params, rows.numpy(), state.numpy(), first)
        call.kept[name], call.states[name] = kept, torch.from_numpy(kept.states)
        return torch.from_numpy(made).reshape(len(x), layer.size)

    return op


def bind_backward(
    layer: LSTM | GRU,
    name: str,
    views: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    now: Now,
    wanted: bool,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Writes the gradients of a layer's parameters; returns that by its input, if wanted."""
    params, d_params = _numpy(_views(name, views)), _numpy(_views(name, grads))

    def back(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
        call = now()
        assert call.sequences is not None
        shape = len(x) // call.sequences.width, call.sequences.width, -1
        first = None if call.sequences.first is None else call.sequences.first.numpy()
        given = x.reshape(shape).numpy(), first, call.kept[name], g.reshape(shape).numpy()
        d_x = cells.unroll_backward(layer, params, d_params, *given, wanted)
        return g if d_x is None else torch.from_numpy(d_x).view(x.shape)

    return back


def unrolled(
    layer: LSTM | GRU, p: tuple[Tensor, Tensor, Tensor, Tensor | None], x: Tensor, state: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs `[L, S, size]` and the states after each step, for autograd."""
    weight, h_weight, bias, h_bias = p
    size, states = layer.size, []
    gates = x @ weight + bias
    for t, gate in enumerate(gates):
        if first is not None:
            state = state * ~first[t].unsqueeze(1)
        product = state[:, :size] @ h_weight
        if isinstance(layer, LSTM):
            i, f, o, g = torch.split(gate + product, size, 1)
            cell = torch.sigmoid(f) * state[:, size:] + torch.sigmoid(i) * torch.tanh(g)
            state = torch.cat([torch.sigmoid(o) * torch.tanh(cell), cell], 1)
        else:
            assert h_bias is not None
            (r, z, n), (by_r, by_z, by_n) = torch.split(gate, size, 1), torch.split(product, size, 1)
            update = torch.sigmoid(z + by_z)
            n = torch.tanh(n + torch.sigmoid(r + by_r) * (by_n + h_bias))
            state = n + update * (state - n)
        states.append(state)
    after = torch.stack(states)
    return after[:, :, :size], after


def _views(name: str, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    weights = views[f"{name}.x.weight"], views[f"{name}.h.weight"], views[f"{name}.bias"]
    return *weights, views.get(f"{name}.h.bias")


def _numpy(views: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> CellParams:
    *weights, h_bias = views
    x, h, bias = (view.numpy() for view in weights if view is not None)
    return CellParams(x, h, bias, None if h_bias is None else h_bias.numpy())

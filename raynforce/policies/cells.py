"""Recurrent layers in numpy: one step for samplers, and whole sequences with their derivatives for learners.

Sequences are `[L, S, ...]`: L steps of S of them, side by side. Products with the input are made beforehand for all
steps; what is left for each is a product of the state and arithmetic on a few small arrays, where numpy takes less time
than torch. Sigmoids are made of tanh, which takes one call for all gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from raynforce.policies.spec import GRU, LSTM

HALF = np.float32(0.5)


class CellParams(NamedTuple):
    """The parameters of one layer: views into the flat vector, or into its gradient."""

    x: np.ndarray  # [in, gates * size]
    h: np.ndarray  # [size, gates * size]
    bias: np.ndarray  # [gates * size]
    h_bias: np.ndarray | None = None  # [size], of a GRU's candidate


def step(layer: LSTM | GRU, p: CellParams, x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output `[B, size]` and next state of one step, from inputs `[B, in]` and the state before."""
    size, gates = layer.size, x.dot(p.x)
    gates += p.bias
    if isinstance(layer, LSTM):
        gates += state[:, :size].dot(p.h)
        _gates(gates, 3 * size)
        i, f, o, g = (gates[:, k * size : (k + 1) * size] for k in range(4))
        cells = f * state[:, size:] + i * g
        h = o * np.tanh(cells)
        return h, np.concatenate([h, cells], axis=1)
    product = state.dot(p.h)
    gates[:, : 2 * size] += product[:, : 2 * size]
    _sigmoid(gates[:, : 2 * size])
    r, z = gates[:, :size], gates[:, size : 2 * size]
    n = np.tanh(gates[:, 2 * size :] + r * (product[:, 2 * size :] + p.h_bias))
    h = n + z * (state - n)
    return h, h


class Unrolled(NamedTuple):
    """What a pass over sequences leaves for its backward pass."""

    states: np.ndarray  # [L, S, state size] after each step
    gates: np.ndarray  # [L, S, gates * size], after their nonlinearities
    before: np.ndarray  # [L, S, state size] the states that steps began with
    inner: np.ndarray  # [L, S, size] of an LSTM the tanh of its cells, of a GRU the product in its candidate


def unroll(
    layer: LSTM | GRU, p: CellParams, x: np.ndarray, state: np.ndarray, first: np.ndarray | None
) -> tuple[np.ndarray, Unrolled]:
    """Outputs `[L, S, size]` for inputs `[L, S, in]` from a state `[S, …]`, which is zero before `first` `[L, S]`."""
    length, lanes, _ = x.shape
    resets = _resets(first)
    gates = x.reshape(length * lanes, -1).dot(p.x)
    gates += p.bias
    gates = gates.reshape(length, lanes, -1)
    before = np.empty((length, lanes, layer.state_size), np.float32)
    states, inner = np.empty_like(before), np.empty((length, lanes, layer.size), np.float32)
    steps = _steps(gates, state, before, states, inner, resets)
    (_lstm if isinstance(layer, LSTM) else _gru)(layer.size, p, gates, steps)
    return states[:, :, : layer.size], Unrolled(states, gates, before, inner)


Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # gates, state before, state after, inner: `[S, …]` each


def _steps(
    gates: np.ndarray,
    state: np.ndarray,
    before: np.ndarray,
    states: np.ndarray,
    inner: np.ndarray,
    resets: dict[int, np.ndarray],
) -> Iterator[Step]:
    """Each step's rows, with the state that it begins with in place; who takes them writes the others."""
    for t, gate in enumerate(gates):
        begun = before[t]
        begun[...] = state
        if t in resets:
            begun[resets[t]] = 0.0
        state = states[t]
        yield gate, begun, state, inner[t]


def _lstm(size: int, p: CellParams, gates: np.ndarray, steps: Iterator[Step]) -> None:
    three, weight = 3 * size, p.h.copy()
    weight[:, :three] *= HALF  # a sigmoid is half a tanh of the half
    gates[:, :, :three] *= HALF
    product, inside = np.empty_like(gates[0]), np.empty_like(gates[0, :, :size])
    for gate, begun, state, tanh in steps:
        np.dot(begun[:, :size], weight, out=product)
        gate += product
        np.tanh(gate, out=gate)
        sigmoids = gate[:, :three]
        sigmoids *= HALF
        sigmoids += HALF
        cells = state[:, size:]
        np.multiply(gate[:, size : 2 * size], begun[:, size:], out=cells)
        np.multiply(gate[:, :size], gate[:, three:], out=inside)
        cells += inside
        np.tanh(cells, out=tanh)
        np.multiply(gate[:, 2 * size : three], tanh, out=state[:, :size])


def _gru(size: int, p: CellParams, gates: np.ndarray, steps: Iterator[Step]) -> None:
    assert p.h_bias is not None
    two, weight = 2 * size, p.h.copy()
    weight[:, :two] *= HALF
    gates[:, :, :two] *= HALF
    product, inside = np.empty_like(gates[0]), np.empty_like(gates[0, :, :size])
    for gate, begun, state, inner in steps:
        np.dot(begun, weight, out=product)
        sigmoids = gate[:, :two]
        sigmoids += product[:, :two]
        np.tanh(sigmoids, out=sigmoids)
        sigmoids *= HALF
        sigmoids += HALF
        np.add(product[:, two:], p.h_bias, out=inner)
        candidate = gate[:, two:]
        np.multiply(gate[:, :size], inner, out=inside)
        candidate += inside
        np.tanh(candidate, out=candidate)
        np.subtract(begun, candidate, out=state)
        state *= gate[:, size:two]
        state += candidate


def unroll_backward(
    layer: LSTM | GRU,
    p: CellParams,
    d_p: CellParams,
    x: np.ndarray,
    first: np.ndarray | None,
    kept: Unrolled,
    g: np.ndarray,
    wanted: bool,
) -> np.ndarray | None:
    """Writes the gradients of the parameters, given that by the outputs `g` `[L, S, size]`; returns that by the inputs
    `[L, S, in]`, if wanted."""
    resets = _resets(first)
    if isinstance(layer, LSTM):
        d_gates = _lstm_backward(layer.size, p, kept, g, resets)
        d_h = d_gates
    else:
        d_gates, d_h = _gru_backward(layer.size, p, kept, g, resets)
    rows = d_gates.shape[0] * d_gates.shape[1]
    flat, by_h = d_gates.reshape(rows, -1), d_h.reshape(rows, -1)
    np.sum(flat, axis=0, out=d_p.bias)
    x.reshape(rows, -1).T.dot(flat, out=d_p.x)
    np.ascontiguousarray(kept.before[:, :, : layer.size]).reshape(rows, -1).T.dot(by_h, out=d_p.h)
    if d_p.h_bias is not None:
        np.sum(by_h[:, -layer.size :], axis=0, out=d_p.h_bias)
    return flat.dot(p.x.T).reshape(x.shape) if wanted else None


def _lstm_backward(
    size: int, p: CellParams, kept: Unrolled, g: np.ndarray, resets: dict[int, np.ndarray]
) -> np.ndarray:
    """The gradient by what goes into the gates, `[L, S, 4 * size]`."""
    gates, tanh = kept.gates, kept.inner
    length, lanes, three = len(gates), gates.shape[1], 3 * size
    i, f, o, n = (gates[:, :, k * size : (k + 1) * size] for k in range(4))
    # Every gate's own slope times what it is multiplied with: for all steps at once.
    slope = np.empty_like(gates)
    sigmoids = gates[:, :, :three]
    np.subtract(1, sigmoids, out=slope[:, :, :three])
    slope[:, :, :three] *= sigmoids
    np.subtract(1, np.square(n), out=slope[:, :, three:])
    slope[:, :, :size] *= n
    slope[:, :, size : 2 * size] *= kept.before[:, :, size:]
    slope[:, :, 2 * size : three] *= tanh
    slope[:, :, three:] *= i
    to_cells = 1 - np.square(tanh)
    to_cells *= o
    by_gate = slope.reshape(length, lanes, 4, size)
    d_gates = np.empty_like(gates)
    d_by_gate = d_gates.reshape(length, lanes, 4, size)
    back = np.ascontiguousarray(p.h.T)
    d_h, d_c, more = (np.zeros((lanes, size), np.float32) for _ in range(3))
    for t in range(length - 1, -1, -1):
        d_h += g[t]
        np.multiply(d_h, to_cells[t], out=more)
        d_c += more
        np.multiply(by_gate[t], d_c[:, None], out=d_by_gate[t])
        np.multiply(slope[t, :, 2 * size : three], d_h, out=d_gates[t, :, 2 * size : three])
        d_c *= f[t]
        np.dot(d_gates[t], back, out=d_h)
        if t in resets:
            d_h[resets[t]] = d_c[resets[t]] = 0.0
    return d_gates


def _gru_backward(
    size: int, p: CellParams, kept: Unrolled, g: np.ndarray, resets: dict[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients by what goes into the gates, and by the products of the state, `[L, S, 3 * size]` each."""
    gates, inner, before = kept.gates, kept.inner, kept.before
    length, lanes, two = len(gates), gates.shape[1], 2 * size
    r, z, n = (gates[:, :, k * size : (k + 1) * size] for k in range(3))
    to_candidate = (1 - z) * (1 - np.square(n))
    to_update = (before - n) * z * (1 - z)
    to_reset = inner * r * (1 - r)
    d_gates, d_products = np.empty_like(gates), np.empty_like(gates)
    back = np.ascontiguousarray(p.h.T)
    d_h, more = (np.zeros((lanes, size), np.float32) for _ in range(2))
    for t in range(length - 1, -1, -1):
        d_h += g[t]
        d_gate = d_gates[t]
        np.multiply(d_h, to_candidate[t], out=d_gate[:, two:])
        np.multiply(d_h, to_update[t], out=d_gate[:, size:two])
        np.multiply(d_gate[:, two:], to_reset[t], out=d_gate[:, :size])
        d_product = d_products[t]
        d_product[:, :two] = d_gate[:, :two]
        np.multiply(d_gate[:, two:], r[t], out=d_product[:, two:])
        d_h *= z[t]
        np.dot(d_product, back, out=more)
        d_h += more
        if t in resets:
            d_h[resets[t]] = 0.0
    return d_gates, d_products


def _gates(gates: np.ndarray, sigmoids: int) -> None:
    """In place: sigmoids of the first columns, tanh of the others."""
    part = gates[:, :sigmoids]
    part *= HALF
    np.tanh(gates, out=gates)
    part *= HALF
    part += HALF


def _sigmoid(x: np.ndarray) -> None:
    x *= HALF
    np.tanh(x, out=x)
    x *= HALF
    x += HALF


def _resets(first: np.ndarray | None) -> dict[int, np.ndarray]:
    """The rows in which sequences begin an episode, and which do, `[S]`."""
    return {} if first is None else {int(t): first[t] for t in np.flatnonzero(first.any(axis=1))}

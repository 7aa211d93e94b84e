"""Gated delta rules: recurrent layers whose state has one size, whatever the sequence is long.

A value head's state is a matrix S that maps keys to values. A token with query q, key k, value v,
rate b and decay g (at most 0) changes it and reads it:

    S <- exp(g) S,    S <- S + k (b (v - k^T S))^T,    o = q^T S

Tokens that are alone in their request's pass take this form, all requests at once; `csrc/delta.c`
has it, too. Prompts take the chunked one: within a chunk, what all tokens add to the state is the
solution of one triangular system, so that only chunks follow one another.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3.

Dimensions: T tokens, n of them computed together, N hidden size, K key heads, V value heads, D
channels of keys, E of values, C channels of the convolution, P blocks of all lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from replicas.generators.torch.plain import PlainKernels
from replicas.generators.torch.states import DeltaTokens

if TYPE_CHECKING:
    from replicas.generators.layer_specs import DeltaConfig, DeltaSpec
    from replicas.generators.torch.forward_pass import ForwardPass, Norm
    from replicas.generators.torch.linear import LinearLayer
    from replicas.generators.torch.states import StatePlaces, StateRun

_CHUNK = 64
"""Tokens whose triangular system is solved at once."""
_EPS = 1e-6
"""Added to the squared length of queries and keys. Source: transformers' `l2norm`."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """Layer of a gated delta rule, in the place of attention.

    Attributes:
        spec: What is computed.
        parts: N -> C + V * E + 2 * V: queries, keys and values of all heads, output gates, rates,
            decays.
        convolution: (kernel, C), in the dtype of states.
        decay: (V,), likewise: factor of the decays, below 0.
        decay_bias: (V,), likewise.
        norm: Of each head's output.
        o: V * E -> N.
    """

    spec: DeltaSpec
    parts: LinearLayer
    convolution: torch.Tensor
    decay: torch.Tensor
    decay_bias: torch.Tensor
    norm: Norm
    o: LinearLayer

    def __call__(self, x: torch.Tensor, index: int, run: ForwardPass) -> torch.Tensor:
        """(T, N) -> (T, V * E), what ``o`` takes; states after these tokens are written."""
        sizes, places = self.spec.sizes, run.states
        assert places is not None, "a pass of a recurrent layer has a table of states"
        heads = sizes.value_heads
        mixed, gates, rates, decays = self.parts(x).split_with_sizes(
            (sizes.channels, heads * sizes.value_dim, heads, heads), dim=-1
        )
        if run.before is not None:
            run.before(index)
        (plane,) = run.cache.planes[index]
        states = _States(plane, sizes)
        mixed = mixed.to(plane.dtype)
        rates = rates.sigmoid().to(plane.dtype)
        decays = self.decay * functional.softplus(decays.to(plane.dtype) + self.decay_bias)
        out = mixed.new_empty(len(x), heads, sizes.value_dim)
        if len(places.singles):
            if isinstance(run.kernels, PlainKernels):
                out[places.singles] = self._singles(states, places, mixed, rates, decays)
            else:
                tokens = DeltaTokens(mixed, rates, decays, self.convolution, out)
                run.kernels.step_delta(sizes, places, plane, tokens)
        for each in places.runs:
            some = slice(each.begin, each.end)
            out[some] = self._run(states, each, mixed[some], rates[some], decays[some])
        if run.after is not None:
            run.after(index)
        normed = self.norm(out.to(x.dtype).flatten(0, 1), run.kernels)
        gates = functional.silu(gates.to(plane.dtype)).reshape(normed.shape)
        return (normed * gates).to(x.dtype).view(len(x), -1)

    def _singles(
        self,
        states: _States,
        places: StatePlaces,
        mixed: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
    ) -> torch.Tensor:
        """Return (n, V, E) of tokens that are alone in their request's pass."""
        tokens = places.singles
        state, tail = states.recurrent[places.read], states.tail[places.read]
        # Blocks of new sequences may hold anything, NaN included.
        state[places.is_first] = 0.0
        tail[places.is_first] = 0.0
        seen = torch.cat((tail, mixed[tokens, None]), dim=1)
        states.tail[places.written] = seen[:, 1:]
        q, k, v = self._heads(functional.silu((seen * self.convolution).sum(1)))
        state *= decays[tokens, :, None, None].exp()
        missing = (v - (k[..., None, :] @ state)[..., 0, :]) * rates[tokens, :, None]
        state += k[..., None] * missing[..., None, :]
        states.recurrent[places.written] = state
        return torch.matmul(q[..., None, :], state)[..., 0, :]

    def _run(
        self,
        states: _States,
        run: StateRun,
        mixed: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
    ) -> torch.Tensor:
        """Return (n, V, E) of consecutive tokens of a request."""
        sizes, length = self.spec.sizes, len(mixed)
        if run.read is None:
            state = mixed.new_zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim)
            tail = mixed.new_zeros(sizes.kernel - 1, sizes.channels)
        else:
            state, tail = states.recurrent[run.read], states.tail[run.read]
        seen = torch.cat((tail, mixed))
        states.tail[run.written] = seen[length:]
        convolved = torch.zeros_like(mixed)
        for first, weight in enumerate(self.convolution):
            convolved += seen[first : first + length] * weight
        q, k, v = (part.transpose(0, 1) for part in self._heads(functional.silu(convolved)))
        out, state = chunked_delta_rule(q, k, v, rates.T, decays.T, state)
        states.recurrent[run.written] = state
        return out.transpose(0, 1)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split (n, C) into queries (n, V, D), keys (n, V, D), values (n, V, E)."""
        sizes = self.spec.sizes
        keys, each = sizes.key_heads * sizes.key_dim, sizes.value_heads // sizes.key_heads
        q, k, v = mixed.split_with_sizes((keys, keys, sizes.value_heads * sizes.value_dim), dim=-1)
        q, k = (torch.unflatten(part, -1, (sizes.key_heads, sizes.key_dim)) for part in (q, k))
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + _EPS) for part in (q, k))
        q = q * sizes.key_dim**-0.5
        return (
            q.repeat_interleave(each, dim=1),
            k.repeat_interleave(each, dim=1),
            torch.unflatten(v, -1, (sizes.value_heads, sizes.value_dim)),
        )


class _States:
    """Views of a layer's states: recurrent (P, V, D, E); tail (P, kernel - 1, C), of the inputs."""

    def __init__(self, plane: torch.Tensor, sizes: DeltaConfig) -> None:
        rows = plane.flatten(1)
        heads = sizes.value_heads, sizes.key_dim, sizes.value_dim
        tail = sizes.kernel - 1, sizes.channels
        self.recurrent = torch.unflatten(rows[:, : -tail[0] * tail[1]], 1, heads)
        self.tail = torch.unflatten(rows[:, -tail[0] * tail[1] :], 1, tail)


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute consecutive tokens, chunk by chunk.

    Args:
        q: (V, n, D), scaled.
        k: (V, n, D).
        v: (V, n, E).
        rates: (V, n).
        decays: (V, n), at most 0.
        state: (V, D, E), before the first token.

    Returns:
        (V, n, E), what the tokens read; and the state after the last.
    """
    length = q.shape[1]
    size = min(length, _CHUNK)
    padding = -length % size
    # Padding has neither rate nor decay, so that it leaves the state.
    q, k, v = (
        torch.unflatten(functional.pad(part, (0, 0, 0, padding)), 1, (-1, size))
        for part in (q, k, v)
    )
    rates, decays = (
        torch.unflatten(functional.pad(part, (0, padding)), 1, (-1, size))
        for part in (rates, decays)
    )
    total = decays.cumsum(-1)
    # The share, at each token (rows), that is left of an earlier one (columns).
    left = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    rated = k * rates[..., None]
    system = (rated @ k.mT) * left
    # What tokens add is linear in the state before the chunk: two right-hand sides, one solution.
    sides = torch.cat((v * rates[..., None], rated * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    plain, of_state = solved.split_with_sizes((v.shape[-1], k.shape[-1]), dim=-1)
    within = (q @ k.mT) * left
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for chunk in range(q.shape[1]):
        added = plain[:, chunk] - of_state[:, chunk] @ state
        out[:, chunk] = q[:, chunk] @ state + within[:, chunk] @ added
        state = whole[:, chunk] * state + k[:, chunk].mT @ added
    return out.flatten(1, 2)[:, :length], state

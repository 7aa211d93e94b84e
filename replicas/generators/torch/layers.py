"""Decoder layers made of shared operators, as their family describes them.

The order of operations and of casts is that of transformers, so that float32 results agree.

Dimensions: T tokens, N hidden size, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional

from replicas.generators.layer_specs import (
    AttentionSpec,
    DeltaSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
)
from replicas.generators.torch.delta import DeltaRule
from replicas.generators.torch.experts import ExpertDispatch, Experts
from replicas.generators.torch.forward_pass import Norm
from replicas.generators.torch.latent import LatentProducts
from replicas.generators.torch.linear import PlainLinear, make_linear
from replicas.generators.torch.plain import PlainKernels, rotated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replicas.generators.layer_specs import Activation, LayerSpec, Part
    from replicas.generators.torch.forward_pass import ForwardPass
    from replicas.generators.torch.linear import LinearLayer

    Fetch: TypeAlias = Callable[..., torch.Tensor]

_PLAIN = PlainKernels()


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention over the KV cache.

    Attributes:
        spec: What is computed.
        qkv: N -> (H + 2 * G) * D.
        o: H * D -> N.
        head_norm: (H + G, D), weight of a norm of each head that kernels compute with the rotation.
        q_norm: Norm of queries that they do not.
        k_norm: Norm of keys that they do not.
        eps: Of the norms.
        sinks: (H,) or None.
        gate: N -> H * D: its sigmoid is a factor of the result; or None.
    """

    spec: AttentionSpec
    qkv: LinearLayer
    o: LinearLayer
    head_norm: torch.Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None
    eps: float
    sinks: torch.Tensor | None
    gate: LinearLayer | None = None

    def __call__(self, x: torch.Tensor, index: int, run: ForwardPass) -> torch.Tensor:
        """(T, N) -> (T, H * D), what ``o`` takes; KV of these tokens is written."""
        spec = self.spec
        heads = self.qkv(x).view(len(x), -1, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = heads[:, : spec.num_heads], heads[:, spec.num_heads : -spec.num_kv_heads]
            for norm, part in ((self.q_norm, q), (self.k_norm, k)):
                rows = part.reshape(-1, len(norm.weight))
                part.copy_(norm(rows, run.kernels).view(part.shape))
        if run.before is not None:
            run.before(index)
        kernels = run.kernels if spec.rope.share == 1.0 else _PLAIN
        keys, values = run.cache.planes[index]
        kernels.rotate_and_store(
            heads,
            run.places_in(index, spec.rope, spec.head_dim),
            (keys, values),
            self.head_norm,
            self.eps,
        )
        attend = run.attend_any if run.attend is None else run.attend
        attended = attend(index, heads[:, : spec.num_heads], spec, self.sinks).flatten(1)
        if run.after is not None:
            run.after(index)
        return attended if self.gate is None else attended * self.gate(x).sigmoid()


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Attention over cached latents.

    Attributes:
        spec: What is computed, and what its other parts take and give.
        q_a: See ``spec``; likewise the next four, and ``o``.
        q_norm: Norm of the query latent.
        q: Rotated channels of a head lie in halves.
        kv_a: Likewise.
        kv_norm: Norm of the latent.
        products: What ``kv_b`` computes, on either side of attention.
        o: H * V -> N.
    """

    spec: LatentAttentionSpec
    q_a: LinearLayer | None
    q_norm: Norm | None
    q: LinearLayer
    kv_a: LinearLayer
    kv_norm: Norm
    products: LatentProducts
    o: LinearLayer

    def __call__(self, x: torch.Tensor, index: int, run: ForwardPass) -> torch.Tensor:
        """(T, N) -> (T, H * V), what ``o`` takes; latents of these tokens are written."""
        spec, sizes = self.spec, self.spec.sizes
        places = run.places_in(index, spec.rope, sizes.rotated)
        rows = self.kv_a(x)
        latents = self.kv_norm(rows[:, : sizes.rank].contiguous(), run.kernels)
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(self.q_a(x), run.kernels)
        q = self.q(x).view(len(x), spec.num_heads, -1)
        q[..., sizes.plain :] = rotated(q[..., sizes.plain :], places)
        key = rotated(rows[:, None, sizes.rank :], places)
        if run.before is not None:
            run.before(index)
        (plane,) = run.cache.planes[index]
        block_size = plane.shape[2]
        blocks, offsets = places.kv_positions // block_size, places.kv_positions % block_size
        plane[blocks, 0, offsets] = torch.cat((latents, key[:, 0]), dim=-1)
        attend = run.attend_any if run.attend is None else run.attend
        attended = attend(index, q, spec, latent=self.products).flatten(1)
        if run.after is not None:
            run.after(index)
        return attended


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """MLP with a gate.

    Attributes:
        gate: N -> inner.
        up: N -> inner.
        down: inner -> N.
        activation: Of the gate.
    """

    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer
    activation: Activation = "silu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, N) -> (T, N)."""
        return self.down(self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(T, N) -> (T, inner), what ``down`` takes."""
        if self.activation == "silu":
            return self.up.times(x, self.gate.swish(x))
        gate = self.gate(x)
        if self.activation == "gelu_tanh":
            return self.up.times(x, functional.gelu(gate, approximate="tanh"))
        limit = self.activation.limit
        gate, up = gate.clamp(max=limit), self.up(x).clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.activation.alpha))


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """Layer of Llama's form, which the compiled layer loop may claim.

    It is x += o(attention(qkv(norm(x)))), then x += down(silu(gate(norm(x))) * up(norm(x))).

    Attributes:
        input_norm: (N,), weight of a norm of kind "rms".
        qkv: N -> (H + 2 * G) * D: queries, keys, values.
        qk_norm: (H + G, D) norm weight per head, or None.
        o: H * D -> N.
        post_norm: (N,), likewise, before the MLP.
        gate: N -> inner.
        up: N -> inner.
        down: inner -> N.
        spec: Of the attention, which rotates whole heads.
        activation: Of the gate.
    """

    input_norm: torch.Tensor
    qkv: LinearLayer
    qk_norm: torch.Tensor | None
    o: LinearLayer
    post_norm: torch.Tensor
    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer
    spec: AttentionSpec
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Decoder layer; see ``LayerSpec`` for its parts.

    Attributes:
        attention: The attention, or what stands in its place.
        mlp: The MLP or experts.
        input_norm: Before the attention.
        attention_norm: Of its result.
        mlp_norm: Before the MLP.
        output_norm: Of its result.
    """

    attention: Attention | LatentAttention | DeltaRule
    mlp: Mlp | Experts
    input_norm: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    output_norm: Norm | None

    def __call__(
        self, x: torch.Tensor, index: int, run: ForwardPass, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the layer.

        Args:
            x: (T, N).
            index: Of this layer.
            run: The pass.
            wanted: int64 (S,), tokens that are wanted of the last layer; None for all.

        Returns:
            (T, N) or (S, N).
        """
        kernels = run.kernels
        normed = x if self.input_norm is None else self.input_norm(x, kernels)
        attended = self.attention(normed, index, run)
        if wanted is not None:
            # Nothing reads the other tokens any more.
            attended, x = (_rows(part, wanted) for part in (attended, x))
        if self.attention_norm is None:
            x = self.attention.o.plus(attended, x)
        else:
            x = x + self.attention_norm(self.attention.o(attended), kernels)
        normed = x if self.mlp_norm is None else self.mlp_norm(x, kernels)
        if self.output_norm is not None:
            return x + self.output_norm(self.mlp(normed), kernels)
        if isinstance(self.mlp, Mlp):
            return self.mlp.down.plus(self.mlp.inner(normed), x)
        return x + self.mlp(normed)

    def as_dense(self) -> DenseLayer | None:
        """Return the layer as one of Llama's form, or None if it has another."""
        attention, mlp = self.attention, self.mlp
        before, between = self.input_norm, self.mlp_norm
        if not isinstance(mlp, Mlp) or before is None or between is None:
            return None
        if not isinstance(attention, Attention):
            return None
        spec = attention.spec
        others = (
            self.attention_norm, self.output_norm, attention.q_norm, attention.k_norm,
            attention.sinks, attention.gate, spec.soft_cap,
        )  # fmt: skip
        if any(each is not None for each in others) or spec.rope.share != 1.0:
            return None
        if before.is_wide or between.is_wide:
            return None
        return DenseLayer(
            before.weight, attention.qkv, attention.head_norm, attention.o, between.weight,
            mlp.gate, mlp.up, mlp.down, spec, mlp.activation,
        )  # fmt: skip


def _rows(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    if len(indices) == len(rows) and torch.equal(indices, torch.arange(len(rows))):
        return rows
    return rows.index_select(0, indices)


class LayerMaker:
    """Maker of layers from their descriptions and the checkpoint's tensors.

    Args:
        fetch: Function that returns a tensor by its name below the layer's prefix, or the entry of
            it whose index is the second argument, in `dtype` or else that of the computation.
        eps: Of all norms.
        dispatch: The way to the ranks that have other experts, if there are any.
    """

    def __init__(self, fetch: Fetch, eps: float, dispatch: ExpertDispatch | None = None) -> None:
        self._fetch = fetch
        self._eps = eps
        self._dispatch = dispatch

    def layer(self, spec: LayerSpec) -> DecoderLayer:
        """Make a layer."""
        return DecoderLayer(
            attention=self._attention(spec.attention),
            mlp=self._mlp(spec.mlp) if isinstance(spec.mlp, MlpSpec) else self._experts(spec.mlp),
            input_norm=self._maybe_norm(spec.input_norm),
            attention_norm=self._maybe_norm(spec.attention_norm),
            mlp_norm=self._maybe_norm(spec.mlp_norm),
            output_norm=self._maybe_norm(spec.output_norm),
        )

    def norm(self, spec: NormSpec) -> Norm:
        """Make a norm."""
        eps = self._eps if spec.eps is None else spec.eps
        if spec.kind == "rms":
            return Norm(self._fetch(spec.name), eps, is_wide=False)
        weight = self._wide(spec.name)
        return Norm(weight + 1.0 if spec.kind == "offset" else weight, eps, is_wide=True)

    def _maybe_norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self.norm(spec)

    def linear(self, spec: LinearSpec) -> LinearLayer:
        """Make a linear layer."""
        bias = self._joined(spec, "bias") if spec.has_bias else None
        return make_linear(self._joined(spec, "weight"), bias)

    def _joined(self, spec: LinearSpec, kind: str) -> torch.Tensor:
        found = [self._part(part, kind)[part.taken] for part in spec.parts]
        return torch.cat(found) if len(found) > 1 else found[0].contiguous()

    def _part(self, part: Part, kind: str) -> torch.Tensor:
        if part.stack is None:
            return self._fetch(f"{part.name}.{kind}")
        if kind == "bias":
            return self._fetch(f"{part.name}_bias", part.entry)
        return self._fetch(part.name, part.entry).T

    def _attention(
        self, spec: AttentionSpec | LatentAttentionSpec | DeltaSpec
    ) -> Attention | LatentAttention | DeltaRule:
        if isinstance(spec, DeltaSpec):
            return self._delta(spec)
        return self._plain(spec) if isinstance(spec, AttentionSpec) else self._latent(spec)

    def _plain(self, spec: AttentionSpec) -> Attention:
        q_norm, k_norm = self._maybe_norm(spec.q_norm), self._maybe_norm(spec.k_norm)
        head_norm = None
        are_of_heads = (
            q_norm is not None
            and k_norm is not None
            and not q_norm.is_wide
            and len(q_norm.weight) == len(k_norm.weight) == spec.head_dim
        )
        if are_of_heads and q_norm is not None and k_norm is not None:
            head_norm = torch.cat((
                q_norm.weight.expand(spec.num_heads, -1),
                k_norm.weight.expand(spec.num_kv_heads, -1),
            ))  # fmt: skip
            q_norm = k_norm = None
        if not spec.is_gated:
            qkv, gate = self.linear(spec.qkv), None
        else:
            size, dim = spec.num_heads, spec.head_dim
            rows = torch.arange(2 * (size + spec.num_kv_heads) * dim).view(-1, dim)
            queries = torch.cat((rows[: 2 * size : 2], rows[2 * size :]))
            qkv = self._linear_of((spec.qkv,), queries.flatten())
            gate = self._linear_of((spec.qkv,), rows[1 : 2 * size : 2].flatten())
        return Attention(
            spec,
            qkv,
            self.linear(spec.o),
            head_norm,
            q_norm,
            k_norm,
            self._eps,
            None if spec.sinks is None else self._fetch(spec.sinks),
            gate,
        )

    def _latent(self, spec: LatentAttentionSpec) -> LatentAttention:
        sizes = spec.sizes
        order = torch.arange(sizes.rotated)
        if sizes.is_interleaved:
            # Pairs become halves, in queries and keys alike, which leaves their products.
            order = torch.cat((order[::2], order[1::2]))
        of_head = torch.cat((torch.arange(sizes.plain), sizes.plain + order))
        starts = torch.arange(spec.num_heads) * len(of_head)
        of_row = torch.cat((torch.arange(sizes.rank), sizes.rank + order))
        return LatentAttention(
            spec,
            None if spec.q_a is None else self.linear(spec.q_a),
            self._maybe_norm(spec.q_norm),
            self._linear_of((spec.q,), (starts[:, None] + of_head).flatten()),
            self._linear_of((spec.kv_a,), of_row),
            self.norm(spec.kv_norm),
            LatentProducts(spec, self._joined(spec.kv_b, "weight")),
            self.linear(spec.o),
        )

    def _delta(self, spec: DeltaSpec) -> DeltaRule:
        sizes = spec.sizes
        heads, each = sizes.key_heads, sizes.value_heads // sizes.key_heads
        of_values = each * sizes.value_dim
        # A key head's rows are together in the checkpoint; here those of a kind are, of all heads.
        of_head = (sizes.key_dim, sizes.key_dim, of_values, of_values)
        wide = torch.arange(heads * sum(of_head)).view(heads, -1).split_with_sizes(of_head, 1)
        narrow = (
            torch.arange(2 * sizes.value_heads).view(heads, -1).split_with_sizes((each, each), 1)
        )
        first = heads * sum(of_head)
        order = [*(part.flatten() for part in wide), *(first + part.flatten() for part in narrow)]
        convolution, decay, bias = (
            self._wide(name) for name in (spec.convolution, spec.decay, spec.decay_bias)
        )
        return DeltaRule(
            spec,
            self._linear_of((spec.qkvz, spec.ba), torch.cat(order)),
            convolution[:, 0].T.contiguous(),
            -decay.exp(),
            bias,
            self.norm(spec.norm),
            self.linear(spec.o),
        )

    def _wide(self, name: str) -> torch.Tensor:
        """Return a tensor in float32 at least."""
        weight = self._fetch(name)
        return weight.to(torch.promote_types(weight.dtype, torch.float32))

    def _linear_of(self, specs: Sequence[LinearSpec], order: torch.Tensor) -> LinearLayer:
        """Make a linear layer of the rows of several, in another order."""
        weight = torch.cat([self._joined(spec, "weight") for spec in specs])[order]
        if not specs[0].has_bias:
            return make_linear(weight, None)
        return make_linear(weight, torch.cat([self._joined(s, "bias") for s in specs])[order])

    def _mlp(self, spec: MlpSpec) -> Mlp:
        gate, up, down = (self.linear(each) for each in (spec.gate, spec.up, spec.down))
        return Mlp(gate, up, down, spec.activation)

    def _experts(self, spec: ExpertsSpec) -> Experts:
        own = range(spec.config.num_experts) if self._dispatch is None else self._dispatch.own
        router = self.linear(spec.router)
        if spec.config.routes_wide:
            weight = self._joined(spec.router, "weight")
            router = PlainLinear(weight.to(torch.promote_types(weight.dtype, torch.float32)), None)
        return Experts(
            spec.config,
            router,
            [self._mlp(spec.expert.numbered(number)) for number in own],
            self._dispatch,
            shared=None if spec.shared is None else self._mlp(spec.shared),
            shared_gate=None if spec.shared_gate is None else self.linear(spec.shared_gate),
            correction=None
            if spec.correction is None
            # Rounded like weights it would choose other experts.
            else self._fetch(spec.correction, dtype=torch.float32),
        )

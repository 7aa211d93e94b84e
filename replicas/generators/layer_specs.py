"""Decoder layers as data: sizes, names of weights, and what each layer computes. Pure.

A model family describes each of its layers by a `LayerSpec`. The weights that a checkpoint must
have, the KV of a layer, the operators that compute it and the layers that compiled code may claim
all follow from these descriptions.

Names of weights are those of the checkpoint below a layer's prefix. Dimensions: H query heads, G KV
heads, D head size, N hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replicas.generators.rope_config import RopeConfig

Shape: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = "Iterator[tuple[str, Shape]]"
"""Names and shapes of checkpoint tensors."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """GPT-OSS's gate: (up + 1) * gate * sigmoid(alpha * gate), both clamped first.

    Attributes:
        alpha: Factor inside the sigmoid.
        limit: The gate is at most this, the other from minus this to this.
    """

    alpha: float
    limit: float


Activation: TypeAlias = 'Literal["silu", "gelu_tanh"] | ClampedSwiglu'
"""Function of an MLP's gate; "gelu_tanh" is GELU's tanh approximation."""

NormKind: TypeAlias = Literal["rms", "wide", "offset"]
"""RMS norms. "rms" rounds to the model's dtype before it multiplies by the weight, "wide" after.
"offset" is "wide" with a weight of one plus the checkpoint's tensor."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm.

    Attributes:
        name: Name of the weight.
        size: Features that are normalised together.
        kind: See `NormKind`.
        eps: Added to the mean square; None is the model's.
    """

    name: str
    size: int
    kind: NormKind = "rms"
    eps: float | None = None

    def tensors(self) -> Tensors:
        """Yield the weight."""
        yield self.name, (self.size,)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a checkpoint tensor.

    Attributes:
        name: Its name without ".weight".
        rows: How many.
        first: The first of them.
        total: Rows of the whole tensor; None if all are taken.
        step: From one of them to the next.
        stack: Matrices in the tensor, if it has those of all experts, (experts, columns, rows)
            under its name alone, with biases (experts, rows) under "_bias".
        entry: Which of them.
    """

    name: str
    rows: int
    first: int = 0
    total: int | None = None
    step: int = 1
    stack: int | None = None
    entry: int = 0

    @property
    def taken(self) -> slice:
        """The rows."""
        return slice(self.first, self.first + self.rows * self.step, self.step)

    def numbered(self, number: int) -> Part:
        """Return this with a number in place of the "{}" of its name, or as its entry."""
        return replace(self, name=self.name.format(number), entry=number)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Linear layer whose weight is one part of a checkpoint tensor, or several joined by rows.

    Attributes:
        parts: In order.
        columns: Input features.
        has_bias: Whether there are biases beside the weights.
    """

    parts: tuple[Part, ...]
    columns: int
    has_bias: bool = False

    def tensors(self) -> Tensors:
        """Yield the weights and biases."""
        for part in self.parts:
            rows = part.rows if part.total is None else part.total
            if part.stack is not None:
                yield part.name, (part.stack, self.columns, rows)
                if self.has_bias:
                    yield f"{part.name}_bias", (part.stack, rows)
                continue
            yield f"{part.name}.weight", (rows, self.columns)
            if self.has_bias:
                yield f"{part.name}.bias", (rows,)


def linear(name: str, rows: int, columns: int, has_bias: bool = False) -> LinearSpec:
    """Return a linear layer of one checkpoint tensor."""
    return LinearSpec((Part(name, rows),), columns, has_bias)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention whose keys and values are cached per KV head.

    Attributes:
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        qkv: N -> (H + 2 * G) * D: queries, keys, values.
        o: H * D -> N.
        rope: Rotation of queries and keys; channel i of the rotated ones is paired with the one
            half of them further.
        q_norm: Norm of the queries, of each head or, if its size is H * D, of all together.
        k_norm: Norm of the keys, likewise.
        window: Tokens that a position sees, its own included; None for all.
        scale: Factor of the scores; None is D ** -0.5.
        soft_cap: Scores s become soft_cap * tanh(s / soft_cap).
        sinks: Name of a tensor (H,) of scores that take weight and give no value.
        is_gated: Behind each head's query, the first part of ``qkv`` has as many rows of a gate:
            their sigmoids are factors of what the head attends to.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearSpec
    o: LinearSpec
    rope: RopeConfig
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    is_gated: bool = False

    def tensors(self) -> Tensors:
        """Yield all weights."""
        yield from self.qkv.tensors()
        yield from self.o.tensors()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.tensors()
        if self.sinks is not None:
            yield self.sinks, (self.num_heads,)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention (MLA).

    Attributes:
        rank: Latent of a token, of which all heads' keys and values are made.
        query_rank: Latent that queries are made of; None if of the hidden state.
        rotated: Channels of queries, and of the one key of all heads, that are rotated.
        plain: Channels of each head's queries and keys that are not.
        value: Of each head.
        is_interleaved: Channel 2 i of the rotated ones is paired with 2 i + 1.
    """

    rank: int
    query_rank: int | None
    rotated: int
    plain: int
    value: int
    is_interleaved: bool = True

    @property
    def row(self) -> int:
        """Elements that are cached of a token: its latent, and the rotated key."""
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Attention over a cached latent of each token; P plain, R rotated, V value channels, L latent.

    Attributes:
        num_heads: H.
        sizes: Of the parts.
        q: N, or the query latent, -> H * (P + R).
        kv_a: N -> L + R: latent and rotated key.
        kv_norm: Norm of the latent.
        kv_b: L -> H * (P + V): plain parts of keys, and values.
        o: H * V -> N.
        rope: Rotation.
        scale: Factor of the scores.
        q_a: N -> query latent, or None.
        q_norm: Norm of the query latent, or None.
    """

    num_heads: int
    sizes: LatentConfig
    q: LinearSpec
    kv_a: LinearSpec
    kv_norm: NormSpec
    kv_b: LinearSpec
    o: LinearSpec
    rope: RopeConfig
    scale: float
    q_a: LinearSpec | None = None
    q_norm: NormSpec | None = None

    window: ClassVar[None] = None
    soft_cap: ClassVar[None] = None

    @property
    def head_dim(self) -> int:
        """Channels that ``rope`` is for."""
        return self.sizes.rotated

    def tensors(self) -> Tensors:
        """Yield all weights."""
        parts = self.q_a, self.q_norm, self.q, self.kv_a, self.kv_norm, self.kv_b, self.o
        for part in parts:
            if part is not None:
                yield from part.tensors()


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of gated delta rules; K key heads, V value heads, each key head serves V / K of them.

    Attributes:
        key_heads: K, also of queries.
        value_heads: V.
        key_dim: Channels of a head's queries and keys, D.
        value_dim: Channels of a head's values, E.
        kernel: Tokens that the convolution sees, the last one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: of all queries, keys and values, 2 * K * D + V * E."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Elements of a sequence's state: V * D * E, then channels * (kernel - 1)."""
        recurrent = self.value_heads * self.key_dim * self.value_dim
        return recurrent + self.channels * (self.kernel - 1)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta rule: a recurrent layer in the place of attention.

    The rows of ``qkvz`` are, for each key head: query, key, the values and then the output gates of
    the value heads that it serves. Those of ``ba``, likewise: their rates, their decays.

    Attributes:
        sizes: Of heads and states.
        qkvz: N -> 2 * K * D + 2 * V * E.
        ba: N -> 2 * V.
        convolution: Name of a tensor (channels, 1, kernel).
        decay: Name of a tensor (V,), logarithms.
        decay_bias: Name of a tensor (V,).
        norm: Of each value head's output.
        o: V * E -> N.
    """

    sizes: DeltaConfig
    qkvz: LinearSpec
    ba: LinearSpec
    convolution: str
    decay: str
    decay_bias: str
    norm: NormSpec
    o: LinearSpec

    window: ClassVar[None] = None

    def tensors(self) -> Tensors:
        """Yield all weights."""
        for part in (self.qkvz, self.ba, self.norm, self.o):
            yield from part.tensors()
        yield self.convolution, (self.sizes.channels, 1, self.sizes.kernel)
        for name in (self.decay, self.decay_bias):
            yield name, (self.sizes.value_heads,)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """MLP with a gate: down(activation(gate(x)) * up(x)), or as `ClampedSwiglu` says.

    Attributes:
        gate: N -> inner.
        up: N -> inner.
        down: inner -> N.
        activation: Of the gate.
    """

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation = "silu"

    def tensors(self) -> Tensors:
        """Yield all weights."""
        for each in (self.gate, self.up, self.down):
            yield from each.tensors()

    def numbered(self, number: int) -> MlpSpec:
        """Return this for one expert; see `Part.numbered`."""
        gate, up, down = (_numbered(each, number) for each in (self.gate, self.up, self.down))
        return MlpSpec(gate, up, down, self.activation)


def _numbered(spec: LinearSpec, number: int) -> LinearSpec:
    return replace(spec, parts=tuple(part.numbered(number) for part in spec.parts))


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Settings of experts.

    Attributes:
        num_experts: Experts of a layer.
        num_per_token: Experts that compute each token.
        intermediate_size: Size inside one expert.
        is_normalised: The weights of a token's experts are scaled to sum to 1.
        rounds_shares: These weights are rounded to the model's dtype.
        scoring: Function of the router's products.
        routes_wide: The router computes in float32 at least.
        scale: Factor of the weights.
        num_groups: Groups of as many experts each.
        groups_per_token: The best so many of them have a token's experts. Groups compare by their
            best expert, or with a correction by the sum of the best two.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    is_normalised: bool
    rounds_shares: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    routes_wide: bool = False
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts in place of an MLP.

    Attributes:
        config: How tokens are routed.
        router: N -> E.
        expert: Each expert, with "{}" for its number in the names, or in stacks.
        shared: MLP of all tokens beside the experts, or None.
        shared_gate: N -> 1: the sigmoid of its product is a factor of the shared MLP's result.
        correction: Name of a tensor (E,) that is added to scores for the choice of experts alone.
    """

    config: ExpertsConfig
    router: LinearSpec
    expert: MlpSpec
    shared: MlpSpec | None = None
    shared_gate: LinearSpec | None = None
    correction: str | None = None

    def tensors(self) -> Tensors:
        """Yield all weights."""
        yield from self.router.tensors()
        for number in range(self.config.num_experts):
            yield from self.expert.numbered(number).tensors()
        for each in (self.shared, self.shared_gate):
            if each is not None:
                yield from each.tensors()
        if self.correction is not None:
            yield self.correction, (self.config.num_experts,)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Decoder layer: x += attention(x), then x += mlp(x), each between up to two norms.

    Attributes:
        attention: The attention, or what stands in its place.
        mlp: The MLP or experts.
        input_norm: Before the attention.
        attention_norm: Of the attention's result, before it is added.
        mlp_norm: Before the MLP.
        output_norm: Of the MLP's result, before it is added.
    """

    attention: AttentionSpec | LatentAttentionSpec | DeltaSpec
    mlp: MlpSpec | ExpertsSpec
    input_norm: NormSpec | None = None
    attention_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    output_norm: NormSpec | None = None

    def tensors(self) -> Tensors:
        """Yield all weights, each name once or more."""
        parts = (
            self.input_norm, self.attention, self.attention_norm, self.mlp_norm, self.mlp,
            self.output_norm,
        )  # fmt: skip
        for part in parts:
            if part is not None:
                yield from part.tensors()

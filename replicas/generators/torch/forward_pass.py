"""What the layers of a forward pass share, and their norms.

Dimensions: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from replicas.generators.protocol import LayerCallback
    from replicas.generators.rope_config import RopeConfig
    from replicas.generators.torch.kernels import Kernels
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.plain import Attend, PlainKernels, TokenPlaces
    from replicas.generators.torch.states import StatePlaces

    RopeKey: TypeAlias = tuple[RopeConfig, int]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """What the layers of a pass have in common.

    Attributes:
        cache: Written and read.
        kernels: Norms and rotations.
        places: Of the tokens, by KV group, then by the rotation of a layer and its heads' size.
        attend: Attention of layers that compiled code computes, or None.
        attend_any: Attention of any layer.
        before: Called with each layer's index before its attention and any write, or None.
        after: Called with each layer's index after its attention, or None.
        states: Of recurrent layers, if the model has any.
    """

    cache: TorchKVCache
    kernels: Kernels | PlainKernels
    places: Sequence[Mapping[RopeKey, TokenPlaces]]
    attend: Attend | None
    attend_any: Attend
    before: LayerCallback | None
    after: LayerCallback | None
    states: StatePlaces | None = None

    def places_in(self, index: int, rope: RopeConfig, size: int) -> TokenPlaces:
        """Return the places of the tokens in a layer."""
        return self.places[self.cache.group_of[index]][rope, size]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm.

    Attributes:
        weight: (features,), in float32 at least unless of kind "rms".
        eps: Added to the variance.
        is_wide: The product with the weight is rounded, not what it multiplies.
    """

    weight: torch.Tensor
    eps: float
    is_wide: bool

    def __call__(self, x: torch.Tensor, kernels: Kernels | PlainKernels) -> torch.Tensor:
        """(T, features) -> (T, features)."""
        if not self.is_wide:
            return kernels.rms_norm(x, self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        normed = functional.rms_norm(wide, wide.shape[-1:], eps=self.eps)
        return (normed * self.weight).to(x.dtype)

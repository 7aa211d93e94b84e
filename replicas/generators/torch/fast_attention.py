"""Attention over the paged KV cache by kernels in C.

Dimensions: T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.inputs import requests_of
from replicas.generators.torch.kernels import PLAIN_SCORING, Scoring, Tiles, kernels_for
from replicas.generators.torch.native import ATTENTION_TILE

if TYPE_CHECKING:
    import numpy.typing as npt

    from replicas.generators.layer_specs import AttentionSpec, LatentAttentionSpec
    from replicas.generators.torch.inputs import Int64Array, PagedBatch
    from replicas.generators.torch.kernels import Kernels
    from replicas.generators.torch.kv_cache import TorchKVCache
    from replicas.generators.torch.latent import LatentProducts
    from replicas.generators.torch.plain import Attend, PlainKernels


class FastAttention:
    """Tokens read the blocks in place: decodes one by one, those of prompts some at a time.

    Args:
        dtype: Of all tensors.

    Attributes:
        kernels: See ``attention.AttentionBackend``.
        is_compiled: See ``attention.AttentionBackend``.
    """

    kernels: Kernels | PlainKernels
    is_compiled = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.kernels = self._kernels = kernels_for(dtype)
        self._batched = BatchedAttention()

    def prepare(self, batch: PagedBatch, cache: TorchKVCache) -> Attend:
        """Return the attention function of a pass; see ``attention.AttentionBackend.prepare``."""
        parts = _parts(batch)
        by_group = [[replace(t, tables=table) for t in parts] for table in batch.block_table]
        prompts: list[tuple[torch.Tensor, Attend]] = []

        def attend(
            layer: int,
            q: torch.Tensor,
            spec: AttentionSpec | LatentAttentionSpec | None = None,
            sinks: torch.Tensor | None = None,
            latent: LatentProducts | None = None,
        ) -> torch.Tensor:
            if latent is not None:
                if not prompts and any(tiles.size > 1 for tiles in parts):
                    tokens, several = requests_of(batch, np.diff(batch.query_start_loc) > 1)
                    prompts.append((tokens, self._batched.prepare(several, cache)))
                return attend_latent(layer, q, cast("LatentAttentionSpec", spec), latent)
            keys, values = cache.planes[layer]
            out = q.new_empty(*q.shape[:2], values.shape[-1])
            scoring = PLAIN_SCORING
            if spec is not None:
                scoring = Scoring(spec.scale, spec.window, spec.soft_cap, sinks)
            for tiles in by_group[cache.group_of[layer]]:
                self._kernels.attend(q, tiles, (keys, values), out, scoring)
            return out

        def attend_latent(
            layer: int, q: torch.Tensor, spec: LatentAttentionSpec, latent: LatentProducts
        ) -> torch.Tensor:
            """Let decodes read latents in place; keys and values of prompts are made of them."""
            out = q.new_empty(*q.shape[:2], latent.value)
            (plane,) = cache.planes[layer]
            planes = plane, plane[..., : latent.rank]
            for tiles in by_group[cache.group_of[layer]]:
                if tiles.size == 1:
                    tokens = torch.from_numpy(tiles.tokens)
                    own = replace(tiles, tokens=np.arange(len(tokens)))
                    absorbed = latent.absorb(q[tokens])
                    found = q.new_empty(*absorbed.shape[:2], latent.rank)
                    self._kernels.attend(absorbed, own, planes, found, Scoring(spec.scale))
                    out[tokens] = latent.values(found)
            for tokens, attend_some in prompts:
                out[tokens] = attend_some(layer, q[tokens], spec, latent=latent)
            return out

        return attend


def tiles_of(batch: PagedBatch) -> tuple[Int64Array, Int64Array]:
    """Return all tiles of a pass.

    Returns:
        int64 (4, B): the first token of each, how many, what the last of them sees, its request;
        then int64 (B,): whether it is a request's only token.
    """
    parts = _parts(batch)
    rows = [np.array([t.tokens, t.counts, t.lengths, t.requests]) for t in parts]
    are_alone = [np.full(len(t.tokens), t.size == 1, dtype=np.int64) for t in parts]
    return np.concatenate(rows, axis=1), np.concatenate(are_alone)


def _parts(batch: PagedBatch) -> list[Tiles]:
    """Return the tiles of requests with one token, and those of others; with the first table."""
    counts = np.diff(batch.query_start_loc)
    kinds = ((1, counts == 1), (ATTENTION_TILE, counts > 1))
    return [_tiles(batch, which, size) for size, which in kinds if which.any()]


def _tiles(batch: PagedBatch, which: npt.NDArray[np.bool_], size: int) -> Tiles:
    """Return the tokens of some requests, a request's in tiles from its first on."""
    requests = np.flatnonzero(which)
    starts, ends = batch.query_start_loc[requests], batch.query_start_loc[requests + 1]
    num_tiles = -(-(ends - starts) // size)
    rows = np.repeat(np.arange(len(requests)), num_tiles)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    tokens = starts[rows] + places * size
    counts = np.minimum(ends[rows] - tokens, size)
    lengths = batch.seq_lens[requests][rows] - (ends[rows] - tokens - counts)
    # Longest first: threads take them in order, and the last ones should be short.
    order = np.argsort(-lengths, kind="stable")
    owners = requests[rows]
    return Tiles(
        size, tokens[order], counts[order], lengths[order], owners[order], batch.block_table[0]
    )

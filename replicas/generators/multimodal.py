"""Interface of image and encoder-decoder generators, beyond the text-only one.

No model of this package uses it yet. It is typed from the start because it determines what the
engine must keep per sequence: model inputs by name, masks kept from prefill for every decode, and a
second block table for cross attention. Notation as in ``protocol.py``.

Source: Tenstorrent's vLLM integration interface (``images``, ``pixel_values``,
``cross_page_table``, ``max_cross_attn_tokens``).
"""

# The interface is fixed by other projects, so its methods keep all of their arguments.
# ruff: noqa: PLR0913

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from replicas.generators.protocol import (
    DeviceSamplingParams,
    ForwardOutput,
    GeneratorBase,
    KVCache,
    TextDecoder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class ProcessedInputs:
    """Result of an input processor for a request with images.

    Attributes:
        token_ids: Decoder tokens, image placeholders expanded.
        encoder_token_ids: Encoder (cross attention) tokens; empty without cross attention.
        model_inputs: Keyword arguments for ``prefill_forward``, by name.
    """

    token_ids: tuple[int, ...]
    encoder_token_ids: tuple[int, ...]
    model_inputs: Mapping[str, object]


class InputProcessor(Protocol):
    """Callable that turns a prompt with images into tokens and model inputs, before queueing."""

    def __call__(self, token_ids: Sequence[int], images: Sequence[object]) -> ProcessedInputs:
        """Process one request.

        Args:
            token_ids: The prompt with one placeholder per image.
            images: Decoded images in prompt order.

        Returns:
            The inputs, whose token counts decide how many blocks the sequence needs.
        """
        ...


class MultimodalGenerator(GeneratorBase, TextDecoder, Protocol):
    """Decoder model for images and text; ``decode_forward`` is the text-only one."""

    def prefill_forward(
        self,
        *,
        tokens: torch.Tensor,
        page_table: torch.Tensor,
        kv_cache: KVCache,
        enable_trace: bool,
        prompt_lens: torch.Tensor,
        start_pos: torch.Tensor,
        empty_slots: Sequence[int],
        sampling_params: DeviceSamplingParams | None = None,
        page_tables_per_layer: Sequence[torch.Tensor] | None = None,
        pixel_values: Sequence[torch.Tensor | None] | None = None,
        image_grid_thw: Sequence[torch.Tensor | None] | None = None,
        images: Sequence[Sequence[object]] | None = None,
        **kwargs: object,
    ) -> ForwardOutput:
        """Prefill as ``Generator.prefill_forward`` does, with images.

        Args:
            tokens: As for text.
            page_table: As for text.
            kv_cache: As for text.
            enable_trace: As for text.
            prompt_lens: As for text.
            start_pos: As for text.
            empty_slots: As for text.
            sampling_params: As for text.
            page_tables_per_layer: As for text.
            pixel_values: Per row float (images, channels, height, width) or the model's own patch
                shape, None for a row without images.
            image_grid_thw: Per row int64 (images, 3), patches in time, height and width.
            images: Older form: per row the decoded images themselves. Never with ``pixel_values``.
            **kwargs: As for text.

        Returns:
            As for text; a model with multi-axis rope returns (output, rope deltas int (N, 1)).
        """
        ...


class EncoderDecoderGenerator(GeneratorBase, Protocol):
    """Model whose text attends to encoder tokens through a second, cross-attention block table.

    Cross KV is in the same cache as self-attention KV, in separate blocks.
    """

    @property
    def max_cross_attn_tokens(self) -> int:
        """Most encoder tokens of one sequence; sets the cross page table's width."""
        ...

    def prefill_forward(
        self,
        *,
        tokens: torch.Tensor,
        images: Sequence[Sequence[object]],
        page_table: torch.Tensor,
        kv_cache: KVCache,
        prompt_lens: torch.Tensor,
        cross_page_table: torch.Tensor,
        empty_slots: Sequence[int],
        sampling_params: DeviceSamplingParams | None = None,
        **kwargs: object,
    ) -> tuple[ForwardOutput, list[Any], list[Any]]:
        """Encode the images, write cross KV, then prefill the text.

        Args:
            tokens: int32 (N, max(prompt_lens)), right zero padded.
            images: Per row its decoded images.
            page_table: int32 (N, K).
            kv_cache: From ``allocate_kv_cache``; holds self and cross blocks.
            prompt_lens: int (N,), END position.
            cross_page_table: int32 (N, blocks of the longest image input), zero padded.
            empty_slots: N global slots.
            sampling_params: Sample on device; None returns logits.
            **kwargs: Inputs that this model does not use.

        Returns:
            (output, cross_attention_masks, full_text_row_masked_out_mask); the engine keeps the two
            masks per request and gives them back to every decode.
        """
        ...

    def decode_forward(
        self,
        *,
        tokens: torch.Tensor,
        start_pos: torch.Tensor,
        cross_attention_masks: list[Any],
        full_text_row_masked_out_mask: list[Any],
        page_table: torch.Tensor,
        kv_cache: KVCache,
        cross_page_table: torch.Tensor,
        enable_trace: bool,
        read_from_device: bool = True,
        sampling_params: DeviceSamplingParams | None = None,
        **kwargs: object,
    ) -> ForwardOutput:
        """Decode one token per row as ``Generator.decode_forward``, attending to the encoder too.

        Args:
            tokens: int32 (B, 1).
            start_pos: int32 (B,), -1 in padding rows.
            cross_attention_masks: B masks from prefill; None in padding rows.
            full_text_row_masked_out_mask: B masks from prefill; None in padding rows.
            page_table: int32 (B, K).
            kv_cache: From ``allocate_kv_cache``.
            cross_page_table: int32 (B, ceil(max_cross_attn_tokens / block_size)), zero padded.
            enable_trace: Replay the captured trace.
            read_from_device: False returns device handles.
            sampling_params: Sample on device; None returns logits.
            **kwargs: Reload commands of decode contract 1, and inputs this model does not use.

        Returns:
            Logits float (B, 1, V).
        """
        ...

"""Inspection of classes of every generation."""

from __future__ import annotations

from typing import Any

import pytest

from replicas.errors import ConfigError
from replicas.generators.plugin.adapter import adapt
from replicas.generators.plugin.signatures import read_entry, read_signature
from tests.replicas.generators.plugin.doubles import Legacy, Seed, SeedV1

DRAWS_8 = {"output_tokens_per_step": 8, "supports_sample_on_device": True}


class Minimal:
    """A class with only the methods that every class has; takes all arguments."""

    @classmethod
    def initialize_vllm_model(
        cls, hf_config: Any, mesh_device: Any, max_batch_size: Any, **kw: Any
    ):
        return cls()

    def allocate_kv_cache(self, *args: Any, **kwargs: Any) -> None: ...

    def warmup_model_prefill(self, *args: Any, **kwargs: Any) -> None: ...

    def prefill_forward(self, *args: Any, **kwargs: Any) -> None: ...

    def decode_forward(self, *args: Any, **kwargs: Any) -> None: ...


def test_takes_something_out_before_it_passes_the_rest_on() -> None:
    """Image models do so with arguments that the text model does not take."""

    class Taking(Seed):
        def decode_forward(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.pop("rope_deltas_all_users", None)
            if kwargs.get("slot_remap") is not None:
                del kwargs["slot_remap"]
            return super().decode_forward(*args, **kwargs)

    decode = read_signature(Taking).decode
    assert decode.takes("rope_deltas_all_users")
    assert decode.takes("slot_remap")
    assert decode.takes("sampling_params")
    assert not decode.takes("reset_batch")


def test_older_readers() -> None:
    """Read-out without ``async_read`` is not split: such a class reads in ``decode_forward``."""

    class Older(Minimal):
        def read_decode_output(self, tt_out: Any, unpadded_batch: int) -> None: ...

        def process_decode_output_host(self, tt_out: Any, is_tokens: bool = False) -> None: ...

    assert not read_signature(Older).splits_read


def test_later_contract() -> None:
    """Later ones must be supersets of the first."""

    class Later(Minimal):
        decode_input_update_contract = 2

    assert read_signature(Later).contract == 1


def test_lacks_a_method() -> None:
    with pytest.raises(ConfigError, match="object lacks initialize_vllm_model"):
        read_entry(object)
    with pytest.raises(ConfigError, match=r"object lacks allocate_kv_cache, warmup_model_prefill"):
        read_signature(object)
    half = type("Half", (Minimal,), {"decode_forward": None, "warmup_model_prefill": None})
    with pytest.raises(ConfigError, match="Half lacks warmup_model_prefill, decode_forward"):
        read_entry(half)


def test_first_arguments_have_any_names() -> None:
    """They are positional: older classes name the mesh after a machine."""

    class Named(Minimal):
        @classmethod
        def initialize_vllm_model(cls, hf_config: Any, t3k_mesh_device: Any, max_batch_size: Any):
            return cls()

    assert read_entry(Named).initialize.in_order[1] == "t3k_mesh_device"


def test_factory_class_that_requires_an_unknown_argument() -> None:
    class Chooses:
        @classmethod
        def initialize_vllm_model(
            cls, hf_config: Any, mesh_device: Any, max_batch_size: Any, gpu: Any
        ): ...

    with pytest.raises(ConfigError, match="Chooses: initialize requires gpu, which a text-only"):
        read_entry(Chooses)


def test_requires_images() -> None:
    """Encoder-decoder models need what no text-only engine has."""

    class Vision(Minimal):
        def prefill_forward(
            self, tokens: Any, images: Any, page_table: Any, cross_page_table: Any, **kwargs: Any
        ) -> None: ...

    with pytest.raises(ConfigError, match="prefill requires cross_page_table, which a text-only"):
        read_signature(Vision)


def test_marker_without_commands() -> None:
    class Marked(Seed):
        decode_input_update_contract = 1

    with pytest.raises(
        ConfigError, match="decode_forward does not accept reload_inputs, reload_page"
    ):
        read_signature(Marked)


# --- capabilities ---------------------------------------------------------------------------------


def test_silent_class_has_no_prefix_cache() -> None:
    """Its notes name the features that it does not declare."""
    adapted = adapt(Minimal)
    assert not adapted.model_capabilities.get("supports_prefix_caching")
    assert adapted.notes == (
        "supports_prefix_caching is off: the class does not declare it",
        "supports_chunked_prefill is off: the class does not declare it",
    )
    assert not hasattr(adapted, "get_max_tokens_all_users")


def test_declared_but_impossible() -> None:
    class Promising(Seed):
        model_capabilities = {  # noqa: RUF012
            "supports_prefix_caching": True,
            "supports_chunked_prefill": True,
            "supports_async_decode": True,
            "supports_spec_decode": True,
            "supports_mixed_batch": True,
            "supports_hidden_states": True,
        }

    adapted = adapt(Promising)
    assert adapted.model_capabilities == {
        "supports_prefix_caching": False,
        "supports_chunked_prefill": False,
        "supports_async_decode": False,
        "supports_spec_decode": False,
        "supports_async_spec_decode": False,
        "supports_device_penalties": False,
        "supports_sample_in_prefill": True,
        "samples_on_device_if_asked": True,
        "reads_decode_later": True,
    }
    assert [note.partition(":")[0] for note in adapted.notes] == [
        "supports_prefix_caching is off, though declared",
        "supports_chunked_prefill is off, though declared",
        "supports_async_decode is off, though declared",
        "supports_spec_decode is off, though declared",
    ]


@pytest.mark.parametrize(
    ("base", "declared", "expected"),
    [
        (Seed, {}, (True, True)),
        (Seed, {"supports_sample_on_device": False}, (False, True)),
        (Seed, {"supports_sample_on_device": True, "reads_decode_later": False}, (False, True)),
        (SeedV1, {"reads_decode_later": True}, (True, False)),
        (Legacy, {"samples_on_device_if_asked": True}, (False, True)),
        # Later classes declare what they can.
        (Legacy, {}, (False, True)),
        (Minimal, {}, (False, False)),
    ],
)  # fmt: skip
def test_what_only_the_methods_show(
    base: type, declared: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    can = adapt(type("Told", (base,), {"model_capabilities": declared})).model_capabilities
    assert (can["samples_on_device_if_asked"], can["reads_decode_later"]) == expected


def test_several_tokens_a_step_exclude_what_counts_on_one() -> None:
    declared = {**DRAWS_8, "supports_prefix_caching": True, "supports_async_decode": True}
    adapted = adapt(type("Wide", (Minimal,), {"model_capabilities": declared}))
    assert adapted.model_capabilities["output_tokens_per_step"] == 8
    assert not adapted.model_capabilities["supports_prefix_caching"]
    assert not adapted.model_capabilities["supports_async_decode"]
    reason = "the class gives several tokens a step"
    assert f"supports_prefix_caching is off, though declared: {reason}" in adapted.notes


def test_class_that_drafts_may_decode_speculatively() -> None:
    class Drafting(Minimal):
        model_capabilities = {"supports_spec_decode": True}  # noqa: RUF012

        @classmethod
        def spec_plan(cls, *args: Any) -> None: ...

        def propose_draft_tokens(self, **kwargs: Any) -> None: ...

    assert adapt(Drafting).model_capabilities["supports_spec_decode"]


def test_asynchronous_without_a_split_read() -> None:
    class Marked(Minimal):
        decode_input_update_contract = 1
        model_capabilities = {"supports_async_decode": True}  # noqa: RUF012

    adapted = adapt(Marked)
    assert adapted.model_capabilities["supports_async_decode"] is False
    assert any("lacks read_decode_output" in note for note in adapted.notes)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"output_tokens_per_step": 0}, "output_tokens_per_step is 0, not a number of tokens"),
        ({"output_tokens_per_step": True}, "output_tokens_per_step is True, not a number"),
        ({"tt_block_kv_extent_tokens": -1}, "tt_block_kv_extent_tokens is -1, not a number"),
        ({"output_tokens_per_step": 8}, "has output_tokens_per_step 8, but does not draw on the"),
        ({**DRAWS_8, "tt_block_kv_extent_tokens": 7}, "tokens 7 a step, which is less than its"),
        ({**DRAWS_8, "max_device_top_k": 32}, "every request, but its max_device_top_k is 32"),
        (["supports_prefix_caching"], "model_capabilities is a list, not a dictionary"),
    ],
)
def test_refused(declared: object, reason: str) -> None:
    cls = type("Refused", (Minimal,), {"model_capabilities": declared})
    with pytest.raises(ConfigError, match=reason):
        adapt(cls)

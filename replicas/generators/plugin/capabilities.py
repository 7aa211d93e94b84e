"""Capabilities of an adapted class: its declaration minus what its methods cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.generators.plugin.signatures import ModelSignature
    from replicas.generators.protocol import ModelCapabilities

_IF_ASKED = "samples_on_device_if_asked"
_READS_LATER = "reads_decode_later"
_WIDTH = "output_tokens_per_step"
_EXTENT = "tt_block_kv_extent_tokens"
_BLOCKS = (_WIDTH, _EXTENT, "tt_adaptive_block_output")
_NOT_WITH_BLOCKS = (
    "supports_prefix_caching",
    "supports_chunked_prefill",
    "supports_async_decode",
    "supports_spec_decode",
    "supports_async_spec_decode",
)
"""Capabilities that a class cannot have if it gives several tokens a step.
Running ahead would need the number of its tokens."""
_OURS = (
    "supports_mixed_batch",
    "supports_hidden_states",
    "supports_layer_callbacks",
    "gives_logits_beside_tokens",
    _IF_ASKED,
    _READS_LATER,
)
"""Capabilities defined by this project, which plug-in classes have no methods for."""
_SILENT_DEFAULTS = ("supports_prefix_caching", "supports_chunked_prefill")
"""Off unless declared. Logged, because both improve performance much where they are possible."""

_PENALTIES = "supports_device_penalties"
"""The only capability that defaults to True."""
_NO_STATE = "device_draws_keep_no_state"
_IN_PREFILL = "supports_sample_in_prefill"
_TOP_K = "max_device_top_k"
_LOGPROBS = "max_device_logprobs"
_BLOCK_SIZE = "required_block_size"


def adapted_capabilities(
    cls: object, class_name: str, signature: ModelSignature | None
) -> tuple[ModelCapabilities, tuple[str, ...]]:
    """Reduce a class's declared capabilities to what its methods support.

    Args:
        cls: The generator class, or a model; its ``model_capabilities`` may be missing.
        class_name: For messages.
        signature: Signature of that class; None for a factory class, whose model may reduce the
            capabilities later (`narrowed_capabilities`).

    Returns:
        The capabilities, and a sentence on each that is off.

    Raises:
        ConfigError: The declaration is not a dict, or contradicts itself.
    """
    declared: Any = getattr(cls, "model_capabilities", None) or {}
    if not isinstance(declared, dict):
        raise ConfigError(
            f"generator {class_name}: model_capabilities is a "
            f"{type(declared).__name__}, not a dictionary"
        )
    gives_blocks = _check_blocks(class_name, declared)
    merged: dict[str, Any] = {key: value for key, value in declared.items() if key not in _OURS}
    notes = [f"{key} is off: the class does not declare it" for key in _SILENT_DEFAULTS
             if key not in declared]  # fmt: skip
    impossible = [] if signature is None else _impossible(signature)
    if gives_blocks:
        impossible += [(key, "the class gives several tokens a step") for key in _NOT_WITH_BLOCKS]
    for key, reason in impossible:
        if merged.get(key):
            notes.append(f"{key} is off, though declared: {reason}")
        merged[key] = False
    merged[_IN_PREFILL] = signature is None or signature.prefill.takes("sampling_params")
    if signature is not None:
        merged |= _of_methods(signature, declared)
    return cast("ModelCapabilities", merged), tuple(notes)


def narrowed_capabilities(
    of_class: ModelCapabilities, model: object, signature: ModelSignature
) -> tuple[ModelCapabilities, tuple[str, ...]]:
    """Reduce a class's capabilities to those that its loaded model declares.

    A capability that only one of the two declares has its default in the other. For keys that are
    no abilities, such as the fabric, which is already set up, the class's value counts.

    Args:
        of_class: Result of `adapted_capabilities`.
        model: The loaded model.
        signature: Signature of the model's class.

    Returns:
        The capabilities, and a sentence on each that the model changes.

    Raises:
        ConfigError: As `adapted_capabilities`.
    """
    own: dict[str, Any] = dict(adapted_capabilities(model, signature.class_name, signature)[0])
    narrowed: dict[str, Any] = dict(of_class)
    for key in _PENALTIES, *(key for key in of_class if key.startswith("supports_")):
        default = key == _PENALTIES
        if narrowed.get(key, default) and not own.get(key, default):
            narrowed[key] = False
    if narrowed.get(_NO_STATE) and not own.get(_NO_STATE):
        narrowed[_NO_STATE] = False
    limits = [limit for limit in (narrowed.get(_TOP_K), own.get(_TOP_K)) if limit is not None]
    if limits:
        narrowed[_TOP_K] = min(limits)
    if narrowed.get(_LOGPROBS) is not None:
        count = own.get(_LOGPROBS)
        narrowed[_LOGPROBS] = None if count is None else min(narrowed[_LOGPROBS], count)
    narrowed |= {key: own[key] for key in (_IF_ASKED, _READS_LATER, *_BLOCKS) if key in own}
    if own.get(_BLOCK_SIZE) is not None:
        narrowed[_BLOCK_SIZE] = own[_BLOCK_SIZE]
    notes = tuple(
        f"{key} is {value}: the loaded model declares it"
        for key, value in narrowed.items()
        if key not in _OURS and (key, value) not in of_class.items()
    )
    return cast("ModelCapabilities", narrowed), notes


def _check_blocks(class_name: str, declared: Mapping[str, Any]) -> bool:
    """Return whether a class gives several tokens a step.

    Raises:
        ConfigError: Its declarations of them contradict each other. The rules are those of
            vllm-tt-plugin's docs/MODEL_CAPABILITIES.md.
    """
    width, extent = declared.get(_WIDTH, 1), declared.get(_EXTENT, 0)
    for key, value, least in ((_WIDTH, width, 1), (_EXTENT, extent, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"generator {class_name}: {key} is {value!r}, not a number of tokens")
    if width == 1:
        return False
    if 0 < extent < width:
        raise ConfigError(
            f"generator {class_name} writes KV of {_EXTENT} {extent} a step, which is less than "
            f"its {_WIDTH} {width}"
        )
    if not declared.get("supports_sample_on_device"):
        raise ConfigError(
            f"generator {class_name} has {_WIDTH} {width}, but does not draw on the device"
        )
    if declared.get(_TOP_K) is not None:
        raise ConfigError(
            f"generator {class_name} has {_WIDTH} {width}, so the device must draw for every "
            f"request, but its {_TOP_K} is {declared[_TOP_K]}"
        )
    return True


def _of_methods(signature: ModelSignature, declared: Mapping[str, object]) -> dict[str, bool]:
    """Return the capabilities that no class declares, because its methods show them."""
    may_sample = signature.is_original and signature.decode.takes("sampling_params")
    return {
        _IF_ASKED: may_sample and "supports_sample_on_device" not in declared,
        _READS_LATER: signature.splits_read,
    }


def _impossible(signature: ModelSignature) -> list[tuple[str, str]]:
    found = []
    if not signature.prefill.takes("start_pos"):
        reason = "its prefill_forward takes no start_pos"
        found += [("supports_prefix_caching", reason), ("supports_chunked_prefill", reason)]
    if not signature.decode.takes("sampling_params"):
        found.append(("supports_sample_on_device", "its decode_forward takes no sampling_params"))
    if not (signature.decode.takes("prompt_tokens") and signature.decode.takes("output_tokens")):
        found.append((_PENALTIES, "its decode_forward takes no prompt_tokens and output_tokens"))
    if not signature.contract:
        reason = "it is of the legacy contract, in which the model guesses when to reload"
        found.append(("supports_async_decode", reason))
    elif not signature.splits_read:
        reason = "it lacks read_decode_output or process_decode_output_host"
        found.append(("supports_async_decode", reason))
    if not signature.drafts:
        reason = "it lacks spec_plan or propose_draft_tokens"
        found += [("supports_spec_decode", reason), ("supports_async_spec_decode", reason)]
    return found

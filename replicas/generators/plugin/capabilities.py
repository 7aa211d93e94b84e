"""What an adapted class can do: what it declares, less what its methods or this engine cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from replicas.generators.plugin.signatures import ClassSignature
    from replicas.generators.protocol import ModelCapabilities

_OURS = ("supports_mixed_batch", "supports_layer_callbacks")
"""Capabilities of this project: the plugin's classes have no methods for them."""
_SILENT_DEFAULTS = ("supports_prefix_caching", "supports_chunked_prefill")
"""Off where a class does not say; worth a line, because both cost much where they could be on."""


def adapted_capabilities(
    cls: type, signature: ClassSignature
) -> tuple[ModelCapabilities, tuple[str, ...]]:
    """Merge a class's declaration with what it really takes.

    Args:
        cls: The generator class; its ``model_capabilities`` may be missing.
        signature: Of that class.

    Returns:
        The capabilities, and a sentence on each that is off for a reason.

    Raises:
        ConfigError: The declaration is no dictionary, or the class gives several tokens a step.
    """
    declared: Any = getattr(cls, "model_capabilities", None) or {}
    if not isinstance(declared, dict):
        raise ConfigError(
            f"generator {signature.class_name}: model_capabilities is a "
            f"{type(declared).__name__}, not a dictionary"
        )
    width = declared.get("output_tokens_per_step", 1)
    if width != 1:
        raise ConfigError(
            f"generator {signature.class_name} gives output_tokens_per_step {width} tokens a step, "
            "and this engine takes 1"
        )
    merged: dict[str, Any] = {key: value for key, value in declared.items() if key not in _OURS}
    notes = [f"{key} is off: the class does not declare it" for key in _SILENT_DEFAULTS
             if key not in declared]  # fmt: skip
    for key, reason in _impossible(signature):
        if merged.get(key):
            notes.append(f"{key} is off, though declared: {reason}")
        merged[key] = False
    return cast("ModelCapabilities", merged), tuple(notes)


def _impossible(signature: ClassSignature) -> list[tuple[str, str]]:
    found = []
    if not signature.prefill.takes("start_pos"):
        reason = "its prefill_forward takes no start_pos"
        found += [("supports_prefix_caching", reason), ("supports_chunked_prefill", reason)]
    if not signature.decode.takes("sampling_params"):
        found.append(("supports_sample_on_device", "its decode_forward takes no sampling_params"))
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

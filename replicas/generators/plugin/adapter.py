"""Adapter that gives generator classes written for vllm-tt-plugin our `Generator` protocol.

`adapt` derives a class from a plug-in class. The plug-in class creates the model, which may be of a
different class; calls go to the model's methods, with the arguments that these accept (`model`,
`signatures`). Source of the calls: vllm-tt-plugin ``loader.py``, ``worker.py``.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, ClassVar

from replicas.errors import ConfigError
from replicas.generators.model_config import ModelConfig
from replicas.generators.plugin.arguments import refusals, taken
from replicas.generators.plugin.capabilities import adapted_capabilities, narrowed_capabilities
from replicas.generators.plugin.checkpoints import checkpoint_for
from replicas.generators.plugin.limits import check_decode_widths
from replicas.generators.plugin.model import AdaptedModel
from replicas.generators.plugin.shim import vllm_stand_in
from replicas.generators.plugin.signatures import read_entry, read_signature

if TYPE_CHECKING:
    from replicas.generators.plugin.signatures import EntrySignature, ModelSignature
    from replicas.generators.protocol import ModelCapabilities

_LOG = logging.getLogger(__name__)


class AdaptedGenerator(AdaptedModel):
    """Base of adapted plug-in classes; `adapt` creates the usable subclasses."""

    plugin_class: ClassVar[Any]
    entry: ClassVar[EntrySignature]
    notes: ClassVar[tuple[str, ...]]

    @classmethod
    def check_checkpoint(cls, folder: str) -> None:
        """Check that the class serves a model folder, before a device is opened.

        Raises:
            ConfigError: It does not; says what to do.
        """
        checkpoint_for(cls.plugin_class, folder)

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: object,
        mesh_device: Any,  # noqa: ANN401 - a mesh of ttnn, bare or wrapped
        max_batch_size: int,
        *,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str | None = None,
    ) -> AdaptedGenerator:
        """Load the model; see `GeneratorBase.initialize_vllm_model`.

        Args:
            hf_config: Our configuration, whose folder transformers then reads, or a transformers
                one.
            mesh_device: A mesh, or an object with one as its ``device``. The class gets the whole
                mesh and creates the submeshes of its lanes.
            max_batch_size: Rows of all lanes together.
            max_seq_len: Longest sequence in tokens.
            tt_data_parallel: Lanes.
            optimizations: "performance" is every class's default and is not passed on, as some
                classes accept only None.

        Returns:
            An instance of this class, or of a subclass with reduced ``model_capabilities`` if the
            loaded model declares fewer.

        Raises:
            ConfigError: The class refuses the numbers or the checkpoint, lacks a package, or loads
                a model with unusable declarations; gives the reason.
        """
        for note in cls.notes:
            _LOG.info("generator %s: %s", cls.entry.class_name, note)
        config = _transformers_config(hf_config, cls.plugin_class)
        device = getattr(mesh_device, "device", mesh_device)
        count = getattr(device, "get_num_devices", None)
        # Tests run without a mesh: assume one chip a lane.
        num_chips = int(count()) if callable(count) else tt_data_parallel
        if num_chips % tt_data_parallel:
            raise ConfigError(
                f"tt_data_parallel {tt_data_parallel} does not divide the {num_chips} chips of the "
                "mesh"
            )
        slots_per_lane = max_batch_size // tt_data_parallel
        check_decode_widths(cls.entry.class_name, cls.plugin_class, slots_per_lane)
        settings = {
            "max_seq_len": max_seq_len,
            "tt_data_parallel": tt_data_parallel,
            "optimizations": None if optimizations == "performance" else optimizations,
        }
        what = (
            f"generator {cls.entry.class_name} cannot load its model with max_batch_size "
            f"{max_batch_size}, max_seq_len {max_seq_len}, tt_data_parallel {tt_data_parallel}"
        )
        with refusals(what), vllm_stand_in():
            model = cls.plugin_class.initialize_vllm_model(
                config, device, max_batch_size, **taken(cls.entry.initialize, settings)
            )
        with contextlib.ExitStack() as undo:
            undo.callback(getattr(model, "cleanup", _nothing))
            signature = cls._signature_of(model)
            check_decode_widths(signature.class_name, model, slots_per_lane)
            kind = cls._narrowed(model, signature)
            loaded = kind(model, signature, config, num_chips, tt_data_parallel, max_batch_size)
            undo.pop_all()
        return loaded

    @classmethod
    def _signature_of(cls, model: object) -> ModelSignature:
        if cls.entry.model is not None and type(model) is cls.plugin_class:
            return cls.entry.model
        return read_signature(type(model))

    @classmethod
    def _narrowed(cls, model: object, signature: ModelSignature) -> type[AdaptedGenerator]:
        """Return this class, or a subclass with the capabilities reduced to the model's."""
        declared = getattr(cls.plugin_class, "model_capabilities", None)
        if signature is cls.entry.model and getattr(model, "model_capabilities", None) is declared:
            return cls
        capabilities, notes = narrowed_capabilities(cls.model_capabilities, model, signature)
        for note in notes:
            _LOG.info("generator %s: %s", signature.class_name, note)
        return type(cls.__name__, (cls,), {"model_capabilities": capabilities})


def adapt(plugin_class: type) -> type[AdaptedGenerator]:
    """Create a class with our protocol from a class written for the plug-in.

    Args:
        plugin_class: A class with the plug-in's methods, of any version of the interface, or a
            factory class with only ``initialize_vllm_model``.

    Returns:
        A subclass of `AdaptedGenerator` with that class's name and capabilities. It has
        ``get_max_tokens_all_users`` only if the class does.

    Raises:
        ConfigError: The class lacks methods, or requires arguments that a text-only engine lacks.
    """
    entry = read_entry(plugin_class)
    capabilities: ModelCapabilities
    capabilities, notes = adapted_capabilities(plugin_class, entry.class_name, entry.model)
    contents: dict[str, Any] = {
        "__doc__": f"{entry.class_name} behind our protocol.",
        "__module__": plugin_class.__module__,
        "model_capabilities": capabilities,
        "plugin_class": plugin_class,
        "entry": entry,
        "notes": notes,
    }
    if entry.token_budget is not None:
        contents["get_max_tokens_all_users"] = classmethod(_max_tokens_all_users)
    return type(plugin_class.__name__, (AdaptedGenerator,), contents)


def _max_tokens_all_users(
    cls: type[AdaptedGenerator],
    *,
    model_name: str,
    num_devices: int,
    tt_data_parallel: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Return the KV tokens of one lane, all of its sequences together."""
    sizes = {
        "model_name": checkpoint_for(cls.plugin_class, model_name),
        "num_devices": num_devices,
        "tt_data_parallel": tt_data_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
    }
    assert cls.entry.token_budget is not None
    what = (
        f"generator {cls.entry.class_name} has no KV budget for {model_name} on {num_devices} "
        f"chips with max_model_len {max_model_len} and {max_num_seqs} slots"
    )
    with refusals(what):
        budget = cls.plugin_class.get_max_tokens_all_users(**taken(cls.entry.token_budget, sizes))
    return int(budget)


def _transformers_config(hf_config: object, plugin_class: type) -> Any:  # noqa: ANN401 - no base worth naming
    """Return the configuration that plug-in classes expect: transformers', named by the folder."""
    if not isinstance(hf_config, ModelConfig):
        return hf_config
    from transformers import AutoConfig  # takes seconds; only these need it

    folder = checkpoint_for(plugin_class, hf_config.name_or_path)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot read the configuration of {hf_config.name_or_path}: {error}"
        ) from error


def _nothing() -> None:
    """Do nothing: the clean-up of a model without ``cleanup``."""

"""Inspection of generator classes: which version of the plug-in interface they implement.

The interface of Tenstorrent's vLLM integration has changed several times, and classes of every
version are in use: without ``start_pos`` in prefill and with a list of sampling parameters in
warm-up (2025), with ``reset_batch`` in decode (2026), with the four commands of decode contract 1
(late 2026). A class declares its contract by the marker ``decode_input_update_contract``;
everything else is read from its methods' parameters.

A named class may be only a factory: those of tt-transformers have just ``initialize_vllm_model``,
which creates an instance of another class with the other methods. So the signature before loading
(`EntrySignature`) is separate from that of a loaded model (`ModelSignature`).

Source: vllm-tt-plugin ``async_decode.py`` and ``docs/DECODE_RELOAD_CONTRACT.md``; tt-metal
``models/tt_transformers/tt/generator_vllm.py`` of 2025 and 2026; tt-transformers
``vllm_registry.py``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, cast

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMANDS = (
    "reload_inputs",
    "reload_page_table",
    "reload_sampling_params",
    "reset_sampling_state",
)
"""Commands of decode contract 1; each is a bool, and all are passed with every decode."""

_FIRST = 3
"""Positional arguments of ``initialize_vllm_model``, whose names differ between classes."""
_EVERY_MODEL_HAS = (
    "allocate_kv_cache", "warmup_model_prefill", "prefill_forward", "decode_forward",
)  # fmt: skip
_ANSWERABLE = {
    "initialize": {
        "hf_config", "mesh_device", "max_batch_size", "max_seq_len", "tt_data_parallel",
        "optimizations",
    },
    "prefill": {
        "tokens", "page_table", "kv_cache", "enable_trace", "prompt_lens", "start_pos",
        "empty_slots", "sampling_params", "page_tables_per_layer", "images", "pixel_values",
        "image_grid_thw",
    },
    "decode": {
        "tokens", "page_table", "kv_cache", "start_pos", "enable_trace", "read_from_device",
        "sampling_params", "page_tables_per_layer", "prompt_tokens", "output_tokens",
        "reset_batch", "slot_remap", "rope_deltas_all_users", *COMMANDS,
    },
    "warmup_prefill": {
        "kv_cache", "enable_trace", "can_sample_on_device", "sampling_params", "greedy_only",
        "non_greedy_decoding_on_device",
    },
    "warmup_decode": {
        "kv_cache", "enable_trace", "max_batch_size", "num_blocks", "can_sample_on_device",
        "sampling_params", "greedy_only", "non_greedy_decoding_on_device",
    },
    "token_budget": {
        "model_name", "num_devices", "tt_data_parallel", "max_model_len", "max_num_seqs",
    },
}  # fmt: skip
"""Parameters that have a value here; a class that requires any other is not for text."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one method, without ``self`` and ``cls``.

    Attributes:
        in_order: Names of positional parameters.
        names: Names of keyword parameters.
        required: Keyword parameters without a default.
        takes_any: Whether the method has ``**kwargs``.
    """

    in_order: tuple[str, ...]
    names: frozenset[str]
    required: frozenset[str]
    takes_any: bool

    def takes(self, name: str) -> bool:
        """Return whether the method accepts a keyword."""
        return self.takes_any or name in self.names


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Methods of a loaded model and their parameters.

    Attributes:
        class_name: "module:Class" of the model, for messages.
        contract: 1 for the four reload commands, 0 for the legacy contract.
        prefill: Parameters of ``prefill_forward``.
        decode: Parameters of ``decode_forward``.
        warmup_prefill: Parameters of ``warmup_model_prefill``.
        warmup_decode: Parameters of ``warmup_model_decode``; None without it.
        splits_read: Whether it has ``read_decode_output(..., async_read)`` and
            ``process_decode_output_host(..., is_tokens)``.
        allocates_per_layer: Whether it has ``allocate_kv_cache_per_layer``.
        has_kv_cache_spec: Whether it has ``get_kv_cache_spec``.
        drafts: Whether it has ``spec_plan`` and ``propose_draft_tokens``.
        hooks: Those of ``release_request``, ``release_persistent_capture``,
            ``note_state_slots_moved`` and ``cleanup`` that it has.
    """

    class_name: str
    contract: int
    prefill: Parameters
    decode: Parameters
    warmup_prefill: Parameters
    warmup_decode: Parameters | None
    splits_read: bool
    allocates_per_layer: bool
    has_kv_cache_spec: bool
    drafts: bool
    hooks: frozenset[str]

    @property
    def is_original(self) -> bool:
        """Whether it is the interface as first documented, whose prefill takes no ``start_pos``.

        Its ``empty_slots`` only name the lanes of the rows, so a prefill may have several rows. Its
        classes could not declare `supports_sample_on_device` yet.
        """
        return not self.contract and not self.prefill.takes("start_pos")


@dataclass(frozen=True, slots=True)
class EntrySignature:
    """Methods of a named class that are called before its model is loaded.

    Attributes:
        class_name: "module:Class", for messages.
        initialize: Parameters of ``initialize_vllm_model``.
        token_budget: Parameters of ``get_max_tokens_all_users``; None without it.
        model: Signature of the class as a model; None for a factory class.
    """

    class_name: str
    initialize: Parameters
    token_budget: Parameters | None
    model: ModelSignature | None


def read_entry(cls: type) -> EntrySignature:
    """Inspect a class named as a generator.

    Args:
        cls: Any class with the plug-in's ``initialize_vllm_model``.

    Raises:
        ConfigError: It lacks that or some of a model's methods, or requires a parameter that a
            text-only engine has no value for; also as in `read_signature`.
    """
    name = _name(cls)
    if not _has(cls, "initialize_vllm_model"):
        raise ConfigError(f"generator {name} lacks initialize_vllm_model")
    only_chooses = not any(_has(cls, method) for method in _EVERY_MODEL_HAS)
    entry = EntrySignature(
        class_name=name,
        initialize=_parameters(cls, "initialize_vllm_model"),
        token_budget=_optional(cls, "get_max_tokens_all_users"),
        model=None if only_chooses else read_signature(cls),
    )
    _check_required(name, "initialize", entry.initialize, by_place=_FIRST)
    _check_required(name, "token_budget", entry.token_budget)
    return entry


def read_signature(cls: type) -> ModelSignature:
    """Inspect a model's class.

    Args:
        cls: Any class with the plug-in's methods.

    Raises:
        ConfigError: It lacks a method, requires a parameter that a text-only engine has no value
            for, or declares contract 1 without accepting its commands; names them.
    """
    name = _name(cls)
    missing = [method for method in _EVERY_MODEL_HAS if not _has(cls, method)]
    if missing:
        raise ConfigError(f"generator {name} lacks {', '.join(missing)}")
    signature = ModelSignature(
        class_name=name,
        # Later contracts are assumed to be supersets of contract 1.
        contract=min(int(getattr(cls, "decode_input_update_contract", 0) or 0), 1),
        prefill=_parameters(cls, "prefill_forward"),
        decode=_parameters(cls, "decode_forward"),
        warmup_prefill=_parameters(cls, "warmup_model_prefill"),
        warmup_decode=_optional(cls, "warmup_model_decode"),
        splits_read=_splits_read(cls),
        allocates_per_layer=_has(cls, "allocate_kv_cache_per_layer"),
        has_kv_cache_spec=_has(cls, "get_kv_cache_spec"),
        drafts=_has(cls, "spec_plan") and _has(cls, "propose_draft_tokens"),
        hooks=frozenset(
            hook
            for hook in (
                "release_request", "release_persistent_capture", "note_state_slots_moved",
                "cleanup",
            )
            if _has(cls, hook)
        ),
    )  # fmt: skip
    for call in ("prefill", "decode", "warmup_prefill", "warmup_decode"):
        _check_required(name, call, getattr(signature, call))
    refused = [command for command in COMMANDS if not signature.decode.takes(command)]
    if signature.contract and refused:
        raise ConfigError(
            f"generator {name} declares decode_input_update_contract = 1, but its "
            f"decode_forward does not accept {', '.join(refused)}"
        )
    return signature


def _check_required(name: str, call: str, parameters: Parameters | None, by_place: int = 0) -> None:
    if parameters is None:
        return
    unknown = parameters.required - set(parameters.in_order[:by_place]) - _ANSWERABLE[call]
    if unknown:
        raise ConfigError(
            f"generator {name}: {call} requires {', '.join(sorted(unknown))}, which a text-only "
            "engine cannot provide"
        )


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _has(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def _splits_read(cls: type) -> bool:
    if not (_has(cls, "read_decode_output") and _has(cls, "process_decode_output_host")):
        return False
    return _parameters(cls, "read_decode_output").takes("async_read") and _parameters(
        cls, "process_decode_output_host"
    ).takes("is_tokens")


def _optional(cls: type, name: str) -> Parameters | None:
    return _parameters(cls, name) if _has(cls, name) else None


def _parameters(cls: type, name: str) -> Parameters:
    method, mentioned = _what_runs(cls, name)
    parameters = inspect.signature(method).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return Parameters(
        in_order=tuple(name for name in by_place if name not in {"self", "cls"}),
        names=mentioned.union(p.name for p in named) - {"self", "cls"},
        required=frozenset(p.name for p in named if p.default is p.empty) - {"self", "cls"},
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _what_runs(cls: type, name: str) -> tuple[Callable[..., object], frozenset[str]]:
    """Return the method, or the base class's method that it forwards all arguments to.

    tt_transformers' classes are full of ``def prefill_forward(self, *args, **kwargs): return
    super().prefill_forward_text(*args, **kwargs)``. The second's parameters count, plus the string
    constants of the first, which may be keys that it pops from ``kwargs``.
    """
    method, mentioned = _function(cls, name), frozenset[str]()
    seen = {method}
    while isinstance(method, FunctionType) and _passes_everything_on(method):
        targets = {
            target
            for called in method.__code__.co_names
            if (target := _inherited(cls, method, called)) is not None
        } - seen
        if len(targets) != 1:
            break
        mentioned = mentioned.union(c for c in method.__code__.co_consts if isinstance(c, str))
        method = targets.pop()
        seen.add(method)
    return method, mentioned


def _passes_everything_on(method: FunctionType) -> bool:
    parameters = list(inspect.signature(method).parameters.values())
    kinds = {parameter.kind for parameter in parameters[1:]}
    return "super" in method.__code__.co_names and kinds <= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }


def _inherited(cls: type, method: FunctionType, name: str) -> Callable[..., object] | None:
    """Return what ``super().name`` resolves to inside ``method``."""
    mro = cls.__mro__
    owner = next((i for i, base in enumerate(mro) if method in map(_plain, vars(base).values())), 0)
    for base in mro[owner + 1 :]:
        found = _plain(vars(base).get(name))
        if isinstance(found, FunctionType) and base is not object:
            return found
    return None


def _function(cls: type, name: str) -> Callable[..., object]:
    for base in cls.__mro__:
        if name in vars(base):
            found = _plain(vars(base)[name])
            if isinstance(found, FunctionType):
                return found
    found = getattr(cls, name)
    assert callable(found)
    return cast("Callable[..., object]", found)


def _plain(attribute: object) -> object:
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute

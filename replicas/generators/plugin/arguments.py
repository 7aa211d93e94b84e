"""Arguments for calls of plug-in classes, reduced to those that each method accepts."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from replicas.errors import ConfigError
from replicas.generators.plugin.sampling import warmup_sampling_params
from replicas.generators.protocol import PADDING_ROW, DeviceSamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from replicas.generators.plugin.signatures import Parameters

_LOG = logging.getLogger(__name__)

_REFUSALS = (AssertionError, NotImplementedError, ValueError)
_BREAKAGES = (AttributeError, KeyError, TypeError)
_IMAGES = ("images", "pixel_values", "image_grid_thw")


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn an error of a class's own code, called by the body at start, into a `ConfigError`.

    Errors of ttnn and of memory pass through: they do not come from arguments.

    Args:
        what: What fails, as the beginning of the message.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what}: {error}; install the requirements of its package") from error
    except _REFUSALS as error:
        raise ConfigError(f"{what}: {str(error) or type(error).__name__}") from error
    except _BREAKAGES as error:
        # Only the stack shows where the class expected something else.
        _LOG.exception("%s", what)
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def taken(parameters: Parameters, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a method accepts."""
    return {name: value for name, value in arguments.items() if parameters.takes(name)}


def require(class_name: str, parameters: Parameters, name: str, advice: str) -> None:
    """Refuse a keyword argument that a method does not accept.

    Args:
        class_name: Class of the method, for the message.
        parameters: Of the method.
        name: The keyword.
        advice: Advice or reason for the message.

    Raises:
        ConfigError: The method does not accept it.
    """
    if not parameters.takes(name):
        raise ConfigError(f"generator {class_name} does not accept {name}: {advice}")


def warmup_arguments(
    parameters: Parameters, num_rows: int, *, can_sample_on_device: bool
) -> dict[str, Any]:
    """Return the warm-up arguments that announce how tokens will be sampled, for every version.

    Args:
        parameters: Parameters of the warm-up method.
        num_rows: Rows of the decode batch.
        can_sample_on_device: Whether the device will draw tokens.
    """
    arguments = taken(parameters, {"can_sample_on_device": can_sample_on_device})
    if "sampling_params" in parameters.names:
        arguments["sampling_params"] = warmup_sampling_params(
            num_rows, can_sample_on_device=can_sample_on_device
        )
    if "non_greedy_decoding_on_device" in parameters.required:
        arguments["non_greedy_decoding_on_device"] = can_sample_on_device
    if "greedy_only" in parameters.required:
        arguments["greedy_only"] = False
    return arguments


def layer_tables(
    class_name: str, parameters: Parameters, tables: Sequence[torch.Tensor] | None
) -> dict[str, Any]:
    """Return the argument for per-layer page tables, if there are any.

    Raises:
        ConfigError: The class does not accept them.
    """
    if tables is None:
        return {}
    require(class_name, parameters, "page_tables_per_layer", "its layers share one page table")
    return {"page_tables_per_layer": list(tables)}


def image_arguments(
    class_name: str, parameters: Parameters, given: Mapping[str, object], num_rows: int
) -> dict[str, Any]:
    """Return the image arguments; a required argument without images is None for each row.

    Raises:
        ConfigError: There are images and the class is for text only.
    """
    images = {name: given[name] for name in _IMAGES if given.get(name) is not None}
    for name in images:
        require(class_name, parameters, name, "it is for text only")
    missing = parameters.required.intersection(_IMAGES) - set(images)
    return {**images, **{name: [None] * num_rows for name in missing}}


def padding_rows(num_rows: int) -> DeviceSamplingParams:
    """Return sampling settings of padding rows."""
    columns: dict[str, Any] = {name: [value] * num_rows for name, value in PADDING_ROW.items()}
    return DeviceSamplingParams(**columns)


def prefill_row(arguments: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the keyword arguments of `Generator.prefill_forward` for one of its rows alone.

    Args:
        arguments: Arguments of the call with all rows.
        row: Number of the row.
    """
    one = slice(row, row + 1)
    by_row = ("page_table", "prompt_lens", "start_pos", "empty_slots", *_IMAGES)
    alone = {**arguments, "tokens": arguments["tokens"][one, : int(arguments["prompt_lens"][row])]}
    alone |= {name: arguments[name][one] for name in by_row if arguments.get(name) is not None}
    params: DeviceSamplingParams | None = arguments.get("sampling_params")
    if params is not None:
        columns = {field.name: getattr(params, field.name)[one] for field in fields(params)}
        alone["sampling_params"] = DeviceSamplingParams(**columns)
    tables = arguments.get("page_tables_per_layer")
    if tables is not None:
        alone["page_tables_per_layer"] = [table[one] for table in tables]
    return alone

"""Checks of a checkpoint's safetensors files against a configuration, without reading weights.

Reads the headers of the files. Imports no torch, so that a model folder can be checked before
anything is started.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from replicas.errors import ModelLoadError
from replicas.generators.layer_specs import NormSpec
from replicas.generators.model_config import layer_specs
from replicas.generators.quantization import stored_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from replicas.generators.layer_specs import Shape
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.quantization import Quantization

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DRAFTING = "mtp."
"""Of layers that only draft tokens, in checkpoints of Qwen3-Next."""
_MOST_SHOWN = 8
_MOST_HEADER_BYTES = 100_000_000
"""Limit of the format. Source: safetensors' `MAX_HEADER_SIZE`."""


class StoredTensor(NamedTuple):
    """Tensor of a checkpoint.

    Attributes:
        file: The file that holds it.
        dtype: As safetensors writes it, for example "BF16".
        shape: Its shape.
    """

    file: Path
    dtype: str
    shape: Shape


def final_norm(config: ModelConfig) -> NormSpec:
    """Return the norm before the output layer."""
    return NormSpec("model.norm.weight", config.hidden_size, config.norm_kind)


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Return the Hugging Face name and shape of every weight, in a fixed order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index, layer in enumerate(layer_specs(config)):
        for name, shape in layer.tensors():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes.update(final_norm(config).tensors())
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def unused_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of weights that a checkpoint may have and no generator computes."""
    first = config.num_hidden_layers
    counted = range(config.num_nextn_predict_layers)
    return _DRAFTING, *(f"model.layers.{first + index}." for index in counted)


def check_checkpoint(
    folder: Path,
    shapes: Mapping[str, Shape],
    quantization: Quantization | None = None,
    unused: tuple[str, ...] = (),
) -> dict[str, StoredTensor]:
    """Check that a folder has exactly the wanted weights, and return where each tensor is.

    Args:
        folder: Model folder.
        shapes: As of ``expected_weights``.
        quantization: How some of the weights may be stored.
        unused: Prefixes of names that may be there besides; see ``unused_layers``.

    Raises:
        ModelLoadError: A file is missing, damaged or cut off, or a tensor is missing, unexpected,
            or of another shape or dtype; names the file, the tensor, what it has and what
            config.json implies.
    """
    found = {name: tensor for path in _files(folder) for name, tensor in _read_header(path).items()}
    wanted = {
        name: spec
        for weight in stored_weights(shapes, quantization, found).values()
        for name, spec in weight.items()
    }
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelLoadError(
            f"weights missing in {folder}: {_listed(missing)}; config.json implies them: use the "
            "one that was saved with these weights, or copy all of the model's files"
        )
    found = {name: tensor for name, tensor in found.items() if not name.startswith(unused)}
    unexpected = [name for name in found if name not in wanted and not _is_redundant(name, found)]
    if unexpected:
        raise ModelLoadError(
            f"unexpected weights in {folder}: {_listed(unexpected)}; by config.json the model has "
            "none of these names: use the one that was saved with these weights"
        )
    wrong = [
        f"{name} {found[name].shape} instead of {spec.shape} ({found[name].file.name})"
        for name, spec in wanted.items()
        if found[name].shape != spec.shape
    ]
    if wrong:
        raise ModelLoadError(
            f"weights in {folder} do not have the shapes of config.json: {_listed(wrong)}; use the "
            "config.json that was saved with these weights"
        )
    wrong = [
        f"{name} is {found[name].dtype} instead of {' or '.join(spec.dtypes)} "
        f"({found[name].file.name})"
        for name, spec in wanted.items()
        if found[name].dtype not in spec.dtypes
    ]
    if wrong:
        raise ModelLoadError(
            f"weights in {folder} are of other dtypes than config.json implies: {_listed(wrong)}; "
            "its quantization_config says how quantised weights are stored: use the config.json "
            "that was saved with these weights, or the model's unquantised checkpoint"
        )
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{index} has no usable weight_map: {error!r}") from error
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ModelLoadError(f"{folder} contains neither {_SINGLE} nor {_INDEX}")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"it would have {size} bytes")
            header = json.loads(file.read(size))
        tensors = {
            name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        end = max((header[name]["data_offsets"][1] for name in tensors), default=0)
        missing = 8 + size + end - path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"cannot read the weights in {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ModelLoadError(
            f"cannot read the weights in {path}: its header is damaged, {error!r}; copy the file "
            "again"
        ) from error
    if missing > 0:
        raise ModelLoadError(
            f"cannot read the weights in {path}: its end is missing, {missing} bytes; copy the "
            "file again"
        )
    return tensors


def _is_redundant(name: str, found: Mapping[str, object]) -> bool:
    """Tell names that some checkpoints carry although the configuration implies their values.

    ``lm_head.weight`` gets here only when the embeddings are tied, a bias only where there is none;
    AutoGPTQ writes zeros there, which the loader checks.
    """
    if name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq"):
        return True
    return name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in found


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    more = len(names) - _MOST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

"""Reader of the sampling defaults that a model folder recommends in generation_config.json.

Applies the fields that vLLM applies. Like vLLM it ignores `do_sample`.
Source: vLLM's `ModelConfig.get_diff_sampling_param`.
"""

from pathlib import Path

import msgspec

from replicas.errors import ConfigError, InvalidRequestError
from replicas.sampling_params import (
    DEFAULTED_FIELDS,
    GenerationConfigSource,
    SamplingDefaults,
)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are read; null is the same as a missing field."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


_LARGEST = 2**31 - 1


def read_sampling_defaults(
    folder: str | Path, source: GenerationConfigSource = "auto"
) -> SamplingDefaults:
    """Return the sampling defaults of a model folder; neutral ones if it recommends none.

    Raises:
        ConfigError: The file cannot be read, or a value is out of range; names file and field.
    """
    path = Path(folder) / "generation_config.json"
    if source == "vllm" or not path.is_file():
        return SamplingDefaults()
    found = _read(path)
    given = {
        name: value for name in DEFAULTED_FIELDS if (value := getattr(found, name)) is not None
    }
    defaults = SamplingDefaults(**given, max_tokens=found.max_new_tokens)
    _check(defaults, path)
    return defaults


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _check(defaults: SamplingDefaults, path: Path) -> None:
    """Refuse values that no request could have.

    Raises:
        ConfigError: Names file, field, range and value.
    """
    if defaults.max_tokens is not None and not 1 <= defaults.max_tokens <= _LARGEST:
        raise ConfigError(
            f"{path}: max_new_tokens must be 1 to {_LARGEST}, got {defaults.max_tokens}"
        )
    if defaults.top_k > _LARGEST:
        raise ConfigError(f"{path}: top_k must be at most {_LARGEST}, got {defaults.top_k}")
    try:
        defaults.params().validate()
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}") from error

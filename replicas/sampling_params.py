"""Sampling parameters of one request: plain values, equal offline and online, validated once."""

import math
from typing import Any, Literal, Self, TypeAlias, get_type_hints

import msgspec
import numpy as np

from replicas.errors import InvalidRequestError

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_CHOICES = 128
MAX_LOGPROBS = 20
"""Limits of OpenAI's and vLLM's interfaces."""

GenerationConfigSource: TypeAlias = Literal["auto", "vllm"]
"""auto: the defaults of the model folder's generation_config.json.
vllm: neutral defaults, whatever the folder recommends."""

_INT64 = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Parameters that control token choice and the end of generation.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: 0 (greedy) to 2.
        top_p: Nucleus mass, in (0, 1]; 1 is off.
        top_k: Keep the k most likely tokens; 0 or -1 is off.
        seed: Key of the counter-based random numbers (int64); None: the front end mints one.
        stop: Text that ends generation; cut from the output unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end generation, besides the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        n: Number of choices to generate.
        logprobs: Number of likeliest tokens to report with each drawn one; None reports nothing.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Accept a single stop string in place of a tuple, as vLLM does."""
        stop: object = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))

    def checked(self, vocab_size: int) -> Self:
        """Return the same parameters with checked types, which a frozen struct does not check.

        Raises:
            InvalidRequestError: A value has a wrong type, is outside its documented range, or is a
                token id not below `vocab_size`; `param` names it.
        """
        kinds = get_type_hints(type(self))
        checked = type(self)(
            **{name: _typed(name, getattr(self, name), kinds[name]) for name in kinds}
        )
        checked.validate()
        for token_id in checked.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids",
                    f"stop_token_ids contains {token_id}, outside the vocabulary of 0 to "
                    f"{vocab_size - 1}",
                )
        return checked

    def validate(self) -> None:
        """Check every range.

        Raises:
            InvalidRequestError: A value is outside its documented range; `param` names it.
        """
        self._validate_numbers()
        if any(not s for s in self.stop):
            raise InvalidRequestError("stop", "stop strings must not be empty")
        if min(self.stop_token_ids, default=0) < 0:
            raise InvalidRequestError("stop_token_ids", "stop_token_ids must not be negative")

    def _validate_numbers(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequestError(
                "max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}"
            )
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise InvalidRequestError(
                "temperature", f"temperature must be in [0, 2], got {self.temperature}"
            )
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequestError("top_p", f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise InvalidRequestError(
                "top_k", f"top_k must be -1, 0 or at least 1, got {self.top_k}"
            )
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequestError("n", f"n must be 1 to {MAX_CHOICES}, got {self.n}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                "logprobs", f"logprobs must be 0 to {MAX_LOGPROBS}, got {self.logprobs}"
            )
        if self.seed is not None and not -_INT64 <= self.seed < _INT64:
            raise InvalidRequestError("seed", f"seed must fit in 64 bits, got {self.seed}")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling values for requests that leave them out; attributes as in `SamplingParams`.

    Attributes:
        temperature: Temperature.
        top_p: Nucleus mass.
        top_k: Number of candidates.
        max_tokens: Most tokens of a request that states no limit; None is all the room left.
    """

    temperature: float = SamplingParams().temperature
    top_p: float = SamplingParams().top_p
    top_k: int = SamplingParams().top_k
    max_tokens: int | None = None

    def params(self) -> SamplingParams:
        """Return the parameters of a request that states none."""
        params = SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        if self.max_tokens is None:
            return params
        return msgspec.structs.replace(params, max_tokens=self.max_tokens)


def _typed(name: str, value: object, kind: Any) -> Any:  # noqa: ANN401 - a field's
    try:
        return msgspec.convert(_plain(value), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(name, f"{name} has a wrong type: {error}") from error


def _plain(value: object) -> object:
    """Return a value with numpy's scalars replaced by Python's."""
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value

"""Rotary embedding settings of a config.json. Pure.

Reads the keys of transformers 5 (``rope_parameters``) and the older ones (``rope_theta`` and
``rope_scaling``). Source: transformers ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""Types whose frequencies `torch.rope` computes."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding settings.

    Attributes:
        rope_type: One of `ROPE_TYPES`.
        theta: Base of the frequencies.
        factor: Divisor of the frequencies: of all for "linear", of the low ones for "llama3" and
            "yarn". For "dynamic" how much longer the context is than the original one.
        low_freq_factor: For "llama3": wavelengths over original length / this are divided.
        high_freq_factor: For "llama3": wavelengths under original length / this are unchanged.
        original_max_position_embeddings: Context length before scaling, in tokens.
        attention_factor: Factor of all cosines and sines; 1 except for "yarn" and "longrope".
        beta_fast: For "yarn": pairs that turn more often in the original length are unchanged.
        beta_slow: For "yarn": pairs that turn less often in the original length are divided.
        is_truncated: For "yarn": the range between these two is widened to whole pairs.
        share: Share of a head's channels that is rotated, the first ones.
        short_factors: For "longrope": divisor of each frequency up to the original length.
        long_factors: For "longrope": divisor of each frequency of an engine with longer sequences.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    share: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated."""
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a model family assumes of its rotary embedding.

    Attributes:
        theta: Base of the frequencies where the configuration states none.
        layer_type: Entry of settings per layer type, for families that have them.
        may_be_partial: The family rotates a share of the channels if the configuration says so.
    """

    theta: float = 10000.0
    layer_type: str | None = None
    may_be_partial: bool = False


def read_rope(
    raw: Mapping[str, Any], head_dim: int, max_positions: int, defaults: RopeDefaults
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), else ``rope_theta`` and ``rope_scaling``.

    Args:
        raw: The parsed config.json.
        head_dim: Channels of a head.
        max_positions: Longest context that the configuration states.
        defaults: Of the family.

    Raises:
        ConfigError: The type or a value is not supported; names it.
        KeyError: A key of that type is missing.
    """
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in settings.values()):
        if defaults.layer_type is None:
            raise ConfigError(
                f"rope settings per layer type ({', '.join(settings)}) are not supported"
            )
        settings = settings.get(defaults.layer_type) or {}
    theta = float(settings.get("rope_theta") or raw.get("rope_theta") or defaults.theta)
    share = _share(raw, settings, head_dim, defaults)
    # transformers prefers the key outside of the settings, too.
    original = int(
        raw.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or max_positions
    )
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    match rope_type:
        case "default":
            return RopeConfig("default", theta, share=share)
        case "linear" | "dynamic":
            if rope_type == "dynamic" and int(head_dim * share) <= 2:
                raise ConfigError(f"{head_dim=} is too small for dynamic rope scaling")
            factor = _factor(settings["factor"])
            return RopeConfig(
                rope_type, theta, factor, original_max_position_embeddings=max_positions,
                share=share,
            )  # fmt: skip
        case "yarn":
            return _yarn(settings, theta, original, max_positions, share)
        case "longrope" | "su":  # the name in the first models of that type
            return _longrope(settings, theta, original, max_positions, share, head_dim)
        case "llama3":
            return RopeConfig(
                "llama3",
                theta,
                factor=float(settings["factor"]),
                low_freq_factor=float(settings["low_freq_factor"]),
                high_freq_factor=float(settings["high_freq_factor"]),
                original_max_position_embeddings=original,
                share=share,
            )
        case _:
            known = ", ".join(map(repr, ROPE_TYPES))
            raise ConfigError(f"rope type {rope_type!r} is not supported, only {known}")


def _share(
    raw: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int, defaults: RopeDefaults
) -> float:
    stated = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    share = 1.0 if stated is None else float(stated)
    if share != 1.0 and not defaults.may_be_partial:
        raise ConfigError(f"partial_rotary_factor {stated} is not supported, only 1")
    if not 0.0 < share <= 1.0 or int(head_dim * share) % 2:
        raise ConfigError(
            f"partial_rotary_factor {stated} of {head_dim=} is not an even number of channels from "
            f"2 to {head_dim}"
        )
    return share


def _yarn(
    settings: Mapping[str, Any], theta: float, original: int, max_positions: int, share: float
) -> RopeConfig:
    """Read the settings of type "yarn". Source: `_compute_yarn_parameters`."""
    stated = settings["factor"]
    factor = _factor(max_positions / original if stated is None else stated)
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        attention_factor = yarn_mscale(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        is_truncated=bool(settings.get("truncate", True)),
        share=share,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return the factor of attention that goes with a longer context."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    settings: Mapping[str, Any],
    theta: float,
    original: int,
    max_positions: int,
    share: float,
    head_dim: int,
) -> RopeConfig:
    """Read the settings of type "longrope". Source: `_compute_longrope_parameters`."""
    stated = settings.get("factor")
    factor = max_positions / original if stated is None else float(stated)
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        # Source: the paper of LongRoPE.
        is_longer = factor > 1.0
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if is_longer else 1
    found = RopeConfig(
        "longrope",
        theta,
        factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        share=share,
        short_factors=_factors(settings["short_factor"]),
        long_factors=_factors(settings["long_factor"]),
    )
    wanted = found.rotary_dim(head_dim) // 2
    for name, factors in (("short", found.short_factors), ("long", found.long_factors)):
        if len(factors) != wanted:
            raise ConfigError(
                f"rope setting {name}_factor has {len(factors)} numbers for {wanted} frequencies "
                f"({head_dim=}, partial_rotary_factor {share}); one for each is needed"
            )
    return found


def _factors(values: Sequence[object]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)  # type: ignore[arg-type]


def _factor(value: object) -> float:
    factor = float(value)  # type: ignore[arg-type]
    if not 1.0 <= factor < math.inf:
        raise ConfigError(f"rope factor {factor} is not a finite number of at least 1")
    return factor

"""Gives a model folder the name by which a class that chooses its model by name knows it.

The classes of tt-transformers serve a few checkpoints each and look at nothing but their name: a
Hugging Face id, or the folder that Hugging Face's cache keeps one in,
``models--ORG--NAME/snapshots/REVISION``. Our models are folders that may lie anywhere. One that
bears the name of a checkpoint is given to the class by a link of that form; others are refused.
Source: tt-transformers ``vllm_registry.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from replicas.errors import ConfigError
from replicas.user_cache import NO_HOME, user_cache


def checkpoint_for(
    plugin_class: Any,  # noqa: ANN401 - a class that is not known here
    folder: str,
) -> str:
    """Path of a model folder as a class wants to have it named.

    Args:
        plugin_class: A generator class; one without ``select`` takes any path.
        folder: Of the model.

    Returns:
        `folder`, or a link to it.

    Raises:
        ConfigError: The class serves no checkpoint of that name, or a link cannot be made; says
            which it serves and what to do.
    """
    select = getattr(plugin_class, "select", None)
    if not callable(select):
        return folder
    try:
        select(folder)
    except ValueError:
        hf_id = _named_by(folder, _served_ids(plugin_class))
    else:
        return folder
    if hf_id is None:
        name = f"{plugin_class.__module__}:{plugin_class.__qualname__}"
        served = ", ".join(_served_ids(plugin_class)) or "the checkpoints that it names"
        raise ConfigError(
            f"generator {name} chooses its model by name and serves {served}; {folder} bears none "
            "of these names: if it is one of them, rename the folder to the part after the slash, "
            "or give the snapshot in Hugging Face's cache (models--ORG--NAME/snapshots/REVISION)"
        )
    return _link(folder, hf_id)


def _served_ids(plugin_class: Any) -> tuple[str, ...]:  # noqa: ANN401 - as `checkpoint_for`
    list_ids = getattr(plugin_class, "supported_hf_ids", None)
    return tuple(map(str, list_ids())) if callable(list_ids) else ()


def _named_by(folder: str, hf_ids: tuple[str, ...]) -> str | None:
    """Which of some checkpoints a folder is named after."""
    name = Path(folder).name
    for hf_id in hf_ids:
        organisation, _, model = hf_id.partition("/")
        if name in {model, f"{organisation}--{model}", f"models--{organisation}--{model}"}:
            return hf_id
    return None


def _link(folder: str, hf_id: str) -> str:
    """A path of the form that Hugging Face's cache has, which is the folder."""
    target = Path(folder).absolute()
    # The same folder has the same link: what classes keep under a checkpoint's path is found again.
    digest = hashlib.blake2b(str(target).encode(), digest_size=8).hexdigest()
    cache = user_cache()
    if cache is None:
        raise ConfigError(f"cannot name {folder} after {hf_id} by a link: {NO_HOME}")
    repository = f"models--{hf_id.replace('/', '--')}"
    # Each is made once and stays.
    link = cache / "checkpoints" / repository / "snapshots" / digest
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise ConfigError(
            f"cannot name {folder} after {hf_id} by a link {link}: {error.strerror}; give the "
            "snapshot in Hugging Face's cache as the model"
        ) from error
    return str(link)

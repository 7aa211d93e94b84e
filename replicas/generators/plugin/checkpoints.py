"""Names of model folders for classes that select their model by name.

The classes of tt-transformers serve a few checkpoints each and look only at the name: a Hugging
Face id, or the folder of Hugging Face's cache, ``models--ORG--NAME/snapshots/REVISION``. Our models
may be in any folder. A folder named after a served checkpoint is passed to the class through a link
of that form; other folders are refused. Source: tt-transformers ``vllm_registry.py``.
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
    """Return the path of a model folder in the form that a class recognises.

    Args:
        plugin_class: A generator class; one without ``select`` accepts any path.
        folder: The model folder.

    Returns:
        `folder`, or a link to it.

    Raises:
        ConfigError: The class serves no checkpoint of that name (lists those that it serves), or
            the link cannot be created; says what to do.
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
            f"generator {name} selects its model by name and serves {served}; the name of {folder} "
            "is none of these. If it is one of these models, rename the folder to the part after "
            "the slash, or use the snapshot in Hugging Face's cache "
            "(models--ORG--NAME/snapshots/REVISION)"
        )
    return _link(folder, hf_id)


def _served_ids(plugin_class: Any) -> tuple[str, ...]:  # noqa: ANN401 - as `checkpoint_for`
    list_ids = getattr(plugin_class, "supported_hf_ids", None)
    return tuple(map(str, list_ids())) if callable(list_ids) else ()


def _named_by(folder: str, hf_ids: tuple[str, ...]) -> str | None:
    """Return the checkpoint that a folder is named after, or None."""
    name = Path(folder).name
    for hf_id in hf_ids:
        organisation, _, model = hf_id.partition("/")
        if name in {model, f"{organisation}--{model}", f"models--{organisation}--{model}"}:
            return hf_id
    return None


def _link(folder: str, hf_id: str) -> str:
    """Create a link to the folder in the form of Hugging Face's cache; return its path."""
    target = Path(folder).absolute()
    # Equal folders get equal links, so that files cached under a checkpoint's path are reused.
    digest = hashlib.blake2b(str(target).encode(), digest_size=8).hexdigest()
    cache = user_cache()
    if cache is None:
        raise ConfigError(f"cannot link {folder} under the name {hf_id}: {NO_HOME}")
    repository = f"models--{hf_id.replace('/', '--')}"
    # Created once and kept.
    link = cache / "checkpoints" / repository / "snapshots" / digest
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the link {link} to {folder}: {error.strerror}; use the snapshot of "
            f"{hf_id} in Hugging Face's cache as the model"
        ) from error
    return str(link)

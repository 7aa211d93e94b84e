"""The name of a model, from the path of its folder. Pure."""

from pathlib import Path


def model_name(folder: str) -> str:
    """Return the name of the model in a folder, as far as its path shows it.

    For a snapshot in Hugging Face's cache that is the repository's name, else the folder's own.
    """
    path = Path(folder)
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.name

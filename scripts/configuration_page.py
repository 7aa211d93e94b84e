"""Writes docs/configuration.md: every key of a config file, from the schema's types and docstrings.

python scripts/configuration_page.py
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.schema import (
    AdminConfig,
    AdmissionConfig,
    ClusterArgs,
    IngressConfig,
    KeyTenant,
    PoolArgs,
    RouterConfig,
    TenantConfig,
)
from cluster.config.serve_file import ApplicationFile, HttpOptions, PolicyArguments, ServeFile
from kv_transfer.store import StoreConfig
from replicas.config import EngineConfig, MeshConfig, SimulatedMeshConfig, SpeculativeConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/configuration.md"

_INTRODUCTION = """# Configuration

Every key of a [config file](../configs/), with its type, its default and where it acts. Made from
the schema by `python scripts/configuration_page.py`; a test keeps it true. `ttserve validate FILE`
refuses unknown keys, wrong types and numbers that cannot work together, and names the key.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """Keys of one mapping in a config file.

    Attributes:
        path: The mapping's path in the file; "" is the file itself.
        struct: The struct that declares the keys.
        acts: Which process reads them, and when.
        hidden: Fields that the cluster sets, not the user.
    """

    path: str
    struct: type[msgspec.Struct]
    acts: str
    hidden: frozenset[str] = frozenset()


SECTIONS = (
    Section("", ServeFile, "Ray Serve, when the file is deployed."),
    Section("http_options", HttpOptions, "Ray Serve and HAProxy, once for each Ray cluster."),
    Section("applications[0]", ApplicationFile, "Ray Serve, when the file is deployed."),
    Section(
        "applications[0].autoscaling_policy.policy_kwargs",
        PolicyArguments,
        "Serve's controller, at each decision of the policy.",
    ),
    Section(
        "args",
        ClusterArgs,
        "Every process of the application; a change restarts its replicas.",
        frozenset({"fault_epoch_unix_s"}),
    ),
    Section("args.ingress", IngressConfig, "Each ingress."),
    Section("args.admin", AdminConfig, "The admin server."),
    Section(
        "entries of args.ingress.api_keys",
        KeyTenant,
        "Each ingress, within a second of a change of that file.",
    ),
    Section("args.router", RouterConfig, "The router of each ingress."),
    Section("args.router.admission", AdmissionConfig, "The router of each ingress."),
    Section("args.router.admission.tenants.NAME", TenantConfig, "The router of each ingress."),
    Section("args.pools.ROLE", PoolArgs, "Ray, which starts and drains a pool's replicas."),
    Section(
        "args.engine and args.pools.ROLE.engine",
        EngineConfig,
        "Each engine; a pool's own value goes before the common one.",
        # Refused in a file, see `cluster.config.checks`: the cluster sets them.
        frozenset(
            {
                "model",
                "role",
                "kv_connector",
                "kv_endpoint",
                "keys",
                "kv_network",
                "kv_store",
                "gang",
            }
        ),
    ),
    Section("engine.mesh", MeshConfig, "Each engine, when it opens its mesh."),
    Section(
        "engine.simulated_mesh",
        SimulatedMeshConfig,
        "Each engine, instead of a device.",
        frozenset({"faults", "fault_epoch_unix_s"}),
    ),
    Section("engine.speculative_config", SpeculativeConfig, "Each engine on the CPU."),
    Section("args.kv_store", StoreConfig, "Each engine with the connector `pooled` or `multi`."),
)


def page() -> str:
    """Return the whole document."""
    return "\n".join([_INTRODUCTION, *map(_section, SECTIONS)])


def _section(section: Section) -> str:
    title = f"`{section.path}`" if section.path else "The file"
    lines = [f"## {title}", "", f"Acts in: {section.acts}", ""]
    texts = attributes(section.struct)
    kinds = typing.get_type_hints(section.struct)
    for field in msgspec.structs.fields(section.struct):
        if field.name not in section.hidden:
            text = re.sub(r"\bNone\b", "null", texts.get(field.name, "")).replace("``", "`")
            stated = f"{kind(kinds[field.name])}, {_default(field)}"
            lines.append(f"- **`{field.name}`** ({stated}).{' ' * bool(text)}{text}")
    return "\n".join([*lines, ""])


def attributes(struct: type) -> dict[str, str]:
    """Return the text of each attribute, from the docstrings of a struct and its bases."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        _, _, block = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        name = ""
        for line in block.splitlines():
            if match := re.fullmatch(r" {4}(\w+): (.*)", line):
                name, found[match[1]] = match[1], match[2].strip()
            elif line.startswith(" " * 8) and name:
                found[name] += f" {line.strip()}"
            else:
                break
    return found


_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    list: "list",
    tuple: "list",
}


def kind(annotation: Any) -> str:  # noqa: ANN401 - any annotation of a struct's field
    """Return a type as a writer of YAML knows it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(arguments[0])
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(kind(each) for each in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    return _PLAIN.get(origin or annotation, "mapping")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    factory = field.default_factory
    value = field.default if factory is msgspec.NODEFAULT else factory()
    if isinstance(value, msgspec.Struct):
        return "default as below"
    return f"default `{json.dumps(value)}`"


def main() -> None:
    """Write the page."""
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()

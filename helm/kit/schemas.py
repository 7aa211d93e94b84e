"""Writes the JSON schema of every Kubernetes kind that the chart may make, for kubeconform.

    schemas.py OPENAPI_SPEC_FOLDER CRD_FOLDER OUT

The kinds of Kubernetes itself come from its module's OpenAPI specification, the others from the
custom resources' definitions. Strict: a field that a schema does not name is an error.
"""

import json
import sys
from pathlib import Path

import yaml


def main() -> None:
    """Write `<kind>-<group>-<version>.json` for each kind, as kubeconform looks for them."""
    specification, definitions, out = map(Path, sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    files = sorted((specification / "v3").glob("*_openapi.json"))
    if not files:
        sys.exit(f"schemas.py: no specification in {specification / 'v3'}")
    for file in files:
        schemas = json.loads(file.read_text()).get("components", {}).get("schemas", {})
        for schema in schemas.values():
            for kind in schema.get("x-kubernetes-group-version-kind", []):
                whole = {**schema, "components": {"schemas": schemas}}
                _write(out, kind["group"], kind["version"], kind["kind"], _strict(whole))
    for file in sorted(definitions.glob("*.yaml")):
        for resource in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            spec = resource["spec"]
            for version in spec["versions"]:
                schema = version["schema"]["openAPIV3Schema"]
                schema["properties"]["metadata"] = {"type": "object"}
                kind = spec["names"]["kind"]
                _write(out, spec["group"], version["name"], kind, _strict(schema))


def _write(out: Path, group: str, version: str, kind: str, schema: object) -> None:
    # kubeconform's `ResourceKind` and `KindSuffix`.
    name = "-".join([kind.lower(), *filter(None, [group.partition(".")[0]]), version]) + ".json"
    (out / name).write_text(json.dumps(schema))


def _strict(schema: object) -> object:
    """Return the schema as JSON schema: no unknown fields; int-or-string as a choice of types."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    strict = {key: _strict(value) for key, value in schema.items() if key != "default"}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not is_open
    ):
        strict["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        strict["type"] = [schema["type"], "null"]
    return strict


if __name__ == "__main__":
    main()

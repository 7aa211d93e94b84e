"""Grammars in request bodies: OpenAI's `response_format` and vLLM's `structured_outputs`. Pure.

`replicas.grammar_checks` finds out whether a grammar compiles; that takes a thread.
Source: vLLM 0.32 `ResponseFormat`, `StructuredOutputsParams`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.edge.fields import (
    bad_field,
    read_fields,
)
from cluster.edge.openai_fields import (
    JSON_SCHEMA_FIELDS,
    RESPONSE_FORMAT_FIELDS,
    STRUCTURED_OUTPUTS_FIELDS,
)
from cluster.errors import BadRequestError
from replicas.errors import InvalidRequestError
from replicas.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping


class Grammar(NamedTuple):
    """The grammar of a request.

    Attributes:
        spec: The grammar.
        path: Its path in the body: that of `response_format` or `structured_outputs`.
    """

    spec: StructuredOutputs
    path: str

    def bad_request(self, error: InvalidRequestError) -> BadRequestError:
        """Return an error about the grammar with the path that the client has used."""
        if self.path == "structured_outputs":
            return BadRequestError(str(error), param=error.param)
        return BadRequestError(str(error).replace(error.param, self.path, 1), param=self.path)

    def check(self) -> None:
        """Check the size of the grammar.

        Raises:
            BadRequestError: It is too large; `param` is its path.
        """
        try:
            self.spec.validate()
        except InvalidRequestError as error:
            raise self.bad_request(error) from error

    @property
    def num_chars(self) -> int:
        """Return the size of the grammar, in characters."""
        return len(str(getattr(self.spec, self.spec.kind)))


def read_grammar(values: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of checked fields; None if the output may be any text.

    Raises:
        BadRequestError: A field is wrong, or two contradict each other; `param` is its path.
    """
    by_format = _by_format(values["response_format"]) if "response_format" in values else None
    given = values.get("structured_outputs")
    if given is None:
        grammar = by_format
    elif by_format is not None:
        raise bad_field("structured_outputs", "cannot be used together with response_format")
    else:
        fields = read_fields(given, STRUCTURED_OUTPUTS_FIELDS, "structured_outputs.")
        grammar = _grammar(fields, "structured_outputs")
    return grammar


def _by_format(body: Mapping[str, Any]) -> Grammar | None:
    path = "response_format"
    fields = read_fields(body, RESPONSE_FORMAT_FIELDS, f"{path}.")
    match fields["type"]:
        case "text":
            return None
        case "json_object":
            return _grammar({"json_object": True}, path)
        case "json_schema":
            if "json_schema" not in fields:
                raise bad_field(f"{path}.json_schema", "is required with type json_schema")
            schema = read_fields(fields["json_schema"], JSON_SCHEMA_FIELDS, f"{path}.json_schema.")
            return _grammar({"json": schema["schema"]}, f"{path}.json_schema.schema")
        case _:
            tag = {name: fields[name] for name in ("triggers", "structures") if name in fields}
            return _grammar({"structural_tag": tag}, path)


def _grammar(fields: Mapping[str, Any], path: str) -> Grammar:
    try:
        grammar = Grammar(StructuredOutputs(**fields), path)
    except ValueError as error:
        raise bad_field(path, f"cannot be used: {error}") from error
    grammar.check()
    return grammar

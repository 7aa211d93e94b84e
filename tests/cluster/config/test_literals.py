"""The words that a configuration may have at a place."""

from typing import Literal

import msgspec
import pytest

from cluster.config.literals import literal_values_at
from cluster.config.schema import convert
from cluster.errors import ClusterConfigError

Colour = Literal["red", "green"]


class Lamp(msgspec.Struct, rename="camel"):
    colour: Colour | None = None
    its_kind: Literal["led"] | int = 0
    watts: int = 0


class House(msgspec.Struct):
    lamps: list[Lamp] = []
    rooms: dict[Colour, Lamp] = {}
    first: Lamp | None = None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".lamps[0].colour", ["green", "red"]),
        (".rooms[...].colour", ["green", "red"]),
        (".first.colour", ["green", "red"]),
        (".first.itsKind", ["led"]),
        (".first.watts", []),
        (".first", []),
        ("", []),
        (".nowhere.colour", []),
        (".first.watts.colour", []),
    ],
)
def test_allowed_values_are_found_by_path(path, words):
    assert literal_values_at(House, path) == words


def test_allowed_keys_of_a_mapping_are_found():
    assert literal_values_at(House, ".rooms", is_key=True) == ["green", "red"]
    assert literal_values_at(House, ".lamps", is_key=True) == []


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (
            {"lamps": [{"colour": "blue"}]},
            "args.lamps[0].colour: Invalid enum value 'blue': one of green, red",
        ),
        ({"rooms": {"attic": {}}}, "args.rooms: Invalid enum value 'attic': one of green, red"),
        ({"first": {"watts": "x"}}, "args.first.watts: Expected `int`, got `str`"),
    ],
)
def test_an_unknown_value_is_reported_with_the_allowed_ones(raw, error):
    with pytest.raises(ClusterConfigError) as caught:
        convert(raw, House, "args")
    assert str(caught.value) == error

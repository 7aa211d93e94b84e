"""Refusals of the harness for foreign classes before it opens anything."""

from __future__ import annotations

import pytest

from scripts import foreign_class


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lanes", "0"], "argument --lanes: must be at least 1, got 0"),
        (["--slots", "-4"], "argument --slots: must be at least 1, got -4"),
        (["--max-model-len", "0"], "argument --max-model-len: must be at least 1"),
        (["--lanes", "many"], "argument --lanes: invalid"),
        (["--lanes", "3"], "max_batch_size 4 is not a multiple of tt_data_parallel 3"),
        (["--lanes", "2"], "tt_data_parallel 2 does not divide the 1 chips of mesh N150"),
        (["--slots", "64"], "64 slots a lane; a mesh decodes at most 32"),
        (["--board", "n151"], "argument --board: invalid choice: 'N151'"),
        (["--board", "n300", "--lanes", "4"], "tt_data_parallel 4 does not divide the 2 chips"),
    ],
)
def test_what_cannot_run_is_a_mistake_of_the_command_line(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        foreign_class.main(["module:Class", str(tmp_path), *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

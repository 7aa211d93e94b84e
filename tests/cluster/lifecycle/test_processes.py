"""The process table, as the kernel and as a folder has it."""

import os
import subprocess
import sys

import pytest

from cluster.lifecycle.processes import Process, process_table


def put(proc, process_id, name, state, command=b"x"):
    """A process; the fields of its `stat` after the state are their numbers in proc(5)."""
    folder = proc / str(process_id)
    folder.mkdir()
    fields = " ".join(map(str, range(4, 53)))
    (folder / "stat").write_bytes(b"%d (%s) %s %s" % (process_id, name, state, fields.encode()))
    (folder / "cmdline").write_bytes(command)


def test_a_process_may_have_any_name_and_any_arguments(tmp_path):
    put(tmp_path, 7, b"a) R 1 \xff", b"S", b"/bin/a\0b c\0\xff\0")
    (tmp_path / "8").mkdir()  # One that has just ended.
    (tmp_path / "self").mkdir()
    command = "/bin/a b c \ufffd "
    assert process_table(tmp_path) == {7: Process(7, 4, 6, 20, "22", command)}


def test_zombies_are_left_out(tmp_path):
    for number, state in enumerate((b"S", b"R", b"D", b"T", b"Z")):
        put(tmp_path, number, b"x", state)
    assert sorted(process_table(tmp_path)) == [0, 1, 2, 3]


def test_without_a_process_file_system_there_is_none(tmp_path):
    assert process_table(tmp_path / "none") == {}


@pytest.mark.process
def test_a_child_is_in_the_table_until_it_has_ended():
    program = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        # The kernel knows no arguments of one that is only about to become another program.
        assert child.stdout.readline() == b"\n"
        found = process_table()[child.pid]
        assert found.parent_id == os.getpid()
        assert found.session_id == child.pid
        assert found.num_threads == 1
        assert found.command == f"{sys.executable} -c {program} "
    finally:
        child.stdin.close()
        child.stdout.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombies = process_table()
        child.wait()
    assert child.pid not in zombies

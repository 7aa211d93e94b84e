"""The folder of converted weights is complete or absent, after any race of writers or fault."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from replicas.generators.ttnn.weight_cache import DamagedCacheError, WeightCache

FILES = {"a": b"first", "b": b"second" * 1000}


def write(cache, files=FILES):
    with cache.writing() as writer:
        for name, content in files.items():
            writer.put(name, lambda path, content=content: path.write_bytes(content))


def read(cache, names=tuple(FILES)):
    files = cache.read(names)
    return None if files is None else {name: files.path(name).read_bytes() for name in names}


@pytest.fixture
def cache(tmp_path):
    return WeightCache(tmp_path / "deep" / "model")


def leftovers(cache):
    return sorted(path.name for path in cache.folder.parent.iterdir())


def test_what_was_written_is_read(cache):
    assert read(cache) is None
    write(cache)
    assert read(cache) == FILES
    assert leftovers(cache) == ["model", "model.lock"]


def test_nothing_is_there_before_the_last_file_is(cache):
    with cache.writing() as writer:
        writer.put("a", lambda path: path.write_bytes(b"first"))
        assert read(cache) is None
    with pytest.raises(DamagedCacheError, match="other files"):
        read(cache)


def write_and_divide_by_zero(cache):
    with cache.writing() as writer:
        writer.put("a", lambda path: path.write_bytes(b"first"))
        _ = 1 / 0


def test_an_error_while_writing_leaves_nothing(cache):
    with pytest.raises(ZeroDivisionError):
        write_and_divide_by_zero(cache)
    assert leftovers(cache) == ["model.lock"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "b").unlink(), "b: No such file"),
        (lambda folder: (folder / "b").write_bytes(b"second" * 999), "5994 bytes instead of 6000"),
        (lambda folder: (folder / "b").write_bytes(b"Second" + b"second" * 999), "checksum"),
        (lambda folder: (folder / "manifest.json").unlink(), "has no manifest"),
        (lambda folder: (folder / "manifest.json").write_bytes(b'{"a": [5,'), "manifest.json: "),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{}"), "other files"),
    ],
)
def test_damage_is_seen_and_written_over(cache, damage, message):
    write(cache)
    damage(cache.folder)
    with pytest.raises(DamagedCacheError, match=message):
        read(cache)
    write(cache)
    assert read(cache) == FILES


def full(path):
    path.write_bytes(b"half")
    raise RuntimeError("No space left on device")


def test_a_full_disk_is_warned_about_once_and_leaves_nothing(cache, caplog):
    with cache.writing() as writer:
        writer.put("a", lambda path: path.write_bytes(b"first"))
        writer.put("b", full)
        assert leftovers(cache) == ["model.lock"]
        writer.put("c", full)
    assert [record.getMessage() for record in caplog.records] == [
        f"converted weights are not kept in {cache.folder}.partial: No space left on device"
    ]
    assert leftovers(cache) == ["model.lock"]


def test_a_folder_that_cannot_be_made_is_warned_about(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    with WeightCache(tmp_path / "file" / "model").writing() as writer:
        assert writer is None
    assert "not kept" in caplog.text


def test_a_manifest_that_cannot_be_written_is_warned_about(cache, caplog):
    with cache.writing() as writer:
        writer.put("a", lambda path: path.write_bytes(b"first"))
        (cache.folder.with_name("model.partial") / "manifest.json").mkdir()
    assert "not kept" in caplog.text
    assert leftovers(cache) == ["model.lock"]


def test_what_a_dead_writer_left_goes(cache):
    partial = cache.folder.with_name("model.partial")
    partial.mkdir(parents=True)
    (partial / "z").write_bytes(b"junk")
    write(cache)
    assert sorted(path.name for path in cache.folder.iterdir()) == ["a", "b", "manifest.json"]


HOLDER = """
import sys
from pathlib import Path
from replicas.generators.ttnn.weight_cache import WeightCache
with WeightCache(Path(sys.argv[1])).writing() as writer:
    writer.put("a", lambda path: path.write_bytes(b"first"))
    print("writing", flush=True)
    sys.stdin.readline()
    writer.put("b", lambda path: path.write_bytes(b"second" * 1000))
"""


@pytest.mark.process
def test_one_of_two_processes_writes(cache):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(cache.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"writing\n"
        with cache.writing() as writer:
            assert writer is None
        assert read(cache) is None
        other.communicate(b"\n")
        assert other.returncode == 0
    assert read(cache) == FILES


@pytest.mark.process
def test_a_killed_writer_is_no_hindrance(cache):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(cache.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"writing\n"
        other.kill()
    assert leftovers(cache) == ["model.lock", "model.partial"]
    write(cache)
    assert read(cache) == FILES
    assert leftovers(cache) == ["model", "model.lock"]

"""Bytes come from files as they were when first opened, or not at all."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from nemo_optim_bridge.core import store as store_module
from nemo_optim_bridge.core.manifest import Buffer, BufferTable
from nemo_optim_bridge.core.store import FileStore, MemoryStore
from nemo_optim_bridge.errors import CorruptFileError, MissingSourceError, SourceChangedError


def read(store: FileStore, buffer: int, offset: int, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    store.read_into(buffer, offset, memoryview(memory))
    return bytes(memory)


def files(folder: Path, count: int, content: bytes = b"0123456789") -> BufferTable:
    buffers = []
    for number in range(count):
        path = folder / f"file {number}"
        path.write_bytes(content[number % len(content) :] + content[: number % len(content)])
        buffers.append(Buffer(str(path), 2, 8, "uint8"))
    return BufferTable.of(buffers)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_offsets_are_relative_to_the_buffer(tmp_path: Path) -> None:
    with FileStore(files(tmp_path, 2)) as store:
        assert read(store, 0, 0, 8) == b"23456789"
        assert read(store, 1, 3, 2) == b"67"
        assert read(store, 0, 5, 0) == b""
        assert store.num_bytes_read == 10
        store.check_unchanged()


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    buffers = files(tmp_path, 1)
    os.truncate(buffers[0].file, 9)
    with FileStore(buffers) as store:
        assert read(store, 0, 0, 7) == b"2345678"
        with pytest.raises(CorruptFileError, match="ends at byte 9, 1 bytes too early") as caught:
            read(store, 0, 0, 8)
    assert caught.value.path == buffers[0].file


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with (
        FileStore(BufferTable.of([Buffer(str(tmp_path / "absent"), 0, 1, "uint8")])) as store,
        pytest.raises(MissingSourceError, match="cannot be opened: No such file"),
    ):
        read(store, 0, 0, 1)


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with (
        FileStore(BufferTable.of([Buffer(str(tmp_path), 0, 1, "uint8")])) as store,
        pytest.raises(CorruptFileError, match="cannot be read: Is a directory"),
    ):
        read(store, 0, 0, 1)


@pytest.mark.parametrize("change", ["bytes", "size", "time", "replaced", "removed"])
def test_a_change_after_the_first_read_is_seen(change: str, tmp_path: Path) -> None:
    buffers = files(tmp_path, 2)
    path = Path(buffers[1].file)
    with FileStore(buffers) as store:
        read(store, 0, 0, 1)
        read(store, 1, 0, 1)
        store.check_unchanged()
        if change == "bytes":
            path.write_bytes(b"9876543210")
            os.utime(path, (5, 5))
        elif change == "size":
            with path.open("ab") as file:
                file.write(b"x")
        elif change == "time":
            os.utime(path, (1, 1))
        elif change == "replaced":
            status = path.stat()
            (tmp_path / "new").write_bytes(path.read_bytes())
            os.utime(tmp_path / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
            (tmp_path / "new").rename(path)
        else:
            path.unlink()
        with pytest.raises(SourceChangedError, match="while it was read") as caught:
            store.check_unchanged()
    assert caught.value.path == str(path)


def test_a_change_between_two_opens_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_OPEN_FILES", 1)
    buffers = files(tmp_path, 2)
    with FileStore(buffers) as store:
        read(store, 0, 0, 1)
        read(store, 1, 0, 1)
        Path(buffers[0].file).write_bytes(b"other content")
        with pytest.raises(SourceChangedError, match="changed while it was read"):
            read(store, 0, 0, 1)


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_OPEN_FILES", 3)
    buffers = files(tmp_path, 20)
    before = num_open_files()
    with FileStore(buffers) as store:
        for _ in range(2):
            for number in range(20):
                assert read(store, number, 0, 1) == b"0123456789"[(number + 2) % 10 :][:1]
                assert num_open_files() - before <= 3
    assert num_open_files() == before


def test_memory(tmp_path: Path) -> None:
    out = bytearray(3)
    MemoryStore([memoryview(b"abc"), memoryview(bytes(range(8))).cast("I")]).read_into(1, 2, memoryview(out))
    assert bytes(out) == b"\x02\x03\x04"


def test_small_reads_near_each_other_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right whatever comes after what: forwards, backwards, over the end of what was read ahead, and larger reads."""
    monkeypatch.setattr(store_module, "_SMALL_BYTES", 40)
    monkeypatch.setattr(store_module, "_LEAST_AHEAD", 25)
    monkeypatch.setattr(store_module, "_MOST_AHEAD", 100)
    data = random.Random(1).randbytes(3000)
    buffers = files(tmp_path, 2, data)
    contents = data[2:] + b"", (data[1:] + data[:1])[2:]
    generator = random.Random(2)
    with FileStore(buffers) as store:
        at = 0
        for _ in range(3000):
            number, nbytes = generator.randrange(2), generator.choice((0, 1, 7, 39, 40, 130))
            at = generator.choice((at, at, at + 30, at + 60, at - 50, generator.randrange(2900))) % 2800
            assert read(store, number, at, nbytes) == contents[number][at : at + nbytes]
            at += nbytes


def test_many_small_reads_take_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = files(tmp_path, 1, bytes(100_000))
    calls: list[int] = []
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda *args: (calls.append(1), pread(*args))[1])
    monkeypatch.setattr(os, "preadv", lambda *args: (calls.append(1), preadv(*args))[1])
    with FileStore(buffers) as store:
        for offset in range(0, 90_000, 100):
            read(store, 0, offset, 80)
    assert len(calls) == 7  # alone, then 2, 4, 8, 16, 32 and 64 KiB ahead


def test_small_reads_far_from_each_other_read_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = files(tmp_path, 1, bytes(100_000))
    monkeypatch.setattr(os, "pread", lambda *args: pytest.fail("read ahead"))
    with FileStore(buffers) as store:
        for offset in range(0, 90_000, 10_000):
            read(store, 0, offset, 80)

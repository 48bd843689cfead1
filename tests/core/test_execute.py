"""What a plan writes is right at every window size: rows, columns, casts, gaps and checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_optim_bridge.core import execute, gather, write
from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.execute import BufferFiller
from nemo_optim_bridge.core.manifest import ITEMSIZE, Manifest, TensorKey
from nemo_optim_bridge.core.output import Layout, OutputFile
from nemo_optim_bridge.core.plan import Plan, make_plan
from nemo_optim_bridge.core.region import Region
from nemo_optim_bridge.core.store import MemoryStore
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.core.write import write_files
from nemo_optim_bridge.errors import OutputError

KEY = TensorKey("layer.weight", "exp_avg")
Tiny = Callable[[int], None]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Shrink the window and the staging buffer to a number of bytes."""

    def shrink(nbytes: int) -> None:
        monkeypatch.setattr(write, "WINDOW_BYTES", nbytes)
        monkeypatch.setattr(gather, "STAGING_BYTES", nbytes)
        monkeypatch.setattr(gather, "_GAP_BYTES", nbytes // 4)

    return shrink


def manifest(
    shape: tuple[int, ...],
    boxes: Sequence[tuple[Region, tuple[int, ...] | None]],
    *,
    dtype: str = "float32",
    stored: str | None = None,
    padding: int = 0,
) -> Manifest:
    """Return a manifest of one tensor, each box in a buffer of its own with ``padding`` more elements at its end."""
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, shape, dtype)
    stored = stored or dtype
    for number, (box, stride) in enumerate(boxes):
        buffer = builder.buffer(f"part {number}", 0, (box.numel + padding) * ITEMSIZE[stored], stored)
        builder.shard(tensor, box, number, buffer, 0, stride)
    return builder.build()


def columns(shape: tuple[int, int], *stops: int) -> list[tuple[Region, tuple[int, ...] | None]]:
    """Cut a matrix into blocks of columns that end at ``stops``."""
    starts = (0, *stops[:-1])
    return [(Region((0, a), (shape[0], b - a)), None) for a, b in zip(starts, stops, strict=True)]


def numbers(shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    return (np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761)).reshape(shape)


def store_of(source: Manifest, tensor: npt.NDArray[np.uint32], *, transposed: bool = False) -> MemoryStore:
    """Return the buffers of a source manifest of separate boxes."""
    buffers = []
    for shard in source.shards:
        box = tensor[tuple(slice(o, o + n) for o, n in zip(shard.region.offsets, shard.region.shape, strict=True))]
        buffers.append(memoryview((box.T if transposed else box).tobytes()))
    return MemoryStore(buffers)


def written(plan: Plan, store: MemoryStore, folder: Path) -> bytes:
    """Write every target buffer to one file and return its bytes."""
    sizes = plan.target.buffers.nbytes
    layout = Layout.around(b"", np.zeros_like(sizes), sizes, np.zeros((0, len(sizes)), np.int64))
    write_files(folder, [OutputFile("out", layout)], plan, Workers(1), fsync=False, open_store=lambda _: store)
    return (folder / "out").read_bytes()


@pytest.mark.parametrize("window", [16, 28, 64, 100, 256, 1 << 20])
def test_blocks_of_columns_become_rows(window: int, tiny: Tiny, tmp_path: Path) -> None:
    """Interleaved pieces: each row of the target comes from three sources, and rows are wider than the window."""
    tiny(window)
    shape = (9, 23)
    source = manifest(shape, columns(shape, 5, 6, 23))
    target = manifest(shape, [(Region.full(shape), None)])
    tensor = numbers(shape)
    assert written(make_plan(source, target), store_of(source, tensor), tmp_path) == tensor.tobytes()


@pytest.mark.parametrize("window", [16, 28, 64, 1 << 20])
def test_rows_become_blocks_of_columns(window: int, tiny: Tiny, tmp_path: Path) -> None:
    tiny(window)
    shape = (9, 23)
    source = manifest(shape, [(Region((0, 0), (4, 23)), None), (Region((4, 0), (5, 23)), None)])
    target = manifest(shape, columns(shape, 1, 16, 23))
    tensor = numbers(shape)
    expected = b"".join(tensor[:, a:b].tobytes() for a, b in ((0, 1), (1, 16), (16, 23)))
    assert written(make_plan(source, target), store_of(source, tensor), tmp_path) == expected


@pytest.mark.parametrize("window", [16, 28, 64, 1 << 20])
def test_transposed_sources(window: int, tiny: Tiny, tmp_path: Path) -> None:
    tiny(window)
    shape = (12, 10)
    boxes = [(Region((0, 0), (12, 4)), (1, 12)), (Region((0, 4), (12, 6)), (1, 12))]
    source = manifest(shape, boxes)
    target = manifest(shape, [(Region((0, 0), (5, 10)), None), (Region((5, 0), (7, 10)), None)])
    tensor = numbers(shape)
    assert written(make_plan(source, target), store_of(source, tensor, transposed=True), tmp_path) == tensor.tobytes()


@pytest.mark.parametrize("window", [16, 28, 1 << 20])
def test_transposed_targets(window: int, tiny: Tiny, tmp_path: Path) -> None:
    tiny(window)
    shape = (12, 10)
    source = manifest(shape, columns(shape, 3, 10))
    target = manifest(shape, [(Region.full(shape), (1, 12))])
    tensor = numbers(shape)
    assert written(make_plan(source, target), store_of(source, tensor), tmp_path) == tensor.T.tobytes()


@pytest.mark.parametrize("window", [16, 28, 1 << 20])
def test_masters_become_weights_by_rounding(window: int, tiny: Tiny, tmp_path: Path) -> None:
    tiny(window)
    shape = (7, 11)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    source = manifest(shape, columns(shape, 4, 11), dtype="bfloat16", stored="float32")
    target = manifest(shape, [(Region.full(shape), None)], dtype="bfloat16")
    store = store_of(source, values.numpy().view(np.uint32))
    expected = values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert written(make_plan(source, target), store, tmp_path) == expected


@pytest.mark.parametrize("window", [16, 28, 1 << 20])
def test_what_no_shard_covers_is_zero(window: int, tiny: Tiny, tmp_path: Path) -> None:
    tiny(window)
    shape = (9, 5)
    source = manifest(shape, columns(shape, 2, 5))
    target = manifest(shape, [(Region((0, 0), (9, 5)), None)], padding=13)
    tensor = numbers(shape)
    got = written(make_plan(source, target), store_of(source, tensor), tmp_path)
    assert got == tensor.tobytes() + bytes(4 * 13)


def test_padding_is_zero_also_where_the_window_held_other_bytes(tiny: Tiny, tmp_path: Path) -> None:
    """The window is reused: what the first buffer left in it must not reach the second's padding."""
    tiny(64)
    shape = (16,)
    boxes = [(Region((0,), (16,)), None)]
    source, target = manifest(shape, boxes), manifest(shape, [*boxes, *boxes], padding=16)
    tensor = np.full(shape, 0xFFFFFFFF, np.uint32)
    got = written(make_plan(source, target), store_of(source, tensor), tmp_path)
    assert got == (tensor.tobytes() + bytes(64)) * 2


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 7), width=st.integers(1, 9), cut=st.integers(0, 9), start=st.integers(0, 70),
    length=st.integers(1, 70), transposed=st.booleans(),
)  # fmt: skip
def test_any_range_of_a_buffer(rows: int, width: int, cut: int, start: int, length: int, transposed: bool) -> None:
    shape = (rows, width)
    stops = sorted({min(cut, width), width} - {0})
    boxes = [(box, (1, rows) if transposed else None) for box, _ in columns(shape, *stops)]
    source = manifest(shape, boxes)
    target = manifest(shape, [(Region.full(shape), None)])
    tensor = numbers(shape)
    filler = BufferFiller(make_plan(source, target), store_of(source, tensor, transposed=transposed))
    start, stop = min(start, rows * width), min(start + length, rows * width)
    out = np.full((stop - start) * 4, 0xEE, np.uint8)
    filler.fill(0, start * 4, out)
    assert out.tobytes() == tensor.tobytes()[start * 4 : stop * 4]


@pytest.mark.parametrize("segment", [1, 64, 1 << 20])
@pytest.mark.parametrize("window", [16, 64, 1 << 20])
def test_the_crc_of_every_payload_is_put_in_its_places(
    window: int, segment: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(window)
    monkeypatch.setattr(write, "SEGMENT_BYTES", segment)
    shape = (6, 10)
    source = manifest(shape, columns(shape, 3, 10))
    target = manifest(shape, [(Region((0, 0), (1, 10)), None), (Region((1, 0), (5, 10)), None)])
    tensor = numbers(shape)
    text = b"head" * 11 + b"(....)" + b"(....)" + b"second ........ first" + b"tail" * 10
    layout = Layout.around(text, np.array([44, 50]), np.array([40, 200]), np.array([[45, 51], [63, 67]]))
    progress: list[int] = []
    store = store_of(source, tensor)
    file = OutputFile("deep/below/out", layout)
    plan = make_plan(source, target)
    write_files(tmp_path, [file], plan, Workers(1), fsync=True, progress=progress.append, open_store=lambda _: store)
    first, second = tensor[:1].tobytes(), tensor[1:].tobytes()
    one, two = (zlib.crc32(data).to_bytes(4, "little") for data in (first, second))
    end = b"second " + one + two + b" first" + b"tail" * 10
    expected = b"head" * 11 + first + b"(" + one + b")" + second + b"(" + two + b")" + end
    assert (tmp_path / "deep/below/out").read_bytes() == expected
    assert sum(progress) == len(expected) == file.nbytes


@pytest.mark.parametrize("window", [16, 150, 256, 1 << 20])
def test_small_files_are_written_together(window: int, tiny: Tiny, tmp_path: Path) -> None:
    """Whatever the window holds: text alone, a payload, and buffers that do not follow each other."""
    tiny(window)
    shape = (6, 10)
    source = manifest(shape, columns(shape, 3, 10))
    target = manifest(shape, [(Region((row, 0), (1, 10)), None) for row in range(6)])
    tensor = numbers(shape)
    store = store_of(source, tensor)
    files = [OutputFile(f"f/{row}", Layout.of(b"x" * row, 40), row) for row in (0, 1, 2, 4, 5, 3)]
    files.insert(2, OutputFile("text", Layout.of(b"only text"), 2))
    write_files(tmp_path, files, make_plan(source, target), Workers(1), fsync=False, open_store=lambda _: store)
    assert (tmp_path / "text").read_bytes() == b"only text"
    for row in range(6):
        assert (tmp_path / f"f/{row}").read_bytes() == b"x" * row + tensor[row].tobytes()


def test_the_small_end_of_a_large_file_is_not_taken_for_a_small_file(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a pipeline stage is large and the next one holds little: the window has room for both ends."""
    tiny(150)
    monkeypatch.setattr(write, "SEGMENT_BYTES", 150)
    shape = (8, 10)
    source = manifest(shape, columns(shape, 3, 10))
    target = manifest(shape, [(Region((row, 0), (1, 10)), None) for row in range(8)])
    tensor = numbers(shape)
    store = store_of(source, tensor)
    large = Layout.around(b"", np.zeros(5, np.int64), np.full(5, 40), np.zeros((0, 5), np.int64))
    files = [OutputFile("large", large), *(OutputFile(f"f/{row}", Layout.of(b"", 40), row) for row in (5, 6, 7))]
    assert [segment.is_whole for segment in write.cut_files(files)] == [False, False, True, True, True]
    write_files(tmp_path, files, make_plan(source, target), Workers(1), fsync=False, open_store=lambda _: store)
    assert (tmp_path / "large").read_bytes() == tensor[:5].tobytes()
    for row in (5, 6, 7):
        assert (tmp_path / f"f/{row}").read_bytes() == tensor[row].tobytes()


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    shape = (2,)
    one = manifest(shape, [(Region.full(shape), None)])
    plan = make_plan(one, one)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="cannot be written: File exists"):
        written(plan, store_of(one, numbers(shape)), tmp_path)
    assert (tmp_path / "out").read_text() == "mine"


def test_many_buffers_are_filled_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than fit one batch."""
    monkeypatch.setattr(execute, "_BATCH_PIECES", 7)
    shape = (40, 3)
    source = manifest(shape, columns(shape, 1, 3))
    target = manifest(shape, [(Region((row, 0), (1, 3)), None) for row in range(40)])
    tensor = numbers(shape)
    filler = BufferFiller(make_plan(source, target), store_of(source, tensor))
    for row in (*range(40), *range(39, -1, -1), 5, 39, 0):
        out = np.zeros(12, np.uint8)
        filler.fill(row, 0, out)
        assert out.tobytes() == tensor[row].tobytes()

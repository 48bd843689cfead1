"""Boxes of a buffer come into memory as they are, whatever their strides; rounding is torch's; cuts are exact."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_optim_bridge.core import gather
from nemo_optim_bridge.core.gather import Gatherer, aligned_buffer, bounded_boxes, round_to_bfloat16, window_boxes
from nemo_optim_bridge.core.store import MemoryStore
from nemo_optim_bridge.errors import TargetError

Shape = tuple[int, ...]


class CountingStore(MemoryStore):
    """Counts reads and the bytes of the largest one."""

    reads, largest = 0, 0

    def read_into(self, buffer: int, offset: int, out: memoryview) -> None:
        self.reads += 1
        self.largest = max(self.largest, len(out))
        assert offset >= 0
        super().read_into(buffer, offset, out)


def elements(count: int) -> npt.NDArray[np.uint32]:
    return np.arange(count, dtype=np.uint32) * np.uint32(2654435761)


@st.composite
def nested_strides(draw: st.DrawFn, max_ndim: int = 4) -> tuple[Shape, Shape]:
    """Return a shape and strides, largest first: every row ends before the next begins, with gaps here and there."""
    shape, stride, span = [], [], 1
    for _ in range(draw(st.integers(0, max_ndim))):
        size = draw(st.integers(1, 5))
        step = span + draw(st.integers(0, 4))
        shape.insert(0, size)
        stride.insert(0, step)
        span += (size - 1) * step
    return tuple(shape), tuple(stride)


def addresses(shape: Shape, stride: Shape, base: int = 0) -> dict[Shape, int]:
    return {
        index: base + sum(i * s for i, s in zip(index, stride, strict=True)) for index in product(*map(range, shape))
    }


@given(nested_strides(), st.randoms(use_true_random=False), st.integers(0, 9), st.sampled_from([8, 64, 1 << 20]))
def test_any_strided_box_is_gathered(drawn: tuple[Shape, Shape], random: object, offset: int, staging: int) -> None:
    shape, stride = drawn
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shape, stride = tuple(shape[d] for d in order), tuple(stride[d] for d in order)
    source = elements(offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    expected = np.array([source[a] for a in addresses(shape, stride, offset).values()], np.uint32).reshape(shape)
    store = CountingStore([memoryview(source.tobytes())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "STAGING_BYTES", staging)
        patch.setattr(gather, "_GAP_BYTES", staging // 2)
        out = np.full(shape, 0xDEADBEEF, np.uint32)
        Gatherer(store).gather(out, "float32", 0, "float32", offset, stride)
    assert np.array_equal(out, expected)


def test_a_transposed_matrix_larger_than_the_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "STAGING_BYTES", 256)
    source = elements(40 * 24).reshape(40, 24)
    store = CountingStore([memoryview(source.tobytes())])
    out = np.zeros((24, 40), np.uint32)
    Gatherer(store).gather(out, "float32", 0, "float32", 0, (1, 24))
    assert np.array_equal(out, source.T)
    assert store.largest <= 256
    assert store.reads >= 40 * 24 * 4 // 256


def test_a_strided_target_is_filled_in_place() -> None:
    source = elements(6).reshape(2, 3)
    memory = np.zeros((2, 8), np.uint32)
    Gatherer(MemoryStore([memoryview(source.tobytes())])).gather(memory[:, 2:5], "float32", 0, "float32", 0, (3, 1))
    assert np.array_equal(memory[:, 2:5], source)
    assert memory.sum(dtype=np.uint64) == source.sum(dtype=np.uint64)


def test_sparse_boxes_do_not_read_their_gaps() -> None:
    source = elements(1 << 16)
    store = CountingStore([memoryview(source.tobytes())])
    out = np.zeros(3, np.uint32)
    Gatherer(store).gather(out, "float32", 0, "float32", 5, (20_000,))
    assert out.tolist() == source[[5, 20_005, 40_005]].tolist()
    assert (store.reads, store.largest) == (3, 4)


@pytest.mark.parametrize(("dtype", "size"), [("uint8", 1), ("bfloat16", 2), ("int64", 8)])
def test_every_item_size(dtype: str, size: int) -> None:
    source = np.arange(24 * size, dtype=np.uint8)
    out = np.zeros((4, 6), f"u{size}")
    Gatherer(MemoryStore([memoryview(source.tobytes())])).gather(out, dtype, 0, dtype, 0, (1, 4))
    assert np.array_equal(out, source.view(f"u{size}").reshape(6, 4).T)


def test_only_float32_is_rounded_to_bfloat16() -> None:
    values = torch.randn(5, 7)
    store = MemoryStore([memoryview(values.numpy().tobytes()).cast("B")])
    out = np.zeros((7, 5), np.uint16)
    Gatherer(store).gather(out, "bfloat16", 0, "float32", 0, (1, 7))
    assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), values.T.to(torch.bfloat16))
    for source, target in (("bfloat16", "float32"), ("float64", "bfloat16"), ("float16", "bfloat16")):
        with pytest.raises(TargetError, match=f"{source} cannot be stored as {target}"):
            Gatherer(store).gather(np.zeros(1, np.uint64), target, 0, source, 0, (1,))


#: Below, at and above the middle between two bfloat16 values, and the ends: for each of the 2**16 upper halves.
LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF)


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_rounding_is_torchs_for_every_upper_half(low: int) -> None:
    """All signs, exponents and mantissas: denormals, overflow to infinity, infinities, quiet and signalling NaN.

    Which NaN torch makes of a NaN depends on the processor: 0xFFFF where it is vectorised, 0x7FC0 elsewhere.
    """
    bits = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)
    expected = torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32).to(torch.bfloat16)
    got = torch.from_numpy(round_to_bfloat16(bits))
    is_nan = expected.isnan()
    assert torch.equal(got.view(torch.bfloat16).isnan(), is_nan)
    assert torch.equal(got.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])
    assert is_nan.sum() == 2 * (127 if low == 0 else 128)


@given(nested_strides(), st.integers(0, 20), st.integers(0, 200), st.integers(0, 60))
def test_a_window_holds_exactly_its_addresses(drawn: tuple[Shape, Shape], base: int, start: int, length: int) -> None:
    shape, stride = drawn
    stop = start + length
    inside = {index for index, address in addresses(shape, stride, base).items() if start <= address < stop}
    found: list[Shape] = []
    parts = list(window_boxes(shape, stride, base, start, stop))
    for offsets, size in parts:
        found += [tuple(o + i for o, i in zip(offsets, index, strict=True)) for index in product(*map(range, size))]
    assert sorted(found) == sorted(inside)
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_bounded_boxes_cover_once_and_are_bounded(shape: Shape, limit: int) -> None:
    found: list[Shape] = []
    for offsets, size in bounded_boxes(shape, limit):
        assert 0 < prod(size) <= limit
        found += [tuple(o + i for o, i in zip(offsets, index, strict=True)) for index in product(*map(range, size))]
    assert found == list(product(*map(range, shape)))


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 1 << 20])
def test_buffers_are_aligned(nbytes: int) -> None:
    memory = aligned_buffer(nbytes)
    assert len(memory) == nbytes
    assert memory.ctypes.data % 64 == 0

"""Bring a strided box of a buffer into memory, through one small buffer that is reused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.store import Store
from nemo_optim_bridge.errors import TargetError

STAGING_BYTES = 1 << 20
#: A read costs about as much as copying this many bytes from the page cache: runs with smaller gaps are read at once.
_GAP_BYTES = 12 << 10

Array = npt.NDArray[Any]
_UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def unsigned(dtype: str) -> np.dtype[Any]:
    """Return the unsigned type that carries the bits of a dtype's elements."""
    return _UNSIGNED[ITEMSIZE[dtype]]


def aligned_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialised array of bytes that starts on a 64-byte boundary: unaligned reads are far slower."""
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class Gatherer:
    """Reads boxes of a store's buffers into arrays of any strides."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._staging = aligned_buffer(STAGING_BYTES)
        self._bytes = self._staging.data

    def gather(
        self, out: Array, out_dtype: str, buffer: int, dtype: str, offset: int, stride: tuple[int, ...]
    ) -> None:  # fmt: skip
        """Fill ``out``, an array of ``unsigned(out_dtype)``, with a box of a buffer.

        Args:
            offset: of the box's first element in the buffer, in elements.
            stride: of the box in the buffer, in elements.

        A buffer of float32 fills bfloat16 by rounding to nearest, ties to even; raises TargetError for other casts.
        """
        if dtype == out_dtype:
            self._gather(out, buffer, offset, stride, out.itemsize)
        elif (dtype, out_dtype) == ("float32", "bfloat16"):
            exact = np.empty(out.shape, np.uint32)
            self._gather(exact, buffer, offset, stride, 4)
            out[...] = round_to_bfloat16(exact)
        else:
            raise TargetError(f"{dtype} cannot be stored as {out_dtype}")

    def _gather(self, out: Array, buffer: int, offset: int, stride: tuple[int, ...], itemsize: int) -> None:
        shape = out.shape
        order, span, run = _extent(shape, stride)
        if run == out.size and order == sorted(order, reverse=True) and out.flags.c_contiguous:
            self._store.read_into(buffer, offset * itemsize, out.reshape(-1).view(np.uint8).data)
            return
        is_sparse = (span - out.size) * itemsize > _GAP_BYTES * (out.size // run)
        if span * itemsize <= STAGING_BYTES and not is_sparse:
            self._store.read_into(buffer, offset * itemsize, self._bytes[: span * itemsize])
            strides = tuple(s * itemsize for s in stride)
            out[...] = np.ndarray(shape, out.dtype, self._staging, 0, strides)
            return
        dim = order[-1]
        inner = span - (shape[dim] - 1) * stride[dim]
        count = 1 if is_sparse else max(1, (STAGING_BYTES // itemsize - inner) // stride[dim] + 1)
        whole: tuple[slice, ...] = (slice(None),) * dim
        for start in range(0, shape[dim], count):
            part = out[(*whole, slice(start, start + count))]
            self._gather(part, buffer, offset + start * stride[dim], stride, itemsize)


@lru_cache(maxsize=1 << 10)  # layers repeat each other
def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[list[int], int, int]:
    """Return the dimensions of a box, innermost first without ones, from its first to past its last address, and how
    many elements follow each other without a gap.
    """
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: stride[d])
    span, run = 1, 1
    for dim in order:
        if stride[dim] == run == span:
            run *= shape[dim]
        span += (shape[dim] - 1) * stride[dim]
    return order, span, run


def round_to_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Return the bits of bfloat16 nearest to float32 values given as bits; ties go to even, NaN stays NaN.

    The rule of ``Tensor.to(torch.bfloat16)``, which optimizers use to write weights from masters.
    """
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def as_floats(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """Return the values of elements given as unsigned bits."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype.startswith("float8"):
        return bits.astype(np.float64)
    return bits.view(np.dtype(dtype)).astype(np.float64)


def window_boxes(
    shape: tuple[int, ...], stride: tuple[int, ...], base: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, shape) of the parts of a strided box whose addresses lie in ``start <= address < stop``.

    ``base`` is the address of its first element, all in elements. Addresses must grow with the index in row-major
    order, each row ending before the next begins; at most 2n-1 parts are yielded.
    """
    if not shape:
        if start <= base < stop:
            yield (), ()
        return
    inner_shape, inner_stride = shape[1:], stride[1:]
    inner_span = 1 + sum((n - 1) * s for n, s in zip(inner_shape, inner_stride, strict=True))
    step = max(stride[0], 1)
    first = max(0, (start - base - inner_span) // step + 1)
    last = min(shape[0], -((base - stop) // step))  # rows that begin before stop
    full_first = max(first, -((base - start) // step))
    full_last = min(last, (stop - base - inner_span) // step + 1)
    full_first = min(full_first, last)
    for row in range(first, full_first):
        for offsets, size in window_boxes(inner_shape, inner_stride, base + row * step, start, stop):
            yield (row, *offsets), (1, *size)
    if full_last > full_first:
        yield (full_first, *(0,) * len(inner_shape)), (full_last - full_first, *inner_shape)
    for row in range(max(full_last, full_first), last):
        for offsets, size in window_boxes(inner_shape, inner_stride, base + row * step, start, stop):
            yield (row, *offsets), (1, *size)


def bounded_boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, shape) of the parts of a box, cut along leading dimensions, of at most ``limit`` elements."""
    if prod(shape) <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    inner = prod(shape[1:])
    count = max(1, limit // inner) if inner else shape[0]
    for start in range(0, shape[0], count):
        rows = min(count, shape[0] - start)
        if inner <= limit:
            yield (start, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
        else:
            for offsets, size in bounded_boxes(shape[1:], limit):
                yield (start, *offsets), (1, *size)

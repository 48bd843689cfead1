"""Loads into live tensors where they really are: what holds on the CPU holds on CUDA, whose tests are unrun so far."""

from __future__ import annotations

import pytest
import torch

import nemo_optim_bridge as nob
from nemo_optim_bridge.core.builder import ManifestBuilder
from nemo_optim_bridge.core.live import execute_into, plan_tensors
from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.staging import BUFFER_BYTES, NUM_BUFFERS, Stager
from nemo_optim_bridge.core.store import MemoryStore
from nemo_optim_bridge.errors import CorruptFileError
from tests.core.device_cases import Case, FailingStore
from tests.devices import CUDA, DEVICES, require

KEY = nob.TensorKey("w", "exp_avg")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("capacity", [256, BUFFER_BYTES])
def test_boxes_of_every_dtype_and_stride(
    device: str, dtype: str, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(device)
    monkeypatch.setattr(Stager, "capacity", capacity)
    case = Case(dtype, device=device)
    case.fill()
    assert case.wrong() == []


@pytest.mark.parametrize("device", DEVICES)
def test_masters_are_rounded_on_the_way(device: str) -> None:
    require(device)
    case = Case("bfloat16", "float32", device)
    case.fill()
    assert case.wrong() == []


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_larger_than_all_buffers(device: str) -> None:
    require(device)
    rows, cols = 3 * NUM_BUFFERS + 1, BUFFER_BYTES // 4 + 3
    whole = torch.randint(-(2**31), 2**31, (rows, cols), dtype=torch.int32)
    builder = ManifestBuilder()
    tensor = builder.tensor(KEY, (rows, cols), "int32")
    parts = [whole[:, :1000].contiguous(), whole[:, 1000:].contiguous()]
    for rank, (part, start) in enumerate(zip(parts, (0, 1000), strict=True)):
        buffer = builder.buffer(f"part {rank}", 0, part.nbytes, "int32")
        builder.shard(tensor, nob.Region((0, start), tuple(part.shape)), rank, buffer)
    manifest, store = builder.build(), MemoryStore([memoryview(part.numpy().reshape(-1)) for part in parts])
    straight = torch.zeros(rows, cols, dtype=torch.int32, device=device)
    turned = torch.zeros(cols, rows, dtype=torch.int32, device=device)
    boxes = [(KEY, nob.Region((0, 0), (rows, cols)), target) for target in (straight, turned.t())]
    load = plan_tensors(manifest, boxes)
    execute_into(load.plan, store, load.tensors)
    assert torch.equal(straight.cpu(), whole)
    assert torch.equal(turned.t().cpu(), whole)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_in_the_middle_is_raised_once_all_copies_are_over(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(device)
    monkeypatch.setattr(Stager, "capacity", 256)
    case = Case("float32", device=device)
    case.fill()
    before = pinned_bytes()
    case = Case("float32", device=device)
    with pytest.raises(CorruptFileError, match="ends early"):
        case.fill(store=FailingStore(case.store, 30, CorruptFileError("ends early")))
    assert case.wrong()
    case.fill()  # the same tensors, later
    assert case.wrong() == []
    assert pinned_bytes() == before  # the buffers had been given back: they were used again


def pinned_bytes() -> int:
    """Return the bytes of pinned memory that torch holds, in use or not; 0 without CUDA."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if torch.cuda.is_available() else 0


@pytest.mark.parametrize("device", [CUDA])
def test_work_that_was_queued_before_comes_first(device: str) -> None:
    require(device)
    case = Case("float32", device=device)
    torch.cuda._sleep(200_000_000)
    for live, _ in case.memory:
        live.fill_(85)  # queued behind the sleep; what is loaded must not be overwritten by it
    case.fill()
    assert case.wrong() == []


@pytest.mark.parametrize("device", [CUDA])
def test_one_load_fills_tensors_of_both_kinds(device: str) -> None:
    require(device)
    on_cpu, on_device = Case("float32"), Case("float32", device=device)
    mixed = Case("float32")
    mixed.boxes = [*on_cpu.boxes[::2], *on_device.boxes[1::2]]
    mixed.fill()
    assert [n for n in on_cpu.wrong() if n % 2 == 0] == [n for n in on_device.wrong() if n % 2] == []

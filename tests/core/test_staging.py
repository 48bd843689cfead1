"""Staging for a device, on a stand-in whose copies happen as late as they may: refilling too early would show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from nemo_optim_bridge.core.manifest import ITEMSIZE
from nemo_optim_bridge.core.staging import NUM_BUFFERS, CudaDevice, Device, StagedBox, Stager, open_device
from nemo_optim_bridge.errors import CorruptFileError, TargetError
from tests.core.device_cases import COLS, ROWS, Case, FailingStore
from tests.devices import LateDevice, LateEvent, opener


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every case larger than all buffers together."""
    monkeypatch.setattr(Stager, "capacity", 256)


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("capacity", [64, 256, 1 << 20])
def test_boxes_of_every_dtype_and_stride(dtype: str, capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stager, "capacity", capacity)
    case, device = Case(dtype), LateDevice()
    case.fill(opener(device))
    assert case.wrong() == []
    assert device.done == len(device.sent)  # nothing is under way when the load is over
    in_place = Case(dtype)
    in_place.fill()
    assert in_place.wrong() == []


def test_masters_are_rounded_on_the_way(small_buffers: None) -> None:
    case = Case("bfloat16", "float32")
    case.fill(opener(LateDevice()))
    assert case.wrong() == []


def test_buffers_take_turns_and_are_waited_for_before_they_are_filled_again(small_buffers: None) -> None:
    case, device = Case("float32"), LateDevice()
    case.fill(opener(device))
    count = len(device.sent)
    assert count > 3 * NUM_BUFFERS
    assert [buffer for buffer, _ in device.sent] == [number % NUM_BUFFERS for number in range(count)]
    while_filling = [f"send {number}" for number in range(NUM_BUFFERS)]  # the first wait comes when all are taken
    for number in range(NUM_BUFFERS, count):
        while_filling += [f"wait {number - NUM_BUFFERS}", f"send {number}"]
    assert device.log[: len(while_filling)] == while_filling
    assert sorted(device.log[len(while_filling) :]) == sorted(f"wait {count - 1 - n}" for n in range(NUM_BUFFERS))


def test_the_stand_in_shows_a_buffer_that_is_filled_too_early(
    small_buffers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hasty(LateDevice):
        """Its events are over at once; its copies are not."""

        def send(self, staged: torch.Tensor, boxes: Sequence[StagedBox]) -> LateEvent:
            super().send(staged, boxes)
            return LateEvent(self, -1)

    case, device = Case("float32"), Hasty()
    case.fill(opener(device))
    device.copy_until(len(device.sent) - 1)
    assert case.wrong()


def test_small_boxes_share_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stager, "capacity", 1 << 20)
    case, device = Case("float32"), LateDevice()
    case.fill(opener(device))
    assert [buffer for buffer, _ in device.sent] == [0]
    assert device.sent[0][1] > ROWS * COLS / 10


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_an_error_in_the_middle_leaves_nothing_under_way(small_buffers: None, count: int) -> None:
    case, device = Case("float32"), LateDevice()
    with pytest.raises(CorruptFileError, match="ends early"):
        case.fill(opener(device), FailingStore(case.store, count, CorruptFileError("ends early")))
    assert device.done == len(device.sent)
    assert case.wrong()
    device.forget()
    assert [buffer() for buffer in device.buffers] == [None] * NUM_BUFFERS


def test_a_device_that_fails_is_waited_for_and_its_error_arrives(small_buffers: None) -> None:
    class Broken(LateDevice):
        def send(self, staged: torch.Tensor, boxes: Sequence[StagedBox]) -> LateEvent:
            if len(self.sent) == 3:
                raise RuntimeError("CUDA error: out of memory")
            return super().send(staged, boxes)

    case, device = Case("float32"), Broken()
    with pytest.raises(RuntimeError, match="out of memory"):
        case.fill(opener(device))
    assert device.done == 3


def test_each_device_has_its_own_buffers_and_the_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_one(where: torch.device) -> Device | None:
        opened.append(where)
        return None

    case = Case("float32")
    case.fill(open_one)
    assert opened == [torch.device("cpu")]
    assert case.wrong() == []


def test_tensors_of_other_devices_are_refused() -> None:
    assert open_device(torch.device("cpu")) is None
    with pytest.raises(TargetError, match=r"meta cannot be filled.*CPU"):
        Case("float32", device="meta").fill()


def test_a_cuda_device_queues_copy_scatter_and_event_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks which calls are made, on stand-ins for torch.cuda's; what CUDA makes of them is unrun so far."""
    log: list[str] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.device = device

        def wait_stream(self, other: Stream) -> None:
            log.append(f"wait for {'own' if other is self else 'current'}")

        def record_event(self) -> str:
            log.append("event")
            return "event"

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append("enter")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    device = CudaDevice(torch.device("cpu"))
    target = torch.zeros(4, 2)
    staged = torch.arange(4, dtype=torch.float32).view(torch.uint8)
    event = device.send(staged, [StagedBox(target, (4,), 1, (2,), 0)])
    assert target.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert str(event) == "event"
    device.send(staged, [])
    sent = ["wait for current", "enter", "event", "leave"]  # so that no memory is written that is still in use
    assert log == ["enter", "leave", *sent, *sent]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is pinned memory")
def test_without_pinned_memory_it_is_refused() -> None:
    with pytest.raises(TargetError, match=r"pinned host memory can be had.*ulimit -l"):
        CudaDevice.allocate(CudaDevice.__new__(CudaDevice))

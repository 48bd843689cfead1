"""The plugins on the device that a run lives on: gloo and the CPU, and nccl and CUDA at world size 1, unrun so far."""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from nemo_optim_bridge.core.agree import together
from nemo_optim_bridge.core.store import FileStore
from nemo_optim_bridge.errors import BridgeError, CorruptFileError
from nemo_optim_bridge.plugins import nanotron as plugin
from nemo_optim_bridge.plugins.dcp import load
from nemo_optim_bridge.plugins.nanotron.loader import _Load
from tests.devices import DEVICES, require
from tests.nanotron.test_teams import torchrun
from tests.plugins.test_dcp import expect_equal, read_truth
from tests.plugins.test_nanotron import SOURCE, base_of, build, masters_of, untouched
from tests.plugins.world import run_world

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def load_into_run(rank: int, fixtures: Path, device: str) -> None:
    """Load into a running optimizer; with an error in the middle of the masters first."""
    source = fixtures / "checkpoints" / SOURCE
    truth = load_file(fixtures / "truth" / "llama_tied.safetensors")
    optimizer, context = build(source, device=device)
    whole_phase, whole_read, reads = _Load.read_masters, FileStore.read_into, itertools.count(1)

    def fail_late(store: FileStore, buffer: int, offset: int, out: memoryview) -> None:
        whole_read(store, buffer, offset, out)
        if next(reads) == 20:
            raise CorruptFileError("the disk is gone")

    def read_masters(load: _Load) -> int:
        with mock.patch.object(FileStore, "read_into", fail_late):
            return whole_phase(load)

    with mock.patch.object(_Load, "read_masters", read_masters), pytest.raises(CorruptFileError, match="disk is gone"):
        plugin.load_optimizer(optimizer, context, source)
    assert untouched(optimizer)
    plugin.load_optimizer(optimizer, context, source)
    base, masters = base_of(optimizer), masters_of(optimizer)
    by_name = dict(zip(masters, base.param_groups[0]["params"], strict=True))
    for fqn, master in masters.items():
        state = base.state[by_name[fqn]]
        for name, tensor in (("fp32", master), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            assert tensor.device.type == device
            expect_equal(tensor.cpu(), truth[f"{fqn}|{name}"])
        assert state["step"] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_running_optimizer(device: str, nanotron_fixtures: Path) -> None:
    require(device)
    run_world(1, load_into_run, nanotron_fixtures, device, backend=BACKENDS[device])


def load_state_dict(rank: int, fixtures: Path, device: str) -> None:
    """Load a state dict of tensors on the device."""
    truth = read_truth(fixtures)
    state_dict = {key: torch.full_like(value, -1, device=device) for key, value in truth.items()}
    load(state_dict, fixtures / "checkpoints" / SOURCE)
    for key, tensor in state_dict.items():
        assert tensor.device.type == device
        expect_equal(tensor.cpu(), truth[key])


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_dict(device: str, nanotron_fixtures: Path) -> None:
    require(device)
    run_world(1, load_state_dict, nanotron_fixtures, device, backend=BACKENDS[device])


def fail_together(rank: int, device: str) -> None:
    """Agree on success and on an error."""
    assert distributed.get_backend() == BACKENDS[device]
    assert together(lambda: 5) == 5
    with pytest.raises(BridgeError, match="it broke"):
        together(lambda: (_ for _ in ()).throw(BridgeError("it broke")))


@pytest.mark.parametrize("device", DEVICES)
def test_agreement(device: str) -> None:
    require(device)
    run_world(1, fail_together, device, backend=BACKENDS[device])


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_torchrun_started(device: str) -> None:
    require(device)
    code = (
        "import sys, torch\n"
        "from nemo_optim_bridge.core.team import find_team, ignore\n"
        "team = find_team(None)\n"
        "assert team.is_leader and team.lead(lambda: 7) == 7\n"
        "assert team.map(lambda report: lambda item: item * item, [1, 2, 3], [1, 1, 1], ignore) == [1, 4, 9]\n"
        "one = torch.ones(1, device=sys.argv[1])\n"
        "torch.distributed.all_reduce(one)\n"
        "print(one.item(), one.device.type)\n"
    )
    ran = torchrun(device, ranks=1, code=code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["1.0", device]

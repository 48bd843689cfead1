"""torch.distributed.checkpoint loads nanotron checkpoints: straight from the folder, and once exported."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from nemo_optim_bridge.errors import BridgeError, CorruptFileError, OutputError, TargetError
from nemo_optim_bridge.formats import torch_dcp
from nemo_optim_bridge.plugins.dcp import StorageReader, export_dcp, load
from tests.plugins.world import run_world

SOURCE = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
ONE_RANK = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
QKV = "model.decoder.1.pp_block.attn.qkv_proj.weight"
DOWN = "model.decoder.2.pp_block.mlp.down_proj.weight"
NORM = "model.final_layer_norm.pp_block.weight"
STATES = {"fp32": "fp32_param"}


def key_of(name: str) -> str:
    """Return the DCP key of a truth tensor."""
    fqn, state = name.split("|")
    return f"model.{fqn}" if state == "weight" else f"optim.state.{fqn}.{STATES.get(state, state)}"


def read_truth(fixtures: Path, model: str = "llama_tied") -> dict[str, torch.Tensor]:
    tensors = load_file(fixtures / "truth" / f"{model}.safetensors")
    return {key_of(name): t.reshape(()) if name.endswith("|step") else t for name, t in tensors.items()}


def short(fqn: str) -> str:
    return fqn.removeprefix("model.").replace(".pp_block", "")


def expect_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_every_entry_by_plain_dcp_load(nanotron_fixtures: Path) -> None:
    truth = read_truth(nanotron_fixtures)
    tensors = {key: torch.full_like(value, -1) for key, value in truth.items()}
    lr = f"optim.param_groups.{QKV}.lr"
    state_dict: dict[str, Any] = {**tensors, lr: None}
    reader = StorageReader(nanotron_fixtures / "checkpoints" / SOURCE)
    dcp.load(state_dict, storage_reader=reader, no_dist=True)
    for key, tensor in tensors.items():
        expect_equal(tensor, truth[key])
    assert 0 < state_dict[lr] < 1


def test_nested_and_renamed_state_dicts(nanotron_fixtures: Path) -> None:
    truth = read_truth(nanotron_fixtures)
    name = "decoder.1.attn.qkv_proj.weight"
    state_dict: dict[str, Any] = {
        "model": {name: torch.zeros(64, 32)},
        "optim": {"state": {name: {"exp_avg": torch.zeros(64, 32), "step": torch.tensor(0.0)}}},
    }
    load(state_dict, nanotron_fixtures / "checkpoints" / SOURCE, rename=short, model_state="fp32_param")
    expect_equal(state_dict["model"][name], truth[f"optim.state.{QKV}.fp32_param"])
    expect_equal(state_dict["optim"]["state"][name]["exp_avg"], truth[f"optim.state.{QKV}.exp_avg"])
    expect_equal(state_dict["optim"]["state"][name]["step"], torch.tensor(3.0))


def test_only_what_is_asked_for_is_read(nanotron_fixtures: Path) -> None:
    reader = StorageReader(nanotron_fixtures / "checkpoints" / ONE_RANK)
    load({f"optim.state.{DOWN}.exp_avg": torch.zeros(32, 64)}, reader)
    assert reader.num_bytes_read == 32 * 64 * 4


def test_all_misfits_are_named_before_anything_is_touched(nanotron_fixtures: Path) -> None:
    good = torch.full((64, 32), 5.0)
    state_dict = {
        f"optim.state.{QKV}.exp_avg": good,
        f"optim.state.{QKV}.exp_avgs": torch.zeros(64, 32),
        f"model.{NORM}": torch.zeros(32),
        f"optim.state.{DOWN}.exp_avg": torch.zeros(64, 32),
        f"optim.state.{DOWN}.step": 3,
    }
    with pytest.raises(BridgeError) as caught:
        load(state_dict, nanotron_fixtures / "checkpoints" / SOURCE)
    message = str(caught.value)
    assert "4 problems" in message
    assert f"optim.state.{QKV}.exp_avgs]. Did you mean optim.state.{QKV}.exp_avg" in message
    assert "torch.bfloat16 (32,) and the state dict wants torch.float32 (32,)" in message
    assert "torch.float32 (32, 64) and the state dict wants torch.float32 (64, 32)" in message
    assert "is a tensor in the checkpoint and int in the state dict" in message
    assert (good == 5).all()
    with pytest.raises(BridgeError, match="not a checkpoint of a known format"):
        load({"a": good}, nanotron_fixtures)
    with pytest.raises(TargetError, match="two entries would be called"):
        load({"a": good}, nanotron_fixtures / "checkpoints" / SOURCE, rename=lambda fqn: "same")


def test_megatron_checkpoints_load_under_the_same_keys() -> None:
    root = Path(__file__).parents[1] / "data" / "nemo"
    truth = {}
    for name, tensor in load_file(root / "dense.safetensors").items():
        state, fqn = name.split(".model.")
        truth[f"optim.state.{fqn}.{state}"] = tensor
    state_dict = {key: torch.zeros_like(tensor) for key, tensor in truth.items()}
    load(state_dict, root / "fused_dense" / "ckpt")
    for key, tensor in state_dict.items():
        expect_equal(tensor, truth[key])


# ---- several ranks


PLACEMENTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
]


def load_dtensors(rank: int, fixtures: Path) -> list[int]:
    """Load DTensors of every placement; return the bytes that this rank read for each."""
    read = []
    for model, source, extra in (
        ("llama_tied", SOURCE, {}),
        ("llama_vpad_untied", "nt04-llama_vpad_untied-z0-tp4-pp1-dp1-ep1", {"vocab_size": 126}),
    ):
        truth = {key: value for key, value in read_truth(fixtures, model).items() if value.ndim == 2}
        for shape, placements in PLACEMENTS:
            mesh = init_device_mesh("cpu", shape)
            state_dict = {
                key: zeros(value.shape, dtype=value.dtype, device_mesh=mesh, placements=placements)
                for key, value in truth.items()
            }
            reader = StorageReader(fixtures / "checkpoints" / source, **extra)
            load(state_dict, reader)
            for key, tensor in state_dict.items():
                expect_equal(tensor.full_tensor(), truth[key])
            read.append(reader.num_bytes_read)
    mesh = init_device_mesh("cpu", (4,))
    mine = {f"optim.state.{QKV}.exp_avg": zeros((64, 32), device_mesh=mesh, placements=[Shard(0)])}
    reader = StorageReader(fixtures / "checkpoints" / ONE_RANK)
    dcp.load(mine, storage_reader=reader)
    return [*read, reader.num_bytes_read]


def test_dtensors_of_any_mesh(nanotron_fixtures: Path) -> None:
    for read in run_world(4, load_dtensors, nanotron_fixtures):
        assert read[-1] == 16 * 32 * 4  # its own rows, no byte more
        whole = read[2]
        assert all(bytes_read < whole / 2 for bytes_read in (read[0], read[4]))


def train_fsdp(rank: int, fixtures: Path) -> None:
    """Restore an FSDP2 model and its AdamW from a nanotron checkpoint."""
    truth = read_truth(fixtures)
    model = nn.Module()
    model.final_layer_norm = nn.LayerNorm(32, bias=False)
    model.decoder = nn.ModuleList([nn.Module() for _ in range(3)])
    model.decoder[2].mlp = nn.Module()
    model.decoder[2].mlp.down_proj = nn.Linear(64, 32, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state_dict = {
        "model": dict(model.named_parameters()),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    load(state_dict, fixtures / "checkpoints" / SOURCE, rename=short, model_state="fp32_param")
    set_optimizer_state_dict(model, optimizer, state_dict["optim"], options=options)
    for fqn in (DOWN, NORM):
        parameter = model.get_parameter(short(fqn))
        assert isinstance(parameter, DTensor)
        expect_equal(parameter.detach().full_tensor(), truth[f"optim.state.{fqn}.fp32_param"])
        for state in ("exp_avg", "exp_avg_sq"):
            expect_equal(optimizer.state[parameter][state].full_tensor(), truth[f"optim.state.{fqn}.{state}"])
        assert optimizer.state[parameter]["step"] == 3
    assert optimizer.param_groups[0]["lr"] != 0.5
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_fsdp2_model_and_optimizer(nanotron_fixtures: Path) -> None:
    run_world(2, train_fsdp, nanotron_fixtures)


def fail_on_one_rank(rank: int, fixtures: Path) -> str:
    """Ask for what exists on rank 0, and on rank 1 for what does not."""
    tensor = torch.full((64, 32), 5.0)
    key = f"optim.state.{QKV}.exp_avg" if rank == 0 else "optim.state.nothing"
    try:
        load({key: tensor}, fixtures / "checkpoints" / SOURCE)
    except BridgeError as error:
        assert (tensor == 5).all()
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_rank_that_fails_tells_the_others(nanotron_fixtures: Path) -> None:
    for message in run_world(2, fail_on_one_rank, nanotron_fixtures):
        assert message.startswith("MissingSourceError: the checkpoint has no such entry [tensor optim.state.nothing]")


# ---- export


def test_the_exported_checkpoint_is_loaded_by_plain_dcp(
    nanotron_fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dcp, "CHUNK_BYTES", 1000)  # so that most tensors are written in several chunks
    truth = read_truth(nanotron_fixtures)
    out = tmp_path / "out"
    report = export_dcp(nanotron_fixtures / "checkpoints" / SOURCE, out, fsync=False)
    assert report.num_tensors == len([key for key in truth if not key.endswith(".step")])
    betas = f"optim.param_groups.{QKV}.betas"
    state_dict: dict[str, Any] = {key: torch.full_like(value, -1) for key, value in truth.items()}
    state_dict[betas] = None
    dcp.load(state_dict, checkpoint_id=out, no_dist=True)
    assert state_dict.pop(betas) == (0.9, 0.95)
    for key, tensor in state_dict.items():
        expect_equal(tensor, truth[key])
    with pytest.raises(OutputError, match="already exists"):
        export_dcp(nanotron_fixtures / "checkpoints" / SOURCE, out)


def test_a_failed_export_leaves_nothing(
    nanotron_fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = nanotron_fixtures / "checkpoints" / SOURCE, tmp_path / "out"

    def stop(stage: str, total: int) -> Callable[[int], None]:
        left = [total / 2]

        def report(num_bytes: int) -> None:
            left[0] -= num_bytes
            if stage == "writing" and left[0] < 0:
                raise CorruptFileError("the disk is gone")

        return report

    with pytest.raises(CorruptFileError, match="the disk is gone"):
        export_dcp(source, out, progress=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TargetError, match="replica policy"):
        export_dcp(source, out, replicas="any")
    monkeypatch.setattr(torch, "save", lambda value, stream: stream.write(b"nothing"))
    with pytest.raises(OutputError, match="did not write the whole box"):
        export_dcp(source, out)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(nanotron_fixtures: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may grow beyond
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            export_dcp(nanotron_fixtures / "checkpoints" / SOURCE, tmp_path / "out", receipt=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []

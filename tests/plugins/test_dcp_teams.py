"""Several processes export the same bytes as one; a failing or killed one ends all, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from nemo_optim_bridge.cli import run
from nemo_optim_bridge.core.receipt import FILE_NAME
from nemo_optim_bridge.core.team import Workers
from nemo_optim_bridge.errors import CorruptFileError, OutputError
from nemo_optim_bridge.formats import torch_dcp
from nemo_optim_bridge.formats.torch_dcp import export_dcp
from nemo_optim_bridge.formats.torch_dcp_writer import DcpFile, DcpWriter
from tests.edits import flip_bit
from tests.nanotron.pair_table import run_cli
from tests.nanotron.test_teams import FIRST, contents, torchrun
from tests.plugins.test_dcp import SOURCE, expect_equal, read_truth

SMALL_FILES = (
    "from nemo_optim_bridge.formats import torch_dcp\ntorch_dcp.CHUNK_BYTES, torch_dcp.FILE_BYTES = 4000, 20000\n"
)
MAIN = "import sys\nfrom nemo_optim_bridge.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread the small checkpoint over many files."""
    monkeypatch.setattr(torch_dcp, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(torch_dcp, "FILE_BYTES", 20000)


@pytest.fixture
def source(nanotron_fixtures: Path) -> Path:
    return nanotron_fixtures / "checkpoints" / SOURCE


def expect_truth(folder: Path, fixtures: Path) -> None:
    truth = read_truth(fixtures)
    state_dict = {key: torch.full_like(value, -1) for key, value in truth.items()}
    dcp.load(state_dict, checkpoint_id=folder, no_dist=True)
    for key, tensor in state_dict.items():
        expect_equal(tensor, truth[key])


def test_workers_and_ranks_write_the_same_bytes(
    source: Path, nanotron_fixtures: Path, tmp_path: Path, small_files: None
) -> None:
    report = export_dcp(source, tmp_path / "one", fsync=False)
    export_dcp(source, tmp_path / "three", team=Workers(3), fsync=False)
    ran = torchrun(
        "convert", source, tmp_path / "ranks", "--to", "dcp", "--receipt", "--no-fsync", "--json",
        code=SMALL_FILES + MAIN,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    one = contents(tmp_path / "one")
    assert len([name for name in one if name.endswith(".distcp")]) > 20
    assert contents(tmp_path / "three") == one
    assert contents(tmp_path / "ranks") == one
    summary = json.loads(ran.stdout)  # one rank speaks
    assert summary["tensors_digest"] == report.digests["tensors_digest"]
    assert summary["num_files"] == len(one) - 2
    expect_truth(tmp_path / "ranks", nanotron_fixtures)


def test_the_files_do_not_know_where_or_when_they_were_written(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_dcp(source, tmp_path / name, fsync=False)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert set(contents(tmp_path / "one")) == {"__0_0.distcp", ".metadata", FILE_NAME}


def test_the_receipt_is_of_what_was_carried(source: Path, tmp_path: Path) -> None:
    export_dcp(source, tmp_path / "out", fsync=False)
    code, printed = run_cli("verify", source, "--receipt", tmp_path / "out" / FILE_NAME)
    assert (code, "as the receipt says: 104 tensors" in printed) == (0, True), printed
    receipt = json.loads((tmp_path / "out" / FILE_NAME).read_text())
    assert receipt["target"] == {"framework": "torch", "layout": "distributed.checkpoint", "topology": {}}
    export_dcp(source, tmp_path / "masters", model_state="fp32_param", fsync=False)
    masters = json.loads((tmp_path / "masters" / FILE_NAME).read_text())
    assert set(receipt["tensors"]) - set(masters["tensors"]) == {
        key for key in receipt["tensors"] if key.endswith("|weight")
    }
    report = export_dcp(source, tmp_path / "without", receipt=False, fsync=False)
    assert not (tmp_path / "without" / FILE_NAME).exists() and report.digests == {}


def test_the_command_line_shares_the_work(source: Path, tmp_path: Path, small_files: None) -> None:
    export_dcp(source, tmp_path / "one", receipt=False, fsync=False)
    options = ("--to", "dcp", "--workers", "2", "--no-fsync", "--json")
    code, printed = run_cli("convert", source, tmp_path / "out", *options, "--dry-run")
    assert code == 0 and not (tmp_path / "out").exists()
    planned = json.loads(printed)
    code, printed = run_cli("convert", source, tmp_path / "out", *options)
    assert code == 0, printed
    done = json.loads(printed)
    assert (planned.pop("written"), done["written"]) == (False, True)
    assert planned.items() <= done.items()
    written, expected = contents(tmp_path / "out"), contents(tmp_path / "one")
    written.pop(FILE_NAME, None)
    assert written == expected


def test_an_error_of_a_worker_is_the_only_one(source: Path, tmp_path: Path, small_files: None) -> None:
    whole = DcpWriter.write

    def write(self: DcpWriter, file: DcpFile) -> object:
        if file.number == 7:
            raise CorruptFileError("ends early", path=FIRST)
        return whole(self, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DcpWriter, "write", write)
        with pytest.raises(CorruptFileError, match="ends early"):
            export_dcp(source, tmp_path / "out", team=Workers(2))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_is_killed_leaves_nothing(
    source: Path, tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DcpWriter.write

    def die(self: DcpWriter, file: DcpFile) -> object:
        results = whole(self, file)
        if file.number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return results

    monkeypatch.setattr(DcpWriter, "write", die)
    with pytest.raises(OutputError, match="exit code -9 before its work was done"):
        export_dcp(source, tmp_path / "out", team=Workers(2))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_killed_ends_all(source: Path, tmp_path: Path) -> None:
    code = SMALL_FILES + (
        "import os, signal\n"
        "from nemo_optim_bridge.formats.torch_dcp_writer import DcpWriter\n"
        "whole = DcpWriter.write\n"
        "def die(self, file):\n"
        "    results = whole(self, file)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return results\n"
        "DcpWriter.write = die\n"
    )
    ran = torchrun("convert", source, tmp_path / "out", "--to", "dcp", code=code + MAIN)
    assert ran.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_all(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "source"
    shutil.copytree(source, damaged)
    flip_bit(damaged / FIRST, "data/2")
    ran = torchrun("convert", damaged, tmp_path / "out", "--to", "dcp")
    assert ran.returncode != 0
    assert "bytes do not match their CRC-32" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_conversions_are_not_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    source = Path(__file__).parents[1] / "data/nemo/fused_dense/ckpt"
    assert run(["convert", str(source), str(tmp_path / "out"), "--to", "distributed_fused_adam"]) == 2
    assert "is done by one process. Run it without torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

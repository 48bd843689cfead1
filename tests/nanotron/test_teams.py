"""Workers and torchrun ranks write what one process writes, byte for byte; a failing or killed one ends all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_optim_bridge.core import write
from nemo_optim_bridge.core.receipt import FILE_NAME
from tests.edits import flip_bit
from tests.nanotron.pair_table import run_cli

ZERO = "nt04-llama_tied-z1-tp2-pp2-dp2-ep1"
MOE = "moe-moe_e8-z1-tp1-pp1-dp2-ep2"
FIRST = "optimizer/optimizer_pp-0-of-2_dp-0-of-2_tp-0-of-2_exp-0-of-1.pt"

Real = Callable[[str], Path]
Reshard = Callable[..., dict[str, Any]]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file's bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def torchrun(
    *argv: str | Path, ranks: int = 2, code: str | None = None, said: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line on several ranks; ``code`` runs in each first, and may write below ``said``."""
    launch = ["--no-python", sys.executable, "-c", code] if code else ["-m", "nemo_optim_bridge"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launch, *argv],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SAID": str(said)},
    )  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(ZERO, "--tp 4 --pp 1 --dp 1 --zero 0"), (MOE, "--ep 4 --tp 2 --dp 3")])
@pytest.mark.parametrize("segment_bytes", [1 << 26, 4096])
def test_workers_write_the_same_bytes(
    name: str, options: str, segment_bytes: int, real: Real, reshard: Reshard, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    reshard(real(name), options + " --workers 1", out="one")
    monkeypatch.setattr(write, "SEGMENT_BYTES", segment_bytes)  # segments of files go to different workers
    summary = reshard(real(name), options + " --workers 3", out="three")
    assert contents(tmp_path / "three") == contents(tmp_path / "one")
    assert summary["findings"] == []


def test_workers_find_the_same_differences(real: Real) -> None:
    for command in (("diff", real(ZERO), real(MOE)), ("fingerprint", real(ZERO)), ("verify", real(ZERO), real(ZERO))):
        alone, together = (run_cli(*command, "--json", "--workers", str(count)) for count in (1, 3))
        assert alone == together


def test_an_error_of_a_worker_is_the_only_one(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(ZERO)
    flip_bit(root / FIRST, "data/2")
    code, printed = run_cli("reshard", root, tmp_path / "out", "--tp", "1", "--workers", "3")
    assert code == 2
    assert printed.count("error:") == 1
    assert "bytes do not match their CRC-32" in printed and FIRST in printed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_worker_that_is_killed_leaves_nothing(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = write.SegmentWriter.write

    def die(self: write.SegmentWriter, bundle: Sequence[write.Segment]) -> Any:
        crcs = real_write(self, bundle)
        if any(segment.file == 9 for segment in bundle):
            os.kill(os.getpid(), signal.SIGKILL)
        return crcs

    monkeypatch.setattr(write.SegmentWriter, "write", die)
    code, printed = run_cli("reshard", real(ZERO), tmp_path / "out", "--tp", "1", "--workers", "2")
    assert code == 2
    assert "a worker process ended with exit code -9" in printed
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_torchrun_write_the_same_bytes(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    reshard(real(ZERO), "--tp 4 --pp 1", out="one")
    ran = torchrun("reshard", real(ZERO), tmp_path / "ranks", "--tp", "4", "--pp", "1", "--no-fsync")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("tensors_digest") == 1  # one rank speaks
    assert contents(tmp_path / "ranks") == contents(tmp_path / "one")
    ran = torchrun("verify", real(ZERO), tmp_path / "ranks")
    assert (ran.returncode, ran.stdout.count("the same: 104 tensors")) == (0, 1), ran.stderr
    ran = torchrun("verify", tmp_path / "ranks", "--receipt", tmp_path / "ranks" / FILE_NAME)
    assert (ran.returncode, ran.stdout.count("as the receipt says")) == (0, 1), ran.stderr


def test_a_rank_that_fails_ends_all(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(ZERO)
    flip_bit(root / FIRST, "data/2")
    ran = torchrun("reshard", root, tmp_path / "out", "--tp", "1")
    assert ran.returncode != 0
    assert "bytes do not match their CRC-32" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_rank_that_is_killed_ends_all(real: Real, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from nemo_optim_bridge.core import write\n"
        "real = write.SegmentWriter.write\n"
        "def die(self, segment):\n"
        "    crcs = real(self, segment)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return crcs\n"
        "write.SegmentWriter.write = die\n"
        "from nemo_optim_bridge.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    ran = torchrun("reshard", real(ZERO), tmp_path / "out", "--tp", "1", code=code)
    assert ran.returncode != 0
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_ranks_plan_and_read_their_own_share(real: Real, reshard: Reshard, tmp_path: Path) -> None:
    """Each optimizer file is indexed by one rank, each rank plans a part, large files are written by several."""
    options = "--tp 2 --pp 1 --dp 1 --zero 0"
    alone = reshard(real(ZERO), options, out="one")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from nemo_optim_bridge.core import write\n"
        "from nemo_optim_bridge.formats.nanotron import optimizer, reshard\n"
        "write.SEGMENT_BYTES = 4096\n"
        "said = Path(os.environ['SAID'], os.environ['RANK']).open('a')\n"
        "def spy(module, name, show):\n"
        "    real = getattr(module, name)\n"
        "    def call(*args):\n"
        "        result = real(*args)\n"
        "        print(name, show(args, result), file=said, flush=True)\n"
        "        return result\n"
        "    setattr(module, name, call)\n"
        "spy(optimizer, 'read_optimizer_shard', lambda args, result: args[0].name)\n"
        "spy(reshard, 'make_plan', lambda args, result: len(result))\n"
        "path = lambda args, result: args[0]._files[args[1][0].file].path\n"
        "spy(write.SegmentWriter, 'write', path)\n"
        "from nemo_optim_bridge.formats.nanotron import reader\n"
        "reader.read_optimizer_shard = optimizer.read_optimizer_shard\n"
        "from nemo_optim_bridge.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    said = tmp_path / "said"
    said.mkdir()
    where = real(ZERO), tmp_path / "ranks"
    ran = torchrun("reshard", *where, *options.split(), "--json", ranks=3, code=code, said=said)
    assert ran.returncode == 0, ran.stderr
    assert contents(tmp_path / "ranks") == contents(tmp_path / "one")
    summary = json.loads(ran.stdout)
    counts = ("files_to_read", "files_to_write", "bytes_to_read", "bytes_to_write", "pieces", "replicas")
    assert [summary[name] for name in counts] == [alone[name] for name in counts]
    lines = [[line.split() for line in (said / str(rank)).read_text().splitlines()] for rank in range(3)]
    indexed = [[word for name, word in rank if name == "read_optimizer_shard"] for rank in lines]
    assert sorted(file for files in indexed for file in files) == sorted(
        path.name for path in (real(ZERO) / "optimizer").glob("*.pt")
    )
    assert all(len(files) in (2, 3) for files in indexed)
    planned = [int(word) for rank in lines for name, word in rank if name == "make_plan"]
    assert len(planned) == 3 and all(0 < pieces < alone["pieces"] for pieces in planned)
    written = [{word for name, word in rank if name == "write"} for rank in lines]
    assert sum(map(len, written)) > len({file for files in written for file in files})  # a file had two writers

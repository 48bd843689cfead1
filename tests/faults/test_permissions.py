"""Places that may not be read or written: one error that names the place, whoever runs the tests, root included."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_optim_bridge.core.receipt import FILE_NAME
from tests.edits import fingerprint
from tests.faults.conftest import NAME
from tests.faults.launcher import Ended, Launcher

DATA = Path(__file__).parents[1] / "data" / "nemo"
UNREADABLE, UNLISTABLE, UNENTERABLE, READ_ONLY = 0o000, 0o311, 0o644, 0o555
NANOTRON = (
    ("optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt", UNREADABLE),
    ("optimizer/optimizer_config.json", UNREADABLE),
    ("model/model/final_layer_norm/pp_block/model_weight.safetensors", UNREADABLE),
    ("config.yaml", UNREADABLE),
    ("model_config.json", UNREADABLE),
    ("checkpoint_metadata.json", UNREADABLE),
    ("lr_scheduler/lr_scheduler.pt", UNREADABLE),
    ("optimizer", UNREADABLE),
    ("optimizer", UNLISTABLE),
    ("optimizer", UNENTERABLE),
    ("lr_scheduler", UNREADABLE),
    ("model", UNREADABLE),
    ("model", UNLISTABLE),
    ("model", UNENTERABLE),
    ("model/model/decoder/0", UNREADABLE),
    ("model/model/decoder/0", UNLISTABLE),
    ("", UNREADABLE),
    ("", UNENTERABLE),
)
MEGATRON = (
    ("__1_0.distcp", UNREADABLE),
    ("common.pt", UNREADABLE),
    (".metadata", UNREADABLE),
    ("metadata.json", UNREADABLE),
    ("", UNREADABLE),
    ("", UNENTERABLE),
)


@dataclass(frozen=True)
class Rig:
    """Two sources that may be closed, and the commands on them, run by a process that permission bits bind."""

    launcher: Launcher
    folder: Path

    def __call__(self, *argv: str | Path) -> Ended:
        """Run one command."""
        return self.launcher.run(*argv, bound=True)

    def commands(self, source: str, out: Path) -> Iterator[tuple[str | Path, ...]]:
        """Yield every command that reads a source, and those that write an output."""
        root = self.folder / source
        if source == "nanotron":
            yield "reshard", root, out, "--tp", "1"
            yield "reshard", root, out, "--tp", "1", "--no-receipt"
            yield "convert", root, out, "--to", "dcp"
        else:
            yield "convert", root, out, "--to", "distributed_fused_adam"
            yield "convert", root, out, "--to", "distributed_fused_adam", "--link", "copy"
        yield "fingerprint", root
        yield "inspect", root, "--deep"


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    """Give a path other permissions for a while."""
    before = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


@pytest.fixture(scope="module")
def rig(launcher: Launcher, nanotron_fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Copies of a checkpoint of each kind; every test leaves them as they were."""
    folder = tmp_path_factory.mktemp("permissions")
    shutil.copytree(nanotron_fixtures / "checkpoints" / NAME, folder / "nanotron")
    with tarfile.open(DATA / "megatron.tar.xz") as archive:
        archive.extractall(folder / "unpacked", filter="data")
    shutil.copytree(DATA / "fused_moe_ep2" / "ckpt", folder / "unpacked" / "fused_moe_ep2" / "ckpt", dirs_exist_ok=True)
    (folder / "unpacked" / "fused_moe_ep2" / "ckpt").rename(folder / "megatron")
    shutil.rmtree(folder / "unpacked")
    return Rig(launcher, folder)


@pytest.fixture
def out(rig: Rig) -> Iterator[Path]:
    """An output beside the sources, in a folder of its own."""
    parent = rig.folder / "outputs"
    parent.mkdir()
    yield parent / "out"
    shutil.rmtree(parent)


@pytest.mark.parametrize(
    ("source", "place", "bits"),
    [("nanotron", *case) for case in NANOTRON] + [("megatron", *case) for case in MEGATRON],
)
def test_what_may_not_be_read(source: str, place: str, bits: int, rig: Rig, out: Path) -> None:
    root = rig.folder / source
    before = fingerprint(root)
    with mode(root / place, bits):
        for command in rig.commands(source, out):
            ended = rig(*command)
            where = command, ended.printed
            assert ended.code == 2, where
            assert ended.printed.startswith("error: "), where
            assert "unexpected" not in ended.printed, where
            assert "Permission denied" in ended.printed, where
            assert str(root / place) in ended.printed, where
            assert "Copy" not in ended.printed, where  # the file may be sound
            assert list(out.parent.iterdir()) == [], where
    assert fingerprint(root) == before


@pytest.mark.parametrize("source", ["nanotron", "megatron"])
def test_where_nothing_may_be_written(source: str, rig: Rig, out: Path) -> None:
    with mode(out.parent, READ_ONLY):
        for command in rig.commands(source, out):
            ended = rig(*command)
            if out not in command:
                assert ended.code in (0, 1), ended.printed
                continue
            assert ended.code == 2, ended.printed
            assert "cannot be written: Permission denied" in ended.printed
            assert str(out.parent) in ended.printed
        assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("source", ["nanotron", "megatron"])
def test_a_closed_parent_of_the_output(source: str, rig: Rig, out: Path) -> None:
    with mode(out.parent, UNREADABLE):
        for command in rig.commands(source, out):
            if out in command:
                ended = rig(*command)
                assert ended.code == 2, ended.printed
                assert "Permission denied" in ended.printed
                assert "unexpected" not in ended.printed
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("source", ["nanotron", "megatron"])
def test_an_output_that_may_not_be_replaced(source: str, rig: Rig, out: Path) -> None:
    """A folder that this user may not write cannot be set aside; it stays, with its receipt."""
    commands = [command for command in rig.commands(source, out) if out in command]
    assert rig(*commands[0]).code == 0
    before = fingerprint(out)
    (out / FILE_NAME).chmod(0o444)
    with mode(out, READ_ONLY):
        for command in commands:
            ended = rig(*command, "--overwrite")
            assert ended.code == 2, ended.printed
            assert "cannot be put in place: Permission denied" in ended.printed
            assert [path.name for path in out.parent.iterdir()] == ["out"]
            assert fingerprint(out) == before


@pytest.mark.parametrize("source", ["nanotron", "megatron"])
def test_a_receipt_that_may_not_be_read(source: str, rig: Rig, out: Path) -> None:
    assert rig(*next(rig.commands(source, out))).code == 0
    check = ("verify", rig.folder / source, "--receipt", out / FILE_NAME)
    assert rig(*check).code == 0
    for closed, bits in ((out / FILE_NAME, UNREADABLE), (out, UNREADABLE)):
        with mode(closed, bits):
            ended = rig(*check)
            assert ended.code == 2, ended.printed
            assert "Permission denied" in ended.printed
            assert FILE_NAME in ended.printed
            assert "unexpected" not in ended.printed


def test_the_preflight_sees_what_may_not_be_read(rig: Rig) -> None:
    root = rig.folder / "megatron"
    for name, bits in (("__1_0.distcp", UNREADABLE), ("common.pt", UNREADABLE), (".metadata", UNREADABLE)):
        with mode(root / name, bits):
            ended = rig("inspect", root, "--for", "distributed_fused_adam")
            assert ended.code in (1, 2), ended.printed
            assert "Permission denied" in ended.printed
            assert name in ended.printed
            assert "unexpected" not in ended.printed


def test_a_read_only_source_is_read(rig: Rig, out: Path) -> None:
    with mode(rig.folder / "nanotron", READ_ONLY), mode(rig.folder / "nanotron" / "optimizer", READ_ONLY):
        assert rig("reshard", rig.folder / "nanotron", out, "--tp", "1").code == 0

"""Full disks, closed places, other file systems, links, a source that changes, and two runs to one target."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.edits import fingerprint
from tests.faults.conftest import Bench
from tests.faults.launcher import Fault

OPTIMIZER = "optimizer/optimizer_pp-0-of-1_tp-1-of-2_exp-0-of-1.pt"
NORM = "model/model/final_layer_norm/pp_block/model_weight.safetensors"
MOUNT_SECONDS = 60


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


CHANGES: dict[str, Callable[[Path], object]] = {
    "appended": append, "replaced": replace, "rewritten": rewrite, "removed": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["before the first byte", "while copying"])
def test_a_source_that_changes_is_refused(change: str, moment: str, bench: Bench) -> None:
    number = 0 if moment == "before the first byte" else len(bench.calls) // 4
    for name in (OPTIMIZER, NORM, "config.yaml", "lr_scheduler/lr_scheduler.pt"):
        kept = (bench.source / name).read_bytes()
        run = bench.start(fault=Fault(number, "stop"))
        assert bench.launcher.wait(run).code is None
        CHANGES[change](bench.source / name)
        os.kill(run[0], 18)  # SIGCONT
        ended = bench.launcher.wait(run)
        assert ended.code == 2
        assert "while it was read" in ended.printed or (change == "removed" and "No such file" in ended.printed)
        assert name in ended.printed
        assert bench.names() == ["source"]
        (bench.source / name).write_bytes(kept)


def test_of_two_runs_to_one_target_one_wins_and_the_other_says_so(bench: Bench) -> None:
    for number in (1, len(bench.calls) - 2):
        run = bench.start(fault=Fault(number, "stop"))
        assert bench.launcher.wait(run).code is None
        for more in ([], ["--overwrite"]):
            second = bench.reshard(*more)
            assert second.code == 2
            assert f"another run is writing it (process {run[0]} on " in second.printed
        os.kill(run[0], 18)
        assert bench.launcher.wait(run).code == 0
        assert bench.names() == ["out", "source"]
        assert bench.is_good()
        bench.clear()


def test_two_runs_where_the_file_system_has_no_locks(bench: Bench) -> None:
    run = bench.start(fault=Fault(len(bench.calls) - 3, "stop"), no_locks=True)
    assert bench.launcher.wait(run).code is None
    assert bench.reshard(no_locks=True).code == 0
    os.kill(run[0], 18)
    ended = bench.launcher.wait(run)
    assert ended.code == 2
    assert "appeared while the output was written" in ended.printed
    assert bench.names() == ["out", "source"]
    assert bench.is_good()


@pytest.mark.parametrize("size", [1 << 10, 1 << 17])
def test_a_limit_of_file_sizes(size: int, bench: Bench) -> None:
    ended = bench.reshard(fsize=size)
    assert ended.code == 2
    assert "cannot be written: File too large" in ended.printed
    assert bench.names() == ["source"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, timeout=MOUNT_SECONDS
        ).returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", place], check=True, timeout=MOUNT_SECONDS)


def test_a_full_disk(bench: Bench, mount: Callable[[str], Path]) -> None:
    place = mount("size=256k")
    ended = bench.launcher.run("reshard", bench.source, place / "out", "--tp", "1")
    assert ended.code == 2
    assert "No space left on device" in ended.printed
    assert list(place.iterdir()) == []


def test_a_read_only_file_system(bench: Bench, mount: Callable[[str], Path]) -> None:
    place = mount("ro")
    ended = bench.launcher.run("reshard", bench.source, place / "out", "--tp", "1")
    assert ended.code == 2
    assert "cannot be written: Read-only file system" in ended.printed


def test_a_read_only_source_and_another_file_system(bench: Bench, mount: Callable[[str], Path]) -> None:
    place = mount("size=16m")
    shutil.copytree(bench.source, place / "source")
    subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=MOUNT_SECONDS)
    ended = bench.launcher.run("reshard", place / "source", bench.out, "--tp", "1", "--no-receipt")
    assert ended.code == 0, ended.printed
    other = mount("size=16m")
    ended = bench.launcher.run("reshard", bench.source, other / "out", "--tp", "1")
    assert ended.code == 0, ended.printed
    assert fingerprint(other / "out") == bench.good


def test_links(bench: Bench) -> None:
    bench.folder.joinpath("elsewhere").mkdir()
    link, moved = bench.folder / "link", bench.folder / "elsewhere" / "file"
    link.symlink_to(bench.source)
    (bench.source / OPTIMIZER).rename(moved)
    (bench.source / OPTIMIZER).symlink_to(moved)
    ended = bench.launcher.run("reshard", link, bench.out, "--tp", "1", "--no-receipt")
    assert ended.code == 0, ended.printed
    shutil.rmtree(bench.out)
    bench.out.symlink_to("nowhere")
    for more, reason in (([], "already exists"), (["--overwrite"], "is not a directory")):
        ended = bench.reshard(*more)
        assert ended.code == 2
        assert reason in ended.printed
    assert bench.out.is_symlink()
    assert not (bench.folder / "nowhere").exists()
    ended = bench.launcher.run("reshard", bench.source, link / "out", "--tp", "1")
    assert ended.code == 2
    assert "overlap" in ended.printed

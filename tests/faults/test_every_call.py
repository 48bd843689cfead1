"""A fault before and after every write, sync and rename of a re-shard."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.edits import fingerprint
from tests.faults.conftest import Bench
from tests.faults.launcher import Fault

KILLED = -signal.SIGKILL


def test_files_and_folders_are_synced_before_the_rename(bench: Bench) -> None:
    kinds = [kind for kind, _ in bench.calls]
    renamed = kinds.index("rename")
    scratch = Path(bench.calls[renamed][1])
    assert kinds.count("rename") == 1
    synced = [Path(path) for kind, path in bench.calls[:renamed] if kind == "fsync"]
    written = {Path(path) for kind, path in bench.calls[:renamed] if kind == "pwrite"}
    bench.reshard()
    below = [scratch / path.relative_to(bench.out) for path in bench.out.rglob("*")]
    assert {path for path in below if (bench.out / path.relative_to(scratch)).is_file()} == written
    assert sorted(synced) == sorted([scratch, *below])
    for path in written:  # the file after its last write, its folder after the file
        last_write = max(i for i, call in enumerate(bench.calls) if call == ("pwrite", str(path)))
        assert bench.calls.index(("fsync", str(path))) > last_write
        assert bench.calls.index(("fsync", str(path.parent))) > bench.calls.index(("fsync", str(path)))
    assert bench.calls[renamed + 1 :] == (("fsync", str(bench.folder)),)


@pytest.mark.parametrize("after", [False, True])
def test_an_error_at_every_call(after: bool, bench: Bench) -> None:
    before = fingerprint(bench.source)
    for number, (kind, _) in enumerate(bench.calls):
        ended = bench.reshard(fault=Fault(number, "ENOSPC" if "write" in kind else "EIO", after))
        where = bench.calls[number], ended.printed
        assert ended.code == 2, where
        assert ended.printed.startswith("error: "), where
        assert "No space left on device" in ended.printed or "Input/output error" in ended.printed, where
        assert ended.printed.count("\n") == 1, where
        assert bench.names() == ["source"], where  # so the next run finds what the first one found
    assert fingerprint(bench.source) == before
    assert bench.reshard().code == 0
    assert bench.is_good()


@pytest.mark.parametrize("part", [0, 1])
def test_a_kill_at_every_call(part: int, bench: Bench) -> None:
    """A kill after a call leaves what a kill before the next one leaves."""
    before = fingerprint(bench.source)
    renamed = [kind for kind, _ in bench.calls].index("rename")
    for number in range(part, len(bench.calls) + 1, 2):
        last = number == len(bench.calls)
        ended = bench.reshard(fault=Fault(number - last, "kill", after=last))
        assert ended.code == KILLED
        assert bench.out.exists() == (number > renamed)
        if bench.out.exists():
            assert bench.is_good()
            assert "already exists" in bench.reshard().printed
        ended = bench.reshard("--overwrite") if bench.out.exists() else bench.reshard()
        assert ended.code == 0, (number, ended.printed)
        assert bench.names() == ["out", "source"]
        assert bench.is_good()
        bench.clear()
    assert fingerprint(bench.source) == before


@pytest.fixture
def replacing(bench: Bench) -> tuple[Bench, str, list[int]]:
    """An output that is in the way, its fingerprint, and the numbers of the calls that put the new one in place."""
    old = bench.out / "old"
    old.mkdir(parents=True)
    (old / "file").write_text("old")
    was = fingerprint(bench.out)
    ended = bench.reshard("--overwrite", trace=True)
    assert ended.code == 0
    assert bench.is_good()
    first = next(i for i, (kind, _) in enumerate(ended.calls) if kind == "rename") - 2
    restore(bench)
    return bench, was, list(range(first, len(ended.calls)))


def restore(bench: Bench) -> None:
    bench.clear()
    (bench.out / "old").mkdir(parents=True)
    (bench.out / "old" / "file").write_text("old")


@pytest.mark.parametrize("after", [False, True])
def test_an_error_while_replacing(after: bool, replacing: tuple[Bench, str, list[int]]) -> None:
    bench, was, numbers = replacing
    assert len(numbers) == 5  # two syncs, two renames, and the sync of the parent
    for number in numbers:
        ended = bench.reshard("--overwrite", fault=Fault(number, "EIO", after))
        assert ended.code == 2
        assert "cannot be put in place: Input/output error" in ended.printed
        assert bench.names() == ["out", "source"]
        assert fingerprint(bench.out) == was


def test_a_kill_while_replacing(replacing: tuple[Bench, str, list[int]]) -> None:
    """The old or the new output is complete at every moment, and the next run finds its way."""
    bench, was, numbers = replacing
    absent = 0
    for number in numbers:
        for more in ([], ["--overwrite"]):
            restore(bench)
            assert bench.reshard("--overwrite", fault=Fault(number, "kill", after=True)).code == KILLED
            is_absent = not bench.out.exists()
            absent += is_absent
            assert is_absent or fingerprint(bench.out) in (was, bench.good)
            ended = bench.reshard(*more)
            if not more:
                assert ended.code == 2
                assert "already exists" in ended.printed
                assert ("put back, a killed run had set it aside" in ended.printed) == is_absent
                assert fingerprint(bench.out) in (was, bench.good)
                if is_absent:
                    assert bench.names() == ["out", "source"]
                    assert fingerprint(bench.out) == was
                ended = bench.reshard("--overwrite")
            assert ended.code == 0, ended.printed
            assert bench.names() == ["out", "source"]
            assert bench.is_good()
    assert absent == 2  # between the two renames


def test_a_kill_while_a_killed_run_is_cleared_up(bench: Bench) -> None:
    last = len(bench.calls) - 3
    for number in (last, 0, 1, last, 0):
        assert bench.reshard(fault=Fault(number, "kill")).code == KILLED
    assert bench.reshard().code == 0
    assert bench.names() == ["out", "source"]
    assert bench.is_good()


def test_other_folders_of_like_names_are_left_alone(bench: Bench) -> None:
    """Only what this output's killed runs left is removed: not another output's, nor a user's."""
    mine, others = (
        ".out.partial-abcdefg1",
        [".out.partial-mine", ".out.partial-x.partial-abcdefg1", ".out2.partial-abcdefg1"],
    )
    for name in (mine, *others):
        (bench.folder / name).mkdir()
    (bench.folder / ".out.partial-abcdefg2").symlink_to(bench.source)
    assert bench.reshard().code == 0
    assert bench.names() == sorted(["out", "source", ".out.partial-abcdefg2", *others])

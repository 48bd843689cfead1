"""A directory appears under its name complete, or not at all; what it replaces is there until then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_optim_bridge.core.publish import check_output, new_directory
from nemo_optim_bridge.errors import OutputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def publish(out: Path, content: str = "new", *, overwrite: bool = False, fsync: bool = False) -> None:
    with new_directory(out, overwrite=overwrite, fsync=fsync) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text(content)
        assert not out.exists() or overwrite


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    """A directory that is in the way."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("old")
    return out


@pytest.mark.parametrize("fsync", [False, True])
def test_it_appears_complete(fsync: bool, tmp_path: Path) -> None:
    publish(tmp_path / "out", fsync=fsync)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "below" / "file").read_text() == "new"


def test_its_mode_is_that_of_any_new_directory(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    publish(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_no_trace(error: type[BaseException], overwrite: bool, existing: Path) -> None:
    out = existing if overwrite else existing.with_name("other")

    def fail() -> None:
        with new_directory(out, overwrite=overwrite, fsync=False) as folder:
            (folder / "file").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert names(existing.parent) == ["out"]
    assert (existing / "file").read_text() == "old"


def test_an_existing_directory_is_replaced_whole(existing: Path) -> None:
    publish(existing, overwrite=True, fsync=True)
    assert names(existing.parent) == ["out"]
    assert names(existing) == ["below"]


def test_a_directory_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def race() -> None:
        with new_directory(out, overwrite=False, fsync=False) as folder:
            (folder / "file").write_text("mine")
            out.mkdir()
            (out / "file").write_text("theirs")

    with pytest.raises(OutputError, match="appeared while the output was written"):
        race()
    assert names(tmp_path) == ["out"]
    assert (out / "file").read_text() == "theirs"


def test_an_empty_directory_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def race() -> None:
        with new_directory(tmp_path / "out", overwrite=False, fsync=False) as folder:
            (folder / "file").write_text("mine")
            (tmp_path / "out").mkdir()

    with pytest.raises(OutputError, match="appeared"):
        race()
    assert names(tmp_path / "out") == []


def test_an_overwrite_that_fails_midway_puts_the_old_one_back(existing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(28, os.strerror(28))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match="cannot be put in place: No space left on device"):
        publish(existing, overwrite=True)
    assert names(existing.parent) == ["out"]
    assert (existing / "file").read_text() == "old"


def test_a_complete_directory_is_there_at_every_moment(existing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either under the name or set aside beside it, whichever rename comes next."""
    rename = Path.rename
    moments = []

    def watch(self: Path, target: Path) -> Path:
        moments.append([path.read_text() for path in sorted(existing.parent.rglob("file")) if path.is_file()])
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watch)
    publish(existing, overwrite=True)
    assert len(moments) == 2
    assert all(moment in (["new", "old"], ["old", "new"]) for moment in moments)


def test_the_parent_must_be_writable(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        publish(tmp_path / "absent" / "out")
    assert names(tmp_path) == []


def test_check_output(existing: Path) -> None:
    parent = existing.parent
    source = parent / "source"
    (source / "step").mkdir(parents=True)
    check_output(parent / "fresh", (source,), overwrite=False)
    check_output(existing, (source,), overwrite=True)
    check_output(parent / "source2", (source,), overwrite=False)  # a longer name is no directory below
    (parent / "file").write_text("")
    (parent / "alias").symlink_to(source)
    for out, overwrite, reason in (
        (existing, False, "already exists"),
        (parent / "absent" / "out", False, "the parent directory does not exist"),
        (parent / "file", True, "is not a directory"),
        (parent / "alias", True, "overlap"),
        (source, True, "overlap"),
        (source / "out", False, "overlap"),
        (parent / "alias" / "out", False, "overlap"),
        (parent, True, "overlap"),
        (parent / "absent" / ".." / "source", True, "overlap"),
    ):
        with pytest.raises(OutputError, match=reason) as caught:
            check_output(out, (parent / "other", source), overwrite=overwrite)
        assert str(out) in str(caught.value)

"""What the fault tests share: a launcher, a source, and the output that a run without faults writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.edits import fingerprint
from tests.faults.launcher import Ended, Fault, Launcher

NAME = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"


@dataclass(frozen=True)
class Bench:
    """A folder with a source checkpoint, and the good output's fingerprint."""

    launcher: Launcher
    folder: Path
    good: str
    calls: tuple[tuple[str, str], ...]

    @property
    def source(self) -> Path:
        """The checkpoint that is re-sharded."""
        return self.folder / "source"

    @property
    def out(self) -> Path:
        """Where to."""
        return self.folder / "out"

    def reshard(self, *more: str, fault: Fault | None = None, **options: object) -> Ended:
        """Re-shard to tp 1."""
        return self.launcher.run("reshard", self.source, self.out, "--tp", "1", *more, fault=fault, **options)

    def start(self, *more: str, fault: Fault | None = None, **options: object) -> tuple[int, Path]:
        """Start a re-shard to tp 1."""
        return self.launcher.start("reshard", self.source, self.out, "--tp", "1", *more, fault=fault, **options)

    def names(self) -> list[str]:
        """Return what is in the folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def is_good(self) -> bool:
        """Tell whether the output is there and complete."""
        return fingerprint(self.out) == self.good

    def clear(self) -> None:
        """Remove everything but the source."""
        for path in self.folder.iterdir():
            if path.name != "source":
                shutil.rmtree(path)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The process that forks the runs."""
    with Launcher(tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one: there is much to sync."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def bench(launcher: Launcher, nanotron_fixtures: Path, fast_folder: Path) -> Bench:
    """A source of one's own, re-sharded once for the good output and the sequence of calls."""
    folder = fast_folder / "bench"
    folder.mkdir()
    shutil.copytree(nanotron_fixtures / "checkpoints" / NAME, folder / "source")
    fast_folder.chmod(0o755)
    first = Bench(launcher, folder, "", ())
    ended = first.reshard(trace=True)
    assert ended.code == 0, ended.printed
    good = fingerprint(first.out)
    first.clear()
    return Bench(launcher, folder, good, ended.calls)

"""Run the command line in real child processes, with a fault at one of their system calls.

``Launcher`` talks to a process of its own that has imported everything and forks a child for every run: a run then
costs no more than its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: What is counted, in order; a fault is named by its number in this sequence.
CALLS = ("write", "pwrite", "fsync", "rename")
#: Seconds after which a run is killed, and the test that waits for it fails.
LIMIT = 120
#: What lets root read, write and own everything: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER.
_ROOTS_OWN = 1 << 1 | 1 << 2 | 1 << 3
_CAPABILITY_VERSION = 0x20080522


@dataclass(frozen=True)
class Fault:
    """What happens at the ``number``-th counted call: ``how`` is an errno's name, or ``kill`` or ``stop``."""

    number: int
    how: str
    after: bool = False


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code (negative for a signal, None while stopped), and what it printed."""

    code: int | None
    printed: str
    calls: tuple[tuple[str, str], ...] = ()


class Launcher:
    """Starts runs in the background process; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.launcher"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def start(self, *argv: str | Path, fault: Fault | None = None, **options: Any) -> tuple[int, Path]:
        """Start a run; options: ``fsize`` (bytes), ``bound``, ``no_locks``, ``trace``. Return what ``wait`` wants."""
        self._count += 1
        log = self._folder / f"log-{self._count}"
        fields = {"argv": [str(word) for word in argv], "log": str(log), **options}
        if fault is not None:
            fields["fault"] = [fault.number, fault.how, fault.after]
        return int(self._ask(fields)), log

    def wait(self, run: tuple[int, Path]) -> Ended:
        """Wait until a run ends or stops."""
        pid, log = run
        code = json.loads(self._ask({"wait": pid}))
        if code == -signal.SIGALRM:
            raise AssertionError(f"a run did not end within {LIMIT} seconds: {log.read_text()}")
        trace = log.with_suffix(".trace")
        calls = tuple(tuple(call) for call in json.loads(trace.read_text())) if trace.exists() else ()
        said = log.read_text() if log.exists() else ""  # a run may be killed before it has opened its log
        return Ended(code, said, calls)

    def run(self, *argv: str | Path, fault: Fault | None = None, **options: Any) -> Ended:
        """Run to the end."""
        return self.wait(self.start(*argv, fault=fault, **options))

    def _ask(self, fields: dict[str, Any]) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the launcher has no pipes")
        stdin.write(json.dumps(fields) + "\n")
        stdin.flush()
        return stdout.readline()


class _Injector:
    """Counts calls and lets one of them fail."""

    def __init__(self, fault: list[Any] | None) -> None:
        self._fault = fault
        self._names: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []

    def install(self) -> None:
        """Replace the functions of ``os`` that are counted, and ``os.open`` to know what they work on."""
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        opened = os.open

        def open_and_note(path: Any, *arguments: Any, **options: Any) -> int:
            descriptor = opened(path, *arguments, **options)
            self._names[descriptor] = os.fspath(path)
            return descriptor

        os.open = open_and_note

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            number = len(self.calls)
            shown = self._names.get(first, str(first)) if isinstance(first, int) else os.fspath(first)
            self.calls.append((name, shown))
            mine = self._fault is not None and self._fault[0] == number
            if mine and not self._fault[2]:
                self._fail(self._fault[1])
            result = function(first, *arguments, **options)
            if mine and self._fault[2]:
                self._fail(self._fault[1])
            return result

        return call

    @staticmethod
    def _fail(how: str) -> None:
        if how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return
        code = getattr(errno, how)
        raise OSError(code, os.strerror(code))


def bind_by_permissions() -> None:
    """Let files' permission bits bind this process although it is root's, as they bind every other user's."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    for call in ("capget", "capset"):
        if getattr(libc, call)(header, sets):
            raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
        sets[0] &= ~_ROOTS_OWN


def _child(fields: dict[str, Any]) -> int:
    from nemo_optim_bridge.__main__ import main

    signal.alarm(LIMIT)
    log = os.open(fields["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    if "fsize" in fields:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fields["fsize"], fields["fsize"]))
    if fields.get("bound"):
        bind_by_permissions()
    if fields.get("no_locks"):

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        fcntl.flock = refuse
    injector = _Injector(fields.get("fault"))
    injector.install()
    code = main(fields["argv"])
    sys.stdout.flush()
    sys.stderr.flush()
    if fields.get("trace"):
        Path(fields["log"]).with_suffix(".trace").write_text(json.dumps(injector.calls))
    return code


def serve() -> None:
    """Answer requests from stdin until it ends."""
    import nemo_optim_bridge.cli
    import nemo_optim_bridge.formats.checkpoints
    import nemo_optim_bridge.formats.nanotron.reshard
    import nemo_optim_bridge.formats.torch_dist.convert  # noqa: F401 - imported once, before the forks

    running: set[int] = set()
    for line in sys.stdin:
        fields = json.loads(line)
        if "wait" in fields:
            _, status = os.waitpid(fields["wait"], os.WUNTRACED)
            answer: Any = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            if answer is not None:
                running.discard(fields["wait"])
        else:
            answer = os.fork()
            running.add(answer)
            if not answer:
                code = 99
                try:
                    code = _child(fields)
                finally:
                    os._exit(code)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in running:  # a test that failed left it, perhaps stopped
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder on a real file system where there is one: syncs cost time there, so that kills hit them."""
    return tempfile.TemporaryDirectory(prefix="faults-")


if __name__ == "__main__":
    serve()

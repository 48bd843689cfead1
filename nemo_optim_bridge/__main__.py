"""Run the command line: ``python -m nemo_optim_bridge``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done or the same, 1 different or problems found, 2 refused or failed."""
    from nemo_optim_bridge.cli import run
    from nemo_optim_bridge.cli.guard import end_rank
    from nemo_optim_bridge.core.team import is_torchrun

    code = run(sys.argv[1:] if argv is None else argv)
    if is_torchrun():
        end_rank(code)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The command line. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

from nemo_optim_bridge.cli.app import run

__all__ = ["run"]

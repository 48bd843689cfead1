"""The fixtures of the nanotron tests: copies of real checkpoints, and the command line on them."""

from tests.nanotron.conftest import copy_of, real, refuse, reshard

__all__ = ["copy_of", "real", "refuse", "reshard"]

"""Carry an optimizer's state across optimizer types and parallel topologies, bit for bit."""

__version__ = "0.1.0"

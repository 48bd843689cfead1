"""Faults injected into real processes."""

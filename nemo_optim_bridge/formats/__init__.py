"""Checkpoint formats, read and written from files alone: no framework needs to be installed."""

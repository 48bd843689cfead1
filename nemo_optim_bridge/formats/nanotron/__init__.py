"""Nanotron checkpoints: read, re-shard, verify and inspect them, without nanotron."""

"""Adapters that run inside a training framework; each imports its framework only when it is used."""

"""Tests of the nanotron format, against checkpoints that nanotron itself saved."""

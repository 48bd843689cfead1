"""Tests of nemo_optim_bridge; the folders mirror the package."""

"""Hydra imports every module of this namespace package before it runs an application."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from nemo_optim_bridge.plugins.nemo.registration import register_if_wanted


class NemoOptimBridgePlugin(SearchPathPlugin):
    """Register the optimizer's name with NeMo; the search path stays as it is."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Leave the search path alone."""
        register_if_wanted()

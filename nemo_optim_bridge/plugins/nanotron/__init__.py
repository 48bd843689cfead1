"""Load a nanotron checkpoint of any topology into nanotron's running optimizer.

One line before the trainer is made puts it in place of nanotron's own loader:

    from nemo_optim_bridge.plugins import nanotron; nanotron.install()

Safe to import without nanotron.
"""

from nemo_optim_bridge.plugins.nanotron.install import install, uninstall
from nemo_optim_bridge.plugins.nanotron.loader import LoadReport, load_optimizer
from nemo_optim_bridge.plugins.nanotron.scheduler import load_lr_scheduler

__all__ = ["LoadReport", "install", "load_lr_scheduler", "load_optimizer", "uninstall"]

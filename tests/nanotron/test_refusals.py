"""What a target cannot hold, or no nanotron can build, is refused: with the reason and with what can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.edits import edit_json, replace_text
from tests.nanotron.pair_table import run_cli

TIED = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
UNTIED = "nt04-llama_untied-z0-tp2-pp1-dp1-ep1"
MOE8 = "moe-moe_e8-z0-tp1-pp1-dp1-ep1"
MOE4 = "moe-moe_e4-z0-tp1-pp1-dp1-ep1"
MOE8_EP2 = "moe-moe_e8-z0-tp1-pp1-dp1-ep2"
QWEN, QWENMOE = "head-qwen_untied-z0-tp1-pp1-dp1-ep1", "head-qwenmoe-z0-tp1-pp1-dp1-ep1"
HEAD_TIED = "head-llama_tied-z0-tp2-pp1-dp1-ep1"

Real = Callable[[str], Path]
Refuse = Callable[..., str]

REFUSALS = [
    (TIED, "--tp 3", "tp 3 does not divide the model's 8 attention heads", "Choose tp from 1, 2, 4"),
    (TIED, "--tp 8", "tp 8 does not divide the model's 4 key/value heads", "Choose tp from 1, 2, 4"),
    (TIED, "--tp 16", "8 attention heads, 4 key/value heads", "Choose tp from 1, 2, 4"),
    (MOE8, "--tp 8", "4 key/value heads", "Choose tp from 1, 2, 4"),
    (QWEN, "--tp 3", "64 rows of the MLP (intermediate size)", "Choose tp from 1, 2, 4"),
    (TIED, "--pp 7", "pp 7 leaves stage 6 without parameters", "Choose pp from 1, 2, 3, 4, 5, 6, or give the layers"),
    (TIED, "--pp 8", "pp 8 leaves stage 6, 7 without parameters", "--pp-split"),
    (MOE8, "--pp 5", "pp 5 leaves stage 4 without parameters", "Choose pp from 1, 2, 3, 4"),
    (MOE8, "--ep 8", "ep 8 leaves one expert to a rank", "Choose ep from 1, 2, 4"),
    (MOE4, "--ep 4", "ep 4 leaves one expert to a rank", "Choose ep from 1, 2"),
    (MOE8_EP2, "--ep 8 --tp 2", "overwrite each other's weight files", "Choose ep from 1, 2, 4"),
    (MOE8, "--ep 3", "ep 3 does not divide 8 experts", "Choose ep from 1, 2, 4"),
    (MOE8, "--ep 16", "ep 16 does not divide 8 experts", "Choose ep from 1, 2, 4"),
    (QWEN, "--ep 2", "dialect head cannot build expert parallel size 2", "Use --ep 1"),
    (QWENMOE, "--ep 2", "dialect head cannot build expert parallel size 2", "Use --ep 1"),
    (TIED, "--ep 2", "dialect 0.4 cannot build expert parallel size 2", "Use --ep 1"),
    (TIED, "--ep 2 --dialect moe", "expert parallel size 2 for a model without experts", "Use --ep 1"),
    (MOE8, "--dialect head", "dialect head cannot build this model (llamoe)", "It builds llama, qwen2"),
    (MOE8, "--dialect 0.4", "dialect 0.4 cannot build this model (llamoe)", "keep the source's dialect moe"),
    (QWEN, "--dialect 0.4", "dialect 0.4 cannot build this model (qwen2)", "It builds llama"),
    (QWEN, "--dialect moe", "dialect moe cannot build this model (qwen2)", "It builds llama, llamoe"),
    (QWENMOE, "--dialect v0.1", "dialect v0.1 cannot build this model (qwen2)", "keep the source's dialect head"),
    (QWENMOE, "--zero 1", "cannot train ZeRO-1 with weights of several dtypes", "Use --zero 0"),
    (TIED, "--dialect v0.1", "dialect v0.1 cannot tie the embedding and lm_head", "Choose from 0.4, moe24, moe, head"),
    (
        HEAD_TIED,
        "--dialect v0.1",
        "dialect v0.1 cannot tie the embedding and lm_head",
        "Choose from 0.4, moe24, moe, head",
    ),
    (TIED, "--dialect 0.5", "unknown dialect '0.5'", "Choose one of v0.1, 0.4, moe24, moe, head"),
    (TIED, "--zero 2", "nanotron has no ZeRO stage 2", "Choose --zero 0 or --zero 1"),
    (TIED, "--zero 3", "nanotron has no ZeRO stage 3", "Choose --zero 0 or --zero 1"),
]


@pytest.mark.parametrize(("name", "options", "reason", "choice"), REFUSALS)
def test_the_reason_and_the_valid_choices_are_named(
    name: str, options: str, reason: str, choice: str, real: Real, refuse: Refuse
) -> None:
    message = refuse(real(name), options, kind="TargetError")
    assert reason in message
    assert choice in message


def test_all_reasons_are_named_at_once(real: Real, refuse: Refuse) -> None:
    message = refuse(real(TIED), "--tp 3 --ep 2 --dialect v0.1", kind="TargetError")
    assert message.startswith("3 problems:")
    for reason in ("tp 3 does not divide", "cannot tie", "expert parallel size 2"):
        assert reason in message


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_every_choice_that_a_refusal_names_is_valid(name: str, real: Real, tmp_path: Path) -> None:
    for option, choices in (("--tp", (1, 2, 4)), ("--pp", (1, 2, 3, 4, 5, 6))):
        for choice in choices:
            code, printed = run_cli("reshard", real(name), tmp_path / "out", option, str(choice), "--dry-run")
            assert code == 0, printed
    for option, choice in (("--tp", 3), ("--pp", 7)):
        assert run_cli("reshard", real(name), tmp_path / "out", option, str(choice), "--dry-run")[0] == 2


def test_every_expert_choice_is_valid(real: Real, tmp_path: Path) -> None:
    for choice in ("1", "2", "4"):
        assert run_cli("reshard", real(MOE8), tmp_path / "out", "--ep", choice, "--dry-run")[0] == 0


def rename_parallelism(root: Path, **sizes: int) -> None:
    """Add sizes to the parallelism section of config.yaml."""
    lines = "".join(f"\n  {name}: {size}" for name, size in sizes.items())
    replace_text(root / "config.yaml", "\nparallelism:", f"\nparallelism:{lines}")


def test_context_parallel_checkpoints_are_refused(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD_TIED)
    edit_json(root / "checkpoint_metadata.json", lambda metadata: metadata.update(cp=2))
    message = refuse(root, "--tp 1", kind="UnknownFormatError")
    assert "saved with context parallel size 2" in message
    assert "resume once with context_parallel_size 1" in message


def test_context_parallel_is_seen_in_the_config_too(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD_TIED)
    text = (root / "config.yaml").read_text()
    if "context_parallel_size: 1" in text:
        replace_text(root / "config.yaml", "context_parallel_size: 1", "context_parallel_size: 4")
    else:
        rename_parallelism(root, context_parallel_size=4)
    assert "context parallel size 4" in refuse(root, kind="UnknownFormatError")


def test_expert_rows_that_tp_does_not_divide() -> None:
    """No fixture's heads allow a tp that its experts do not."""
    from nemo_optim_bridge.formats.nanotron.target_spec import _expert_problems
    from nemo_optim_bridge.formats.topology import Topology

    def problems(tp: int, ep: int, rows: int) -> list[Any]:
        return list(_expert_problems(8, rows, Topology(tp=tp, ep=ep)))

    assert problems(4, 4, 6) == problems(4, 2, 3) == problems(2, 4, 3) == []
    (problem,) = problems(4, 4, 3)
    assert str(problem) == ("tp 4 does not divide the 6 expert rows of a rank. Choose tp from 1, 2, 3, or another ep")


def test_a_zero_stage_that_the_files_do_not_have(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TIED)
    replace_text(root / "config.yaml", "zero_stage: 0", "zero_stage: 2")
    message = refuse(root, "--zero 1", kind="ContradictionError")
    assert "zero_stage is 2 here" in message

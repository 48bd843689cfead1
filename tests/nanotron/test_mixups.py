"""Files that were swapped, mixed or edited so that every tensor still has the right shape: the evidence is used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.edits import edit_json, edit_pt, replace_text
from tests.nanotron.pair_table import run_cli

TP2 = "nt04-llama_tied-z0-tp2-pp1-dp1-ep1"
TP1 = "nt04-llama_tied-z0-tp1-pp1-dp1-ep1"
ZERO = "nt04-llama_tied-z1-tp1-pp1-dp2-ep1"
MOE24 = "moe24-moe_e8-z0-tp1-pp1-dp1-ep2"
HEAD = "head-llama_tied-z0-tp2-pp1-dp1-ep1"
FIRST, SECOND = (f"optimizer/optimizer_pp-0-of-1_tp-{tp}-of-2_exp-0-of-1.pt" for tp in (0, 1))
WHOLE = "optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt"
ATTENTION = "model/model/decoder/1/pp_block/attn"

Real = Callable[[str], Path]
Refuse = Callable[..., str]
Reshard = Callable[..., dict[str, Any]]


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (TP2, (FIRST, SECOND)),
        (ZERO, tuple(f"optimizer/optimizer_pp-0-of-1_dp-{dp}-of-2_tp-0-of-1_exp-0-of-1.pt" for dp in (0, 1))),
        (MOE24, tuple(f"optimizer/optimizer_pp-0-of-1_tp-0-of-1_exp-{ep}-of-2.pt" for ep in (0, 1))),
    ],
)
def test_swapped_files_are_known_by_the_name_inside(
    name: str, files: tuple[str, str], copy_of: Real, refuse: Refuse
) -> None:
    root = copy_of(name)
    swap(*(root / file for file in files))
    message = refuse(root, "--tp 1", kind="ContradictionError")
    assert "this is another rank's file" in message and Path(files[1]).stem in message


def test_swapped_names_are_known_by_the_order_of_the_masters(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)

    def swap_norms(content: dict[str, Any]) -> None:
        names = content["names"]
        one, two = (number for number, fqn in names.items() if ".0." in fqn and "norm" in fqn)
        names[one], names[two] = names[two], names[one]

    edit_pt(root / FIRST, swap_norms)
    assert "list the parameters differently" in refuse(root, kind="ContradictionError")


def test_ranks_of_a_stage_list_parameters_in_one_order(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of("nt04-llama_noacc-z0-tp2-pp1-dp1-ep1")  # without masters to tell

    def swap_norms(content: dict[str, Any]) -> None:
        names = content["names"]
        one, two = (number for number, fqn in names.items() if ".0." in fqn and "norm" in fqn)
        names[one], names[two] = names[two], names[one]

    edit_pt(root / SECOND, swap_norms)
    assert "in another order than its stage" in refuse(root, kind="ContradictionError")


def test_names_of_two_styles_are_not_mixed(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    (root / SECOND).rename((root / SECOND).with_name("optimizer_pp-0-of-1_tp-1-of-2.pt"))
    assert "names of two styles are mixed" in refuse(root, kind="ContradictionError")


def test_a_strided_zero_slice_is_refused(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(ZERO)

    def stride(content: dict[str, Any]) -> None:
        wide = torch.stack([content["state"][3]["exp_avg"], torch.zeros(len(content["state"][3]["exp_avg"]))], 1)
        content["state"][3]["exp_avg"] = wide[:, 0]

    edit_pt(root / "optimizer/optimizer_pp-0-of-1_dp-0-of-2_tp-0-of-1_exp-0-of-1.pt", stride)
    assert "strided view of its storage" in refuse(root, kind="ContradictionError")


def test_a_shard_under_the_name_of_a_whole_tensor(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP1)
    folder = root / ATTENTION / "qkv_proj"
    (shard,) = folder.iterdir()
    shard.rename(folder / "model_weight.safetensors")
    assert "name says that it is whole, its metadata that it is a shard" in refuse(root, "--tp 2")


def test_slices_that_run_backwards(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP1)
    (path,) = (root / ATTENTION / "qkv_proj").iterdir()
    with safe_open(path, "pt") as shard:
        tensor, metadata = shard.get_tensor("data"), shard.metadata()
    slices = metadata["local_global_slices_pairs"].replace("32,48", "48,32")
    save_file({"data": tensor}, path, metadata={**metadata, "local_global_slices_pairs": slices})
    assert "disagrees with itself" in refuse(root, "--tp 2", kind="ContradictionError")


def test_a_missing_head_is_not_a_tie(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    edit_json(root / "model_config.json", lambda config: config.update(tie_word_embeddings=False))
    assert "there is no lm_head" in refuse(root, kind="MissingSourceError")


@pytest.mark.parametrize("state", ["fp32_param", "weight"])
def test_a_state_may_not_take_a_reserved_name(state: str, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP1)

    def rename(content: dict[str, Any]) -> None:
        content["state"][2][state] = content["state"][2].pop("exp_avg")

    edit_pt(root / WHOLE, rename)
    assert "cannot be the name of an optimizer state" in refuse(root)


def test_unknown_lists_of_a_scheduler_are_not_copied_blindly(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    for path in (root / "lr_scheduler").iterdir():
        edit_pt(path, lambda state: state.update(min_lrs=[0.0] * len(state["base_lrs"])))
    assert "min_lrs is a list: not an lr_scheduler that nanotron writes" in refuse(root, "--pp 2")


def test_rates_that_the_first_stage_does_not_tell(
    copy_of: Real, refuse: Refuse, reshard: Reshard, tmp_path: Path
) -> None:
    reshard(copy_of(MOE24), "--pp 2", out="two")
    root = tmp_path / "two"
    for path in (root / "optimizer").glob("optimizer_pp-1*.pt"):
        edit_pt(path, lambda content: [group.update(initial_lr=0.5) for group in content["param_groups"]])
    message = refuse(root, "--pp 1", kind="ContradictionError")
    assert "has no entry for this parameter" in message and "initial_lr is 0.5" in message


def test_two_groups_of_one_revision_that_has_one(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP1)

    def split(content: dict[str, Any]) -> None:
        (group,) = content["param_groups"]
        content["param_groups"] = [{**group, "params": group["params"][:5]}, {**group, "params": group["params"][5:]}]

    edit_pt(root / WHOLE, split)
    assert "has 2 param groups for 26 parameters" in refuse(root, kind="UnknownFormatError")


def test_scalars_keep_their_shape_and_their_sign(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of("head-llama_tied-z0-tp1-pp1-dp1-ep1")

    def change(content: dict[str, Any]) -> None:
        content["state"][0]["step"] = torch.tensor([3.0])
        content["param_groups"][0].update(weight_decay=-0.0, eps=float("nan"))

    edit_pt(root / WHOLE, change)
    reshard(root, "--tp 2")
    reshard(tmp_path / "out", "--tp 1", out="back")
    content = torch.load(tmp_path / "back" / WHOLE, weights_only=True)
    assert content["state"][0]["step"].shape == (1,)
    group = content["param_groups"][0]
    assert str(group["weight_decay"]) == "-0.0" and str(group["eps"]) == "nan"


@pytest.mark.parametrize("value", [float("nan"), -1, 2.5, float("inf")])
def test_a_python_number_that_is_no_step(value: float, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP1)
    edit_pt(root / WHOLE, lambda content: content["state"][0].update(step=value))
    assert f"step is {value}" in refuse(root, kind="ContradictionError")


def test_what_a_link_leads_to_is_not_overwritten(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    store = tmp_path / "store"
    store.mkdir()
    shutil.move(root / "model", store / "model")
    (root / "model").symlink_to(store / "model")
    code, printed = run_cli("reshard", root, store, "--tp", "1", "--overwrite")
    assert code == 2
    assert "a link in the source leads into it" in printed
    assert len(list((store / "model").rglob("*.safetensors"))) == 43


def test_linked_folders_are_read(copy_of: Real, real: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    shutil.move(root / ATTENTION, tmp_path / "elsewhere")
    (root / ATTENTION).symlink_to(tmp_path / "elsewhere")
    assert run_cli("verify", root, real(TP1))[0] == 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.yaml", "parallelism:\n  dp: 1\n", "parallelism: null\nwas:\n  dp: 1\n"),
        ("config.yaml", "zero_stage: 0", "zero_stage: !!int ''"),
        ("config.yaml", "zero_stage: 0", "zero_stage: !!timestamp foo"),
        ("config.yaml", "zero_stage: 0", "zero_stage: " + "[" * 900 + "]" * 900),
    ],
)
def test_odd_documents_are_read_or_refused_in_one_line(
    file: str, old: str, new: str, copy_of: Real, tmp_path: Path
) -> None:
    root = copy_of(TP2)
    replace_text(root / file, old, new)
    code, printed = run_cli("reshard", root, tmp_path / "out", "--tp", "1")
    assert code in (0, 2)
    assert "unexpected" not in printed and "Traceback" not in printed
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.parametrize("stages", [None, [1], "x"])
def test_data_stages_that_are_none(stages: object, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    edit_json(root / "checkpoint_metadata.json", lambda content: content["metas"].update(data_stages=stages))
    assert "data_stages is not a list of stages" in refuse(root)


@pytest.mark.parametrize("options", ["--dp 1000000000", "--dp 1000000000 --zero 1", "--pp 1000000000"])
def test_absurd_sizes_end_at_once(options: str, real: Real, tmp_path: Path) -> None:
    code, printed = run_cli("reshard", real(TP2), tmp_path / "out", *options.split(), "--dry-run")
    assert code == (0 if options == "--dp 1000000000" else 2)  # ZeRO-0 writes no more files for more dp ranks
    assert "unexpected" not in printed


@pytest.mark.parametrize("file", ["config.yaml", "checkpoint_metadata.json", FIRST, "optimizer/optimizer_config.json"])
def test_a_pipe_is_not_waited_for(file: str, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    (root / file).unlink()
    os.mkfifo(root / file)
    assert "is not a regular file" in refuse(root, kind="CorruptFileError")


def test_a_frozen_tied_embedding_has_no_copy(copy_of: Real, reshard: Reshard, tmp_path: Path) -> None:
    root = copy_of(TP1)

    def freeze(content: dict[str, Any]) -> None:
        fqn = content["names"].pop(0)
        del content["state"][0], content["gradient_accumulator"][fqn]
        content["param_groups"][0]["params"].remove(0)
        for table in (content["state"], content["names"]):
            renumbered = {number - 1: value for number, value in table.items()}
            table.clear()
            table.update(renumbered)
        content["param_groups"][0]["params"] = list(content["names"])

    edit_pt(root / WHOLE, freeze)
    summary = reshard(root, "--pp 2 --tp 2")
    assert any("frozen" in remark for remark in summary["remarks"])
    assert run_cli("verify", root, tmp_path / "out")[0] == 0


def test_names_of_strangers_are_printed_harmlessly(copy_of: Real, tmp_path: Path) -> None:
    root = copy_of(TP2)
    (root / "optimizer" / "x\nproblem: forged \x1b[31m").write_bytes(b"")
    (Path(os.fsdecode(os.fsencode(root / "optimizer") + b"/\xff\xfe"))).write_bytes(b"")
    ran = subprocess.run(
        [sys.executable, "-m", "nemo_optim_bridge", "reshard", root, tmp_path / "out", "--tp", "1"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert b"\x1b" not in ran.stdout
    assert b"\nproblem: forged" not in ran.stdout
    assert rb"x\nproblem: forged \x1b[31m" in ran.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_batch_systems_time_limit_leaves_nothing(number: signal.Signals, real: Real, tmp_path: Path) -> None:
    """The run is held up by a pipe in place of standard output, so that the signal comes while it works."""
    code = (
        "import sys, time\n"
        "from nemo_optim_bridge.core import write\n"
        "real = write.SegmentWriter.write\n"
        "def slow(self, segment):\n"
        "    print('writing', flush=True); time.sleep(30)\n"
        "    return real(self, segment)\n"
        "write.SegmentWriter.write = slow\n"
        "from nemo_optim_bridge.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["reshard", str(real(TP2)), str(tmp_path / "out"), "--tp", "1"]
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    began = time.monotonic()
    child.send_signal(number)
    _, printed = child.communicate(timeout=25)
    assert time.monotonic() - began < 25
    assert child.returncode == 2
    assert b"interrupted; nothing was written" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_the_file_names_need(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    edit_json(
        root / "optimizer/optimizer_config.json", lambda config: config["parallelism"].pop("expert_parallel_size")
    )
    message = refuse(root, kind="ContradictionError")
    assert "has no expert_parallel_size, but the names of the optimizer files tell expert-parallel ranks" in message


@pytest.mark.parametrize("name", [TP2, HEAD, MOE24])
@pytest.mark.parametrize(("entries", "own"), [("base_lrs", "initial_lr"), ("_last_lr", "lr")])
def test_schedulers_that_were_changed_alike_on_all_ranks(
    name: str, entries: str, own: str, copy_of: Real, refuse: Refuse
) -> None:
    root = copy_of(name)
    for path in (root / "lr_scheduler").iterdir():
        edit_pt(path, lambda state: state[entries].__setitem__(-1, 0.25))
    message = refuse(root, kind="ContradictionError")
    assert f"{entries} is 0.25, but its param group's {own} is" in message
    assert "lr_scheduler/lr_scheduler" in message
    assert "model." in message


def test_schedulers_of_other_parameters(copy_of: Real, refuse: Refuse, reshard: Reshard, tmp_path: Path) -> None:
    """Entries that changed places alike on all ranks: every list is as long as it should be."""
    root = copy_of(HEAD)
    for path in (root / "optimizer").glob("*.pt"):
        edit_pt(path, lambda content: content["param_groups"][0].update(lr=0.25))
    for path in (root / "lr_scheduler").iterdir():
        edit_pt(path, lambda state: state["_last_lr"].__setitem__(0, 0.25))
    reshard(root, "--tp 1")
    for path in (root / "lr_scheduler").iterdir():
        edit_pt(path, lambda state: state["_last_lr"].reverse())
    message = refuse(root, kind="ContradictionError")
    assert "model.token_position_embeddings" in message and "lr is 0.25" in message
    assert "model.final_layer_norm" in message and "_last_lr is 0.25" in message


@pytest.mark.parametrize("name", ["nt04-llama_tied-z0-tp2-pp2-dp1-ep1", "head-llama_tied-z1-tp1-pp2-dp2-ep1"])
def test_a_tied_copy_that_the_last_stage_lacks(name: str, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(name)

    def drop(content: dict[str, Any]) -> None:
        last = max(content["names"])
        assert "token_embedding" in content["names"][last]
        content["gradient_accumulator"].pop(content["names"].pop(last), None)
        content["state"].pop(last)
        content["param_groups"][-1]["params"].remove(last)
        content["param_groups"] = [group for group in content["param_groups"] if group["params"]]

    for path in (root / "optimizer").glob("optimizer_pp-1*.pt"):
        edit_pt(path, drop)
    for path in (root / "lr_scheduler").glob("lr_scheduler_pp-1*.pt"):
        edit_pt(path, lambda state: [state[key].pop() for key in ("base_lrs", "_last_lr", "lr_lambdas")])
    message = refuse(root, "--pp 1", kind="MissingSourceError")
    assert "the tied embedding's copy is missing" in message
    assert "optimizer_pp-1-of-2" in message and "token_embedding" in message


@pytest.mark.parametrize("multiple", [3, 1 << 50])
def test_a_multiple_that_the_vocabulary_is_not_of(multiple: int, copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(TP2)
    replace_text(
        root / "config.yaml", "make_vocab_size_divisible_by: 1\n", f"make_vocab_size_divisible_by: {multiple}\n"
    )
    message = refuse(root, "--tp 1", kind="ContradictionError")
    assert f"make_vocab_size_divisible_by is {multiple}, but the vocabulary is stored with 128 rows" in message
    assert "config.yaml" in message


def test_samples_that_do_not_add_up(copy_of: Real, refuse: Refuse) -> None:
    root = copy_of(HEAD)
    edit_json(root / "checkpoint_metadata.json", lambda content: content["metas"].update(consumed_train_samples=7))
    assert "consumed_train_samples is 7, but its data stages add up to 6" in refuse(root, kind="ContradictionError")


def test_steps_that_are_counted_differently_are_told(copy_of: Real, reshard: Reshard) -> None:
    root = copy_of(TP2)
    edit_json(root / "checkpoint_metadata.json", lambda content: content["metas"].update(last_train_step=10**9))
    (told,) = (remark for remark in reshard(root, "--tp 1")["remarks"] if "counted differently" in remark)
    assert "the optimizer's step is 3.0, the lr_scheduler's last_epoch is 3, last_train_step is 1000000000" in told

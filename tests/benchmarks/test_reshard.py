"""Every case and variant of ``benchmarks/reshard.py`` runs, and gives the right output, at a tiny size."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import reshard

TINY = {"layers": 4, "hidden": 32, "intermediate": 64, "vocab": 64}


def tiny(name: str) -> reshard.Case:
    case = reshard.CASES[name]
    return replace(case, make={**case.make, **TINY}) if case.make else case


@pytest.mark.parametrize("name", reshard.CASES)
def test_a_case_runs_with_all_its_variants(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    case = tiny(name)
    records = reshard.run_case(case, tmp_path, 1, case.variants)
    assert [record["variant"] for record in records] == list(case.variants)
    for record in records:
        (ratio,) = record["seconds_x_cp"].values()
        assert ratio[1] <= ratio[0] <= ratio[2]
        assert tuple(record.get("seconds_x_ours", ())) == reshard.COUNTERPARTS.get(record["variant"], ())
    reshard.print_table(name, records)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(records)
    assert len({row.count("|") for row in rows}) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("variant", "has_crcs"), [("ours-2", True), ("ours-2-nocrc", False)])
def test_only_nocrc_writes_no_crcs(variant: str, has_crcs: bool, tmp_path: Path) -> None:
    source = reshard._source(tiny("tp4-2"), tmp_path)
    reshard.measure(variant, source, tmp_path / "out", {"tp": 2})
    for path in (tmp_path / "out" / "optimizer").glob("*.pt"):
        with zipfile.ZipFile(path) as archive:
            crcs = [record.CRC for record in archive.infolist() if "/data/" in record.filename and record.file_size > 4]
            assert all(crcs) if has_crcs else not any(crcs)


def test_the_work_of_running_children_counts(tmp_path: Path) -> None:
    source = reshard._source(tiny("tp4-2"), tmp_path)
    reshard._run("benchmarks.others", "save-by-dcp", source)
    found = reshard.measure("dcp-2", source, tmp_path / "out", {"tp": 2})
    tensors = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.distcp"))
    assert found["written"] >= tensors
    assert found["read"] >= tensors
    assert json.dumps(found)

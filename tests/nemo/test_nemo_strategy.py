"""Through the real methods of NeMo 2.4.1's NLPDDPStrategy and DistributedCheckpointIO."""

from __future__ import annotations

import pytest
from nemo_wheel import unpack_wheel
from test_nemo_resume import check

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def wheel(rig, tmp_path_factory):
    return str(unpack_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_moe_ep2", "fused_dense", "dist_moe_stock_keys"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1)])
def test_every_fixture_resumes_exactly(rig, fixture, wheel, name, tp, dp):
    source = fixture(name)
    check(rig.run("resume_by_strategy", tp * dp, path=source.path, wheel=wheel, tp=tp, moe=source.moe), source)


@pytest.mark.parametrize("name", ["fused_moe_ep1", "fused_moe_ep2", "fused_dense"])
def test_stock_fails_every_fused_fixture(rig, fixture, wheel, name):
    source = fixture(name)
    (failed,) = rig.run("resume_by_strategy", 1, path=source.path, wheel=wheel, moe=source.moe, cls="stock")
    assert "from model not in state dict" in failed["error"] or "Cannot merge two lists" in failed["error"]


def test_what_is_saved_loads_again(rig, fixture, wheel, tmp_path):
    source = fixture("fused_moe_ep1")
    path = str(tmp_path / "saved")
    rig.run("resume_by_strategy", 2, path=source.path, wheel=wheel, save_to=path)
    check(rig.run("resume_by_strategy", 1, path=path, wheel=wheel), source)
    check(rig.run("resume_by_strategy", 1, path=path, wheel=wheel, cls="stock"), source)


def test_lenient_handling_does_not_lose_masters(rig, fixture, wheel):
    source = fixture("fused_moe_ep1")
    check(rig.run("resume_by_strategy", 1, path=source.path, wheel=wheel, strict="log_all"), source)


def test_a_load_that_drops_masters_is_refused(rig, fixture, wheel):
    """A non-strict load drops keys as they were asked for, before anybody knows how the checkpoint spells them."""
    source = fixture("fused_moe_ep1")
    (failed,) = rig.run("resume_by_strategy", 1, path=source.path, wheel=wheel, strict=False)
    assert failed["error"].startswith("MissingSourceError")
    assert "strict" in failed["error"]
    check(
        rig.run("resume_by_strategy", 1, path=source.path, wheel=wheel, strict=False, fp32_key_style="uniform"), source
    )

"""A narrowed plan copies the same, and its source holds nothing else."""

from __future__ import annotations

from hypothesis import given

from nemo_optim_bridge.core.manifest import TensorSpec
from nemo_optim_bridge.core.narrow import narrow
from nemo_optim_bridge.core.plan import Plan, make_plan
from tests.property.layouts import Layout
from tests.property.test_plan_laws import identities, pairs


def replicas(plan: Plan) -> list[tuple[object, ...]]:
    """Return the pairs of copies to compare, buffers by their place."""
    shards = [[plan.source.shards[row] for row in pair] for pair in plan.replicas.tolist()]
    return [tuple((s.key, s.region, s.rank, plan.source.buffers[s.buffer]) for s in pair) for pair in shards]


@given(pairs())
def test_the_plan_is_the_same(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    _, a, b = drawn
    source, target = a.build(), b.build()
    for rank in sorted(set(target.shards.rank.tolist())):
        plan = make_plan(source, target, ranks=[rank])
        small = narrow(plan)
        assert len(small) == len(plan)
        assert [copy.region for copy in small] == [copy.region for copy in plan]
        assert identities(small) == identities(plan)
        assert small.source_offsets().tolist() == plan.source_offsets().tolist()
        assert small.num_bytes_read == plan.num_bytes_read
        assert replicas(small) == replicas(plan)


@given(pairs())
def test_nothing_else_is_kept(drawn: tuple[list[TensorSpec], Layout, Layout]) -> None:
    _, a, b = drawn
    source, target = a.build(), b.build()
    plan = make_plan(source, target, ranks=target.shards.rank[:1].tolist())
    small = narrow(plan).source
    used = {*plan.source_rows.tolist(), *plan.replicas.ravel().tolist()}
    wanted = [source.shards[row] for row in sorted(used)]
    assert len(small.shards) == len(used)
    assert [shard.key for shard in small.shards] == [shard.key for shard in wanted]
    assert {spec.key for spec in small.tensors} == {shard.key for shard in wanted}
    assert set(small.buffers) == {source.buffers[shard.buffer] for shard in wanted}
    assert set(small.identities) == {b.file for b in small.buffers} & set(source.identities)

"""Which pipeline stage holds which block of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_optim_bridge.errors import TargetError


def blocks_of(num_layers: int) -> tuple[str, ...]:
    """Return the blocks that hold parameters, in the model's order."""
    return ("token_position_embeddings", *(f"decoder.{i}" for i in range(num_layers)), "final_layer_norm", "lm_head")


def split_by_cost(num_layers: int, layer_cost: int, head_cost: int, pp: int) -> Mapping[str, int]:
    """Return each block's stage as nanotron computes it.

    Costs are nanotron's ``block_compute_costs`` of a decoder layer and of lm_head; every other block is free. A block
    is placed on the current stage; when the running cost then exceeds that stage's share, the next block goes one
    stage further. Raises TargetError when a stage is left without parameters.
    """
    stages = _by_cost(num_layers, layer_cost, head_cost, pp)
    if _empty(stages, pp):
        valid = [n for n in range(1, num_layers + 4) if not _empty(_by_cost(num_layers, layer_cost, head_cost, n), n)]
        choices = ", ".join(map(str, valid))
        raise _left_empty(stages, pp, f"choose pp from {choices}, or give the layers per stage with --pp-split")
    return stages


def _by_cost(num_layers: int, layer_cost: int, head_cost: int, pp: int) -> Mapping[str, int]:
    total = num_layers * layer_cost + head_cost
    cost, stage = 0, 0
    stages: dict[str, int] = {}
    for block in blocks_of(num_layers):
        stages[block] = stage
        cost += layer_cost if block.startswith("decoder.") else head_cost if block == "lm_head" else 0
        if cost > total * ((stage + 1) / pp) and stage < pp - 1:
            stage += 1
    return stages


def split_as_given(num_layers: int, layers_per_stage: Sequence[int]) -> Mapping[str, int]:
    """Return each block's stage for the given numbers of decoder layers; raises TargetError when they do not add up."""
    if sum(layers_per_stage) != num_layers or min(layers_per_stage) < 0:
        raise TargetError(
            f"--pp-split {','.join(map(str, layers_per_stage))} places {sum(layers_per_stage)} decoder layers",
            hint=f"the model has {num_layers}",
        )
    stages = {"token_position_embeddings": 0}
    layer = 0
    for stage, count in enumerate(layers_per_stage):
        for _ in range(count):
            stages[f"decoder.{layer}"] = stage
            layer += 1
    last = len(layers_per_stage) - 1
    stages["final_layer_norm"] = stages["lm_head"] = last
    if _empty(stages, len(layers_per_stage)):
        raise _left_empty(stages, len(layers_per_stage), "give every stage a layer")
    return stages


def _empty(stages: Mapping[str, int], pp: int) -> list[int]:
    return sorted(set(range(pp)) - set(stages.values()))


def _left_empty(stages: Mapping[str, int], pp: int, hint: str) -> TargetError:
    empty = ", ".join(map(str, _empty(stages, pp)))
    return TargetError(f"pp {pp} leaves stage {empty} without parameters", hint=hint)

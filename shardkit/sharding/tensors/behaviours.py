"""All that sharded tensors do that torch's DTensors do not."""

from shardkit.sharding.tensors import (
    assigned_data,
    composite_operators,
    copied_parts,
    fused_steps,
    in_place,
    numbers_of_tensors,
    pickled_parts,
    plain_operands,
    products,
    random_values,
    reductions,
    reshaped,
    script_scales,
    torch_collectives,
    whole_operators,
)

_BEHAVIOURS = (
    random_values, numbers_of_tensors, in_place, assigned_data, reductions, copied_parts, reshaped, pickled_parts,
    composite_operators, fused_steps, plain_operands, products, script_scales, torch_collectives, whole_operators,
)  # fmt: skip


def install() -> None:
    """Has an effect once per process, before the first tensor is sharded."""
    for behaviour in _BEHAVIOURS:
        behaviour.install()

"""What a script may do with a sharded tensor, and what it gives where torch refuses or computes something else.

all of it           behaviours
a parameter         sharded_parameter, assigned_data, pickled_parts
operators           dtensor_operators; by what differs: composite_operators, copied_parts, fused_steps, in_place,
                    numbers_of_tensors, random_values, reductions, reshaped, script_scales, torch_collectives,
                    whole_operators
beside plain ones   plain_operands, products, into_plain
optimizers          settled: what those of other libraries do
"""

"""Detects weights that differ between ranks before the first step, although DDP has made them equal: a module has set
them in its first forward, by the samples of its rank, as one with an initialization by data does."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardkit.distributed.control import ControlGroup, unlike_rank_0
from shardkit.distributed.modules import unwrapped
from shardkit.distributed.tensors import parts_of
from shardkit.log import get_logger
from shardkit.sharding.ddp.replica import Replica
from shardkit.wording import first_few

log = get_logger(__name__)


class SameWeights:
    """The check of one run, over the growing list of its models."""

    def __init__(self, models: Sequence[nn.Module], control: ControlGroup) -> None:
        self._models, self._control = models, control
        self._is_due = control.world_size > 1

    def check(self) -> None:
        """Warns, once, before the first step. Collective then, if a model is in DDP. Of large weights a sample is
        compared."""
        if not self._is_due:
            return
        self._is_due = False
        replicas = [model for model in self._models if isinstance(model, Replica)]
        if not replicas:
            return
        from shardkit.checkpoint.states import per_rank

        weights = {
            f"model {number}: {name}{part}" if len(replicas) > 1 else f"{name}{part}": values.detach()
            for number, model in enumerate(replicas)
            for name, parameter in unwrapped(model).named_parameters()
            for part, values in _parts(parameter)
        }
        digests = per_rank.of_tensors(weights, per_rank.SAMPLE_BYTES)
        if not self._control.decide(per_rank.together(digests), unlike_rank_0):
            return
        of_ranks = self._control.collect(digests)
        if of_ranks is not None and (names := per_rank.differing(of_ranks)):
            log.warning(
                "model: weights differ between ranks before the first step (got %s), so each rank trains a model of "
                "its own. Where forward sets them by the samples of its rank (an initialization by data), run it on "
                "one batch, the same on all ranks, before prepare; or make what it writes equal on all ranks.",
                first_few(names, 5),
            )


def _parts(parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(what follows its name, values) of each tensor that holds values of the parameter: several of a quantized one."""
    parts = list(parts_of(parameter))
    for number, values in enumerate(parts):
        yield (f", part {number}" if len(parts) > 1 else ""), values

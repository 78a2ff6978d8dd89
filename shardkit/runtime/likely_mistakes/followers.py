"""Notices models prepared for evaluation that the script changes in training: teachers and targets that follow the
trained model. No checkpoint has them, so a resumed run would go on with their first weights."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import local_part
from shardkit.log import get_logger
from shardkit.wording import first_few

log = get_logger(__name__)


class Followers:
    """The check of one run, over the growing list of its models for evaluation. Of large weights it takes a sample."""

    def __init__(self, models: Iterable[nn.Module], is_main: bool) -> None:
        self._models, self._is_main = models, is_main
        self._at_first_step: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
        self._has_warned = False

    def note_step(self) -> None:
        """Notes the weights with which the models go into their first step: until then they are filled."""
        for model in self._models if self._is_main else ():
            if model not in self._at_first_step:
                self._at_first_step[model] = _digests(model)

    def warn_of_changed(self, registered: Iterable[Any], has_hooks: bool) -> None:
        """Warns once where a checkpoint lacks weights that were changed since. `registered`: what is saved, too;
        `has_hooks`: whether functions of the script save what they want."""
        if self._has_warned or has_hooks:
            return
        known = {id(one) for one in registered}
        noted = [(model, self._at_first_step.get(model)) for model in self._models if id(model) not in known]
        names = [type(model).__name__ for model, before in noted if before not in (None, _digests(model))]
        if names:
            self._has_warned = True
            log.warning(
                f"checkpoint: weights of a model that was prepared with evaluation_mode have changed in training, and "
                f"no checkpoint has them (got {first_few(names, 3)}); prepare it without evaluation_mode "
                "(accelerator.prepare(model), frozen), or register it: accelerator.register_for_checkpointing(model)."
            )


def _digests(model: nn.Module) -> dict[str, str]:
    from shardkit.checkpoint.states import per_rank  # a script may have no such model

    parts = {str(number): local_part(one) for number, one in enumerate(every_parameter(model))}
    return per_rank.of_tensors(parts, per_rank.SAMPLE_BYTES)

"""Which of the Transformers Trainer's kinds and options compute a loss from slices of sequences."""

import sys
from types import FrameType
from typing import Any

from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

_WITH_SLICES = {"Trainer", "Seq2SeqTrainer", "SFTTrainer"}
"""Those of Transformers and TRL whose loss is that of `shift_labels`, or of a model that is given them."""


def refuse_unsplit(frame: FrameType | None, ranks: int, is_main: bool) -> None:
    """UsageError where a Trainer that creates its Accelerator, in one of the frames, computes its loss from whole
    sequences, of which each of `ranks` has a slice. A warning where that is not known."""
    trainer, given = _trainer_in(frame)
    if trainer is None:
        return
    kind, setting = type(trainer).__name__, f"shardkit.mesh.context_size: {ranks}"
    owner = next(one for one in type(trainer).__mro__ if "compute_loss" in vars(one))
    library = owner.__module__.partition(".")[0]
    if library == "trl" and owner.__name__ not in _WITH_SLICES:
        raise UsageError(
            f"{kind}: its loss needs whole sequences, of which ranks would have slices (got {setting}); leave the "
            "setting out, or use TRL's SFTTrainer."
        )
    if getattr(trainer.args, "label_smoothing_factor", 0):
        given.append(f"label_smoothing_factor={trainer.args.label_smoothing_factor}")
    if given:
        raise UsageError(
            f"{kind}: {given[0].partition('=')[0]} would take the labels of a slice for those of a sequence (got "
            f"{', '.join(given)} with {setting}); leave one of the two out."
        )
    called = getattr(getattr(vars(owner)["compute_loss"], "__code__", None), "co_names", ())
    if is_main and library not in ("transformers", "trl") and "super" not in called:
        log.warning(
            "%s.compute_loss: its inputs are slices of sequences (%s), and labels of slices cannot be shifted; take "
            "the loss of the model, or of inputs['shift_labels'].",
            kind,
            setting,
        )


def _trainer_in(frame: FrameType | None) -> tuple[Any, list[str]]:
    """The Trainer that one of these frames constructs, and the loss function that it is given, as text."""
    module = sys.modules.get("transformers.trainer")
    kind = getattr(module, "Trainer", None)
    found, given = None, list[str]()
    while kind is not None and frame is not None:
        one = frame.f_locals.get("self")
        if isinstance(one, kind):
            found = one
            if frame.f_locals.get("compute_loss_func") is not None and not given:
                given.append(f"compute_loss_func={getattr(frame.f_locals['compute_loss_func'], '__name__', '...')}")
        elif found is not None:
            break
        frame = frame.f_back
    return found, given

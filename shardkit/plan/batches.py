"""Batch and loss of a simulated step, as in a training script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shardkit.errors import UsageError
from shardkit.model.probe import error_text, imported, where
from shardkit.sharding.context_parallel import transformers_masks
from shardkit.sharding.context_parallel.region import Region
from shardkit.signatures import signature

LossFunction = Callable[[nn.Module], tuple[Any, torch.Tensor]]
"""Runs forward; returns what the script holds until the end of the step, and the loss."""


def named(flag: str, spec: str) -> Any:
    """The object that `module:name` names. UsageError, with the flag, if it is not found."""
    try:
        return imported(spec)
    except Exception as error:
        raise UsageError(
            f"{flag} {spec}: cannot be imported from this folder ({error}); give module:function."
        ) from error


def given_batch(spec: str) -> Any:
    """The micro-batch of the function (or object) that `--batch` names, with fake tensors. The function is called once,
    without fake tensors, because it may read values: a DataLoader that shuffles does."""
    batch = _made(spec)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(torch.Tensor, torch.ops.aten.lift_fresh.default, batch)


@cache
def _made(spec: str) -> Any:
    with unset_fake_temporarily():
        found = named("--batch", spec)
        try:
            batch = found() if callable(found) else found
        except Exception as error:
            place = where(error)
            at = f" at {Path(place).name}" if place else ""
            raise UsageError(
                f"--batch {spec}: fails ({error_text(error)}{at}); it is called without arguments, on this machine's "
                "CPU, and returns one micro-batch."
            ) from error
    if batch is None:
        raise UsageError(f"--batch {spec}: returned nothing (got None); return one micro-batch.")
    return batch


def next_token_loss(tokens: torch.Tensor, vocabulary: int) -> LossFunction:
    """For a model from token numbers to logits (batch, seq, vocab): cross-entropy with the same tokens."""

    def loss(model: nn.Module) -> tuple[Any, torch.Tensor]:
        logits = model(tokens)
        return logits, functional.cross_entropy(logits.reshape(-1, vocabulary), tokens.reshape(-1))

    return loss


def of_slices(region: Region, batch: Any, loss_of: Callable[[Any], LossFunction]) -> LossFunction:
    """The loss of this rank's slices of the batch, in the region. Without ranks that share sequences: of the batch."""

    is_packed = isinstance(batch, Mapping) and "position_ids" in batch

    def loss(model: nn.Module) -> tuple[Any, torch.Tensor]:
        if region.group.size > 1 and "transformers" in sys.modules:
            transformers_masks.install()
        with region.split([batch], 1) as (own,), nullcontext() if is_packed else _one_sequence_a_row():
            region.note_forward()
            return loss_of(own)(model)

    return loss


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Inside, Transformers need not read from positions whether a row has several sequences: of fake tensors it cannot,
    and would attend with a mask of all pairs, and with keys repeated for each head (`find_packed_sequence_indices` in
    its masking_utils, 5.24)."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda positions: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = found


def without_output(loss: LossFunction) -> LossFunction:
    """The loss of a script that drops the model's output before backward."""
    return lambda model: (None, loss(model)[1])


CHUNK_TOKENS = 1024


def fuse_loss(model: nn.Module) -> bool:
    """Replaces the head's forward, in place: it computes the mean cross-entropy in chunks of tokens instead of logits,
    and the model must be called without labels. False if the model has no known head."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find else getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        return False

    def of_chunk(hidden: torch.Tensor) -> torch.Tensor:
        labels = torch.zeros(len(hidden), dtype=torch.long)
        return functional.cross_entropy(functional.linear(hidden, head.weight, head.bias).float(), labels)

    def chunked(hidden: torch.Tensor) -> torch.Tensor:
        chunks = hidden.reshape(-1, hidden.shape[-1]).split(CHUNK_TOKENS)
        return torch.stack([checkpoint(of_chunk, chunk, use_reentrant=False) for chunk in chunks]).mean()

    head.forward = chunked  # type: ignore[method-assign, assignment]
    return True


def given_loss(batch: Any) -> LossFunction:
    """The loss for the result of --batch: keywords, positional arguments, or a single argument."""
    keywords, arguments = (batch, ()) if isinstance(batch, Mapping) else ({}, batch)
    if not isinstance(arguments, (tuple, list)):
        arguments = (batch,)

    def loss(model: nn.Module) -> tuple[Any, torch.Tensor]:
        try:
            signature(model.forward).bind(*arguments, **keywords)
        except TypeError as error:
            raise UsageError(
                f"--batch: the model's forward does not accept it ({error}); a dict is given as keyword arguments, a "
                "tuple or list as positional ones: return (batch,) for a model that takes the dict or list itself."
            ) from error
        output = model(*arguments, **keywords)
        return output, loss_in(output)

    return loss


def loss_in(output: Any) -> torch.Tensor:
    """The loss in the output, by name or as its only number; else the sum of the means of all its tensors."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found if found.numel() == 1 else found.float().mean()
    tensors = [
        t
        for t in torch.utils._pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not tensors:
        raise UsageError(
            "--batch: no tensor of the model's output requires a gradient (got none); train some parameters."
        )
    numbers = [tensor for tensor in tensors if tensor.dim() == 0 and not _is_a_parameter(tensor)]
    return numbers[0] if len(numbers) == 1 else torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _is_a_parameter(number: torch.Tensor) -> bool:
    """Whether it is a parameter or a function of it alone, such as the temperature beside CLIP's embeddings."""
    node = number.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None or not node.next_functions


def transformers_batch(model: nn.Module, batch_size: int, seq_len: int | None) -> dict[str, Any]:
    """Inputs and labels for a Transformers model, as its class expects them. For models of text and images, text only,
    unless the model compares the two. Raises UsageError for other kinds of input."""
    config: Any = model.config
    name = type(model).__name__
    match getattr(model, "main_input_name", "input_ids"):
        case "pixel_values":
            inputs = {"pixel_values": _images(config, batch_size)}
            return inputs | ({"labels": _one_label(batch_size)} if "Classification" in name else {})
        case "input_values":  # audio, by default one second. SpecAugment's mask depends on values.
            config.apply_spec_augment = False
            inputs = {"input_values": torch.zeros(batch_size, seq_len or 16_000)}
            return inputs | ({"labels": _one_label(batch_size)} if "SequenceClassification" in name else {})
        case "input_features":
            return _spectra(config, batch_size, seq_len)
        case "input_ids":
            return _texts(model, config, batch_size, seq_len)
        case other:
            raise UsageError(
                f"--simulate: no default batch for {name} (its input is {other}); "
                "add --batch module:function, a function that returns one micro-batch."
            )


def _texts(model: nn.Module, config: Any, batch_size: int, seq_len: int | None) -> dict[str, Any]:
    name = type(model).__name__
    tokens = torch.zeros(batch_size, seq_len or _longest(config.get_text_config()), dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if hasattr(model, "logit_scale") and hasattr(
        config, "vision_config"
    ):  # CLIP and similar models compare texts and images
        return inputs | {"pixel_values": _images(config.vision_config, batch_size), "return_loss": True}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    if any(part in name for part in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "Seq2SeqLM")):
        return inputs | {"labels": tokens}
    return inputs | ({"labels": _one_label(batch_size)} if "SequenceClassification" in name else {})


def _images(config: Any, batch_size: int) -> torch.Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(batch_size, getattr(config, "num_channels", 3), height, width)


def _spectra(config: Any, batch_size: int, seq_len: int | None) -> dict[str, Any]:
    """Whisper and similar: a spectrogram of the maximum length, halved by the encoder, and tokens to predict."""
    bins: int = getattr(config, "num_mel_bins", 0) or getattr(config, "input_feat_per_channel", 80)
    frames: int = 2 * getattr(config, "max_source_positions", 1500)
    length: int = getattr(config, "max_target_positions", 448) if seq_len is None else seq_len
    words = torch.zeros(batch_size, length, dtype=torch.long)
    inputs = {"input_features": torch.zeros(batch_size, bins, frames)}
    return inputs | ({"labels": words} if getattr(config, "is_encoder_decoder", False) else {})


def _one_label(batch_size: int) -> torch.Tensor:
    return torch.zeros(batch_size, dtype=torch.long)


def _longest(config: Any) -> int:
    return next((n for n in (getattr(config, k, None) for k in ("max_position_embeddings", "n_positions")) if n), 512)

"""Intended differences in behavior between shardkit and Accelerate, and the switch for Accelerate's behavior."""

from collections.abc import Collection
from dataclasses import dataclass

from shardkit import env

VARIABLE = "SHARDKIT_ACCELERATES_MEANING"
"""The differences for which a run uses Accelerate's behavior, comma-separated: `launch --accelerates-meaning
scheduler`."""


@dataclass(frozen=True)
class Difference:
    """`names`: the API names that it affects. `word`: its value for --accelerates-meaning; empty if it has none."""

    names: tuple[str, ...]
    text: str
    reason: str
    word: str = ""


DIFFERENCES = [
    Difference(
        ("Accelerator.prepare_scheduler", "scheduler.AcceleratedScheduler"),
        "a prepared scheduler steps once per optimizer step; Accelerate's steps num_processes times "
        "(--accelerates-meaning scheduler does that, too)",
        "a schedule written in optimizer steps is then the same on any number of ranks",
        "scheduler",
    ),
    Difference(
        ("Accelerator.save_state", "Accelerator.load_state"),
        "save_state writes one checkpoint atomically, named by the step, with the position in the data; a script puts "
        "its own files into the folder after it, since a folder with other files is refused",
        "a killed run never leaves an incomplete checkpoint, and a resumed run repeats no sample",
    ),
    Difference(
        ("Accelerator.load_state",),
        "load_state moves the loaders to the saved position in the data, so a loop that drops the first batches by "
        "itself drops others; Accelerate's start the epoch again (--accelerates-meaning position does that, too)",
        "a resumed run repeats no sample and loses none",
        "position",
    ),
    Difference(
        ("Accelerator.save", "utils.save"),
        "save writes safetensors or JSON instead of pickle (--accelerates-meaning save uses torch.save)",
        "loading a pickle can execute arbitrary code",
        "save",
    ),
    Difference(
        ("Accelerator.clip_grad_norm_",),
        "clip_grad_norm_ returns a plain tensor, and 0 before the last micro-batch of an accumulation window",
        "the norm over all ranks can be logged directly; before the last micro-batch gradients are incomplete",
    ),
    Difference(
        ("Accelerator.backward", "Accelerator.accumulate"),
        "a shorter accumulation window at the end of an epoch is the mean of its micro-batches; Accelerate divides by "
        "gradient_accumulation_steps",
        "all samples of an epoch have the same weight",
    ),
    Difference(
        ("DataLoaderConfiguration", "utils.DataLoaderConfiguration", "data_loader.prepare_data_loader"),
        "every rank reads its part of the data, also from an IterableDataset, and the order is a function of "
        "(seed, epoch), without a draw from torch's random generator, so a model that is built after a loop starts "
        "with other weights; dispatch_batches and use_seedable_sampler have no effect",
        "batches are not sent between ranks, and a run can be resumed at any sample",
    ),
    Difference(
        ("DataLoaderConfiguration", "utils.DataLoaderConfiguration", "data_loader.prepare_data_loader"),
        "the last global batch of an epoch, if it is shorter, is spread evenly over the ranks; with Accelerate the "
        "first ranks get whole batches, and the others samples from the start of the epoch",
        "at most one sample per rank counts twice in the mean of the losses",
    ),
    Difference(
        ("DataLoaderConfiguration", "utils.DataLoaderConfiguration", "Accelerator.join_uneven_inputs"),
        "even_batches=False is an error if some ranks would get fewer batches; in join_uneven_inputs the last batch is "
        "padded then, with a warning",
        "ranks without a batch cannot take part in the collectives of the others",
    ),
    Difference(
        ("Accelerator.split_between_processes", "PartialState"),
        "split_between_processes also splits arrays and texts; Accelerate gives each rank the whole",
        "each item occurs once in gathered results",
    ),
    Difference(
        ("Accelerator.state", "FullyShardedDataParallelPlugin", "utils.FullyShardedDataParallelPlugin"),
        "FSDP is always FSDP2, also on the CPU, and gradients are reduced in fp32 by default "
        "(shardkit.precision.reduce_dtype)",
        "sums over many ranks lose too much precision in bf16",
    ),
    Difference(
        ("Accelerator.maybe_context_parallel",),
        "ranks that share sequences (cp_size, and DeepSpeed's sp_size, which is shown as cp_size) exchange slices for "
        "heads, as Ulysses does; Accelerate's pass keys and values around. The size must divide the heads, and the "
        "mean of a cross entropy is that of whole sequences on each rank",
        "any mask works, also without FSDP, with the attention kernels that torch chooses",
    ),
    Difference(
        ("utils.load_fsdp_model", "utils.save_fsdp_model"),
        "the Trainer's pytorch_model_fsdp_0 and optimizer_0 are shardkit checkpoints with digests, which load on any "
        "number of ranks",
        "damaged files are detected when they are loaded",
    ),
]


def taken_back() -> list[str]:
    """The words of the differences for which this run uses Accelerate's behavior."""
    return [word for word in (env.get(VARIABLE) or "").split(",") if word]


def takes_back(word: str) -> bool:
    """Whether this run uses Accelerate's behavior for this difference."""
    return word in taken_back()


def affecting(names: set[str], words: Collection[str]) -> list[Difference]:
    """The differences that affect one of these names, without those that are taken back by these words."""
    return [one for one in DIFFERENCES if one.word not in words and not names.isdisjoint(one.names)]


def choices() -> list[str]:
    """The values of --accelerates-meaning."""
    return [one.word for one in DIFFERENCES if one.word]

"""Where shardkit means something else than Accelerate by a name, on purpose; and the switch that gives theirs."""

from dataclasses import dataclass

from shardkit import env

VARIABLE = "SHARDKIT_ACCELERATES_MEANING"
"""Words, with commas, of the differences that a run takes back: `launch --accelerates-meaning scheduler`."""


@dataclass(frozen=True)
class Difference:
    """`names` are those whose use makes it matter. `word` switches it back, where that can be."""

    names: tuple[str, ...]
    text: str
    reason: str
    word: str = ""


DIFFERENCES = [
    Difference(
        ("Accelerator.prepare_scheduler", "scheduler.AcceleratedScheduler"),
        "a prepared scheduler steps once an optimizer step; Accelerate's steps once a rank "
        "(--accelerates-meaning scheduler gives that)",
        "a schedule written in optimizer steps then means the same on any number of ranks",
        "scheduler",
    ),
    Difference(
        ("Accelerator.save_state", "Accelerator.load_state"),
        "save_state writes one checkpoint that appears whole or not at all, named by the step, with the position in "
        "the data",
        "a run that is killed never leaves half a checkpoint, and a resumed one repeats no sample",
    ),
    Difference(
        ("Accelerator.save", "utils.save"),
        "save writes safetensors or JSON, and no pickle (--accelerates-meaning save gives torch.save)",
        "reading a pickle runs whatever is in it",
        "save",
    ),
    Difference(
        ("Accelerator.clip_grad_norm_",),
        "clip_grad_norm_ gives a plain tensor, and 0 inside a window of micro-batches",
        "the norm of all ranks is a number that can be logged; in a window there is nothing to clip yet",
    ),
    Difference(
        ("Accelerator.backward", "Accelerator.accumulate"),
        "a window of micro-batches that the loader cuts short has the mean over the micro-batches that it has; "
        "Accelerate divides by the full number",
        "the last samples of an epoch count as much as all others",
    ),
    Difference(
        ("DataLoaderConfiguration", "utils.DataLoaderConfiguration", "data_loader.prepare_data_loader"),
        "every rank reads its own part of the data, also of an IterableDataset, and the order is a function of "
        "(seed, epoch); dispatch_batches and use_seedable_sampler change nothing",
        "no rank sends batches to others, and a run can be resumed at any sample",
    ),
    Difference(
        ("DataLoaderConfiguration", "utils.DataLoaderConfiguration", "Accelerator.join_uneven_inputs"),
        "even_batches=False is refused where it would leave ranks without a last batch, also with join_uneven_inputs",
        "ranks that have no batch cannot take part in the exchanges of those that have one",
    ),
    Difference(
        ("Accelerator.split_between_processes", "PartialState"),
        "split_between_processes gives a rank nothing where there are fewer items than ranks; Accelerate gives it the "
        "last item again",
        "what is gathered afterwards has every item once",
    ),
    Difference(
        ("Accelerator.state", "FullyShardedDataParallelPlugin", "utils.FullyShardedDataParallelPlugin"),
        "FSDP is version 2, also on the CPU, and gradients are reduced in fp32 unless shardkit.precision.reduce_dtype "
        "says otherwise",
        "sums over many ranks lose too much in bf16",
    ),
    Difference(
        ("utils.load_fsdp_model", "utils.save_fsdp_model"),
        "the Trainer's pytorch_model_fsdp_0 and optimizer_0 hold checkpoints of shardkit: verified, and loadable on "
        "any number of ranks",
        "a damaged file is found when it is read",
    ),
]


def takes_back(word: str) -> bool:
    """Whether this run asks for Accelerate's own meaning of something."""
    return word in (env.get(VARIABLE) or "").split(",")


def words() -> list[str]:
    """What can be taken back."""
    return [one.word for one in DIFFERENCES if one.word]

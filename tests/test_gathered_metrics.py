"""Values that loops gather for metrics are those of real samples, however the loop reads its loaders."""

from collections import UserDict
from itertools import chain, islice

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
)

from shardkit import Accelerator
from shardkit.data import padding
from tests.loaders import (
    Example,
    Flow,
    Numbers,
    lists,
)
from tests.ranks import log_lines


def gathered(loop) -> list[int]:
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    first = accelerator.prepare(DataLoader(torch.arange(24), batch_size=4))
    second = accelerator.prepare(DataLoader(torch.arange(100, 117), batch_size=4))
    found = loop(accelerator, first, second)
    accelerator.free_memory()
    return [value for part in found for value in part.tolist()]


def both_of_a_zip(accelerator, first, second):
    return [accelerator.gather_for_metrics(part) for pair in zip(first, second, strict=False) for part in pair]


def one_ahead(accelerator, first, second):
    found, batches = [], iter(second)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        found.append(accelerator.gather_for_metrics(batch))
        batch = following
    return found


def labels_read_ahead(accelerator, first, second):
    """The 15 samples fill all but one place of their two batches, which are as long on both ranks."""
    loader, found = accelerator.prepare(DataLoader(torch.arange(15), batch_size=4)), []
    for ahead in (1, 2):
        waiting = []
        for batch in chain(loader, [None] * ahead):
            waiting.append(batch)
            if len(waiting) > ahead and (batch := waiting.pop(0)) is not None:
                found.append(accelerator.gather_for_metrics((batch * 2, batch))[0] // 2)
    return found


class Encoding(UserDict):
    """As Transformers' BatchEncoding."""

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def batches_as(kind, accelerator):
    """The same two loaders, with batches of this kind, and what takes the numbers out of a batch."""
    collate, numbers = {
        "encoding": (lambda found: Encoding(x=torch.stack(found)), lambda batch: batch["x"]),
        "data class": (lambda found: Example(torch.stack(found)), lambda batch: batch.x),
    }[kind]
    loaders = [DataLoader(data, batch_size=4, collate_fn=collate) for data in (Numbers(24), Numbers(17))]
    return (*accelerator.prepare(*loaders), numbers)


def encodings_one_ahead(accelerator, first, second, kind="encoding"):
    _, second, numbers = batches_as(kind, accelerator)
    found, batches = [], iter(second)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        found.append(accelerator.gather_for_metrics(numbers(batch)))
        batch = following
    return found


def data_classes_one_ahead(*given):
    return encodings_one_ahead(*given, kind="data class")


def encodings_of_a_zip(accelerator, first, second, kind="encoding"):
    first, second, numbers = batches_as(kind, accelerator)
    pairs = zip(first, second, strict=False)
    return [accelerator.gather_for_metrics(numbers(part)) for pair in pairs for part in pair]


def data_classes_of_a_zip(*given):
    return encodings_of_a_zip(*given, kind="data class")


def predictions_inside(accelerator, first, second):
    return [accelerator.gather_for_metrics(x * 2) // 2 for _ in islice(first, 2) for x in second]


def objects_of_each_sample(accelerator, first, second):
    """One object a sample, with tensors of any length in it."""
    found = []
    for batch in second:
        own = [{"number": value, "boxes": torch.zeros(int(value) % 3 + 1)} for value in batch]
        found += [one["number"] for one in accelerator.gather_for_metrics(own, use_gather_object=True)]
    return [torch.stack(found)]


def ready_batches(accelerator, first, second):
    """The last of the three has no partner on the other rank."""
    loader = accelerator.prepare(DataLoader(torch.arange(15).reshape(3, 5), batch_size=None))
    return [accelerator.gather_for_metrics(batch * 2) // 2 for batch in loader]


def single_samples(accelerator, first, second):
    """0-dim: the last of the 15 has no partner on the other rank."""
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=None))
    return [accelerator.gather_for_metrics(sample * 2) // 2 for sample in loader]


def a_value_of_each_sample(accelerator, first, second):
    """A metric of one sample is 0-dim."""
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=1))
    return [accelerator.gather_for_metrics(batch.sum()) for batch in loader]


def objects_of_single_samples(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=1))
    return [torch.tensor(accelerator.gather_for_metrics(int(batch))) for batch in loader]


def a_value_of_each_batch(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(4, 2, 3)))
    return [accelerator.gather_for_metrics(batch.sum()) for batch in loader]


class OfLengths(Sampler):
    """A batch sampler of batches of these lengths."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        numbers = iter(range(100))
        return (list(islice(numbers, length)) for length in self.lengths)


def batches_of_different_lengths(accelerator, first, second):
    """The last of the three has no partner on the other rank, which gets the first again."""
    found = []
    for lengths in ((4, 2, 3), (2, 2, 3), (2, 3, 2)):
        loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(*lengths)))
        for batch in loader:
            together = accelerator.gather_for_metrics(accelerator.pad_across_processes(batch, pad_index=-1))
            found.append(together[together >= 0])
    return found


def objects_of_batches_of_different_lengths(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(4, 2, 3)))
    return [
        torch.tensor(accelerator.gather_for_metrics([int(value) for value in batch], use_gather_object=True))
        for batch in loader
    ]


def losses_of_whole_batches(accelerator, first, second):
    """Numbers of values: a batch's mean repeated for each sample of a whole one. The last has 1 sample and padding."""
    return [torch.tensor([len(accelerator.gather_for_metrics(batch.float().mean().repeat(4)))]) for batch in second]


def values_that_differ_are_not_cut(accelerator, first, second):
    """As long as a whole batch, but not a repeated mean."""
    return [accelerator.gather_for_metrics(torch.arange(4)) for batch in second][-1:]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (losses_of_whole_batches, [8, 8, 1]),
        (values_that_differ_are_not_cut, [0, 1, 2, 3] * 2),
        (batches_of_different_lengths, [*range(9), *range(7), *range(7)]),
        (objects_of_batches_of_different_lengths, [*range(9)]),
        (ready_batches, [*range(15)]),
        (single_samples, [*range(15)]),
        (a_value_of_each_sample, [*range(15)]),
        (objects_of_single_samples, [*range(15)]),
        (a_value_of_each_batch, [6, 9, 21]),
        (objects_of_each_sample, [*range(100, 117)]),
        (both_of_a_zip, [*range(24), *range(100, 117)]),
        (one_ahead, [*range(100, 117)]),
        (labels_read_ahead, [*range(15)] * 2),
        (encodings_one_ahead, [*range(17)]),
        (data_classes_one_ahead, [*range(17)]),
        (encodings_of_a_zip, [*range(24), *range(17)]),
        (data_classes_of_a_zip, [*range(24), *range(17)]),
        (predictions_inside, [*range(100, 117)] * 2),
    ],
)
def test_samples_for_metrics_are_those_of_their_own_loader(ranks, loop, expected):
    for found in ranks.run(2, gathered, loop):
        assert sorted(found) == sorted(expected)


def gathered_after_the_loop(samples):
    """The warnings, with predictions of all batches; and with those of other loaders since."""
    padding._warn_of_ended_loop.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    loader, other = accelerator.prepare(DataLoader(Numbers(samples), batch_size=4), DataLoader(Numbers(8)))
    with log_lines("shardkit.data") as lines:
        predictions = torch.cat([batch * 2 for batch in loader])
        for _ in other:
            accelerator.gather_for_metrics(predictions)
            break
        assert not lines
        for _ in range(2):
            for _batch in other:
                found = [prediction * 2 for prediction in loader]
                accelerator.gather_for_metrics(torch.zeros(1))
                accelerator.gather_for_metrics(torch.cat(found))
    accelerator.free_memory()
    return lines


def predictions_read_ahead():
    """Whether those of the last batch, which are no tensors of it, are warned of."""
    padding._warn_of_ended_loop.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    batches = iter(accelerator.prepare(DataLoader(Numbers(13), batch_size=4)))
    with log_lines("shardkit.data") as lines:
        batch = next(batches)
        while batch is not None:
            predicted, batch = batch * 2, next(batches, None)
            accelerator.gather_for_metrics(predicted)
    accelerator.free_memory()
    return any("or of the last one if the loop was read ahead" in line for line in lines)


def test_values_of_a_whole_loop_gathered_after_it_are_told_to_have_the_padding(ranks):
    for lines in ranks.run(2, gathered_after_the_loop, 13):
        (line,) = lines
        assert line.startswith("gather_for_metrics: called after the loop with the values of all its batches")
    assert ranks.run(2, predictions_read_ahead) == [True, True]
    assert ranks.run(2, gathered_after_the_loop, 12) == [[], []]
    assert ranks.run(1, gathered_after_the_loop, 13) == [[]]


def gathered_objects(batch_size):
    """The warnings, and the objects of the last batch, for what is no list of one value per sample."""
    padding._warn_of_objects.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    loader = accelerator.prepare(DataLoader(Numbers(7), batch_size=batch_size))
    with log_lines("shardkit.data") as lines:
        for batch in loader:
            accelerator.gather_for_metrics(float(batch.sum()))
            accelerator.gather_for_metrics([str(int(number)) for number in batch])
        assert not lines
        for batch in loader:
            found = accelerator.gather_for_metrics({"number": batch, "text": [str(int(number)) for number in batch]})
    accelerator.free_memory()
    return lines, [text for one in found for text in one["text"]]


def test_objects_that_hold_several_samples_are_told_to_have_the_padding(ranks):
    for lines, found in ranks.run(2, gathered_objects, 2):
        (line,) = lines
        assert "one object for all samples of a rank (got dict), so no padding is dropped; pass a list" in line
        assert found == ["4", "5", "6", "0"]
    assert ranks.run(2, gathered_objects, 1) == [([], ["6"])] * 2
    assert ranks.run(1, gathered_objects, 2) == [([], ["6"])]


def repeated_losses_of_uneven_batches(samples):
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}, even_batches=False)
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=4))
    gathered = [accelerator.gather_for_metrics(batch.float().mean().repeat(4)) for batch in loader]
    return [value for part in gathered for value in part.tolist()]


@pytest.mark.parametrize("samples", [13, 15])
def test_a_repeated_loss_counts_the_samples_of_each_rank_where_they_differ(ranks, samples):
    first, second = ranks.run(2, repeated_losses_of_uneven_batches, samples)
    assert first == second and len(first) == samples
    assert sum(first) == sum(range(samples)), "each batch's mean, as often as it has samples"


def batches_inside_join_uneven_inputs(samples, even_batches):
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2))
    accelerator.prepare(DataLoader(Flow(4), batch_size=2))
    with log_lines("shardkit.data") as lines, accelerator.join_uneven_inputs([], even_batches=even_batches):
        inside = lists(loader)
    return inside[-1], lists(loader)[-1], lines


@pytest.mark.slow
def test_join_uneven_inputs_pads_as_it_is_told_and_the_last_sample_with_a_warning(ranks):
    shares = [(inside, after) for inside, after, _ in ranks.run(2, batches_inside_join_uneven_inputs, 7, False)]
    assert shares == [([4, 5], [4, 5]), ([6], [6, 0])]
    for even_batches in (True, None):
        assert [inside for inside, *_ in ranks.run(2, batches_inside_join_uneven_inputs, 7, even_batches)][1] == [6, 0]
    (first, *_, lines), (second, *_) = ranks.run(2, batches_inside_join_uneven_inputs, 5, False)
    assert (first, second) == ([4], [0]) and "fewer samples than ranks (1 for 2); it is padded" in lines[0]


def several_rows(samples):
    return torch.tensor([*samples, *samples])


def of_different_lengths(samples):
    return {"values": torch.tensor(samples), "pairs": several_rows(samples)}


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("collate", [several_rows, of_different_lengths])
def test_a_loss_counts_the_samples_where_a_collate_fn_makes_several_rows_of_each(ranks, collate, kind):
    for losses, values in ranks.run(2, losses_of_rows, collate, kind):
        assert losses == [*[1.5] * 4, *[5.5] * 4, 8.0, 9.0], "the last batch has one sample a rank"
        assert values == [float(value) for value in range(10)]
    for losses, values in ranks.run(2, losses_of_rows, collate, kind, 9):
        assert losses[8:] == [8.0] and values == [float(value) for value in range(9)]


def losses_of_rows(collate, kind, samples=10):
    """A repeated mean of each pair of ranks' batches, and one value for each sample."""
    data = Flow(samples) if kind == "stream" else torch.arange(samples)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    losses, values = [], []
    for batch in accelerator.prepare(DataLoader(data, batch_size=2, collate_fn=collate)):
        rows = (batch["values"] if isinstance(batch, dict) else batch.chunk(2)[0]).float()
        loss = accelerator.reduce(rows.sum(), "sum") / 4 if len(rows) == 2 else rows.mean()
        losses += accelerator.gather_for_metrics(loss.repeat(2)).tolist()
        values += accelerator.gather_for_metrics(rows.clone()).tolist()
    return losses, values


def test_a_repeated_loss_of_a_short_batch_counts_its_samples_in_one_process(ranks):
    assert ranks.run(1, gathered, losses_of_whole_batches) == [[4, 4, 4, 4, 1]]

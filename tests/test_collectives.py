"""Collectives on nested structures, on live ranks, and agreement among ranks."""

from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist

from shardkit.distributed import collectives, control, gradients
from shardkit.errors import UsageError

Pair = namedtuple("Pair", "left right")
DTYPES = [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def gather_nested():
    rank = dist.get_rank()
    data = {"pair": Pair(torch.tensor(rank), [torch.tensor([[rank, 1]])]), "ordered": OrderedDict(a=torch.ones(2))}
    return collectives.gather(data)


def test_gather_keeps_the_structure_and_the_order_of_ranks(ranks):
    for found in ranks.run(2, gather_nested):
        assert isinstance(found["pair"], Pair) and isinstance(found["ordered"], OrderedDict)
        assert found["pair"].left.tolist() == [0, 1]
        assert found["pair"].right[0].tolist() == [[0, 1], [1, 1]]
        assert found["ordered"]["a"].tolist() == [1, 1, 1, 1]


def gathered_with_no_backend_for_host_memory():
    """As in a script that has started its group with NCCL alone. What ranks compare is in host memory all the same."""
    found, used = dist.get_backend_config, []
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda value, *others, group=None: (used.append(group), all_reduce(value, *others, group=group))[
        1
    ]
    try:
        gathered = collectives.gather(torch.tensor([dist.get_rank()]))
        return gathered.tolist(), [group is not dist.group.WORLD for group in used if group is control.on_cpu()]
    finally:
        dist.get_backend_config, dist.all_reduce = found, all_reduce


def test_ranks_compare_what_they_gather_without_waiting_for_their_devices(ranks):
    assert ranks.run(2, gathered_with_no_backend_for_host_memory) == [([0, 1], [True])] * 2


def every_dtype():
    rank = dist.get_rank()
    found = []
    for dtype in DTYPES:
        mine = torch.tensor([[rank], [1]]).to(dtype)
        found.append((collectives.gather(mine), collectives.broadcast(mine, from_process=1)))
    return [(str(g.dtype), g.real.to(torch.float64).tolist(), b.real.to(torch.float64).tolist()) for g, b in found]


def test_every_dtype_is_gathered_and_broadcast(ranks):
    for answers in ranks.run(2, every_dtype):
        for dtype, (name, gathered, broadcast) in zip(DTYPES, answers, strict=True):
            assert name == str(dtype)
            assert gathered == [[0], [1], [1], [1]]
            assert broadcast == [[1], [1]]


def conjugated():
    """Views that torch has not computed yet."""
    mine = torch.tensor([1 + 2j, 3 + 4j]) * (1 + dist.get_rank())
    views = [mine.conj(), torch._neg_view(mine.real.clone())]
    return [[collectives.gather(one).tolist(), collectives.broadcast(one).tolist()] for one in views]


def test_conjugate_views_are_gathered_by_their_values(ranks):
    expected = [[[1 - 2j, 3 - 4j, 2 - 4j, 6 - 8j], [1 - 2j, 3 - 4j]], [[-1, -3, -2, -6], [-1, -3]]]
    assert ranks.run(2, conjugated) == [expected] * 2


def one_value_of_a_row():
    """Of a last batch with one sample for each rank."""
    logits = torch.arange(5.0).reshape(1, 5) + 10 * dist.get_rank()
    return [collectives.gather(logits[:, 1]).tolist(), collectives.broadcast(logits[:, 1], from_process=1).tolist()]


def test_one_value_cut_out_of_a_row_is_gathered_and_broadcast(ranks):
    assert ranks.run(2, one_value_of_a_row) == [[[1, 11], [11]]] * 2


SPARSE, RAGGED = "sparse", "ragged"
LAYOUTS = {
    SPARSE: lambda: torch.eye(2).to_sparse(),
    RAGGED: lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


def refused(kind):
    with pytest.raises(UsageError) as caught:
        collectives.gather(LAYOUTS[kind]())
    summed = collectives.reduce(LAYOUTS[kind]()).to_dense().tolist() if kind == SPARSE else None
    return str(caught.value), summed


@pytest.mark.parametrize(
    ("kind", "got", "summed"),
    [(SPARSE, "torch.float32, torch.sparse_coo", [[2, 0], [0, 2]]), (RAGGED, "a nested tensor", None)],
)
def test_tensors_that_are_not_dense_are_refused(ranks, kind, got, summed):
    for text, total in ranks.run(2, refused, kind):
        assert f"a collective takes dense tensors (got {got}); make it one: to_dense(), to_padded_tensor(0)." in text
        assert total == summed


def from_another_rank():
    with pytest.raises(UsageError) as tensor:
        collectives.broadcast(torch.ones(1), from_process=2)
    with pytest.raises(UsageError) as objects:
        collectives.broadcast_object_list([1], from_process=-1)
    return str(tensor.value), str(objects.value)


def test_a_rank_that_there_is_not_is_refused(ranks):
    text = "broadcast: from_process is not a rank of this run (got {}); give a number from 0 to 1."
    assert ranks.run(2, from_another_rank) == [(text.format(2), text.format(-1))] * 2


def uneven():
    mine = torch.arange(2 + dist.get_rank())
    with pytest.raises(UsageError) as caught:
        collectives.gather({"x": mine})
    padded = collectives.pad_across_processes(mine, pad_index=-1)
    front = collectives.pad_across_processes(mine, pad_index=-1, pad_first=True)
    return str(caught.value), collectives.gather(padded).tolist(), collectives.gather(front).tolist()


def test_uneven_shapes_are_the_same_error_on_all_ranks_and_padding_mends_them(ranks):
    for message, padded, front in ranks.run(2, uneven):
        assert message == (
            "gather: ranks have different tensors (rank 0: {x: int64[2]}; rank 1: {x: int64[3]}); "
            "make them equal, for instance with accelerator.pad_across_processes(...); a list of samples that differ: "
            "gather_for_metrics(samples, use_gather_object=True)."
        )
        assert padded == [0, 1, -1, 0, 1, 2]
        assert front == [-1, 0, 1, 0, 1, 2]


OF_RANKS = {
    "dims": (torch.zeros(2, 3), torch.zeros(2)),
    "structures": ([torch.zeros(2)] * 2, [torch.zeros(2)]),
    "no tensor": (torch.zeros(2, 3), "text"),
}


def padded_unlike(kind):
    with pytest.raises(UsageError) as error:
        collectives.pad_across_processes(OF_RANKS[kind][collectives.rank()], 1 if kind == "dims" else 0)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dims", "ranks have different tensors (got lengths [3]; [None] by rank)"),
        ("structures", "ranks have different tensors (got lengths [2, 2]; [2] by rank)"),
        ("no tensor", "a collective takes tensors in dicts, lists and tuples (got str)"),
    ],
)
def test_padding_of_other_tensors_on_one_rank_is_an_error_on_all(ranks, kind, text):
    first, second = ranks.run(2, padded_unlike, kind)
    assert text in first and first == second


def not_tensors():
    data = {"x": "text"} if dist.get_rank() == 1 else {"x": torch.ones(1)}
    with pytest.raises(UsageError) as caught:
        collectives.gather(data)
    return str(caught.value)


def test_something_that_is_no_tensor_on_one_rank_is_an_error_on_all(ranks):
    messages = ranks.run(2, not_tensors)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: gather: a collective takes tensors in dicts, lists and tuples (got str)")


def reductions():
    rank = dist.get_rank()
    mine = {"f": torch.tensor([1.0, 2.0]) * (rank + 1), "i": torch.tensor(rank), "b": torch.tensor([True, rank == 0])}
    mean, total = collectives.reduce(mine, "mean"), collectives.reduce(mine, "sum", scale=2)
    assert mine["f"].tolist() == [1.0 * (rank + 1), 2.0 * (rank + 1)]
    return [{key: value.tolist() for key, value in found.items()} for found in (mean, total)]


def test_reduce_is_mean_or_sum_and_leaves_what_it_was_given(ranks):
    for mean, total in ranks.run(2, reductions):
        assert mean == {"f": [1.5, 3.0], "i": 0.5, "b": [1.0, 0.5]}
        assert total == {"f": [6.0, 12.0], "i": 2, "b": [4, 2]}


def small_dtypes():
    rank = dist.get_rank()
    of_ranks = {
        "int8": torch.tensor([100, rank], dtype=torch.int8),
        "int16": torch.tensor([30_000, rank], dtype=torch.int16),
        "float16": torch.tensor([60_000, rank], dtype=torch.float16),
        "int64": torch.tensor([2**24 + 1, rank]),
    }
    found = {kind: collectives.reduce(of_ranks, kind) for kind in ("sum", "mean", "max")}
    return {kind: {name: (str(one.dtype), one.tolist()) for name, one in of.items()} for kind, of in found.items()}


def test_small_dtypes_are_reduced_with_room_for_their_sums(ranks):
    for found in ranks.run(2, small_dtypes):
        assert found["sum"] == {
            "int8": ("torch.int64", [200, 1]),
            "int16": ("torch.int64", [60_000, 1]),
            "float16": ("torch.float16", [float("inf"), 1]),
            "int64": ("torch.int64", [2**25 + 2, 1]),
        }
        assert found["mean"]["int16"] == ("torch.float32", [30_000, 0.5])
        assert found["mean"]["float16"] == ("torch.float16", [60_000, 0.5])
        assert found["max"] == {
            "int8": ("torch.int8", [100, 1]),
            "int16": ("torch.int16", [30_000, 1]),
            "float16": ("torch.float16", [60_000, 1]),
            "int64": ("torch.int64", [2**24 + 1, 1]),
        }


def with_nan_on(bad):
    values = torch.full((20,), float("nan") if dist.get_rank() == bad else 1.0)
    return [int(collectives.reduce(values, kind).isnan().sum()) for kind in ("max", "min", "sum")]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nan_of_any_rank_is_in_a_max_and_a_min(ranks, bad):
    assert ranks.run(3, with_nan_on, bad) == [[20, 20, 20]] * 3


def gradient_of_all_pairs(mine, whole):
    """d/dmine of the norm of the first and second derivatives of a loss over all samples, which every rank computes."""
    mine = {"x": mine["x"].clone().requires_grad_(), "one": mine["one"].clone().requires_grad_()}
    x, ones = whole(mine)["x"], whole(mine)["one"]
    loss = (x @ x.t()).pow(2).logsumexp(1).sum() * ones.float().prod()
    (first,) = torch.autograd.grad(loss, mine["x"], create_graph=True)
    if dist.is_initialized():  # each rank's loss is the whole one
        first = first / dist.get_world_size()
    (first.pow(2).sum()).backward()
    return loss.item(), first.detach(), mine["x"].grad, mine["one"].grad


def all_samples():
    torch.manual_seed(0)
    return torch.randn(6, 4, dtype=torch.float64), torch.tensor([1.5, 0.5, 2.0], dtype=torch.bfloat16)


def of_own_samples():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, ones = all_samples()
    own = {"x": x.chunk(size)[rank], "one": ones[rank]}
    loss, first, second, one = gradient_of_all_pairs(own, gradients.gather_with_gradients)
    return loss, first.tolist(), second.tolist(), one.item(), str(one.dtype)


def test_a_loss_of_all_samples_has_the_gradients_and_second_derivatives_of_one_process(ranks):
    x, ones = all_samples()
    loss, first, second, one = gradient_of_all_pairs({"x": x, "one": ones}, lambda data: data)
    found = ranks.run(3, of_own_samples)
    assert [rank[0] for rank in found] == [pytest.approx(loss)] * 3
    assert [row for rank in found for row in rank[1]] == [pytest.approx(row) for row in first.tolist()]
    assert [row for rank in found for row in rank[2]] == [pytest.approx(row) for row in second.tolist()]
    assert [rank[3] for rank in found] == pytest.approx(one.float().tolist(), rel=0.01)
    assert {rank[4] for rank in found} == {"torch.bfloat16"}


def in_another_order():
    """The same values, on one rank by columns."""
    values = torch.arange(6.0).reshape(2, 3)
    return collectives.reduce(values if dist.get_rank() else values.t().contiguous().t()).tolist()


def test_what_lies_in_memory_in_another_order_on_each_rank_is_reduced_by_its_values(ranks):
    assert ranks.run(2, in_another_order) == [[[0, 2, 4], [6, 8, 10]]] * 2


def objects():
    rank = dist.get_rank()
    listed = collectives.gather_object([{"rank": rank}, "x"])
    single = collectives.gather_object({"rank": rank})
    return listed, single, collectives.broadcast_object_list([rank, "a" * rank], from_process=1)


def test_objects_are_gathered_and_broadcast(ranks):
    for listed, single, broadcast in ranks.run(2, objects):
        assert listed == [{"rank": 0}, "x", {"rank": 1}, "x"]
        assert single == [{"rank": 0}, {"rank": 1}]
        assert broadcast == [1, "a"]


def padded_tail():
    rank = dist.get_rank()
    data = {"x": torch.arange(2) + 2 * rank, "loss": torch.tensor(float(rank))}
    found = collectives.gather_real(data, collectives.Real(3, 2))
    whole = collectives.gather_real(data["x"], None)
    listed = collectives.gather_real([f"{rank}a", f"{rank}b"], collectives.Real(3, 2))
    return found["x"].tolist(), found["loss"].tolist(), whole.tolist(), listed


def test_padding_is_cut_off_but_a_value_per_rank_stays(ranks):
    expected = ([0, 1, 2], [0.0, 1.0], [0, 1, 2, 3], ["0a", "0b", "1a"])
    assert ranks.run(2, padded_tail) == [expected] * 2


def test_alone_what_is_given_can_be_changed_afterwards():
    """As on several ranks, where it is a copy."""
    for collective in (collectives.gather, collectives.broadcast, collectives.reduce):
        given = torch.nn.Parameter(torch.ones(2))
        found = collective(given)
        given.data.zero_()
        assert found.tolist() == [1, 1] and not found.requires_grad


def test_alone_everything_is_this_rank():
    x = torch.tensor([1, 2])
    assert collectives.gather(x).tolist() == [1, 2]
    assert collectives.gather(torch.tensor(3)).tolist() == [3]
    assert collectives.reduce({"x": x}, "mean")["x"].tolist() == [1.0, 2.0]
    assert collectives.broadcast(x, from_process=1).tolist() == [1, 2]
    assert collectives.gather_object([1]) == [1]
    assert collectives.pad_across_processes(x) is x
    collectives.wait_for_everyone()
    with pytest.raises(UsageError, match=r"got str"):
        collectives.gather("x")
    with pytest.raises(UsageError, match=r"unknown reduction \(got 'median'\); use "):
        collectives.reduce(x, "median")  # type: ignore[arg-type]

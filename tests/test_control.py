"""How ranks agree: small values over rank 0, long ones too, and what happens where a rank does not answer."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from shardkit.distributed import control
from shardkit.errors import MachineError
from tests import forked


def disagreement():
    rank, everyone = dist.get_rank(), control.start()
    everyone.agree(None)
    with pytest.raises(MachineError) as one:
        everyone.agree("no GPU" if rank == 2 else None, error=MachineError)
    with pytest.raises(MachineError) as some:
        everyone.agree(["disk full", None, "disk full", None][rank], error=MachineError)
    with pytest.raises(MachineError) as all_of_them:
        everyone.agree("no such file", error=MachineError)
    return str(one.value), str(some.value), str(all_of_them.value), everyone.any(rank == 1), everyone.any(False)


@pytest.mark.slow
def test_what_one_rank_finds_all_ranks_raise(ranks):
    expected = ("rank 2: no GPU", "ranks 0, 2: disk full", "no such file", True, False)
    assert ranks.run(4, disagreement) == [expected] * 4


def values_of_all_lengths():
    """One packet, just one packet, many packets; longer on some ranks than on others."""
    rank, everyone = dist.get_rank(), control.start()
    found = []
    for length in (0, 1000, 1014, 1015, 1016, 1017, 5000, 300_000):
        texts = everyone.exchange({"rank": rank, "text": "é" * (length // 2) if rank == 1 else "x" * (length % 7)})
        found.append([(one["rank"], len(one["text"])) for one in texts])
        assert everyone.share([rank, "y" * length]) == [0, "y" * length]
    return found


def test_exchange_takes_any_json_of_any_length(ranks):
    results = ranks.run(3, values_of_all_lengths)
    assert results[0] == results[1] == results[2]
    assert results[0][-1] == [(0, 300_000 % 7), (1, 150_000), (2, 300_000 % 7)]


def sums_asked_for_early():
    rank, everyone = dist.get_rank(), control.start()
    answers = [everyone.sum_later([rank, 1, number]) for number in range(3)]
    gathered = everyone.exchange(rank)
    dist.all_reduce(torch.ones(1))
    return gathered, [answer() for answer in reversed(answers)]


def test_sums_that_are_asked_for_early_are_answered_beside_other_exchanges(ranks):
    assert ranks.run(3, sums_asked_for_early) == [([0, 1, 2], [[3, 3, 6], [3, 3, 3], [3, 3, 0]])] * 3
    assert control.start().sum_later([4])() == [4]


def attempts():
    rank, everyone = dist.get_rank(), control.start()
    good = everyone.attempt(lambda: rank * 10, answer=lambda found: found, judge=sum)
    bad = everyone.attempt(lambda: 1 // (rank - 1), answer=lambda found: found, judge=sum)
    odd = everyone.attempt(lambda: 1, judge=lambda answers: 1 // 0)
    return good, bad.own, bad.verdict, bad.failure, odd.failure


def test_an_attempt_that_fails_on_one_rank_is_told_to_all(ranks):
    for rank, (good, own, verdict, failure, odd) in enumerate(ranks.run(3, attempts)):
        assert (good.own, good.verdict, good.failure) == (rank * 10, 30, "")
        assert good.answers == ([0, 10, 20] if rank == 0 else [])
        assert (own, verdict) == ([-1, None, 1][rank], None)
        assert failure.startswith("rank 1 (host ")
        assert failure.endswith(" by zero")
        assert "by zero" in odd


def one_is_late():
    everyone = control.start(0.5)
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return "slept"
    began = time.monotonic()
    try:
        everyone.exchange(1)
    except control.LostRank as error:
        return str(error) if time.monotonic() - began < 1.4 else "too late"
    return "answered"


@pytest.mark.slow
def test_who_does_not_answer_in_time_is_lost():
    outcome = forked.run(2, one_is_late)[0]
    assert outcome.value.startswith("a rank died or did not answer in time (Timed out waiting 500ms ")


def one_dies():
    everyone = control.start()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(control.LostRank) as caught:
        everyone.exchange(1)
    return str(caught.value)


@pytest.mark.slow
def test_who_has_died_is_lost():
    outcome = forked.run(2, one_dies)[0]
    reason = re.fullmatch(r"a rank died or did not answer in time \(([^()]*)\)", outcome.value).group(1)
    assert reason.startswith(("Connection closed by peer", "Read error")) and "crashing" not in reason


def no_new_connections():
    before = len(dist.distributed_c10d._world.pg_map)
    control.start(1.0).exchange(1)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_agreements_use_the_connections_that_are_there(ranks):
    assert ranks.run(2, no_new_connections) == [0, 0]


def test_alone_it_agrees_with_itself():
    alone = control.start()
    assert (alone.exchange(torch.pi), alone.share("x"), alone.any(True)) == ([torch.pi], "x", True)
    assert alone.attempt(lambda: 3, judge=len).own == 3
    with pytest.raises(MachineError, match=r"^no GPU$"):
        alone.agree("no GPU", error=MachineError)

"""Sequences that ranks share: losses, gradients and weights are those of one process with whole sequences, and what
cannot be split is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, nll_loss, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator
from shardkit.config.checks import problems
from shardkit.config.schema import Config
from shardkit.distributed import control
from shardkit.errors import UsageError
from shardkit.sharding.context_parallel.groups import build_group
from shardkit.sharding.context_parallel.region import Region
from tests.ranks import log_lines

VOCABULARY, WIDTH, HEADS, POSITIONS = 23, 16, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tokens and their positions (batch, positions) -> logits (batch, positions, vocabulary)."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embed(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def settings(strategy="DDP", context=2, **more):
    shardkit = {"mesh": {"context_size": context}, **more.pop("shardkit", {})}
    if strategy == "HYBRID_SHARD":
        shardkit["mesh"]["replicate_size"] = 2
    fsdp = {"fsdp_sharding_strategy": strategy, "fsdp_transformer_layer_cls_to_wrap": "Block", **more}
    kind = {"distributed_type": "MULTI_CPU"} if strategy == "DDP" else {"distributed_type": "FSDP", "fsdp_config": fsdp}
    return {**kind, "use_cpu": True, "shardkit": shardkit}


def samples(count=12):
    """Tokens and targets. Of each target the first half is ignored, as a prompt is."""
    tokens = torch.randint(VOCABULARY, (count, POSITIONS + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, : POSITIONS // 2] = -100
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def parts(accelerator, global_batch=4):
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    readers = accelerator.num_processes // accelerator.config.shardkit.mesh.context_size
    loader = DataLoader(samples(), global_batch // readers, shuffle=True, generator=torch.Generator().manual_seed(2))
    return accelerator.prepare(model, optimizer, loader)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(accelerator, model, optimizer, loader, epochs=2, evaluates=True):
    """Losses, and what an evaluation after each epoch has predicted."""
    losses, predicted = [], []
    for _ in range(epochs):
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                with accelerator.context_parallel(tokens, targets) as (tokens, targets):
                    loss = loss_of(model, tokens, targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if evaluates:
            model.eval()
            with torch.no_grad():
                found = [accelerator.gather_for_metrics(model(tokens).sum((1, 2))) for tokens, _ in loader]
            predicted.append(torch.cat(found))
            model.train()
    return losses, predicted


def trained(given):
    accelerator = Accelerator(config=given)
    objects = parts(accelerator)
    losses, predicted = train(accelerator, *objects)
    return losses, [one.tolist() for one in predicted], accelerator.get_state_dict(objects[0]), accelerator.counters


def in_one_process(**shardkit):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True, "shardkit": shardkit})
    objects = parts(accelerator)
    losses, predicted = train(accelerator, *objects)
    return losses, predicted, accelerator.get_state_dict(objects[0]), accelerator.counters


STRATEGIES = ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
RUNS = [(2, settings(strategy)) for strategy in STRATEGIES]
RUNS += [
    (2, settings("FULL_SHARD", fsdp_activation_checkpointing=True)),
    (2, settings("DDP", shardkit={"gradient_accumulation_steps": 3})),
    (4, settings("FULL_SHARD")),
    (4, settings("HYBRID_SHARD", shardkit={"gradient_accumulation_steps": 2})),
    (4, settings("DDP", context=4)),
]


@pytest.mark.parametrize(
    ("world", "given"), [pytest.param(*each, marks=pytest.mark.slow if each[0] == 4 else ()) for each in RUNS]
)
def test_training_equals_one_process(ranks, alone, world, given):
    steps = given["shardkit"].get("gradient_accumulation_steps", 1)
    losses, predicted, weights, counters = in_one_process(gradient_accumulation_steps=steps)
    for found_losses, found, found_weights, found_counters in ranks.run(world, trained, given):
        torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-6)
        assert found_counters == counters
        for own, expected in zip(found, predicted, strict=True):
            torch.testing.assert_close(torch.tensor(own).sort()[0], expected.sort()[0], rtol=1e-4, atol=1e-4)
        for name in found_weights or {}:
            torch.testing.assert_close(found_weights[name], weights[name], rtol=1e-4, atol=1e-5)


def resumed(folder, saves, given):
    accelerator = Accelerator(config=given)
    model, optimizer, loader = parts(accelerator)
    if saves:
        train(accelerator, model, optimizer, loader, epochs=1, evaluates=False)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    losses, _ = train(accelerator, model, optimizer, loader, epochs=1, evaluates=False)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("context_after", [1, 2])
def test_a_checkpoint_goes_on_with_another_number_of_ranks_for_each_sequence(ranks, tmp_path, context_after):
    folder = str(tmp_path / "state")
    expected = ranks.run(2, resumed, folder, True, settings("FULL_SHARD"))[0]
    world = 2 * context_after  # two readers after, where one was before
    found = ranks.run(world, resumed, folder, False, settings("FULL_SHARD", context=context_after))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def read_unseeded():
    accelerator = Accelerator(config=settings())
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(samples(), 2, shuffle=True))
    return [tokens.tolist() for tokens, _ in loader]


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_of_a_group_read_the_same_samples_without_a_seed(ranks, world):
    found = ranks.run(world, read_unseeded)
    assert found[::2] == found[1::2] and (world == 2 or found[0] != found[2])


def split_by_rank(each):
    accelerator = Accelerator(config=settings())
    stream = pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(16))}).to_iterable_dataset(4)
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(stream, accelerator.process_index // each, accelerator.num_processes // each)
    try:
        return [batch["x"].tolist() for batch in accelerator.prepare(DataLoader(part, 4))]
    except UsageError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_stream_is_split_by_group(ranks, world):
    pytest.importorskip("datasets")
    assert all("accelerator.process_index // 2, accelerator.num" in text for text in ranks.run(world, split_by_rank, 1))
    found = ranks.run(world, split_by_rank, 2)
    values = [value for own in found[::2] for batch in own for value in batch]
    assert found[::2] == found[1::2] and sorted(values) == list(range(16))


# ---- attention and losses ----


def region(size):
    """The region of a group of all ranks."""
    config = Config.model_validate({"num_processes": size, "shardkit": {"mesh": {"context_size": size}}})
    process = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})._run.process
    return Region(build_group(config, process), control.start())


def attentions():
    """(heads, key heads, mask of the whole sequence, of the slices, other arguments)."""
    torch.manual_seed(4)
    padding = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    padding[0, ..., -3:] = False
    return {
        "causal": (4, 4, None, None, {"is_causal": True}),
        "both ways": (4, 4, None, None, {"scale": 0.3}),
        "one key head": (4, 1, None, None, {"is_causal": True, "enable_gqa": True}),
        "two key heads": (8, 2, None, None, {"is_causal": True, "enable_gqa": True}),
        "padding": (4, 4, padding, padding, {}),
        "a mask of all": (4, 4, (one := torch.randn(8, 8)), one, {}),
        "a mask by head": (4, 4, (one := torch.randn(2, 4, 8, 8)), one, {}),
    }


def attend(size, name):
    here, (heads, key_heads, _, mask, named) = region(size), attentions()[name]
    torch.manual_seed(5)
    wholes = [torch.randn(2, count, 8, 6, requires_grad=True) for count in (heads, key_heads, key_heads)]
    if mask is not None and mask.size(-2) == 1:
        mask = here.group.part(mask, -1)
    with here.split(wholes, 2) as slices:
        found = scaled_dot_product_attention(*slices, attn_mask=mask, **named)  # imported, as some scripts do
    found.pow(2).sum().backward()  # of the slice; gradients of the whole ones are the sum over ranks
    return found.tolist(), [one.grad.tolist() for one in wholes]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", attentions())
def test_attention_equals_torchs_over_the_whole_sequence(ranks, size, name):
    heads, key_heads, mask, _, named = attentions()[name]
    torch.manual_seed(5)
    wholes = [torch.randn(2, count, 8, 6, requires_grad=True) for count in (heads, key_heads, key_heads)]
    expected = F.scaled_dot_product_attention(*wholes, attn_mask=mask, **named)
    expected.pow(2).sum().backward()
    answers = ranks.run(size, attend, size, name)
    torch.testing.assert_close(torch.cat([torch.tensor(found) for found, _ in answers], 2), expected)
    for number, whole in enumerate(wholes):
        torch.testing.assert_close(sum(torch.tensor(gradients[number]) for _, gradients in answers), whole.grad)


HELD = (cross_entropy, nll_loss)
"""As a script holds functions in default arguments and in what it makes before the Accelerator."""
LOSSES = [{}, {"weight": "random"}, {"label_smoothing": 0.1}, {"ignore_index": 3}, {"reduction": "sum"}]


def loss_of_slice(named, function):
    here = region(2)
    torch.manual_seed(6)
    logits, targets = torch.randn(2, 8, 5, requires_grad=True), torch.randint(5, (2, 8))
    targets[:, :3] = named.get("ignore_index", -100)
    if "weight" in named:
        named = {**named, "weight": torch.rand(5)}
    with here.split([logits, targets], 1) as (own, own_targets):
        if function == "linear":
            loss = F.linear_cross_entropy(own.flatten(0, 1), torch.eye(5), own_targets.flatten(), **named)
        elif function.startswith("nll_loss"):
            mean = HELD[1] if "held" in function else F.nll_loss
            loss = mean(own.flatten(0, 1).log_softmax(-1), own_targets.flatten(), **named)
        else:
            by_name = {"called": F.cross_entropy, "imported": cross_entropy, "held": HELD[0]}
            loss = by_name[function](own.flatten(0, 1), own_targets.flatten(), **named)
    loss.backward()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **named)
    (gradient,) = torch.autograd.grad(expected, logits)
    return float(loss.detach()), float(expected.detach()), logits.grad.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("function", "named"),
    [(function, named) for function in ("called", "imported", "held") for named in LOSSES]
    + [(name, named) for name in ("nll_loss", "nll_loss, held") for named in LOSSES if "label_smoothing" not in named],
)
def test_the_mean_cross_entropy_is_that_of_the_whole_sequence(ranks, named, function):
    answers = ranks.run(2, loss_of_slice, named, function)
    is_mean = "reduction" not in named
    for loss, expected, _, _ in answers:
        assert not is_mean or loss == pytest.approx(expected, rel=1e-5)
    if not is_mean:  # a sum stays that of the slice
        assert sum(loss for loss, *_ in answers) == pytest.approx(answers[0][1], rel=1e-5)
    summed = sum(torch.tensor(gradient) for *_, gradient, _ in answers)
    torch.testing.assert_close(summed / 2 if is_mean else summed, torch.tensor(answers[0][-1]))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no linear_cross_entropy")
def test_the_mean_of_torchs_fused_cross_entropy_is_that_of_the_whole_sequence(ranks):
    for loss, expected, _, _ in ranks.run(2, loss_of_slice, {}, "linear"):
        assert loss == pytest.approx(expected, rel=1e-5)


def mean_in_16_bits():
    here = region(2)
    logits, targets = torch.zeros(2, 8, 5, dtype=torch.float16), torch.ones(2, 8, dtype=torch.long)
    logits[..., 0] = 2e4
    with here.split([logits, targets], 1) as (own, own_targets):
        return float(F.cross_entropy(own.flatten(0, 1), own_targets.flatten()))


def test_a_mean_in_16_bits_does_not_overflow(ranks):
    assert ranks.run(2, mean_in_16_bits) == [2e4, 2e4]


def preferred(given, sums):
    """The loss of preferences between sequences, by their log-probabilities, and its gradients."""
    accelerator = Accelerator(config=given)
    torch.manual_seed(0)
    model = accelerator.prepare(Decoder())
    tokens, targets = samples()[:4]
    with log_lines() as lines, accelerator.context_parallel(tokens, targets) as (tokens, targets):
        by_token = model(tokens).log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        of_slices = by_token.mul(targets != -100).sum(1)
        better, worse = (accelerator.sum_slices(of_slices) if sums else of_slices).chunk(2)
        loss = -F.logsigmoid(better - worse).mean()
        accelerator.backward(loss)
    assert accelerator.sum_slices(loss) is loss  # outside of the region
    told = [line for line in lines if "have different losses" in line]
    return loss.item(), [parameter.grad.norm().item() for parameter in model.parameters()], told


def test_a_loss_of_sums_over_sequences_equals_one_process(ranks, alone):
    loss, gradients, _ = preferred({"distributed_type": "NO", "use_cpu": True}, True)
    for found, own, told in ranks.run(2, preferred, settings(), True):
        assert found == pytest.approx(loss, rel=1e-5) and not told
        torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-5)


def test_a_loss_of_slices_is_told(ranks):
    (_, _, (line,)), (_, _, others) = ranks.run(2, preferred, settings(), False)
    assert not others and "give to accelerator.sum_slices" in line


def with_a_teacher(is_prepared):
    accelerator = Accelerator(config=settings("FULL_SHARD", fsdp_activation_checkpointing=True))
    model, teacher, (tokens, targets) = parts(accelerator)[0], Decoder(), samples()[:4]
    if is_prepared:
        teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    with log_lines() as lines, accelerator.context_parallel(tokens, targets) as (tokens, targets):
        accelerator.backward(loss_of(model, tokens, targets))
        with torch.no_grad():
            teacher(tokens)
    return [line for line in lines if "outside of a prepared model's forward" in line]


@pytest.mark.slow
def test_a_model_in_the_region_that_was_not_prepared_is_told(ranks):
    assert [len(lines) for lines in ranks.run(2, with_a_teacher, False)] == [1, 0]
    assert ranks.run(2, with_a_teacher, True) == [[], []]


# ---- groups and regions ----


def timeout_of_group():
    accelerator = Accelerator(config=settings(shardkit={"launch": {"process_group_timeout_s": 321}}))
    own = accelerator._run.region.group.process_group._get_backend(torch.device("cpu"))
    return own.options._timeout.total_seconds()


def test_a_group_has_the_configured_timeout(ranks):
    assert ranks.run(2, timeout_of_group) == [321, 321]


def regions():
    accelerator = Accelerator(config=settings())
    model = parts(accelerator)[0]
    torch.manual_seed(accelerator.process_index)  # each rank draws its own
    tokens, times, found = torch.randint(VOCABULARY, (2, POSITIONS)), torch.rand(2), {}
    with accelerator.context_parallel({"tokens": tokens, "times": times, "name": "a"}) as batch:
        found["kept"] = batch["name"] == "a"
        found["times"], found["own"] = batch["times"].tolist(), batch["tokens"].tolist()
    with accelerator.context_parallel(tokens.unsqueeze(-1), times, torch.tensor(1.0), dim=-2) as (_, kept, number):
        found["kept"] &= kept.shape == (2,) and number == 1
    with accelerator.context_parallel(tokens.T, dim=0) as alone:
        found["first dim"] = alone.T.tolist()
    with accelerator.context_parallel(tokens, dim=-1) as alone:
        found["last dim"] = alone.tolist()
    for kept in ((), (tokens,)):
        whole = tokens.clone()
        with accelerator.maybe_context_parallel([tokens], [1], kept):
            found["in place"] = tokens.tolist()
            accelerator.backward(model(tokens).sum())
        found["after"] = found.get("after", True) and torch.equal(tokens, whole) is not bool(kept)
    found["rank"] = accelerator.context_parallel_rank
    return found


def test_each_rank_has_its_slice_of_what_the_first_rank_has(ranks):
    torch.manual_seed(0)
    first, times = torch.randint(VOCABULARY, (2, POSITIONS)), torch.rand(2).tolist()
    for rank, found in enumerate(ranks.run(2, regions)):
        assert found["kept"] and found["times"] == times and found["after"] and found["rank"] == rank
        for name in ("own", "first dim", "last dim", "in place"):
            assert found[name] == first[:, 8 * rank : 8 * rank + 8].tolist(), name


def test_one_process_has_whole_sequences(alone):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    tokens = torch.zeros(2, 5, dtype=torch.long)  # of any length
    with accelerator.context_parallel(tokens) as one, accelerator.maybe_context_parallel([tokens], [1]):
        assert one is tokens and tokens.shape == (2, 5)
    with accelerator.context_parallel(tokens, "a") as pair:
        assert pair == (tokens, "a")


def by_hand(after, whole_model):
    accelerator = Accelerator(config=settings("FULL_SHARD", fsdp_activation_checkpointing=not whole_model))
    model, _, loader = parts(accelerator)
    tokens, targets = next(iter(loader))
    recomputed = partial(checkpoint, model, use_reentrant=False) if whole_model else model
    with accelerator.context_parallel(tokens, targets) as (own, own_targets):
        loss = loss_of(recomputed, own, own_targets)
        if not after:
            loss.backward()
    if after:
        loss.backward()
    with torch.no_grad():
        model(tokens)  # whole sequences again
    loss_of(model, tokens, targets).backward()
    return [parameter.grad.full_tensor().norm().item() for parameter in model.parameters()]


class Recomputing(Block):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def with_a_forward_between(recomputes, is_between):
    """Gradients of a loss in a region, where another forward of whole sequences lies before the backward."""
    accelerator = Accelerator(config=settings())
    model, (tokens, targets) = Decoder(), samples()[:4]
    torch.manual_seed(0)
    model.blocks[0] = Block() if recomputes is None else Recomputing(recomputes)
    model = accelerator.prepare(model)
    with accelerator.context_parallel(tokens, targets) as own:
        loss = loss_of(model, *own)
    if is_between:
        loss_of(model, tokens, targets)
    accelerator.backward(loss)
    return [parameter.grad.norm().item() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_recomputes_each_checkpoint_as_its_forward_was(ranks, use_reentrant):
    expected = ranks.run(2, with_a_forward_between, None, False)[0]
    for found in ranks.run(2, with_a_forward_between, use_reentrant, True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("whole_model", [False, True])
def test_a_backward_recomputes_in_the_region_also_after_it(ranks, whole_model):
    inside, after = (ranks.run(2, by_hand, after, whole_model)[0] for after in (False, True))
    torch.testing.assert_close(inside, after)


def of_parts(how):
    """Losses of tensors that a script makes of slices: others, or the rows of several micro-batches."""
    accelerator = Accelerator(config=settings())
    model = parts(accelerator)[0]
    tokens, targets = samples()[:4]
    with accelerator.context_parallel(tokens, targets) as (own, own_targets):
        if how == "copied":
            return [loss_of(model, own.clone(), own_targets).item()]
        return [loss_of(model, own[rows], own_targets[rows]).item() for rows in (slice(2), slice(2, 4))]


@pytest.mark.parametrize("how", ["copied", "rows"])
def test_what_a_script_makes_of_slices_has_their_positions(ranks, alone, how):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    model, (tokens, targets) = parts(accelerator)[0], samples()[:4]
    each = 4 if how == "copied" else 2
    expected = [loss_of(model, *pair).item() for pair in zip(tokens.split(each), targets.split(each), strict=True)]
    for found in ranks.run(2, of_parts, how):
        assert found == pytest.approx(expected, rel=1e-5)


def copied():
    accelerator = Accelerator(config=settings())
    model, _, loader = parts(accelerator)
    tokens, _ = next(iter(loader))
    whole = model(tokens)
    twin, read = copy.deepcopy(accelerator.unwrap_model(model)), pickle.loads(pickle.dumps(model.module))
    with accelerator.context_parallel(tokens) as own:
        found = [accelerator.gather(one(own).detach().transpose(0, 1).contiguous()) for one in (model, twin)]
    errors = [(one.transpose(0, 1) - whole).abs().max().item() for one in found]
    return [*errors, (read(tokens) - whole).abs().max().item()]


def test_copies_of_a_model_share_sequences_and_pickles_do_not(ranks):
    for errors in ranks.run(2, copied):
        assert max(errors) < 1e-5


def of_another_model():
    """Gradients of a model that is not prepared, recomputed after a region of one that is."""
    accelerator = Accelerator(config=settings())
    model, _, loader = parts(accelerator)
    tokens, targets = next(iter(loader))
    with accelerator.context_parallel(tokens, targets) as own:
        loss_of(model, *own).backward()
    torch.manual_seed(3)
    block, x = Block(), torch.randn(2, 8, WIDTH)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    expected = torch.autograd.grad(block(x).sum(), block.qkv.weight)[0]
    return (block.qkv.weight.grad - expected).abs().max().item()


def test_a_backward_outside_of_the_region_recomputes_whole_sequences(ranks):
    assert max(ranks.run(2, of_another_model)) < 1e-5


def prepared_again():
    model = parts(Accelerator(config=settings("FULL_SHARD")))[0]
    accelerator = Accelerator(config=settings("FULL_SHARD"))
    model = accelerator.prepare(model)
    tokens, targets = samples()[:4]
    whole = loss_of(model, tokens, targets).item()
    with accelerator.context_parallel(tokens, targets) as own:
        return loss_of(model, *own).item(), whole


def test_a_model_goes_on_with_another_accelerator(ranks):
    for found, expected in ranks.run(2, prepared_again):
        assert found == pytest.approx(expected, rel=1e-5)


def compiled(evaluates_first):
    accelerator = Accelerator(config=settings("FULL_SHARD", shardkit={"compile": True}))
    model, _, loader = parts(accelerator)
    tokens, targets = next(iter(loader))
    found = []
    for is_split in (False, True, False) if evaluates_first else (True, False, True):
        if is_split:
            with accelerator.context_parallel(tokens, targets) as own:
                loss = loss_of(model, *own)
        else:
            loss = loss_of(model, tokens, targets)
        accelerator.backward(loss)
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("evaluates_first", [True, False])
def test_compiled_blocks_know_whether_sequences_are_shared(ranks, alone, evaluates_first):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    model, _, loader = parts(accelerator)
    expected = loss_of(model, *next(iter(loader))).item()
    for found in ranks.run(2, compiled, evaluates_first):
        assert found == pytest.approx([expected] * 3, rel=1e-5)


def compiled_by_the_script():
    accelerator = Accelerator(config=settings())
    model, _, loader = parts(accelerator)
    with accelerator.context_parallel(*next(iter(loader))) as own:
        loss = torch.compile(loss_of, backend="eager")(model, *own)
    accelerator.backward(loss)
    return loss.item()


@pytest.mark.slow
def test_a_function_that_the_script_compiles_is_that_of_shared_sequences(ranks, alone):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    model, _, loader = parts(accelerator)
    expected = loss_of(model, *next(iter(loader))).item()
    assert ranks.run(2, compiled_by_the_script) == pytest.approx([expected] * 2, rel=1e-5)


# ---- Transformers ----


def family(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2}
    small |= {"num_attention_heads": HEADS, "max_position_embeddings": POSITIONS, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **small))
    if name == "span":
        return transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(num_key_value_heads=1, **small))
    if name == "mistral":
        config = transformers.MistralConfig(num_key_value_heads=2, sliding_window=4, **small)
        return transformers.MistralForCausalLM(config)
    if name == "gpt2":
        names = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": POSITIONS, "vocab_size": VOCABULARY}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**names, **drops))
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**small, **drops))


def rows(padded):
    """Batches of tokens and labels, and of a mask where sequences are padded at this side."""
    torch.manual_seed(7)
    tokens = torch.randint(1, VOCABULARY, (8, POSITIONS))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[:, :6] = -100
    if padded:
        there = slice(-5, None) if padded == "right" else slice(0, 5)
        mask[::2, there], labels[::2, there] = 0, -100
    keys = ("input_ids", "labels", "attention_mask")[: 3 if padded else 2]
    return [dict(zip(keys, row, strict=False)) for row in zip(tokens, labels, mask, strict=True)]


def losses_of_family(name, padded, given):
    accelerator = Accelerator(config=given)
    model = family(name).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(padded), 4))
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.context_parallel(batch) as own:
                loss = model(**own).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "padded"),
    [("llama", ""), ("llama", "right"), ("llama", "left"), ("mistral", ""), ("gpt2", ""), ("bert", "right")],
)
def test_models_of_transformers_equal_one_process(ranks, alone, name, padded):
    family(name)
    expected = losses_of_family(name, padded, {"distributed_type": "NO", "use_cpu": True})
    wrapped = settings("FULL_SHARD", fsdp_transformer_layer_cls_to_wrap="")
    for found in ranks.run(2, losses_of_family, name, padded, wrapped):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- what cannot be split ----


class WithoutPositions(Decoder):
    def forward(self, tokens):
        return super().forward(tokens)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, tokens):
        return self.mix(self.embed(tokens).transpose(1, 2)).transpose(1, 2)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mask = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, mask)


class OneHead(Masked):
    def forward(self, tokens):
        x = self.embed(tokens)
        return F.scaled_dot_product_attention(x, x, x)


class OneSequence(Masked):
    def forward(self, tokens):
        x = self.embed(tokens)[0]
        return F.scaled_dot_product_attention(x, x, x)[None]


class ThreeHeads(Masked):
    def forward(self, tokens):
        x = self.embed(tokens)[..., :15].unflatten(-1, (3, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class PreTrainedModel(nn.Module):
    """By its name, one of Transformers."""


class CountsFromOne(PreTrainedModel, Decoder):
    def forward(self, tokens, position_ids=None):
        return super().forward(
            tokens, torch.arange(1, 1 + tokens.size(1)) % 16 if position_ids is None else position_ids
        )


class Attending(Masked):
    """To tokens of another length, with a condition that is as wide as a slice is long."""

    def forward(self, tokens, source=None, condition=None):
        x, y = self.embed(tokens), self.embed(tokens if source is None else source)
        if condition is not None:
            x = x + (condition @ torch.ones(8, WIDTH)).unsqueeze(1)
        x, y = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (x, y))
        return F.scaled_dot_product_attention(x, y, y)


class Pooled(Masked):
    def forward(self, tokens):
        return self.embed(tokens).mean(1)


class OfFixedLength(Masked):
    def forward(self, tokens):
        return self.embed(tokens) + torch.zeros(POSITIONS, WIDTH)


class LossAlone(Decoder):
    def forward(self, tokens, labels, position_ids=None):
        logits = super().forward(tokens, position_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ShiftsLabels(LossAlone):
    def forward(self, tokens, labels, position_ids=None):
        return super().forward(tokens[:, :-1], labels[:, 1:], None if position_ids is None else position_ids[:, :-1])


def refused(kind, *, number=2, length=POSITIONS, named=(), source=0, condition=0):
    accelerator = Accelerator(config=settings())
    model = accelerator.prepare(kind())
    tokens = torch.zeros(number, length, dtype=torch.long).random_(VOCABULARY)
    given, whole = dict.fromkeys(named, tokens), {}
    if source:
        given["source"] = torch.zeros(number, source, dtype=torch.long).random_(VOCABULARY)
    if condition:
        whole["condition"] = torch.randn(number, condition)
    answers = set()
    for _ in range(2):  # also by a script that goes on
        try:
            with accelerator.context_parallel(tokens, given) as (own, own_given):
                model(own, **own_given, **whole)
            answers.add("nothing")
        except UsageError as error:
            answers.add(str(error))
    return " | ".join(answers)


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        (WithoutPositions, {}, "WithoutPositions gives other values for slices of a sequence than for the whole one"),
        (Convolution, {}, "Convolution gives other values for slices of a sequence than for the whole one"),
        (Masked, {}, "attention has a mask of this rank's slice alone (got [8, 8] for 16 positions)"),
        (ThreeHeads, {}, "shardkit.mesh.context_size does not divide the attention heads (got 2 for 3)"),
        (OneHead, {"number": 3}, "does not divide the first dim of the queries [3, 8, 16] (got 2 for 3)"),
        (OneSequence, {}, "attention of one head alone (got queries [8, 16])"),
        (Decoder, {"length": 15}, "a sequence does not divide into 2 slices (got 15 positions, in dim 1 of [2, 15])"),
        (Decoder, {"named": ["position_ids"]}, "position_ids begin again within a row"),
        (ShiftsLabels, {"named": ["labels"]}, "ShiftsLabels shifts the labels within each slice"),
        (Decoder, {}, "nothing"),
        (CountsFromOne, {}, "CountsFromOne gives other values for slices of a sequence than for the whole one"),
        (Attending, {"length": 160, "source": 140}, "Attending gives other values for slices of a sequence than for"),
        (Attending, {"condition": 8}, "nothing"),
        (Pooled, {}, "Pooled returns values of a whole sequence, such as its class or its mean"),
        (
            OfFixedLength,
            {},
            "OfFixedLength fails with slices of a sequence (got RuntimeError: The size of tensor a (8)",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(ranks, kind, more, expected):
    for answer in ranks.run(2, called, kind, more):
        assert expected in answer and ("nothing" in answer) is (expected == "nothing")


def called(kind, more):
    return refused(kind, **more)


def warned():
    with log_lines() as lines:
        answer = refused(LossAlone, named=["labels"])
    return answer, [line for line in lines if "context_parallel" in line]


def test_what_cannot_be_checked_is_told(ranks):
    (answer, lines), (_, others) = ranks.run(2, warned)
    assert answer == "nothing" and not others
    assert "LossAlone returns no values along the sequence" in lines[0]


def never_split():
    accelerator = Accelerator(config=settings())
    model, optimizer, loader = parts(accelerator)
    with log_lines() as lines:
        for tokens, targets in loader:
            accelerator.backward(loss_of(model, tokens, targets))
            optimizer.step()
    return [line for line in lines if "context_parallel" in line]


def test_a_loop_that_splits_no_sequence_is_told(ranks):
    (line,), others = ranks.run(2, never_split)
    assert not others
    assert "2 ranks are to share each sequence" in line and "the first 3 steps have split none" in line


def misused(how):
    accelerator = Accelerator(config=settings())
    model, _, loader = parts(accelerator)
    tokens, _ = next(iter(loader))
    try:
        if how == "nested":
            with accelerator.context_parallel(tokens), accelerator.context_parallel(tokens):
                pass
        if how == "nothing":
            with accelerator.context_parallel("tokens", torch.ones(3)):
                pass
        if how == "dims":
            with accelerator.maybe_context_parallel([tokens], []):
                pass
        if how == "shapes":
            with accelerator.context_parallel(tokens[:, : 8 + 2 * accelerator.process_index]):
                pass
        if how == "generation":
            model = accelerator.prepare(family("llama"))
            with accelerator.context_parallel(tokens) as own:
                model(own)
                model.module.generate(own, max_new_tokens=3)
        if how == "other Accelerator":
            with Accelerator(config=settings()).context_parallel(tokens) as own:
                model(own)
        if how == "number of labels":
            model = accelerator.prepare(family("llama"))
            with accelerator.context_parallel(tokens) as own:
                model(own, labels=own, num_items_in_batch=torch.tensor(60))
        if how == "one position":
            with accelerator.context_parallel(tokens[:, :2]) as own:
                accelerator.prepare(family("llama"))(own)
        if how == "span":
            with accelerator.context_parallel(tokens) as own:
                accelerator.prepare(family("span"))(own, start_positions=tokens[:, 0], end_positions=tokens[:, 0])
        if how == "metrics":
            with accelerator.context_parallel(tokens) as own, torch.no_grad():
                accelerator.gather_for_metrics(model(own).argmax(-1))
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("nested", "the script is inside of one already"),
        ("nothing", "no tensor to split"),
        ("dims", "1 buffers have 0 buffer_seq_dims"),
        ("shapes", "ranks 0 to 1 share each sequence, but have tensors of different shapes (got [4, 8]; [4, 10])"),
        (
            "generation",
            "is given keys and values of earlier positions (got 8 of them, as in generate)",
        ),
        ("other Accelerator", "this Accelerator has prepared no model, and another one has; call context_parallel of"),
        ("number of labels", "num_items_in_batch makes the loss a sum over this rank's slice, divided (got 60)"),
        ("one position", "slices of one position (got sequences of 2), which LlamaForCausalLM takes for"),
        ("span", "LlamaForQuestionAnswering learns where in a sequence something is (got start_positions)"),
        ("metrics", "the 2 ranks that share a sequence have different values"),
    ],
)
def test_misuse_is_refused_on_all_ranks(ranks, how, expected):
    for answer in ranks.run(2, misused, how):
        assert expected in answer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_processes": 6, "shardkit": {"mesh": {"context_size": 4}}}, "does not divide the number of ranks (got 4"),
        ({"distributed_type": "XLA", "shardkit": {"mesh": {"context_size": 2}}}, "is not there for TPUs (got 2)"),
    ],
)
def test_sizes_that_cannot_run_are_problems(given, expected):
    assert any(expected in finding.text for finding in problems(Config.model_validate(given)))

"""`accelerator.unsharded`: inside, each rank has the whole weights for its forwards, and needs no other rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import Accelerator
from shardkit.errors import UsageError

WIDTH, TOKENS = 8, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.inner(x).transpose(1, 2))).transpose(1, 2)


class Writer(nn.Module):
    """Tokens of shape [samples, length] -> logits [samples, length, TOKENS], with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def write(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


class Loop:
    """A loop on the tokens of all ranks: of plain torch without `settings`."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model, self.tokens = Writer(), torch.arange(12).view(3, 4) % TOKENS
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.inner = self.model
        self.accelerator: Any = None
        if settings is not None:
            self.accelerator = Accelerator(config={"use_cpu": True, **settings})
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.inner = self.accelerator.unwrap_model(self.model)

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.tokens).flatten(0, 1).float(), self.tokens.flatten())

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss) if self.accelerator else loss.backward()

    def step(self) -> float:
        self.model.train()
        loss = self.loss()
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def sharded(strategy: str = "FULL_SHARD", **settings: Any) -> dict[str, Any]:
    fsdp = {
        "fsdp_sharding_strategy": strategy,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        **settings.pop("fsdp_config", {}),
    }
    return {"distributed_type": "FSDP", "fsdp_config": fsdp, **settings}


def written(settings: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and what was written between the steps, by each rank at another length, and by rank 0 alone."""
    loop, texts = Loop(settings), []
    rank = dist.get_rank() if settings else 0
    losses = [loop.step()]
    for _ in range(2):
        loop.model.eval()
        if settings is None:
            texts += [loop.inner.write(loop.tokens, 3)] * 2
        else:
            with loop.accelerator.unsharded(loop.model):
                texts.append(loop.inner.write(loop.tokens, 3 + 2 * rank)[:, :7])
                if rank == 0:
                    texts.append(loop.inner.write(loop.tokens, 3))
                    with torch.inference_mode():
                        loop.model(loop.tokens)
        losses += [loop.step(), loop.step()]
    return losses, texts


@pytest.mark.parametrize(
    ("world_size", "settings", "tolerance"),
    [
        (2, sharded(), 1e-5),
        (2, sharded("SHARD_GRAD_OP", shardkit={"recompute": "blocks"}), 1e-5),
        (2, {"distributed_type": "MULTI_CPU"}, 1e-5),
        (3, sharded(fsdp_config={"fsdp_offload_params": True, "fsdp_forward_prefetch": True}), 1e-5),
        pytest.param(4, sharded("HYBRID_SHARD", shardkit={"mesh": {"shard_size": 2}}), 1e-5, marks=pytest.mark.slow),
        pytest.param(2, sharded(mixed_precision="bf16"), 0.05, marks=pytest.mark.slow),
        pytest.param(2, sharded(shardkit={"compile": True}), 1e-5, marks=pytest.mark.slow),
        pytest.param(1, sharded(), 1e-5, marks=pytest.mark.slow),
    ],
)
def test_each_rank_generates_by_itself_what_one_process_does(ranks, world_size, settings, tolerance):
    losses, texts = written(None)
    for rank, (own_losses, own_texts) in enumerate(ranks.run(world_size, written, settings)):
        assert own_losses == pytest.approx(losses, abs=tolerance)
        if tolerance < 0.01:
            expected = texts if rank == 0 else texts[::2]
            assert all(torch.equal(own, one) for own, one in zip(own_texts, expected, strict=True))


def changed(loop: Loop) -> dict[str, Callable[[], Any]]:
    return {
        "step": loop.step,
        "data": lambda: [parameter.data.mul_(2) for parameter in loop.model.parameters()],
        "load": lambda: loop.model.load_state_dict(Writer().state_dict()),  # other random values each time
    }


def stale(name: str) -> list[str]:
    """What is said of weights that change inside, before another forward and without one."""
    loop, said = Loop(sharded()), []
    for forwards in (1, 0):
        try:
            with loop.accelerator.unsharded():
                changed(loop)[name]()
                loop.inner.write(loop.tokens, forwards)
            said.append("nothing")
        except UsageError as error:
            said.append(str(error))
        loop.inner.write(loop.tokens, 1)
    return said


@pytest.mark.parametrize("name", ["step", "data", "load"])
def test_weights_that_change_inside_are_refused(ranks, name):
    for found in ranks.run(2, stale, name):
        assert all(one.startswith("accelerator.unsharded: embed.weight was changed inside") for one in found)


def gradients(settings: dict[str, Any] | None) -> list[torch.Tensor]:
    """Gradients of backwards around and inside a block, which is entered twice, and of one that an error has ended."""
    loop = Loop(settings)
    first = loop.loss()
    if loop.accelerator is None:
        loop.backward(first)
        loop.backward(loop.loss())
    else:
        with loop.accelerator.unsharded(loop.model):  # between forward and backward
            loop.inner.write(loop.tokens, 1)
            with loop.accelerator.unsharded(loop.model):
                loop.inner.write(loop.tokens, 1 + dist.get_rank())
            loop.inner.write(loop.tokens, dist.get_rank())
            loop.backward(first)
        with pytest.raises(IndexError), loop.accelerator.unsharded(loop.model):
            loop.inner.write(loop.tokens + TOKENS, 1)
        with loop.accelerator.unsharded():
            loop.backward(loop.loss())
            loop.inner.write(loop.tokens, dist.get_rank())
    found = [parameter.grad for parameter in loop.model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_backwards_around_and_inside_leave_the_gradients_of_one_process(ranks, strategy):
    expected = gradients(None)
    for found in ranks.run(2, gradients, sharded(strategy)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def of_transformers(is_set: bool) -> list[int]:
    """Lengths of what Transformers' `generate` writes: on rank 0 alone, and on each rank at another length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = sharded(shardkit={"unsharded_generate": is_set})
    settings["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecoderLayer"
    accelerator = Accelerator(config={"use_cpu": True, **settings})
    model = accelerator.prepare_model(LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes)), evaluation_mode=True)
    rank, forwards = dist.get_rank(), []
    model.register_forward_hook(lambda *_: forwards.append(1))

    def write(new: int) -> int:
        tokens = torch.ones(1, 2, dtype=torch.long)
        return model.generate(tokens, max_new_tokens=new, min_new_tokens=new, pad_token_id=0).shape[1] - 2

    with accelerator.unsharded(model):
        found = [write(2 + 3 * rank)]
        if rank == 0:
            found.append(write(4))
    found.append(write(1 + rank))
    assert len(forwards) == sum(found) + (rank == 0 and not is_set)  # together, all go on until the last has ended
    copied = copy.deepcopy(model)
    return [*found, copied.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1).shape[1]]


@pytest.mark.parametrize("is_set", [False, True])
def test_transformers_generate_needs_no_other_rank(ranks, is_set):
    assert ranks.run(2, of_transformers, is_set) == [[2, 4, 1, 3], [5, 2, 3]]


def foreign() -> list[str]:
    """What is said of a model that is not prepared, and of a part of one that is."""
    loop, said = Loop(sharded()), []
    for model in (Writer(), loop.model.blocks[0]):
        with pytest.raises(UsageError) as raised, loop.accelerator.unsharded(model):
            pass
        said.append(str(raised.value))
    return said


def test_only_prepared_models_are_taken(ranks):
    of_model, of_part = ranks.run(1, foreign)[0]
    assert "takes prepared models (got a Writer)" in of_model
    assert "takes prepared models (got a Block)" in of_part

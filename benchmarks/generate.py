"""Tokens that a sharded model generates: shardkit with and without `unsharded`, FSDP2 by hand, and a whole model.

    python -m benchmarks.generate [--ranks 2] [--layers 8] [--width 512] [--tokens 32] [--rounds 7] [--output file.json]

CPU ranks with gloo run Transformers' `generate` of a Llama of random weights, 2 prompts of 16 tokens, greedy, with a
cache of keys and values. On a whole model every rank generates by itself, as under DDP.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import interleaved, spawned_ranks
from benchmarks.spawned_ranks import seconds_of
from shardkit import Accelerator

UNSHARDED, SHARDED = "shardkit, unsharded", "shardkit"
BY_HAND, WHOLE = "FSDP2 by hand", "a whole model"


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of generating so many tokens by contestant and round. Collective."""
    layers, width, tokens = options.layers, options.width, options.tokens
    accelerator = Accelerator(
        config={
            "distributed_type": "FSDP",
            "use_cpu": True,
            "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        }
    )
    sharded = accelerator.prepare_model(_llama(layers, width), evaluation_mode=True)
    by_hand = _llama(layers, width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*by_hand.model.layers, by_hand):
        fully_shard(module, mesh=mesh)
    models = {UNSHARDED: sharded, SHARDED: sharded, BY_HAND: by_hand, WHOLE: _llama(layers, width)}
    prompts = torch.ones(2, 16, dtype=torch.long)

    def generation(model: Any, around: Callable[[Any], AbstractContextManager[None]]) -> Callable[[], Any]:
        def generate() -> None:
            with around(model):
                model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

        return generate

    for model in models.values():
        generation(model, nullcontext)()  # the first one makes what later ones use
    measured: dict[str, list[float]] = {name: [] for name in models}
    for _, name in interleaved.turns(list(models), options.rounds):
        generate = generation(models[name], accelerator.unsharded if name == UNSHARDED else nullcontext)
        dist.barrier()
        measured[name].append(seconds_of(generate))
    return measured


def _llama(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_attention_heads=8, **sizes)).eval()


if __name__ == "__main__":
    spawned_ranks.main("generate", __doc__, {"ranks": 2, "layers": 8, "width": 512, "tokens": 32, "rounds": 7}, measure)

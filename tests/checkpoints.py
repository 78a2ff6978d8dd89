"""What the checkpoint tests share: small training runs whose whole state is easy to compare."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit.checkpoint.loading import read
from shardkit.checkpoint.loading.load_plan import LoadOptions
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.states import state
from shardkit.distributed import control
from shardkit.distributed.tensors import local_part
from shardkit.storage.url import place_of

STEP_BYTES = 8


class Net(nn.Module):
    """Uneven shapes, a tied pair, a buffer, a frozen parameter, dropout."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(25, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 25, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1, width), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.seen += 1
        hidden = self.embed(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.drop(self.down(torch.relu(self.norm(self.up(hidden)))))


class Counter:
    """A registered object."""

    def __init__(self):
        self.value = {"count": 0, "pair": (1, float("inf")), "weights": torch.zeros(3)}

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def build(strategy="fsdp", seed=0, optimizer="adamw", width=6):
    """A Live of one model and one optimizer, sharded, replicated or plain."""
    torch.manual_seed(seed)
    model = Net(width)
    if strategy in ("fsdp", "hybrid"):
        size = dist.get_world_size()
        shape, names = ((size,), ("shard",)) if strategy == "fsdp" else ((2, size // 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    wrapped = DistributedDataParallel(model) if strategy == "ddp" else model
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    settings = {"adamw": {"fused": True}, "sgd": {"momentum": 0.9}}[optimizer]
    groups = [{"params": trained[:2], "lr": 0.01}, {"params": trained[2:], "weight_decay": 0.0}]
    built = kinds[optimizer](groups, lr=0.02, **settings)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(built, max_lr=0.1, total_steps=50)
    return state.Live([wrapped], [built], {"scheduler.0": scheduler, "registered.0": Counter()}, {}, seed=7)


def train(live, steps, first=0):
    """Losses of some steps, each rank on its own part of data that depends on the step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(25, (12, 5), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(size)[rank]
        loss = torch.nn.functional.cross_entropy(live.models[0](mine).flatten(0, 1), mine.roll(1, 1).flatten())
        loss.backward()
        live.optimizers[0].step()
        live.optimizers[0].zero_grad()
        live.objects["scheduler.0"].step()
        live.objects["registered.0"].value["count"] = step
        losses.append(loss.item())
    return losses


def dropout_off(live):
    for module in live.models[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest_of(live):
    """sha256 of all weights and optimizer state, gathered: equal for equal states, whatever the sharding."""
    total = hashlib.sha256()
    for name, tensor in sorted(state.model_tensors(live.models[0]).items()):
        total.update(name.encode() + bytes(full(tensor).cpu().contiguous().view(-1).view(torch.uint8).tolist()))
    names = state.parameter_names(live.models)
    rows = {names[id(p)]: s for p, s in live.optimizers[0].state.items()}
    for name, row in sorted(rows.items()):
        for key, value in sorted(row.items()):
            data = full(value).cpu().contiguous().view(-1).view(torch.uint8)
            total.update(f"{name}/{key}".encode() + bytes(data.tolist()))
    return total.hexdigest()


def save(live, final, step=0, kind="sharded", timeout_s=60.0, **request):
    """One save with a control group of its own."""
    agreed = control.start(timeout_s)
    return write.save(live, kind, write.SaveRequest(place_of(final), step, run_id="test", **request), agreed)


def load(live, path, **settings):
    """One load with a control group of its own."""
    return read.load(live, place_of(path), control.start(60.0), LoadOptions(**settings))


def load_newest(live, root, **settings):
    return read.load_newest(live, place_of(root), control.start(60.0), LoadOptions(**settings))


def fill(live, step):
    """Set everything in a state to the step's number, so that any mix is visible."""
    with torch.no_grad():
        for tensor in state.model_tensors(live.models[0]).values():
            local_part(tensor).fill_(step)
        for row in live.optimizers[0].state.values():
            for value in row.values():
                local_part(value).fill_(step)
    live.objects["registered.0"].value["count"] = step


def values_in(live):
    found = {float(v) for t in state.model_tensors(live.models[0]).values() for v in t.flatten().tolist()}
    for row in live.optimizers[0].state.values():
        found |= {float(v) for value in row.values() for v in value.flatten().tolist()}
    return found | {float(live.objects["registered.0"].value["count"])}


def prepared(strategy):
    live = build(strategy)
    train(live, 1)
    return live


def resumed_step(root):
    """The step that a resume finds, after checking that all of its state is of that one step."""
    live = prepared("plain")
    loaded = load_newest(live, root)
    assert values_in(live) == {float(loaded.checkpoint.manifest.step)}, "a mix of steps"
    return loaded.checkpoint.manifest.step

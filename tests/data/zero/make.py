"""Makes the checkpoints of this folder, with DeepSpeed 0.19.8 on two CPU ranks:

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 make.py zero3

Beside each is what DeepSpeed says of it, and what two more steps give.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from tests.data.zero.net import Net, batch, groups_of, loss_of  # noqa: E402

CASES = {"zero0": (0, "fp32"), "zero1": (1, "bf16"), "zero2": (2, "fp32"), "zero3": (3, "fp32")}


def make(name: str) -> None:
    stage, precision = CASES[name]
    net = Net(is_tied=stage == 1, is_frozen=stage in (1, 3))
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10) if stage == 2 else None
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 40},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    rank = torch.distributed.get_rank()

    def step(number: int) -> None:
        engine.backward(loss_of(engine, batch(number, rank)))
        engine.step()

    def weights() -> dict[str, torch.Tensor]:
        full = safe_get_full_fp32_param if stage else torch.Tensor.detach
        return {name: full(parameter).clone() for name, parameter in net.named_parameters() if parameter.requires_grad}

    for number in range(3):
        step(number)
    engine.save_checkpoint(str(HERE / name), client_state={"epoch": 2})
    at_save = weights()
    for number in range(3, 5):
        step(number)
    later = weights()
    if rank == 0:
        for path in (HERE / name).glob("*.py"):
            path.unlink()
        torch.save({"at_save": at_save, "later": later}, HERE / name / "expected.pt")


if __name__ == "__main__":
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
    make(sys.argv[1])

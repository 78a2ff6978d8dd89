"""A training script as they are written for Accelerate, with what such scripts use most."""

import argparse
import json
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, gather_object, set_seed
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop_after", type=int, default=100)
    args = parser.parse_args()
    config = ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=config, kwargs_handlers=handlers)
    if accelerator.state.deepspeed_plugin is not None:
        raise ValueError("not with DeepSpeed")
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    set_seed(7)

    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    inputs = torch.randn(64, 6)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with accelerator.main_process_first():
        train = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
        held_out = DataLoader(TensorDataset(*dataset[:10]), batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps_an_epoch = len(train) // accelerator.num_processes // accelerator.gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.1, total_iters=2 * steps_an_epoch * accelerator.num_processes
    )
    model, optimizer, train, held_out, lr_scheduler = accelerator.prepare(
        model, optimizer, train, held_out, lr_scheduler
    )
    first_epoch = 0
    if args.resume:
        accelerator.load_state()
        first_epoch = train.epoch if hasattr(train, "epoch") else 0
    logger.info(f"on {accelerator.state.num_processes} ranks", main_process_only=True)

    losses, steps = [], 0
    for _ in range(first_epoch, 2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.repeat(args.batch_size)).mean().item())
            if accelerator.sync_gradients:
                steps += 1
                if steps == 6:
                    accelerator.save_state()
                if steps == args.stop_after:
                    return
        model.eval()
        errors = []
        for x, y in held_out:
            with torch.no_grad():
                error = (model(x) - y).abs().squeeze(1)
            errors.append(accelerator.gather_for_metrics(error))
    assert len(torch.cat(errors)) == 10
    who = gather_object([accelerator.process_index])
    assert who == list(range(accelerator.num_processes))
    if accelerator.distributed_type == DistributedType.FSDP:
        assert accelerator.state.fsdp_plugin is not None
    accelerator.save_model(model, os.path.join(args.output_dir, "model"))
    if accelerator.is_main_process:
        found = {"losses": losses, "error": torch.cat(errors).mean().item(), "lr": lr_scheduler.get_last_lr()[0]}
        with open(os.path.join(args.output_dir, "found.json"), "w") as file:
            json.dump(found, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""A small GPT learns to write Python from the sources of Python's own standard library.

shardkit launch train.py --steps 200
shardkit launch --resume auto train.py --steps 400      # on as many ranks as there are now

The lines marked with a number are what shardkit adds to a plain training loop.
"""

import argparse

import torch
from gpt import GPT, StandardLibrary
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shardkit import Accelerator, ProjectConfiguration, set_seed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in total")
    parser.add_argument("--global-batch", type=int, default=24, help="samples per step, over all ranks")
    parser.add_argument("--folder", default="runs/gpt", help="where checkpoints and the export go")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines on the screen")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    project = ProjectConfiguration(project_dir=args.folder, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(project_config=project, split_batches=True)  # 1
    set_seed(0)

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loader = DataLoader(StandardLibrary(), batch_size=args.global_batch, shuffle=True)  # of all ranks together
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)  # 2
    accelerator.resume()  # where `shardkit launch --resume auto` asks for it

    step = accelerator.counters.step
    while step < args.steps:
        for tokens in loader:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)  # 3
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            step = accelerator.counters.step
            if step % args.log_every == 0 or step == 1:
                mean = accelerator.reduce(loss.detach(), reduction="mean")
                accelerator.print(f"step {step:4d}  loss {mean.item():.4f}")
            if step % args.save_every == 0:
                accelerator.save_state()  # 4
            if step >= args.steps:
                break

    accelerator.save_model(model, f"{args.folder}/export")
    accelerator.print(f"exported to {args.folder}/export")
    accelerator.end_training()


if __name__ == "__main__":
    main()

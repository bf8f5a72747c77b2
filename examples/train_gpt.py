"""Train examples/gpt.py on real text with the config that a search found.

    memtune search examples/gpt.py --device cpu --workers 2 --max-memory 540MiB
    memtune run tuned.yaml -- python examples/train_gpt.py tuned.yaml

The one line that matters is `memtune.apply`; the rest is a plain training loop. A config made for several
ranks starts that many processes through torchrun when the script was started as one.
"""

import argparse
import os
import sys

import gpt  # examples/gpt.py, beside this file
import torch
import torch.distributed as dist

import memtune


def main() -> None:
    """Parse, start the ranks the config was made for, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="tuned.yaml")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    config = memtune.load_config(arguments.config)
    ranks = config.made_for.ranks if config.made_for else 1
    if ranks > 1 and "RANK" not in os.environ:
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))
        )  # else each rank takes all cores
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        os.execv(sys.executable, [*launcher, *sys.argv])
    train(config, arguments.steps)


def train(config: "memtune.TunedConfig", steps: int) -> None:
    """A plain loop: warm the learning rate up, step, print the loss."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    torch.manual_seed(0)
    model = gpt.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    tuned = memtune.apply(model, optimizer, config, loss=gpt.loss)

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    execution = config.settings.execution
    micro_batch = execution.micro_batch or gpt.global_batch // ranks // execution.accumulate
    torch.manual_seed(1000 + rank)
    first = last = 0.0
    for step in range(steps):
        loss = tuned.step(gpt.batch(micro_batch) for _ in range(execution.accumulate)).clone()
        schedule.step()
        if ranks > 1:
            dist.all_reduce(loss)
        last = loss.item() / ranks
        first = first or last
        if rank == 0:
            print(f"step {step + 1:3d}  loss {last:.3f}", flush=True)
    if rank == 0:
        print(f"loss {first:.3f} → {last:.3f} over {steps} steps on {ranks} rank{'s' if ranks > 1 else ''}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

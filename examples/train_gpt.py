"""Train examples/gpt.py on real text with the config found by a search.

    memtune search examples/gpt.py --device cpu --workers 2 --max-memory 540MiB
    memtune run tuned.yaml -- python examples/train_gpt.py tuned.yaml

The only line for memtune is `memtune.apply`; the rest is a plain training loop. If the config is for several
ranks and the script runs as one process, it starts that many through torchrun.
"""

import argparse
import os
import sys

import gpt  # examples/gpt.py, in the same folder
import torch
import torch.distributed as dist

import memtune


def main() -> None:
    """Parse arguments, start the config's ranks, train."""
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
    """Run a plain training loop: warm up the learning rate, step, print the loss."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    torch.manual_seed(0)
    model = gpt.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    # From the CPU: weights that the config keeps off the device never are there as a whole.
    tuned = memtune.apply(model, optimizer, config, loss=gpt.loss, device=device)

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

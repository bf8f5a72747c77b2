"""The commands of `memtune` and their arguments, in the order in which `--help` lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="memtune",
    help=(
        "Find how to train a PyTorch model fast inside the memory of given GPUs, and apply it in one"
        " line.\n\nExit codes: 0 done · 1 nothing feasible · 2 usage, config or model.py · 3 environment or"
        " storage · 4 bug · 130 interrupted."
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def memtune(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the traceback of an error as well.")
    ] = False,
) -> None:
    # What it does is done where errors are shown, in memtune.cli.run; its docstring would replace the help
    # above.
    ...


config_app = typer.Typer(help="Check a config, show it whole, print its schema.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL.PY[:NAME]", help="File with model(), batch(size) and loss(model, batch)."),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="TUNED.YAML", help="A config that a search wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Where to compute; default: cuda where there is one.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs that train together.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Ranks on CPU (with --device cpu).")]
GpuType = Annotated[str | None, typer.Option(help="Predict for this GPU: h100-80g, a100-40g, …")]
Memory = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Device memory per rank, like 24GiB.")
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Machines that share the GPUs; default: as few as hold them.")
]
Goal = Annotated[
    str,
    typer.Option(
        metavar="throughput|memory|batch", help="Most samples/s, lowest peak or largest micro-batch."
    ),
]
GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Samples per optimizer step over all ranks.")]
Axes = Annotated[
    str | None, typer.Option(help="Search only these axes: recompute,sharding,offload,allocator,execution.")
]
Freeze = Annotated[
    list[str] | None, typer.Option(metavar="AXIS=KIND", help="Do not search this axis; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Of weights, data and sampling.")]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy", help="Also use techniques that change results.")]
OffloadDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Tensors may go to SSD, into this directory; several drives as /one:/two."
    ),
]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Instead of the config's.")]


@app.command()
def search(
    model: Model,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    max_memory: Memory = None,
    goal: Goal = "throughput",
    trials: Annotated[
        int, typer.Option(min=1, help="Real trials at most (repeats and the confirmation come on top).")
    ] = 12,
    time_limit: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="Stop searching after this, like 30m.")
    ] = None,
    axes: Axes = None,
    freeze: Freeze = None,
    global_batch: GlobalBatch = None,
    allow_lossy: AllowLossy = False,
    offload_dir: OffloadDir = None,
    seed: Seed = 0,
    study: Annotated[
        str | None, typer.Option(help="Name of the study; default: from the model's file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the study, and replace the config it wrote.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the config is written.")] = Path("tuned.yaml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it exists, whoever wrote it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Everything but trials.")] = False,
    executor: Annotated[str, typer.Option(metavar="auto|local|ray", help="How trials are started.")] = "auto",
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster.")] = None,
    no_tui: Annotated[
        bool, typer.Option("--no-tui", help="One line per trial instead of the screen.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")] = False,
    as_json: AsJson = False,
) -> int:
    """Find the fastest setting that fits, from real trials, and write tuned.yaml."""
    from memtune.cli import _search

    given = {name: value for name, value in locals().items() if name != "_search"}
    return _search.search(given)


@app.command()
def plan(
    model: Model,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    nodes: Nodes = None,
    max_memory: Memory = None,
    goal: Goal = "throughput",
    axes: Axes = None,
    freeze: Freeze = None,
    global_batch: GlobalBatch = None,
    allow_lossy: AllowLossy = False,
    offload_dir: OffloadDir = None,
    seed: Seed = 0,
    config: Annotated[Path | None, typer.Option(help="Predict this config alone.")] = None,
    micro_batch: MicroBatch = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 12,
    exact: Annotated[
        bool, typer.Option("--exact", help="Dry-run the first rows: the real runtime on fake tensors.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Rank settings without running any, for GPUs that need not be here; exits 1 where nothing fits."""
    from memtune.cli import _search

    given = {name: value for name, value in locals().items() if name != "_search"}
    return _search.plan(given)


@app.command()
def trial(
    model: Model,
    config: Annotated[Path, typer.Option(help="The config to run; it may hold `settings` alone.")],
    device: Device = None,
    gpus: Gpus = None,
    workers: Workers = None,
    max_memory: Memory = None,
    micro_batch: MicroBatch = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
    offload_dir: OffloadDir = None,
    seed: Seed = 0,
    executor: Annotated[str, typer.Option(metavar="auto|local|ray", help="How it is started.")] = "auto",
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run one config once, in fresh processes, and show what it took."""
    from memtune.cli import _commands

    given = {name: value for name, value in locals().items() if name != "_tools"}
    return _commands.trial(given)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context, config: ConfigPath) -> int:
    """Run a training command with what the config needs in its environment: memtune run tuned.yaml -- python
    train.py.
    """
    from memtune.cli import _commands

    return _commands.run(config, [*context.args])


@app.command()
def techniques(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Which of them work together, and why others do not.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List every technique: axis, kind, title, source, exactness."""
    from memtune.cli import _commands, _matrix

    return _matrix.show(as_json) if matrix else _commands.techniques(as_json)


@app.command()
def explain(
    config: ConfigPath,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL.PY[:NAME]", help="Record it and simulate each setting anew.")
    ] = None,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    nodes: Nodes = None,
    max_memory: Memory = None,
    as_json: AsJson = False,
) -> int:
    """Say why each setting of a config is there, what it costs and what it saves: the config simulated
    without it.
    """
    from memtune.cli import _explain

    given = {name: value for name, value in locals().items() if name != "_explain"}
    return _explain.explain(given)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine (under a minute) and keep it.")
    ] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> int:
    """Say what this machine has and what is missing."""
    from memtune.cli import _commands

    if calibrate:
        return _commands.calibrate(device, as_json)
    return _commands.doctor(as_json)


@app.command()
def clean(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Default: $MEMTUNE_OFFLOAD_DIR.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Remove what your dead runs left in an offload directory, what training could go on from (resume:
    last_step) included.
    """
    from memtune.cli import _commands

    return _commands.clean(directory, as_json)


@app.command()
def replay(
    snapshot: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT.PICKLE", help="What torch.cuda.memory._dump_snapshot wrote.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTINGS",
            help="Like max_split_size_mb=128, or gmlake; repeatable, one replay each.",
        ),
    ] = None,
    device: Annotated[
        int | None, typer.Option(min=0, help="Index of the GPU; default: the one with the longest trace.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the GPU has for the process, like 80GiB.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say what a recorded run would have reserved under other allocator settings, and which needs the
    least.
    """
    from memtune.cli import _replay

    return _replay.replay_snapshot(snapshot, settings or [], device, capacity, as_json)


@app.command()
def watch(
    study: Annotated[
        str, typer.Argument(help="Name of a study below .memtune/, or the path of its events.jsonl.")
    ],
) -> int:
    """Attach the screen to a running or finished search."""
    from memtune.cli import _commands

    return _commands.watch(study)


@config_app.command("check")
def config_check(config: ConfigPath, as_json: AsJson = False) -> int:
    """Read a config strictly and say whether it is good."""
    from memtune.cli import _commands

    return _commands.config_check(config, as_json)


@config_app.command("show")
def config_show(config: ConfigPath, as_json: AsJson = False) -> int:
    """Print a config as memtune would write it."""
    from memtune.cli import _commands

    return _commands.config_show(config, as_json)


@config_app.command("schema")
def config_schema() -> int:
    """Print the JSON Schema of a config, with every technique there is."""
    from memtune.cli import _commands

    return _commands.config_schema()

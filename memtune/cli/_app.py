"""Commands of `memtune` with their arguments, in the order of `--help`."""

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


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"memtune {version('memtune')}")
        raise typer.Exit


@app.callback()
def memtune(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the traceback of an error as well.")
    ] = False,
) -> None:
    # `memtune.cli.run` implements --verbose, where errors are printed. A docstring here would replace the
    # help above.
    ...


config_app = typer.Typer(help="Check a config, print it in full, print its schema.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL.PY[:NAME]", help="File with model(), batch(size) and loss(model, batch)."),
]
StudyName = Annotated[
    str | None,
    typer.Argument(
        help="Name of a study below .memtune/, or the path of its events.jsonl; default: the last."
    ),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="TUNED.YAML", help="A config that a search wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE[:N]",
        help="Device to compute on: cpu, cuda, xpu, …; default: the accelerator if present.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of GPUs that train together; default: for trials all visible ones, else one."
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of ranks on CPU (with --device cpu); default: one.")
]
GpuType = Annotated[str | None, typer.Option(help="Predict for this GPU: h100-80g, a100-40g, …")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--max-memory", metavar="SIZE", help="Device memory per rank, like 24GiB; default: all of it."
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help=(
            "Host memory of each machine that training may use; default: what is free here, or the GPUs'"
            " share of a typical machine with --gpu-type."
        ),
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Number of machines; default: as few as hold the GPUs.")
]
Goal = Annotated[
    str,
    typer.Option(
        metavar="throughput|memory|batch",
        help="Maximize samples/s, minimize the peak, or maximize the micro-batch.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per optimizer step over all ranks; default: global_batch of MODEL.PY."),
]
Axes = Annotated[
    str | None, typer.Option(help="Search only these axes: recompute,sharding,offload,allocator,execution.")
]
Freeze = Annotated[
    list[str] | None, typer.Option(metavar="AXIS=KIND", help="Fix the technique of an axis; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Seed of weights, data and sampling.")]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy", help="Also use techniques that change results.")]
OffloadDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Allow offload to SSD, into this directory; several drives as /one:/two."
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also internal notes: the recording, the critical path.")
]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, help="Samples per micro-batch, instead of the config's.")
]


@app.command(epilog="Example: memtune init my_package.my_module:MyModel --out model.py")
def init(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help=(
                "Hugging Face id, config.json or class (LlamaForCausalLM), or your own class or function:"
                " package.module:Name, file.py:Name."
            ),
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("model.py"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a model.py for a model; needs no weights. Lines that hold a guess are marked CHECK."""
    from memtune.cli import _commands

    return _commands.init(target, out, force, as_json)


@app.command(epilog="Example: memtune search model.py --gpus 8 --max-memory 60GiB --time 30m")
def search(
    context: typer.Context,
    model: Model,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    max_memory: Memory = None,
    host_memory: HostMemory = None,
    goal: Goal = "throughput",
    trials: Annotated[
        int, typer.Option(min=1, help="Maximum number of real trials, without repeats and the confirmation.")
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
        bool, typer.Option("--resume", help="Resume the study, and replace the config it wrote.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File to write the config to.")] = Path("tuned.yaml"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file even if memtune did not write it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything except trials.")] = False,
    parallel: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help=(
                "Number of trials that run side by side; auto: as many as do not change each other's times,"
                " one per set of GPUs or NUMA node."
            ),
        ),
    ] = "auto",
    executor: Annotated[str, typer.Option(metavar="auto|local|ray", help="Launcher of trials.")] = "auto",
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster.")] = None,
    no_tui: Annotated[
        bool, typer.Option("--no-tui", help="One line per trial instead of the screen.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Find the fastest setting that fits, from real trials, and write tuned.yaml."""
    given = dict(locals())
    from memtune.cli import _search

    return _search.search(given)


@app.command(epilog="Example: memtune plan model.py --gpus 8 --gpu-type h100-80g --out tuned.yaml")
def plan(
    context: typer.Context,
    model: Model,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    nodes: Nodes = None,
    max_memory: Memory = None,
    host_memory: HostMemory = None,
    goal: Goal = "throughput",
    axes: Axes = None,
    freeze: Freeze = None,
    global_batch: GlobalBatch = None,
    allow_lossy: AllowLossy = False,
    offload_dir: OffloadDir = None,
    seed: Seed = 0,
    config: Annotated[Path | None, typer.Option(help="Predict only this config.")] = None,
    micro_batch: MicroBatch = None,
    top: Annotated[int, typer.Option(min=1, help="Number of rows of the table.")] = 6,
    exact: Annotated[
        bool, typer.Option("--exact", help="Dry-run the first rows: the real runtime on fake tensors.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="TUNED.YAML", help="Write the config of row 1 to this file.")
    ] = None,
    row: Annotated[int, typer.Option(min=1, help="Row to write with --out.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="List why settings were refused, cannot fit or are not used.")
    ] = False,
    why_not: Annotated[
        str | None, typer.Option(metavar="KIND", help="Explain why this technique is not in row 1.")
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Say how to train, from predictions alone: no GPU is needed; exits 1 if nothing fits."""
    given = dict(locals())
    from memtune.cli import _search

    return _search.plan(given)


@app.command(epilog="Example: memtune trial model.py --config tuned.yaml --gpus 8")
def trial(
    model: Model,
    config: Annotated[Path, typer.Option(help="Config to run; only `settings` is required.")],
    device: Device = None,
    gpus: Gpus = None,
    workers: Workers = None,
    max_memory: Memory = None,
    micro_batch: MicroBatch = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps.")] = 3,
    offload_dir: OffloadDir = None,
    seed: Seed = 0,
    executor: Annotated[str, typer.Option(metavar="auto|local|ray", help="Launcher of the trial.")] = "auto",
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run one config once in fresh processes, and print its step time and peak memory."""
    given = dict(locals())
    from memtune.cli import _commands

    return _commands.trial(given)


@app.command(
    epilog="Example: memtune run tuned.yaml -- torchrun --standalone --nproc-per-node=8 train.py",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run(context: typer.Context, config: ConfigPath) -> int:
    """Run a training command, given after --, with the environment that the config needs."""
    from memtune.cli import _commands

    return _commands.run(config, [*context.args])


@app.command()
def techniques(
    kind: Annotated[
        str | None, typer.Argument(help="Describe this technique and its knobs: zero3, or recompute=lohan.")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Print which techniques work together, and why others do not.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List every technique (axis, kind, exactness, title), or describe one with its knobs."""
    if matrix and kind is not None:
        from memtune.errors import UsageError

        raise UsageError("--matrix has all techniques.", fix=f"memtune techniques {kind}", code="MT100")
    if matrix:
        from memtune.cli import _matrix

        return _matrix.show(as_json)
    from memtune.cli import _commands

    return _commands.techniques(as_json) if kind is None else _commands.technique(kind, as_json)


@app.command()
def explain(
    config: ConfigPath,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL.PY[:NAME]", help="Record it and simulate each setting again.")
    ] = None,
    gpus: Gpus = None,
    device: Device = None,
    workers: Workers = None,
    gpu_type: GpuType = None,
    nodes: Nodes = None,
    max_memory: Memory = None,
    why_not: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Explain why this technique is not used instead; needs --model."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also descriptions, sources, plans and all figures.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Explain each setting of a config: its reason, its costs and its savings."""
    given = dict(locals())
    from memtune.cli import _explain

    return _explain.explain(given)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine (under a minute) and save the result.")
    ] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> int:
    """Report this machine's hardware and software, and missing optional parts."""
    from memtune.cli import _commands

    if calibrate:
        return _commands.calibrate(device, as_json)
    return _commands.doctor(as_json)


@app.command()
def clean(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Default: $MEMTUNE_OFFLOAD_DIR and $TMPDIR.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Remove files of your dead runs, including those for resume: last_step."""
    from memtune.cli import _commands

    return _commands.clean(directory, as_json)


@app.command()
def replay(
    snapshot: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT.PICKLE", help="File from torch.cuda.memory._dump_snapshot.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SETTINGS",
            help="Settings such as max_split_size_mb=128, or gmlake; repeatable, one replay each.",
        ),
    ] = None,
    device: Annotated[
        int | None, typer.Option(min=0, help="Index of the GPU; default: the one with the longest trace.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="GPU memory available to the process, like 80GiB.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Replay a recorded run under other allocator settings; name those that reserve least."""
    from memtune.cli import _replay

    return _replay.replay_snapshot(snapshot, settings or [], device, capacity, as_json)


@app.command()
def watch(study: StudyName = None) -> int:
    """Attach the search screen to a running or finished search."""
    from memtune.cli import _commands

    return _commands.watch(study)


@app.command()
def report(
    study: StudyName = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a search as one HTML page with pictures; it needs no network."""
    from memtune.cli import _commands

    return _commands.report(study, out, force, as_json)


@config_app.command("check")
def config_check(config: ConfigPath, as_json: AsJson = False) -> int:
    """Check a config strictly."""
    from memtune.cli import _commands

    return _commands.config_check(config, as_json)


@config_app.command("show")
def config_show(config: ConfigPath, as_json: AsJson = False) -> int:
    """Print a config in the form that memtune writes."""
    from memtune.cli import _commands

    return _commands.config_show(config, as_json)


@config_app.command("schema")
def config_schema() -> int:
    """Print the JSON Schema of a config, with all techniques."""
    from memtune.cli import _commands

    return _commands.config_schema()

"""A rank that misbehaves as its trial requests: `config["do"]` names a function below, `config["on"]` the
rank that runs it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TRIAL = json.loads(Path(os.environ["MEMTUNE_TRIAL_FILE"]).read_text())
ASKED = TRIAL["config"]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(ASKED["folder"])


def report(line):
    os.write(int(os.environ["MEMTUNE_REPORT_FD"]), json.dumps(line).encode() + b"\n")


def good(**more):
    report({"result": {"status": "ok", "losses": [2.0, 1.0], "step_s_all": [0.1 + RANK, 0.2, 0.3], **more}})


def note(name, text=""):
    """Write a file for the test, complete from the moment it exists."""
    path = FOLDER / name
    path.with_suffix(".part").write_text(text or str(os.getpid()))
    path.with_suffix(".part").rename(path)


def first_time(name="tried"):
    try:
        (FOLDER / f"{name}-{RANK}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def sleep_long():
    note(f"rank-{RANK}")
    time.sleep(1000)


def well():
    report({"stage": "building"})
    report({"stage": "step 1/1", "device_bytes": 123})
    good(
        peak_allocated_bytes=100 + RANK,
        memory_by_kind={"parameter": 10 + RANK},
        link_bytes={"collective": 5 * RANK},
        audit={
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "meet": os.environ["MEMTUNE_RENDEZVOUS"],
            "pid": os.getpid(),
            "cores": sorted(os.sched_getaffinity(0)),
        },
    )


def on_drives():
    """Leave files on each drive from which a training run could resume."""
    for drive in os.environ["MEMTUNE_OFFLOAD_DIR"].split(":"):
        folder = Path(drive, f"memtune-run-{RANK}")
        folder.mkdir(mode=0o700)
        (folder / "manifest-0").write_text("what a step kept")
    if ASKED.get("hang") and first_time():
        sleep_long()
    good(audit={"drives": os.environ["MEMTUNE_OFFLOAD_DIR"]})


def segfault():
    print("about to read address 0", flush=True)
    ctypes.string_at(0)


def exit_three():
    print("no licence server found")
    sys.exit(3)


def exit_zero():
    print("all done, bye")


def raises():
    raise RuntimeError(f"shapes do not match on rank {RANK}")


def out_of_memory():
    report({"result": {"status": "oom", "reason": "asked for 5 GiB", "peak_allocated_bytes": 77}})
    sleep_long()


def malformed():
    report({"result": {"status": "splendid"}})
    sleep_long()


def hang_in_wonderland():
    report({"stage": "step 1/9"})
    time.sleep(0.1)
    report({"stage": "step 2/9"})
    note(f"rank-{RANK}")
    while True:
        time.sleep(0.01)


def stopped():
    note(f"rank-{RANK}")
    report({"stage": "step 1/9"})
    os.kill(os.getpid(), signal.SIGSTOP)


def stubborn():
    """Hang and ignore SIGTERM, with a child whose parent has ended."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", child])
    note("stubborn", str(process.pid))
    sleep_long()


def daemon():
    """Leave a process that forked twice and has its own session."""
    script = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    script += (
        "open(sys.argv[1] + '.part', 'w').write(str(os.getpid())); os.rename(sys.argv[1] + '.part',"
        " sys.argv[1])\n"
    )
    script += "time.sleep(1000)"
    subprocess.run([sys.executable, "-c", script, str(FOLDER / "daemon")], check=True)
    while not (FOLDER / "daemon").exists():
        time.sleep(0.01)


def daemon_then_well():
    daemon()
    well()


def daemon_then_sleep():
    daemon()
    sleep_long()


def forked_daemon_then_sleep():
    """As `daemon_then_sleep`, but the daemon executes nothing."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note("daemon")
            time.sleep(1000)
        os._exit(0)
    while not (FOLDER / "daemon").exists():
        time.sleep(0.01)
    sleep_long()


def lost_once():
    """Wait to be killed from outside at the first try, succeed at the second."""
    if first_time():
        sleep_long()
    well()


def flood():
    """Print more than a pipe holds on both streams, and report many lines at the same time."""
    for i in range(2000):
        print("x" * 2000)
        print("y" * 2000, file=sys.stderr)
        report({"stage": f"step {i}/2000", "padding": "z" * 2000})
    well()


def well_then_crash():
    well()
    os.abort()


def well_then_hang():
    well()
    sleep_long()


def gloo_sum():
    """Run a real all-reduce; on request one rank skips it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=os.environ["MEMTUNE_RENDEZVOUS"], rank=RANK, world_size=WORLD)
    value = torch.tensor([float(RANK + 1)])
    for step in range(3):
        report({"stage": f"step {step + 1}/3"})
        if step == 2 and ASKED.get("skip") == RANK:
            sleep_long()
        time.sleep(0.02 * RANK)
        dist.all_reduce(value)
    good(losses=[value.item()])


def gloo_raise():
    """Rank 1 raises while the others wait for it in a collective."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=os.environ["MEMTUNE_RENDEZVOUS"], rank=RANK, world_size=WORLD)
    if RANK == 1:
        raises()
    dist.barrier()


if ASKED.get("on", RANK) == RANK:
    globals()[ASKED["do"]]()
else:
    globals()[ASKED.get("else", "sleep_long")]()

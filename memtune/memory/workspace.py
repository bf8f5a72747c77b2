"""Measures kernel workspace op by op: memory that an op allocates and frees, which fake runs cannot see.

An op runs alone, on the device, with inputs of the same shapes, strides and dtypes; its workspace is the peak
during the run minus the larger of the live bytes before and after. It depends on the op, the sizes, the CPU's
instruction set and the number of threads, so a table belongs to one machine and records which.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from memtune.device import accelerator, memory_statistics, platform_of, streams
from memtune.errors import EnvironmentFault
from memtune.memory import cpu_allocator
from memtune.memory.kernel_layouts import with_kernel_layout
from memtune.runtime import WatchingMode

SCHEMA_VERSION = 1
_CHILD_TIMEOUT_S = 600

Signature = str
"""Op with its arguments as canonical JSON: `["aten.mm.default",[{"t":["float32",[2,3],[3,1]]},…],{}]`."""

TensorMeta = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape, stride."""


@dataclass(frozen=True)
class Measured:
    """Memory use of one op that ran alone."""

    workspace_bytes: int
    """Peak of bytes that it allocated and freed while it ran."""
    outputs: tuple[TensorMeta, ...]
    """Metadata of each output tensor (see `RealOutputs` for cases where fake ones differ)."""


# -- signatures ----------------------------------------------------------------------------------------------


def signature(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Return the key of an op and its arguments (real, fake or meta tensors alike) in a workspace table."""
    return json.dumps(
        [str(func), [_encode(a) for a in args], {k: _encode(v) for k, v in kwargs.items()}],
        separators=(",", ":"),
    )


def op_of(key: Signature) -> str:
    """Return the op's name in a signature: `aten.convolution.default`."""
    return str(json.loads(key)[0])


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype, shape, stride = _described(value)
        # Kernels of products resolve a conjugation themselves: their workspace depends on it.
        tag = "conj" if value.dtype.is_complex and value.is_conj() else "t"
        return {tag: [dtype, list(shape), list(stride)]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # Kernels branch on 0, ±1, infinity and NaN, never on others: a learning rate that changes each step
        # is one entry.
        if value != value or abs(value) == float("inf"):
            return {"f": str(value)}
        return value if value in (-1.0, 0.0, 1.0) else 0.5 if value > 0 else -0.5
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, torch.Generator):
        return {"generator": value.device.type}
    return {"other": type(value).__name__}  # process groups: an op that needs one cannot run alone


def _decode(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in ("t", "conj"):
        dtype, shape, stride = content
        made = _input(dtype, shape, stride, device)
        return made.conj() if tag == "conj" else made
    if tag == "f":
        return float(content)
    if tag == "torch":
        return getattr(torch, content)
    if tag == "device":
        return device
    if tag == "generator":
        return torch.Generator(device)
    raise NotImplementedError(f"an argument of type {content} cannot be recreated")


def _described(tensor: Tensor) -> TensorMeta:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride())


def _input(dtype: str, shape: list[int], stride: list[int], device: torch.device) -> Tensor:
    """Return a tensor of ones; zeros for integers and bools, valid as indices and masks."""
    made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    whole = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,), 0)
    whole.fill_(1 if made.is_floating_point() or made.is_complex() else 0)
    return made


def _resolve(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


# -- measuring -----------------------------------------------------------------------------------------------


def measure(key: Signature, device: torch.device | str = "cpu") -> Measured:
    """Run the op of `key` alone on `device` and measure its workspace; the first of two runs warms caches.

    The random state is restored; on CPU the native ledger is installed and its peak reset.

    Raises:
        EnvironmentFault: On CPU, when the native ledger cannot be built.
        NotImplementedError: The op needs an argument that cannot be made from a signature (a process group).
    """
    device = torch.device(device)
    name, args, kwargs = json.loads(key)
    op = _resolve(name)
    args, kwargs = _decode(args, device), {k: _decode(v, device) for k, v in kwargs.items()}
    # Workspace is measured in the middle of a user's process, whose random numbers must not change.
    with accelerator.fork_rng(device), torch.autocast(device.type, enabled=False), torch.enable_grad():
        op(*args, **kwargs)
        # The first run has filled oneDNN's primitive cache and the library handles' buffers.
        before = _start(device)
        out = op(*args, **kwargs)
        peak, after = _stop(device)
    return Measured(
        # An op that frees an input inside would otherwise count the input as workspace.
        max(0, peak - max(before, after)),
        tuple(_described(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)),
    )


def _start(device: torch.device) -> int:
    if not platform_of(device).is_host:
        streams.synchronize(device)
        memory_statistics.reset_peaks(device)
        return memory_statistics.requested_bytes(device, "current")
    cpu_allocator.install()
    cpu_allocator.reset_peak()
    return cpu_allocator.live_bytes()


def _stop(device: torch.device) -> tuple[int, int]:
    if not platform_of(device).is_host:
        peak, now = (memory_statistics.requested_bytes(device, which) for which in ("peak", "current"))
        return peak, now
    return cpu_allocator.peak_bytes(), cpu_allocator.live_bytes()


def made_for(device: torch.device | str = "cpu", threads: int | None = None) -> dict[str, str | int]:
    """Return what the entries of a table depend on besides the signature.

    Args:
        device: Device of the ops.
        threads: Number of CPU threads; None: that of this process.
    """
    # A table of another machine is not used.
    device = torch.device(device)
    if not platform_of(device).is_host:
        return {"torch": torch.__version__, "device": accelerator.name(device)}
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "device": f"cpu-{capability}",
        "threads": threads or torch.get_num_threads(),
    }


# -- the table -----------------------------------------------------------------------------------------------


@dataclass
class WorkspaceTable:
    """Measured workspaces by signature, for one device; also a `Workspace` for a `ModeLedger`."""

    made_for: dict[str, str | int] = field(default_factory=made_for)
    entries: dict[Signature, Measured] = field(default_factory=dict)
    unknown: dict[Signature, str] = field(default_factory=dict)
    """Ops that could not be run alone, with the reason."""
    _child: subprocess.Popen[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the workspace bytes of an op; 0 for one that is not in the table."""
        return self.workspace_bytes(signature(func, args, kwargs))

    def workspace_bytes(self, key: Signature) -> int:
        """Return the workspace bytes of the op of `key`; 0 for one that is not in the table."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.workspace_bytes

    def nonzero(self) -> dict[Signature, int]:
        """Return the nonzero entries, largest first."""
        rows = sorted(self.entries.items(), key=lambda row: -row[1].workspace_bytes)
        return {key: entry.workspace_bytes for key, entry in rows if entry.workspace_bytes}

    def fill(self, keys: Iterable[Signature], device: torch.device | str = "cpu") -> None:
        """Measure the missing `keys` in this process; ops that cannot run alone are added to `unknown`."""
        for key in dict.fromkeys(keys):
            # A failure is remembered as well: the op would fail again, and slowly.
            if key in self.entries or key in self.unknown:
                continue
            try:
                self.entries[key] = measure(key, device)
            except (RuntimeError, NotImplementedError, IndexError, AttributeError) as error:
                self.unknown[key] = (str(error).strip().splitlines() or [type(error).__name__])[0]

    def fill_in_child(self, keys: Iterable[Signature], device: torch.device | str = "cpu") -> None:
        """Fill the table in a child process, so that this process's allocator is not replaced.

        Raises:
            EnvironmentFault: The child died; the message has the last line of its stderr.
        """
        wanted = [key for key in dict.fromkeys(keys) if key not in self.entries and key not in self.unknown]
        if not wanted:
            return
        request = {"device": str(device), "threads": self.made_for.get("threads", 1), "keys": wanted}
        with self._child or _start_child() as child:
            self._child = None
            try:
                output, errors = child.communicate(json.dumps(request), _CHILD_TIMEOUT_S)
            except BaseException:
                child.kill()
                raise
        if child.returncode != 0:
            last = (errors.strip().splitlines() or ["no output"])[-1]
            raise EnvironmentFault(
                "the process that measures kernel workspaces died", evidence=last, code="MT414"
            )
        self._merge(WorkspaceTable.from_json(output))

    @contextlib.contextmanager
    def child_loading(self) -> Iterator[None]:
        """Start the child of `fill_in_child` now if the table is empty: it loads torch while this process
        works. It is gone at the end.
        """
        self._child = None if self.entries else _start_child()
        try:
            yield
        finally:
            child, self._child = self._child, None
            if child is not None:
                child.kill()
                child.communicate()

    def _merge(self, other: WorkspaceTable) -> None:
        self.entries.update(other.entries)
        self.unknown.update(other.unknown)

    def to_json(self) -> str:
        """Return the table as one JSON document."""
        rows = {key: [entry.workspace_bytes, entry.outputs] for key, entry in self.entries.items()}
        document = {
            "schema_version": SCHEMA_VERSION,
            "made_for": self.made_for,
            "entries": rows,
            "unknown": self.unknown,
        }
        return json.dumps(document, indent=0)

    @classmethod
    def from_json(cls, text: str) -> WorkspaceTable:
        """Return the table in `text`.

        Raises:
            EnvironmentFault: It is no such table, or one of another schema.
        """
        try:
            document = json.loads(text)
            if document["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema {document['schema_version']}, not {SCHEMA_VERSION}")
            entries = {
                key: Measured(
                    int(n_bytes),
                    tuple((str(dtype), tuple(shape), tuple(stride)) for dtype, shape, stride in outputs),
                )
                for key, (n_bytes, outputs) in document["entries"].items()
            }
            return cls(dict(document["made_for"]), entries, dict(document["unknown"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EnvironmentFault(
                "this is not a workspace table that can be read", evidence=str(error), code="MT415"
            ) from error

    def save(self) -> Path:
        """Write the table to the cache directory, merged with what other processes have saved.

        Return the path.
        """
        path = _cache_path(self.made_for)
        self._merge(_read(path, self.made_for))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(self.to_json())
        # Atomic: processes that tune at the same time read a whole table, old or new.
        os.replace(file.name, path)
        return path

    @classmethod
    def cached(cls, device: torch.device | str = "cpu", threads: int | None = None) -> WorkspaceTable:
        """Return the table saved for this machine (and this number of CPU threads), else an empty one."""
        wanted = made_for(device, threads)
        return _read(_cache_path(wanted), wanted)


_CHILD = "import gc; gc.disable(); from memtune.memory.workspace import main; main()"


def _start_child() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # `-P`: modules in the user's folder must not be imported instead of torch or json.
        # Nothing is collected: importing torch, most of its work, leaves no garbage.
        [sys.executable, "-P", "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"OMP_WAIT_POLICY": "passive", **os.environ},
    )


def _cache_path(made: Mapping[str, str | int]) -> Path:
    name = "-".join(str(value) for value in made.values())
    return (
        cpu_allocator.cache_dir()
        / "workspace"
        / ("".join(c if c.isalnum() or c in ".+-" else "_" for c in name) + ".json")
    )


def _read(path: Path, wanted: dict[str, str | int]) -> WorkspaceTable:
    try:
        table = WorkspaceTable.from_json(path.read_text())
    except (OSError, EnvironmentFault):
        return WorkspaceTable(dict(wanted))  # a cache: what is missing or broken is measured again
    return table if table.made_for == wanted else WorkspaceTable(dict(wanted))


class SignatureCollector:
    """A `Workspace` that notes which ops ran: use it in a `ModeLedger`, then `fill` a table with `keys`."""

    def __init__(self) -> None:
        self.keys: dict[Signature, None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Note the op; its workspace counts as 0."""
        self.keys[signature(func, args, kwargs)] = None
        return 0


FAKE_DEVICE = torch.ops.prim.device.default
"""Called on a fake tensor for each `tensor.device`, more often than all other ops together."""


_GROUPED_PRODUCT = "aten._grouped_mm.default"


def _wide_grouped_product(func: Any, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the fake output of a grouped product in another type than bfloat16."""
    # The fake implementation takes only that.
    narrow = (torch.empty_like(each, dtype=torch.bfloat16) for each in (left, right))
    out: Tensor = func(*narrow, *args, **kwargs)
    return left.new_empty(out.shape)


class RealOutputs(WatchingMode):
    """Gives fake outputs the sizes and layouts of the real op, for ops whose fake implementation differs.

    Enter it inside the FakeTensorMode and outside a recorder, so that the recorder sees the outputs of a real
    run. Each of `OPS` runs once for real, alone, normalisations on one row; without the native ledger, its
    outputs stay fake.

    Args:
        table: Stores the measurements.
        on_cpu: The op is to run on CPU. Otherwise layouts that only its CPU kernel gives stay as they are.
    """

    OPS: ClassVar[dict[str, str]] = {
        "aten.mkldnn_rnn_layer.default": "the fake reserve that backward reads is empty",
        "aten.mkldnn_rnn_layer_backward.default": "the fake gradients of the two biases are one tensor",
        "aten.native_layer_norm.default": "mean and rstd of a bf16 input are float32 when the weights are",
        "aten.native_group_norm.default": "mean and rstd of a bf16 input are float32 when the weights are",
        "aten._embedding_bag.default": "the bag of each index has one place more",
    }
    SHRUNK: ClassVar[frozenset[str]] = frozenset(
        f"aten.{loss}.default"
        for loss in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
    )
    """Losses that are made at full size, then resized to a scalar, which holds that memory on any device."""
    ONE_ROW: ClassVar[frozenset[str]] = frozenset(
        {"aten.native_layer_norm.default", "aten.native_group_norm.default"}
    )
    """Only the dtypes of their outputs differ, which one row shows in far less time and memory."""

    def __init__(self, table: WorkspaceTable, *, on_cpu: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self._on_cpu = table, on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and correct its outputs."""
        kwargs = kwargs or {}
        if func is FAKE_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        # A subclass dispatches again on its inner tensors, each of which arrives here again.
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        name = str(func)
        if name == _GROUPED_PRODUCT and args[0].dtype != torch.bfloat16 and isinstance(args[0], FakeTensor):
            return _wide_grouped_product(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func.namespace != "aten":
            return out
        # Nothing to measure: the size follows from the arguments.
        if name in self.SHRUNK:
            out = _in_memory_of(args, out)
        out = with_kernel_layout(func, args, kwargs, out, on_cpu=self._on_cpu)
        if name not in self.OPS:
            return out
        # A real op inside a fake run (constants) has real outputs already.
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(out)):
            return out
        one_row = name in self.ONE_ROW
        with _disable_current_modes():
            # Outside all modes: the measurement must not be recorded, nor see fake tensors.
            key = signature(func, _one_row(args) if one_row else args, kwargs)
            if cpu_allocator.available() is None:
                self._table.fill([key])
        entry = self._table.entries.get(key)
        leaves = [leaf for leaf in out if isinstance(leaf, Tensor)]
        if entry is None or len(leaves) != len(entry.outputs):
            return out
        wanted = [
            (real[0], *_described(leaf)[1:]) if one_row else real
            for leaf, real in zip(leaves, entry.outputs, strict=True)
        ]
        # By storage: two outputs that are one fake tensor are two real ones.
        seen: set[int] = set()
        return tuple(_corrected(leaf, real, seen) for leaf, real in zip(leaves, wanted, strict=True))


def _one_row(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a layer or group norm reduced to one row, or one sample of one pixel."""
    whole = args[0]
    if isinstance(args[1], list | tuple):  # layer: input, normalized shape, weight, bias, eps
        shape, rest = [1] * (whole.dim() - len(args[1])) + list(args[1]), args[1:]
    else:  # group: input, weight, bias, samples, channels, pixels, groups, eps
        shape, rest = [1, args[4]] + [1] * (whole.dim() - 2), (*args[1:3], 1, args[4], 1, *args[6:])
    return torch.empty(shape, dtype=whole.dtype, device="meta"), *rest


def _corrected(fake: Tensor, real: TensorMeta, seen: set[int]) -> Tensor:
    """Return `fake` if it matches `real` and shares no storage, else a new fake that does."""
    address = fake.untyped_storage()._cdata
    if _described(fake) == real and address not in seen:
        seen.add(address)
        return fake
    dtype, shape, stride = real
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=fake.device)


def _in_memory_of(args: tuple[Any, ...], out: Tensor) -> Tensor:
    """Return `out`, a loss, in memory of one value per element where it was reduced."""
    shape = torch.broadcast_shapes(*(each.shape for each in args[:2]))
    return (
        out
        if out.shape == shape
        else torch.empty(shape, dtype=out.dtype, device=out.device).resize_(out.shape)
    )


def main() -> None:
    """Run the child of `fill_in_child`: a request on stdin, the table on stdout."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    table = WorkspaceTable(made_for(request["device"]))
    table.fill(request["keys"], request["device"])
    sys.stdout.write(table.to_json())

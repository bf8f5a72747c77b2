"""Reader and writer of `torch.distributed.checkpoint` folders that trust no byte of them.

The writer adds to each stored item, in `.metadata`, the CRC-32 of its bytes, and appends to `.metadata` a
digest of itself. torch ignores both: its unpickler takes unknown attributes and stops at the end of the
pickle. The reader checks every item before it is used, reads `.metadata` without importing or calling
anything, and reads values that are no tensors as torch's `weights_only` does. Checkpoints of other scripts
have no checksums and are read without.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memtune import safe_pickle
from memtune.errors import EnvironmentFault
from memtune.safe_pickle import Name, Record

T = TypeVar("T")
_CHUNK_BYTES = 1 << 20
_MARK, _DIGEST_BYTES = b"\nmemtune blake2b ", 16
"""`.metadata` ends with this mark and the BLAKE2b digest of everything before it."""
_SUMS = "checksums"
"""Attribute of `Metadata` that says that every item has a `_CRC`."""
_CRC = "crc32"
"""Attribute of `_StorageInfo`."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CHECKPOINT = "torch.distributed.checkpoint"
_PATHS = ("pathlib", "pathlib._local")
_CLASSES = {
    *((f"{_CHECKPOINT}.metadata", each.__name__) for each in (Metadata, MetadataIndex, StorageMeta)),
    *((f"{_CHECKPOINT}.metadata", each.__name__) for each in (TensorProperties, TensorStorageMetadata)),
    *((f"{_CHECKPOINT}.metadata", each.__name__) for each in (ChunkStorageMetadata, BytesStorageMetadata)),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *((module, name) for module in _PATHS for name in ("PosixPath", "WindowsPath")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in _DTYPES),
}
"""All classes in the `.metadata` of a checkpoint."""


class CheckedWriter(FileSystemWriter):
    """torch's writer of one file per rank, with a checksum for each item and for the metadata."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; they are on the drive when this returns.

        Raises:
            OSError: They cannot be written.
        """
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with open(Path(self.path, name), "wb") as file:
            results = [_write_item(file, name, planner, item) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which makes the folder a checkpoint; a crash leaves it complete or absent.

        Raises:
            OSError: It cannot be written.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for items in results for each in items}
        metadata.storage_meta = self.storage_meta()
        vars(metadata)[_SUMS] = _CRC
        body = pickle.dumps(metadata, protocol=4) + _MARK
        new, place = Path(self.path, ".metadata.tmp"), Path(self.path, ".metadata")
        with open(new, "wb") as file:
            file.write(body + _digest(body))
            file.flush()
            os.fsync(file.fileno())
        # After the items of all ranks: with `.metadata` the folder becomes a checkpoint.
        os.replace(new, place)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the rename is durable only now
        finally:
            os.close(folder)


class CheckedReader(FileSystemReader):
    """torch's reader, for a checkpoint that may be damaged or hostile.

    Attributes:
        metadata: The checked description of the checkpoint.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Read the description of the checkpoint in `folder`.

        Raises:
            UsageError: `.metadata` would run code (MT142), or is truncated or damaged (MT141).
            EnvironmentFault: It does not describe a checkpoint, or describes more than there is (MT373).
            OSError: It cannot be read.
        """
        super().__init__(folder)
        self._checked: set[MetadataIndex] = set()
        self.metadata = _read_metadata(Path(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return `metadata`."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan`, each after its checksum was found right.

        Raises:
            EnvironmentFault: An item is damaged (MT373).
            OSError: A file cannot be read.
        """
        for item in sorted(plan.items, key=lambda each: self._place(each.storage_index)):
            # Item by item, so that damage is found before the item's bytes are in a parameter.
            self._check(item.storage_index)
            super().read_data(replace(plan, items=[item]), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        info = self.storage_data[index]
        return info.relative_path, info.offset

    def _check(self, index: MetadataIndex) -> None:
        """Raise if the bytes of an item do not have the checksum that was written; read them in pieces."""
        info = self.storage_data[index]
        wanted = vars(info).get(_CRC)
        if wanted is None or index in self._checked:
            return
        found, left = 0, info.length
        with open(Path(self.path, info.relative_path), "rb") as file:
            file.seek(info.offset)
            while left and (piece := file.read(min(left, _CHUNK_BYTES))):
                found, left = zlib.crc32(piece, found), left - len(piece)
        if left or found != wanted:
            raise _damaged(
                self.path,
                f"{index.fqn} in {info.relative_path} has the checksum {found:08x}, {wanted:08x} was written."
                if not left
                else f"{info.relative_path} ends {left} bytes before the end of {index.fqn}.",
            )
        self._checked.add(index)


class CheckedPlanner(DefaultLoadPlanner):
    """torch's planner of reads, which reads values that are no tensors without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict.

        Raises:
            pickle.UnpicklingError: It has a class that torch does not know to be data.
        """
        # torch's own method reads the same bytes with weights_only=False: it gets a copy of them.
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


# -- writing -------------------------------------------------------------------------------------------------


class _Hashed:
    """A file that computes the CRC-32 of what is written to it."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.crc32 = file, 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return self.file.write(data)

    def flush(self) -> None:
        """Leave flushing to the end of the file."""


def _write_item(file: io.BufferedWriter, name: str, planner: SavePlanner, item: WriteItem) -> WriteResult:
    hashed, begin = _Hashed(file), file.tell()
    data: Any = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        hashed.write(data.getbuffer())
    else:
        torch.save(_alone(data), cast(IO[bytes], hashed))
    length = file.tell() - begin
    info = _StorageInfo(name, begin, length)
    vars(info)[_CRC] = hashed.crc32
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=info)


def _alone(tensor: Tensor) -> Tensor:
    """Return `tensor` on the host, in a storage of its own size: torch.save writes whole storages."""
    host = tensor.detach().cpu()
    return host if host.untyped_storage().size() == host.nbytes else host.clone()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


# -- reading -------------------------------------------------------------------------------------------------


class _Malformed(Exception):
    """Error in the description of a checkpoint; the text is the evidence."""


def _damaged(folder: str | PathLike[str], evidence: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"The checkpoint in {folder} is damaged.",
        evidence=evidence,
        fix="load another checkpoint",
        code="MT373",
    )


def _read_metadata(folder: Path) -> Metadata:
    data = Path(folder, ".metadata").read_bytes()
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    has_sums = body.endswith(_MARK)
    if has_sums and _digest(body) != digest:
        raise _damaged(folder, "The digest of .metadata is wrong.")
    found = safe_pickle.load(
        body.removesuffix(_MARK) if has_sums else data,
        str(folder / ".metadata"),
        fix="load another checkpoint",
        allowed=_CLASSES,
    )
    try:
        state = _state(found, "Metadata")
        # Removing the digest would else turn off all checks.
        if (_SUMS in state) != has_sums:
            raise _Malformed(".metadata is cut off: it has lost its digest.")
        return _metadata(state, folder)
    except _Malformed as error:
        raise _damaged(folder, str(error)) from None
    except (OSError, OverflowError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from None


def _metadata(state: Mapping[str, Any], folder: Path) -> Metadata:
    described = {
        _of(str, key): _described(value) for key, value in _of(dict, state.get("state_dict_metadata")).items()
    }
    stored = {
        _index(key): _info(value, _SUMS in state)
        for key, value in _of(dict, state.get("storage_data")).items()
    }
    _require_stored(described, stored, folder)
    return Metadata(described, storage_data=stored, storage_meta=StorageMeta())


def _require_stored(
    described: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    stored: Mapping[MetadataIndex, _StorageInfo],
    folder: Path,
) -> None:
    """Raise if a tensor is larger than what is stored of it: a few bytes must not ask for much memory."""
    sizes: dict[str, int] = {}
    bytes_of = dict.fromkeys(described, 0)
    for index, info in stored.items():
        if info.relative_path not in sizes:
            place = folder / info.relative_path
            sizes[info.relative_path] = place.stat().st_size if place.is_file() else -1
        size = sizes[info.relative_path]
        if info.offset + info.length > size:
            there = f"has {size} of at least {info.offset + info.length} bytes" if size >= 0 else "is missing"
            raise _Malformed(f"{info.relative_path} {there}.")
        if index.fqn not in bytes_of:
            raise _Malformed(f"{index.fqn} is stored and not described.")
        bytes_of[index.fqn] += info.length
    # Of transformed data, compressed for example, the size says nothing.
    packed = {index.fqn for index, info in stored.items() if info.transform_descriptors}
    for name, value in described.items():
        needed = 1
        if isinstance(value, TensorStorageMetadata):
            needed = math.prod(value.size) * value.properties.dtype.itemsize
        if bytes_of[name] < needed and name not in packed:
            raise _Malformed(f"{name} has {needed} bytes, of which {bytes_of[name]} are stored.")


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is Record and value.of.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(value, "TensorStorageMetadata")
    properties = _of(Record, state.get("properties")).state
    if type(properties) is not tuple or not properties or type(properties[0]) is not Name:
        raise _Malformed("A tensor has no dtype.")
    dtype = _DTYPES.get(properties[0].name)
    if dtype is None:
        raise _Malformed(f"{properties[0].name} is no dtype.")
    chunks = [
        ChunkStorageMetadata(_size(each.get("offsets")), _size(each.get("sizes")))
        for each in (_state(chunk, "ChunkStorageMetadata") for chunk in _of(list, state.get("chunks")))
    ]
    size = _size(state.get("size"))
    for chunk in chunks:
        ends = [first + length for first, length in zip(chunk.offsets, chunk.sizes, strict=False)]
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(map(int.__gt__, ends, size)):
            raise _Malformed(
                f"A part {tuple(chunk.sizes)} at {tuple(chunk.offsets)} is not in {tuple(size)}."
            )
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _index(value: Any) -> MetadataIndex:
    state = _state(value, "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _of(str, state.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _natural(index),
    )


def _info(value: Any, has_sum: bool) -> _StorageInfo:
    state = _state(value, "_StorageInfo")
    path, codecs = _of(str, state.get("relative_path")), state.get("transform_descriptors")
    # A hostile description must not name files outside of the folder.
    if path != os.path.basename(path) or path in ("", ".", "..") or "\0" in path:
        raise _Malformed(f"{path!r} is no file of this folder.")
    info = _StorageInfo(
        path,
        _natural(state.get("offset")),
        _natural(state.get("length")),
        None if codecs is None else [_of(str, each) for each in _of(list, codecs)],
    )
    if has_sum:
        vars(info)[_CRC] = _natural(state.get(_CRC))
    return info


def _state(value: Any, kind: str) -> Mapping[str, Any]:
    """Return the attributes of a record of the class `kind`."""
    if type(value) is not Record or value.of.name != kind or type(value.state) is not dict:
        raise _Malformed(f".metadata has {type(value).__name__} instead of {kind}.")
    return value.state


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise _Malformed(f".metadata has {type(value).__name__} instead of {kind.__name__}.")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _Malformed(f".metadata has {str(value)[:40]} instead of a size.")
    return value


def _size(value: Any) -> torch.Size:
    args = _of(Record, value).args
    if len(args) != 1 or type(args[0]) is not tuple:
        raise _Malformed("A shape has no dimensions.")
    return torch.Size(_natural(each) for each in args[0])

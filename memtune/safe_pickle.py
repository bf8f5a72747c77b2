"""Read pickles as data: no instruction here can import or call anything.

Python's own unpickler can be configured to refuse imports, but still trusts the file with its memory and its
recursion. This one supports dictionaries, lists, tuples, text, numbers, booleans and None. Objects of classes
that the caller names are returned as `Record`s, which hold the arguments and the state that the file gives,
so that a hostile file can only be refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from memtune.errors import UsageError

PROTOCOLS = range(2, 6)
_MAX_INT_BYTES = 16
_CODE = {
    "c": "GLOBAL",
    "\x93": "STACK_GLOBAL",
    "i": "INST",
    "o": "OBJ",
    "R": "REDUCE",
    "b": "BUILD",
    "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX",
    "P": "PERSID",
    "Q": "BINPERSID",
    "\x82": "EXT1",
    "\x83": "EXT2",
    "\x84": "EXT4",
}
"""Opcodes that would run code."""
_U16, _I32, _U32, _U64, _F64 = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q", ">d"))


class Name(NamedTuple):
    """A class, function or constant that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Record:
    """An object of a pickle, not built: the class, the arguments of its construction and its state."""

    of: Name
    args: tuple[Any, ...]
    state: Any = None


def load(data: bytes, name: str, *, fix: str, allowed: Collection[tuple[str, str]] = ()) -> Any:
    """Return the object in `data`.

    Args:
        data: A whole pickle.
        name: The file, for messages.
        fix: The next action if the file is truncated or damaged, for messages.
        allowed: Module and name of the classes whose objects are returned as `Record`s. A class alone is
            returned as a `Name`.

    Raises:
        UsageError: The data is truncated, no pickle, or damaged (MT141), or would run code (MT142).
    """
    if len(data) < 2 or data[0] != 0x80 or data[1] not in PROTOCOLS:
        raise UsageError(
            f"{name} is no pickle of a known form.", evidence=_looks_like(data), fix=fix, code="MT141"
        )
    reader = _Reader(data, name, fix, frozenset(allowed))
    try:
        return reader.run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        reader.damaged(f"{type(error).__name__}: {error}")


def _looks_like(data: bytes) -> str:
    known = {
        b"PK\x03\x04": "it is an archive, as torch.save writes them",
        b"\x1f\x8b": "compressed; unpack it first",
        b"{": "text",
    }
    if not data:
        return "it is empty"
    return next(
        (what for start, what in known.items() if data.startswith(start)), f"it starts with {data[:8]!r}"
    )


class _Reader:
    """A stack machine for the few instructions that plain data needs.

    After Python's pickletools documentation.
    """

    def __init__(self, data: bytes, name: str, fix: str, allowed: frozenset[tuple[str, str]]) -> None:
        self.data, self.name, self.at = data, name, 0
        self.fix, self.allowed = fix, allowed
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps, end = self.data, _STEPS, len(self.data)
        while self.at < end:
            opcode = data[self.at]
            self.at += 1
            step = steps.get(opcode)
            if step is not None:
                step(self)
            elif opcode == 0x2E:  # STOP
                if self.outer or len(self.stack) != 1:
                    self.damaged("it ends in the middle of an object")
                if self.at != end:
                    self.damaged(f"{end - self.at} bytes follow its end")
                return self.stack[0]
            else:
                self.refuse(opcode)
        raise self.cut_off(f"it ends after {end} bytes")

    def named(self, opcode: int, module: Any, name: Any) -> None:
        if (module, name) not in self.allowed:
            self.stack += [module, name]
            self.refuse(opcode)
        self.stack.append(Name(module, name))

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def record(self, opcode: int) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        if type(of) is not Name or type(args) is not tuple:
            self.refuse(opcode)
        self.stack.append(Record(of, args))

    def build(self) -> None:
        state, of = self.stack.pop(), self.stack[-1]
        if type(of) is not Record or of.state is not None:
            self.refuse(0x62)
        of.state = state

    def refuse(self, opcode: int) -> NoReturn:
        if chr(opcode) not in _CODE:
            self.damaged(f"opcode {opcode:#04x} has no place in plain data")
        named = [repr(each) for each in self.stack[-2:] if isinstance(each, str)]
        raise UsageError(
            f"{self.name} is refused: it asks for code to be run.",
            evidence=f"{_CODE[chr(opcode)]} at byte {self.at - 1}: {(' '.join(named) or 'an object')[:120]}",
            fix="do not open this file with anything else",
            code="MT142",
        )

    def damaged(self, why: str) -> NoReturn:
        raise UsageError(
            f"{self.name} is damaged at byte {self.at}.", evidence=why[:200], fix=self.fix, code="MT141"
        )

    def cut_off(self, evidence: str) -> UsageError:
        """Return the error of a file that ends too early."""
        return UsageError(f"{self.name} is cut off.", evidence=evidence, fix=self.fix, code="MT141")

    def skip(self, count: int) -> int:
        """Skip `count` bytes; return where they begin."""
        start, end = self.at, self.at + count
        if end > len(self.data):
            raise self.cut_off(f"byte {len(self.data)} of at least {end}")
        self.at = end
        return start

    def take(self, count: int) -> bytes:
        return self.data[self.skip(count) : self.at]

    def byte(self) -> int:
        return self.data[self.skip(1)]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.data, self.skip(form.size))[0]

    def text(self, count: int) -> None:
        self.stack.append(self.take(count).decode("utf-8", "surrogatepass"))

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.outer.pop()
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def long(self) -> None:
        count = self.byte()
        if count > _MAX_INT_BYTES:
            self.damaged(f"a number of {count} bytes")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not list:
            self.damaged("items for what is no list")
        into.extend(items)

    def update(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not dict or len(items) % 2:
            self.damaged("entries for what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Record):
                self.damaged("a key that is neither text, a number nor an object")
            into[key] = value

    def pop(self, count: int) -> list[Any]:
        found = [self.stack.pop() for _ in range(count)]
        return found[::-1]


_STEPS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda r: r.damaged("a protocol that is not known") if r.byte() not in PROTOCOLS else None,  # PROTO
    0x95: lambda r: r.number(_U64) and None,  # FRAME
    0x28: lambda r: r.mark(),  # MARK
    0x4E: lambda r: r.push(None),  # NONE
    0x88: lambda r: r.push(True),  # NEWTRUE
    0x89: lambda r: r.push(False),  # NEWFALSE
    0x4B: lambda r: r.push(r.byte()),  # BININT1
    0x4D: lambda r: r.push(r.number(_U16)),  # BININT2
    0x4A: lambda r: r.push(r.number(_I32)),  # BININT
    0x8A: lambda r: r.long(),  # LONG1
    0x47: lambda r: r.push(r.number(_F64)),  # BINFLOAT
    0x8C: lambda r: r.text(r.byte()),  # SHORT_BINUNICODE
    0x58: lambda r: r.text(r.number(_U32)),  # BINUNICODE
    0x8D: lambda r: r.text(r.number(_U64)),  # BINUNICODE8
    0x7D: lambda r: r.push({}),  # EMPTY_DICT
    0x5D: lambda r: r.push([]),  # EMPTY_LIST
    0x29: lambda r: r.push(()),  # EMPTY_TUPLE
    0x85: lambda r: r.push(tuple(r.pop(1))),  # TUPLE1
    0x86: lambda r: r.push(tuple(r.pop(2))),  # TUPLE2
    0x87: lambda r: r.push(tuple(r.pop(3))),  # TUPLE3
    0x74: lambda r: r.push(tuple(r.since_mark())),  # TUPLE
    0x61: lambda r: r.extend(r.pop(1)),  # APPEND
    0x65: lambda r: r.extend(r.since_mark()),  # APPENDS
    0x73: lambda r: r.update(r.pop(2)),  # SETITEM
    0x75: lambda r: r.update(r.since_mark()),  # SETITEMS
    0x63: lambda r: r.named(0x63, r.line(), r.line()),  # GLOBAL
    0x93: lambda r: r.named(0x93, *r.pop(2)),  # STACK_GLOBAL
    0x52: lambda r: r.record(0x52),  # REDUCE
    0x81: lambda r: r.record(0x81),  # NEWOBJ
    0x62: lambda r: r.build(),  # BUILD
    0x94: lambda r: r.put(len(r.memo)),  # MEMOIZE
    0x71: lambda r: r.put(r.byte()),  # BINPUT
    0x72: lambda r: r.put(r.number(_U32)),  # LONG_BINPUT
    0x68: lambda r: r.push(r.memo[r.byte()]),  # BINGET
    0x6A: lambda r: r.push(r.memo[r.number(_U32)]),  # LONG_BINGET
}

"""The header of a GGUF file: read and bounded before any library takes a count or a size from it.

The `gguf` package checks nothing: it takes lengths from the file as they are, and reads beyond its end. Here each
length, count and offset must lie within the file, and each name and text must be UTF-8. What passes can be read in time
and memory that are bounded by the size of the file.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import shown
from hf_posswap.utils.format import said_by
from hf_posswap.utils.printable import brief_repr

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST = {"keys": 2**16, "tensors": 2**16, "values in arrays": 2**23, "bytes of a text": 2**24}
"""Several times the most of any published file: 2 million values in arrays, for a vocabulary of 256 thousand tokens."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number, by `gguf.GGUFValueType`."""


def read_gguf(path: Path) -> Any:
    """Return a `gguf.GGUFReader` of the file at `path`, whose header was checked.

    Raises:
        CheckpointError: the file cannot be read, or is truncated or damaged.
    """
    import gguf

    try:
        with path.open("rb") as file:
            _Header(file).check()
        return gguf.GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error.strerror or error}.") from error
    except Exception as error:  # a _DamageError; and gguf raises anything
        raise CheckpointError(
            f"cannot read {shown(path)}: {said_by(error)}. Get the file again from its source."
        ) from error


class _DamageError(ValueError):
    pass


@dataclass
class _Header:
    """A header that is read once, from its beginning.

    Attributes:
        file: at its beginning.
        size: of the file, in bytes.
        values: how many values of arrays were read.
        alignment: of the tensors' data, in bytes.
        keys: that were read.
    """

    file: IO[bytes]
    size: int = 0
    values: int = 0
    alignment: int = _ALIGNMENT
    keys: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Read all of it.

        Raises:
            _DamageError: what is wrong, where, and what is expected.
        """
        self.size = os.fstat(self.file.fileno()).st_size
        magic = self._bytes(4, "the magic bytes")
        if magic != MAGIC:
            raise _DamageError(f"it begins with {magic!r}, and a GGUF file with {MAGIC!r}")
        (version,) = self._numbers("I", "the version")
        if version & 0xFFFF == 0:
            raise _DamageError(
                "its numbers are big-endian, and little-endian ones are read here: convert it with gguf-convert-endian"
            )
        if version not in _VERSIONS:
            raise _DamageError(
                f"it is of version {version}, and versions {' and '.join(map(str, _VERSIONS))} are read here"
            )
        tensors, keys = self._numbers("QQ", "the counts")
        self._refuse_more("tensors", tensors)
        self._refuse_more("keys", keys)
        for number in range(keys):
            self._key(number)
        self._places([self._tensor(number) for number in range(tensors)])

    def _bytes(self, count: int, label: str) -> bytes:
        at = self.file.tell()
        content = self.file.read(count) if count <= self.size - at else b""
        if len(content) != count:
            raise _DamageError(
                f"it ends at byte {self.size}, and {label} at byte {at} takes {count} bytes: it is truncated or damaged"
            )
        return content

    def _numbers(self, types: str, label: str) -> tuple[int, ...]:
        return struct.unpack(f"<{types}", self._bytes(struct.calcsize(f"<{types}"), label))

    def _refuse_more(self, unit: str, count: int) -> None:
        if count > _MOST[unit]:
            raise _DamageError(
                f"it says that it has {count} {unit}, before byte {self.file.tell()}, and at most {_MOST[unit]} are "
                "read here"
            )

    def _text(self, label: str) -> str:
        (length,) = self._numbers("Q", f"the length of {label}")
        self._refuse_more("bytes of a text", length)
        content = self._bytes(length, label)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _DamageError(
                f"{label} is {brief_repr(content, 80)}, which is not UTF-8, as all text of a GGUF file is"
            ) from error

    def _key(self, number: int) -> None:
        name = self._text(f"the name of key {number}")
        if name in self.keys:
            raise _DamageError(f"it has the key {brief_repr(name, 80)} twice")
        self.keys.add(name)
        label = f"the value of {brief_repr(name, 80)}"
        (value_type,) = self._numbers("I", f"the type of {label}")
        if value_type == _STRING:
            self._text(label)
        elif value_type == _ARRAY:
            self._array(label)
        elif value_type in _WIDTHS:
            content = self._bytes(_WIDTHS[value_type], label)
            if name == "general.alignment":
                self.alignment = int.from_bytes(content, "little")
                if value_type != _UINT32 or self.alignment.bit_count() != 1:
                    raise _DamageError(
                        f"general.alignment is {self.alignment}, of type {value_type}, and a power of two of type "
                        f"{_UINT32} is expected"
                    )
        else:
            raise _DamageError(f"{label} is of type {value_type}, which GGUF does not have")

    def _array(self, label: str) -> None:
        value_type, count = self._numbers("IQ", f"the length of {label}")
        self.values += count
        self._refuse_more("values in arrays", self.values)
        if value_type == _STRING:
            for index in range(count):
                self._text(f"entry {index} of {label}")
        elif value_type in _WIDTHS:
            self._bytes(count * _WIDTHS[value_type], label)
        else:
            raise _DamageError(
                f"{label} is an array of type {value_type}, and arrays of numbers or of texts are read here"
            )

    def _tensor(self, number: int) -> tuple[int, int, str]:
        """Return where the data of a tensor begins, its size in bytes, and the name of the tensor."""
        import gguf

        name = self._text(f"the name of tensor {number}")
        label = f"tensor {brief_repr(name, 80)}"
        (dimensions,) = self._numbers("I", f"the number of dimensions of {label}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamageError(f"{label} has {dimensions} dimensions, and 1 to {_MOST_DIMENSIONS} are expected")
        shape = self._numbers(f"{dimensions}Q", f"the shape of {label}")
        value_type, offset = self._numbers("IQ", f"the type of {label}")
        block, width = gguf.GGML_QUANT_SIZES.get(value_type, (0, 0))  # type: ignore[call-overload]  # an IntEnum
        if not block:
            raise _DamageError(f"{label} is of type {value_type}, which gguf does not know: a newer version may")
        if not all(shape) or shape[0] % block:
            raise _DamageError(f"{label} has the shape {shape}, and its rows consist of blocks of {block} weights")
        return offset, math.prod(shape) // block * width, name

    def _places(self, tensors: list[tuple[int, int, str]]) -> None:
        """Check that the data of `tensors` lie within the file, each in a separate place."""
        begin = -(-self.file.tell() // self.alignment) * self.alignment
        if len({name for *_, name in tensors}) != len(tensors):
            raise _DamageError("two of its tensors have the same name")
        end = 0
        for offset, length, name in sorted(tensors):
            if offset < end or offset % self.alignment:
                raise _DamageError(
                    f"the data of tensor {brief_repr(name, 80)} begin at {offset}, and at a multiple of "
                    f"{self.alignment} from {end} on is expected"
                )
            end = offset + length
            if begin + end > self.size:
                raise _DamageError(
                    f"it ends at byte {self.size}, and tensor {brief_repr(name, 80)} at byte {begin + end}: it "
                    "is truncated or damaged"
                )

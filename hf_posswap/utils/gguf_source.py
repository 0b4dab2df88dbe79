"""A GGUF file as a model: it is converted once, into a folder that transformers reads, and kept in the cache.

Everything else then works on that folder: the swap, the commands, the recipes. `gguf_reading` makes it. Here the header
of a file is read and bounded before any library takes a count or a size from it: the `gguf` package checks nothing, it
takes lengths from the file as they are, and reads beyond its end. Each length, count and offset must lie within the
file, and each name and text must be UTF-8. What passes can be read in time and memory that are bounded by the size of
the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from filelock import FileLock

from hf_posswap.errors import CheckpointError, MissingDependencyError, OptionError
from hf_posswap.utils.atomic_io import cache_folder, read_object, replacing, shown, writable_folder, write_json
from hf_posswap.utils.format import said_by
from hf_posswap.utils.hub_session import hub_reading
from hf_posswap.utils.printable import brief_repr, printable

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST = {"keys": 2**16, "tensors": 2**16, "values in arrays": 2**23, "bytes of a text": 2**24}
"""Several times the most of any published file: 2 million values in arrays, for a vocabulary of 256 thousand tokens."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number, by `gguf.GGUFValueType`."""
SUFFIX = ".gguf"
NOTES = "gguf.json"
"""In a converted folder: what it was made from, and what could not be kept."""
_FORMAT = 9
"""Of converted folders: a higher number has all of them made again."""
_SAMPLES, _SAMPLE = 64, 2**16
"""Pieces of a file that its key is made from, and the bytes of each."""
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[^\\]+\.gguf)")


def checkpoint_of(source: str | Path, gguf_file: str | None = None, **hub: object) -> str | Path:
    """Return `source`, or the folder that its GGUF file was converted into: now, or by an earlier call.

    Args:
        source: a folder, a Hub id, a GGUF file, or one of the Hub as owner/name/file.gguf. Of a folder without a
            config.json, its one GGUF file is taken.
        gguf_file: name of the file in the folder or repository.
        hub: revision, token, cache_dir, ... for a Hub id.

    Raises:
        CheckpointError: there is no such file, or several and none is named, or it is not a GGUF file, is one part of
            several, or holds what transformers would read wrongly.
        MissingDependencyError: the extra `gguf` is not installed.
    """
    path = gguf_file_of(source, gguf_file, hub)
    return source if path is None else _converted(path)


def gguf_path(source: str, gguf_file: str | None) -> str:
    """Return the GGUF file `gguf_file` of `source` as one path; without a name, `source`.

    Raises:
        OptionError: `source` is a file itself.

    Example:
        >>> gguf_path("owner/name", "model.gguf")
        'owner/name/model.gguf'
    """
    if gguf_file is None:
        return source
    if Path(source).is_file():
        raise OptionError(f"{shown(Path(source))} is a file: give it without {gguf_file}, or give its folder.")
    return str(Path(source) / gguf_file) if Path(source).is_dir() else f"{source}/{gguf_file}"


def on_hub(source: str) -> bool:
    """Return whether `source` is written as a GGUF file of the Hub: owner/name/file.gguf.

    Example:
        >>> on_hub("owner/name/file.gguf"), on_hub("folder/file.gguf")
        (True, False)
    """
    return _HUB_FILE.fullmatch(source) is not None


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file that is to be read as GGUF: by its first bytes, or by its name.

    Example:
        >>> is_gguf(Path("missing.gguf"))
        False
    """
    return os.path.isfile(path) and (path.suffix.lower() == SUFFIX or _begins(path) == MAGIC)


def gguf_file_of(
    source: str | Path, gguf_file: str | None = None, hub: Mapping[str, object] | None = None
) -> Path | None:
    """Return the GGUF file that is meant, which a Hub id names or a folder holds; None: `source` is none and has none.

    Raises:
        CheckpointError, MissingDependencyError: as `checkpoint_of`.
    """
    hub = hub or {}
    path = Path(source)
    if gguf_file is not None:
        gguf_path(str(source), gguf_file)  # raises
        return _named_file(source, str(gguf_file), hub)
    if is_gguf(path):
        return _checked(path)
    if os.path.isfile(path):
        return None
    if os.path.isdir(path):
        return _only_file(path)
    if path.suffix.lower() != SUFFIX:
        return None
    on_hub = _HUB_FILE.fullmatch(str(source))
    if on_hub is None:
        raise CheckpointError(f"{shown(path)} does not exist: give a GGUF file, or owner/name/file.gguf of the Hub.")
    return _named_file(on_hub["repository"], on_hub["file"], hub)


def _named_file(source: str | Path, name: str, hub: Mapping[str, object]) -> Path:
    folder = Path(source)
    if os.path.isdir(folder):
        path = folder / name
        if not os.path.isfile(path):
            there = ", ".join(each.name for each in _files_in(folder)) or "none"
            raise CheckpointError(f"{shown(folder)} has no file {printable(name, 200)}. GGUF files there: {there}.")
        return _checked(path)
    return _checked(_downloaded(str(source), name, **hub))


@hub_reading
def _downloaded(source: str, name: str, **hub: object) -> Path:
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(source, name, **hub)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot get {name} of {source!r} from the Hub: {error}") from error


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == SUFFIX and path.is_file())


def _only_file(folder: Path) -> Path | None:
    """Return the one GGUF file of a folder that holds no other checkpoint."""
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json", "modules.json")):
        return None
    files = _files_in(folder)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise CheckpointError(
            f"{shown(folder)} holds several GGUF files: {names}. Give one as the model, or name it by --gguf-file (in "
            "Python and recipes gguf_file)."
        )
    return _checked(files[0]) if files else None


def _begins(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot read {shown(path)}: {error.strerror or error}.") from error


def _checked(path: Path) -> Path:
    begins = _begins(path)
    if begins != MAGIC:
        raise CheckpointError(
            f"{shown(path)} is not a GGUF file: it begins with {begins!r} and not with {MAGIC!r}. Get it again from "
            "its source; of a repository with Git LFS, the file and not its pointer."
        )
    match = _SPLIT.search(path.name)
    if match is not None and int(match[1]) > 1:
        raise CheckpointError(
            f"{shown(path)} is one of {int(match[1])} parts of a model. Merge them: llama-gguf-split --merge "
            f"{path.name} merged.gguf"
        )
    if find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "gguf")
    return path


def _converted(path: Path) -> str:
    """Return the folder made from `path`, which is made where the cache has none; warn of what could not be kept."""
    from hf_posswap.utils.gguf_reading import write_folder

    folder = cache_folder(None) / "gguf" / _key(path) / _folder_name(path)
    if not (folder / NOTES).is_file():
        try:
            with FileLock(writable_folder(folder.parent) / ".lock"):  # the others of several processes wait
                if not (folder / NOTES).is_file():
                    with replacing(folder) as temporary:
                        temporary.mkdir()
                        lost = write_folder(path, read_gguf(path), temporary)
                        write_json(temporary / NOTES, {"file": printable(path.name), "lost": [*map(printable, lost)]})
        except CheckpointError as error:
            if str(folder.parent) not in str(error):
                raise
            raise CheckpointError(
                f"{error} Converted GGUF files are cached there: set another folder by HF_POSSWAP_CACHE."
            ) from error
    for sentence in read_object(folder / NOTES, lost=list)["lost"]:
        warnings.warn(f"{printable(path.name)}: {sentence}", UserWarning, stacklevel=3)
    return str(folder)


def _folder_name(path: Path) -> str:
    """Return the name of the file without its suffix, in characters that every library takes in a path.

    Example:
        >>> _folder_name(Path("my model.gguf")), _folder_name(Path("a\\x1b[31m\\udcff")), _folder_name(Path(".gguf"))
        ('my model', 'a_[31m_', 'model')
    """
    name = path.name[: -len(SUFFIX)] if path.name.lower().endswith(SUFFIX) else path.name
    return "".join(letter if letter.isprintable() else "_" for letter in name).strip(" .")[:80] or "model"


def _key(path: Path) -> str:
    """Return a name for the content of `path`, by samples of it, and for what converts it."""
    stat = path.stat()
    facts = [str(_FORMAT), str(stat.st_size), str(stat.st_mtime_ns)]
    facts += [f"{name} {version(name)}" for name in ("transformers", "gguf", "tokenizers")]
    digest = hashlib.sha256("\n".join(facts).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, (stat.st_size - _SAMPLE) * number // (_SAMPLES - 1)), os.SEEK_SET)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:24]


def read_gguf(path: Path) -> GGUFReader:
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

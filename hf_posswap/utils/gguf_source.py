"""A GGUF file as a model: it is converted once, into a folder that transformers reads, and kept in the cache.

Everything else then works on that folder: the swap, the commands, the recipes. `gguf_reading` makes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from hf_posswap.errors import CheckpointError, MissingDependencyError, OptionError
from hf_posswap.utils.atomic_io import cache_folder, read_object, replacing, shown, writable_folder, write_json
from hf_posswap.utils.gguf_header import MAGIC
from hf_posswap.utils.hub_session import hub_reading
from hf_posswap.utils.printable import printable

SUFFIX = ".gguf"
NOTES = "gguf.json"
"""In a converted folder: what it was made from, and what could not be kept."""
_FORMAT = 9
"""Of converted folders: a higher number has all of them made again."""
_SAMPLES, _SAMPLE = 64, 2**16
"""Pieces of a file that its key is made from, and the bytes of each."""
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[^\\]+\.gguf)")


def checkpoint_of(source: str | Path, gguf_file: str | None = None, **hub: Any) -> str | Path:
    """Return `source`, or the folder that its GGUF file was converted into: now, or by an earlier call.

    Args:
        source: a folder, a Hub id, a GGUF file, or one of the Hub as owner/name/file.gguf. Of a folder without a
            config.json, its one GGUF file is taken.
        gguf_file: name of the file in the folder or repository.
        hub: revision, token, cache_dir, ... for a Hub id.

    Raises:
        CheckpointError: there is no such file, or several and none is named, or it is no GGUF file, is one part of
            several, or holds what transformers would read wrongly.
        MissingDependencyError: the extra `gguf` is not installed.
    """
    path = _file_of(source, gguf_file, hub)
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


def _file_of(source: str | Path, gguf_file: str | None, hub: dict[str, Any]) -> Path | None:
    """Return the GGUF file that is meant; None: `source` is none and has none."""
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


def _named_file(source: str | Path, name: str, hub: dict[str, Any]) -> Path:
    folder = Path(source)
    if os.path.isdir(folder):
        path = folder / name
        if not os.path.isfile(path):
            there = ", ".join(each.name for each in _files_in(folder)) or "none"
            raise CheckpointError(f"{shown(folder)} has no file {printable(name, 200)}. GGUF files there: {there}.")
        return _checked(path)
    return _checked(_downloaded(str(source), name, **hub))


@hub_reading
def _downloaded(source: str, name: str, **hub: Any) -> Path:
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
                        lost = write_folder(path, temporary)
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

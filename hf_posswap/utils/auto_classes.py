"""The Auto classes of transformers: the one place where they read a checkpoint, and where its own code may run.

A checkpoint may contain Python code. transformers runs it where trust_remote_code=True, and asks on standard input
where nothing is passed. Here something is always passed: code runs only where the caller set `trust_remote_code=True`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import CheckpointError, OptionError, PosswapError, RemoteCodeError
from hf_posswap.utils.gguf_source import checkpoint_of
from hf_posswap.utils.printable import printable
from hf_posswap.utils.untrusted import read_bounded_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

MOST_LAYERS = 2**16
"""Of a config that is read: a hundred times the layers of any model."""
MOST_LABELS = 2**22
"""Of a config that is read: more than the largest data sets of extreme classification have."""
_LISTED = (("layer", MOST_LAYERS, "layers"), ("depth", MOST_LAYERS, "layers"), ("num_blocks", MOST_LAYERS, "layers"),
           ("num_labels", MOST_LABELS, "labels"), ("num_classes", MOST_LABELS, "labels"))  # fmt: skip
"""What is in the names of numbers of which config classes make lists; the most that are read, and of what."""
TRUST = "trust_remote_code"
MOST_JSON_BYTES = 2**28
"""Of a file that transformers reads whole: several times those of the largest vocabularies."""
_TOKENIZER_FILES: dict[str, tuple[str, ...]] = {"tokenizer_config.json": ("tokenizer_class",)}
_PROCESSOR_FILES: dict[str, tuple[str, ...]] = {
    "processor_config.json": ("processor_class",),
    "preprocessor_config.json": ("processor_class", "image_processor_type", "feature_extractor_type"),
    "video_preprocessor_config.json": ("processor_class", "video_processor_type"),
    **_TOKENIZER_FILES,
}


def auto_config(source: str | Path, *, trust_remote_code: bool, **hub: object) -> PreTrainedConfig:
    """Return the config at `source`, as transformers' AutoConfig reads it.

    Args:
        source: a folder or a Hub id.
        trust_remote_code: run code that the checkpoint brings, where its config needs that.
        hub: revision, token, cache_dir, ... for a Hub id.

    Raises:
        RemoteCodeError: it needs code, which was not asked for.
        OptionError: `trust_remote_code` is neither True nor False.
        CheckpointError: it asks for so many layers that its class would fill the memory with a list of them, or a
            JSON file there cannot be read or would fill it.
    """
    from transformers import AutoConfig

    with refused_code(source, trust_remote_code):
        _refuse_endless_files(source)
        refuse_endless_lists(source, _object_in(source, "config.json", hub))
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, **hub)


def auto_tokenizer(source: str | Path, *, trust_remote_code: bool, **hub: object) -> PreTrainedTokenizerBase:
    """Return the tokenizer at `source`, as transformers' AutoTokenizer reads it; arguments and errors of `auto_config`.

    Where its class is code that the checkpoint brings, transformers would quietly take another one for it when that is
    not to run: that is refused, too.
    """
    from transformers import AutoTokenizer

    source = checkpoint_of(source)
    with refused_code(source, trust_remote_code):
        _refuse_endless_files(source)
        if not trust_remote_code:
            _refuse_stand_in(source, _TOKENIZER_FILES, hub)
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code, **hub)


def auto_processor(source: str | Path, *, trust_remote_code: bool, **hub: object) -> Any:
    """Return the processor at `source`, as transformers' AutoProcessor reads it; otherwise as `auto_tokenizer`."""
    from transformers import AutoProcessor

    source = checkpoint_of(source)
    with refused_code(source, trust_remote_code):
        _refuse_endless_files(source)
        if not trust_remote_code:
            _refuse_stand_in(source, _PROCESSOR_FILES, hub)
        return AutoProcessor.from_pretrained(str(source), trust_remote_code=trust_remote_code, **hub)


@contextmanager
def refused_code(source: str | Path, trust_remote_code: bool) -> Iterator[None]:
    """Turn what transformers says inside the block of code that must not run into an error that names the option.

    Args:
        source: of the code: a folder or a Hub id.
        trust_remote_code: what is passed to transformers in the block.

    Raises:
        RemoteCodeError: `source` needs code, which was not asked for.
        OptionError: `trust_remote_code` is neither True nor False: transformers would ask on standard input.
    """
    if not isinstance(trust_remote_code, bool):
        raise OptionError(f"{TRUST} is True or False, got {trust_remote_code!r}.")
    try:
        yield
    except ValueError as error:
        if trust_remote_code or TRUST not in str(error) or isinstance(error, PosswapError):
            raise
        raise RemoteCodeError(source) from error


def _refuse_stand_in(source: str | Path, files: dict[str, tuple[str, ...]], hub: dict[str, object]) -> None:
    """Refuse a checkpoint if one of its `files` names a class in its own code and none of transformers."""
    for name, keys in files.items():
        values = _object_in(source, name, hub)
        named = [values[key] for key in keys if isinstance(values.get(key), str)]
        if values.get("auto_map") and not any(_is_stock(name) for name in named):
            raise RemoteCodeError(source)


def refuse_endless_lists(source: str | Path, config: dict[str, object]) -> None:
    """Refuse a config.json with a number, in any config inside it, of which a list would fill the memory.

    Config classes make such lists as they read the file: an entry for each layer, which says how it attends, and a name
    for each label.

    Args:
        source: the checkpoint, for the error.
        config: the content of the file.

    Raises:
        CheckpointError: names the key and the number.
    """
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        name, value = waiting.pop()
        for key, child in value.items() if isinstance(value, dict) else ((name, each) for each in value):
            if isinstance(child, dict | list):
                waiting.append((str(key), child))
            elif isinstance(child, int) and child > MOST_LAYERS:
                _refuse_endless_list(source, str(key), child)


def _refuse_endless_list(source: str | Path, key: str, count: int) -> None:
    for name, most, plural in _LISTED:
        if name in key and count > most:
            raise CheckpointError(
                f"config.json of {str(source)!r} says {printable(key, 100)}: {count}, and {most} {plural} are the most "
                "that are read: check it against the model it was made from."
            )


def _refuse_endless_files(source: str | Path) -> None:
    """Refuse a folder with a JSON file that would fill the memory: transformers reads such files whole."""
    folder = Path(source)
    for path in sorted(folder.glob("*.json")) if os.path.isdir(folder) else ():
        size = path.stat().st_size if path.is_file() else 0
        if size > MOST_JSON_BYTES:
            raise CheckpointError(
                f"{path.name} of {str(source)!r} has {size} bytes, and at most {MOST_JSON_BYTES} are read: copy it "
                "again."
            )


def _is_stock(name: str) -> bool:
    import transformers

    return any(hasattr(transformers, variant) for variant in (name, name.removesuffix("Fast"), f"{name}Fast"))


def _object_in(source: str | Path, name: str, hub: dict[str, object]) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint; {} where it is missing, or is no config.json and holds none.

    Raises:
        CheckpointError: it exists and is not readable JSON, or is a config.json without an object.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(str(source), name, **hub)
    except (OSError, ValueError):
        path = None
    if path is None:
        return {}
    try:
        values = read_bounded_json(Path(path))
    except (OSError, ValueError) as error:
        problem = f"cannot read {name} of {str(source)!r}"
        if name == "config.json":
            problem = f"{str(source)!r} holds no readable model config (config.json)"
        raise CheckpointError(f"{problem}: {error}") from error
    if isinstance(values, dict):
        return values
    if name == "config.json":
        raise CheckpointError(f"{str(source)!r} holds no readable model config (config.json): it is not a JSON object")
    return {}

"""The Auto classes of transformers: the one place where they read a checkpoint, and where its own code may run.

A checkpoint may bring Python code, which transformers runs on being told so, and asks about on standard input where it
is told nothing. Here it is always told: code runs where the caller passed `trust_remote_code=True`, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posswap.errors import CheckpointError, OptionError, RemoteCodeError

MOST_LAYERS = 2**16
"""Of a config that is read: a hundred times the layers of any model."""
TRUST = "trust_remote_code"
_TOKENIZER_FILES: dict[str, tuple[str, ...]] = {"tokenizer_config.json": ("tokenizer_class",)}
_PROCESSOR_FILES: dict[str, tuple[str, ...]] = {
    "processor_config.json": ("processor_class",),
    "preprocessor_config.json": ("processor_class", "image_processor_type", "feature_extractor_type"),
    "video_preprocessor_config.json": ("processor_class", "video_processor_type"),
    **_TOKENIZER_FILES,
}


def auto_config(source: str | Path, *, trust_remote_code: bool, **hub: Any) -> Any:
    """Return the config at `source`, as transformers' AutoConfig reads it.

    Args:
        source: a folder or a Hub id.
        trust_remote_code: run code that the checkpoint brings, where its config needs that.
        hub: revision, token, cache_dir, ... for a Hub id.

    Raises:
        RemoteCodeError: it needs code, which was not asked for.
        OptionError: `trust_remote_code` is neither True nor False.
        CheckpointError: it asks for so many layers that its class would fill the memory with a list of them.
    """
    from transformers import AutoConfig

    with refused_code(source, trust_remote_code):
        refuse_endless_lists(source, _object_in(source, "config.json", hub))
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, **hub)


def auto_tokenizer(source: str | Path, *, trust_remote_code: bool, **hub: Any) -> Any:
    """Return the tokenizer at `source`, as transformers' AutoTokenizer reads it; arguments and errors of `auto_config`.

    Where its class is code that the checkpoint brings, transformers would quietly take another one for it when that is
    not to run: that is refused, too.
    """
    from transformers import AutoTokenizer

    with refused_code(source, trust_remote_code):
        if not trust_remote_code:
            _refuse_stand_in(source, _TOKENIZER_FILES, hub)
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code, **hub)


def auto_processor(source: str | Path, *, trust_remote_code: bool, **hub: Any) -> Any:
    """Return the processor at `source`, as transformers' AutoProcessor reads it; otherwise as `auto_tokenizer`."""
    from transformers import AutoProcessor

    with refused_code(source, trust_remote_code):
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
        if trust_remote_code or TRUST not in str(error):
            raise
        raise RemoteCodeError(source) from error


def _refuse_stand_in(source: str | Path, files: dict[str, tuple[str, ...]], hub: dict[str, Any]) -> None:
    """Refuse a checkpoint if one of its `files` names a class that is code of its own, and none of transformers."""
    for name, keys in files.items():
        values = _object_in(source, name, hub)
        named = [values[key] for key in keys if isinstance(values.get(key), str)]
        if values.get("auto_map") and not any(_is_stock(name) for name in named):
            raise RemoteCodeError(source)


def refuse_endless_lists(source: str | Path, config: dict[str, Any]) -> None:
    """Refuse a config.json with a number of layers, in any config inside it, of which a list would fill the memory.

    Config classes make such lists as they read the file: an entry for each layer, which says how it attends.

    Args:
        source: where the file lies, to be named.
        config: what is in the file.

    Raises:
        CheckpointError: which number, and what it is.
    """
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(child, dict | list):
                waiting.append(child)
            elif isinstance(child, int) and child > MOST_LAYERS and "layer" in str(key):
                raise CheckpointError(
                    f"config.json of {str(source)!r} says {key}: {child}, and {MOST_LAYERS} layers are the most that "
                    "are read: check it against the model it was made from."
                )


def _is_stock(name: str) -> bool:
    import transformers

    return any(hasattr(transformers, one) for one in (name, name.removesuffix("Fast"), f"{name}Fast"))


def _object_in(source: str | Path, name: str, hub: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint; {} where there is none that can be read: others say so."""
    from transformers.utils import cached_file

    try:
        path = cached_file(str(source), name, **hub)
        values = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}

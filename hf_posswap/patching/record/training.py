"""What trained the weights of a checkpoint, as JSON in `config.posswap_training`: for information only.

It is next to `config.posswap`, so it survives loading, saving and pushing wherever the config does. A training without
a swap, a control, has one too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from hf_posswap.errors import RecordError
from hf_posswap.patching.record.record import SwapRecord

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "posswap_training"
"""The attribute of a config that holds the record."""
_TEXT = re.compile(r"[\w.,:+=/ @()-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_LENGTH = re.compile(r"[1-9][0-9]{0,8}")
_MOST_LENGTHS = 32
_VERSION = 1
_LATER = {"software"}
"""Fields that older records lack."""
_UNPLAIN = re.compile(r"[^\w.,:+=/ @()-]")


@dataclass(frozen=True)
class TrainingRecord:
    """One training, by a recipe or by a Trainer with `PosswapCallback`.

    Attributes:
        base: Hub id, or name of the folder, of the model that it began with.
        base_weights: digest of that model's weights; None: not computed.
        recipe: name of the recipe; None: it has none.
        objective: what was minimised.
        what: which weights were trained.
        steps: optimizer steps, in all stages.
        tokens: read in them, over all processes.
        data: digest of the documents, training's and held-out ones, or of the rows of a Trainer's dataset; None: not
            computed.
        held_out: nats a token of held-out documents, by the tokens that are read of each, as text; empty: not measured.
        swap: digest of the swap that the weights were trained under; None: there was none.
        software: versions of the packages that trained, by name; empty: not recorded.
        version: of this format.
    """

    base: str
    base_weights: str | None
    recipe: str | None
    objective: str
    what: str
    steps: int
    tokens: int
    data: str | None
    held_out: dict[str, float]
    swap: str | None
    version: int = _VERSION
    software: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (good, expected) in _FIELDS.items():
            value = getattr(self, name)
            if not good(value):
                raise RecordError(
                    f"config.{NAME}: {name} must be {expected}, got {reprlib.repr(value)}. Take {NAME} from the "
                    "original config.json, or out of it: it only describes the training."
                )

    def __str__(self) -> str:
        named = f" with recipe {self.recipe}" if self.recipe else ""
        losses = [f"{loss:.3f} at {int(length):,} tokens" for length, loss in self.held_out.items()]
        return f"{self.tokens:,} tokens{named}" + (f", held-out loss {', '.join(losses)}" if losses else "")

    def to_dict(self) -> dict[str, object]:
        """Return the record as JSON."""
        return asdict(self)

    def is_of(self, record: SwapRecord | None) -> bool:
        """Return whether the weights were trained under the swap of `record`; None: without a swap."""
        return self.swap == (None if record is None else swap_digest(record))


def swap_digest(record: SwapRecord) -> str:
    """Return a digest of a swap's schemes and length."""
    mechanism = {key: value for key, value in record.to_dict().items() if key not in ("original", "version")}
    return hashlib.sha256(json.dumps(mechanism, sort_keys=True).encode()).hexdigest()[:16]


def training_of(config: PreTrainedConfig) -> TrainingRecord | None:
    """Return the training that `config` records; None: it records none.

    Raises:
        RecordError: the value is not a training record.

    Example:
        >>> from transformers import GPT2Config
        >>> values = dict(base="gpt2", base_weights="0" * 16, recipe="learned-to-rope", objective="next-token",
        ...               what="full", steps=102, tokens=417_792, data="1" * 16, held_out={"256": 3.83}, swap=None)
        >>> print(training_of(GPT2Config(posswap_training={**values, "version": 1})))
        417,792 tokens with recipe learned-to-rope, held-out loss 3.830 at 256 tokens
    """
    recorded = getattr(config, NAME, None)
    if recorded is None:
        return None
    names = {field.name for field in fields(TrainingRecord)}
    if not isinstance(recorded, dict) or not names - _LATER <= set(recorded) <= names:
        expected = "an object" if not isinstance(recorded, dict) else f"exactly {', '.join(sorted(names))}"
        raise RecordError(
            f"config.{NAME} must hold {expected}, got {reprlib.repr(recorded)}: update hf_posswap, or remove {NAME} "
            "from config.json: it only describes the training."
        )
    return TrainingRecord(**recorded)


def plain_name(name: str) -> str:
    """Return `name` as a record may hold it.

    Example:
        >>> plain_name("me/model"), plain_name("")
        ('me/model', 'unnamed')
    """
    return _UNPLAIN.sub("_", name)[:128] or "unnamed"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(_TEXT.fullmatch(value))


def _is_digest_or_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(_DIGEST.fullmatch(value)))


def _is_versions(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= _MOST_LENGTHS and all(map(_is_text, (*value, *value.values())))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_losses(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_LENGTHS:
        return False
    keys = all(isinstance(key, str) and _LENGTH.fullmatch(key) for key in value)
    return keys and all(type(loss) is float and math.isfinite(loss) for loss in value.values())


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "version": (lambda value: value == _VERSION and type(value) is int, f"{_VERSION}"),
    "base": (_is_text, "a name of at most 128 letters"),
    "base_weights": (_is_digest_or_none, "16 hexadecimal digits, or null"),
    "recipe": (lambda value: value is None or _is_text(value), "a name of at most 128 letters, or null"),
    "objective": (_is_text, "a name"),
    "what": (_is_text, "a name"),
    "steps": (_is_count, "a whole number"),
    "tokens": (_is_count, "a whole number"),
    "data": (_is_digest_or_none, "16 hexadecimal digits, or null"),
    "held_out": (_is_losses, "an object of lengths in tokens to finite numbers"),
    "swap": (_is_digest_or_none, "16 hexadecimal digits, or null"),
    "software": (_is_versions, "an object of package names to versions"),
}

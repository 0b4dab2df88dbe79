"""Reads a mapping into frozen dataclasses with pydantic, and collects its problems.

Pydantic supports stdlib dataclasses and reports every problem at once with its location. HfArgumentParser is flat and
stops at the first problem; OmegaConf has no unions of types.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from hf_posswap.errors import MissingDependencyError
from hf_posswap.utils.printable import brief_repr, printable

if TYPE_CHECKING:
    from pydantic import ValidationError

_TRAINING = {
    "optimizer.steps": "max_steps",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.final_rate": "lr_scheduler_kwargs",
    "optimizer.warmup": "warmup_steps",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.clip": "max_grad_norm",
    "optimizer.batch": "per_device_train_batch_size",
    "optimizer.accumulate": "gradient_accumulation_steps",
    "optimizer.fused": "optim",
    "optimizer.precision": "bf16",
    "optimizer.seed": "seed",
    "compute.device": "use_cpu",
    "compute.checkpointing": "gradient_checkpointing",
    "compute.offload": "gradient_checkpointing_kwargs",
    "compute.compile": "torch_compile",
    "compute.workers": "dataloader_num_workers",
    "save.every": "save_steps",
    "save.keep": "save_total_limit",
    "save.push": "hub_model_id",
    "save.private": "hub_private_repo",
    "watch.log_every": "logging_steps",
    "watch.report_to": "report_to",
    "watch.evaluate_every": "eval_steps",
}
_PEFT = {
    "train.target": "target_modules",
    "train.rank": "r",
    "train.alpha": "lora_alpha",
    "train.dropout": "lora_dropout",
}
_KEPT = ("what", "embeddings", "norms", "positions_rate", "layer_decay")
SECTIONS = {
    "optimizer": "training",
    "compute": "training",
    "save": "training",
    "watch": "training",
    "train": "trainable",
}
"""Removed sections, and the section that now has most of their keys."""
Location = tuple[str | int, ...]
_UNKNOWN = "unexpected_keyword_argument"
_EXPECTED_TEXTS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "keys and values",
    "mapping": "keys and values",
    "dataclass": "keys and values",
}
"""What was expected, by the first word of pydantic's error type."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        key: the key at fault; "" for the recipe as a whole.
        text: a sentence.
        needs: other keys whose values make it a problem.
    """

    key: str
    text: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass
class Problems:
    """The problems found so far.

    Attributes:
        entries: all, in order.
        doubted: keys whose values could not be read.
    """

    entries: list[Problem] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)

    def add(self, key: str, text: str, doubts: str | None = None) -> None:
        """Add a problem of `key`, and mark its value, or that of `doubts`, as unknown."""
        self.entries.append(Problem(key, text))
        self.doubted.add(key if doubts is None else doubts)

    def take(self, problems: list[Problem]) -> None:
        """Add those of `problems` whose values are all known: the others may disappear once earlier ones are fixed.

        Example:
            >>> problems = Problems()
            >>> problems.add("training.max_steps", "expected a whole number, got 'many'.")
            >>> warmup = Problem("training.warmup_steps", "2000 in 1000 steps.", needs=("training.max_steps",))
            >>> problems.take([warmup, Problem("out", "give a folder.")])
            >>> [str(problem) for problem in problems.entries]
            ["training.max_steps: expected a whole number, got 'many'.", 'out: give a folder.']
        """
        self.entries += [problem for problem in problems if all(map(self._is_known, (problem.key, *problem.needs)))]

    def _is_known(self, key: str) -> bool:
        return not any(key == doubted or key.startswith((f"{doubted}.", f"{doubted}[")) for doubted in self.doubted)


OLD: dict[str, tuple[str, str]] = {
    **{old: (f"training.{new}", "TrainingArguments calls it") for old, new in _TRAINING.items()},
    **{old: (f"peft.{new}", "PEFT calls it") for old, new in _PEFT.items()},
    **{f"train.{name}": (f"trainable.{name}", "it is") for name in _KEPT},
    "watch.evaluate_lengths": ("evaluation.lengths", "it is"),
    "watch.evaluate_documents": ("evaluation.documents", "it is"),
    "watch.picture": ("out", "the picture is drawn where matplotlib is installed, into"),
    "stages[].steps": ("stages[].max_steps", "TrainingArguments calls it"),
}
"""Old key to new key, and the words that join them in the message."""


T = TypeVar("T")


def read(cls: type[T], values: object, problems: Problems, key: str = "") -> T:
    """Return an instance of the dataclass `cls` from `values`; invalid values go to `problems` and keep their default.

    Args:
        cls: its fields and types are the schema; every field has a default.
        values: a mapping, as YAML gives it.
        problems: collects the problems, in order.
        key: where `values` belongs, for the messages; "" at the top.

    Raises:
        MissingDependencyError: pydantic is not installed.

    Example:
        >>> from hf_posswap.training.config.theirs import TrainingSettings
        >>> problems = Problems()
        >>> read(TrainingSettings, {"max_stepz": 3, "weight_decay": "much", "warmup_steps": 4}, problems).warmup_steps
        4.0
        >>> for problem in problems.entries:
        ...     print(problem)
        max_stepz: no such key. Did you mean 'max_steps'?
        weight_decay: expected a number, got 'much'.
    """
    from pydantic import ValidationError

    values_list = [copy.deepcopy(values)]
    while True:
        try:
            instances = _adapter(cls).validate_python(values_list)  # type: ignore[arg-type]
        except ValidationError as error:
            expected_at = _errors_by_location(error, values_list)
        else:
            expected_at = {location: ["a number"] for location in _booleans_as_numbers(values_list, instances)}
            if not expected_at:
                return instances[0]
        for location, expected in sorted(expected_at.items(), key=lambda item: _file_order(values_list, item[0])):
            key_text, (_, value) = named(location[1:], key), _within(values_list, location)
            if not expected:
                _report_unknown(cls, location[1:], value, problems, key)
            elif expected[0].startswith("!"):
                problems.add(key_text, expected[0][1:])
            elif expected[0] != "nothing":
                choices = [choice for text in expected for choice in re.split(r", | or ", text)]
                matches = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
                hint = f" Did you mean {matches[0]!r}?" if matches else ""
                problems.add(
                    key_text, f"expected {' or '.join(dict.fromkeys(expected))}, got {brief_repr(value)}.{hint}"
                )
        for location in expected_at:
            _drop(values_list, location)


@cache
def _adapter(cls: type) -> Any:
    try:
        from pydantic import ConfigDict, TypeAdapter
    except ImportError as error:
        raise MissingDependencyError("pydantic", "train") from error
    config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(list[cls], config=config)  # type: ignore[valid-type]  # a dataclass alone takes no config


def _errors_by_location(error: ValidationError, values: object) -> dict[Location, list[str]]:
    """Return what was expected at each location, with all alternatives of a union; [] for an unknown key."""
    expected_at: dict[Location, list[str]] = {}
    for detail in error.errors(include_url=False):
        location, value = _within(values, detail["loc"])
        if detail["type"] == _UNKNOWN:
            expected_at[location] = []
        elif value is None and detail["type"].startswith("dataclass"):
            expected_at[location] = ["nothing"]
        else:
            expected_at.setdefault(location, []).append(_expected(detail))
    return expected_at


def _within(values: Any, location: Location) -> tuple[Location, object]:
    """Return the prefix of `location` that exists in `values`, without pydantic's names for union members."""
    prefix: Location = ()
    for key in location:
        is_key = isinstance(values, Mapping) and key in values
        if not is_key and not (isinstance(values, list | tuple) and isinstance(key, int) and key < len(values)):
            break
        prefix, values = (*prefix, key), values[key]
    return prefix, values


def _expected(error: Any) -> str:
    error_type, context = error["type"], error.get("ctx", {})
    if error_type == "literal_error":
        return str(context["expected"]).replace("'", "")
    if error_type == "value_error":
        return f"!{context['error']}"
    return _EXPECTED_TEXTS.get(error_type.partition("_")[0], error["msg"].removeprefix("Input should be "))


def _booleans_as_numbers(given: object, parsed: object) -> Iterator[Location]:
    """Yield the locations where pydantic read true or false as a number."""
    if isinstance(given, bool) and not isinstance(parsed, bool) and isinstance(parsed, int | float):
        yield ()
    elif isinstance(given, Mapping):
        for name, value in given.items():
            member = parsed.get(name) if isinstance(parsed, Mapping) else getattr(parsed, str(name), None)
            yield from ((name, *location) for location in _booleans_as_numbers(value, member))
    elif isinstance(given, list | tuple) and isinstance(parsed, list | tuple):
        for number, (value, member) in enumerate(zip(given, parsed, strict=False)):
            yield from ((number, *location) for location in _booleans_as_numbers(value, member))


def _file_order(values: Any, location: Location) -> list[int]:
    """Return a sort key: the order of `location` in the file."""
    order = []
    for key in location:
        order.append(list(values).index(key) if isinstance(values, Mapping) else int(key))
        values = values[key]
    return order


def _drop(values: Any, location: Location) -> None:
    """Remove the value at `location`; empty an item of a list, and empty the whole at the top."""
    if len(location) == 1:
        values[0] = {}
        return
    _, parent = _within(values, location[:-1])
    if isinstance(parent, list):
        index = int(location[-1])
        item = parent[index]
        parent[index] = {} if isinstance(item, Mapping) and item else None
        if parent[index] is None:  # it cannot be emptied
            _drop(values, location[:-1])
    elif isinstance(parent, dict):
        parent.pop(location[-1], None)


def named(location: Location, key: str = "") -> str:
    """Return a location as messages show it.

    Example:
        >>> named(("stages", 0, "max_steps"))
        'stages[0].max_steps'
    """
    suffix = "".join(f"[{step}]" if isinstance(step, int) else f".{printable(step, 100)}" for step in location)
    return f"{key}{suffix}".removeprefix(".")


def _report_unknown(cls: type, location: Location, value: object, problems: Problems, key: str) -> None:
    """Report an unknown key with its replacement, or with the known key of the closest spelling."""
    key_text, name = named(location, key), str(location[-1])
    if key_text in SECTIONS and isinstance(value, Mapping) and value:
        for subkey in value:
            _report_unknown(cls, (*location, subkey), None, problems, key)
        return
    old = OLD.get(re.sub(r"\[\d+\]", "[]", key_text))
    if old is not None:
        new = re.sub(r"\[\]", next(iter(re.findall(r"\[\d+\]", key_text)), ""), old[0])
        problems.add(key_text, f"no such key; {old[1]} {new}.", doubts=new)
        return
    section = named(location[:-1], key)
    if section in SECTIONS:
        problems.add(key_text, f"no such key; {section} is {SECTIONS[section]} now.", doubts=SECTIONS[section])
        return
    known = _field_names_at(cls, location[:-1])
    matches = difflib.get_close_matches(name, known, n=1)
    listed = known if len(known) <= 24 else [*known[:12], "... (posswap train --keys)"]
    hint = f"Did you mean {matches[0]!r}?" if matches else f"Known: {', '.join(listed)}."
    if "=" in name:
        hint = 'Inside braces a comma ends a value: put a text with commas in quotes, "yarn:factor=4,base=500000".'
    problems.add(
        key_text, f"no such key. {hint}", doubts=named((*location[:-1], matches[0]), key) if matches else key_text
    )


def _field_names_at(cls: Any, location: Location) -> list[str]:
    """Return the fields of the dataclass at `location` below `cls`."""
    import dataclasses
    from typing import get_args, get_type_hints

    for key in location:
        if isinstance(key, str):
            hint = get_type_hints(cls)[key]
            cls = next((item for item in (hint, *get_args(hint)) if dataclasses.is_dataclass(item)), hint)
    return [field.name for field in dataclasses.fields(cls) if field.init]

"""Shared by the studies: resumable runs of the actual scripts, and their equal-token controls."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hf_posswap
from hf_posswap.errors import CheckpointError, ConfigError, OptionError, TrainingError
from hf_posswap.evaluation.store import unit_key
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.training.config import Recipe, TrainingSettings, load_recipe, phases_of
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.reading import read_yaml
from hf_posswap.training.config.theirs import affects_weights, result_settings
from hf_posswap.training.data.sources import source_identity
from hf_posswap.utils.atomic_io import cache_folder, read_json, writable_folder, write_json

RECIPES = Path(__file__).resolve().parents[1]
CONTROL = RECIPES / "control.yaml"
_QUIET = ("training.report_to=none",)
_DATA_KEYS = ("data.length", "data.packing", "data.cut")
_SWAP_KEYS = ("swap.", "stages", "objective.", "trainable.", "peft", "gates.", *_DATA_KEYS)


@dataclass(frozen=True)
class Run:
    """One training by recipes/train.py.

    Attributes:
        config: the recipe's file.
        settings: KEY=VALUE of its command line, without `out`.
        recipe: of both.
        folder: of the run. Its name depends on everything that affects the result, so that only changed recipes are
            trained again.
    """

    config: Path
    settings: tuple[str, ...]
    recipe: Recipe
    folder: Path

    @property
    def model(self) -> Path:
        """The folder of the finished model."""
        return self.folder / read_json(self.folder / "report.json")["saved"]

    @property
    def arguments(self) -> list[str]:
        """The arguments of recipes/train.py."""
        return ["--config", str(self.config), *self.settings, f"out={self.folder}"]

    def command(self, places: Mapping[Path, str]) -> str:
        """Return the command line with local folders replaced by the names in `places`."""
        return command_line("recipes/train.py", self.arguments, places)

    @property
    def tokens_read(self) -> int:
        """Tokens that a finished run read: fewer than `tokens_of` if a stage ended early."""
        steps = [phase["steps"] for phase in read_json(self.folder / "report.json")["phases"]]
        return sum(n * step_tokens(phase.recipe) for n, phase in zip(steps, phases_of(self.recipe), strict=True))

    def finish(self) -> dict[str, Any]:
        """Train or resume unless the run is finished; return the report.

        Raises:
            CheckpointError: the folder holds a run with another base, other texts or other versions.
            TrainingError: the script ended with an error, which it printed.
        """
        self._check_origin()
        if not (self.folder / "report.json").is_file():
            run_script(RECIPES / "train.py", self.arguments)
        return read_json(self.folder / "report.json")

    def _check_origin(self) -> None:
        """Check that the base's weights, the texts and the versions, which the settings only name, are unchanged."""
        base = Path(self.recipe.model.name)
        weights = sorted(base.glob("*.safetensors")) if base.is_dir() else []
        origin = {
            "weights of the base": [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights],
            "texts": [source_identity(source) for source in self.recipe.data.sources],
            "versions": versions(),
        }
        path = self.folder / "origin.json"
        if not path.is_file():
            write_json(path, origin)
        recorded = read_json(path)
        changed = [name for name, value in origin.items() if recorded.get(name, value) != value]
        if changed:
            raise CheckpointError(
                f"{self.folder} was trained with other {' and '.join(changed)}: delete it, or choose another --work."
            )


def command_line(program: str, arguments: Sequence[str], places: Mapping[Path, str]) -> str:
    """Return a command line with local folders replaced by the names in `places`.

    Example:
        >>> command_line("recipes/train.py", ["out=/my/place/a"], {Path("/my/place"): "$WORK"})
        'python recipes/train.py out=$WORK/a'
    """
    line = " ".join([f"python {program}" if program.endswith(".py") else program, *map(shlex.quote, arguments)])
    for folder, name in places.items():
        line = line.replace(str(folder), name)
    return line.replace(f"{RECIPES.parent}/", "")  # last, because a folder in `places` may be inside this checkout


def study_command(name: str, options: Mapping[str, Any], places: Mapping[Path, str]) -> str:
    """Return the command line of the study `name` without local folders.

    Args:
        name: of its module.
        options: values of its options.
        places: as in `command_line`.

    Example:
        >>> study_command("retrieval", {"base": "finder", "seeds": 3, "recipe": None, "work": "here"}, {})
        'python -m recipes.studies.retrieval --base finder --seeds 3 --out results'
        >>> study_command("claims", {"only": ["text"], "finished": True}, {})
        'python -m recipes.studies.claims --only text --finished --out results'
    """
    arguments: list[str] = []
    for option, value in options.items():
        if option not in ("out", "work"):
            flag = "--set" if option == "settings" else f"--{option.replace('_', '-')}"
            values = value if isinstance(value, list | tuple) else [] if value is None or value is False else [value]
            arguments += [argument for item in values for argument in ((flag,) if item is True else (flag, str(item)))]
    return command_line(f"python -m recipes.studies.{name}", [*arguments, "--out", "results"], places)


def work_folder(work: Path | None) -> Path:
    """Return the folder for trainings: `work`, or one in the user's cache.

    Raises:
        CheckpointError: it cannot be written into.
    """
    return writable_folder((work or cache_folder(None) / "studies").expanduser().resolve())


def check_device(device: str) -> None:
    """Check the value of --device.

    Raises:
        OptionError: it is neither cpu nor cuda, or there is no CUDA device.

    Example:
        >>> check_device("cpu")
    """
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--device {device}: there are cpu and cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: there is no CUDA device here; leave it out for the CPU.")


def base_folder(base: Path) -> Path:
    """Return the model folder of `base`: itself, or the output of recipes/pretrain.py in it."""
    return (base if (base / "config.json").is_file() else base / "model").resolve()


def source_settings(paths: Sequence[str]) -> str:
    """Return data.sources=... for files, folders or data sets.

    Example:
        >>> source_settings(["python", "my books/"])
        "data.sources=[{path: python}, {path: 'my books/'}]"
    """
    yaml_paths = (path if re.fullmatch(r"[\w./-]+", path) else "'" + path.replace("'", "''") + "'" for path in paths)
    return f"data.sources=[{', '.join(f'{{path: {path}}}' for path in yaml_paths)}]"


def make_run(config: Path, settings: Sequence[str], work: Path) -> Run:
    """Return the training of `config` with `settings`, below the folder `work`.

    Raises:
        ConfigError: as `load_recipe`.
    """
    all_settings = (*(setting for setting in settings if setting not in _QUIET), *_QUIET)
    recipe = load_recipe(config, all_settings)
    identity = _non_default(to_dict(recipe), to_dict(Recipe()))
    identity = {name: value for name, value in identity.items() if name not in ("out", "evaluation")}
    identity |= {"training": result_settings(recipe.training)}
    return Run(config, all_settings, recipe, work / "runs" / f"{config.stem}-{unit_key(identity)[:10]}")


def _non_default(values: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that differ from `default`, so that new recipe keys do not affect old runs."""
    changed = {}
    for key, value in values.items():
        default_value = default.get(key)
        if value != default_value:
            changed[key] = (
                _non_default(value, default_value)
                if isinstance(value, dict) and isinstance(default_value, dict)
                else value
            )
    return changed


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run the script at `script` in this process, because importing torch again would take most of the time.

    Raises:
        TrainingError: it ended with an error.
    """
    with patch.object(sys, "argv", [str(script), *arguments]):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise TrainingError(
                    f"recipes/{script.name} ended with exit code {ended.code}; it says why above. Its arguments: "
                    f"{shlex.join(arguments)}."
                ) from None


def tokens_of(recipe: Recipe) -> int:
    """Return how many tokens `recipe` reads at most, in one process.

    Example:
        >>> tokens_of(Recipe())
        4096000
    """
    return sum(p.recipe.training.max_steps * step_tokens(p.recipe) for p in phases_of(recipe))


def step_tokens(recipe: Recipe) -> int:
    """Return how many tokens one step of `recipe` reads."""
    training = recipe.training
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * recipe.data.length


def control_settings(recipe: Recipe, shared: Iterable[str], window: int) -> list[str]:
    """Return the settings that make recipes/control.yaml the control of `recipe`: same tokens and optimizer, no swap.

    The unswapped model reads windows of at most `window` tokens, and correspondingly more of them per step.

    Args:
        recipe: the trained recipe.
        shared: settings of its command line; settings of the swap are dropped.
        window: of the unswapped model.

    Raises:
        ConfigError: the windows of the recipe are no multiple of those of the control.
    """
    kept = [setting for setting in shared if not setting.startswith(_SWAP_KEYS) and not _trains(setting)]
    length = min(window, recipe.data.length)
    per_step = step_tokens(recipe)
    if per_step % length:
        raise ConfigError(f"a step of {per_step} tokens is not a multiple of windows of {length}: change data.length.")
    windows = per_step // length
    batches = recipe.training.gradient_accumulation_steps
    batch = windows // batches if windows % batches == 0 else windows
    control_values = read_yaml(CONTROL)
    control_training = TrainingSettings(**control_values["training"])
    training_values = {
        name: getattr(recipe.training, name)
        for name in result_settings(control_training) | result_settings(recipe.training)
    }
    training_values |= {"max_steps": tokens_of(recipe) // per_step, "per_device_train_batch_size": batch}
    training_values |= {"gradient_accumulation_steps": windows // batch}
    training_settings = [
        f"training.{k}={json.dumps(value)}"
        for k, value in training_values.items()
        if value != getattr(control_training, k)
    ]
    packing = "documents" if recipe.data.packing == "documents" else "none"
    objective = "next-token" if recipe.objective.kind in ("next-token", "distill") else "masked"
    fixed: dict[str, Any] = {"data.length": length, "data.packing": packing, "objective.kind": objective}
    default_swap = to_dict(Recipe())["swap"]
    swap_fields = [
        name for name, value in control_values.get("swap", {}).items() if value not in (None, default_swap[name])
    ]
    fixed |= {f"swap.{name}": json.dumps(default_swap[name]) for name in swap_fields}
    if control_values.get("stages"):
        fixed["stages"] = "[]"
    return [*kept, *(f"{key}={value}" for key, value in fixed.items()), *training_settings]


def _trains(setting: str) -> bool:
    """Return whether `setting` is a training setting that affects the weights, which the control copies."""
    section, _, name = setting.partition("=")[0].partition(".")
    return section == "training" and affects_weights(name)


def swapped(base: Any, run: Run, model: Any) -> Any:
    """Return `base` with the swap of `run`'s `model`, untrained.

    A fit to the base before the first step (swap.fit) is not in the record. For such recipes, this runs one step with
    a learning rate that is too small to change a float32 weight.
    """
    if run.recipe.swap.fit:
        frozen_settings = ["learning_rate=1e-30", "warmup_steps=0", "weight_decay=0", "max_steps=1"]
        settings = [*run.settings, *(f"training.{setting}" for setting in frozen_settings)]
        start = make_run(run.config, settings, run.folder.parents[1])
        start.finish()
        return hf_posswap.load(start.model).eval()
    record = SwapRecord.from_dict(model.config.posswap)
    if run.recipe.swap.centre:
        hf_posswap.centre_table(base)
    hf_posswap.patch_model(base, record.make_scheme(), max_length=record.max_length)
    return base.eval()


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    from transformers import __version__ as transformers_version

    return {
        "hf_posswap": hf_posswap.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "machine": platform.machine(),
    }

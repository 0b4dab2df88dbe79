"""What the studies share: runs of the real scripts that go on where they stopped, and their equal-token controls."""

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
from hf_posswap.errors import CheckpointError, ConfigError, TrainingError
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
_OF_DATA = ("data.length", "data.packing", "data.cut")
_OF_THE_SWAP = ("swap.", "stages", "objective.", "trainable.", "peft", "gates.", *_OF_DATA)


@dataclass(frozen=True)
class Run:
    """One training by recipes/train.py.

    Attributes:
        config: the recipe's file.
        settings: KEY=VALUE of its command line, without `out`.
        recipe: what both say.
        folder: of the run. Its name follows from all that has a part in the result, so that a recipe which was changed
            is trained anew and what was not is found.
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
        """Of recipes/train.py."""
        return ["--config", str(self.config), *self.settings, f"out={self.folder}"]

    def command(self, places: Mapping[Path, str]) -> str:
        """Return the command line as others can use it: of `places`, folders of this machine, it has the names."""
        return command_line("recipes/train.py", self.arguments, places)

    @property
    def tokens_read(self) -> int:
        """Of a finished run: fewer than `tokens_of`, where a stage ended early."""
        steps = [phase["steps"] for phase in read_json(self.folder / "report.json")["phases"]]
        return sum(n * step_tokens(phase.recipe) for n, phase in zip(steps, phases_of(self.recipe), strict=True))

    def finish(self) -> dict[str, Any]:
        """Train, or go on with it, unless it is done; return the report.

        Raises:
            CheckpointError: the folder holds what came of another base, other texts or other versions.
            TrainingError: the script ended with an error, which it printed.
        """
        self._check_origin()
        if not (self.folder / "report.json").is_file():
            run_script(RECIPES / "train.py", self.arguments)
        return read_json(self.folder / "report.json")

    def _check_origin(self) -> None:
        """Check that what the settings only name is still the same: the base's weights, the texts, the versions."""
        base = Path(self.recipe.model.name)
        weights = sorted(base.glob("*.safetensors")) if base.is_dir() else []
        origin = {
            "base": [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights],
            "texts": [source_identity(source) for source in self.recipe.data.sources],
            "versions": versions(),
        }
        path = self.folder / "origin.json"
        if not path.is_file():
            write_json(path, origin)
        held = read_json(path)
        changed = [name for name, value in origin.items() if held[name] != value]
        if changed:
            raise CheckpointError(
                f"{self.folder} was trained from another {', '.join(changed)}: delete it, or choose another --work."
            )


def command_line(program: str, arguments: Sequence[str], places: Mapping[Path, str]) -> str:
    """Return a command as others can use it: of `places`, folders of this machine, it has the names.

    Example:
        >>> command_line("recipes/train.py", ["out=/my/place/a"], {Path("/my/place"): "$WORK"})
        'python recipes/train.py out=$WORK/a'
    """
    line = " ".join([f"python {program}" if program.endswith(".py") else program, *map(shlex.quote, arguments)])
    for folder, name in places.items():
        line = line.replace(str(folder), name)
    return line.replace(f"{RECIPES.parent}/", "")  # last: a place may lie in this checkout, or end as its path does


def study_command(name: str, asked: Mapping[str, Any], places: Mapping[Path, str]) -> str:
    """Return the command line of the study `name` as others can use it, without what says where a machine keeps things.

    Args:
        name: of its module.
        asked: its options, as its function has them.
        places: as `command_line`.

    Example:
        >>> study_command("retrieval", {"base": "finder", "seeds": 3, "recipe": None, "work": "here"}, {})
        'python -m recipes.studies.retrieval --base finder --seeds 3 --out results'
        >>> study_command("claims", {"only": ["text"], "finished": True}, {})
        'python -m recipes.studies.claims --only text --finished --out results'
    """
    words: list[str] = []
    for option, value in asked.items():
        if option not in ("out", "work"):
            flag = "--set" if option == "settings" else f"--{option.replace('_', '-')}"
            several = value if isinstance(value, list | tuple) else [] if value is None or value is False else [value]
            words += [word for one in several for word in ((flag,) if one is True else (flag, str(one)))]
    return command_line(f"python -m recipes.studies.{name}", [*words, "--out", "results"], places)


def work_folder(work: Path | None) -> Path:
    """Return the folder for trainings: `work`, or one in the user's cache.

    Raises:
        CheckpointError: it cannot be written into.
    """
    return writable_folder((work or cache_folder(None) / "studies").expanduser().resolve())


def base_folder(base: Path) -> Path:
    """Return the folder of the model that `base` is, or that a run of recipes/pretrain.py left in it."""
    return (base if (base / "config.json").is_file() else base / "model").resolve()


def source_settings(paths: Sequence[str]) -> str:
    """Return data.sources=... for files, folders or data sets.

    Example:
        >>> source_settings(["python", "my books/"])
        "data.sources=[{path: python}, {path: 'my books/'}]"
    """
    named = (path if re.fullmatch(r"[\w./-]+", path) else "'" + path.replace("'", "''") + "'" for path in paths)
    return f"data.sources=[{', '.join(f'{{path: {path}}}' for path in named)}]"


def make_run(config: Path, settings: Sequence[str], work: Path) -> Run:
    """Return the training of `config` with `settings`, below the folder `work`.

    Raises:
        ConfigError: as `load_recipe`.
    """
    given = (*(setting for setting in settings if setting not in _QUIET), *_QUIET)
    recipe = load_recipe(config, given)
    identity = _said(to_dict(recipe), to_dict(Recipe()))
    identity = {name: value for name, value in identity.items() if name not in ("out", "evaluation")}
    identity |= {"training": result_settings(recipe.training)}
    return Run(config, given, recipe, work / "runs" / f"{config.stem}-{unit_key(identity)[:10]}")


def _said(held: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return what `held` says beyond `default`, so that a key which recipes learn later changes no run of before."""
    said = {}
    for key, value in held.items():
        other = default.get(key)
        if value != other:
            said[key] = _said(value, other) if isinstance(value, dict) and isinstance(other, dict) else value
    return said


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run the script at `script` as its user does, in this process: importing torch anew would cost most of the time.

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
    """Return what makes recipes/control.yaml the control of `recipe`: no swap, and the same tokens and optimizer.

    The model without a swap reads windows of `window` tokens at most, and so many more of them a step.

    Args:
        recipe: as it is trained.
        shared: settings of its command line; those of the swap are left out.
        window: of the unswapped model.

    Raises:
        ConfigError: the windows of the recipe are no multiple of those of the control.
    """
    kept = [setting for setting in shared if not setting.startswith(_OF_THE_SWAP) and not _trains(setting)]
    length = min(window, recipe.data.length)
    per_step = step_tokens(recipe)
    if per_step % length:
        raise ConfigError(f"a step of {per_step} tokens is no number of windows of {length}: change data.length.")
    windows = per_step // length
    batches = recipe.training.gradient_accumulation_steps
    batch = windows // batches if windows % batches == 0 else windows
    held = read_yaml(CONTROL)
    own = TrainingSettings(**held["training"])
    wanted = {name: getattr(recipe.training, name) for name in result_settings(own) | result_settings(recipe.training)}
    wanted |= {"max_steps": tokens_of(recipe) // per_step, "per_device_train_batch_size": batch}
    wanted |= {"gradient_accumulation_steps": windows // batch}
    more = [f"training.{k}={json.dumps(value)}" for k, value in wanted.items() if value != getattr(own, k)]
    packing = "documents" if recipe.data.packing == "documents" else "none"
    kind = "next-token" if recipe.objective.kind in ("next-token", "distill") else "masked"
    fixed: dict[str, Any] = {"data.length": length, "data.packing": packing, "objective.kind": kind}
    plain = to_dict(Recipe())["swap"]
    kept_on = [name for name, value in held.get("swap", {}).items() if value not in (None, plain[name])]
    fixed |= {f"swap.{name}": json.dumps(plain[name]) for name in kept_on}
    if held.get("stages"):
        fixed["stages"] = "[]"
    return [*kept, *(f"{key}={value}" for key, value in fixed.items()), *more]


def _trains(setting: str) -> bool:
    """Return whether a setting of `training` has a part in the weights: the control has those of the recipe."""
    section, _, name = setting.partition("=")[0].partition(".")
    return section == "training" and affects_weights(name)


def swapped(base: Any, run: Run, model: Any) -> Any:
    """Return `base` with the swap that `run` gave `model`, not trained.

    What a recipe fits to the base before its first step (swap.fit) no record holds: there the recipe is run for one
    step at a learning rate that no weight of float32 feels, which leaves its start as it was.
    """
    if run.recipe.swap.fit:
        still = ["learning_rate=1e-30", "warmup_steps=0", "weight_decay=0", "max_steps=1"]
        settings = [*run.settings, *(f"training.{setting}" for setting in still)]
        start = make_run(run.config, settings, run.folder.parents[1])
        start.finish()
        return hf_posswap.load(start.model).eval()
    record = SwapRecord.from_dict(model.config.posswap)
    if run.recipe.swap.centre:
        hf_posswap.centre_table(base)
    hf_posswap.patch_model(base, record.make_scheme(), max_length=record.max_length)
    return base.eval()


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
    from transformers import __version__ as transformers_version

    return {
        "hf_posswap": hf_posswap.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "machine": platform.machine(),
    }

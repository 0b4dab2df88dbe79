"""Checkpoints to resume from: sealed when complete, skipped with a warning when not; the newest few are kept.

A checkpoint belongs to one training, by its recipe, launch, documents and base: no other training resumes from it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from hf_posswap.compat.transformers_loading import unpack_4_bit_weights
from hf_posswap.compat.transformers_models import without_origin
from hf_posswap.errors import CheckpointError, PosswapError, TrainingWarning
from hf_posswap.patching.plan.plan_swap import foreign_modules, unwrap
from hf_posswap.patching.record.refusals import unmark
from hf_posswap.schemes import make_scheme
from hf_posswap.training.config import Recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.config.settings import phases_of
from hf_posswap.training.config.theirs import result_settings
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.utils.atomic_io import read_json, read_object, write_json
from hf_posswap.utils.digests import code_digests, sync_to_disk, weights_digest
from hf_posswap.utils.format import said_by
from hf_posswap.utils.user_paths import import_module

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_WRITER_MESSAGES = ("os error", "inline_container", "PytorchStreamWriter", "No space left")
"""Messages of safetensors, torch (twice) and tokenizers for a failed write: they raise their own error types."""
_ADAPTER = "adapter_model.safetensors"
SEAL = "posswap-checkpoint.json"
UNFINISHED = ".unfinished"
"""Folder next to the checkpoints in which all processes write the next one."""
_NAME = re.compile(r"checkpoint-(\d+)")


def identity_of(recipe: Recipe, launch: Launch) -> dict[str, object]:
    """Return what in the recipe and the launch affects the trained weights: of own schemes also their code."""
    identity = to_dict(recipe)
    identity["imports"] = [Path(name).name for name in recipe.imports]  # wherever the training is resumed
    chosen = [phase.recipe.swap.scheme for phase in phases_of(recipe)]
    schemes = [make_scheme(value if isinstance(value, str) else dict(value)).to_dict() for value in chosen if value]
    modules = {import_module(name).__name__ for name in recipe.imports} | {*foreign_modules(schemes).values()}
    if code := code_digests(sorted(modules)):
        identity["code"] = code
    for name in ("name", "out", "evaluation", "gates"):
        del identity[name]
    del identity["data"]["cache"]
    if not recipe.data.assistant_only_loss:  # runs from before this key, and the next two, resume
        del identity["data"]["assistant_only_loss"]
    for source in identity["data"]["sources"]:
        for name in (name for name in ("min_tokens", "upsample") if source[name] is None):
            del source[name]
    identity |= {"training": result_settings(recipe.training), "processes": launch.processes}
    return identity | ({"sharding": launch.sharding} if launch.sharding else {})


def base_identity(model: PreTrainedModel) -> dict[str, object]:
    """Return the identity of the model that a training starts from: its config, and a digest of its weights.

    Args:
        model: as loaded, before the swap; adapters around it count.
    """
    config = json.loads(unwrap(model).config.to_json_string())
    unpack_4_bit_weights(model)
    return {"config of the base": without_origin(config), "weights of the base": weights_digest(model)}


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Convert write errors within the block, which writes below `folder`.

    Raises:
        CheckpointError: something could not be written; what was finished before is kept.
    """
    try:
        yield
    except PosswapError:
        raise
    except Exception as error:
        by_message = any(text in str(error) for text in _WRITER_MESSAGES)
        if not (error.errno in _DISK_ERRORS if isinstance(error, OSError) else by_message):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or said_by(error)
        raise CheckpointError(
            f"cannot write to {folder}: {reason}. Finished files are kept: free some space, and the same call resumes "
            "from the newest checkpoint."
        ) from error


def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights in `folder` into `model`; adapter weights into a PEFT model.

    Args:
        model: of the same classes and shapes as the one that was saved.
        folder: a checkpoint of a training, or a saved model.

    Raises:
        CheckpointError: there are none, or they do not fit.
    """
    if hasattr(model, "peft_config"):
        _load_adapter(model, folder)
        return
    files = sorted(path for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors to resume from.")
    state: dict[str, Tensor] = {}
    for file in files:
        state |= _read(file)
    unmark(state, {name: tensor.dim() for name, tensor in model.state_dict().items()})
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    mismatched = sorted(name for name, tensor in state.items() if name in shapes and tensor.shape != shapes[name])
    if mismatched:
        raise CheckpointError(f"the weights in {folder} do not fit the model: different shape for {mismatched[:8]}.")
    integers = [
        name
        for name, parameter in model.state_dict().items()
        if name in state and parameter.is_floating_point() and not state[name].is_floating_point()
    ]
    if integers:
        raise CheckpointError(f"the weights in {folder} do not fit the model: integers for {sorted(integers)[:8]}.")
    load_result = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(load_result.missing_keys) - tied)
    if missing or load_result.unexpected_keys:
        raise CheckpointError(
            f"the weights in {folder} do not fit the model: missing {missing[:8]}, unknown "
            f"{sorted(load_result.unexpected_keys)[:8]}."
        )


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Resume from another checkpoint.") from error


def _load_adapter(model: PreTrainedModel, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    if not (folder / _ADAPTER).is_file():
        raise CheckpointError(f"{folder} holds no {_ADAPTER} to resume from.")
    try:
        load_result: Any = set_peft_model_state_dict(model, _read(folder / _ADAPTER))
    except KeyError as error:  # PEFT's for a weight of modules_to_save
        raise CheckpointError(
            f"the adapter in {folder} does not fit: missing {[*error.args]}, unknown []. Resume from another "
            "checkpoint."
        ) from error
    state, lacking = model.state_dict(keep_vars=True), set(load_result.missing_keys)  # with the names of the base
    loaded = {id(weight) for name, weight in state.items() if name not in lacking}  # one of several shared names is
    trained = [name for name in sorted(lacking & state.keys()) if state[name].requires_grad]
    missing = [name for name in trained if id(state[name]) not in loaded]
    if missing or load_result.unexpected_keys:
        raise CheckpointError(
            f"the adapter in {folder} does not fit: missing {missing[:8]}, unknown "
            f"{sorted(load_result.unexpected_keys)[:8]}. Resume from another checkpoint."
        )


def seal(folder: Path, step: int, identity: dict[str, object]) -> None:
    """Sync the files in `folder` to disk, and write the digests of a complete checkpoint.

    Code bundled with the model is left out: resuming does not need it.

    Args:
        folder: a written checkpoint.
        step: optimizer steps done.
        identity: of its training.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"):
        sync_to_disk(path)
        files[str(path.relative_to(folder))] = _digest(path)
    write_json(folder / SEAL, {"version": 1, "step": step, "identity": identity, "files": files})
    sync_to_disk(folder / SEAL)
    sync_to_disk(folder)


def take_place(unfinished: Path, target: Path) -> None:
    """Move a sealed checkpoint to its final name, replacing one of an earlier run."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(unfinished, target)
    unfinished.parent.rmdir()
    sync_to_disk(target.parent)


def rotate(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints in `folder`; None: keep all."""
    if keep is None:
        return
    for path in checkpoints_in(folder)[keep:]:
        (path / SEAL).unlink(missing_ok=True)  # an interrupted removal leaves no valid checkpoint
        shutil.rmtree(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, complete or not, the newest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(checkpoints, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of `checkpoint`.

    Example:
        >>> step_of(Path("run/checkpoints/checkpoint-300"))
        300
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not a training checkpoint: expected a name like checkpoint-100.")
    return int(match.group(1))


def newest(folder: Path, identity: dict[str, object]) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None. Incomplete ones are skipped with a warning.

    Args:
        folder: of the checkpoints.
        identity: of the training to resume.

    Raises:
        CheckpointError: it belongs to another training.
    """
    for path in checkpoints_in(folder):
        problem = problem_of(path)
        if problem is None:
            saved_identity = read_json(path / SEAL)["identity"]
            changes = [f"{key}: {old!r}, now {new!r}" for key, old, new in differences(saved_identity, identity)]
            if changes:
                raise CheckpointError(
                    f"{path} belongs to another training ({'; '.join(changes)}). Undo these changes, choose another "
                    "folder (out), or delete the checkpoints to start over."
                )
            return path
        warnings.warn(f"{path} is incomplete ({problem}): it is skipped.", TrainingWarning, stacklevel=2)
    return None


def problem_of(checkpoint: Path) -> str | None:
    """Return what is missing or damaged in `checkpoint`, or None."""
    try:
        files = read_object(checkpoint / SEAL, files=dict, identity=dict)["files"]
    except CheckpointError:
        return f"no readable {SEAL}"
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"{name} is damaged"
    return None


def differences(old: object, new: object, key: str = "") -> list[tuple[str, object, object]]:
    """Return the differences of two JSON values: key, old, new.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
        [('a.c', 2, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        nested_differences = [
            differences(old.get(name), new.get(name), f"{key}.{name}" if key else name) for name in keys
        ]
        return [difference for nested in nested_differences for difference in nested]
    return [] if old == new else [(key, old, new)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

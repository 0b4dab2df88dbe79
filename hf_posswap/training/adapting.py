"""Training by a recipe, from Python: the engine with its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posswap.training.config import Recipe
    from hf_posswap.training.engine import Finished
    from hf_posswap.utils.progress import Reporter


def run_recipe(recipe: Recipe, *, progress: bool | None = None, reporter: Reporter | None = None) -> Finished:
    """Train by `recipe`, as `posswap train` does, and return the results.

    After an interruption, even by SIGKILL, the same call resumes from the newest complete checkpoint and ends with the
    same weights. For a finished run it returns the existing results. Under a launcher, every process calls it.

    Args:
        recipe: from `load_recipe`.
        progress: show a bar of the training steps, and messages, on the main process; None: in a notebook and on a
            terminal, unless HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns bars off.
        reporter: shows them instead, as the command line does.

    Returns:
        The run folder, the folder of the finished model, and the report.

    Raises:
        ConfigError: `recipe` is not a recipe, or does not fit the model.
        CheckpointError: the folder belongs to another run, another process writes there, or it is not writable.
        DataError: the text is unsuitable.
        TrainingError, NumericError, NotEnoughMemoryError, PositionRangeError: a gate stopped it.
        UnsupportedSwapError: the swap is not possible, or not under this form of parallelism.
        OptionError: `progress` is not True, False or None.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import hf_posswap
        >>> from hf_posswap.training.fresh import FreshSettings, fresh_model, fresh_tokenizer
        >>> folder = Path(tempfile.mkdtemp())
        >>> shape = FreshSettings("gpt2", window=32, layers=1, width=32, heads=2, vocabulary=0)
        >>> tokenizer = fresh_tokenizer(shape, [])
        >>> start = hf_posswap.save(fresh_model(shape, tokenizer), folder / "start", tokenizer=tokenizer)
        >>> recipe = hf_posswap.load_recipe(
        ...     {
        ...         "model": {"name": str(start)},
        ...         "swap": {"scheme": "rope", "max_length": 128},
        ...         "data": {"sources": [{"path": "python", "documents": 40}], "length": 32, "cache": str(folder)},
        ...         "training": {"max_steps": 2, "report_to": "none"},
        ...         "evaluation": {"lengths": [32, 128]},
        ...         "out": str(folder / "run"),
        ...     },
        ...     ["training.per_device_train_batch_size=4"],
        ... )
        >>> finished = hf_posswap.run_recipe(recipe)
        >>> sorted(finished.report["nll"]), hf_posswap.load(finished.model).config.posswap["scheme"]["name"]
        (['128', '32'], 'rope')
    """
    from hf_posswap.training import engine
    from hf_posswap.training.config.load import check_recipe
    from hf_posswap.utils.devices import available_bytes
    from hf_posswap.utils.progress import reporter_for

    check_recipe(recipe, "run_recipe")
    reporter = reporter_for(progress, reporter)
    return engine.run_recipe(recipe, engine.Services(nll_at_lengths, available_bytes, reporter))


def check_fitted_start(recipe: Recipe) -> None:
    """Check by the config of the model of `recipe` that its centring and fit are supported.

    Raises:
        PosswapError: as `run_recipe`, before text and weights are read.
    """
    from hf_posswap.training.engine.preparing import check_config

    if (recipe.swap.centre or recipe.swap.fit) and not recipe.stages:
        check_config(recipe)


def nll_at_lengths(
    model: PreTrainedModel,
    documents: Sequence[np.ndarray],
    lengths: Sequence[int],
    limit: int,
    counted: Sequence[np.ndarray] | None = None,
) -> dict[int, float]:
    """Return the mean loss per token of whole held-out documents at each length that the model supports.

    Args:
        model: a causal model, or a PEFT model around one.
        documents: token ids of each.
        lengths: tokens to read of each document; shorter documents are left out.
        limit: most documents to read.
        counted: whether the mean counts each token of each document; None: it counts all. With it, shorter documents
            are read to their end, those without a counted token are left out, and so is a length without one.

    Raises:
        DataError: no document is as long as the longest length.
    """
    from hf_posswap.evaluation import measure_losses
    from hf_posswap.evaluation.scoring import reach_of
    from hf_posswap.patching.plan.plan_swap import unwrap
    from hf_posswap.training.engine.gates import check_held_out

    check_held_out(documents, lengths)
    target = unwrap(model)
    reach = reach_of(target)
    runs = [length for length in lengths if reach.limit is None or length <= reach.limit]
    if not runs:
        return {}
    measure = partial(measure_losses, target, one_pass=reach.prefix_consistent)
    if counted is not None:
        return _counted_nll(measure, documents, counted, runs, limit)
    long = [document[: max(lengths)] for document in documents if len(document) >= max(lengths)][:limit]
    losses = measure(np.stack(long), runs)
    return {length: float(per_token.mean(dtype=np.float64)) for length, per_token in losses.items()}


def _counted_nll(
    measure: Callable[..., dict[int, np.ndarray]],
    documents: Sequence[np.ndarray],
    counted: Sequence[np.ndarray],
    lengths: Sequence[int],
    limit: int,
) -> dict[int, float]:
    """Return the mean loss of the tokens `counted` of each document, up to each of `lengths`."""
    pairs = zip(documents, counted, strict=True)
    chosen = [(ids, kept) for ids, kept in pairs if kept[1 : max(lengths)].any()][:limit]
    losses: dict[int, list[np.ndarray]] = {length: [] for length in sorted(lengths)}
    for ids, kept in chosen:
        measured = measure(ids[None, : max(lengths)], sorted({min(length, len(ids)) for length in lengths}))
        for length, parts in losses.items():
            read = min(length, len(ids))
            parts.append(measured[read][0][kept[1:read]])
    joined = {length: np.concatenate(parts) for length, parts in losses.items() if parts}
    return {length: float(parts.mean(dtype=np.float64)) for length, parts in joined.items() if len(parts)}

"""The model to start from: a small GPT-2 trained once and kept, or the user's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hf_posswap
from hf_posswap.errors import DataError
from hf_posswap.quickstart.settings import BaseSettings, QuickstartSettings, digest
from hf_posswap.text.tokens import load_tokenizer
from hf_posswap.training import Corpus, TrainSettings, Windows, byte_tokenizer, token_stream, train
from hf_posswap.utils.atomic_io import read_object, writable_folder, write_json
from hf_posswap.utils.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WARMUP_SHARE = 0.05
_RECIPE_FILE = "recipe.json"
_BESIDE = "save it beside the model"


@dataclass(frozen=True)
class Base:
    """The model that everything begins with.

    Attributes:
        model: unswapped, in eval mode, on its device.
        tokenizer: its own.
        source: where it came from.
        window: its positions, or the most that the quickstart uses of them.
        notes: what a reader of the results should know.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: dict[str, Any]
    window: int
    notes: tuple[str, ...] = ()


def trained_base(
    corpus: Corpus, settings: QuickstartSettings, cache: Path, device: torch.device, reporter: Reporter
) -> Base:
    """Return the small GPT-2 of these settings, trained now or in an earlier run.

    Raises:
        CheckpointError: the cache folder cannot be written or read.
    """
    from transformers import __version__ as transformers_version

    recipe = {
        "base": dataclasses.asdict(settings.base),
        "seed": settings.seed,
        "stream_tokens": settings.stream_tokens,
        "corpus": corpus.digest,
        "device": device.type,
        "versions": {"torch": torch.__version__, "transformers": transformers_version},
    }
    folder = cache / f"base-{digest(recipe)}"
    kept = (folder / _RECIPE_FILE).exists()
    if kept:
        reporter.line(f"base: a GPT-2 trained earlier, from {folder}")
    else:
        writable_folder(cache)
        _train(corpus, settings, recipe, folder, device, reporter)
    model = on_device(hf_posswap.load(folder), device)
    training = read_object(folder / _RECIPE_FILE, training=dict)["training"]
    source = {"kind": "trained here", "folder": str(folder), "recipe": recipe, "training": training}
    words = load_tokenizer(folder, instead=_BESIDE)
    return Base(model, words, source | {"from_cache": kept}, settings.base.window)


def _train(
    corpus: Corpus,
    settings: QuickstartSettings,
    recipe: dict[str, Any],
    folder: Path,
    device: torch.device,
    reporter: Reporter,
) -> None:
    chosen, tokenizer = settings.base, byte_tokenizer()
    model = _new_model(chosen, len(tokenizer), tokenizer.eos_token_id, settings.seed)
    on_device(model, device)
    size = sum(parameter.numel() for parameter in model.parameters())
    reporter.line(
        f"base: training a byte-level GPT-2 of {size / 1e6:.1f} million parameters, window {chosen.window}, "
        "on this Python's own sources and documentation (once: it is kept)"
    )
    stream = token_stream(corpus.train, tokenizer, settings.stream_tokens)
    windows = Windows(stream, chosen.window, chosen.batch, settings.seed)
    schedule = TrainSettings(
        steps=chosen.steps,
        learning_rate=chosen.learning_rate,
        warmup=round(_WARMUP_SHARE * chosen.steps),
        seed=settings.seed,
    )
    state = folder.with_name(f"{folder.name}.state.pt")
    with reporter.task("base: training", chosen.steps) as task:

        def on_step(step: int, loss: float) -> None:
            task.skip(step - 1)
            task.advance(chosen.batch * chosen.window, loss)

        trained = train(model, windows, schedule, resume=state, on_step=on_step)
    loss = mean_tail(trained.losses)
    training = {"steps": chosen.steps, "tokens": chosen.steps * chosen.batch * chosen.window, "loss": loss}
    training["seconds"] = round(trained.seconds, 1)
    hf_posswap.save(model, folder, tokenizer=tokenizer, overwrite=True)
    write_json(folder / _RECIPE_FILE, {"recipe": recipe, "training": training})  # last: it says that all is there
    state.unlink(missing_ok=True)
    reporter.line(f"base: trained in {trained.seconds:.0f} s, loss {loss:.3f}, kept in {folder}")


def given_base(name: str, settings: QuickstartSettings, device: torch.device, reporter: Reporter) -> Base:
    """Return the user's own causal model, in float32.

    Raises:
        CheckpointError: `name` is no readable checkpoint.
        DataError: it is no causal language model, it already carries a swap, or it has no tokenizer.
        UnsupportedModelError: no family describes it.
        RemoteCodeError: it needs code, which was not asked for.
    """
    trusted = settings.trust_remote_code
    model = hf_posswap.load(name, dtype=torch.float32, trust_remote_code=trusted)
    report = hf_posswap.describe_positions(model)
    if report.swapped is not None:
        raise DataError(f"{name!r} already carries a swap ({report.swapped}): give the checkpoint it was made from.")
    if model.config.is_encoder_decoder or not model.can_generate() or not report.geometry.causal:
        raise DataError(f"{name!r} is a {type(model).__name__}: the quickstart takes a causal language model.")
    own = report.limit
    window = min(own, settings.largest_window) // 2 * 2  # even, for half-overlapping windows
    notes: tuple[str, ...] = ()
    if window < own:
        note = (
            f"The model's own window is {own} tokens; it was adapted and measured as if it were {window}, so lengths "
            f"up to {own} tokens are not beyond what it was made for."
        )
        reporter.line(f"base: {note}")
        notes = (note,)
    reporter.line(f"base: {type(model).__name__} from {name}, {report.native}")
    source = {"kind": "given", "name": name, "own_window": own}
    words = load_tokenizer(name, instead=_BESIDE, trust_remote_code=trusted)
    return Base(on_device(model, device), words, source, window, notes)


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move `model` to `device`, in eval mode, and return it."""
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper loses the signature
    return model.eval()


def mean_tail(losses: list[float], share: float = 0.1) -> float:
    """Return the mean of the last tenth of `losses`: one step's loss says little."""
    tail = losses[-max(1, round(share * len(losses))) :]
    return sum(tail) / len(tail)


def _new_model(chosen: BaseSettings, vocabulary: int, end: int, seed: int) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=chosen.window,
        n_embd=chosen.width,
        n_layer=chosen.layers,
        n_head=chosen.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)

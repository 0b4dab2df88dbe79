"""results.json and curves.csv: what a quickstart found, for programs."""

from __future__ import annotations

import csv
import io
import platform
import shlex
from typing import TYPE_CHECKING, Any

import torch

import hf_posswap
from hf_posswap.compat.transformers_attention import attention_implementation
from hf_posswap.quickstart.measure import Yardstick
from hf_posswap.quickstart.pictures import SLIDING
from hf_posswap.quickstart.settings import QuickstartSettings
from hf_posswap.quickstart.variants import BASE, CONTROL, learning_rate
from hf_posswap.training import Corpus, Windows
from hf_posswap.utils.naming import public_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCHEMA = 1
_FEW = 8
_MUCH_UNKNOWN = 0.01


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine's kind that the numbers were made with."""
    from transformers import __version__ as transformers_version

    return {
        "hf_posswap": hf_posswap.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": "float32",
    }


def describe_model(model: PreTrainedModel, source: dict[str, Any], window: int) -> dict[str, Any]:
    """Return what results.json says of the base."""
    return {
        "class": type(model).__name__,
        "source": source | {key: public_name(source[key]) for key in ("name", "folder") if key in source},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positions": hf_posswap.describe_positions(model).native,
        "window": window,
        "attention": attention_implementation(model.config),
    }


def describe_data(corpus: Corpus, yardstick: Yardstick, stream: int) -> dict[str, Any]:
    """Return what results.json says of the text."""
    return {
        "text": "sources of this Python's standard library and pydoc's topics",
        "digest": corpus.digest,
        "train_documents": len(corpus.train),
        "stream_tokens": stream,
        "held_out_documents": len(yardstick.documents),
        "held_out_names": list(yardstick.names),
    }


def describe_adaptation(model: PreTrainedModel, windows: Windows, settings: QuickstartSettings) -> dict[str, Any]:
    """Return what results.json says of the training that every variant got."""
    return {
        "steps": settings.steps,
        "step_tokens": windows.batch * windows.length,
        "learning_rate": learning_rate(model, settings),
    }


def describe_passkey(yardstick: Yardstick, settings: QuickstartSettings, skipped: str | None) -> dict[str, Any]:
    """Return what results.json says of the passkey grid as a whole."""
    return {
        "lengths": list(yardstick.passkey_lengths),
        "depths": list(settings.passkey_depths),
        "trials": settings.passkey_trials,
        "header": yardstick.passkey.header if yardstick.passkey else None,
        "skipped": skipped,
    }


def cautions(yardstick: Yardstick, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what a reader must know before the numbers: too few documents, or text that the tokenizer cannot write."""
    found = []
    if len(yardstick.documents) < _FEW:
        found.append(f"Only {len(yardstick.documents)} held-out documents are long enough: read no order into this.")
    unknown = float((yardstick.documents == tokenizer.unk_token_id).mean()) if _has_unknown(tokenizer) else 0.0
    if unknown > _MUCH_UNKNOWN:
        found.append(f"{unknown:.0%} of the tokens are the tokenizer's unknown token: the text is not of its kind.")
    return found


def _has_unknown(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `tokenizer` has an unknown token that means nothing else (GPT-2's also ends a text)."""
    return tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )


def command(settings: QuickstartSettings) -> str:
    """Return the command line that asks for these settings."""
    words = ["posswap", "quickstart", *(["--model", settings.model] if settings.model else [])]
    words += ["--steps", str(settings.steps), "--seed", str(settings.seed), "--device", settings.device]
    return shlex.join([*words, *(["--trust-remote-code"] if settings.trust_remote_code else [])])


def choose_best(models: dict[str, Any]) -> dict[str, Any]:
    """Return the swapped model of the lowest perplexity at the longest length that any of them runs.

    Example:
        >>> rows = lambda *values: {"lengths": [{"length": n, "perplexity": v} for n, v in values]}
        >>> choose_best({"base": rows((8, 1.0)), "rope": rows((8, 4.0), (16, 3.0)), "alibi": rows((8, 5.0), (16, 2.0))})
        {'name': 'alibi', 'length': 16, 'perplexity': 2.0, 'folder': 'models/alibi'}
    """
    reached = []
    for name, entry in models.items():
        if name not in (BASE, CONTROL):
            row = [row for row in entry["lengths"] if "cannot_run" not in row][-1]
            reached.append((-row["length"], row["perplexity"], name))
    length, perplexity, name = min(reached)
    return {"name": name, "length": -length, "perplexity": perplexity, "folder": f"models/{name}"}


def curves_csv(results: dict[str, Any]) -> str:
    """Return every curve as CSV: perplexity by length and loss by position, one value a line."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["model", "metric", "from_token", "to_token", "value", "low", "high", "note"])
    models = results["models"]
    for name, entry in (models | {SLIDING: models[CONTROL]["sliding"]}).items():
        for row in entry["lengths"]:
            values = [row.get(key, "") for key in ("perplexity", "low", "high")]
            writer.writerow([name, "perplexity", 0, row["length"], *values, row.get("cannot_run", "")])
        for row in entry["positions"]:
            writer.writerow([name, "loss", row["start"], row["stop"], row["loss"], row["low"], row["high"], ""])
    return table.getvalue()

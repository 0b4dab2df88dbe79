"""Runs in a process of its own, on the transformers that its PYTHONPATH holds: saves checkpoints, or loads them.

    python versions_child.py save FOLDER            one checkpoint of each case
    python versions_child.py load FOLDER... plugin  each of them with hf_posswap
    python versions_child.py load FOLDER... bare    each of them where hf_posswap cannot be imported

Beside a checkpoint lies `expected.safetensors`: a batch padded on the left, its logits, and the tokens that `generate`
gave. The report, JSON on the last line, holds by checkpoint and way of loading what differs, or the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[-1] == "bare":
    sys.modules["hf_posswap"] = None  # type: ignore[assignment]  # as if it were not installed
else:
    import hf_posswap

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

WINDOW = 24
"""Positions of each model before its swap."""
NEW = 12
"""Tokens that are generated: the longest row ends beyond the window."""
_COMMON = {"vocab_size": 37, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": None, "initializer_range": 0.4}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
}
_GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": WINDOW}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": WINDOW,
    "init_std": 0.4,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama-yarn": ("LlamaForCausalLM", _LLAMA, "yarn", {"factor": 2.0}),
    "llama-alibi": ("LlamaForCausalLM", _LLAMA, "alibi", {"max_length": 64}),
    "llama-self_extend": ("LlamaForCausalLM", _LLAMA, "self_extend", {"group": 3, "window": 6}),
    "gpt2-rope": ("GPT2LMHeadModel", _GPT2, "rope", {"max_length": 64}),
    "gpt2-sinusoidal": ("GPT2LMHeadModel", _GPT2, "sinusoidal", {"max_length": 64}),
    "gptj-alibi": ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}, "alibi", {"max_length": 64}),
    "mpt-fire": ("MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": WINDOW}, "fire", {}),
    "bloom-rope": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "rope", {"max_length": 64}),
    "bart-rope": ("BartForConditionalGeneration", _BART, "rope", {"max_length": 64}),
}
"""By name: the class, its config, the scheme, and the options of the swap."""


def build(name: str) -> Any:
    """Return the swapped model of a case, its weights random and so large that a wrong position shows."""
    class_name, values, scheme, options = CASES[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"), 0.0)
    config = cls.config_class(**_COMMON | values)
    for field, value in dropout.items():
        if hasattr(config, field):
            setattr(config, field, value)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return hf_posswap.patch_model(model, scheme, **options)


def batch() -> dict[str, Tensor]:
    """Return two rows, the first with seven tokens of padding before its text."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 37, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def results(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of the words of `inputs`, and what `generate` goes on with."""
    start = {"decoder_input_ids": torch.arange(2, 12).expand(2, -1)} if model.config.is_encoder_decoder else {}
    logits = model.eval()(**inputs, **start).logits
    words = torch.ones_like(start["decoder_input_ids"]) if start else inputs["attention_mask"]
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)[:, -NEW:]
    return {"logits": logits[words.bool()].contiguous(), "tokens": tokens.contiguous()}


@torch.no_grad()
def alone(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the tokens that follow each row by itself, each by a whole forward: neither padding nor a cache."""
    rows = []
    for ids, mask in zip(*inputs.values(), strict=True):
        row = ids[mask.bool()][None]
        paired = model.config.is_encoder_decoder
        text = torch.tensor([[model.config.decoder_start_token_id]]) if paired else row
        for _ in range(NEW):
            given = {"input_ids": row, "decoder_input_ids": text} if paired else {"input_ids": text}
            text = torch.cat([text, model(**given, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        rows.append(text[:, -NEW:])
    return torch.cat(rows)


def save(root: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in CASES:
        try:
            report[name] = save_one(name, root / name)
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    return report


def save_one(name: str, folder: Path) -> dict[str, Any]:
    model, inputs = build(name), batch()
    expected = results(model, inputs)
    equal = torch.equal(alone(model, inputs), expected["tokens"])
    model.save_pretrained(folder)
    save_file(inputs | expected, folder / "expected.safetensors")
    return {"route": hf_posswap.swap_plan(model).route, "as alone": equal}


def difference(load: Callable[[], Any], folder: Path) -> float | str:
    """Return how far the logits are from those saved; or, in words, that the tokens differ, or what was raised.

    An error of this package, or of its code in the checkpoint, is a refusal; any other is a failure.
    """
    stored = load_file(folder / "expected.safetensors")
    try:
        model = load()
        found = results(model, {name: stored[name] for name in ("input_ids", "attention_mask")})
    except Exception as error:
        is_ours = any(base.__name__ == "PosswapError" for base in type(error).__mro__)
        return f"{'refused' if is_ours else 'failed'}: {type(error).__name__}: {error}"
    if not torch.equal(found["tokens"], stored["tokens"]):
        return f"other tokens: {found['tokens'].tolist()}, saved with {stored['tokens'].tolist()}"
    return float((found["logits"] - stored["logits"]).abs().nan_to_num(nan=float("inf")).max())


def load(folder: Path, bare: bool) -> dict[str, float | str]:
    stock = getattr(transformers, CASES[folder.name][0])
    auto = transformers.AutoModelForSeq2SeqLM if "bart" in folder.name else transformers.AutoModelForCausalLM
    if not bare:
        return {
            "load": difference(lambda: hf_posswap.load(folder), folder),
            "auto": difference(lambda: auto.from_pretrained(folder), folder),
        }
    return {
        "auto": difference(lambda: auto.from_pretrained(folder), folder),
        "stock": difference(lambda: stock.from_pretrained(folder), folder),
        "remote": difference(lambda: auto.from_pretrained(folder, trust_remote_code=True), folder),
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    what, *folders = sys.argv[1:]
    if what == "save":
        report = save(Path(folders[0]))
    else:
        mode = folders.pop()
        report = {str(path): load(path, mode == "bare") for root in folders for path in sorted(Path(root).iterdir())}
    sys.stdout.write("\n" + json.dumps({"transformers": transformers.__version__, "found": report}))


if __name__ == "__main__":
    main()

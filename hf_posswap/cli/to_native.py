"""`posswap to-native`: converts a swapped checkpoint to a stock class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import Json, Model, TrustRemoteCode, source_of
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_text
from hf_posswap.cli.target import checked_target, load_tokenizer


def to_native(
    model: Model,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The folder to save the stock model to.", show_default=False),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help="same, gpt_neox, jina_embeddings_v3, roformer, mpnet or smollm3. Default: the first that is exact.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DIR if a save wrote all that is in it.")
    ] = False,
    tokenizer: Annotated[bool, typer.Option(help="Save the model's tokenizer with it.")] = True,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Convert a swapped checkpoint to a stock class of transformers that computes exactly the same.

    A GPT-2 with RoPE becomes a GPT-NeoX, a BERT with RoPE a JinaEmbeddingsV3: the result needs no hf_posswap and no
    custom code. The outputs of both models are compared before anything is written. If no stock class is exact, it
    prints the reason (exit code 3).

    Example: posswap to-native gpt2-rope -o gpt2-rope-neox
    """
    source = source_of(model)
    folder = checked_target(out, source, overwrite)
    with quiet_library():
        import hf_posswap
        from hf_posswap.checkpoints.native import check_target, convert

        check_target(target)
        loaded_tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code) if tokenizer else None
        loaded = hf_posswap.load(source, dtype="auto", trust_remote_code=trust_remote_code)
        conversion = convert(loaded, target)
        hf_posswap.save(conversion.model, folder, tokenizer=loaded_tokenizer, overwrite=overwrite)
    name = type(conversion.model).__name__
    if json:
        proof = conversion.proof
        details = {
            "lengths": list(proof.lengths),
            "difference": proof.difference,
            "spread": proof.spread,
        }
        show_json({"class": name, "target": conversion.target, "proof": details, "saved": {"folder": str(folder)}})
        return
    show_pairs([("class", name), ("conversion", conversion.target), ("ok: equal", str(conversion.proof))])
    show_text("", f"Saved to {folder}. Load it with transformers as any other checkpoint.")

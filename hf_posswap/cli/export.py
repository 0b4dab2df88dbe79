"""`posswap export`: a checkpoint for a serving program."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.arguments import GGUFFile, Json, Model, TrustRemoteCode, source_of
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text
from hf_posswap.utils.user_paths import expand_home


class Target(StrEnum):
    """The programs that `hf_posswap.checkpoints.exports` knows."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    llamacpp = "llamacpp"
    tgi = "tgi"
    onnx = "onnx"
    torch = "torch"
    tei = "tei"
    sentence_transformers = "sentence-transformers"


class GGUFDtype(StrEnum):
    """Of the matrices in a GGUF file: see `dtype` in `hf_posswap.checkpoints.exports.export`."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


def export(
    model: Model,
    target: Annotated[Target, typer.Option("--target", help="The program.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write the checkpoint for it to DIR; for llamacpp also to a file, model.gguf; for onnx and torch "
            "to a file, model.onnx and model.pt2.",
            show_default=False,
        ),
    ] = None,
    vocab: Annotated[
        Path | None,
        typer.Option(
            "--vocab",
            metavar="FILE",
            help="For model.gguf: take the vocabulary from this GGUF file: the one that the model came from, or what "
            "convert_hf_to_gguf.py --vocab-only writes.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        GGUFDtype | None,
        typer.Option(
            "--dtype",
            help="For model.gguf: what the matrices become; q8_0: 8 bits, with a scale for each 32. Default: they "
            "stay as they are.",
            show_default=False,
        ),
    ] = None,
    gguf_file: GGUFFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Tell how a serving program handles a checkpoint's positions, and write the checkpoint in the program's form.

    exact: the same as transformers; approximate: close to it, or equal up to some length; impossible: the program
    refuses, or computes something else (exit code 3). Known from: the program's version, and whether it was run or its
    code was read. The last row is the command to type.

    Example: posswap export my-long-llama --target sglang -o my-long-llama-sglang
    """
    source = source_of(model, gguf_file)
    with quiet_library():
        from hf_posswap.checkpoints.exports.run import export as run

        result = run(
            source,
            target.value,
            None if out is None else expand_home(out),
            vocab=None if vocab is None else expand_home(vocab),
            dtype=None if dtype is None else dtype.value,
            trust_remote_code=trust_remote_code,
        )
    if json:
        show_json(result.to_dict())
    else:
        rows = [
            ("target", result.target),
            ("verdict", result.verdict),
            ("why", result.why),
            ("known from", result.engine),
        ]
        show_pairs([*rows, *result.notes.items(), *([("type", result.command)] if result.command else [])])
        if result.changes:
            changed = [(name, str(before), str(after)) for name, (before, after) in result.changes.items()]
            show_text("")
            show_table(["config.json", "now", "for it"], changed)
        if result.gguf:
            show_text("")
            show_pairs([(name, str(value)) for name, value in result.gguf.items()])
        if result.folder is not None:
            show_text("", f"Saved to {result.folder}.")
    if result.verdict == "impossible":
        raise typer.Exit(Code.UNSUPPORTED)

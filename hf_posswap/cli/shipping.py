"""`posswap check`, `doctor`, `to-native`, `export`, `overrides` and `push`: a model, ready for other programs."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import (
    GGUFFile,
    Json,
    MaxLength,
    Model,
    SchemeName,
    TrustRemoteCode,
    make_scheme,
    source_of,
)
from hf_posswap.cli.outcome import Code, line_of
from hf_posswap.cli.output import (
    quiet_library,
    show_command,
    show_indented,
    show_json,
    show_lines,
    show_pairs,
    show_table,
    show_text,
)
from hf_posswap.cli.target import checked_target, load_tokenizer
from hf_posswap.errors import OptionError, PosswapError
from hf_posswap.utils.format import said_by
from hf_posswap.utils.user_paths import expand_home

if TYPE_CHECKING:
    from hf_posswap.checkpoints.doctor_findings import Serving


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a checkpoint or a PEFT adapter, a GGUF file, or a Hub id.",
            show_default=False,
        ),
    ] = None,
    imported: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="MODULE:NAME",
            help="Instead of MODEL: a live model, or a function that returns one, in a module of the current folder or "
            "an installed one. The module is run.",
            show_default=False,
        ),
    ] = None,
    forward: Annotated[
        bool | None,
        typer.Option(
            "--forward/--no-forward",
            help="Load the weights and run a few tokens. Default: up to 2e9 parameters.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 on warnings and on checks that failed to run, too.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Check whether a model does what its config says about positions: any transformers model, swapped or not.

    Compares the angles in force with the config and with the papers' formulas, the config with its config.json, lengths
    with tables and tokenizers, and a few tokens alone with the same tokens padded and packed. Includes what posswap
    doctor finds in the files. Nothing is written. The exit code is 0 if there are no errors in what was checked (with
    --strict: nor warnings, nor checks that failed to run), 1 if there are, and 2 if nothing can be checked. What was
    not checked is listed with the reason.

    Example: posswap check my-llama
    """
    if (model is None) == (imported is None):
        raise OptionError("give either MODEL, a folder or a Hub id, or --import MODULE:NAME.")
    try:
        with quiet_library():
            from hf_posswap.inspection.checking.run import check as check_model

            live: Any = source_of(model) if model is not None else _imported(str(imported))
            report = check_model(live, forward=forward, trust_remote_code=trust_remote_code)
    except (PosswapError, OSError) as error:
        typer.echo(f"error: {line_of(error)}", err=True)
        raise typer.Exit(Code.USAGE) from None
    if json:
        show_json(report.to_dict())
    else:
        show_pairs([("model", report.source), ("checked", "; ".join(report.checked) or "nothing")])
        show_text("")
        if report.findings:
            rows = [(f"{each.severity} {each.code}", each.where, f"{each.what} {each.do}") for each in report.findings]
            show_table(["finding", "where", "what, and what to do"], rows)
        else:
            show_text("Nothing found." if report.complete else "Nothing found in what was checked.")
        if report.skipped:
            show_text("", *(f"Not checked: {line}" for line in report.skipped))
    if not (report.clean and report.complete if strict else report.ok):
        raise typer.Exit(Code.OTHER)


def _imported(text: str) -> object:
    """Return the model that "module:name" names: an object, or what a function of that name returns.

    Raises:
        OptionError: there is no such module or name, or its code fails.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise OptionError(f"--import takes MODULE:NAME, as in my_build:model; got {text!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
        return value() if callable(value) and not hasattr(value, "config") else value
    except Exception as error:  # somebody's own code may raise anything
        raise OptionError(f"--import {text}: {type(error).__name__}: {said_by(error)}") from error
    finally:
        sys.path.remove(os.getcwd())


def doctor(
    model: Model,
    gguf_file: GGUFFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Find the known position traps of a checkpoint, whoever made it.

    Reads the config, the names and shapes of the weights, and the tokenizer's settings; no weights are loaded, and
    nothing is written. Each finding says where it is, what is wrong and what to do. Then it shows how each serving
    program handles the positions, as in posswap export, and the commands to run. The exit code is 0 if there are no
    findings or only notes, and 1 if there are errors or warnings.

    Example: posswap doctor my-long-llama
    """
    source = source_of(model, gguf_file)
    with quiet_library():
        from hf_posswap.checkpoints.doctor import doctor as diagnose

        diagnosis = diagnose(source, trust_remote_code=trust_remote_code)
    if json:
        show_json(diagnosis.to_dict())
    else:
        checked = ", ".join(diagnosis.checked)
        show_pairs([("checkpoint", diagnosis.source), ("positions", diagnosis.positions), ("checked", checked)])
        show_text("")
        if diagnosis.findings:
            rows = [(finding.severity, finding.where, f"{finding.what} {finding.do}") for finding in diagnosis.findings]
            show_table(["severity", "where", "what, and what to do"], rows)
        else:
            show_text("Nothing found.")
        if diagnosis.serving:
            show_text("", "Served by:")
            for served in diagnosis.serving:
                _show_serving(served)
    if not diagnosis.clean:
        raise typer.Exit(Code.OTHER)


def _show_serving(served: Serving) -> None:
    """Print the verdict of a program, and each of its commands on separate lines that can be copied."""
    show_text("")
    show_indented(f"{served.target}: {served.verdict} ({served.engine})", 2)
    if not served.command or served.converted:
        show_indented(served.why, 4)
    if served.caveat:
        show_indented(served.caveat, 4)
    if served.target == "transformers":  # Python, not a shell's command
        show_indented(served.command, 4)
    elif served.command:
        for command in served.command.split(" && "):
            show_command(command)


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
        from hf_posswap.checkpoints.adapters import ADAPTER_CONFIG
        from hf_posswap.checkpoints.native import check_target, convert
        from hf_posswap.patching.inspect.describe import read_config

        check_target(target)
        if not (Path(source) / ADAPTER_CONFIG).is_file():
            read_config(source, trust_remote_code=trust_remote_code)  # without one, no tokenizer is the smaller problem
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
    """Of the matrices in a GGUF file: see `dtype` in `hf_posswap.export`."""

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


class Program(StrEnum):
    """The programs that `hf_posswap.checkpoints.overriding` knows."""

    transformers = "transformers"
    vllm = "vllm"
    sglang = "sglang"
    trl = "trl"
    verl = "verl"
    axolotl = "axolotl"
    llamafactory = "llamafactory"


def overrides(
    model: Model,
    scheme: SchemeName,
    target: Annotated[Program, typer.Option("--target", "--for", help="The program.", show_default=False)],
    max_length: MaxLength = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Print what to paste into a server or a trainer so that it runs an unswapped model with a scheme.

    For swaps that the config of stock transformers expresses: yarn, linear, ntk, llama3, longrope, another base. The
    text is a command, YAML or Python; lines that begin with # say for which versions it is and what to know. Reads only
    the config. Other swaps, and those for which the program has no setting, are refused with what to do instead (exit
    code 3).

    Example: posswap overrides meta-llama/Llama-3.2-1B yarn:factor=4 --target vllm
    """
    source = source_of(model)
    chosen = make_scheme(scheme)
    with quiet_library():
        import hf_posswap

        result = hf_posswap.overrides(
            source,
            scheme if not scheme.endswith(".json") else chosen,
            target.value,
            max_length=max_length,
            trust_remote_code=trust_remote_code,
        )
    if json:
        show_json(result.to_dict())
    else:
        show_lines(str(result))


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a saved model.", show_default=False)],
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the Hub; created if missing.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing: show the files and their sizes.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Commit to this branch instead of main.", show_default=False)
    ] = None,
    commit_message: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Message of the commit.", show_default=False)
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="In total. Default: as long as the Hub responds.", show_default=False),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The model before the swap, for the model card.", show_default=False),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For the card. Default: the base model's license.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="For the card: a folder of eval, compare or a quickstart, or a JSON file of metrics."
        ),
    ] = None,
    card: Annotated[bool, typer.Option(help="Write a model card, unless DIR holds a README.md.")] = True,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Push a saved model to the Hub, in one commit, with a model card.

    It pushes weights, config, tokenizer, and any code that trust_remote_code=True needs, but no trainer state. The card
    shows the recipe and the losses if DIR is in a folder of posswap train, and this model's results if a folder results
    is next to DIR or to that folder; --dry-run shows it. A failed push reports what is on the Hub, and can be repeated.
    Log in first with: hf auth login

    Example: posswap push gpt2-rope me/gpt2-rope --base-model openai-community/gpt2 --dry-run
    """
    with quiet_library():
        import hf_posswap

        report = hf_posswap.push(
            folder,
            repo_id,
            dry_run=dry_run,
            private=private,
            revision=revision,
            commit_message=commit_message,
            timeout=timeout,
            base_model=base_model,
            license=license,
            results=results,
            card=card,
            trust_remote_code=trust_remote_code,
        )
    if json:
        show_json(report.to_dict())
    else:
        show_text(*str(replace(report, card=None)).splitlines())
        if dry_run and report.card is not None:
            show_text("", "README.md would be:", "")
            show_lines(report.card.rstrip())

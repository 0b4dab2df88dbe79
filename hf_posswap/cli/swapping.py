"""`posswap explain`, with its interactive page, and `posswap patch`: plan a swap, and apply it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posswap.cli.arguments import (
    GGUFFile,
    Json,
    MaxLength,
    Model,
    Relative,
    RelativeOption,
    SchemeName,
    Site,
    SiteOption,
    TrustRemoteCode,
    make_scheme,
    scheme_names,
    source_of,
)
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import quiet_library, show_json, show_pairs, show_table, show_text
from hf_posswap.cli.target import checked_file, checked_target, load_processor
from hf_posswap.errors import OptionError, UnsupportedSwapError
from hf_posswap.utils.auto_classes import TRUST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_posswap import SwapPlan
    from hf_posswap.schemes.base import Scheme


_SHAPE = "--heads, --dim, --window and --rope-theta"


def explain(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a checkpoint, a GGUF file, or a Hub id; with --html it may be left out.",
            show_default=False,
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Argument(
            metavar="SCHEME",
            help="Plan the swap to this one: yarn, or yarn:factor=4,base=500000; posswap schemes lists them.",
            show_default=False,
            autocompletion=scheme_names,
        ),
    ] = None,
    max_length: MaxLength = None,
    site: SiteOption = Site.auto,
    relative: RelativeOption = None,
    html: Annotated[
        bool,
        typer.Option(
            "--html",
            help="Write an interactive page that needs no network: what schemes do as the text grows; with MODEL its "
            "plan, memory, cost, and the programs that support the result.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page of --html.  [default: positions.html]"),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --html and no MODEL: also draw a shape with this many attention heads."),
    ] = None,
    dim: Annotated[int | None, typer.Option(metavar="N", help="Likewise: dimensions of a head.")] = None,
    window: Annotated[int | None, typer.Option(metavar="N", help="Likewise: original window in tokens.")] = None,
    rope_theta: Annotated[float | None, typer.Option(metavar="X", help="Likewise: base (theta) of RoPE.")] = None,
    gguf_file: GGUFFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Explain which position mechanism a model has, and what a swap would do.

    Reads only the config: no weights are needed, and nothing is written. Without SCHEME it lists for each scheme
    whether the swap is native (stock transformers loads the result), plugin (hf_posswap is needed to load it), or why
    it is refused. With SCHEME it shows the plan, or the reason for the refusal (exit code 3).

    Example: posswap explain meta-llama/Llama-3.2-1B yarn:factor=4

    Example: posswap explain --html -o positions.html

    Example: posswap explain --html --window 4096 --rope-theta 500000
    """
    sizes = {"heads": heads, "dim": dim, "length": window, "base": rope_theta}
    if html:
        how = _how(max_length, site, relative)
        named = None if model is None else source_of(model, gguf_file)
        return write_explanation(named, scheme, how, out, sizes, json=json, trust_remote_code=trust_remote_code)
    if any(size is not None for size in sizes.values()):
        raise OptionError(
            "--heads, --dim, --window and --rope-theta give a shape to the page of --html: give that, too."
        )
    if out is not None:
        raise OptionError(f"--out {out} is for the page of --html: give both, or neither.")
    if model is None:
        raise OptionError("give a MODEL: a folder with a checkpoint, or a Hub id. posswap explain --html needs none.")
    if scheme is None and (max_length is not None or site is not Site.auto or relative is not None):
        reason = "--max-length, --site and --relative say how to put in a scheme"
        raise OptionError(f"{reason}: name one after MODEL.")
    source = source_of(model, gguf_file)
    chosen = None if scheme is None else make_scheme(scheme)
    with quiet_library():
        import hf_posswap

        options = {} if chosen is None else _how(max_length, site, relative)
        explanation = hf_posswap.explain(source, chosen, trust_remote_code=trust_remote_code, **options)
    if json:
        show_json(explanation.to_dict())
    else:
        show_pairs(explanation.report.rows())
        if explanation.schemes:
            show_text("")
            show_table(["scheme", "in this model"], explanation.schemes.items())
        if explanation.plan is not None:
            show_text("")
            show_plan(explanation.plan)
        if explanation.refusal is not None:
            show_text("", f"refused: {explanation.refusal}")
    if explanation.refusal is not None:
        raise typer.Exit(Code.UNSUPPORTED)


def show_plan(plan: SwapPlan) -> None:
    """Print `plan`: its edits, and what follows from them."""
    from hf_posswap.patching.plan.swap_plan import EDIT_HEADER

    show_text(plan.title, "")
    show_table(EDIT_HEADER, plan.edit_rows())
    show_text("")
    show_pairs(plan.fact_rows())


def patch(
    model: Model,
    scheme: SchemeName,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="The folder to save the swapped model to.", show_default=False),
    ],
    max_length: MaxLength = None,
    site: SiteOption = Site.auto,
    relative: RelativeOption = None,
    centre: Annotated[
        bool, typer.Option("--centre", help="First move the mean of the position table into the token embeddings.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DIR if a save wrote all that is in it.")
    ] = False,
    tokenizer: Annotated[bool, typer.Option(help="Save the model's tokenizer or processor with it.")] = True,
    gguf_file: GGUFFile = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Swap the position mechanism of a model and save the result.

    Loads the model in the precision of its checkpoint, swaps, proves on a small input that the mechanism changed as
    planned, and writes model and tokenizer (or processor) to DIR atomically. It prints the plan and the results of the
    proof. The weights are not trained: the plan shows which adaptation the swapped model needs.

    Example: posswap patch gpt2 rope --max-length 4096 -o gpt2-rope
    """
    source = source_of(model, gguf_file)
    chosen = make_scheme(scheme)
    folder = checked_target(out, source, overwrite)
    with quiet_library():
        how = _how(max_length, site, relative)
        trusted: dict[str, Any] = {TRUST: trust_remote_code}
        import hf_posswap

        _refuse_early(source, chosen, how | trusted)
        processor = load_processor(source, **trusted) if tokenizer else None
        loaded = hf_posswap.load(source, dtype="auto", **trusted)
        original = hf_posswap.describe_positions(loaded).limit
        if centre:
            _centre(loaded)
        plan = hf_posswap.swap_plan(hf_posswap.patch_model(loaded, chosen, **how))
        proved = hf_posswap.verify_swap(loaded).checks
        text_tokenizer: Any = getattr(processor, "tokenizer", processor)
        if getattr(text_tokenizer, "model_max_length", None) == original:
            text_tokenizer.model_max_length = plan.max_length  # or it truncates texts at the old length
        hf_posswap.save(loaded, folder, tokenizer=processor, overwrite=overwrite)
    saved = {"folder": str(folder), "tokenizer": processor is not None}
    if json:
        show_json({"plan": plan.to_dict(), "verification": proved, "saved": saved})
        return
    show_plan(plan)
    show_text("")
    show_pairs([(f"ok: {name}", result) for name, result in proved.items()])
    show_text("", f"Saved to {folder}, {_processor_note(processor)}.", _how_to_load(plan, folder))


def _processor_note(processor: object) -> str:
    """Return whether a tokenizer, or which processor of images or sound, was saved too."""
    from transformers import PreTrainedTokenizerBase

    if processor is None:
        return "without a tokenizer"
    is_tokenizer = isinstance(processor, PreTrainedTokenizerBase)
    return f"with its {'tokenizer' if is_tokenizer else type(processor).__name__}"


def _how(max_length: int | None, site: Site, relative: Relative | None) -> dict[str, Any]:
    """Return the options of `plan_swap`; an invalid length is reported before the model is looked up."""
    from hf_posswap.patching.plan.plan_swap import check_max_length

    check_max_length(max_length)
    return {"max_length": max_length, "site": site.value, "relative": None if relative is None else relative.value}


def _refuse_early(source: str, scheme: Scheme, how: dict[str, Any]) -> None:
    """Raise the error of the swap before weights are downloaded or read."""
    import hf_posswap

    explanation = hf_posswap.explain(source, scheme, **how)
    if explanation.refusal is not None:
        raise UnsupportedSwapError(explanation.refusal)


def _centre(model: Any) -> None:
    """Centre the table of `model` in float32, and restore the model's precision."""
    import hf_posswap

    precision = model.dtype
    hf_posswap.centre_table(model.float())
    model.to(precision)


def _how_to_load(plan: SwapPlan, folder: Path) -> str:
    if plan.route == "native":
        return "Load it with transformers as any other checkpoint, or with hf_posswap.load."
    modules = ", ".join(dict.fromkeys((plan.record.imports or {}).values()))
    first = f" Import {modules} first: its scheme is registered there." if modules else ""
    if not (folder / "modeling_posswap.py").is_file():
        return f"Load it with hf_posswap.load, or with transformers after import hf_posswap.{first}"
    return (
        "Load it with hf_posswap.load, with transformers after import hf_posswap, or without the package by "
        f"trust_remote_code=True.{first}"
    )


def write_explanation(
    model: str | None,
    scheme: str | None,
    how: Mapping[str, object],
    out: Path | None,
    sizes: Mapping[str, float | None],
    *,
    json: bool,
    trust_remote_code: bool,
) -> None:
    """Write the interactive page of schemes, and of a model if one is given, and print its path.

    Args:
        model: a folder or Hub id; None: the page shows only schemes.
        scheme: the swap to plan, as typed on the command line, or None.
        how: further arguments of `hf_posswap.plan_swap`.
        out: the file; None: positions.html in the working folder.
        sizes: arguments of `sample_geometry` for a shape of one's own, None where it has its default.
        json: print the path as JSON.
        trust_remote_code: run code that comes with the checkpoint if its config needs it.
    """
    from hf_posswap.inspection.explorer.page import PAGE

    for name in (model, scheme):
        if out is None and name is not None and name.endswith(".html"):
            raise OptionError(f"{name!r}: --html takes no file, --out names it: posswap explain --html --out {name}")
    if model is None and scheme is None and any(value not in (None, "auto") for value in how.values()):
        raise OptionError("--max-length, --site and --relative say how to put in a scheme: name a MODEL and one.")
    given_sizes = {name: size for name, size in sizes.items() if size is not None}
    if given_sizes and model is not None:
        raise OptionError(
            "the page of a MODEL has its shape: leave out --heads, --dim, --window and --rope-theta, or MODEL."
        )
    path = checked_file(out or Path(PAGE))
    chosen = None if scheme is None else make_scheme(scheme)
    source = None if model is None else source_of(model)
    with quiet_library():
        from hf_posswap.inspection.explorer.model import model_facts
        from hf_posswap.inspection.explorer.page import write_page
        from hf_posswap.plotting.positions.numbers import sample_geometry

        facts = None
        if source is not None:
            facts = model_facts(source, chosen, written=scheme, trust_remote_code=trust_remote_code, **how)
        geometry = sample_geometry(**given_sizes) if given_sizes else None  # type: ignore[arg-type]  # it checks them
        write_page(path, facts, geometry=geometry)
    if json:
        show_json({"page": str(path)})
    else:
        show_text(f"Saved to {path}: open it in a browser; it needs no network.")
    if facts is not None and facts.explanation.refusal is not None:
        raise typer.Exit(Code.UNSUPPORTED)

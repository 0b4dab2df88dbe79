"""`posswap explain --html`: the interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hf_posswap.cli.arguments import make_scheme, source_of
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import quiet_library, show_json, show_text
from hf_posswap.cli.target import checked_file
from hf_posswap.errors import OptionError


def write_explanation(
    model: str | None,
    scheme: str | None,
    how: dict[str, Any],
    out: Path | None,
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
        json: print the path as JSON.
        trust_remote_code: run code that comes with the checkpoint if its config needs it.
    """
    from hf_posswap.explorer.page import PAGE

    for name in (model, scheme):
        if out is None and name is not None and name.endswith(".html"):
            raise OptionError(f"{name!r}: --html takes no file, --out names it: posswap explain --html --out {name}")
    if model is None and scheme is None and any(value not in (None, "auto") for value in how.values()):
        raise OptionError("--max-length, --site and --relative say how to put in a scheme: name a MODEL and one.")
    path = checked_file(out or Path(PAGE))
    chosen = None if scheme is None else make_scheme(scheme)
    source = None if model is None else source_of(model)
    with quiet_library():
        from hf_posswap.explorer.model import model_facts
        from hf_posswap.explorer.page import write_page

        facts = None
        if source is not None:
            facts = model_facts(source, chosen, written=scheme, trust_remote_code=trust_remote_code, **how)
        write_page(path, facts)
    if json:
        show_json({"page": str(path)})
    else:
        show_text(f"Saved to {path}: open it in a browser; it needs no network.")
    if facts is not None and facts.explanation.refusal is not None:
        raise typer.Exit(Code.UNSUPPORTED)

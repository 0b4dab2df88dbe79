"""`posswap doctor`: the position traps of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hf_posswap.cli.arguments import GGUFFile, Json, Model, TrustRemoteCode, source_of
from hf_posswap.cli.outcome import Code
from hf_posswap.cli.output import (
    quiet_library,
    show_command,
    show_indented,
    show_json,
    show_pairs,
    show_table,
    show_text,
)

if TYPE_CHECKING:
    from hf_posswap.checkpoints.doctor_findings import Diagnosis, Serving


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
        _show(diagnosis)
    if not diagnosis.clean:
        raise typer.Exit(Code.OTHER)


def _show(diagnosis: Diagnosis) -> None:
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


def _show_serving(served: Serving) -> None:
    """Print the verdict of a program, and each of its commands on separate lines that can be copied."""
    show_text("")
    show_indented(f"{served.target}: {served.verdict} ({served.engine})", 2)
    if not served.command or served.converted:
        show_indented(served.why, 4)
    if served.target == "transformers":  # Python, not a shell's command
        show_indented(served.command, 4)
    elif served.command:
        for command in served.command.split(" && "):
            show_command(command)

"""`posswap overrides`: what to paste into a server or a trainer that loads the unswapped model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from hf_posswap.cli.arguments import Json, MaxLength, Model, SchemeName, TrustRemoteCode, make_scheme, source_of
from hf_posswap.cli.output import quiet_library, show_json, show_lines


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

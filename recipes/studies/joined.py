"""Joins short texts into documents of many windows, for collections without long ones.

    python -m recipes.studies.joined stories.parquet --characters 9500 --between '<s>' --out stories
    python -m recipes.studies.extension --base my-llama --train stories/train.jsonl --valid stories/valid.jsonl ...

Documents consist of whole texts in order; a remainder at the end is dropped. The first third of the documents is for
measuring. Texts are independent of one another, so such documents show whether a model still works far beyond its
trained length, and not whether it benefits from far text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.cli.outcome import script
from hf_posswap.errors import DataError
from hf_posswap.training.data.settings import Source
from hf_posswap.training.data.sources import source_documents
from hf_posswap.utils.atomic_io import writable_folder, write_text


def main(
    texts: Annotated[str, typer.Argument(help="As data.sources[].path: a file, a folder, a data set.")],
    out: Annotated[Path, typer.Option(help="The folder for train.jsonl and valid.jsonl.")],
    characters: Annotated[int, typer.Option(min=1, help="Least length of a document.")],
    between: Annotated[str, typer.Option(help="Put between two texts, such as the token that begins one.")] = "\n\n",
    one_line: Annotated[bool, typer.Option("--one-line", help="Make every run of white space one blank.")] = False,
) -> None:
    """Join texts to documents, two thirds of them to train on."""
    stripped_texts = (document.text.strip() for document, _ in source_documents(Source(texts)))
    documents = list(
        joined((" ".join(text.split()) if one_line else text for text in stripped_texts), characters, between)
    )
    valid = len(documents) // 3
    if not valid:
        raise DataError(f"{texts} gives {len(documents)} documents of {characters} characters: give 3 or more texts.")
    folder = writable_folder(out)
    for name, split_documents in (("valid", documents[:valid]), ("train", documents[valid:])):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in split_documents))
    typer.echo(f"{len(documents) - valid} documents to train on, {valid} to measure on: {out}")


def joined(texts: Iterable[str], characters: int, between: str) -> Iterator[str]:
    """Yield documents of whole texts, of `characters` or more each.

    Example:
        >>> list(joined(["ab", "c", "def", "g"], 4, "-"))
        ['ab-c', 'def-g']
    """
    pending: list[str] = []
    for text in texts:
        pending.append(text)
        document = between.join(pending)
        if len(document) >= characters:
            yield document
            pending = []


app = script(main)

if __name__ == "__main__":
    app()

"""Which page of the site stands for which file of the repository, and links between files made links between pages."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ".docs/pages"
_RESULTS = "recipes/studies/results"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)

PAGE_OF: dict[str, str] = {
    "README.md": "index.md",
    ".github/CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
    ".docs/tutorial/positions.py": "tutorial.md",
    ".docs/tutorial/swap.py": "tutorial-swap.md",
    ".docs/tutorial/adapt.py": "tutorial-adapt.md",
    ".docs/tutorial/compare.py": "tutorial-compare.md",
    f"{_RESULTS}/quickstart.md": "results/quickstart.md",
    f"{_RESULTS}/real-model/beyond-16k.md": "results/real-model-16k.md",
    f"{_RESULTS}/real-model/beyond-32k.md": "results/real-model-32k.md",
    f"{_RESULTS}/real-model/tasks-16k.md": "results/real-model-tasks-16k.md",
    f"{_RESULTS}/real-model/tasks-32k.md": "results/real-model-tasks-32k.md",
    f"{_RESULTS}/real-model/continuation.md": "results/real-model-continuation.md",
    f"{_RESULTS}/real-model/within.md": "results/real-model-within.md",
    "recipes/bench/results/dry_beside.md": "results/dry-beside.md",
    f"{_RESULTS}/adaptation.md": "results/adaptation.md",
    f"{_RESULTS}/learned-to-t5/adaptation.md": "results/learned-to-t5.md",
    f"{_RESULTS}/to-alibi/adaptation.md": "results/to-alibi.md",
    f"{_RESULTS}/learned-to-sinusoidal/adaptation.md": "results/learned-to-sinusoidal.md",
    f"{_RESULTS}/rope-to-yarn/adaptation.md": "results/rope-to-yarn.md",
    f"{_RESULTS}/rope-to-abf/adaptation.md": "results/rope-to-abf.md",
    f"{_RESULTS}/longrope/adaptation.md": "results/longrope.md",
    f"{_RESULTS}/rnope/adaptation.md": "results/rnope.md",
    f"{_RESULTS}/ablations/adaptation.md": "results/ablations.md",
    f"{_RESULTS}/ablations-alibi/adaptation.md": "results/ablations-alibi.md",
    f"{_RESULTS}/ablations-sinusoidal/adaptation.md": "results/ablations-sinusoidal.md",
    f"{_RESULTS}/ablations-abf/adaptation.md": "results/ablations-abf.md",
    f"{_RESULTS}/curve/adaptation.md": "results/curve.md",
    f"{_RESULTS}/extension.md": "results/extension.md",
    f"{_RESULTS}/real/stories260K/extension.md": "results/stories260K.md",
    f"{_RESULTS}/real/babyllama105/extension.md": "results/babyllama105.md",
    f"{_RESULTS}/real/babyllama105/adaptation.md": "results/babyllama105-adaptation.md",
    f"{_RESULTS}/retrieval.md": "results/retrieval.md",
    f"{_RESULTS}/encoders.md": "results/encoders.md",
    f"{_RESULTS}/claims.md": "results/claims.md",
    f"{_RESULTS}/starts.md": "results/starts.md",
    f"{_RESULTS}/effects.md": "results/effects.md",
    f"{_RESULTS}/books.md": "results/books.md",
    f"{_RESULTS}/untrained.md": "results/untrained.md",
    f"{_RESULTS}/ablations-alibi-longer/adaptation.md": "results/ablations-alibi-longer.md",
    f"{_RESULTS}/alibi-slopes/adaptation.md": "results/alibi-slopes.md",
    "recipes/bench/results/table.md": "results/bench.md",
    "recipes/bench/results/dry.md": "results/dry.md",
    "recipes/bench/results/kernels.md": "results/kernels.md",
    **{f"{PAGES}/{path.name}": path.name for path in sorted((ROOT / PAGES).glob("*.md"))},
}
"""Files of the repository, and the pages of the site that are made of them."""

PICTURE_OF = {
    **{f"{_RESULTS}/{path.name}": f"results/{path.name}" for path in sorted((ROOT / _RESULTS).glob("*.png"))},
    **{
        f"{_RESULTS}/real-model/{path.name}": f"results/real-model-{path.name}"
        for path in sorted((ROOT / _RESULTS / "real-model").glob("*.png"))
    },
}
"""Pictures of the repository, and where the site has them."""


def source_of(page: str) -> str:
    """Return the file of the repository that the site's `page` is made of."""
    return next(source for source, site_page in PAGE_OF.items() if site_page == page)


def address() -> str | None:
    """Return the address of the repository, from pyproject.toml; None while it has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository: str | None = project.get("urls", {}).get("Repository")
    return repository


def led_out(markdown: str, source: str, repository: str | None) -> str:
    """Return the text of the file `source` for a reader of that file alone, such as a notebook or PyPI.

    A link to a file of the repository leads to its address, `repository`; without one it keeps its words and loses its
    target.
    """

    def replaced(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        kind = "raw" if mark else "blob"
        return label if repository is None else f"{mark}[{label}]({repository}/{kind}/main/{file})"

    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in _FENCE.split(markdown))


def led_on(markdown: str, source: str, place: str) -> str:
    """Return the text of the file `source`, which is the site's page `place`, with links to pages of the site.

    A link to a file that is no page keeps its words and loses its target. Code is left alone.
    """

    def replaced(match: re.Match[str]) -> str:
        mark, label, link = match.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return match[0]
        path, hash_, anchor = link.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / file).exists():
            return match[0]  # mkdocs will say that it leads nowhere
        target = PAGE_OF.get(file) or PICTURE_OF.get(file)
        if target is None:
            return label
        return f"{mark}[{label}]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{hash_}{anchor})"

    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in _FENCE.split(markdown))

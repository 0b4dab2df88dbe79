"""Maintains the list of tested versions, and the README's badges and its sentence on them.

    python recipes/tested_versions.py           # shows the installed versions that are not in the list yet
    python recipes/tested_versions.py --write   # adds them and writes the README; `.ci/run --record` does so at its end
    python recipes/tested_versions.py --next    # shows the versions that pyproject.toml does not accept

The list is hf_posswap/tested_versions.json; hf_posswap/versions.py reads it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_posswap.utils.atomic_io import write_text
from hf_posswap.versions import FILE, is_tested, tested, tested_range

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "torch", "peft", "accelerate")
"""Packages whose versions are recorded, because swaps depend on them."""
BADGED = ("transformers", "torch")
"""Packages whose tested versions are badges."""
REGIONS = ("badges", "tested versions")
"""Regions of the README that this script writes, each between `<!-- NAME -->` and `<!-- /NAME -->`."""
WORKFLOW = "actions/workflows/tests.yml"


def installed() -> dict[str, str]:
    """Return the versions of `PACKAGES` in this environment, without build tags; missing packages are left out."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def untested(versions: dict[str, str]) -> dict[str, str]:
    """Return those of `versions` that are not in the list; pre-releases are never added."""
    return {
        package: version
        for package, version in versions.items()
        if not is_tested(package, version) and not Version(version).is_prerelease
    }


def add(versions: dict[str, str]) -> str:
    """Return the JSON of the list with `versions` added: a line per package, the oldest version first."""
    added = {package: [version] for package, version in versions.items()}
    merged = {package: {*tested().get(package, []), *added.get(package, [])} for package in PACKAGES}
    lines = [
        f'  "{package}": {json.dumps(sorted(known_versions, key=Version))}'
        for package, known_versions in merged.items()
        if known_versions
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def sentence() -> str:
    """Return the README's sentence on the tested versions."""
    ranges = [f"{package} {tested_range(package)}" for package in PACKAGES if package in tested()]
    return f"Tested with {', '.join(ranges[:-1])} and {ranges[-1]}; `posswap --version` prints these and your versions."


def project_table() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def python_versions() -> list[str]:
    """Return the versions of Python that the classifiers of pyproject.toml name, the oldest first."""
    named = (
        re.fullmatch(r"Programming Language :: Python :: (\d+\.\d+)", text) for text in project_table()["classifiers"]
    )
    return sorted((match[1] for match in named if match), key=Version)


def badge(label: str, message: str) -> str:
    """Return a static badge as Markdown.

    Example:
        >>> badge("licence", "Apache-2.0")
        '![licence: Apache-2.0](https://img.shields.io/badge/licence-Apache--2.0-blue)'
    """
    path = "-".join(quote(text.replace("-", "--").replace("_", "__").replace(" ", "_")) for text in (label, message))
    return f"![{label}: {message}](https://img.shields.io/badge/{path}-blue)"


def badges() -> str:
    """Return the README's badges: tests, if the repository has an address, Python, tested versions and licence."""
    project = project_table()
    repository = project.get("urls", {}).get("Repository")
    tests = [] if repository is None else [f"![tests]({repository}/{WORKFLOW}/badge.svg)"]
    versions = {"python": python_versions()} | {package: tested()[package] for package in BADGED}
    static = [badge(name, " | ".join(releases)) for name, releases in versions.items()]
    return " ".join([*tests, *static, badge("licence", project["license"])])


def accepted() -> dict[str, SpecifierSet]:
    """Return the versions that pyproject.toml accepts, by package, in the core or an extra."""
    project = project_table()
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    requirements = [Requirement(line) for line in lines]
    return {requirement.name: requirement.specifier for requirement in requirements if requirement.name in PACKAGES}


def beyond(versions: dict[str, str]) -> dict[str, str]:
    """Return those of `versions` that pyproject.toml does not accept."""
    specifiers = accepted()
    return {
        package: version
        for package, version in versions.items()
        if not specifiers[package].contains(version, prereleases=True) or Version(version).is_prerelease
    }


def in_readme(page: str) -> str:
    """Return the README's text with the current badges and sentence between their markers."""
    for name, text in zip(REGIONS, (badges(), sentence()), strict=True):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert len(pattern.findall(page)) == 1, f"README.md needs {begin} and {end} once each"
        page = pattern.sub(lambda _, filled=f"{begin}\n{text}\n{end}": filled, page)  # type: ignore[misc]
    return page


def main(
    write: Annotated[bool, typer.Option("--write", help="Put the installed versions into the list.")] = False,
    following: Annotated[bool, typer.Option("--next", help="Tell what lies beyond pyproject.toml.")] = False,
) -> None:
    """Tell which installed versions are not in the list of tested ones, or put them there."""
    if following:
        specifiers, not_accepted = accepted(), beyond(installed())
        for package, version in not_accepted.items():
            typer.echo(f"beyond pyproject.toml: {package} {version}, which takes {package}{specifiers[package]}")
        if not not_accepted:
            typer.echo("nothing is beyond pyproject.toml")
        return
    new = untested(installed())
    version_text = ", ".join(f"{package} {version}" for package, version in new.items())
    if write:
        if new:
            write_text(FILE, add(new))
        readme = ROOT / "README.md"
        write_text(readme, in_readme(readme.read_text(encoding="utf-8")))
    if not new:
        typer.echo(f"all installed versions are in {FILE.name}")
    elif not write:
        typer.echo(f"not in {FILE.name} yet: {version_text}")
    else:
        typer.echo(f"added to {FILE.name}: {version_text}. Commit it, and README.md.")


if __name__ == "__main__":
    typer.run(main)

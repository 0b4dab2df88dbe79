"""What the site's hooks make of the repository: links led on, regions filled, every scheme, name and error there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

import hf_posswap
from hf_posswap import errors
from hf_posswap.plotting import PICTURES
from hf_posswap.schemes import SCHEMES
from hf_posswap.training.config.shipped import shipped_recipes
from hf_posswap.utils.atomic_io import read_json
from tests.docs.pages import PAGES, ROOT, anchors, text_of


@pytest.fixture(scope="module")
def hooks() -> Iterator[Any]:
    """Return the package `generated` and the module `repository` of the hooks, as mkdocs imports them."""
    sys.path.insert(0, str(ROOT / ".docs" / "hooks"))
    import generated
    import repository

    yield generated, repository
    sys.path.remove(str(ROOT / ".docs" / "hooks"))


def test_links_lead_from_page_to_page(hooks: Any) -> None:
    led_on = hooks[1].led_on
    readme = "[a](.docs/pages/serving.md#x) ![p](recipes/studies/results/quickstart.png) [code](hf_posswap/errors.py)"
    assert led_on(readme, "README.md", "index.md") == "[a](serving.md#x) ![p](results/quickstart.png) code"
    deep = "[b](../../recipes/studies/results/effects.md) [c](schemes.md) [d](#here) [e](https://host.org)"
    expected = "[b](results/effects.md) [c](schemes.md) [d](#here) [e](https://host.org)"
    assert led_on(deep, ".docs/pages/choosing.md", "choosing.md") == expected
    assert led_on("```\n[f](../x.md)\n```", ".docs/pages/faq.md", "faq.md") == "```\n[f](../x.md)\n```"
    assert led_on("[g](nowhere.md)", ".docs/pages/faq.md", "faq.md") == "[g](nowhere.md)"  # mkdocs tells


def test_a_notebook_that_is_opened_alone_has_no_links_into_a_folder(hooks: Any) -> None:
    led_out = hooks[1].led_out
    alone = "[a](../pages/schemes.md#rope) [b](https://host.org) ![c](x.png)\n```text\n[d](swap.py)\n```\n"
    assert led_out(alone, ".docs/tutorial/adapt.py", None) == alone.replace(
        "[a](../pages/schemes.md#rope)", "a"
    ).replace("![c](x.png)", "c")
    address = "https://host.org/me/it"
    assert led_out("[a](../pages/schemes.md#rope)", ".docs/tutorial/adapt.py", address) == (
        f"[a]({address}/blob/main/.docs/pages/schemes.md#rope)"
    )
    assert led_out("![c](x.png)", "README.md", address) == f"![c]({address}/raw/main/x.png)"


def test_every_region_is_known_and_used(hooks: Any) -> None:
    used = {line.split()[2] for page in PAGES for line in text_of(page).splitlines() if "<!-- generated:" in line}
    assert used == set(hooks[0].GENERATED)


def test_the_table_of_goals_says_of_each_recipe_what_its_results_do(hooks: Any) -> None:
    lines = hooks[0].goals.render().splitlines()[2:]
    for source in hooks[0].goals.OF_RECIPES:
        row = read_json((ROOT / source).with_suffix(".json"))["rows"][0]
        (line,) = (line for line in lines if f"({hooks[1].PAGE_OF[source]})" in line)
        assert line.count("reached") == sum(goal["reached"] for goal in row["goals"])
        assert line.count("missed") == sum(not goal["reached"] for goal in row["goals"])
        assert f"{row['far_text']['difference']:+.3f}" in line
    assert sum("/retrieval.md" in line for line in lines) == 2


def test_each_scheme_has_formula_source_and_citation(hooks: Any) -> None:
    page = hooks[0].schemes.render()
    for name, cls in SCHEMES.items():
        section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert cls.source in section, name
        assert "```text" in section, name
    from generated.bibliography import WORKS

    assert {cls.source for _, cls in SCHEMES.items()} == set(WORKS)
    keys = [work.key for work in WORKS.values()]
    assert len(keys) == len(set(keys))
    for source, work in WORKS.items():
        if "arxiv.org" in source:  # the number begins with year and month of the first version
            assert 2000 + int(source.rpartition("/")[2][:2]) == work.year, source


def test_support_is_counted_from_the_table(hooks: Any) -> None:
    page = text_of(".docs/pages/support.md")
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count("|") > 10]
    column = next(number for number, cell in enumerate(lines[0].split("|")) if " yarn " in f"{cell.replace(',', ' ')} ")
    expected = {"native": 0, "plugin": 0}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.split("|")]
        if cells[column] in expected:
            expected[cells[column]] += int(cells[1])
    shown = hooks[0].schemes.support("yarn")
    assert shown.startswith(f"native in {expected['native']}, plugin in {expected['plugin']} ")
    assert hooks[0].schemes.support("rope_2d") == ""  # the table is of language models


def test_every_public_name_is_in_one_group(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = hooks[0].public_names
    listed = [name for group in names.groups().values() for name in group]
    assert sorted(listed) == sorted(set(hf_posswap.__all__) - {"errors", "__version__"})
    monkeypatch.setitem(names.GROUPS, "Train", ("load_recipe",))
    with pytest.raises(ValueError, match="run_recipe"):
        names.groups()


def test_every_error_has_a_mend(hooks: Any) -> None:
    known = [one.__name__ for one in hooks[0].error_list.classes()]
    assert {"PosswapError", "DataError", "BackendWarning"} <= set(known)
    assert len(known) == len(
        [v for n, v in vars(errors).items() if isinstance(v, type) and v.__module__ == errors.__name__ and n[0] != "_"]
    )
    sections = anchors(text_of(".docs/pages/troubleshooting.md"))
    assert [name for name in known if name.lower() not in sections] == []
    assert "| [`DataError`](#dataerror) | `ValueError` |" in hooks[0].error_list.render()


def test_every_kind_of_picture_is_on_its_page(hooks: Any) -> None:
    sheets = {sheet.picture: sheet for sheet in hooks[0].pictures.SHEETS}
    assert set(sheets) == {*PICTURES, "attention"}
    page = hooks[0].pictures.render()
    for name, sheet in sheets.items():
        section = page.partition(f"### {sheet.title}\n")[2].partition("\n### ")[0]
        assert all(f"pictures/{tone}/{name}.svg#only-{tone}" in section for tone in ("light", "dark")), name
        assert sheet.words in section


def test_recipes_and_commands_are_whole(hooks: Any) -> None:
    recipes = hooks[0].recipes.render()
    for name, recipe in shipped_recipes().items():
        assert f"`{name}`" in recipes
        assert " ".join(recipe.header["Purpose"].split()) in recipes
    command = hooks[0].command.render()
    assert "## posswap explain" in command
    assert "posswap explain [OPTIONS]" in command
    assert "`--max-length` `N`" in command

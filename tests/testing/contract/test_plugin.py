"""`pytest --posswap-contract`: it passes for a package that keeps its promises, and names those that are broken."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ("-p", "posswap", "-p", "no:cacheprovider")  # by its entry point: the package must be installed
BROKEN = Path(__file__).with_name("broken_child.py")


def run(folder: Path, *arguments: str, site: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run pytest in `folder`, where nothing else is, with the package of `site`."""
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    left_out = ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in environment.items() if name not in left_out}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("module", "content", "expected"),
    [
        ("no_such_module", None, "cannot import 'no_such_module': ModuleNotFoundError"),
        ("no_such_file.py", None, "cannot import 'no_such_file.py': there is no such file"),
        ("empty_schemes.py", "", "'empty_schemes.py' registers no scheme and no family"),
        (
            "torn_schemes.py",
            "raise ValueError('torn\\nin two')",
            "cannot import 'torn_schemes.py': ValueError: torn in two",
        ),
    ],
)
def test_a_module_that_cannot_be_asked_is_one_line_of_usage(
    tmp_path: Path, module: str, content: str | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / module).write_text(content, encoding="utf-8")
    done = run(tmp_path, *PLUGIN, "-q", f"--posswap-contract={module}")
    assert done.returncode == 4
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(said) == 1
    assert said[0].startswith(f"ERROR: --posswap-contract: {expected}")


def test_without_the_option_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n"
        "    assert 'hf_posswap.testing.contract.plugin' in sys.modules\n"
        "    assert not {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
    )
    done = run(tmp_path, *PLUGIN, "-p", "no:hypothesispytest", "-q", "test_light.py")
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what is said of each case of the broken schemes that fails, by its name."""
    points = "planned or only_differences or a_prefix or gradients_reach or formula or own_position or an_end"
    chosen = ("-n0", "-q", "-m", "", "-k", f"ghost or llama and not attention and ({points})")
    done = run(tmp_path_factory.mktemp("broken"), *PLUGIN, *chosen, f"--posswap-contract={BROKEN}")
    assert done.returncode == 1, done.stdout + done.stderr
    failures = re.split(r"\n_+ (\S.*) _+\n", done.stdout.partition("= short test summary")[0])
    return dict(zip(failures[1::2], failures[2::2], strict=True))


@pytest.mark.parametrize(
    ("case", "promise", "expected", "seen"),
    [
        (
            "without-heads::llama::the_scheme_is_planned_or_refused_with_a_reason",
            "its mechanism giving the right shapes and dtypes",
            "a plan, or UnsupportedSwapError with a reason",
            r"SchemeError: without-heads: bias of WithoutHeads gives \[2, 3, 4\], expected \[1, 4, 3, 4\] or \[2, 4",
        ),
        (
            "by-place::llama::only_differences_of_positions_matter_exactly_where_it_is_promised",
            "Only differences of positions matter, exactly where the trait `relative` promises it.",
            "the same logits 299 positions later, up to 0.0002: the traits say relative=True",
            r"they differ by \d",
        ),
        (
            "by-the-last-key::llama::a_prefix_is_consistent_exactly_where_it_is_promised",
            "The logits of a token are the same however many tokens follow",
            "the same logits of a prefix alone and in a longer text, up to 5e-05: the traits promise it",
            r"they differ by \d",
        ),
        (
            "forgetful::llama::gradients_reach_all_that_the_plan_keeps",
            "A training step gives a finite gradient to every parameter",
            "a gradient for each parameter in use",
            r"none for \S*posswap\S*\.extra",
        ),
        (
            "misstated::llama::the_scores_are_those_of_the_formula",
            "The scores of attention are those of the formula that the scheme states",
            "of the formula for head 0, a query at 1 and a key at 0",
            r"-?\d",
        ),
        (
            "unshardable::llama::a_token_needs_its_own_position_alone",
            "A shardable scheme needs each token's own position alone",
            "a mechanism without a bias, which rotates a token alike in a part of a text and in the whole",
            "a bias, split attention, or another rotation",
        ),
        (
            "endless::llama::a_scheme_with_an_end_says_so",
            "A scheme that is not unbounded raises PositionRangeError beyond its end.",
            "PositionRangeError",
            "nothing is raised",
        ),
        (
            "ghost::classes",
            "its model types have classes for language modelling",
            "model types that AutoConfig and AutoModelForCausalLM",
            "none of 'ghost' is known",
        ),
    ],
)
def test_a_broken_promise_is_named(broken: dict[str, str], case: str, promise: str, expected: str, seen: str) -> None:
    subject, _, rest = case.partition("::")
    lines = broken[case].splitlines()
    kind = "family" if subject == "ghost" else "scheme"
    assert lines[0].startswith(f"{kind} {subject}, in {'its classes' if kind == 'family' else rest.partition('::')[0]}")
    said = {line.split(":", 1)[0].strip(): line.split(":", 1)[1].strip() for line in lines[1:4]}
    assert promise in said["promise"]
    assert expected in said["expected"]
    assert re.search(seen, said["seen"])


def test_a_broken_scheme_breaks_what_it_is_made_to_break_alone(broken: dict[str, str]) -> None:
    assert {case.partition("::")[0] for case in broken} == {
        *("without-heads", "by-place", "by-the-last-key", "forgetful", "misstated", "unshardable", "endless", "ghost")
    }
    for name, point in (("misstated", "formula"), ("endless", "an_end"), ("forgetful", "gradients_reach")):
        assert not [case for case in broken if case.startswith(name) and point not in case]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder to which this package and the example package are installed from their wheels."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: the wheels cannot be built")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site") / "site"
    pip = [sys.executable, "-m", "pip", "-q"]
    for source in (ROOT, ROOT / "tests" / "toys" / "package"):
        build = [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(wheels)]
        subprocess.run(build, capture_output=True, text=True, check=True)
    built = [str(wheel) for wheel in wheels.glob("*.whl")]
    assert len(built) == 2
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder), *built]
    subprocess.run(install, capture_output=True, text=True, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_package_that_keeps_its_promises_passes(site: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "-q", "--posswap-contract", "example_package", "-rs", site=site)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 900
    assert " failed" not in done.stdout


@pytest.mark.slow
def test_every_kind_of_registration_has_its_cases(site: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "-q", "--collect-only", "--posswap-contract", "example_package", site=site)
    cases = re.findall(r"^example_package::([\w-]+)::([^:\n]+)::(\S+)$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in cases} == {"window-toll", "clipped-rope", "window-bias", "log-scale", "house"}
    for name in ("window-toll", "clipped-rope", "window-bias"):
        where = {place for each, place, _ in cases if each == name}
        assert {"gpt2", "bert", "llama", "t5 (encoder)", "t5 (decoder)"} <= where
    assert "HouseForCausalLM with alibi" in {place for _, place, _ in cases}
    asked = {point.partition("[")[0] for name, _, point in cases if name == "window-toll"}
    assert {
        *("cached_equals_full", "save_and_load_give_the_same_logits", "unpatching_is_bit_exact"),
        *("gradients_reach_all_that_the_plan_keeps", "the_scores_are_those_of_the_formula", "right_padding"),
        *("bfloat16_keeps_angles_in_float32", "steps_behind_a_right_padded_prompt_equal_the_unpadded_model"),
    } <= asked


@pytest.mark.slow
def test_the_installed_plugin_costs_nothing_without_its_option(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n"
        "    assert 'hf_posswap.testing.contract.plugin' in sys.modules\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = run(tmp_path, "-p", "no:hypothesispytest", "-q", "test_light.py", site=site)
    assert done.returncode == 0, done.stdout

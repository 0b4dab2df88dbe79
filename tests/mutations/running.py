"""Processes in which transformers is changed before anything of it is used: the next release, installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import pkgutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations.cases import CASES, Raised, answers, caught, differs, names_of_today, questions
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.source import Source

MODELS = "transformers.models."
LONGEST = 200.0
"""Seconds that one mutation may take."""


@dataclass(frozen=True)
class Outcome:
    """What became of one swap under one mutation.

    Attributes:
        case: the model.
        scheme: that it was swapped to; "": the stock model itself.
        verdict: "survives", "refused", "crash", "silent"; of a stock model that the mutation made wrong: "broken".
        detail: the questions that came out wrong, or the error.
    """

    case: str
    scheme: str
    verdict: str
    detail: str = ""


class Rewriting(importlib.abc.MetaPathFinder):
    """Imports modeling files of transformers as a mutation rewrites them."""

    def __init__(self, rewrite: Callable[[Source], None], folder: Path) -> None:
        self.rewrite, self.folder = rewrite, folder
        self.changed: set[str] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        family, _, leaf = name.removeprefix(MODELS).partition(".")
        if not name.startswith(MODELS) or leaf != f"modeling_{family}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        source = Source.parsed(family, Path(spec.origin).read_text(encoding="utf-8"))
        self.rewrite(source)
        if not source.changes:
            return spec
        self.changed.add(family)
        file = self.folder / "transformers" / "models" / family / f"{leaf}.py"  # what reads its own source finds it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source.text(), encoding="utf-8")
        return importlib.util.spec_from_file_location(name, file)


def prepare() -> None:
    """Import what takes long and is no code of one family, and nothing that a mutation rewrites."""
    import torch

    torch.set_num_threads(1)
    for name in ("modeling_utils", "cache_utils", "masking_utils", "generation", "modeling_layers", "integrations"):
        importlib.import_module(f"transformers.{name}")
    import transformers

    _ = transformers.PreTrainedModel, transformers.GenerationMixin, transformers.DynamicCache
    import hf_posswap

    for part in ("compat", "families", "patching", "schemes", "testing", "kernels", "utils"):
        package = importlib.import_module(f"hf_posswap.{part}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(word in found.name for word in ("interfaces", "peft", "accelerate", "trainer", "deepspeed")):
                importlib.import_module(found.name)
    _ = hf_posswap.patch_model
    early = [name for name in sys.modules if name.startswith(MODELS) and ".modeling_" in name and ".auto." not in name]
    assert not early, f"imported before they could be rewritten: {early}"


def in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a process forked from this one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                import transformers

                transformers.logging.set_verbosity_error()
                result = work()
                file.write_bytes(pickle.dumps(result))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"the process of a mutation ended with {status}")
        return pickle.loads(file.read_bytes())


Truth = dict[tuple[str, str], dict[str, Any]]
"""Answers of the library of today: of each stock model (scheme "") and of each swap."""


def truth(cases: list[str] | None = None) -> Truth:
    """Return what all models and swaps say today."""
    return in_child(lambda: _truth(cases or list(CASES)))


def _truth(cases: list[str]) -> Truth:
    found: Truth = {}
    names = names_of_today()
    for name in cases:
        model = CASES[name].build()
        wanted = questions(model)
        found[name, ""] = answers(model, wanted, names)
        for scheme, options in CASES[name].schemes:
            swapped = caught(lambda: CASES[name].swapped(scheme, options))  # noqa: B023
            said = dict.fromkeys(wanted, swapped) if isinstance(swapped, Raised) else answers(swapped, wanted, names)
            found[name, scheme] = said
    return found


def run(mutation: Mutation, known: Truth, plant: Callable[[], None] | None = None) -> list[Outcome]:
    """Return what becomes of all swaps that `mutation` reaches.

    Args:
        mutation: to be tried.
        known: what the swaps say today.
        plant: changes hf_posswap before it is used.
    """
    return in_child(lambda: _run(mutation, known, plant))


def _run(mutation: Mutation, known: Truth, plant: Callable[[], None] | None) -> list[Outcome]:
    cases = list(dict.fromkeys(name for name, _ in known))
    with tempfile.TemporaryDirectory() as folder:
        if mutation.core is not None:
            mutation.core()
        finder = Rewriting(mutation.rewrite or (lambda _: None), Path(folder))
        sys.meta_path.insert(0, finder)
        if plant is not None:
            plant()
        names = names_of_today() | dict(mutation.names)
        outcomes: list[Outcome] = []
        for name in cases:
            case = CASES[name]
            failed = caught(lambda: importlib.import_module(f"{MODELS}{case.folder}.modeling_{case.folder}"))  # noqa: B023
            if isinstance(failed, Raised):
                outcomes.append(Outcome(name, "", "broken", f"its file: {failed.kind}: {failed.message} ({failed.place})"))
            elif case.folder in finder.changed or (mutation.core is not None and mutation.reaches(known[name, ""])):
                outcomes += _tried(name, known, names)
        return outcomes


def _tried(name: str, known: Truth, names: dict[str, str]) -> list[Outcome]:
    case, wanted = CASES[name], list(known[name, ""])
    model = caught(case.build)
    stock = dict.fromkeys(wanted, model) if isinstance(model, Raised) else answers(model, wanted, names)
    broken = _judged(stock, known[name, ""])
    if broken.verdict != "survives":
        return [dataclasses.replace(broken, case=name, verdict="broken")]
    found = []
    for scheme, options in case.schemes:
        swapped = caught(lambda: case.swapped(scheme, options))  # noqa: B023
        said = dict.fromkeys(wanted, swapped) if isinstance(swapped, Raised) else answers(swapped, wanted, names)
        found.append(dataclasses.replace(_judged(said, known[name, scheme]), case=name, scheme=scheme))
    return found


def _judged(said: dict[str, Any], true: dict[str, Any]) -> Outcome:
    asked = [q for q in true if not isinstance(true[q], Raised)]
    wrong = [q for q in asked if not isinstance(said[q], Raised) and differs(said[q], true[q])]
    if wrong:
        return Outcome("", "", "silent", ", ".join(wrong))
    errors = {q: said[q] for q in asked if isinstance(said[q], Raised)}
    if not errors:
        return Outcome("", "", "survives")
    bare = {q: e for q, e in errors.items() if not e.named}
    question, first = next(iter((bare or errors).items()))
    detail = f"{question}{'...' if len(errors) > 1 else ''}: {first.kind}: {first.message} ({first.place})"
    return Outcome("", "", "crash" if bare else "refused", detail)


def table(results: dict[str, list[Outcome]]) -> str:
    """Return how many swaps survived, were refused, crashed or went wrong, by mutation."""
    verdicts = ("survives", "refused", "crash", "silent", "broken")
    lines = [f"{'mutation':58}" + "".join(f"{one:>10}" for one in verdicts)]
    total: Counter[str] = Counter()
    for name, outcomes in results.items():
        counts = Counter(one.verdict for one in outcomes)
        total += counts
        lines.append(f"{name:58}" + "".join(f"{counts[one] or '.':>10}" for one in verdicts))
    lines.append(f"{f'{len(results)} mutations':58}" + "".join(f"{total[one]:>10}" for one in verdicts))
    return "\n".join(lines)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` returns, and the seconds that it took."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def all_names() -> list[str]:
    """Return the names of all mutations."""
    return list(MUTATIONS)

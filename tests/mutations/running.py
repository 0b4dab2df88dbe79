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
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations.cases import CASES, Raised, answers, caught, differs, names_of_today, questions, swapped
from tests.mutations.mutations import Mutation
from tests.mutations.source import Source

MODELS = "transformers.models."
UNTESTED, NEXT = "POSSWAP_UNTESTED", "5.999.0.dev0"
"""The variable that says what hf_posswap does on versions that no test has run, and such a version."""


VERDICTS = ("survives", "refused", "by proof", "crash", "silent", "broken")
"""What may become of a swap.

- "survives": all numbers are those of today.
- "refused": by an error of hf_posswap that says what is the matter.
- "by proof": so too, but only since the version is one that no test has run: it would have been one of the next two.
- "crash": by an error from within.
- "silent": numbers are others, and nobody says so.
- "broken": the stock model itself is wrong, which the mutation must not make it.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one swap under one mutation.

    Attributes:
        case: the model.
        scheme: that it was swapped to; "": the stock model itself.
        verdict: one of `VERDICTS`.
        detail: the questions that came out wrong, or the error.
    """

    case: str
    scheme: str
    verdict: str
    detail: str = ""


SOURCES: dict[str, Source] = {}
"""Files that are parsed ahead, by family: each process has them for itself."""


def _parsed(family: str) -> Source:
    import transformers

    file = Path(transformers.__file__).parent / "models" / family / f"modeling_{family}.py"
    return Source.parsed(family, file.read_text(encoding="utf-8"))


class Rewriting(importlib.abc.MetaPathFinder):
    """Imports modeling files of transformers as a mutation rewrites them."""

    def __init__(self, rewrite: Callable[[Source], None], folder: Path) -> None:
        self.rewrite, self.folder = rewrite, folder
        self.known: dict[str, Source] = {}

    def rewritten(self, family: str) -> Source:
        """Return the source of a family as the mutation leaves it."""
        if family not in self.known:
            self.known[family] = source = SOURCES.pop(family, None) or _parsed(family)
            self.rewrite(source)
        return self.known[family]

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        family, _, leaf = name.removeprefix(MODELS).partition(".")
        if not name.startswith(MODELS) or leaf != f"modeling_{family}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        source = self.rewritten(family)
        if not source.changes:
            return spec
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
    SOURCES.update({case.folder: _parsed(case.folder) for case in CASES.values()})
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
            found[name, scheme] = _swapped_answers(model, scheme, options, wanted, names)
    return found


def unfit(known: Truth) -> list[str]:
    """Return what is wrong with the answers of today: errors, and answers that two schemes give alike."""
    found = [f"{key}: {q}: {one}" for key, said in known.items() for q, one in said.items() if isinstance(one, Raised)]
    for name in dict.fromkeys(name for name, _ in known):
        rope, alibi = known[name, "rope"], known[name, "alibi"]
        same = [q for q in rope if not (isinstance(rope[q], Raised) or differs(rope[q], alibi[q]))]
        found += [f"{name}: {q} is the same with rope and alibi" for q in same if q != "generated"]
    return found


def _cache_by_name() -> None:
    """Have hf_posswap look for caches under the names of today."""
    from hf_posswap.compat import transformers_calls

    native = transformers_calls.find_cache

    def find_cache(args: Any, kwargs: Any) -> Any:
        found = next((name for name in transformers_calls.CACHE_NAMES if kwargs.get(name) is not None), None)
        return None if found is None else (found, kwargs[found])

    holding = [module for name, module in sys.modules.items() if name.startswith("hf_posswap")]
    for module in holding:
        for name, value in list(vars(module).items()):
            if value is native:
                setattr(module, name, find_cache)


PLANTS: dict[str, Callable[[], None]] = {"a cache is found by its name": _cache_by_name}
"""Mistakes that would make hf_posswap wrong, to see that they are noticed."""


def run(mutation: Mutation, known: Truth, plant: Callable[[], None] | None = None) -> list[Outcome]:
    """Return what becomes of all swaps that `mutation` reaches.

    Args:
        mutation: to be tried.
        known: what the swaps say today.
        plant: changes hf_posswap before it is used.
    """
    try:
        return in_child(lambda: _run(mutation, known, plant))
    except RuntimeError as error:
        return [Outcome("", "", "broken", str(error))]


def _run(mutation: Mutation, known: Truth, plant: Callable[[], None] | None) -> list[Outcome]:
    cases = [name for name in dict.fromkeys(name for name, _ in known) if name not in mutation.spares]
    with tempfile.TemporaryDirectory() as folder:
        import transformers

        transformers.__version__, os.environ[UNTESTED] = NEXT, "allow"
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
            if not finder.rewritten(case.folder).changes and not (mutation.core and mutation.reaches(known[name, ""])):
                continue
            failed = caught(lambda: importlib.import_module(f"{MODELS}{case.folder}.modeling_{case.folder}"))  # noqa: B023
            if isinstance(failed, Raised):
                outcomes.append(
                    Outcome(name, "", "broken", f"its file: {failed.kind}: {failed.message} ({failed.place})")
                )
            else:
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
        said = _swapped_answers(model, scheme, options, wanted, names)
        outcome = dataclasses.replace(_judged(said, known[name, scheme]), case=name, scheme=scheme)
        if outcome.verdict in ("silent", "crash"):
            os.environ[UNTESTED] = "prove"
            made = caught(lambda: swapped(model, scheme, options))  # noqa: B023
            os.environ[UNTESTED] = "allow"
            if isinstance(made, Raised) and made.named:
                detail = f"{outcome.verdict} without the proof: {outcome.detail}; with it {made.message}"
                outcome = dataclasses.replace(outcome, verdict="by proof", detail=detail)
        found.append(outcome)
    return found


def _swapped_answers(
    model: Any, scheme: str, options: dict[str, Any], wanted: list[str], names: dict[str, str]
) -> dict[str, Any]:
    made = caught(lambda: swapped(model, scheme, options))
    return dict.fromkeys(wanted, made) if isinstance(made, Raised) else answers(made, wanted, names)


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


def rows(name: str, outcomes: list[Outcome]) -> str:
    """Return how many swaps survived a mutation, were refused, and so on, and of what went wrong how."""
    bad = [one for one in outcomes if one.verdict in ("crash", "silent", "broken")]
    lines = [f"    {one.verdict}: {one.case} {one.scheme or '(stock)'}: {one.detail}" for one in bad]
    return "\n".join([_row(name, Counter(one.verdict for one in outcomes)), *lines])


def total(results: dict[str, list[Outcome]]) -> str:
    """Return the sum of all rows, with what the numbers are."""
    counts = Counter(one.verdict for outcomes in results.values() for one in outcomes)
    return "\n".join(
        [f"{'':60}" + "".join(f"{one:>10}" for one in VERDICTS), _row(f"{len(results)} mutations", counts)]
    )


def _row(name: str, counts: Counter[str]) -> str:
    return f"{name:60}" + "".join(f"{counts[one] or '.':>10}" for one in VERDICTS)

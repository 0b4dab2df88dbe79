"""Every error is the builtin it means, says its message plainly, and survives pickling."""

from __future__ import annotations

import inspect
import pickle

import pytest

from hf_posswap import errors
from hf_posswap.errors import CheckpointError, MissingDependencyError, PosswapError, RemoteCodeError, UnknownNameError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PosswapError) and cls is not PosswapError
]
MADE_FROM_A_MESSAGE = [cls for cls in CLASSES if cls not in (UnknownNameError, MissingDependencyError, RemoteCodeError)]


def test_every_exception_of_the_module_is_one_of_ours() -> None:
    defined = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    strays = [cls for cls in defined if not issubclass(cls, (PosswapError, Warning))]
    assert strays == []


@pytest.mark.parametrize("cls", CLASSES)
def test_it_is_also_the_builtin_it_means(cls: type[PosswapError]) -> None:
    builtins = {ValueError, TypeError, KeyError, IndexError, OSError, ImportError, RuntimeError, MemoryError}
    assert any(issubclass(cls, builtin) for builtin in builtins)
    assert cls.__doc__


@pytest.mark.parametrize("cls", MADE_FROM_A_MESSAGE)
def test_the_message_is_shown_as_it_is(cls: type[PosswapError]) -> None:
    error = cls("what was given; what was expected")
    assert str(error) == "what was given; what was expected"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (cls, str(error))


def test_unknown_name_suggests_and_lists() -> None:
    error = UnknownNameError("scheme", "yarm", ["yarn", "rope", "alibi"])
    assert str(error) == "unknown scheme 'yarm'. Did you mean 'yarn'? Known: alibi, rope, yarn."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_unknown_name_without_a_near_one_only_lists() -> None:
    assert str(UnknownNameError("family", "xyz", ["gpt2"])) == "unknown family 'xyz'. Known: gpt2."
    assert str(UnknownNameError("family", 7, [])) == "unknown family 7. Known: none."


def test_code_that_must_not_run_names_the_option() -> None:
    error = RemoteCodeError("me/mine")
    assert str(error) == (
        "'me/mine' cannot be read without running code that it brings, and code is run only where that is asked for. "
        "Read it first; then pass trust_remote_code=True, on the command line --trust-remote-code."
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), isinstance(again, CheckpointError)) == (str(error), True)


def test_missing_dependency_gives_the_command() -> None:
    error = MissingDependencyError("matplotlib", "plot")
    assert str(error) == "matplotlib is needed here and not installed: pip install 'hf-posswap[plot]'."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

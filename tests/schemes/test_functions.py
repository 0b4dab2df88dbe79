"""Schemes from functions: what the decorators make of a signature, against stock models and formulas by hand."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import hf_posswap
from hf_posswap import patch_model, plan_swap, swap_plan, verify_swap
from hf_posswap.comparison.candidates import fingerprint
from hf_posswap.errors import DuplicateNameError, OptionError, RecordError, SchemeError
from hf_posswap.patching.record.record import SwapRecord
from hf_posswap.schemes import SCHEMES, bias, make_scheme, native, query_scale, rotation
from hf_posswap.schemes.base import TERMS, known_schemes
from hf_posswap.training.config import load_recipe
from hf_posswap.training.config.load import to_dict
from hf_posswap.training.engine.checkpoints import differences, identity_of
from hf_posswap.training.engine.parallel import Launch
from hf_posswap.utils.user_paths import import_module
from tests.checkpoints import fresh
from tests.contract.models import build
from tests.contract.pairs import words
from tests.toys import of_functions
from tests.toys.of_functions import clipped_rope, log_scale, window_bias

FILE = Path(of_functions.__file__)
LENGTH = 24


def forget() -> None:
    for scheme in (clipped_rope, window_bias, log_scale):
        (TERMS if scheme is log_scale else SCHEMES).remove(scheme.name)  # type: ignore[attr-defined]


forget()  # importing them has registered them; other tests must not meet them


@pytest.fixture
def registered() -> Iterator[None]:
    for scheme in (clipped_rope, window_bias, log_scale):
        (TERMS if scheme is log_scale else SCHEMES).add(scheme.name, scheme)  # type: ignore[attr-defined]
    yield
    forget()


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.usefixtures("registered")
def test_a_rotation_turns_by_the_angles_that_the_function_gives() -> None:
    ids, model = words(2, LENGTH), build("llama")
    window, width = model.config.max_position_embeddings, model.config.head_dim
    angles = [10000.0 ** (-2 * i / width) for i in range(width // 2)]
    kept = [angle if angle * window >= 2 * math.pi else 0.0 for angle in angles]
    assert 0.0 in kept
    by_list = patch_model(build("llama"), "rope", frequencies=kept)
    assert torch.allclose(logits(patch_model(model, "clipped-rope"), ids), logits(by_list, ids), atol=1e-5)
    assert verify_swap(model)


@pytest.mark.usefixtures("registered")
def test_a_bias_and_a_scale_are_what_the_functions_give() -> None:
    ids, model = words(1, LENGTH), build("llama")
    heads = model.config.num_attention_heads
    mask = torch.full((1, heads, LENGTH, LENGTH), torch.finfo(torch.float32).min)
    for head in range(heads):
        for i in range(LENGTH):
            for j in range(i + 1):
                mask[0, head, i, j] = -2.0 * (1 - head / heads) if i - j >= 5 else 0.0
    expected = logits(build("llama"), ids, attention_mask=mask)
    patch_model(model, native() + window_bias(window=5, toll=2.0))
    assert torch.allclose(logits(model, ids), expected, atol=1e-4)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))

    within = verify_swap(patch_model(build("llama"), "native + log-scale"))
    assert within.checks["unswapped model"].endswith("as they should be: an identity")
    scaled = log_scale(c=0.5).mechanism(swap_plan(model).sites.geometry)
    window = swap_plan(model).sites.geometry.original_length
    at = torch.tensor([[0, window - 1, 2 * window - 1]])
    assert torch.allclose(scaled.scale(at)[0, 0], torch.tensor([1.0, 1.0, 1 + 0.5 * math.log(2)]))


@pytest.mark.usefixtures("registered")
def test_a_function_is_a_scheme_in_texts_dicts_pickles_and_copies() -> None:
    scheme = make_scheme("window-bias:window=8,toll=0.5 + log-scale:c=0.2")
    assert scheme == window_bias(window=8, toll=0.5) + log_scale(c=0.2)
    assert str(scheme) == "window-bias(window=8, toll=0.5) + log-scale(c=0.2)"
    assert make_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == copy.deepcopy(scheme) == scheme  # noqa: S301
    assert (clipped_rope.kind, window_bias.kind, log_scale.kind) == ("rotary", "bias", "none")
    assert clipped_rope.summary.startswith("RoPE whose pairs stand still")
    for wrong, says in (
        ({"window": 2.5}, "window must be a whole number"),
        ({"toll": math.nan}, "toll must be a finite number"),
        ({"toll": "x"}, "toll must be a finite number"),
    ):
        with pytest.raises(SchemeError, match=f"window-bias: {says}"):
            window_bias(**wrong)
    with pytest.raises(OptionError, match="steps"):
        make_scheme("window-bias", steps=3)


@pytest.mark.usefixtures("registered")
def test_a_checkpoint_names_the_module_that_registers_its_scheme(tmp_path: Path) -> None:
    ids, model = words(2, LENGTH), patch_model(build("llama"), "rope + window-bias:window=4 + log-scale")
    record = swap_plan(model).record
    assert record.imports == dict.fromkeys(("window-bias", "log-scale"), "tests.toys.of_functions")
    assert SwapRecord.from_dict(json.loads(json.dumps(record.to_dict()))).imports == record.imports
    hf_posswap.save(model, tmp_path)
    assert torch.equal(logits(hf_posswap.load(tmp_path).eval(), ids), logits(model, ids))
    forget()
    remedies = (
        r"`import tests\.toys\.of_functions` .* --import tests\.toys\.of_functions .*AutoModel\.from_pretrained\("
    )
    for trusted in (False, True):
        with pytest.raises(RecordError, match=rf"'window-bias', .* registers\. Import .*{remedies}"):
            hf_posswap.load(tmp_path, trust_remote_code=trusted)
    (finding,) = (finding for finding in hf_posswap.doctor(tmp_path).findings if finding.severity == "error")
    assert finding.what.endswith("a scheme that the module 'tests.toys.of_functions' registers.")
    assert re.match(rf"Import that module first: {remedies}", finding.do)
    assert "original" not in finding.do
    config = json.loads((tmp_path / "config.json").read_text())
    del config["posswap"]["imports"]  # as saved before a record named the modules
    (tmp_path / "config.json").write_text(json.dumps(config))
    (finding,) = (finding for finding in hf_posswap.doctor(tmp_path).findings if finding.severity == "error")
    assert "unknown scheme 'window-bias'" in finding.what
    assert finding.do == "Register a scheme of your own first: import its module, in Python or by posswap --import."
    config["posswap"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf_posswap.doctor(tmp_path).findings[0].do == "Take config.json from the original checkpoint."


@pytest.mark.usefixtures("registered")
def test_the_doctor_of_an_adapter_names_the_module_too(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = patch_model(build("llama"), "window-bias:window=4")
    adapted = hf_posswap.add_adapter(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    hf_posswap.save(adapted, tmp_path)
    assert hf_posswap.doctor(tmp_path).clean
    forget()
    (finding,) = (finding for finding in hf_posswap.doctor(tmp_path).findings if finding.severity == "error")
    assert finding.do.startswith("Import that module first: `import tests.toys.of_functions` in Python")


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_its_code_goes_with_the_checkpoint(tmp_path: Path) -> None:
    fresh.store(
        patch_model(build("llama"), "clipped-rope + window-bias + log-scale"), tmp_path / "llama", words(2, LENGTH)
    )
    assert fresh.load_all(tmp_path, "remote")["llama"] == {"auto": 0, "again": 0}


def faulty(take: Any, name: str = "faulty") -> Any:
    def function(distance: Any, *, depth: int) -> Any:
        return distance

    def unknown(distance: Any, layer: int) -> Any:
        return distance

    def untyped(distance: Any, *, depth=2) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
        return distance

    def textual(distance: Any, *, depth: str = "a") -> Any:
        return distance

    def own(distance: Any, *, mechanism: float = 1.0) -> Any:
        return distance * mechanism

    def inherited(pair: Any, *, base: float = 3.0) -> Any:
        return base**-pair

    def unread(distance: Any, *, depth: Undefined = 1) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return distance

    functions = {each.__name__: each for each in (function, unknown, untyped, textual, own, inherited, unread)}
    return take(functions.get(name, name))


def typed_elsewhere(distance: Undefined, *, depth: int = 1) -> Undefined:  # type: ignore[name-defined]  # noqa: F821
    """Its other types may be known to a type checker alone."""
    return -depth * distance


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("function", "depth of function needs a default"),
        ("unknown", "unknown names 'layer'; a bias is given distance, head, heads, head_dim, original_length by name"),
        ("untyped", "depth of untyped becomes a field of the scheme, so it needs a type.* got none"),
        ("textual", "depth of textual becomes a field of the scheme, so it needs a type.* got <class 'str'>"),
        ("own", "a scheme has its own mechanism: call this field of own otherwise"),
        ("inherited", r"a scheme has its own base: call this .* inherited otherwise, or give it before the \*"),
        ("unread", "the types of the fields of unread cannot be read: name 'Undefined' is not defined"),
        ("no function", "faulty: a scheme is made of a function that is written with def, got 'no function'"),
    ],
)
def test_a_signature_that_cannot_become_a_scheme_is_refused(fault: str, says: str) -> None:
    take = rotation if fault == "inherited" else bias
    with pytest.raises(SchemeError, match=says):
        faulty(take("faulty"), fault)
    assert "faulty" not in SCHEMES


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a:b", "9", 3])
def test_a_name_that_no_command_could_write_is_refused(name: Any) -> None:
    with pytest.raises(SchemeError, match=f"the name of a scheme is a letter, .* got {name!r}".replace("+", r"\+")):
        bias(name)(typed_elsewhere)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["alibi", "native", "ssmax", "NTK-by-parts", "Window_Bias", "log-scale"])
def test_a_name_that_is_taken_in_any_spelling_or_as_a_part_is_refused(name: str) -> None:
    before = dict(known_schemes())
    for take in (bias, query_scale, rotation):
        with pytest.raises(DuplicateNameError, match="is already registered as"):
            take(name)(lambda: 0.5)
    assert known_schemes() == before
    assert make_scheme("Window_Bias:window=3 + LOG_scale") == window_bias(window=3) + log_scale()


@pytest.fixture
def made() -> Iterator[Any]:
    """Give what makes a scheme of a function under a name, and forget them afterwards."""
    before = set(known_schemes())
    yield lambda take, function: take("made-here")(function)
    for name in set(known_schemes()) - before:
        SCHEMES.remove(name)
        TERMS.remove(name)


def test_numbers_lists_and_tensors_of_the_functions_own_are_results(made: Any, tmp_path: Path) -> None:
    ids, model = words(1, LENGTH), build("llama")

    def own(pairs: int, base: float) -> Any:
        return base ** (-torch.arange(pairs) / pairs)

    scheme = made(rotation, own)()
    expected = logits(build("llama"), ids)
    assert torch.allclose(logits(patch_model(model, scheme), ids), expected, atol=1e-4)
    hf_posswap.save(model, tmp_path / "saved")
    assert torch.allclose(logits(hf_posswap.load(tmp_path / "saved"), ids), expected, atol=1e-4)
    with torch.device("meta"):
        angles = scheme.resolve(swap_plan(model).sites.geometry, None).angles(swap_plan(model).sites.geometry)
    assert angles.inv_freq.device.type == "cpu"


@pytest.mark.parametrize(("result", "says"), [(None, "NoneType"), ("x", "str"), (torch.tensor(1j), "torch.complex64")])
def test_a_result_that_is_no_number_is_refused_by_the_functions_name(made: Any, result: Any, says: str) -> None:
    def gives(distance: Any) -> Any:
        return result

    made(bias, gives)
    with pytest.raises(SchemeError, match=f"made-here: gives gives {says}, expected a tensor of real numbers"):
        patch_model(build("llama"), "native + made-here")


def test_a_result_that_depends_on_the_other_positions_is_refused(made: Any) -> None:
    def by_longest(position: Any) -> Any:
        return 1 + position / position.max().clamp(min=1)

    def by_farthest(distance: Any) -> Any:
        return -distance if distance.max() > 3 else -2.0

    made(query_scale, by_longest)
    with pytest.raises(SchemeError, match="scale of .* differs from itself by .*, expected the same for a position"):
        patch_model(build("llama"), "native + made-here")
    TERMS.remove("made-here")
    made(bias, by_farthest)
    with pytest.raises(SchemeError, match="distance_bias of .* differs from itself by .* the same for a distance"):
        patch_model(build("llama"), "native + made-here")


def test_a_function_that_is_defined_anew_takes_its_own_place(made: Any) -> None:
    cell = "from hf_posswap.schemes import bias\n\n@bias('made-here')\ndef mine(distance):\n    return {} * distance\n"
    notebook = {"__name__": "a_notebook"}
    for slope in (-1, -2):
        exec(cell.format(slope), notebook)  # noqa: S102
    assert SCHEMES.get("made-here") is notebook["mine"]
    mechanism = make_scheme("made-here").mechanism(swap_plan(patch_model(build("llama"), "alibi")).sites.geometry)
    assert float(mechanism.distance_bias(torch.tensor([3]))[0, 0]) == -6.0
    for other in ({"__name__": "another_notebook"}, {"__name__": "a_notebook"}):
        with pytest.raises(DuplicateNameError, match="'made-here' is already registered as"):
            exec(cell.format(-1).replace("mine", "theirs" if other["__name__"] == "a_notebook" else "mine"), other)  # noqa: S102


@pytest.mark.usefixtures("registered")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_functions_compile_into_one_graph() -> None:
    ids, model = words(2, LENGTH), patch_model(build("llama"), "clipped-rope + window-bias:window=5 + log-scale:c=3.0")
    expected = logits(model, ids)
    assert torch.allclose(logits(torch.compile(model, backend="eager", fullgraph=True), ids), expected, atol=1e-5)


def test_types_that_only_a_type_checker_reads_are_left_alone(made: Any) -> None:
    assert made(bias, typed_elsewhere)(depth=2).depth == 2


def test_a_taken_name_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match="'alibi' is already registered"):

        @bias("alibi")
        def alibi(distance: Any) -> Any:
            return -distance

    @rotation("three-angles")
    def three(pair: Any, *, shape: Literal["a", "b"] = "a") -> Any:
        return torch.ones(3)

    @query_scale("nan-scale")
    def no_number(position: Any) -> Any:
        return position * math.nan

    try:
        with pytest.raises(SchemeError, match=r"three-angles: three gives \[3\], expected what expands to"):
            patch_model(build("llama"), "three-angles")
        with pytest.raises(SchemeError, match="shape must be 'a' or 'b'|one of"):
            three(shape="c")
        with pytest.raises(SchemeError, match="scale of FunctionScaleMechanism gives values that are not numbers"):
            patch_model(build("llama"), native() + no_number())
    finally:
        SCHEMES.remove("three-angles")
        TERMS.remove("nan-scale")


@pytest.mark.parametrize(
    ("result", "shape"),
    [
        (lambda position, head: head[:, 0], r"\[4\]"),  # a number a head, without a place for the queries
        (lambda position, head: (position + head)[..., None], r"\[1, 4, 3, 1\]|\[2, 4, 3, 1\]"),
        (lambda position, head: (position + head).mT, r"\[1, 3, 4\]|\[2, 3, 4\]"),  # queries before heads
    ],
)
def test_a_query_scale_of_a_wrong_shape_is_refused_by_a_plan(result: Any, shape: str) -> None:
    @query_scale("misshapen-scale")
    def misshapen(position: Any, head: Any) -> Any:
        return result(position, head)

    try:
        with pytest.raises(SchemeError, match=rf"misshapen-scale: misshapen gives ({shape}), expected what expands to"):
            plan_swap(build("llama"), native() + misshapen())
    finally:
        TERMS.remove("misshapen-scale")


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "schemes_of_a_test.py"
    path.write_text(FILE.read_text())
    yield path
    if sys.modules.pop(path.stem, None) is not None:
        forget()


def test_a_recipe_imports_a_file_beside_it(own_file: Path) -> None:
    recipe = own_file.with_name("mine.yaml")
    recipe.write_text(f"imports: [{own_file.name}]\nmodel: {{name: gpt2}}\nswap: {{scheme: 'window-bias:window=3'}}")
    assert load_recipe(recipe).imports == (str(own_file),)
    assert SCHEMES.get("window-bias")(window=3).window == 3  # type: ignore[call-arg]
    assert import_module(str(own_file)) is sys.modules[own_file.stem], "once in a process"


def edited(own_file: Path) -> Any:
    """Import the file with another formula, as the next process would."""
    own_file.write_text(own_file.read_text().replace("return -toll *", "return -2 * toll *"))
    del sys.modules[own_file.stem]
    forget()
    return import_module(str(own_file))


def test_what_was_measured_of_a_scheme_is_not_taken_for_its_edited_code(own_file: Path) -> None:
    import_module(str(own_file))
    model, rope = (patch_model(build("gpt2"), scheme) for scheme in ("window-bias", "rope"))
    before, of_package = fingerprint(model), fingerprint(rope)
    own_file.touch()
    assert fingerprint(model) == before
    edited(own_file)
    assert fingerprint(patch_model(build("gpt2"), "window-bias")) != before
    assert fingerprint(rope) == of_package


@pytest.mark.parametrize("imports", [True, False], ids=["by the recipe", "by the command"])
def test_a_training_is_another_one_where_the_code_of_its_scheme_was_edited(
    imports: bool, own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module(str(own_file))
    recipe = own_file.with_name("mine.yaml")
    recipe.write_text(
        "model: {name: gpt2}\nswap: {scheme: 'rope + window-bias:window=3'}\n"
        + ("imports: [schemes_of_a_test.py]\n" if imports else "")
    )
    before = identity_of(load_recipe(recipe), Launch(1))
    (own_file.parent / "elsewhere").mkdir()
    monkeypatch.chdir(own_file.parent / "elsewhere")  # the same training from another working directory
    there = load_recipe("../mine.yaml")
    assert identity_of(there, Launch(1)) == before
    Path("recipe.json").write_text(json.dumps(to_dict(there)))  # as a run leaves it, in its folder
    assert identity_of(load_recipe("recipe.json"), Launch(1)) == before
    edited(own_file)
    assert [key for key, *_ in differences(before, identity_of(load_recipe(recipe), Launch(1)))] == [
        "code.schemes_of_a_test"
    ]


def test_what_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "found")
    (tmp_path / "found" / "only_a_folder").mkdir(parents=True)
    broken = tmp_path / "broken_schemes.py"
    broken.write_text("1 / 0")
    taken = tmp_path / "json.py"
    taken.write_text("")
    unused = tmp_path / "this.py"
    unused.write_text("")
    assert "this" not in sys.modules
    for name, says in (
        (str(broken), "ZeroDivisionError: division by zero"),
        (str(taken), "another module 'json' already"),
        (str(unused), "another module 'this' already, .*this.py. Rename the file"),
        ("only_a_folder", "it is a folder without __init__.py. Give a file"),
        (str(tmp_path / "none.py"), "there is no such file"),
        ("no_such_module_here", "No module named 'no_such_module_here'"),
    ):
        with pytest.raises(OptionError, match=says):
            import_module(name)
    assert "broken_schemes" not in sys.modules

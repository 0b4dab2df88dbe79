"""The whole search on tiny models: against the real schemes, interrupted, resumed, and refused."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
)

from hf_posswap import patch_model, swap_plan
from hf_posswap.errors import (
    AlreadyPatchedError,
    CheckpointError,
    DataError,
    NumericError,
    SchemeError,
    UnsupportedModelError,
    UnsupportedSwapError,
)
from hf_posswap.schemes import Linear
from hf_posswap.training import byte_tokenizer
from hf_posswap.training.search import LongRopeSearch, longrope, search_longrope
from tests import forked
from tests.search.conftest import COMMON, ORIGINAL, WORDS, llama_config

Build = Callable[..., Any]
SMALL: dict[str, Any] = {"population": 8, "iterations": 3, "progress": False}


def perplexity(model: Any, documents: torch.Tensor) -> float:
    """Return the perplexity by the model's own loss, document by document."""
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.double().item() for row in documents]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("name", ["llama", "glm", "neox"])
def test_it_is_never_worse_than_linear_ntk_and_yarn_measured_as_they_are(
    build: Build, documents: torch.Tensor, name: str
) -> None:
    for factor in (2.0, 4.0):
        texts = documents[:, : int(factor * ORIGINAL)]
        found = search_longrope(build(name), texts, factor, **SMALL)
        real = {}
        for scheme in ("linear", "ntk", "yarn"):
            model = build(name)
            patch_model(model, scheme, factor=factor)
            real[scheme] = perplexity(model, texts)
        assert found.seeds == pytest.approx(real, rel=1e-5)
        model = build(name)
        patch_model(model, found.scheme)
        assert perplexity(model, texts) == pytest.approx(found.perplexity, rel=1e-5)
        assert perplexity(model, texts) <= min(real.values()) * (1 + 1e-5)
        assert found.log[-1] == found.perplexity


def test_its_seeds_are_those_of_stock_transformers(build: Build, documents: torch.Tensor) -> None:
    texts, weights = documents[:, : 2 * ORIGINAL], build("llama").state_dict()
    found = search_longrope(build("llama"), texts, 2.0, **SMALL)
    stock = {"linear": {"rope_type": "linear"}, "yarn": {"rope_type": "yarn"}, "ntk": {"rope_type": "default"}}
    for name, rope in stock.items():
        theta = 10000.0 * 2.0 ** (16 / 14) if name == "ntk" else 10000.0
        values = {**rope, "rope_theta": theta, "factor": 2.0, "original_max_position_embeddings": ORIGINAL}
        model = LlamaForCausalLM(llama_config(rope_parameters=values, max_position_embeddings=32)).eval()
        model.load_state_dict(weights)
        assert found.seeds[name] == pytest.approx(perplexity(model, texts), rel=1e-5)


def test_it_finds_something_better_and_gets_no_worse(build: Build, documents: torch.Tensor) -> None:
    found = search_longrope(build("llama"), documents, 4.0, population=16, iterations=4, progress=False)
    assert found.perplexity < 0.99 * min(found.seeds.values())
    assert list(found.log) == sorted(found.log, reverse=True)
    assert found.evaluations == (16, 24, 32, 40, 48)


def test_a_space_that_is_used_up_ends_quietly(build: Build, documents: torch.Tensor) -> None:
    """A rate this small makes no mutation but the seeds put on the grid."""
    found = search_longrope(build("llama"), documents, 4.0, mutation_rate=1e-9, **SMALL)
    assert found.perplexity <= min(found.seeds.values())
    assert found.evaluations == (found.evaluations[0],) * 4
    assert found.evaluations[0] < 8


def test_the_scheme_is_ready_and_says_what_was_searched(build: Build, documents: torch.Tensor) -> None:
    found = search_longrope(build("llama"), documents, 4.0, original_positions=[0], **SMALL)
    scheme = found.scheme
    assert (scheme.factor, scheme.original_length, scheme.short_factor) == (4.0, ORIGINAL, (1.0,) * 8)
    assert scheme.long_factor is not None
    assert max(-np.diff(scheme.long_factor)) < 1e-6
    assert (found.length, found.documents, found.original_positions) == (64, 3, (0,))
    model = build("llama")
    assert swap_plan(patch_model(model, scheme)).route == "native"
    assert json.loads(json.dumps(found.to_dict()))["scheme"] == json.loads(json.dumps(scheme.to_dict()))
    assert str(found).startswith(f"perplexity {found.perplexity:.6g} after 20 evaluations (linear ")
    some = search_longrope(build("llama"), documents, 4.0, **SMALL)
    assert some.original_positions == (0, 2, 4, 8, 12)  # those of the paper below the original length


def test_strings_are_cut_to_tokens_with_the_tokenizer(build: Build) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(vocab_size=257)).eval()
    tokenizer, texts = byte_tokenizer(), ["one text that is long enough, surely", "and another one that is as long"]
    found = search_longrope(model, texts, 1.5, tokenizer=tokenizer, **SMALL)
    ids = [[256, *text.encode()][:24] for text in texts]
    assert found == search_longrope(model, ids, 1.5, **SMALL)
    assert found == search_longrope(model, [np.array(row) for row in ids], 1.5, **SMALL)
    assert found == search_longrope(model, torch.tensor(ids), 1.5, **SMALL)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_a_peft_model_is_read_with_its_adapters(build: Build, documents: torch.Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    plain = search_longrope(build("llama"), documents, 4.0, **SMALL)
    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], r=2))
    found = search_longrope(adapted, documents, 4.0, **SMALL)
    assert found.seeds == pytest.approx(plain.seeds, rel=1e-6)  # new adapters add nothing
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    merged = copy.deepcopy(adapted).merge_and_unload()
    expected = search_longrope(merged, documents, 4.0, **SMALL).seeds
    assert search_longrope(adapted, documents, 4.0, **SMALL).seeds == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(plain.seeds, rel=1e-2)


class Trouble(Exception):
    """What a hook raises on purpose."""


def reading(model: Any, act: Callable[[], None]) -> Any:
    """Have `act` called whenever `model` reads a document (not the few tokens of a probe); return the hook's handle."""

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.shape[1] > ORIGINAL:
            act()

    return model.model.register_forward_pre_hook(hook, with_kwargs=True)


def after(model: Any, documents: int, act: Callable[[], None]) -> Any:
    """Have `act` called when `model` has read `documents` of them; return the hook's handle."""
    count = iter(range(documents))
    return reading(model, lambda: act() if next(count, None) is None else None)


def fail() -> None:
    raise Trouble


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("act", "error"), [(fail, Trouble), (interrupt, KeyboardInterrupt), (None, None)])
@pytest.mark.parametrize("positions", [[0], [4]])
def test_the_model_is_left_as_it_was(
    build: Build, documents: torch.Tensor, act: Any, error: Any, positions: list[int]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
    model, untouched = build("llama"), build("llama")
    model.train()
    model.model.layers[0].eval()  # each module keeps its own mode
    config, modules = model.config.to_dict(), [(path, type(m)) for path, m in model.named_modules()]
    if act is None:
        search_longrope(model, documents, 4.0, original_positions=positions, **SMALL)
    else:
        handle = after(model, 10, act)
        with pytest.raises(error):
            search_longrope(model, documents, 4.0, original_positions=positions, **SMALL)
        handle.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert model.training
    assert not model.model.layers[0].training
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training
    assert model.config.to_dict() == config
    assert [(path, type(m)) for path, m in model.named_modules()] == modules
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(model.eval()(documents).logits, untouched(documents).logits)


@pytest.mark.slow
@pytest.mark.parametrize("read", [2, 23, 24, 40, 58])  # 8 evaluations of 3 documents, and then 3 times 4
def test_a_search_that_was_stopped_ends_as_an_unbroken_one(
    build: Build, documents: torch.Tensor, tmp_path: Path, read: int
) -> None:
    model, state = build("llama"), tmp_path / "new" / "state.json"
    unbroken = search_longrope(model, documents, 4.0, **SMALL)
    handle = after(model, read, fail)
    with pytest.raises(Trouble):
        search_longrope(model, documents, 4.0, state=state, **SMALL)
    handle.remove()
    whole = 0 if read < 24 else 24 + (read - 24) // 12 * 12  # documents of the iterations that were finished
    assert state.exists() == (whole > 0)
    seen: list[None] = []
    handle = reading(model, lambda: seen.append(None))
    assert search_longrope(model, documents, 4.0, state=state, **SMALL) == unbroken
    handle.remove()
    assert len(seen) == 60 - whole  # what was done is not done again
    assert [file.name for file in state.parent.iterdir()] == ["state.json"]


def test_a_finished_search_goes_on_with_more_iterations_and_not_back(
    build: Build, documents: torch.Tensor, tmp_path: Path
) -> None:
    model, state = build("llama"), tmp_path / "state.json"
    first = search_longrope(model, documents, 4.0, state=state, **SMALL)
    assert search_longrope(model, documents, 4.0, state=state, **SMALL) == first
    longer = {**SMALL, "iterations": 5}
    assert search_longrope(model, documents, 4.0, state=state, **longer) == search_longrope(
        model, documents, 4.0, **longer
    )
    says = r"state.json is at iteration 5, past the requested 3: give as many or more, or another file"
    with pytest.raises(CheckpointError, match=says):
        search_longrope(model, documents, 4.0, state=state, **SMALL)


@pytest.mark.slow
def test_a_killed_process_is_followed_by_one_that_ends_the_same(
    build: Build, documents: torch.Tensor, tmp_path: Path
) -> None:
    def search(state: str, kill: int = 10**9) -> Any:
        model, count = build("llama"), iter(range(kill))
        reading(model, lambda: os.kill(os.getpid(), signal.SIGKILL) if next(count, None) is None else None)
        return search_longrope(model, documents, 4.0, state=tmp_path / state, **SMALL)

    process = forked.start(lambda: search("a.json", kill=50))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "a.json").exists()
    assert search("a.json") == search("b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def change_model(arguments: dict[str, Any]) -> None:
    with torch.no_grad():
        arguments["model"].model.norm.weight.add_(1e-3)


def change_config(arguments: dict[str, Any]) -> None:
    """Change what no weight shows: the same weights with other frequencies are another model."""
    other = LlamaForCausalLM(llama_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    other.load_state_dict(arguments["model"].state_dict())
    arguments["model"] = other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_model, "its model is '[0-9a-f]{16}', here it is '[0-9a-f]{16}'"),
        (change_config, "its config of the model is '[0-9a-f]{16}', here it is '[0-9a-f]{16}'"),
        (lambda a: a.update(texts=a["texts"].flip(0)), "its documents is '[0-9a-f]{16}', here it is"),
        (lambda a: a.update(factor=3.0, texts=a["texts"]), "its documents is"),
        (lambda a: a.update(population=9), "its population is 8, here it is 9"),
        (lambda a: a.update(mutation_rate=0.5), r"its mutation_rate is 0.3, here it is 0.5"),
        (lambda a: a.update(seed=1), "its seed is 0, here it is 1"),
        (lambda a: a.update(original_positions=[0]), r"its original_positions is \[0, 2, 4, 8, 12\], here it is \[0\]"),
    ],
)
def test_the_state_of_another_search_is_refused(
    build: Build, documents: torch.Tensor, tmp_path: Path, change: Any, says: str
) -> None:
    state = tmp_path / "state.json"
    arguments: dict[str, Any] = {"model": build("llama"), "texts": documents, "factor": 4.0, "state": state, **SMALL}
    arguments["iterations"] = 1
    search_longrope(**arguments)
    before = state.read_bytes()
    change(arguments)
    with pytest.raises(CheckpointError, match=rf"state.json is the state of another search: {says}.*Give another file"):
        search_longrope(**arguments)
    assert state.read_bytes() == before


def test_a_state_of_other_code_is_refused(
    build: Build, documents: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout changes under one version: losses of both would be compared with each other."""
    model, state = build("llama"), tmp_path / "state.json"
    search_longrope(model, documents, 4.0, state=state, **SMALL)
    monkeypatch.setattr(longrope, "package_digest", lambda: "0123456789abcdef")
    with pytest.raises(CheckpointError, match=r"its code of hf_posswap is '\w{16}', here it is '0123456789abcdef'"):
        search_longrope(model, documents, 4.0, state=state, **SMALL)


@pytest.mark.parametrize("package", [torch, transformers])
def test_a_state_of_other_releases_is_refused(
    build: Build, documents: torch.Tensor, tmp_path: Path, package: ModuleType
) -> None:
    model, state, version = build("llama"), tmp_path / "state.json", str(package.__version__)
    search_longrope(model, documents, 4.0, state=state, **SMALL)
    state.write_text(state.read_text().replace(f'"{version}"', '"1.2.3"'))
    says = f"its version of {package.__name__} is '1.2.3', here it is '{re.escape(version)}'"
    with pytest.raises(CheckpointError, match=says):
        search_longrope(model, documents, 4.0, state=state, **SMALL)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot read .*state.json.*Delete it"),
        ("[]", "is not a state of search_longrope; give another file, or delete it"),
        ('{"format": 2}', "is not a state of search_longrope"),
        ("whole", r"is an incomplete state of search_longrope \(KeyError\('iteration'\)\); delete it"),
    ],
)
def test_a_file_that_is_no_state_is_refused(
    build: Build, documents: torch.Tensor, tmp_path: Path, content: str, says: str
) -> None:
    state, model = tmp_path / "state.json", build("llama")
    if content == "whole":
        search_longrope(model, documents, 4.0, state=state, **SMALL)
        held = json.loads(state.read_text())
        del held["progress"]["iteration"]
        content = json.dumps(held)
    state.write_text(content)
    with pytest.raises(CheckpointError, match=says):
        search_longrope(model, documents, 4.0, state=state, **SMALL)
    assert state.read_text() == content


def test_a_state_that_is_a_folder_or_has_nowhere_to_go(build: Build, documents: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state must name a file, and .* is a folder"):
        search_longrope(build("llama"), documents, 4.0, state=tmp_path, **SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        search_longrope(build("llama"), documents, 4.0, state=tmp_path / "file" / "state.json", **SMALL)


NOT = "search_longrope: "


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"factor": 1.0}, "factor must be a finite number > 1 and <= 1e+06, got 1.0"),
        ({"factor": float("nan")}, "factor must be a finite number > 1"),
        ({"factor": "4"}, "factor must be a finite number"),
        ({"factor": 1.01}, "factor 1.01 takes the original 16 tokens to 16; at least two more are needed"),
        ({"population": 7}, "population must be a whole number from 8 to 100000, got 7"),
        ({"population": 8.0}, "population must be a whole number"),
        ({"iterations": 0}, "iterations must be a whole number from 1 to 100000, got 0"),
        ({"mutation_rate": 0.0}, "mutation_rate must be a finite number > 0 and <= 1, got 0.0"),
        ({"mutation_rate": 1.5}, "mutation_rate must be a finite number > 0 and <= 1, got 1.5"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"original_positions": []}, "original_positions must be a list of whole numbers, got []"),
        ({"original_positions": 4}, "original_positions must be a list of whole numbers, got 4"),
        ({"original_positions": [0, 64]}, "original_positions[1] must be a whole number from 0 to 63, got 64"),
        ({"original_positions": [0.5]}, "original_positions[0] must be a whole number from 0 to 63, got 0.5"),
    ],
)
def test_impossible_settings_are_refused(
    build: Build, documents: torch.Tensor, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SchemeError, match=re.escape(NOT + says)):
        search_longrope(build("llama"), documents, **{"factor": 4.0, **SMALL, **options})


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ("one text", "texts must be a list of texts, or of token ids, one per document; got str 'one text'"),
        ([], "got list []"),
        (None, "got NoneType None"),
        (["a", [1, 2]], "texts holds strings and token ids; give all as one or all as the other"),
        (["a"], "texts holds strings: give the model's tokenizer too, or token ids instead"),
        ([[1] * 64, [1] * 63], "texts[1] has 63 tokens, and each is measured at the target length of 64: give longer"),
        ([[0.5] * 64], "texts[0] must be a string or a row of whole token ids, got list [0.5, 0.5"),
        ([[[1] * 64]], "texts[0] must be a string or a row of whole token ids"),
        ([[1, [2]]], "texts[0] must be a string or a row of whole token ids"),
        ([[WORDS] * 64], f"the tokens run from {WORDS} to {WORDS}, and LlamaForCausalLM has embeddings for 0 to 52"),
    ],
)
def test_impossible_texts_are_refused(build: Build, texts: Any, says: str) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        search_longrope(build("llama"), texts, 4.0, **SMALL)


def test_a_short_string_is_refused_by_its_number(build: Build) -> None:
    model = LlamaForCausalLM(llama_config(vocab_size=257)).eval()
    with pytest.raises(DataError, match=r"texts\[1\] has 0 tokens, and each is measured at the target length of 24"):
        search_longrope(model, ["long enough for 24 tokens", ""], 1.5, tokenizer=byte_tokenizer(), **SMALL)


def bert() -> Any:
    return BertLMHeadModel(BertConfig(**COMMON, is_decoder=True))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=WORDS, n_positions=ORIGINAL))


def meta() -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config())


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            bert,
            UnsupportedSwapError,
            "stretches the angles of a rotary model, and BertLMHeadModel has a position table",
        ),
        (gpt2, UnsupportedSwapError, "and GPT2LMHeadModel has a position table: patch_model(model, 'learned', ...)"),
        (meta, UnsupportedModelError, "runs the model, and its weights are on meta: load it with its weights"),
        (lambda: LlamaModel(llama_config()), DataError, "LlamaModel has no output head to score tokens with"),
        (lambda: torch.nn.Linear(2, 2), UnsupportedSwapError, "expected a transformers PreTrainedModel"),
    ],
)
def test_models_that_cannot_be_searched(documents: torch.Tensor, make: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        search_longrope(make(), documents, 4.0, **SMALL)


def test_a_swapped_model_is_refused(build: Build, documents: torch.Tensor) -> None:
    model = build("llama")
    patch_model(model, Linear(factor=2.0))
    with pytest.raises(AlreadyPatchedError, match=r"already carries linear.*call unpatch_model"):
        search_longrope(model, documents, 4.0, **SMALL)


def test_a_loss_that_is_no_number_ends_it(build: Build, documents: torch.Tensor) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NumericError, match="is not finite; it is in float32, so look for weights"):
        search_longrope(model, documents, 4.0, **SMALL)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_where_attention_cannot_be_patched_only_the_native_n_hat_is_tried(documents: torch.Tensor) -> None:
    width = COMMON["hidden_size"] // COMMON["num_attention_heads"]
    config = HunYuanDenseV1Config(**COMMON, num_key_value_heads=1, head_dim=width)
    torch.manual_seed(0)
    model = HunYuanDenseV1ForCausalLM(config).eval()
    found = search_longrope(model, documents, 4.0, **SMALL)
    assert found.original_positions == (0,)
    assert found.perplexity <= min(found.seeds.values())
    with pytest.raises(UnsupportedSwapError, match="are normalised after the rotation"):
        search_longrope(model, documents, 4.0, original_positions=[0, 4], **SMALL)


def test_it_says_nothing_where_it_was_told_to(
    build: Build, documents: torch.Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    found = search_longrope(build("llama"), documents, 4.0, **SMALL)
    assert isinstance(found, LongRopeSearch)
    assert capfd.readouterr() == ("", "")

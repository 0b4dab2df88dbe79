"""Saving: whole or not at all, over nothing by accident, readable like any file."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hf_posswap
from hf_posswap.checkpoints.manifest import write_listed_json
from hf_posswap.checkpoints.save import refuse_to_replace
from hf_posswap.errors import CheckpointError, OptionError, RecordError, UnsupportedSwapError
from hf_posswap.schemes import SCHEMES, Kind, Mechanism, Scheme
from hf_posswap.testing.tiny import tiny_model
from hf_posswap.training.fresh import byte_tokenizer


@pytest.fixture
def model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(tiny, "rope", max_length=32)
    return tiny


def test_files_have_the_mode_of_ordinary_files(model: Any, tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_text("")
    expected = (tmp_path / "ordinary").stat().st_mode
    folder = hf_posswap.save(model, tmp_path / "saved")
    assert {file.stat().st_mode for file in folder.iterdir()} == {expected}


def test_a_folder_that_holds_something_is_kept(model: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="not empty.*overwrite=True"):
        hf_posswap.save(model, tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_overwriting_leaves_nothing_of_the_old(model: Any, tmp_path: Path) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved", tokenizer=byte_tokenizer())
    assert (folder / "tokenizer.json").is_file()
    hf_posswap.save(model, folder, overwrite=True)
    assert not (folder / "tokenizer.json").exists()
    assert hf_posswap.load(folder).config.posswap["scheme"]["name"] == "rope"
    assert os.listdir(tmp_path) == ["saved"]


def test_the_manifest_lists_every_file_with_its_sha256(model: Any, tmp_path: Path) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved", tokenizer=byte_tokenizer())
    listed = json.loads((folder / "posswap_files.json").read_text())["files"]
    expected = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "posswap_files.json"}
    assert {name: (len(held), hashlib.sha256(held).hexdigest()) for name, held in expected.items()} == {
        name: (entry["size"], entry["sha256"]) for name, entry in listed.items()
    }


def hold(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("kept")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(model: Any, folder: Path, *said: str) -> None:
    """Assert that overwriting `folder` names what would be lost, and changes nothing in it or beside it."""
    before, beside = content(folder), os.listdir(folder.parent)
    with pytest.raises(CheckpointError) as error:
        hf_posswap.save(model, folder, overwrite=True)
    assert all(part in str(error.value) for part in said), error.value
    assert content(folder) == before
    assert os.listdir(folder.parent) == beside


@pytest.mark.parametrize(
    "name",
    [
        "mine.py", "posswap_mine.py", "modeling_mine.py", "notes.json", "README.txt", "LICENSE", "notes.txt",
        "old.bin", "other.safetensors", "chat_template.jinja", "additional_chat_templates/mine.jinja", ".git/HEAD",
        "1_Pooling/config.json", "run/adapter_config.json", "run/adapter_model.safetensors",
        "checkpoint-5/optimizer.pt", "vocab.txt",
    ],
)  # fmt: skip
def test_overwriting_keeps_what_the_user_added(model: Any, tmp_path: Path, name: str) -> None:
    folder = hold(hf_posswap.save(model, tmp_path / "saved"), name)
    said = f"holds more than a saved checkpoint, and overwriting would delete it: {name} (not written by a save)"
    refused(model, folder, said, "move that elsewhere, or choose another folder")
    (folder / name).unlink()
    for parent in (folder / name).relative_to(folder).parents[:-1]:
        (folder / parent).rmdir()
    hf_posswap.save(model, folder, overwrite=True)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "modeling_posswap.py", "tokenizer_config.json"]
    + ["README.md"],
)
def test_overwriting_keeps_what_the_user_edited(model: Any, tmp_path: Path, name: str) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved", tokenizer=byte_tokenizer())
    held = (folder / name).read_bytes()
    times = (folder / name).stat()
    (folder / name).write_bytes(held[:-9] + bytes([held[-9] ^ 1]) + held[-8:])  # of the same size, at the same time
    os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    refused(model, folder, f"{name} (changed since it was saved)")
    (folder / name).write_bytes(held)
    hf_posswap.save(model, folder, overwrite=True)


def test_overwriting_keeps_links_and_what_is_no_file(model: Any, tmp_path: Path) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    weights = (folder / "model.safetensors").rename(tmp_path / "moved.safetensors")
    (folder / "model.safetensors").symlink_to(weights)
    (folder / "elsewhere").symlink_to(tmp_path)
    (folder / "nowhere").symlink_to("absent")
    (folder / "empty").mkdir()
    os.mkfifo(folder / "pipe")
    links = ["elsewhere (a symbolic link)", "model.safetensors (a symbolic link)", "nowhere (a symbolic link)"]
    refused(model, folder, "empty (a folder that is empty or cannot be read)", "pipe (no regular file)", *links)
    (folder / "posswap_files.json").unlink()
    refused(model, folder, "empty (a folder that is empty or cannot be read)", "pipe (no regular file)", *links)


@pytest.mark.parametrize("scheme", ["yarn", "alibi"])
def test_a_config_changed_where_the_swap_set_it_is_not_saved(scheme: str, tmp_path: Path) -> None:
    swapped = hf_posswap.patch_model(tiny_model("llama", meta=False), scheme, max_length=256)
    swapped.config.max_position_embeddings = 4096
    with pytest.raises(CheckpointError, match=rf"config.max_position_embeddings was changed .* to {scheme}.* to 256"):
        hf_posswap.save(swapped, tmp_path / "saved")
    assert os.listdir(tmp_path) == []
    swapped.config.max_position_embeddings = 256
    hf_posswap.load(hf_posswap.save(swapped, tmp_path / "saved"))


@pytest.mark.parametrize("name", ["modeling_posswap.py", "README.md", "modules.json"])
def test_overwriting_waits_for_no_pipe(model: Any, tmp_path: Path, name: str) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    (folder / "posswap_files.json").unlink()  # as save_pretrained leaves it: what is known goes by content
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(model, folder, f"{name} (no regular file)")


def test_overwriting_keeps_what_cannot_be_read(model: Any, tmp_path: Path) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    hold(folder, "closed/mine.txt")
    (folder / "config.json").chmod(0)
    (folder / "closed").chmod(0)
    for place in (tmp_path, *list(tmp_path.parents)[:-2]):
        place.chmod(place.stat().st_mode | 0o055)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # the superuser may read everything: as another user
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            refuse_to_replace(folder, overwrite=True)
        except CheckpointError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    (folder / "closed").chmod(0o755)
    assert "closed (a folder that is empty or cannot be read)" in said
    assert "config.json (cannot be read: Permission denied)" in said


@pytest.mark.parametrize(
    "held", ["", "[]", "{}", '{"version": 2, "files": {}}', '{"version": 1, "files": []}', "[" * 100_000, b"\xff"]
)
def test_overwriting_needs_a_manifest_that_can_be_read(model: Any, tmp_path: Path, held: str | bytes) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    (folder / "posswap_files.json").write_bytes(held if isinstance(held, bytes) else held.encode())
    refused(model, folder, "posswap_files.json does not tell which files a save wrote")


def test_a_listed_file_may_be_written_however_the_process_ends(model: Any, tmp_path: Path) -> None:
    """The process is killed at each of its audited events in turn: a save may still take the checkpoint's place."""
    saved = hf_posswap.save(model, tmp_path / "saved")
    config = json.loads((saved / "config.json").read_text())
    seen, killed = set(), 0
    while True:
        folder = Path(shutil.copytree(saved, tmp_path / f"copy{killed}"))
        child = os.fork()
        if not child:
            left = iter(range(killed))
            try:  # os._exit ends it as a kill does, and is no audited event itself
                sys.addaudithook(lambda *_, left=left: next(left, None) is None and os._exit(9))
                write_listed_json(folder / "config.json", config | {"trained": 1})
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        refuse_to_replace(folder, overwrite=True)
        seen.add(len(json.loads((folder / "config.json").read_text())) - len(config))
        write_listed_json(folder / "config.json", config | {"trained": 2})  # as a run that resumes does
        assert not isinstance(json.loads((folder / "posswap_files.json").read_text())["files"]["config.json"], list)
        refuse_to_replace(folder, overwrite=True)
        if status == 0:
            break
        killed += 1
    assert seen == {0, 1}
    assert killed > 10


@pytest.mark.parametrize("value", ["null", "3", "{}", '{"size": "?", "sha256": []}'])
def test_an_entry_of_the_manifest_that_is_damaged_vouches_for_nothing(model: Any, tmp_path: Path, value: str) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    (folder / "posswap_files.json").write_text(f'{{"version": 1, "files": {{"config.json": {value}}}}}')
    refused(model, folder, "config.json (")


def test_a_file_that_comes_while_a_save_runs_is_kept(model: Any, tmp_path: Path) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")

    def write(*_: Any, **__: Any) -> None:
        (folder / "late.txt").write_text("kept")

    tokenizer = type("Tokenizer", (), {"save_pretrained": write})()
    with pytest.raises(CheckpointError, match=r"late.txt \(not written by a save\)"):
        hf_posswap.save(model, folder, tokenizer=tokenizer, overwrite=True)
    assert (folder / "late.txt").read_text() == "kept"
    (tmp_path / "new").mkdir()
    folder = tmp_path / "new"
    with pytest.raises(CheckpointError, match="is not empty; .*overwrite=True, --overwrite on the command line"):
        hf_posswap.save(model, folder, tokenizer=tokenizer)
    assert content(folder) == {str(folder / "late.txt"): b"kept"}


def test_a_folder_that_is_a_link_stays_one(model: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(CheckpointError, match="is a symbolic link to target, which does not exist"):
        hf_posswap.save(model, tmp_path / "link")
    hf_posswap.save(model, tmp_path / "target")
    hf_posswap.save(model, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    hold(tmp_path / "target", "mine.txt")
    refused(model, tmp_path / "link", "mine.txt (not written by a save)")


MODEL = '{"model_type": "gpt2"}'


@pytest.mark.parametrize(
    ("names", "config", "said"),
    [
        (
            [".git/HEAD", "src/main.py"],
            None,
            "holds no config.json of a model and no adapter_config.json, but .git, src",
        ),
        (["package.json"], '{"name": "a web page"}', "holds no config.json of a model"),
        (["a.json"], "{", "holds no config.json of a model"),
        (["a.json"], "[" * 100_000, "holds no config.json of a model"),
        (
            [".git/HEAD", "model.safetensors"],
            MODEL,
            "delete it: .git/HEAD (not recognised as written by a save). Nothing",
        ),
        (["checkpoint-500/optimizer.pt", "training_args.bin"], MODEL, "checkpoint-500/optimizer.pt (not recognised"),
        ([f"{n}.csv" for n in range(8)], MODEL, "0.csv (not recognised as written by a save), 1.csv"),
        ([f"{n}.csv" for n in range(8)], MODEL, "4.csv (not recognised as written by a save) and 3 more. Nothing"),
        (["mine.py"], MODEL, "mine.py (not"),
        (["modeling_posswap.py", "posswap_rope.py"], MODEL, "modeling_posswap.py (not"),
        (["README.md"], MODEL, "README.md (not"),
        (["LICENSE"], MODEL, "LICENSE (not"),
        (["old.bin"], MODEL, "old.bin (not"),
        (["model-00001-of-00002.safetensors"], MODEL, "model-00001-of-00002.safetensors (not"),  # no index names it
        (["vocab.txt"], MODEL, "vocab.txt (not"),  # no tokenizer is named that writes it
        (["1_Pooling/config.json"], MODEL, "1_Pooling/config.json (not"),
        (["run/adapter_config.json", "run/mine.txt"], MODEL, "run/mine.txt (not"),
        (["run/adapter_config.json", "run/README.md"], MODEL, "run/README.md (not"),
    ],
)
def test_overwriting_replaces_nothing_but_checkpoints(
    model: Any, tmp_path: Path, names: list[str], config: str | None, said: str
) -> None:
    folder = hold(tmp_path / "saved", *names)
    if config is not None:
        (folder / "config.json").write_text(config)
    refused(model, folder, said)


def test_overwriting_replaces_what_transformers_saved(model: Any, tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "saved", byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "rag": "{{ documents }}"}
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="2KB")
    assert {"additional_chat_templates", "model.safetensors.index.json"} < set(os.listdir(folder))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    hold(folder, shards[0].name.replace("model-00001-of", "model-00099-of"))
    refused(model, folder, "model-00099-of")
    (folder / shards[0].name.replace("model-00001-of", "model-00099-of")).unlink()
    hf_posswap.save(model, folder, overwrite=True)
    assert not list(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("kind", ["BertTokenizer", "BertTokenizerFast"])
def test_overwriting_replaces_the_vocabulary_that_the_named_tokenizer_writes(
    model: Any, tmp_path: Path, kind: str
) -> None:
    folder = hold(tmp_path / "saved", "vocab.txt", "special_tokens_map.json", "pytorch_model.bin")
    (folder / "config.json").write_text(MODEL)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    hold(folder, "merges.txt")
    refused(model, folder, "delete it: merges.txt (not recognised as written by a save). Nothing")
    (folder / "merges.txt").unlink()
    hf_posswap.save(model, folder, overwrite=True)
    assert not (folder / "vocab.txt").exists()


def test_overwriting_replaces_what_peft_saved_but_no_card_that_was_edited(model: Any, tmp_path: Path) -> None:
    from peft import LoraConfig

    def adapter() -> Any:
        config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        peft = hf_posswap.add_adapter(hf_posswap.load(base), config)
        peft.add_adapter("second", config)
        return peft

    base, folder = hf_posswap.save(model, tmp_path / "base"), tmp_path / "adapter"
    adapter().save_pretrained(folder)
    assert {"README.md", "adapter_config.json", "posswap.json", "second"} <= set(os.listdir(folder))
    card = (folder / "README.md").read_text()
    edits = [
        card.replace("[More Information Needed]", "Made by hand", 1),
        card.replace("---\n", "---\nlicense: mit\n", 1),
        card + "\nmine",
        "# mine",
        "---\n[: broken\n---\n",
    ]
    for edited in edits:
        (folder / "README.md").write_text(edited)
        refused(model, folder, "delete it: README.md (not recognised as written by a save). Nothing")
    (folder / "README.md").write_text(card)
    hf_posswap.save(adapter(), folder, overwrite=True)
    hold(folder / "second", "mine.txt")
    refused(model, folder, "delete it: second/mine.txt (not written by a save). Nothing")


def test_overwriting_replaces_a_plugin_checkpoint_of_an_older_version(model: Any, tmp_path: Path) -> None:
    hf_posswap.unpatch_model(model)
    hf_posswap.patch_model(model, "alibi", max_length=32)
    folder = hf_posswap.save(model, tmp_path / "saved")
    entry = folder / "modeling_posswap.py"  # older versions saved a file for each module
    header = entry.read_text().partition("import importlib")[0]
    entry.write_text(f"{header}from .posswap_registry import __name__ as _  # noqa: F401\n")
    hold(folder, "posswap_registry.py")
    (folder / "posswap_files.json").unlink()
    hold(folder, "posswap_mine.py")
    refused(model, folder, "delete it: posswap_mine.py (not recognised as written by a save). Nothing")
    (folder / "posswap_mine.py").unlink()
    hf_posswap.save(model, folder, overwrite=True)
    assert not list(folder.glob("posswap_*.py"))


def test_an_export_of_a_checkpoint_has_no_manifest_of_another_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    swapped = LlamaForCausalLM(config)
    hf_posswap.patch_model(swapped, "yarn", factor=4)
    folder = hf_posswap.save(swapped, tmp_path / "saved")
    exported = hf_posswap.export(folder, "vllm", tmp_path / "exported").folder
    assert exported is not None
    assert not (exported / "posswap_files.json").exists()
    hf_posswap.save(swapped, exported, overwrite=True)


def test_a_folder_name_that_is_too_long_is_said(model: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write .*File name too long. Choose another folder"):
        hf_posswap.save(model, tmp_path / ("a" * 256))
    folder = hf_posswap.save(model, tmp_path / ("a" * 255))
    hf_posswap.save(model, folder, overwrite=True)


@pytest.mark.parametrize(("before", "saved"), [(16, 32), (12, 12), (10**30, 10**30)])
def test_the_saved_tokenizer_reads_as_far_as_the_swapped_model(
    model: Any, tmp_path: Path, before: int, saved: int
) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = before
    folder = hf_posswap.save(model, tmp_path / "model", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(folder).model_max_length == saved
    assert tokenizer.model_max_length == before
    plain = hf_posswap.save(hf_posswap.unpatch_model(model), tmp_path / "plain", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(plain).model_max_length == before


@pytest.mark.parametrize(("before", "saved"), [(16, 32), (12, 12)])
def test_the_saved_generation_ends_where_the_swapped_model_does(
    model: Any, tmp_path: Path, before: int, saved: int
) -> None:
    from transformers import GenerationConfig

    model.generation_config.max_length = before
    folder = hf_posswap.save(model, tmp_path / "model")
    assert GenerationConfig.from_pretrained(folder).max_length == saved
    assert model.generation_config.max_length == before
    plain = hf_posswap.save(hf_posswap.unpatch_model(model), tmp_path / "plain")
    assert GenerationConfig.from_pretrained(plain).max_length == before


def test_a_file_is_no_folder(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        hf_posswap.save(model, tmp_path / "file")


@pytest.mark.parametrize("given", [None, "gpt2", nn.Linear(2, 2)], ids=["None", "str", "Linear"])
def test_what_is_no_model_is_not_saved(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSwapError, match=f"expected a transformers .*, got {type(given).__name__}; "):
        hf_posswap.save(given, tmp_path / "saved")
    assert not os.listdir(tmp_path)


def test_what_is_no_path_is_no_folder(model: Any) -> None:
    with pytest.raises(OptionError, match="a model is saved to a folder: give its path, got None"):
        hf_posswap.save(model, None)  # type: ignore[arg-type]


def test_an_interrupted_save_leaves_the_old(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hf_posswap.save(model, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    tokenizer = type("Tokenizer", (), {"save_pretrained": stop})()
    with pytest.raises(KeyboardInterrupt):
        hf_posswap.save(model, folder, tokenizer=tokenizer, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["saved"]


def test_a_native_checkpoint_keeps_its_angles_through_a_cast(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    swapped = LlamaForCausalLM(config).eval()
    hf_posswap.patch_model(swapped, "yarn", factor=4)
    hf_posswap.save(swapped, tmp_path / "saved")
    loaded: Any = hf_posswap.load(tmp_path / "saved").to(torch.bfloat16)
    stock: Any = LlamaForCausalLM.from_pretrained(tmp_path / "saved").to(torch.bfloat16)
    hidden, positions = torch.zeros(1, 1, 64), torch.tensor([[16000]])
    expected = swapped.model.rotary_emb(hidden, positions)[0]
    assert torch.equal(loaded.model.rotary_emb(hidden, positions)[0], expected)
    assert not torch.allclose(
        stock.model.rotary_emb(hidden, positions)[0], expected, atol=0.1
    )  # what it guards against


@pytest.mark.parametrize("scheme", ["rope", "sinusoidal"])
def test_a_new_head_is_new_and_a_missing_body_is_refused(scheme: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

    whole = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16))
    hf_posswap.patch_model(whole, scheme, max_length=32)
    folder = hf_posswap.save(whole, tmp_path / "saved")
    loaded: Any = hf_posswap.load(folder, model_class=AutoModelForSequenceClassification)
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, whole.transformer.h[0].attn.c_attn.weight)

    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.0.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for model_class in (None, AutoModelForSequenceClassification):
        with pytest.raises(CheckpointError, match="missing .*c_attn.weight"):
            hf_posswap.load(folder, model_class=model_class)


@pytest.mark.parametrize("scheme", ["alibi", "yarn:factor=2"])
def test_values_of_the_config_are_taken_as_from_pretrained_takes_them(scheme: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    hf_posswap.patch_model(tiny_model("llama", meta=False), scheme).save_pretrained(tmp_path)
    loaded: Any = hf_posswap.load(tmp_path, model_class=AutoModelForSequenceClassification, num_labels=3)
    assert (loaded.score.out_features, loaded.config.num_labels) == (3, 3)
    assert hf_posswap.swap_plan(loaded).schemes
    causal = hf_posswap.load(tmp_path, use_cache=False, dtype=torch.bfloat16, attn_implementation="eager")
    assert not causal.config.use_cache
    assert (causal.dtype, causal.config._attn_implementation) == (torch.bfloat16, "eager")
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'nonsense'"):
        hf_posswap.load(tmp_path, nonsense=3)


@pytest.mark.parametrize(
    ("kind", "scheme", "name"),
    [
        ("gpt2", "rope", "max_position_embeddings"),
        ("gpt2", "rope", "n_positions"),
        ("llama", "yarn", "rope_parameters"),
    ],
)
def test_a_value_that_the_swap_sets_is_refused_at_loading(kind: str, scheme: str, name: str, tmp_path: Path) -> None:
    model = hf_posswap.patch_model(tiny_model(kind, meta=False), scheme, max_length=64)
    model.save_pretrained(tmp_path)
    from transformers import AutoModel

    own: Any = getattr(model.config, name)
    assert getattr(hf_posswap.load(tmp_path, **{name: own}).config, name) == own
    other: Any = {"rope_type": "default", "rope_theta": 10000.0} if name == "rope_parameters" else 999
    roads: list[Any] = [hf_posswap.load]
    if kind == "gpt2":  # what is native is stock transformers' to load
        roads.append(AutoModel.from_pretrained)
        assert getattr(AutoModel.from_pretrained(tmp_path, **{name: own}).config, name) == own
    for load in roads:
        with pytest.raises(RecordError, match=f"{name}=.* was given for a checkpoint whose swap sets it, to"):
            load(tmp_path, **{name: other})


class Weighted(Mechanism):
    """A bias with a constant, a parameter and a fallback value, all without a device or dtype."""

    biases = True

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.tensor([0.1, 0.3])[:, None, None]
        self.slope = nn.Parameter(torch.tensor(0.7))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = (query_positions[:, None, :, None] - key_positions[:, None, None]).abs()
        return torch.where(distance > 3, -9.1, 0.0) - self.slope * self.weights * distance


@dataclass(frozen=True)
class WeightedScheme(Scheme):
    """The scheme of it."""

    name: ClassVar[str] = "weighted"
    summary: ClassVar[str] = "weighted distances"
    source: ClassVar[str] = "https://example.org"
    kind: ClassVar[Kind] = "bias"

    def mechanism(self, geometry: Any) -> Mechanism:
        return Weighted()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constants_of_a_mechanism_are_as_written_while_a_model_loads(
    dtype: torch.dtype, model: Any, tmp_path: Path
) -> None:
    ids = torch.arange(10)[None]
    SCHEMES.add("weighted", WeightedScheme)
    try:
        hf_posswap.patch_model(hf_posswap.unpatch_model(model), "weighted")
        loaded: Any = hf_posswap.load(hf_posswap.save(model, tmp_path / "saved"), dtype=dtype)
    finally:
        SCHEMES.remove("weighted")
    actual, expected = (next(m for m in each.modules() if isinstance(m, Weighted)) for each in (loaded, model))
    for name in ("weights", "slope"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype == torch.float32
    if dtype == torch.float32:
        assert torch.allclose(loaded.eval()(ids).logits, model.eval()(ids).logits, atol=1e-5)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("scheme", ["alibi", "yarn:factor=2"])
def test_a_class_of_another_prefix_gets_the_body_by_a_key_mapping_or_is_refused(
    scheme: str, auto: bool, tmp_path: Path
) -> None:
    """Llama's class for answering questions has its body elsewhere: stock transformers leaves all of it random."""
    from transformers import AutoModelForQuestionAnswering, LlamaForCausalLM, LlamaForQuestionAnswering

    model: Any = tiny_model("llama", meta=False)
    hf_posswap.patch_model(model, scheme).save_pretrained(tmp_path)
    answering = AutoModelForQuestionAnswering if auto else LlamaForQuestionAnswering
    says = r"missing .*transformer.*another prefix.*key_mapping=(\{[^}]*\}); or load"
    with pytest.raises(CheckpointError, match=says) as refused:
        hf_posswap.load(tmp_path, model_class=answering)
    found = re.search(says, str(refused.value))
    assert found is not None
    mapping = ast.literal_eval(found[1])
    assert mapping == {r"^model\.": "transformer."}
    loaded: Any = hf_posswap.load(tmp_path, model_class=answering, key_mapping=mapping).eval()
    ids = torch.arange(9)[None]
    states = model.eval().model(ids).last_hidden_state
    assert torch.equal(loaded.transformer(ids).last_hidden_state, states)
    loaded.save_pretrained(tmp_path / "renamed back")  # by transformers, which turns the mapping round
    with pytest.raises(CheckpointError, match=re.escape(f"has the old names. What works: key_mapping={mapping}.")):
        hf_posswap.load(tmp_path / "renamed back")
    loaded = hf_posswap.load(tmp_path / "renamed back", key_mapping=mapping).eval()
    assert torch.equal(loaded.transformer(ids).last_hidden_state, states)
    other = LlamaForQuestionAnswering(hf_posswap.unpatch_model(model).config)
    hf_posswap.patch_model(other, scheme).save_pretrained(tmp_path / "answering")
    with pytest.raises(CheckpointError, match=re.escape(r"key_mapping={'^transformer\\.': 'model.'}")):
        hf_posswap.load(tmp_path / "answering", model_class=LlamaForCausalLM)

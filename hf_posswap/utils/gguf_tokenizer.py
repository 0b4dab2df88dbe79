"""Tokenizers between GGUF files and tokenizer.json: how llama.cpp splits text before byte-pair encoding, by name.

The names and what each splits on are those of llama.cpp's llama-vocab.cpp. A file holds the name alone; transformers'
reader knows some of them, and takes GPT-2's split for the others. What the Auto classes of transformers make of a GGUF
file is read here: it brings no code, and the rest of its folder is not read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_posswap.errors import CheckpointError
from hf_posswap.utils.atomic_io import scratch_folder
from hf_posswap.utils.format import said_by
from hf_posswap.utils.threads import quiet_logger

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONTROL, ADDED = 3, 4
"""gguf.TokenType.CONTROL and USER_DEFINED."""
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2_SPLIT = _WORDS + r"\p{N}" + _REST


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Return the config that AutoConfig reads from the file at `path`; it raises whatever transformers raises."""
    from transformers import AutoConfig

    with _alone(path) as file:
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


def read_gguf_model(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the causal language model of the file at `path`, and what transformers says about its weights."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _alone(path) as file:
        model, info = auto.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
    return model, info


def count_gguf_weights(config: PreTrainedConfig) -> int:
    """Return how many weights the causal language model of `config` has, which is built without memory for them."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that AutoTokenizer reads from the file at `path`."""
    from transformers import AutoTokenizer

    with _alone(path) as file, quiet_logger("transformers", logging.ERROR):  # it says that it makes merges itself
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Give a link to the file, by itself in a folder: transformers reads a tokenizer's config in its folder.

    The link has a plain name, whatever bytes that of the file consists of.
    """
    with scratch_folder() as folder:
        link = folder / "model.gguf"
        try:
            os.symlink(path.resolve(), link)
        except OSError:  # a system without links
            link = path
        yield link


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before the merges.

    Attributes:
        names: as llama.cpp calls it; the first is written.
        stages: of a tokenizer.json's pre_tokenizer, before the bytes become letters.
        whole_words: whether a split that is a token is taken whole (`ignore_merges`).
        begins: whether a text begins with the bos token where the file does not say.
    """

    names: tuple[str, ...]
    stages: tuple[dict[str, object], ...]
    whole_words: bool = False
    begins: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the pre_tokenizer of a tokenizer.json."""
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*self.stages, last]}


def _split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}


_LLAMA3, _QWEN2 = (_split(LLAMA3_SPLIT),), (_split(QWEN2_SPLIT),)


PRE_TOKENIZERS = (
    PreTokenizer(
        ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
         "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
        (_split(GPT2_SPLIT),),
    ),
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (_DIGITS, _split(GPT2_SPLIT)),
    ),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA3,
        whole_words=True,
        begins=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    PreTokenizer(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2
    ),
)  # fmt: skip
"""Those whose splits a tokenizer.json expresses."""


PROBES = (
    "Hello, world! It's 2024: we'll see 12345678 things, I'VE said. DON'T",
    "a  b   c\t\td \n\n e\r\n\r\nf   \n  g\n",
    "  leading, trailing   ",
    "x = [1,2,33,444,5555]; y=3.14159 / 2e10;\n\tif (a<=b) { return 'x'; }",
    "100 000 and 1,000,000; a1b22c333 v1.2.3 1st 22nd",
    "Café déjà vu naïve ĳssel Ωmega Привет, мир! 你好，世界。 こんにちは 안녕하세요 हिन्दी עברית ١٢٣ ½ ² Ⅷ ①",
    "emoji 🙂🙂 👩‍👩‍👧 ok… “quoted” —dash– $5.00 €9 #tag @me __init__ --flag <|x|> ```code```",
    "\u00a0nbsp\u2003em\u3000wide\u200bzero\u2028line \u0301mark e\u0301",
    "'s 'S 't's ' s'll 'LL'd're'm ''' ?!?!\n?!\n\n!",
    "0 1 22 333 4444 55555 666666 7777777  8  99\n10\n\n11",
)
"""Texts that the pre-tokenizers split differently."""


def recognized(tokenizer: dict[str, Any]) -> PreTokenizer | None:
    """Return the pre-tokenizer that splits as a tokenizer.json does; None: none of those that are known here.

    What it does is compared, on `PROBES`, and not how it is written.
    """
    stages = tokenizer.get("pre_tokenizer")
    splits = None if stages is None else _splits(stages)
    if splits is None:
        return None
    whole = bool(tokenizer["model"].get("ignore_merges"))
    same = [each for each in PRE_TOKENIZERS if _splits(each.to_json()) == splits]
    return next((each for each in same if each.whole_words == whole), None)


def _splits(pre_tokenizer: dict[str, object]) -> list[list[str]] | None:
    """Return what a pre_tokenizer of a tokenizer.json makes of `PROBES`; None: it cannot be built."""
    from tokenizers import Tokenizer

    empty = {"type": "BPE", "vocab": {}, "merges": []}
    try:
        built = Tokenizer.from_str(json.dumps({"model": empty, "pre_tokenizer": pre_tokenizer})).pre_tokenizer
    except Exception:  # tokenizers raises Exception itself
        return None
    return [[word for word, _ in built.pre_tokenize_str(text)] for text in PROBES]


def write_tokenizer(path: Path, folder: Path, fields: dict[str, object], config: PreTrainedConfig) -> list[str]:
    """Write the tokenizer of a GGUF file into `folder`, and return sentences about what is not written.

    Args:
        path: the GGUF file.
        folder: a folder.
        fields: the values of the file's keys.
        config: of the model: its length is the tokenizer's.

    Raises:
        CheckpointError: its vocabulary is damaged.
    """
    model_type, name = fields.get("tokenizer.ggml.model", "none"), fields.get("tokenizer.ggml.pre")
    alone = "the model is taken without a tokenizer: give its own where one is needed"
    if model_type in ("none", "no_vocab"):
        return []
    if model_type == "gpt2":
        chosen = next((each for each in PRE_TOKENIZERS if name in each.names), None)
        if chosen is None:
            return [f"its tokenizer splits text as {name!r}, which is not known here; {alone}"]
        tokenizer = _byte_level(path, fields, chosen)
    elif model_type == "llama":
        try:
            tokenizer = _sentencepiece(path, fields)
        except Exception as error:  # of transformers' reader and of tokenizers, which raises Exception itself
            return [f"its tokenizer cannot be read ({said_by(error)}); {alone}"]
        if (text := _first_difference(tokenizer, fields)) is not None:
            return [f"its tokenizer, as transformers reads it, splits {text!r} otherwise than llama.cpp; {alone}"]
    else:
        return [f"its tokenizer, of kind {model_type!r}, is not one that is read here; {alone}"]
    length = getattr(config, "max_position_embeddings", None)
    if length:
        tokenizer.model_max_length = int(length)
    tokenizer.save_pretrained(folder)
    return []


def _byte_level(path: Path, fields: dict[str, object], chosen: PreTokenizer) -> PreTrainedTokenizerBase:
    """Return the byte-level byte-pair encoding of a file."""
    tokens, types = _list(fields, "tokens"), _list(fields, "token_type")
    merges: list[list[str]] = []
    for merge in _list(fields, "merges"):
        at = merge.find(" ", 1)  # the first half may begin with a space
        merges.append([merge[:at], merge[at + 1 :]])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        raise CheckpointError(f"{path} has {len(tokens)} tokens, {len(vocabulary)} of them different: it is damaged.")
    added = [
        {"id": index, "content": token, "special": types[index] == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, token in enumerate(tokens)
        if index < len(types) and types[index] in (CONTROL, ADDED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": chosen.to_json(),
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [pair for pair in merges if "".join(pair) in vocabulary],
            "ignore_merges": chosen.whole_words,
        },
    }
    try:
        return _wrapped(content, fields, begins=chosen.begins)
    except Exception as error:
        raise CheckpointError(f"{path} holds a tokenizer that cannot be built: {said_by(error)}") from error


def _wrapped(content: dict[str, Any], fields: dict[str, Any], *, begins: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the special tokens and the chat template of a file.

    Args:
        content: of a tokenizer.json.
        fields: the values of the file's keys.
        begins: whether a text begins with the bos token where the file does not say.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = _list(fields, "tokens")
    numbers = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {
        name: tokens[int(number)] if number is not None and int(number) < len(tokens) else None
        for name, number in numbers.items()
    }
    first = special["bos_token"] if fields.get("tokenizer.ggml.add_bos_token", begins) else None
    last = special["eos_token"] if fields.get("tokenizer.ggml.add_eos_token", False) else None
    content["post_processor"] = _around(first, last, tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token},
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _sentencepiece(path: Path, fields: dict[str, object]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of sentencepiece's kind, with a space before each text and after each special token.

    transformers' reader gives none to a text that begins with one.
    """
    from tokenizers import normalizers

    reader = read_gguf_tokenizer(path)
    stages: list[object] = [normalizers.Replace(" ", _SPACE)]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        stages.insert(0, normalizers.Prepend(_SPACE))
    reader.backend_tokenizer.normalizer = normalizers.Sequence(stages)
    reader.backend_tokenizer.pre_tokenizer = None
    return _wrapped(json.loads(reader.backend_tokenizer.to_str()), fields, begins=True)


def _first_difference(tokenizer: PreTrainedTokenizerBase, fields: dict[str, object]) -> str | None:
    """Return a text of `PROBES` of which `tokenizer` makes other tokens than llama.cpp would; None: there is none."""
    tokens, scores = _list(fields, "tokens"), _list(fields, "scores")
    prefix = _SPACE if fields.get("tokenizer.ggml.add_space_prefix", True) else ""
    ids = {token: index for index, token in enumerate(tokens)}
    added = [token for token in tokenizer.get_added_vocab() if token]
    for text in PROBES:
        if any(token in text for token in added):
            continue
        expected = _merged(prefix + text.replace(" ", _SPACE), ids, scores)
        if tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] != expected:
            return text
    return None


def _merged(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Return the tokens of a text as llama.cpp finds them: the pair with the best score is merged first.

    What is no token then is given by its bytes.
    """
    pieces = list(text)
    while True:
        pairs = [(ids[a + b], at) for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in ids]
        if not pairs:
            break
        _, at = max(pairs, key=lambda pair: (scores[pair[0]], -pair[1]))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    spelt = [[piece] if piece in ids else [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces]
    return [ids.get(token, -1) for spelling in spelt for token in spelling]


_SPACE = "\u2581"
"""What sentencepiece writes for a space."""


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    return list(fields.get(f"tokenizer.ggml.{name}") or ())


def _around(first: str | None, last: str | None, tokens: list[str]) -> dict[str, object] | None:
    """Return the post_processor that puts tokens around a text; None: none."""
    around: Iterable[str] = [token for token in (first, last) if token]
    if not around:
        return None

    def surrounded(name: str, number: int) -> list[dict[str, object]]:
        template: list[dict[str, object]] = [{"SpecialToken": {"id": first, "type_id": number}}] if first else []
        template.append({"Sequence": {"id": name, "type_id": number}})
        return [*template, {"SpecialToken": {"id": last, "type_id": number}}] if last else template

    return {
        "type": "TemplateProcessing",
        "single": surrounded("A", 0),
        "pair": surrounded("A", 0) + surrounded("B", 1),
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in around},
    }

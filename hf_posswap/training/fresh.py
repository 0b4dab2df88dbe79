"""Small models with random weights, and tokenizers trained on text or of bytes, to start a pretraining from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, get_args

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hf_posswap.compat.torch_dispatch import PrivateRandomness
from hf_posswap.errors import DataError, OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"
Kind = Literal["gpt2", "llama", "bert"]
_BYTES = 256
_SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_CHARACTERS = 20_000_000  # of text that merges are learned from
_DOCUMENTS = 20_000


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are the bytes of the UTF-8 text, and 256 for the end of a text.

    Saved with a checkpoint, it loads with `AutoTokenizer`.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("né")["input_ids"], tokenizer.decode([110, 195, 169])
        ([110, 195, 169], 'né')
    """
    from transformers import PreTrainedTokenizerFast

    # bytes that Latin-1 prints stand for themselves, the others for the characters from U+0100 on (Radford et al. 2019)
    printed, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, count(256)
    vocabulary = {chr(byte if byte in printed else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    # cleaning up would change " ." into "."
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class FreshSettings:
    """What a new model looks like.

    Attributes:
        kind: "gpt2": a learned position table, causal. "llama": RoPE, causal. "bert": a learned table, sees both sides.
        window: positions.
        layers: of attention and MLP.
        width: of the hidden states.
        heads: of each attention.
        vocabulary: tokens of the tokenizer, special ones included; 0: bytes alone.
        seed: of the weights.
    """

    kind: Kind = "gpt2"
    window: int = 256
    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind is one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("window", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is a whole number of at least 1, got {getattr(self, name)!r}")
        if self.heads >= 1 and self.width % (2 * self.heads):
            problems.append(f"width is a multiple of twice the {self.heads} heads, got {self.width}")
        least = _BYTES + len(_SPECIAL)
        if self.vocabulary and self.vocabulary < least:
            problems.append(f"vocabulary is 0, or at least {least}: bytes and special tokens; got {self.vocabulary}")
        if self.seed < 0:
            problems.append(f"seed is a whole number of at least 0, got {self.seed}")
        if problems:
            raise OptionError(f"a new model: {'; '.join(problems)}.")


def fresh_tokenizer(settings: FreshSettings, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer whose merges are learned from the first 20 million characters of `texts`.

    For a causal model, one symbol begins and ends texts; for an encoder, [CLS] and [SEP] do, and there is a [MASK].

    Args:
        settings: of the model.
        texts: to learn merges from; not read where the vocabulary is bytes alone.

    Raises:
        DataError: there is too little text for that many tokens.

    Example:
        >>> tokenizer = fresh_tokenizer(FreshSettings("bert", vocabulary=262), ["a text and a text"] * 9)
        >>> tokenizer("a text")["input_ids"][0] == tokenizer.cls_token_id, len(tokenizer)
        (True, 262)
    """
    masked = settings.kind == "bert"
    if not settings.vocabulary and not masked:
        return byte_tokenizer()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(_SPECIAL.values()) if masked else [END_OF_TEXT]
    size = settings.vocabulary or _BYTES + len(special)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_first_texts(texts), trainer)
    if tokenizer.get_vocab_size() < size:
        raise DataError(
            f"the text yields merges for only {tokenizer.get_vocab_size()} of {size} requested tokens: give more text "
            "or a smaller vocabulary."
        )
    if not masked:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
        )
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **_SPECIAL)


def _first_texts(texts: Iterable[str]) -> Iterable[str]:
    read = 0
    for text in islice(texts, _DOCUMENTS):
        yield text[: _CHARACTERS - read]
        read += len(text)
        if read >= _CHARACTERS:
            return


def fresh_model(settings: FreshSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model of `settings` with random weights, the same for the same seed, in eval mode.

    Example:
        >>> settings = FreshSettings(width=32, heads=2, layers=1, window=16, vocabulary=0)
        >>> type(fresh_model(settings, fresh_tokenizer(settings, []))).__name__
        'GPT2LMHeadModel'
    """
    import transformers

    shared: dict[str, Any] = {"vocab_size": len(tokenizer), "tie_word_embeddings": True}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        shared[name] = getattr(tokenizer, name)
    sizes: dict[str, Any] = {
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": settings.window,
    }
    with PrivateRandomness(settings.seed):
        if settings.kind == "gpt2":
            no_dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shared, **sizes, **no_dropout)).eval()
        if settings.kind == "llama":
            # three matrices have as many parameters as two of 4 E
            intermediate_size = -(-8 * settings.width // 3 // 32) * 32
            return transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**shared, **sizes, intermediate_size=intermediate_size)
            ).eval()
        no_dropout_bert: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        config = transformers.BertConfig(**shared, **sizes, **no_dropout_bert, intermediate_size=4 * settings.width)
        return transformers.BertForMaskedLM(config).eval()

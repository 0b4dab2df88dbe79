"""The fitness of a candidate: the loss of the model with its scheme, on documents from texts or token ids.

Ctrl-C is deferred to points where it is safe.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from torch import Tensor

from hf_posswap.errors import DataError
from hf_posswap.evaluation import measure_losses
from hf_posswap.patching.apply.patch_model import patch_model, unpatch_model
from hf_posswap.schemes import Scheme
from hf_posswap.text.stdlib import Document
from hf_posswap.text.tokens import token_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TokenRows = Tensor | np.ndarray | Sequence[Sequence[int] | np.ndarray | Tensor]
"""Rows of token ids, one per text, of any length."""
_CHARACTERS_PER_TOKEN = 32  # only the beginning of a long text is tokenized


@dataclass(eq=False)
class Interrupts:
    """Inside a `with` block, Ctrl-C is deferred to the next `check()`, or to the end of the block.

    An interrupt while a model is patched would leave it half patched. If Ctrl-C does not raise KeyboardInterrupt (in
    another thread, or with a custom handler), nothing is changed.

    Example:
        >>> with Interrupts() as interrupts:
        ...     interrupts.check()
        >>> interrupts.is_requested
        False
    """

    is_requested: bool = False
    _is_installed: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def _note(self, *_: object) -> None:
        self.is_requested = True

    def check(self) -> None:
        """Raise a deferred KeyboardInterrupt, if there is one."""
        if self.is_requested:
            raise KeyboardInterrupt

    def __exit__(self, error_type: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error_type is None:
            self.check()


def leading_documents(texts: object, tokenizer: PreTrainedTokenizerBase | None, length: int) -> np.ndarray:
    """Return the first `length` tokens of each of `texts`, int32 [N, length].

    Args:
        texts: a list of strings, or of token ids: lists, arrays or tensors [at least `length`]; or one array of them.
        tokenizer: for strings; it adds its begin-of-text token, if it has one.
        length: tokens of each document.

    Raises:
        DataError: there is no text, a text is too short, strings have no tokenizer, or ids are not whole numbers.

    Example:
        >>> leading_documents([[1, 2, 3, 4], [5, 6, 7, 8]], None, 3).tolist()
        [[1, 2, 3], [5, 6, 7]]
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray | Tensor) or len(texts) == 0:
        raise DataError(f"texts must be a list of texts, or of token ids, one per document; got {_brief(texts)}.")
    are_strings = {isinstance(text, str) for text in texts}
    if len(are_strings) > 1:
        raise DataError("texts holds strings and token ids; give all as one or all as the other.")
    if are_strings == {True}:
        if tokenizer is None:
            raise DataError("texts holds strings: give the model's tokenizer too, or token ids instead.")
        rows = [_tokens(text, tokenizer, length) for text in texts]
    else:
        rows = token_rows(texts, "texts")
    for index, row in enumerate(rows):
        if len(row) < length:
            raise DataError(
                f"texts[{index}] has {len(row)} tokens, and each is measured at the target length of {length}: "
                "give longer texts or a smaller factor."
            )
    return np.stack([row[:length] for row in rows]).astype(np.int32)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    from hf_posswap.utils.progress import quiet_transformers

    start = text[: length * _CHARACTERS_PER_TOKEN]
    if not start:
        return np.zeros(0, dtype=np.int32)
    with quiet_transformers():  # it warns about texts beyond the model's length, which are intended here
        return token_stream([Document("text", start)], tokenizer)


def token_rows(rows: TokenRows, name: str = "tokens") -> list[np.ndarray]:
    """Return each of `rows` of token ids, lists, arrays or tensors, as an array [any length >= 1].

    Args:
        rows: a list of rows, or one array or tensor of them.
        name: name of the argument, for error messages.

    Raises:
        DataError: there are no rows, or one is empty or not a row of whole numbers.

    Example:
        >>> token_rows([[1, 2], np.array([3])])
        [array([1, 2]), array([3])]
    """
    if isinstance(rows, str) or not isinstance(rows, Sequence | np.ndarray | Tensor) or len(rows) == 0:
        raise DataError(f"{name} must be rows of token ids, one per text, got {_brief(rows)}.")
    arrays = []
    for index, ids in enumerate(rows):
        try:
            row = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        except (TypeError, ValueError):
            row = np.zeros(0)
        if row.ndim != 1 or len(row) == 0 or row.dtype.kind not in "iu":
            expected = "a string or a row of whole token ids" if name == "texts" else "a row of whole token ids"
            raise DataError(f"{name}[{index}] must be {expected}, got {_brief(ids)}.")
        arrays.append(row)
    return arrays


def _brief(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def scheme_loss(model: PreTrainedModel, scheme: Scheme, documents: np.ndarray, interrupts: Interrupts) -> float:
    """Return the mean loss of `model` with `scheme` over all scored tokens of `documents` [N, L], in nats per token.

    The model is patched by `patch_model`, measured, and always restored.

    Raises:
        NumericError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C was pressed; it is checked after each document.
    """
    length = documents.shape[1]
    patch_model(model, scheme)
    try:
        losses = measure_losses(model, documents, [length], one_pass=False, on_document=lambda *_: interrupts.check())
    finally:
        unpatch_model(model)
    return float(losses[length].mean(dtype=np.float64))

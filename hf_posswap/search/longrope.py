"""Search of LongRoPE's divisors for one model, on a few of the user's documents.

Ding et al. 2024, https://arxiv.org/abs/2402.13753, section 3.2. Details that the paper leaves open follow its authors'
code: a probability of 0.3 for each gene, 20 attempts to find a new candidate. Two extensions make YaRN a member of the
space: seeds may be off the grid of 0.01, and the factor on cos and sin is a gene as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posswap.errors import OptionError
from hf_posswap.patching.apply.guard import alone
from hf_posswap.patching.plan.plan_swap import unwrap
from hf_posswap.search.documents import leading_documents
from hf_posswap.search.fitness import evaluating
from hf_posswap.search.interrupts import Interrupts
from hf_posswap.search.result import LongRopeSearch
from hf_posswap.search.session import Session, progress_bar
from hf_posswap.search.subject import SearchSettings, searched_geometry, searched_positions, target_length
from hf_posswap.text.tokens import check_token_ids
from hf_posswap.utils.progress import reporter_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_posswap.utils.progress import Reporter


@alone()
def search_longrope(
    model: PreTrainedModel,
    texts: Any,
    factor: float,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    population: int = 64,
    iterations: int = 40,
    mutation_rate: float = 0.3,
    original_positions: Sequence[int] | None = None,
    state: str | Path | None = None,
    seed: int = 0,
    native: bool = False,
    progress: bool | None = None,
    reporter: Reporter | None = None,
) -> LongRopeSearch:
    """Search the LongRoPE scheme with the lowest loss of `model` on `texts` at `factor` times its original length.

    The evolutionary search runs over the divisors (ascending, in [1, 1.25 s], in steps of 0.01), n-hat and the factor
    on cos and sin. To measure a candidate, the model is patched with it, reads the documents, and is restored bit by
    bit, also after an error or Ctrl-C. PI, NTK and YaRN are candidates, so the result is never worse than they are on
    these documents. Only the long divisors are searched: up to the original length the scheme divides by 1. The
    defaults need 1344 evaluations with one forward per document each.

    Args:
        model: a causal model with rotary positions, not swapped, or a PEFT model around one.
        texts: documents of at least `factor` times the original length: strings, or rows of token ids.
        factor: s, target length over original length, > 1.
        tokenizer: the model's tokenizer, for strings.
        population: candidates of the first population, at least 8; in each iteration the best half survives, and a
            quarter of mutations and a quarter of crossovers are added.
        iterations: number of iterations after the first population.
        mutation_rate: probability of each gene to change, in (0, 1].
        original_positions: values of n-hat to try; None: the paper's values below the original length, or only 0 if the
            model cannot be patched inside attention. Only 0 can be saved for stock transformers.
        state: a file that is updated after each iteration; a stopped search resumes from it, with the same result as an
            uninterrupted one. A finished search continues if it is given more iterations.
        seed: random seed.
        native: search only what stock transformers can run, which is `original_positions=[0]`.
        progress: show a bar of the candidates; None: in a notebook and on a terminal, unless
            HF_HUB_DISABLE_PROGRESS_BARS or `disable_progress_bar` of transformers turns bars off.
        reporter: shows the progress instead, as the command line does.

    Raises:
        OptionError: `native` was given with `original_positions`, or `progress` is not True, False or None.
        SchemeError: an invalid factor, population, rate, n-hat, ...
        DataError: texts are too short or of another model, or the model has no output head.
        UnsupportedSwapError, UnsupportedModelError: the model is not causal, not rotary, has no weights (meta), or no
            family describes it; or n-hat cannot be put in it.
        AlreadyPatchedError: the model carries a swap.
        CheckpointError: the state cannot be read or written, or belongs to another search.
        NumericError: a loss is not finite.
        ModelInUseError: a forward of the model is running, or another thread changes it.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                      vocab_size=32, max_position_embeddings=16)
        >>> model = LlamaForCausalLM(config)
        >>> tokens = torch.arange(64).view(2, 32) % 32
        >>> result = search_longrope(model, tokens, 2.0, population=8, iterations=1, progress=False)
        >>> result.perplexity <= min(result.seeds.values()), result.scheme.factor
        (True, 2.0)
    """
    reporter = reporter_for(progress, reporter)
    if native and original_positions is not None:
        raise OptionError("native=True is original_positions=[0]: give one of them.")
    settings = SearchSettings(factor, population, iterations, mutation_rate, seed)
    target: Any = unwrap(model)
    geometry = searched_geometry(target, settings.factor)
    positions = searched_positions(target, settings.factor, geometry, [0] if native else original_positions)
    documents = leading_documents(texts, tokenizer, target_length(settings.factor, geometry))
    check_token_ids(target, documents)
    search = Session(target, documents, geometry, settings, positions, None if state is None else Path(state))
    search_progress = search.progress()
    with (
        progress_bar(settings.evaluations, len(search_progress.seen), reporter) as task,
        Interrupts() as interrupts,
        evaluating(target),
    ):
        search.run(search_progress, task, interrupts)
    return search.result(search_progress)

from hf_posswap.text.stdlib import Corpus as Corpus
from hf_posswap.text.stdlib import Document as Document
from hf_posswap.text.stdlib import python_corpus as python_corpus
from hf_posswap.text.stdlib import split as split
from hf_posswap.text.tokens import check_token_ids as check_token_ids
from hf_posswap.text.tokens import token_stream as token_stream
from hf_posswap.training.fresh import byte_tokenizer as byte_tokenizer

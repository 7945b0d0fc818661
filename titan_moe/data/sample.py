"""Read some documents of each source before a run: do they hold texts, and how many tokens?"""

from contextlib import suppress
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.build import build_reader, build_validation
from titan_moe.data.document_order import DocumentOrder
from titan_moe.data.documents import OutOfDocumentsError
from titan_moe.data.sequences import encode_document
from titan_moe.data.sources import is_stream
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.runtime.errors import RunError

_MOST_READ = 64  # Documents of each source.


def sample_data(
    training: Training, validation: Validation, tokenizer: Tokenizer, **how: Any
) -> list[str]:
    """Open each source as a run does and read some documents; returns a line about each source.

    Nothing is opened where a source is on the hub, without a local copy. `how`: further keywords of
    `build_reader`. ConfigError when a source cannot be trained on.
    """
    sources: list[Any] = list(training.blend) or [training]
    if validation.enable and validation.dataset is not None:
        sources.append(validation)
    for source in sources:
        if is_stream(source.dataset) and source.dataset_path is None:
            return [f"the data was not read: {source.dataset!r} is on the Hugging Face hub"]
    place: dict[str, Any] = {"seed": how["seed"], "rank": 0, "num_ranks": 1}
    reader = build_reader(training, tokenizer, validation=validation, **how | place)
    orders = [(part.order, "training") for part in reader.parts]
    if validation.enable:
        loader = build_validation(validation, training, tokenizer, **place)
        orders += [(part.order, "validation") for part in loader.parts]
    return [_sample(order, use, tokenizer) for order, use in orders]


def _sample(order: DocumentOrder, use: str, tokenizer: Tokenizer) -> str:
    """One line. ConfigError where no document can be read."""
    lengths = []
    try:
        with suppress(OutOfDocumentsError):
            for position in range(min(_MOST_READ, order.size or _MOST_READ)):
                lengths.append(len(encode_document(order.document(position), tokenizer).ids))
    except RunError as error:
        raise ConfigError([str(error)]) from None
    if not (read := len(lengths)):
        raise ConfigError([f"{order.name} holds no document"])
    if order.size is None:
        return f"{order.name}, for {use}: {read} documents read, their number is not known"
    how = f" (estimated from {read} documents)" if read < order.size else ""
    tokens = sum(lengths) * order.size // read
    return f"{order.name}, for {use}: {order.size:,} documents, {tokens:,} tokens{how}"

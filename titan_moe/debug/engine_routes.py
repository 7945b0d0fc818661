"""Routes of inference engines become a routing record, which `debug.routing_replay` repeats.

A file has a JSON object on each line, for one response:

    token_ids                   prompt and response
    routed_experts              the experts of these tokens in each layer [tokens, layers, top_k]:
                                lists, base64 of a .npy file (vLLM), base64 of integers (SGLang)
    routed_experts_dtype        type of SGLang's integers; left out: int32
    routed_experts_start_len    first tokens that the array leaves out; left out: 0

Engines return a row for each decoder layer, zeros for a dense one, or (vLLM 0.21) for each MoE
layer; none for multi-token prediction. The last token of a response was no input and has no route:
its row may be left out, and is ignored whatever it holds. -1 marks other routes that an engine does
not know.

Experts depend on the tokens before. A response is therefore found where a document has its tokens
from the first on. The document may have more, or be cut off by the end of its sequence; what the
next sequence has of it goes where the training's router sends it, as all tokens without a route do.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import PackedSequence, fingerprints, stack_sequences
from titan_moe.data.build import build_reader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.debug.routing_record import Dims, RecordWriter, Tokens, name_sequences, start_record
from titan_moe.debug.routing_trace import trace_dims
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.errors import reason


def import_routes(
    job: JobConfig, config: ModelConfig, path: Path, folder: Path
) -> tuple["Responses", int]:
    """Write a routing record of all steps of a training, with the routes of the responses in them.

    Keeps the file's routes in memory. Nothing is left if something is wrong.

    Args:
        job: a resolved configuration.
        path: a file of responses.
        folder: the record; it must not exist.

    Returns the responses and the number of tokens with a route. Raises ConfigError for a file that
    is not of this model or data, RunError when the data end.
    """
    dims, training = _check(job, config, folder), job.training
    responses, routed = Responses(path, dims, config.num_layers), 0
    tokenizer = load_tokenizer(job.model.tokenizer_path, training)
    reader = build_reader(training, tokenizer, seed=job.debug.seed, validation=job.validation)
    steps = training.steps
    if training.epochs is not None:
        steps = min(steps, reader.count_steps())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as aside:
        record = Path(aside, folder.name)
        start_record(record, dims, after=0)
        writer = RecordWriter(record, rank=0, world_size=1, limit_gb=math.inf)
        for step in range(1, steps + 1):
            microbatches = reader.read_step()
            sequences = [sequence for microbatch in microbatches for sequence in microbatch]
            names = name_sequences(fingerprints(stack_sequences(sequences)))
            experts_NPLK = np.stack([responses.of_sequence(sequence) for sequence in sequences])
            routed += int((experts_NPLK < dims.num_experts).any((2, 3)).sum())
            by_layer = {name: experts_NPLK[:, :, i] for i, name in enumerate(dims.layers)}
            writer.write(step, Tokens(names, np.arange(training.seq_len)), by_layer)
        if not routed:
            raise ConfigError(
                f"{path}: no document in steps 1 to {steps} begins with the token_ids of "
                "a response: name the data, tokenizer and steps of the training that replays them"
            )
        record.rename(folder)
    return responses, routed


def _check(job: JobConfig, config: ModelConfig, folder: Path) -> Dims:
    """Returns the record's dimensions. Raises ConfigError for a job that cannot have a record."""
    name = f"model.name={job.model.name}"
    if config.moe is None:
        raise ConfigError(f"{name} has no experts: choose one that has")
    dims = trace_dims(job, config)
    if dims.index_top_k:
        raise ConfigError(f"{name} selects keys too, of which engines return none: choose another")
    if job.stages:
        raise ConfigError("stages change the batches: import routes for a run without [[stages]]")
    if folder.exists():
        raise ConfigError(f"--out {folder} exists: name another folder, or remove it")
    return dims


class Responses:
    """The responses of a file. Of those with the same tokens the last one counts.

    Raises ConfigError for a file that cannot be read, and for a response of another model.
    """

    def __init__(self, path: Path, dims: Dims, num_layers: int) -> None:
        """`num_layers`: decoder layers of the model."""
        self._dims = dims
        self.experts_TLK: dict[bytes, NDArray[np.uint16]] = {}
        """Experts by token and MoE layer, as `of_sequence` returns them, by the token ids."""
        self.missing: dict[bytes, int] = {}
        """Line of each response that no sequence so far had all of."""
        try:
            for number, line in enumerate(path.read_bytes().splitlines(), 1):
                if line.strip():
                    key, experts_TLK = _read_response(json.loads(line), dims, num_layers)
                    self.experts_TLK[key], self.missing[key] = experts_TLK, number
        except OSError as error:
            raise ConfigError(f"{path}: {reason(error)}: name a file of responses") from None
        except (ValueError, KeyError, TypeError, EOFError, MemoryError) as error:
            said = f"{path}:{number}: {reason(error)}"
            raise ConfigError(f"{said}: mend the line, or take it out") from None

    def of_sequence(self, sequence: PackedSequence) -> NDArray[np.uint16]:
        """Returns the experts of a sequence's tokens by MoE layer, [P, L, K]: the number of experts
        where there is no route."""
        shape = len(sequence.tokens_S), len(self._dims.layers), self._dims.top_k
        experts_PLK = np.full(shape, self._dims.num_experts, np.uint16)
        for document in range(len(sequence.samples)):
            (at,) = np.nonzero(sequence.documents_S == document)
            if (key := self._find(sequence.tokens_S[at].tobytes())) is not None:
                experts_TLK = self.experts_TLK[key]
                if len(experts_TLK) <= len(at):
                    self.missing.pop(key, None)
                experts_PLK[at[: len(experts_TLK)]] = experts_TLK[: len(at)]
        return experts_PLK

    def _find(self, key: bytes) -> bytes | None:
        """Returns the response with these tokens, or else the longest one that they begin with or
        that begins with them. Compares all: a millisecond for 6,000."""
        alike = [each for each in self.experts_TLK if each.startswith(key) or key.startswith(each)]
        return key if key in self.experts_TLK else max(alike, key=len, default=None)


def _read_response(
    fields: Mapping[str, Any], dims: Dims, num_layers: int
) -> tuple[bytes, NDArray[np.uint16]]:
    """Returns a response's token ids, as bytes, and its experts. Raises ValueError, KeyError or
    TypeError for a response that does not fit the model."""
    ids, first = np.array(fields["token_ids"]), fields.get("routed_experts_start_len", 0)
    experts = _decoded(fields)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError("token_ids is no list of numbers: give those of prompt and response")
    numbers = [int(name[len("layers.") :]) for name in dims.layers if name.startswith("layers.")]
    dense = sorted({*range(num_layers)} - {*numbers})
    if isinstance(fields["routed_experts"], str) and experts.ndim == 1:
        experts = _shaped(experts, len(ids) - first, dims.top_k, len(numbers), dense)
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise ValueError("routed_experts is no array [tokens, layers, top_k] of whole numbers")
    num_tokens, rows, top_k = experts.shape
    if top_k != dims.top_k:
        raise ValueError(f"{top_k} experts of each token, the model has top_k={dims.top_k}")
    if rows not in (num_layers, len(numbers)):
        raise ValueError(f"{rows} layers, the model has {num_layers}, {len(numbers)} with experts")
    if first < 0 or first + num_tokens not in (len(ids) - 1, len(ids)):
        raise ValueError(
            f"routes of tokens {first} to {first + num_tokens - 1}, which must end with the last "
            f"of {len(ids)} token_ids or the one before it: see routed_experts_start_len"
        )
    num_tokens = min(num_tokens, len(ids) - 1 - first)  # The last one was no input.
    experts = experts[:num_tokens]
    chosen_TLK = experts[:, numbers] if rows == num_layers else experts
    if (largest := chosen_TLK.max(initial=0)) >= dims.num_experts:
        raise ValueError(f"expert {largest}, the model has num_experts={dims.num_experts}")
    known_TL, ordered_TLK = (chosen_TLK >= 0).all(-1), np.sort(chosen_TLK, -1)
    twice_TL = known_TL & (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any(-1)
    for token, layer in np.argwhere(twice_TL)[:1]:
        raise ValueError(
            f"token {first + token} has an expert twice in {dims.layers[layer]}: zeros of a dense "
            "layer, or of a route that was not captured, which -1 marks"
        )
    if rows == num_layers and (experts[:, dense] > 0).any():
        raise ValueError(f"it has experts in layers that are dense in the model: {dense}")
    # One expert is never twice; in enough layers the first one never is by chance.
    rare = 1000 * len(ids) < dims.num_experts ** len(numbers)
    if dims.top_k == 1 and rare and (zeros_T := (chosen_TLK == 0).all((1, 2))).any():
        raise ValueError(
            f"token {first + zeros_T.argmax()} has expert 0 in each layer: zeros of a route that "
            "was not captured, which -1 marks"
        )
    shape = len(ids), len(dims.layers), dims.top_k
    experts_TLK = np.full(shape, dims.num_experts, np.uint16)
    routed_TLK = experts_TLK[first : first + num_tokens, : len(numbers)]
    routed_TLK[known_TL] = chosen_TLK[known_TL]
    return ids.astype(np.int64).tobytes(), experts_TLK


def _decoded(fields: Mapping[str, Any]) -> NDArray[Any]:
    """Returns `routed_experts`, of whatever form, as an array; SGLang's integers without a shape.
    Raises ValueError."""
    experts = fields["routed_experts"]
    if not isinstance(experts, str):
        return np.array(experts)
    content = base64.b64decode(experts, validate=True)
    if content.startswith(np.lib.format.MAGIC_PREFIX):
        return np.asarray(np.load(BytesIO(content)))
    return np.frombuffer(content, fields.get("routed_experts_dtype", "int32"))


def _shaped(
    experts: NDArray[Any], num_tokens: int, top_k: int, num_sparse: int, dense: Sequence[int]
) -> NDArray[Any]:
    """Gives integers the one shape [tokens, layers, top_k] that fits: with or without the last
    token, and of all layers, with zeros in the dense ones, or of those with experts. Raises
    ValueError."""
    tried = {
        (tokens, layers, top_k)
        for tokens in (num_tokens - 1, num_tokens)
        for layers in (num_sparse, num_sparse + len(dense))
        if tokens > 0 and tokens * layers * top_k == experts.size
    }
    arrays = [experts.reshape(shape) for shape in sorted(tried)]
    fit = [x for x in arrays if len(x[0]) == num_sparse or not (x[:, dense] > 0).any()]
    if len(fit) != 1:
        shapes = " and of ".join(str(list(x.shape)) for x in fit) or "no"
        raise ValueError(
            f"{experts.size} integers are routes of {shapes} tokens, layers and top_k for "
            f"{num_tokens} token_ids: give routed_experts as a .npy file, which has its shape"
        )
    return fit[0]

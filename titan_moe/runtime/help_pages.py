"""The page of docs/ that helps with an error."""

import re

_TROUBLE = "troubleshooting.md#"
# The first row whose pattern is found in the line is taken: symptoms, then the key that the line
# is about.
_PAGES = tuple(
    (re.compile(pattern), page)
    for pattern, page in (
        (r"(?i)out of memory\. |OutOfMemoryError", _TROUBLE + "out-of-memory-on-the-gpu"),
        (r"^(rank|node)s? .*\(host .*\): ", _TROUBLE + "a-machine-is-slow-or-wrong"),
        (r"process that reads the data", _TROUBLE + "the-process-that-reads-the-data-ended"),
        (
            r"the process that writes it |after half an hour of waiting",
            _TROUBLE + "the-process-that-writes-a-checkpoint-ended",
        ),
        (r"was killed by SIG", _TROUBLE + "a-rank-was-killed"),
        (r"RDZV_ENDPOINT=\S* is in use", _TROUBLE + "port-in-use"),
        (
            r"the nodes could not meet|cannot join the process",
            _TROUBLE + "the-nodes-could-not-meet",
        ),
        (
            r"Timed out waiting|operation timeout| of \d+ there\)|ranks went different ways",
            _TROUBLE + "hang-or-timeout",
        ),
        (r"no report of a hang", _TROUBLE + "hang-or-timeout"),
        (
            r"is in use by process|was being taken over|\.lock is damaged|another run has taken",
            _TROUBLE + "run-folder-is-in-use",
        ),
        (r"^\d+ GPUs found, but", _TROUBLE + "the-gpus-cannot-be-used"),
        (r"ranks for \d+ GPUs", _TROUBLE + "more-ranks-than-gpus"),
        (r"^this is a command of the checkout", _TROUBLE + "the-wrong-code-runs"),
        (r"^step \d+: loss ", _TROUBLE + "loss-is-nan"),
        (r"^step \d+: a spike|=roll_back|on_spike=", _TROUBLE + "loss-spikes-or-diverges"),
        (r"comm_backend=symmetric: ", _TROUBLE + "symmetric-memory-is-refused"),
        (
            r"enable_async_tensor_parallel=true: (the|torch|CPUs) ",
            _TROUBLE + "asynchronous-tensor-parallelism-is-refused",
        ),
        (r"did not fit into the buffers", _TROUBLE + "capacity-overflow"),
        (
            r"make the file system writable|file system back and start",
            _TROUBLE + "the-disk-is-read-only-or-gone",
        ),
        (r"one folder for all nodes", _TROUBLE + "no-checkpoint-folder-is-shared"),
        (
            r"ranks hold different values|and its copies .* are not the same",
            _TROUBLE + "replicas-differ",
        ),
        (r"^cannot save |free some space| GB are free", _TROUBLE + "disk-full"),
        (r"is of a run with", _TROUBLE + "run-folder-is-another-runs"),
        (
            r"can be repeated from|is beyond the run in|is not what the run read|^the whole model ",
            _TROUBLE + "a-step-cannot-be-made-again",
        ),
        (r"files have changed since", _TROUBLE + "the-data-files-have-changed"),
        (r"longer than \d+ MiB", _TROUBLE + "a-record-is-too-long"),
        (r"max_bad_documents=", _TROUBLE + "too-many-documents-without-a-text"),
        (r"checkpoint's data position", _TROUBLE + "checkpoint-refuses-the-data-position"),
        (r"holds the model only", _TROUBLE + "only-the-model-is-in-the-checkpoint"),
        (r"--max-restarts|^training\.max_seconds", _TROUBLE + "restarts-are-refused"),
        (r"^checkpoint .* does not fit the model", _TROUBLE + "checkpoint-does-not-fit-the-model"),
        (r"reading the dataset .* failed", _TROUBLE + "reading-the-data-failed"),
        (
            r"of the manifest: copy|wrong checksum of shard|was begun with ",
            _TROUBLE + "tokenised-data-is-not-whole",
        ),
        (r"needs the package", _TROUBLE + "a-metrics-service-is-off"),
        (r"text_column=", _TROUBLE + "no-text-column"),
        (r" ran out: ", _TROUBLE + "the-data-ran-out"),
        (r"documents to train on, fewer", _TROUBLE + "too-few-documents"),
        (r"was made with tokenizer", _TROUBLE + "data-was-tokenised-with-another-tokenizer"),
        (r"titan-moe tokenize", _TROUBLE + "no-tokenised-data"),
        (r"tokenizer_path", _TROUBLE + "tokenizer-missing-or-too-large"),
        (r"wants at least as many", _TROUBLE + "too-few-microbatches-for-the-pipeline"),
        (r"is not what \S+ beside it says", _TROUBLE + "hugging-face-folder-is-refused"),
        (r"hf_assets_path|_in_hf|safetensors|config\.json|Hugging Face form", "huggingface.md"),
        (
            r"routing record|of a record|routing_re(cord|play)=",
            _TROUBLE + "a-routing-record-is-refused",
        ),
        (
            r" is (damaged|incomplete|truncated)|no checkpoint of titan_moe",
            _TROUBLE + "checkpoint-is-damaged-or-incomplete",
        ),
        (r"^stages\[", _TROUBLE + "a-training-stage-does-not-fit"),
        (r"no such key", _TROUBLE + "unknown-key"),
        (r"model\.(name|flavor)", "models.md"),
        (r"the sum of their gradients stays", "layouts.md#several-microbatches-a-step"),
        (r"^parallelism|since (context|tensor)_parallel", "layouts.md"),
        (r"^(model\.converters|quantize|compile|training\.mixed_precision)\b", "precision.md"),
        (r"^checkpoint\b", "checkpoints.md"),
        (r"^moe\.", "moe.md"),
        (r"^debug\.(routing|capture)", "is-it-right.md"),
        (r"^(training|validation)\.(blend|dataset)", "recipes/own-text.md"),
        (r"^[a-z_]+\.[a-z_]+ ?=", "configuration.md"),
    )
)


def page_for(line: str) -> str | None:
    """Such as "troubleshooting.md#disk-full", below docs/; None where no page says more."""
    return next((page for pattern, page in _PAGES if pattern.search(line)), None)


def all_pages() -> set[str]:
    """Every page that an error may name."""
    return {page for _, page in _PAGES}

"""The page of docs/ that helps with an error."""

import re

from titan_moe.config.torchtitan import TABLES
from titan_moe.runtime.errors import MACHINE

# Rows of troubleshooting: the first whose pattern is found in the line is taken.
ROWS = (
    ("out-of-memory-on-the-gpu", r"(?i)out of memory(\. |$)|OutOfMemoryError|error: out of memory"),
    (
        "a-machine-is-slow-or-wrong",
        rf"^(rank|node)s? .*\(host .*\): |CUDA error: .*({MACHINE})|NCCL error",
    ),
    ("the-process-that-reads-the-data-ended", r"process that reads the data"),
    (
        "the-process-that-writes-a-checkpoint-ended",
        r"the process that writes it |not on disk after ",
    ),
    ("a-rank-was-killed", r"^rank \d+ was killed by"),
    ("port-in-use", r"RDZV_ENDPOINT=\S* is in use"),
    ("the-nodes-could-not-meet", r"the nodes could not meet|cannot join the process|--endpoint "),
    (
        "hang-or-timeout",
        r"Timed out waiting|operation timeout| of \d+ there\)|ranks went different ways|"
        r"no report of a hang|raise checkpoint\.save_timeout_seconds$",
    ),
    (
        "run-folder-is-in-use",
        r"is in use by process|was being taken over|\.lock is damaged|another run has taken",
    ),
    ("the-gpus-cannot-be-used", r"^\d+ GPUs found, but"),
    ("more-ranks-than-gpus", r"ranks for \d+ GPUs"),
    ("the-wrong-code-runs", r"^this is a command of the checkout"),
    (
        "a-rank-ended-with-a-traceback",
        r"CUDA error: |^rank \d+(: \w+Error:| ended with)|\(traceback in|naming a rank",
    ),
    ("loss-is-nan", r"^step \d+: loss "),
    (
        "loss-spikes-or-diverges",
        r"^step \d+: a spike|=roll_back|on_spike=| goes back to (the run|a whole)",
    ),
    ("symmetric-memory-is-refused", r"comm_backend=symmetric: "),
    (
        "asynchronous-tensor-parallelism-is-refused",
        r"enable_async_tensor_parallel=true: (the|torch|CPUs) ",
    ),
    ("capacity-overflow", r"did not fit into the buffers"),
    ("disk-full", r"free some space| GB are free|No space left|Disk quota"),
    (
        "a-file-or-folder-cannot-be-read-or-written",
        r"make the file system writable|file system back and start|job\.dump_folder=\S* *: |"
        r"^(cannot (load|save|lock|write|read or write|import|export|read the run's)|after saving|"
        r"starting) |"
        r"^writing .* failed|or set HF_HOME",
    ),
    ("no-checkpoint-folder-is-shared", r"one folder for all nodes"),
    ("replicas-differ", r"ranks hold different values|and its copies .* are not the same"),
    ("run-folder-is-another-runs", r"is of a run with"),
    (
        "a-step-cannot-be-made-again",
        r"can be repeated from|is beyond the run in|is not what the run read|^the whole model |"
        r"holds no run|this version of titan_moe does not read",
    ),
    ("the-data-files-have-changed", r"files have changed since"),
    ("a-record-is-too-long", r"longer than \d+ MiB"),
    ("a-file-unpacks-too-far", r" unpacks to |lies outside the file"),
    ("too-many-documents-without-a-text", r"max_bad_documents="),
    ("checkpoint-refuses-the-data-position", r"checkpoint's data position"),
    ("only-the-model-is-in-the-checkpoint", r"holds the model only"),
    ("the-wrong-checkpoint-was-continued", r"^checkpoint\.load_step=\d+: "),
    ("restarts-are-refused", r"--max-restarts|^training\.max_seconds=\d+ stops"),
    ("checkpoint-does-not-fit-the-model", r"^checkpoint .* does not fit the model"),
    (
        "reading-the-data-failed",
        r"reading the dataset .* failed|(hub|a copy of \S+), cannot be opened|was read before and",
    ),
    (
        "tokenised-data-is-not-whole",
        r"of the manifest: copy|wrong checksum of shard|begun with |remove its folder",
    ),
    ("a-metrics-service-is-off", r"^metrics\..* needs the package"),
    ("no-text-column", r"text_column=|no such column|that column of"),
    ("the-data-ran-out", r" ran out: "),
    ("too-few-documents", r"to train on, fewer|too few documents|(holds|has) no document"),
    ("data-was-tokenised-with-another-tokenizer", r"was made with tokenizer"),
    ("no-tokenised-data", r"titan-moe tokenize"),
    ("tokenizer-missing-or-too-large", r"tokenizer_path|names no tokenizer|the tokenizer's ids"),
    ("too-few-microbatches-for-the-pipeline", r"wants at least as many"),
    (
        "a-routing-record-is-refused",
        r"routing_re(cord|play)=|(no|a) routing record |of a record|CRC32|it is of other data|"
        r"is of a model with",
    ),
    (
        "hugging-face-folder-is-refused",
        r"safetensors|config\.json|name a Hugging Face|or is no folder|is not what \S+ beside it|"
        r"does not fit the model|model_type=|^\S+ holds a model of|which model it is of|"
        r"tensors that no file|has no weights|quant_method|weight_block_size|_scale_inv|MXFP4|"
        r"there without|float16 cannot hold|nothing is exported|exists: name another",
    ),
    (
        "checkpoint-is-damaged-or-incomplete",
        r" is (damaged|incomplete|truncated|missing$)|no checkpoint of titan_moe|makes? no sense|"
        r"no state of a generator",
    ),
    ("a-training-stage-does-not-fit", r"^stages\["),
    ("unknown-key", r"no such key"),
)
_PAGES = (
    ("huggingface.md", r"hf_assets_path|_in_hf|Hugging Face form"),
    ("models.md", r"^model\.(name|flavor)"),
    ("extending.md", r": add it (in|to) titan_moe/"),
    ("layouts.md#several-microbatches-a-step", r"the sum of their gradients stays"),
    ("layouts.md", r"^parallelism|since (context|tensor)_parallel"),
    ("precision.md", r"^(model\.converters|quantize|compile|training\.mixed_prec)|recipe_name="),
    ("checkpoints.md", r"^checkpoint\b"),
    ("moe.md", r"^moe\."),
    ("is-it-right.md", r"^debug\.(routing|capture)"),
    ("recipes/own-text.md", r"^(training|validation)\.(blend|dataset)"),
    ("recipes/many-gpus.md", r"--nodes "),
    ("configuration.md", r"^(command line|job\.config_file|stages)\b"),
)
_ALL = tuple(
    (re.compile(pattern), page)
    for pattern, page in (
        *((pattern, f"troubleshooting.md#{row}") for row, pattern in ROWS),
        *((pattern, page) for page, pattern in _PAGES),
    )
)
# The beginning of a line about a key, and of one for which configuration.md is the page that says
# most.
_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+(?= ?[=:(])")
_PLAIN_KEY = re.compile(
    r"(job|profiling|metrics|model|optimizer|lr_scheduler|training|activation_checkpoint|comm|"
    r"validation|debug)\."
)
_COMMANDS = {
    "generate": "recipes/export-and-generate.md",
    "tokenize": "recipes/tokenized-blend.md",
    "memory": "layouts.md#memory",
    "hf": "huggingface.md",
    "verify": "is-it-right.md",
    "report": "is-it-right.md#reports",
    "report profile": "troubleshooting.md#steps-are-slow",
    "report hang": "troubleshooting.md#hang-or-timeout",
    "report why": "is-it-right.md#why-did-this-step-spike",
    "simulate": "layouts.md",
    "simulate collectives": "is-it-right.md#collectives-that-match",
}


def page_for(line: str, command: str = "") -> str | None:
    """Such as "troubleshooting.md#disk-full", below docs/; None where no page says more.

    Args:
        command: of titan-moe, in whose words `line` may be; its page is named where none is about
            the line itself.
    """
    found = _KEY.match(line)
    key = found[0] if found else ""
    table, _, name = key.rpartition(".")
    if name in TABLES.get(table, {}) and TABLES[table][name].fate == "refused":
        return f"coming-from-torchtitan.md#{table}"
    if page := next((page for pattern, page in _ALL if pattern.search(line)), None):
        return page
    if found and _PLAIN_KEY.match(line):
        return f"configuration.md#{key}"
    return _COMMANDS.get(command) or _COMMANDS.get(command.split(" ")[0])


def all_pages() -> set[str]:
    """Every page that an error may name, but for those of keys."""
    return {page for _, page in _ALL} | set(_COMMANDS.values())

"""Check a run's configuration and data in one plain process, before any rank starts.

    titan-moe check --config FILE --ranks 16 --nodes 2 --training.steps 20
    titan-moe check outputs/first/checkpoint

Opens every source of documents (training, blend, validation) as a run does, reads up to 64 of its
documents, and refuses a column that is not there or holds no text, and fewer documents than a
global batch. Large files are converted first and kept in the cache of `datasets`, where the run
finds them. Where a source is on the Hugging Face hub, without a local copy, no data is read.
run_train.sh checks all but these contents, and of local copies these too, before it starts a rank.

The folder's checkpoint, or the weights to begin with, must be of this model, and the position in
the data of these files, sequences and batches: names, shapes and positions are read, no tensor.

Prints the number of ranks of a machine and the run's folder, what each training stage changes, the
parameters, the documents and tokens of each source, what has no effect, and what only ranks can
know; all that is wrong otherwise, a line each.

A folder instead of a configuration is read whole: a checkpoint, all checkpoints of a run, an
export, or a tokenised copy. Prints what was read, and a line for every folder that is not as it was
written.

Exit codes: 0; 1 a folder that is damaged; 2 a configuration or
data that cannot be trained on.
"""

import argparse
import os

from titan_moe.cli.command import Answer, Command, add_ranks, job_arguments, path_of, positive

_LEFT = (
    "left to the ranks: GPUs and their memory (titan-moe memory), checksums and the optimizer of a "
    "checkpoint, and what other machines find in these folders"
)
"""The last line: the rest, which only ranks can know."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, says="ranks of the run; default: on each node the GPUs found, else 2")
    parser.add_argument("--nodes", type=positive, default=1, help="machines; default: 1")


def run(options: argparse.Namespace) -> Answer:
    if options.config is None and options.overrides and options.overrides[0][:1] != "-":
        return _audit(options.overrides)
    from titan_moe.config.training_stages import training_stage_lines
    from titan_moe.data.check import sample_data
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total
    from titan_moe.prepare.job import check_all
    from titan_moe.runtime.launch import default_ranks

    nodes = options.nodes
    ranks = options.ranks or nodes * default_ranks(os.environ)
    job, notes = check_all(job_arguments(options), ranks, nodes, os.environ)
    found = {"ranks_per_node": ranks // nodes, "dump_folder": job.job.dump_folder}
    line = "nothing is wrong: {ranks_per_node} rank(s) on each machine, output in {dump_folder}"
    tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
    samples = sample_data(job.training, job.validation, tokenizer, seed=job.debug.seed)
    model = model_of_job(job.model)
    bos = str(tokenizer.prepend_bos).lower()
    samples.append(f"documents: prepend_bos={bos}, append_eos={tokenizer.append_eos!r}")
    parameters, active = sum(total(model)), round(total(model).active(model))
    found |= {"parameters": parameters, "active_parameters": active}
    says = f"{parameters:,} parameters, {active:,} active"
    stages = training_stage_lines(job)
    found |= {"notes": notes, "stages": stages, "data": samples}
    return Answer(found, [line.format(**found), *stages, says, *samples, *notes, _LEFT])


def _audit(names: list[str]) -> Answer:
    from titan_moe.cli.audit import audit

    found = audit(*map(path_of, names))
    lines = [f"{how}: {line}" for how in found for line in found[how]]
    return Answer(found, lines, exit_code=1 if found["damaged"] else 0)


COMMAND = Command(run, add_arguments, overrides=True, ends_at_once=True)

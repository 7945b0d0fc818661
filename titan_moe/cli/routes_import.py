"""Make a routing record of the routed_experts that vLLM or SGLang returned.

    titan-moe routes import responses.jsonl --config FILE --out outputs/record

Each line of responses.jsonl is a JSON object, such as, of `output` of vLLM's LLM.generate,

    {"token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids],
     "routed_experts": output.outputs[0].routed_experts.tolist()}

and of the `answer` of SGLang's /generate to a request with return_routed_experts

    {"token_ids": [*prompt_ids, *answer["output_ids"]],
     "routed_experts": answer["meta_info"]["routed_experts"]}

Where vLLM returns prompt_routed_experts apart, put these first. titan_moe/debug/engine_routes.py
has all forms. FILE, --ranks and keys are those of the training that is to follow the record with
--debug.routing_replay: its data are read for all of its steps. All routes are kept in memory.

Exit codes: 0; 1 the record cannot be written, or the data end before the last step; 2 responses of
another model or of other data.
"""

import argparse
import os

from titan_moe.cli.command import Answer, Command, add_out, add_ranks, job_arguments, path_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("responses", metavar="RESPONSES", type=path_of)
    add_out(parser, default=None, says="the record to write; it must not exist", required=True)
    add_ranks(parser, says="ranks of the training; default: the GPUs found, else 2")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.debug.engine_routes import import_routes
    from titan_moe.prepare.job import prepare
    from titan_moe.runtime.launch import default_ranks

    ranks = options.ranks or default_ranks(os.environ)
    job, model, _ = prepare(job_arguments(options), ranks, os.environ)
    path, folder = options.responses, options.out
    responses, routed = import_routes(job, model, path, folder)
    total, missing = len(responses.experts_TLK), sorted(responses.missing.values())
    says = f"{folder}: routes of {routed:,} tokens in the documents of steps 1 to "
    whole = f"{total - len(missing):,} of {total:,} responses are whole in a document"
    lines = [f"{says}{job.training.steps}; {whole}"]
    if missing:
        lines.append(f"{path}:{missing[0]} and {len(missing) - 1:,} more are whole in no document")
    found = {"routed_tokens": routed, "responses": total, "not_whole_in_any": missing}
    return Answer({"folder": str(folder), **found}, lines)


COMMAND = Command(run, add_arguments, overrides=True)

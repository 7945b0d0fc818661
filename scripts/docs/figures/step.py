"""One optimizer step as a walk through files, in the order in which they are reached."""

from scripts.docs.figures.svg import Drawing

# Depth of the call, file, what happens there. tests/unit/scripts/test_docs.py looks for the files.
WALK = (
    (0, "run_train.sh", "starts one process for each GPU"),
    (1, "titan_moe/train.py", "checks the configuration, then imports torch"),
    (1, "titan_moe/trainer.py", "the loop; what follows is one step of it"),
    (2, "titan_moe/data/loader.py", "the step's sequences, read ahead by a thread"),
    (2, "titan_moe/optim/schedules.py", "the step's learning rate"),
    (2, "titan_moe/train_step.py", "the gradient rule in code"),
    (3, "titan_moe/distributed/execution.py", "forward and backward of each microbatch"),
    (4, "titan_moe/models/decoder.py", "embedding, blocks, norm"),
    (5, "titan_moe/models/attention.py", "GQA or MLA"),
    (5, "titan_moe/moe/layer.py", "router, dispatch, experts"),
    (4, "titan_moe/models/output.py", "logits and loss, in chunks of tokens"),
    (3, "titan_moe/distributed/tensor_parallel.py", "sums of what tp ranks share"),
    (3, "titan_moe/distributed/tied_weights.py", "sums over copies of one parameter"),
    (3, "titan_moe/distributed/collectives.py", "norm, loss, targets, counts: one all-reduce"),
    (3, "titan_moe/distributed/grad_norm.py", "clips, and divides by the number of targets"),
    (3, "titan_moe/moe/router.py", "moves the routing bias"),
    (3, "titan_moe/optim/adam.py", "updates this rank's part of the parameters"),
    (2, "titan_moe/metrics/run_log.py", "console, metrics.jsonl, curves"),
    (2, "titan_moe/checkpoint/checkpointer.py", "saves, every so many steps"),
)
_TOP, _ROW, _INDENT, _WORDS = 50, 30, 22, 452


def draw() -> str:
    """A row for each file, indented by the depth of the call."""
    height = _TOP + _ROW * len(WALK) + 14
    what = "One optimizer step as a walk through files, from run_train.sh to the checkpoint"
    drawing = Drawing(800, height, what)
    drawing.text(20, 30, "file", bold=True)
    drawing.text(_WORDS, 30, "what happens there", bold=True)
    for number, (depth, file, says) in enumerate(WALK):
        y = _TOP + _ROW * number
        x = 20 + _INDENT * depth
        if depth:
            above = _parent(number)
            start = _TOP + _ROW * above + 24
            drawing.line([(x - 12, start), (x - 12, y + 12), (x - 2, y + 12)], color="grid")
        edge = "one" if file == "titan_moe/train_step.py" else "grid"
        drawing.box(x, y, 7.4 * len(file) + 14, 24, edge=edge, radius=4)
        drawing.text(x + 7, y + 16.5, file, size=12, code=True)
        drawing.text(_WORDS, y + 16.5, says)
    return drawing.render()


def _parent(number: int) -> int:
    """The row that called this one."""
    depth = WALK[number][0]
    return max(at for at in range(number) if WALK[at][0] == depth - 1)

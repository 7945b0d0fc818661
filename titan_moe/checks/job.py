"""All rules across tables, on a job and each of its training stages.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `parallelism` says so. A remedy is tried before
it is named: it mends its mistake and makes no other.
"""

from collections.abc import Sequence
from dataclasses import replace

from titan_moe.checks import data, experts, parallelism, run
from titan_moe.checks.base import Rule, Run, either, flat
from titan_moe.config.errors import Change, Mistake
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import nested, resolve
from titan_moe.config.training_stages import TRAINING_KEYS, training_stage_name, training_stages
from titan_moe.models.config import ModelConfig

_RULES: list[Rule] = [*parallelism.RULES, *experts.RULES, *data.RULES, *run.RULES]
_CHANGING = (
    "parallelism.",
    "activation_checkpoint.",
    *(f"training.{key}" for key in TRAINING_KEYS),
)
"""Keys, or how keys begin, of what may change while a run trains."""


def check(
    job: JobConfig, model: ModelConfig, world_size: int, further: Sequence[Rule] = ()
) -> list[str]:
    """Returns one line for every broken rule, of the job and of each of its training stages.

    Args:
        further: rules on the whole job beside those of this package.
    """
    lines = _broken(job, model, world_size, further)
    said = set(lines)
    whole = job if job.parallelism.shard_degree(world_size) is None else resolve(job, world_size)
    for number, (first, stage) in enumerate(training_stages(whole)[1:]):
        if first > job.training.steps:  # It never begins: a note.
            continue
        broken = [line for line in _broken(stage, model, world_size) if line not in said]
        lines += [f"{training_stage_name(job, number)}: {line}" for line in broken]
        said |= set(broken)
    return lines


def breaks_rule(job: JobConfig, model: ModelConfig, world_size: int) -> bool:
    """Returns whether a rule is broken, without a word on how to mend it: for those that ask of
    thousands of layouts. Patterns of names, which depend on no layout, are not looked at."""
    one = Run(job, model, world_size)
    return any(True for rule in _RULES if rule is not run.names for _ in rule(one))


def check_reshard(
    before: JobConfig, job: JobConfig, model: ModelConfig, world_size: int
) -> list[str]:
    """Checks the job that a run of `before`, resolved, is to continue as without a restart.

    Returns the lines of `check`; without any, one for each key that cannot change so.
    """
    if lines := check(job, model, world_size):
        return lines
    old, new = flat(before), flat(resolve(job, world_size))
    return [
        f"{key}={new[key]}, and the run has {value}: set it to that"
        for key, value in old.items()
        if new[key] != value and not key.startswith(_CHANGING)
    ]


def _broken(
    job: JobConfig, model: ModelConfig, world_size: int, further: Sequence[Rule] = ()
) -> list[str]:
    run, rules = Run(job, model, world_size), [*_RULES, *further]
    found = {rule: list(rule(run)) for rule in rules}
    numbers = [len(lines) for lines in found.values()]

    def mends(rule: Rule, change: Change) -> bool:
        changed = _changed(run, change)
        now = [len(list(each(changed))) for each in rules]
        own = rules.index(rule)
        return now[own] < numbers[own] and all(map(int.__le__, now, numbers))

    def line(rule: Rule, mistake: str | Mistake) -> str:
        if isinstance(mistake, str):
            return mistake
        firsts = [
            next((change for change in group if mends(rule, change)), None)
            for group in mistake.remedies
        ]
        works = [change for change in firsts if change is not None]
        remedies = _in_words(mistake.line, works) or mistake.otherwise, mistake.also
        return f"{mistake.line}: {', or '.join(filter(None, remedies))}"

    return [line(rule, mistake) for rule in rules for mistake in found[rule]]


def _changed(run: Run, change: Change) -> Run:
    """Returns a run with other values of some keys."""
    tables = nested({key: value for key, value in change.items() if key != "ranks"})
    ranks = change.get("ranks", run.world_size)
    return replace(run, job=run.job.with_values(**tables), world_size=ranks)


def _in_words(line: str, changes: Sequence[Change]) -> str:
    """Returns changes as remedies, the first one first; one key's values stand together."""
    key = line.partition("=")[0]
    values = [change[key] for change in changes if change.keys() == {key}]
    remedies = []
    for change in changes:
        if change.keys() == {key}:
            remedies.append(f"choose {either(values)}")
        elif "ranks" in change:
            remedies.append(f"start it with NGPU={change['ranks']} (--ranks {change['ranks']})")
        else:
            remedies.append("set " + " and ".join(f"{k}={value}" for k, value in change.items()))
    return ", or ".join(dict.fromkeys(remedies))

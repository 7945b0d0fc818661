"""JobConfig: the sum of the tables."""

from titan_moe.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Moe,
    Optimizer,
    Parallelism,
    Profiling,
    Section,
    Training,
    Validation,
)


class JobConfig(Section):
    """A whole run, resolved and frozen."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    moe: Moe = Moe()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()

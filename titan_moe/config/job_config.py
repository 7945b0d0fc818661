"""JobConfig: the sum of the tables."""

from titan_moe.config.layout import ActivationCheckpoint, Compile, Parallelism
from titan_moe.config.observation import Debug, Metrics, Profiling
from titan_moe.config.optimization import LRScheduler, Optimizer
from titan_moe.config.quantize import Quantize
from titan_moe.config.section import Section
from titan_moe.config.sections import Checkpoint, Comm, Job, Model, Moe, Training, Validation


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
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()

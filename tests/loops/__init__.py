"""Training loops as people write them, each written once: it runs in plain torch in one process, and on ranks.

A loop is a function of a `Run`, which has the few calls that differ. What it `see`s (losses, norms, predictions) and
the weights that it ends with must be the same everywhere.
"""

from tests.loops import (  # noqa: F401
    assigned,
    calls,
    contrastive,
    derivatives,
    dtypes,
    evaluation,
    forms,
    handles,
    optimizers,
    parallel_before,
    phases,
    returned,
    several_loaders,
    static_graphs,
    steps,
    tasks,
    vectors,
    windows,
)
from tests.loops.run import LOOPS as LOOPS
from tests.loops.run import RanksRun as RanksRun
from tests.loops.run import Run as Run
from tests.loops.run import config_of as config_of
from tests.loops.run import on_ranks as on_ranks
from tests.loops.run import plain as plain

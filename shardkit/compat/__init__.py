"""Accelerate's API on top of shardkit, for scripts and libraries that were written for Accelerate.

    from shardkit.compat import Accelerator          instead of `from accelerate import Accelerator`
    from shardkit.compat.utils import set_seed       and so on, for every module of accelerate
    shardkit launch --as-accelerate train.py         without changes to the script

This package only translates names and arguments. The functionality is in `shardkit.runtime` and below, which do not
depend on this package.

names           names, the tables; modules, which looks them up; touched, what a run uses of them; startup, of a launch
the class       facade; members, the table of its members; attributes, given, window; sequences, trainers
other classes   states, plugins, mesh_sizes, handlers, kinds, constants, loaders, schedulers, trackers, local_sgd
functions       operations, machine, memory, models, forward_hooks, trainer_files, trials
differences     differences, with the switch for Accelerate's own behaviour
a script read   migrate; scan, for names; schedule_lengths; one_rank, for calls of one rank; and for all of them
                bindings, branches, rank_conditions
the docs page   reference
"""

import sys
from typing import Any

from shardkit.compat import modules

__version__ = modules.VERSION
modules.standing_in_for("shardkit.compat")


def __getattr__(name: str) -> Any:
    if name == "__path__":
        raise AttributeError(name)
    return modules.look_up("shardkit.compat", "", name, sys._getframe(1))


def __dir__() -> list[str]:
    return modules.known("")

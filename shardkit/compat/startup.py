"""Runs before and after a script with `shardkit launch --as-accelerate`. The launcher's ranks import it by name."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit import env
from shardkit.compat import modules
from shardkit.compat.touched import TOUCHED, report


@contextmanager
def around_script(log_dir: Path) -> Iterator[None]:
    """A context in which `import accelerate` imports shardkit.compat. At its end, rank 0 prints a short report on the
    names that were used, and writes the complete one to `log_dir`/accelerate.txt."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "accelerate"]
    for name in loaded:  # usually none before the script; a debugger may have imported it
        del sys.modules[name]
    modules.standing_in_for("accelerate")
    TOUCHED.is_on = True
    try:
        yield
    finally:
        TOUCHED.is_on = False
        ranks = env.ranks()
        if (ranks is None or ranks.rank == 0) and TOUCHED.is_anything:
            print(report(TOUCHED), file=sys.stderr)
            try:
                (log_dir / "accelerate.txt").write_text(report(TOUCHED, limit=None) + "\n")
            except OSError as error:  # as any other log: the run's result does not depend on it
                print(f"warning: {log_dir}/accelerate.txt cannot be written ({error.strerror}).", file=sys.stderr)

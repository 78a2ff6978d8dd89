"""Before and after a script that runs with `shardkit launch --as-accelerate`; the launcher's ranks call it by name."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit import env
from shardkit.compat import modules
from shardkit.compat.touched import TOUCHED, report


@contextmanager
def around_script(log_dir: Path) -> Iterator[None]:
    """Inside, accelerate is shardkit.compat, whether it is installed or not; afterwards rank 0 says what was touched,
    on its screen in short and in `log_dir`/accelerate.txt."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "accelerate"]
    for name in loaded:  # nobody has, before the script; a debugger may
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
            (log_dir / "accelerate.txt").write_text(report(TOUCHED, limit=None) + "\n")

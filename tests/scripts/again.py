"""again.py FOLDER TIMES: fails TIMES times, then succeeds; a checkpoint is complete at the second try. Each try leaves
a file with what it was to resume."""

import os
import re
import sys
from pathlib import Path

from shardkit.distributed import progress

folder, times = Path(sys.argv[1]), int(sys.argv[2])
if os.environ["RANK"] == "0":
    tries = len(list(folder.glob("try-*")))
    resume = re.findall("resume: (.*)", Path(os.environ["SHARDKIT_RESOLVED_CONFIG"]).read_text())
    (folder / f"try-{tries}").write_text("".join(resume) or "never")  # the default is not written out
    if tries == 1:
        progress.committed(40)
    if tries < times:
        raise ValueError(f"loss is nan at step {50 + tries}")

"""`python -m shardkit ...` and `python shardkit/__main__.py ...` are the same program as `shardkit ...`."""

import os
import sys

if __name__ == "__main__":
    # Python has put first the working folder (-m) or this file's, and would import a json.py there in place of its own;
    # `shardkit` has the folder of programs there. With -m Python has imported a `types` by now, so jobs run the file.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # -P and -I put none there
        sys.path[0] = os.path.dirname(sys.executable)
    if (above := os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) not in sys.path:
        sys.path.append(above)

from shardkit.cli.main import main

if __name__ == "__main__":
    main()

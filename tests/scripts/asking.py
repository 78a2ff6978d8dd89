"""Rank 0 asks for a name, then stops in a debugger; the others find their input empty."""

import os
import sys

if os.environ["RANK"] == "0":
    name = input("name? ")
    print("hello", name)
    breakpoint()
    print("after the breakpoint")
else:
    assert sys.stdin.read() == ""

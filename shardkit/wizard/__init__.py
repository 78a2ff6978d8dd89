"""`shardkit config`: questions as data, a loop that asks them, review and save.

a session      run, loop, review; answers, draft; commands, which it prints at the end
the questions  questions, the table; question, situation; conditions, options, defaults, readers
with a model   numbers
on the screen  prompter, plain lines; inplace
the docs page  reference
"""

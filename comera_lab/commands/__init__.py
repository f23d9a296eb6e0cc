"""The subcommands of `comera-lab`, one module each: `add(commands)` declares it, `run(options)` does it.

A module imports what its command needs when it runs, so that `comera-lab --help` is quick.
"""

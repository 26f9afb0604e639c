"""``medfed prepare`` from a clone, without installing: see medfed/commands/prepare.py."""

from medfed.commands.prepare import main

if __name__ == "__main__":
    main()

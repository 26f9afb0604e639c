"""``medfed evaluate`` from a clone, without installing: see medfed/commands/evaluate.py."""

from medfed.commands.evaluate import main

if __name__ == "__main__":
    main()

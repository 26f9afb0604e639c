"""``medfed compare`` from a clone, without installing: see medfed/commands/compare.py."""

from medfed.commands.compare import main

if __name__ == "__main__":
    main()

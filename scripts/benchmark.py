"""``medfed benchmark`` from a clone, without installing: see medfed/commands/benchmark.py."""

from medfed.commands.benchmark import main

if __name__ == "__main__":
    main()

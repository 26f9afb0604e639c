"""``medfed train`` from a clone, without installing: see medfed/commands/train.py."""

from medfed.commands.train import main

if __name__ == "__main__":
    main()

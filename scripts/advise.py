"""``medfed advise`` from a clone, without installing: see medfed/commands/advise.py."""

from medfed.commands.advise import main

if __name__ == "__main__":
    main()

"""``medfed report`` from a clone, without installing: see medfed/commands/report.py."""

from medfed.commands.report import main

if __name__ == "__main__":
    main()

"""``medfed audit`` from a clone, without installing: see medfed/commands/audit.py."""

from medfed.commands.audit import main

if __name__ == "__main__":
    main()
